"""Linear layers, and what their hooks see: inputs a_t and cotangents c_t at the outputs.

A layer is a module whose weight has two dims and which computes `y = W a` for every token of its
input (`torch.nn.Linear`, the `Conv1D` of transformers, whose weight is transposed, and Megatron's
parallel layers), so that the gradient of W is `sum_t c_t a_t'`. Whether it is one is not taken on
trust: `ds_hessian.operators.kronecker.passes` compares that sum with the job's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.hooks import beside, on_cotangents
from ds_hessian.backends.kinks import argument
from ds_hessian.backends.protocol import Backend
from ds_hessian.backends.restricted import Choice, chosen
from ds_hessian.backends.weights import Weight
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.operators.kronecker.planned import owners
from ds_hessian.ranks import union

TRANSPOSED = ("Conv1D",)
"""Class names of layers that compute `y = a W`; of transformers (pytorch_utils.py)."""

Note = Callable[["Layer", Tensor, Tensor, bool], None]
"""Takes a layer, inputs `(T, n)` and cotangents `(T, m)`, fp32, of one call of one micro-batch, and
whether the gradient of the weight has this call in it."""


@dataclass(frozen=True)
class Layer:
    """One linear layer.

    Attributes:
        name: The checkpoint name of its weight.
        shape: `(m, n)`: outputs and inputs, over all tensor-parallel ranks.
        transposed: Whether the weight is stored as `(n, m)`.
        weight: The weight on this rank; None on ranks that do not have it (other stages of a
            pipeline).
        owner: The rank that keeps its factors.
    """

    name: str
    shape: tuple[int, int]
    weight: Weight | None
    transposed: bool
    owner: int

    @property
    def counts(self) -> bool:
        """Whether this rank adds what it sees to the sums of all ranks."""
        return self.weight is not None and self.weight.counts

    @property
    def sequence(self) -> dist.ProcessGroup | None:
        """The ranks that have other tokens of this rank's micro-batches."""
        return None if self.weight is None else self.weight.sequence

    @property
    def parts(self) -> int:
        """The number of ranks that have tokens of a micro-batch each."""
        return 1 if self.sequence is None else dist.get_world_size(self.sequence)

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a weight (or a vector of its shape) `(m, n)`, or the reverse."""
        return weight.T if self.transposed else weight


def find_layers(backend: Backend, choice: Choice | None) -> tuple[list[Layer], dict[str, str]]:
    """Return the linear layers of a job, and the other weights of two dims or more with the reason.

    Args:
        backend: The job.
        choice: Names or a regular expression of their weights; None for all.

    Raises:
        ConfigError: nothing is chosen.
        UnsupportedError: a weight that was asked for by its name is of no such layer, or none is.

    Collective.
    """
    shapes, names = _shapes(backend), _candidates(backend, choice)
    weights = {weight.name: weight for weight in backend.weights()}
    mine = {(n, (_no_layer(w), _transposed(w.module))) for n, w in weights.items()}
    # Tied to an embedding of another stage, it is one.
    everywhere = dict(sorted(union(mine, backend.space.device)))
    kept, others = dict[str, tuple[tuple[int, int], bool]](), dict[str, str]()
    for name in names:
        reason, transposed = everywhere.get(name, ("it is no whole weight of a module", False))
        dims = len(shapes[name])
        if dims != 2:
            reason = f"it has {dims} dim{'s' * (dims != 1)}"
        if reason:
            others[name] = reason
            continue
        rows, columns = shapes[name]
        kept[name] = ((columns, rows) if transposed else (rows, columns)), transposed
    whose = owners([shape for shape, _ in kept.values()], backend.space.world_size)
    layers = [
        Layer(name, shape, weights.get(name), transposed, owner)
        for (name, (shape, transposed)), owner in zip(kept.items(), whose, strict=True)
    ]
    if not layers or (others and named(choice)):
        text = "; ".join(f"{name}: {reason}" for name, reason in list(others.items())[:8])
        raise UnsupportedError(
            "ds_hessian does not support Kronecker factors of "
            f"{text or 'parameters of which none is a weight of two dims'}"
        )
    return layers, others


def _shapes(backend: Backend) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that have elements, by name."""
    return {name: s for name, s in backend.parameters if s.numel()}


def _candidates(backend: Backend, choice: Choice | None) -> list[str]:
    """Return the names that are chosen: of two dims or more, unless asked for one by one."""
    shapes = _shapes(backend)
    names = list(shapes) if choice is None else chosen(list(shapes), choice)
    return names if named(choice) else [name for name in names if len(shapes[name]) >= 2]


def foreseen_shapes(backend: Backend, choice: Choice | None) -> list[tuple[int, int]]:
    """Return the outputs and inputs of the layers that `find_layers` will find, as far as this rank
    knows: weights of which it has no part count as layers. Not collective.
    """
    shapes = _shapes(backend)
    weights = {weight.name: weight for weight in backend.weights()}
    found = []
    for name in (n for n in _candidates(backend, choice) if len(shapes[n]) == 2):
        rows, columns = shapes[name]
        weight = weights.get(name)
        if weight is None or not _no_layer(weight):
            turned = weight is not None and _transposed(weight.module)
            found.append((columns, rows) if turned else (rows, columns))
    return found


def named(choice: Choice | None) -> bool:
    """Return whether layers were asked for by their names, so that none may be left out."""
    return choice is not None and not isinstance(choice, str)


