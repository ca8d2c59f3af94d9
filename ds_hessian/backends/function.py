"""The model as one fixed function of its weights: discrete choices are held, dropout is off.

Routers of experts choose by `topk`: a function with jumps, of which a difference of gradients at
two points measures the jumps. Here each choice that is made at the weights is recorded, for each
micro-batch, and made again wherever else the function is evaluated; the values are gathered at the
recorded indices, so that derivatives pass through them. The Hessian is then that of the smooth
piece of the loss on which the weights lie, which is what a double backward computes.

Choices are intercepted as torch's functions are called (`torch.topk`, `Tensor.argmax`, ...), in any
model and loss. The i-th choice of a micro-batch's forward is the i-th that was recorded; a forward
without gradients leaves out what is computed with gradients only (losses of routers), so there the
next one counts that the same line of the model has made. In a backward, a choice is made again
where activations are recomputed; it is recognised by its input, since schedules of pipelines have
several micro-batches and layers under way.

An embedding with a `padding_idx` reads that row, and gives it no gradient: to training it is a
constant. It is held as well, at its value at the weights, so that gradients at displaced weights
are those of one function, masked or not, and where an output's row is tied to it.

Functions with kinks (ReLU, say) are evaluated as they are; but it is noted that the model, or its
loss, calls them (`ds_hessian.backends.kinks`).

Memory: the recorded indices, in one byte for each chosen expert of at most 256.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_hessian.backends import kinks
from ds_hessian.backends.kinks import argument
from ds_hessian.errors import MeasurementError, UnsupportedError

P = ParamSpec("P")
R = TypeVar("R")

DIMS = {"topk": 2, "kthvalue": 2, "sort": 1, "argsort": 1, "max": 1, "min": 1}
DIMS |= {"argmax": 1, "argmin": 1, "multinomial": 9}
"""Functions that return indices, and the position of their argument `dim` (beyond all others for
`multinomial`, which has none and chooses along the last)."""
SETS = ("topk", "multinomial")
"""Those whose indices are a set: another order of them is no other choice."""
ORDERS = ("sort", "argsort")
"""Those that return a whole permutation."""
EXTREMES = ("max", "min", "kthvalue")
"""Those that are called for a value, as to shift logits, as often as for a choice: not counted."""
INDICES = ("argsort", "argmax", "argmin", "multinomial")
"""Those that return nothing but indices."""

_DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
PROBABILITIES: dict[str, tuple[int, str]] = {
    **{name + suffix: (1, "p") for name in _DROPOUTS for suffix in ("", "_")},
    **{name: (1, "p") for name in ("dropout1d", "dropout2d", "dropout3d", "native_dropout")},
    "scaled_dot_product_attention": (4, "dropout_p"),
}
"""Functions that drop, with position and name of their probability."""

COMPOSED = {
    Tensor.backward,
    torch.autograd.backward,
    torch.autograd.grad,
    functional.gumbel_softmax,
    functional.multi_head_attention_forward,
}
"""Functions in Python in which others are called that are to be seen. While torch calls what it has
handed to a mode, the mode is off."""

SAME = 1e-2
"""Relative difference of the inputs of a choice and of its recomputation, which run on the same
bits; other than by kernels whose sums have no fixed order, in bf16 at most."""

_TORCH = str(Path(torch.__file__).parent)

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class _Choice:
    """A choice made at the weights.

    Attributes:
        name: The function that chose.
        shape: The shape of its input.
        dim: The dimension along which it chose; None for the whole tensor.
        indices: What it chose.
        line: The line of the model's code that called it, and the one that called that.
    """

    name: str
    shape: torch.Size
    dim: int | None
    indices: Tensor
    line: tuple[tuple[str, int], ...]

    @property
    def number(self) -> int:
        """The number of choices that are independent of each other: one for each token."""
        if self.name in EXTREMES:
            return 0
        if self.dim is not None and self.name in SETS + ORDERS:
            return self.indices.numel() // max(self.indices.shape[self.dim], 1)
        return self.indices.numel()

    def changes(self, would: Tensor) -> Tensor:
        """Return how many of the choices differ from what would be chosen now."""
        held = self.indices.long()
        if self.name in EXTREMES:
            return torch.zeros((), device=held.device)
        if self.dim is None or self.name not in SETS + ORDERS:
            return (held != would).sum()
        if self.name in SETS:
            held, would = held.sort(self.dim).values, would.sort(self.dim).values
        return (held != would).any(self.dim).sum()

    def result(self, x: Tensor) -> Any:
        """Return what the function returns for `x` where the indices are these."""
        indices = self.indices.long()
        if self.name in INDICES or self.dim is None:
            return indices
        where = indices if indices.dim() == x.dim() else indices.unsqueeze(self.dim)
        values = x.gather(self.dim, where).view(indices.shape)
        return getattr(torch.return_types, self.name)((values, indices))


class FixedFunction(TorchFunctionMode):
    """The mode in which the passes of one measurement run.

    Args:
        dropout: Whether functions drop as training's do; else their probability is 0.
    """

    _evaluating: ClassVar[int] = 0

    @classmethod
    def is_evaluated(cls) -> bool:
        """Return whether a forward in this process now is one of a measurement, not of training."""
        return cls._evaluating > 0

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self._dropout = dropout
        self._recorded: dict[Hashable, list[_Choice]] = {}
        self._first = True
        self._key: Hashable = None
        self._made = 0  # choices of the present forward so far
        # The choices of this run's forwards, with fingerprints of their inputs: the latest ones as
        # tensors, the others by name, shape and fingerprint.
        self._inputs: list[tuple[_Choice, Tensor]] = []
        self._known: dict[tuple[str, torch.Size], dict[tuple[float, ...], _Choice]] = {}
        # What backwards choose beyond their forwards, by the choice of a forward that came before.
        self._later: dict[int, list[_Choice]] = {}
        self._latest: _Choice | None = None
        self._since = 0
        self._tallies: dict[Hashable, Tensor] = {}
        self._padding: dict[int, Tensor] = {}  # rows for padding, by the embedding's weight
        self._seen = False  # whether a function has chosen, was to drop, or has read padding
        self._kinked: Tensor | None = None  # whether values lie on both sides of a kink

    # ---- evaluations

    @contextmanager
    def running(self, keys: Iterable[Hashable] = ()) -> Iterator[None]:
        """Run forwards and backwards in the body; `at` says which forward begins.

        Args:
            keys: The forwards, where these are known. Once all have been evaluated, and have
                not chosen or dropped anything, or read padding, functions are called as they are.
        """
        self._latest, self._since = None, 0
        given = list(keys)
        plain = bool(given) and not self._seen and all(key in self._recorded for key in given)
        FixedFunction._evaluating += 1
        try:
            with nullcontext() if plain else self:
                yield
        finally:
            FixedFunction._evaluating -= 1
            self._inputs.clear()
            self._known.clear()

    def at(self, key: Hashable) -> None:
        """Begin the forward of a micro-batch; its first one records the choices."""
        self._key, self._first, self._made = key, key not in self._recorded, 0
        self._recorded.setdefault(key, [])
        self._tallies.pop(key, None)

    @contextmanager
    def evaluating(self, key: Hashable) -> Iterator[None]:
        """Run forward and backward of one micro-batch in the body."""
        with self.running([key]):
            self.at(key)
            yield

    def choices(self, keys: Iterable[Hashable]) -> Tensor:
        """Return `(2,)` fp64: the number of choices that the last of each of these forwards has
        held, and how many of them it would have made otherwise.
        """
        total = torch.zeros(2, dtype=torch.float64)
        for tally in (self._tallies[key] for key in keys if key in self._tallies):
            total = total.to(tally.device) + tally
        return total

    @property
    def smooth(self) -> bool:
        """Whether no function with kinks has been called, or all values were on one side of them,
        in the forwards at the weights so far.
        """
        return self._kinked is None or not self._kinked.item()

    # ---- calls of torch's functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call of one of torch's functions."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._first and name.strip("_") in kinks.NAMES:
            self._look_for_kinks(name.strip("_"), args, kwargs)
        if name in PROBABILITIES and not self._dropout:
            self._seen |= _drops(name, args, kwargs)
            args, kwargs = _with_argument(args, kwargs, *PROBABILITIES[name], 0.0)
        elif name in DIMS and self._key is not None and _chooses(name, args, kwargs):
            self._seen = True
            return self._choose(func, name, args, kwargs)
        elif func is functional.embedding and self._key is not None:
            return self._embed(func, args, kwargs)
        elif func in COMPOSED:
            with self:
                return _undispatched(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _look_for_kinks(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = kinks.kinked(name, args, kwargs)
        if found is not None:
            before = self._kinked
            self._kinked = found if before is None else found | before.to(found.device)

    def _choose(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x: Tensor = argument(args, kwargs, 0, "input")
        with torch.no_grad():
            indices = _indices(name, func(*args, **kwargs))
        dim = _dim(name, args, kwargs)
        now = _Choice(name, x.shape, dim, _compact(indices, x, dim), _line())
        if torch._C._current_graph_task_id() != -1:  # in a backward, which recomputes
            return self._again(now, x).result(x)
        recorded = self._recorded[self._key]
        if self._first:
            recorded.append(now)
        choice = self._next(recorded, now)
        self._note(choice, x, choice.changes(indices))
        return choice.result(x)

    def _embed(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the embeddings, with the row for padding as it is at the weights.

        Raises:
            UnsupportedError: the function rescales rows of the weights in place.
        """
        if argument(args, kwargs, 3, "max_norm") is not None:
            raise UnsupportedError(
                "ds_hessian does not support embeddings with max_norm, whose forward rescales rows "
                "of the weights in place, without a gradient; leave max_norm out"
            )
        read = func(*args, **kwargs)
        padding = argument(args, kwargs, 2, "padding_idx")
        if padding is None:
            return read
        tokens, weight = (argument(args, kwargs, i, n) for i, n in enumerate(("input", "weight")))
        padded = tokens == (padding if padding >= 0 else weight.shape[0] + padding)
        if self._first and id(weight) not in self._padding and padded.any():
            self._padding[id(weight)], self._seen = read[padded][0].detach().clone(), True
        row = self._padding.get(id(weight))
        return read if row is None else torch.where(padded.unsqueeze(-1), row, read)

    def _next(self, recorded: list[_Choice], now: _Choice) -> _Choice:
        if not torch.is_grad_enabled():
            lines = [choice.line for choice in recorded[self._made :]]
            self._made += lines.index(now.line) if now.line in lines else len(lines)
        if self._made < len(recorded):
            choice = recorded[self._made]
            if (choice.name, choice.shape) == (now.name, now.shape):
                return choice
        raise MeasurementError(
            "the model chooses differently often off the weights, or without gradients: its choice "
            f"number {self._made + 1} is now {now.name} of a tensor of shape {tuple(now.shape)}, "
            "so that it cannot be held; its control flow must depend on neither"
        )

    def _note(self, choice: _Choice, x: Tensor, changed: Tensor) -> None:
        self._made += 1
        self._inputs.append((choice, _fingerprint(x)))
        count = torch.full((), choice.number, dtype=torch.float64, device=x.device)
        tally = torch.stack([count, changed.to(torch.float64)])
        before = self._tallies.get(self._key)
        self._tallies[self._key] = tally if before is None else before + tally

    def _again(self, now: _Choice, x: Tensor) -> _Choice:
        """Return what a backward is to choose: what a forward of this run has chosen for the same
        input, or, where recomputation chooses what the forward has not (losses of routers, which
        are computed with gradients only), what the first backward has chosen after that.
        """
        choice = self._recognised(now, x)
        if choice is not None:
            self._latest, self._since = choice, 0
            return choice
        later = self._later.setdefault(id(self._latest), [])
        if self._since == len(later):
            later.append(now)
        choice = later[self._since]
        self._since += 1
        if (choice.name, choice.shape) != (now.name, now.shape):
            raise MeasurementError(
                f"a backward chooses by {now.name} among {tuple(now.shape)} where the first one "
                f"has chosen by {choice.name} among {tuple(choice.shape)}: recomputed activations "
                "must be those of the forward"
            )
        return choice

    def _recognised(self, now: _Choice, x: Tensor) -> _Choice | None:
        """Return the choice of a forward of this run that had the same input."""
        if self._inputs:  # all at once: each transfer waits for the device
            prints = torch.stack([fingerprint for _, fingerprint in self._inputs]).tolist()
            for (choice, _), found in zip(self._inputs, prints, strict=True):
                self._known.setdefault((choice.name, choice.shape), {})[tuple(found)] = choice
            self._inputs.clear()
        known = self._known.get((now.name, now.shape), {})
        here = tuple(_fingerprint(x).tolist())
        if here in known or not known:
            return known.get(here)
        nearest = min(known, key=lambda there: math.dist(here, there))
        return known[nearest] if math.dist(here, nearest) < SAME * math.hypot(*here) else None


