"""Finding the outputs of a model: the module from whose output on the loss is a known function.

A module that the host or the user names is taken. Otherwise the modules are watched in one
gradient: where the cotangent at a module's output is that of cross entropy, the output is the
logits; where this is so at none, the outputs are those of the module that transformers call the
output embeddings, or of the last that was called. Two different outputs with a cross entropy are
two heads, which are refused; outputs that differ by a number in each row have the same softmax, and
are one head. Parts of a head (an expert, the frozen layer beside a low-rank update) may have nearly
its softmax: the head is the module that returns last, or one inside of it with the same outputs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hessian.backends.function import beside
from ds_hessian.backends.protocol import Session
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.operators.outputs.losses import Tokens, read_cross_entropy
from ds_hessian.operators.outputs.tap import Tap, in_backward, tensor_of

CALLED, ELSEWHERE, SEEN, OTHER, ORDER = range(5)
"""Columns of what a rank saw of each module: its calls that returned a tensor; its other calls; how
often the cotangent was that of cross entropy, and was not; when its last call ended."""


class _Watch:
    """Hooks on all modules during one gradient of one micro-batch."""

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.named = named
        self.table = torch.zeros(len(named), 5, dtype=torch.float64)
        self.outputs: dict[int, tuple[Tensor, Tokens]] = {}  # of cross entropies
        self.several = set[int]()  # modules that return more than one tensor
        self._ended = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, (_, module) in enumerate(self.named):
                stack.callback(module.register_forward_hook(self._hook(number)).remove)
            yield

    def _hook(self, number: int) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if in_backward():
                return
            f, row = tensor_of(output), self.table[number]
            if not isinstance(output, Tensor):
                self.several.add(number)
            self._ended += 1
            row[ORDER] = self._ended
            if f is None or f.ndim == 0 or not torch.is_grad_enabled() or not f.requires_grad:
                row[ELSEWHERE] += 1
                return
            row[CALLED] += 1
            seen, version = f.detach(), f._version
            f.register_hook(beside(partial(self._judge, number, seen, version)))

        return hook

    def _judge(self, number: int, f: Tensor, version: int, c: Tensor) -> None:
        if not bool(c.any()):
            return
        found = None if f._version != version else read_cross_entropy(f, c)
        if found is None:
            self.table[number, OTHER] += 1
        else:
            self.table[number, SEEN] += 1
            self.outputs[number] = f, found


def known_outputs(session: Session, name: str | None) -> Tap | None:
    """Return the tap at the outputs that the host names; None where they are to be found.

    Args:
        session: The measurement.
        name: The module's name, or None.

    Raises:
        ConfigError: the host has another name for it.
        UnsupportedError: no rank has the module.

    Collective: one small all-reduce.
    """
    head = session.head
    if head.name is None:
        return None
    if name not in (None, head.name):
        raise ConfigError(
            f"outputs: on this host they are those of {head.name!r}, got {name!r}; leave it out"
        )
    have = torch.tensor([head.module is not None], dtype=torch.float64)
    if not session.space.reduce(have)[0]:
        raise UnsupportedError(
            f"ds_hessian does not support operators of the outputs of a model without a "
            f"{head.name!r} on any rank"
        )
    return Tap(head.name, head.module, head.per_unit)


def find_outputs(session: Session, name: str | None, out: Tensor) -> tuple[Tap, Tokens | None]:
    """Return the tap at the outputs, and add the gradient of the first micro-batch to `out`.

    Args:
        session: The measurement; the weights are not displaced.
        name: The module's name, or None.
        out: `(n_local,)` fp32.

    Returns:
        The tap, and the cross entropy of the first micro-batch, in units of its cotangents, if it
        was seen on every rank.

    Raises:
        ConfigError: there is no module of that name, or none that could be taken.
        UnsupportedError: there are several heads.

    Collective: the gradient, and two small all-reduces.
    """
    head = session.head
    if not head.modules:
        raise UnsupportedError(
            "ds_hessian does not support operators of the outputs of this tensor-parallel model, "
            'whose layer of outputs is not known: use operator "hessian"'
        )
    named = [(n, m) for root in head.modules for n, m in root.named_modules()]
    watch = _Watch(named)
    with watch.watching():
        session.add_gradient(out, range(1))
    mine = watch.table.clone()
    mine[:, ORDER] *= session.space.rank == 0
    table = session.space.reduce(mine.reshape(-1)).reshape(mine.shape)
    chosen = _named(name, named) if name is not None else _chosen(session, named, table)
    alike = _alike(session, watch, chosen)
    if name is None and bool(table[chosen, SEEN]):
        chosen = int(torch.where(alike, table[:, ORDER], torch.inf).argmin())  # the innermost
    _refuse_other_heads(watch, table, alike, chosen)
    tap = Tap(named[chosen][0] or "the model itself", named[chosen][1])
    once = table[chosen, [CALLED, ELSEWHERE, SEEN]].tolist()
    everywhere = once == [session.space.world_size, 0, session.space.world_size]
    return tap, watch.outputs[chosen][1] if everywhere else None


def _named(name: str, named: Sequence[tuple[str, nn.Module]]) -> int:
    names = [n for n, _ in named]
    if name not in names:
        near = difflib.get_close_matches(name, names, 3)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(f"outputs: the model has no module {name!r}{hint}")
    return names.index(name)


def _chosen(session: Session, named: Sequence[tuple[str, nn.Module]], table: Tensor) -> int:
    ranks = session.space.world_size
    once = (table[:, CALLED] == ranks) & (table[:, ELSEWHERE] == 0)
    entropic = once & (table[:, SEEN] > 0) & (table[:, OTHER] == 0)
    order = torch.where(once, table[:, ORDER], -1.0)
    if bool(entropic.any()):
        return int(torch.where(entropic, order, -1.0).argmax())
    for root in session.head.modules:
        module = getattr(root, "get_output_embeddings", lambda: None)()
        for number, (_, other) in enumerate(named):
            if module is other and bool(once[number]):
                return number
    if not bool(once.any()):
        raise ConfigError(
            "no module returned a tensor in just one call of the forward: name the one that "
            'returns the outputs, outputs="..."'
        )
    return int(order.argmax())


def _alike(session: Session, watch: _Watch, chosen: int) -> Tensor:
    """Return of each module whether its outputs have the cross entropy of the chosen one's, on
    every rank that saw one.
    """
    found = torch.zeros(2, len(watch.named), dtype=torch.float64)
    for number, outputs in watch.outputs.items():
        found[int(_same(outputs, watch.outputs.get(chosen))), number] = 1.0
    others, same = session.space.reduce(found.reshape(-1)).reshape(2, -1)
    return (same > 0) & (others == 0)


def _refuse_other_heads(watch: _Watch, table: Tensor, alike: Tensor, chosen: int) -> None:
    """Raise if the outputs of another module, which is no part of the chosen one, have a cross
    entropy too.
    """
    names, same = [name for name, _ in watch.named], alike.tolist()
    whole = [n for i, n in enumerate(names) if same[i] and n and i not in watch.several]
    inside = tuple(f"{name}." for name in whole)
    seen = [i for i, times in enumerate(table[:, SEEN].tolist()) if times]
    others = [i for i in seen if not same[i] and not names[i].startswith(inside)]
    if others and bool(table[chosen, SEEN]):
        several = ", ".join(repr(names[i]) for i in sorted([chosen, *others]))
        raise UnsupportedError(
            f"ds_hessian does not support a Gauss-Newton operator of several heads, each with a "
            f'cross entropy: {several}; use operator "hessian", or a loss of one of them'
        )


def _same(a: tuple[Tensor, Tokens], b: tuple[Tensor, Tokens] | None) -> bool:
    """Return whether two outputs are the same numbers but for one in each row, maybe in another
    shape or dtype.
    """
    if b is None:
        return False
    x, y = (f.float().movedim(t.dim, -1).reshape(-1, f.shape[t.dim]) for f, t in (a, b))
    if x.shape != y.shape:
        return False
    roundoff = max(torch.finfo(f.dtype).eps for f, _ in (a, b))
    apart = x - y
    rest = (apart - apart.mean(-1, keepdim=True)).abs().max()
    return bool(rest <= 2 * roundoff * torch.maximum(x.abs().max(), y.abs().max()))