def _transposed(module: nn.Module) -> bool:
    return type(module).__name__ in TRANSPOSED


def _no_layer(weight: Weight) -> str:
    """Return why a weight is that of no linear layer; nothing if it may be one."""
    embeds = "Embedding" in type(weight.module).__name__
    return weight.apart or ("it is an embedding" if embeds else "")


@contextmanager
def listening(layers: Sequence[Layer], note: Note, spared: Collection[str] = ()) -> Iterator[None]:
    """Let passes in the body report what the layers see; the hooks are gone afterwards.

    Args:
        layers: The layers.
        note: Is told of each call.
        spared: Names of layers of whose weights no gradient is needed. Autograd then forms none,
            which spares a third of a gradient, but of calls whose inputs have no graph.
    """
    with ExitStack() as stack:
        for layer in layers:
            if layer.weight is not None:
                hooks, module = _Hooks(layer, note, layer.name in spared), layer.weight.module
                stack.callback(hooks.restore)
                handles = [
                    module.register_forward_pre_hook(beside(hooks.before), with_kwargs=True),
                    module.register_forward_hook(beside(hooks.after), with_kwargs=True),
                    # Also where the forward raises, as a recomputation does that stops early.
                    module.register_forward_hook(beside(hooks.restore), always_call=True),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
        yield


class _Hooks:
    """What one layer's hooks do."""

    def __init__(self, layer: Layer, note: Note, spares: bool) -> None:
        self.layer, self.note, self.spares = layer, note, spares
        self._spared: nn.Parameter | None = None  # the weight, in a call without its gradient

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the call have no graph of the weight; autograd needs another for the backward."""
        a = argument(args, kwargs, 0, "input")
        if not (self.spares and isinstance(a, Tensor) and a.requires_grad):
            return
        weight = module._parameters.get("weight")
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            weight.requires_grad_(False)
            self._spared = weight

    def _may_be_one(self, x: Tensor, y: Tensor) -> bool:
        """Return whether inputs and outputs have the layer's sizes, which ranks may share."""
        m, n = self.layer.shape
        sizes = tuple(t.shape[-1] if t.ndim else 0 for t in (y, x))
        return _group(self.layer) is not None or sizes == (m, n)

    def restore(self, *_: object) -> None:
        """Let the weight have gradients as before."""
        if self._spared is not None:
            self._spared.requires_grad_(True)
            self._spared = None

    def after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Report inputs and cotangents of the call in the backward, if they can be a layer's."""
        x = argument(args, kwargs, 0, "input")
        y = output[0] if isinstance(output, (tuple, list)) else output
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and self._may_be_one(x, y)):
            return  # its gradient will tell
        if not (torch.is_grad_enabled() and y.requires_grad):
            return
        a, counts = x.detach(), self._spared is None

        def backward(c: Tensor) -> None:
            inputs, cotangents = _whole(self.layer, a, c.detach())
            self.note(self.layer, inputs, cotangents, counts)

        y.register_hook(on_cotangents(backward))


def _whole(layer: Layer, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return inputs `(T, n)` and cotangents `(T, m)` in fp32, over all tensor-parallel ranks.

    Raises:
        ConfigError: a size is not that of the layer, nor a part of it that the ranks divide.
    """
    assert layer.weight is not None
    w, (m, n) = layer.weight, layer.shape
    inputs = _columns(layer, a, n, w.columns, "inputs")
    cotangents = _columns(layer, c, m, w.rows, "outputs")
    if len(inputs) != len(cotangents):  # sequence parallelism: one of them has a part of the tokens
        tokens = max(len(inputs), len(cotangents))
        inputs, cotangents = (_rows(layer, x, tokens) for x in (inputs, cotangents))
    return inputs, cotangents


def _columns(layer: Layer, x: Tensor, size: int, index: Tensor | None, what: str) -> Tensor:
    """Return `(T, size)` from the part of it that this rank has, in the order of the whole."""
    flat, ranks = x.reshape(-1, x.shape[-1]).float(), _ranks(layer)
    if flat.shape[1] == size:
        return flat
    if index is None or flat.shape[1] * ranks != size or len(index) != flat.shape[1]:
        raise ConfigError(
            f"{layer.name} has {size} {what}, which its {ranks} tensor-parallel ranks must "
            f"divide evenly; this rank sees {flat.shape[1]}"
        )
    order = torch.cat(_gathered(layer, index.to(x.device)))
    whole = flat.new_zeros(len(flat), size)
    whole[:, order] = torch.cat(_gathered(layer, flat), 1)
    return whole


def _rows(layer: Layer, x: Tensor, tokens: int) -> Tensor:
    if len(x) == tokens:
        return x
    if len(x) * _ranks(layer) != tokens:
        raise ConfigError(
            f"{layer.name} sees {tokens} tokens, which its {_ranks(layer)} tensor-parallel ranks "
            f"must divide evenly; this rank sees {len(x)}"
        )
    return torch.cat(_gathered(layer, x))


def _group(layer: Layer) -> dist.ProcessGroup | None:
    return None if layer.weight is None else layer.weight.group


def _ranks(layer: Layer) -> int:
    group = _group(layer)
    return 1 if group is None else dist.get_world_size(group)


def _gathered(layer: Layer, x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(_ranks(layer))]
    dist.all_gather(parts, x.contiguous(), group=_group(layer))
    return parts