def beside(function: Callable[P, R]) -> Callable[P, R]:
    """Make a hook of a measurement run beside the model: what it computes is no choice of it."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


def _undispatched(func: Any) -> Callable[..., Any]:
    """Return the same function in Python without the line that hands it to a mode."""
    kinds = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(kinds, lambda *_: False)}
    made = FunctionType(func.__code__, names, None, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str, value: object
) -> Arguments:
    if len(args) > index:
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _drops(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a function that drops would drop anything."""
    index, keyword = PROBABILITIES[name]
    probability = argument(args, kwargs, index, keyword)
    if keyword != "p":  # of attention, whose probability is 0 where none is given
        return probability not in (None, 0)
    training = argument(args, kwargs, index + 1, "training")
    return probability != 0 and (training is None or bool(training))


def _chooses(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call chooses by values that depend on weights."""
    x = argument(args, kwargs, 0, "input")
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.dim()) or "out" in kwargs:
        return False
    along = argument(args, kwargs, DIMS[name], "dim")
    return name not in ("max", "min") or (isinstance(along, int) and not isinstance(along, bool))


def _dim(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension along which a call chooses; None for the whole tensor."""
    along = argument(args, kwargs, DIMS[name], "dim")
    if name in ("argmax", "argmin"):
        return None if along is None else int(along)
    return -1 if along is None or isinstance(along, bool) else int(along)


def _indices(name: str, result: Any) -> Tensor:
    indices: Tensor = result if name in INDICES else result[1]
    return indices.detach()


def _line() -> tuple[tuple[str, int], ...]:
    """Return files and lines of the two innermost frames that are neither torch's nor this
    module's.
    """
    found, frame = list[tuple[str, int]](), sys._getframe(1)
    while frame.f_back is not None and len(found) < 2:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and file != __file__:
            found.append((file, frame.f_lineno))
    return tuple(found)


def _compact(indices: Tensor, x: Tensor, dim: int | None) -> Tensor:
    most = x.numel() if dim is None else x.shape[dim]
    fitting = [d for d in _INTEGERS if most - 1 <= torch.iinfo(d).max]
    return indices.to(fitting[0])


def _fingerprint(x: Tensor) -> Tensor:
    """Return `(2,)` fp64 that tells the inputs of choices apart."""
    flat = x.detach().reshape(-1).double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)
    ramp = torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64, device=flat.device)
    return torch.stack([flat @ flat, flat @ ramp])
