"""Finding the outputs of a model: the module from whose output on the loss is a known function.

A module that the host or the user names is taken. Otherwise the modules are watched in one
gradient: where the cotangent at a module's output is that of cross entropy, the output is the
logits; where this is so at none, the outputs are those of the module that transformers call the
output embeddings, or of the last that was called. But where the loss takes other logits than these
(scaled or capped ones, as of Cohere, Granite and Gemma), in the one call of a function such as
`cross_entropy`, and depends on that module through them alone, they are the outputs.

Two different outputs with a cross entropy are two heads, which are refused; outputs that differ by
a number in each row have the same softmax, and are one head. Parts of a head (an expert, the frozen
layer beside a low-rank update) may have nearly its softmax, or all of it while the update is zero:
the head is the module that returns last, or one inside of it whose outputs it returns.

A cotangent may look like that of a cross entropy and say no more than that a softmax follows: with
two classes, where its entries add up to zero, as at a gate between two experts (the residual
experts of PR-MoE), or in few rows, where one entry of each is negative, as at a gate whose best
expert alone is taken. Modules of two classes, and any beside another one, have a cross entropy if
the weights of their rows are the same at other outputs, too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hessian.backends.hooks import beside, on_cotangents
from ds_hessian.backends.protocol import Session
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.operators.outputs.losses import (
    Tokens,
    beside_outputs,
    heard,
    keeps_weights,
    read_cross_entropy,
)
from ds_hessian.operators.outputs.tap import (
    AtLoss,
    LogitsTap,
    Silence,
    Tap,
    in_backward,
    is_named,
    nothing,
    tensor_of,
    tensors_of,
    with_tensors,
)

CALLED, ELSEWHERE, SEEN, OTHER, ORDER, SAME, NAMED = range(7)
"""Columns of what a rank saw of each module: its calls that returned a tensor; its other calls; how
often the cotangent was that of cross entropy, and was not; when its last call ended; whether its
outputs are logits that a loss takes, but for their layout; its calls that returned several tensors
by their names."""

ITSELF = "the model itself"
"""The name in records of the model as the module of the outputs, whose own name is empty."""

LAYOUTS = ("View", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Alias", "ToCopy", "Transpose")
"""Of what the names of autograd's nodes have in them that leave the numbers of a tensor."""


class _Watch:
    """Hooks on all modules, and where losses take logits, during one gradient of one micro-batch.

    Attributes:
        table: A row for each module, and one for logits that losses take.
        taken: The cross entropy of these, if it is one.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self.named = named
        self.table = torch.zeros(len(named) + 1, 7, dtype=torch.float64)
        self.outputs: dict[int, tuple[Tensor, Tokens]] = {}  # of cross entropies
        self.calls: dict[int, int] = {}  # in which call of the module they were seen
        self.several = set[int]()  # modules that return more than one tensor
        self.taken: Tokens | None = None
        self._nodes = list[Any]()  # autograd's, of each module's last outputs
        self._ended = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._nodes = [None] * len(self.named)
        with ExitStack() as stack:
            for number, (_, module) in enumerate(self.named):
                stack.callback(module.register_forward_hook(self._hook(number)).remove)
            stack.enter_context(AtLoss(self._take))
            yield
        self._nodes.clear()

    def _hook(self, number: int) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if in_backward():
                return
            if not isinstance(output, Tensor):
                self.several.add(number)
            self.table[number, NAMED] += is_named(output) and len(tensors_of(output)) > 1
            self._note(number, tensor_of(output))

        return hook

    def _take(self, f: Tensor) -> None:
        """Note logits that a loss takes."""
        self._note(len(self.named), f)
        nodes = set(_laid_out(f.grad_fn))
        for number, node in enumerate(self._nodes):
            self.table[number, SAME] += node in nodes

    def _note(self, number: int, f: Tensor | None) -> None:
        row = self.table[number]
        self._ended += 1
        row[ORDER] = self._ended
        if f is None or f.ndim == 0 or not torch.is_grad_enabled() or not f.requires_grad:
            row[ELSEWHERE] += 1
            return
        row[CALLED] += 1
        if number < len(self._nodes):
            self._nodes[number] = f.grad_fn
        seen, version = f.detach(), f._version
        call = int(row[CALLED])
        f.register_hook(on_cotangents(partial(self._judge, number, call, seen, version)))

    def _judge(self, number: int, call: int, f: Tensor, version: int, c: Tensor) -> None:
        if not bool(c.any()):
            return
        known = f._version == version and not f.is_nested
        found = read_cross_entropy(f, c) if known else None
        if found is None:
            self.table[number, OTHER] += 1
        else:
            self.table[number, SEEN] += 1
            if number == len(self.named):
                self.taken = found
            else:
                self.outputs[number], self.calls[number] = (f, found), call

    def doubtful(self) -> list[list[int]]:
        """Return the modules that may have a softmax and no cross entropy: those of two classes,
        and all where there are several, those of the same outputs together, the one that returned
        first at their head.
        """
        found = list[list[int]]()
        for number in sorted(self.outputs, key=self.table[:, ORDER].tolist().__getitem__):
            for same in found:
                if _same(self.outputs[number], self.outputs[same[0]]):
                    same.append(number)
                    break
            else:
                found.append([number])
        if len(found) > 1:
            return found
        return [same for same in found if self._classes(same[0]) == 2]

    def _classes(self, number: int) -> int:
        f, tokens = self.outputs[number]
        return f.shape[tokens.dim]

    def strike(self, numbers: Sequence[int]) -> None:
        """Let modules have no cross entropy after all."""
        for number in numbers:
            self.table[number, OTHER] += self.table[number, SEEN]
            self.table[number, SEEN] = 0
            del self.outputs[number]


class _Doubts:
    """Hooks on modules that may have no cross entropy, which add something to their outputs in one
    more gradient of the micro-batch, and judge whether the weights of their rows are the same
    there.

    Attributes:
        failed: The modules of which they are not.
    """

    def __init__(self, session: Session, watch: _Watch, numbers: Sequence[int]) -> None:
        self.session, self.watch, self.failed = session, watch, list(numbers)
        scale = session.cotangent_scale
        self._tokens = {n: watch.outputs[n][1].scaled(scale) for n in numbers}
        self._calls = dict.fromkeys(numbers, 0)

    @contextmanager
    def judging(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number in self._calls:
                module = self.watch.named[number][1]
                stack.callback(module.register_forward_hook(self._hook(number)).remove)
            yield

    def _hook(self, number: int) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> object:
            if in_backward():
                return None
            f = tensor_of(output)
            if f is None or not f.requires_grad:
                return None
            self._calls[number] += 1
            if self._calls[number] != self.watch.calls[number]:
                return None
            added = beside(beside_outputs)(f.detach())
            moved = f + added.to(f.dtype)
            judge = partial(self._judge, number, moved.detach().clone(), added)
            moved.register_hook(on_cotangents(judge))
            return with_tensors(output, {0: moved})

        return hook

    def _judge(self, number: int, f: Tensor, added: Tensor, c: Tensor) -> None:
        tokens = self._tokens[number]
        if f.shape != self.watch.outputs[number][0].shape:
            return
        if keeps_weights(tokens, f, c, self.session.cotangent_scale, added):
            self.failed.remove(number)


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
    mine = torch.tensor([head.module is not None, head.further], dtype=torch.float64)
    have, further = session.space.reduce(mine).tolist()
    if not have:
        raise UnsupportedError(
            f"ds_hessian does not support operators of the outputs of a model without a "
            f"{head.name!r} on any rank"
        )
    tap = Tap(head.name, head.module, head.per_unit)
    if further and name is None:
        # Of a pipeline, the chunk that has the outputs: what another one returns is sent.
        around = [root for root in head.modules if any(m is head.module for m in root.modules())]
        tap.others = _others([x for root in around for x in root.named_modules()], head.module)
    return tap


def _others(
    named: Sequence[tuple[str, nn.Module]], outputs: nn.Module | None
) -> list[tuple[str, nn.Module]]:
    """Return the modules with weights in which the outputs' module is not."""
    return [
        (name, other)
        for name, other in named
        if not any(m is outputs for m in other.modules())
        and any(p.requires_grad for p in other.parameters())
    ]


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

    Collective: the gradient, once more where a module has two classes or is not alone, once more
    where no module has a cross entropy and the loss takes others, and some small all-reduces.
    """
    head = session.head
    if not head.modules:
        raise UnsupportedError(
            "ds_hessian does not support operators of the outputs of this tensor-parallel model, "
            'whose layer of outputs is not known: use operator "hessian"'
        )
    every = [(n, m) for root in head.modules for n, m in root.named_modules()]
    # The loss is linear in the losses of single examples, so that these have no matrix.
    named = [(n, m) for n, m in every if not isinstance(m, nn.modules.loss._Loss)]
    watch = _Watch(named)
    with watch.watching():
        session.add_gradient(out, range(1))
    _strike_gates(session, watch)
    mine = watch.table.clone()
    mine[:, ORDER] *= session.space.rank == 0
    whole = session.space.reduce(mine.reshape(-1)).reshape(mine.shape)
    table = whole[:-1]
    chosen = _named(name, named) if name is not None else _chosen(session, named, table)
    if name is None:
        alike, returned = _alike(session, watch, chosen)
        if bool(table[chosen, SEEN]):
            chosen = int(torch.where(returned, table[:, ORDER], torch.inf).argmin())
        _refuse_other_heads(watch, table, alike, chosen)
    entropic, places = bool(table[chosen, SEEN]), [0]
    several = _last_named(session, table, chosen) if name is None and not entropic else None
    if several is not None:
        places, _ = _places(session, named[several][1], True)
        told = table[:, [SEEN, OTHER]].sum(1) > 0
        if len(places) > 1 or (not told[chosen] and bool(told.any())):
            chosen = several  # of several heads all have a name, also where the loss takes one
    module = named[chosen][1]
    if len(places) == 1:
        found, tensors = _places(session, module, chosen in watch.several)
        entropic = entropic and tensors == places
        places = places if entropic else found
    tap = Tap(named[chosen][0] or ITSELF, module, places=places)
    ranks = session.space.world_size
    once = whole[:, [CALLED, ELSEWHERE]] == torch.tensor([ranks, 0])
    everywhere = once.all(1) & (whole[:, SEEN] == ranks)
    if name is not None or entropic:
        return tap, watch.outputs[chosen][1] if entropic and everywhere[chosen] else None
    if not table[chosen, SAME] and bool(once[-1].all()) and _takes_others(session, tap):
        return LogitsTap(), watch.taken if everywhere[-1] else None
    if not table[chosen, SAME]:
        tap.others = _others(named, module)
    return tap, None


def _last_named(session: Session, table: Tensor, chosen: int) -> int | None:
    """Return the last module that returned several tensors by their names, in its one call, if that
    was after the chosen one's: it may have all heads.
    """
    ranks = session.space.world_size
    once = (table[:, [CALLED, ELSEWHERE]].sum(1) == ranks) & (table[:, NAMED] == ranks)
    order = torch.where(once, table[:, ORDER], -1.0)
    found = int(order.argmax())
    return found if float(order[found]) > float(table[chosen, ORDER]) else None


def _places(session: Session, module: nn.Module, several: bool) -> tuple[list[int], list[int]]:
    """Return which of the tensors that a module returns the loss takes, and which of them are no
    single numbers; the first where all are, which are losses.

    Collective: where it is `several` on some rank, the gradient of the first micro-batch; a small
    all-reduce or two.
    """
    first = [0]
    if not session.space.reduce(torch.tensor([float(several)], dtype=torch.float64))[0]:
        return first, first
    seen = dict[int, tuple[bool, bool]]()  # whether the loss takes it, and whether as a tensor

    def judge(place: int, c: Tensor) -> None:
        if c.any():
            seen[place] = True, c.ndim > 0

    def hook(module: nn.Module, args: object, output: object) -> object:
        if in_backward():
            return None
        # Others, since the module may have used what it returns.
        others = {i: x.view_as(x) for i, x in enumerate(tensors_of(output)) if x.requires_grad}
        for place, x in others.items():
            x.register_hook(on_cotangents(partial(judge, place)))
        seen.update(dict.fromkeys(range(len(tensors_of(output))), (False, False)))
        return with_tensors(output, others)

    handle = module.register_forward_hook(hook)
    try:
        session.add_gradient(None, range(1))
    finally:
        handle.remove()
    size = int(session.space.reduce(torch.tensor([float(len(seen))], dtype=torch.float64))[0])
    mine = [seen.get(i, (False, False)) for i in range(size)]
    taken = session.space.reduce(torch.tensor(mine, dtype=torch.float64).reshape(-1)).view(-1, 2)
    found, tensors = (column.nonzero().flatten().tolist() for column in taken.T)
    return (found, tensors) if tensors else (first, first)


class _Others(Silence):
    """Notes whether the outputs have a cotangent other than zero."""

    told = False

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        """Return it as it is."""
        self.told |= bool(c.any())
        return c


class _Apart(Silence):
    """Stops the loss at logits that this loss alone takes, apart from other uses of them."""

    def outputs(self, index: int, f: Tensor) -> Tensor:
        """Return zero, with which they are another tensor."""
        return nothing(f)


def _takes_others(session: Session, tap: Tap) -> bool:
    """Return whether the loss depends on these outputs through the logits that it takes alone.

    Collective: the gradient of the first micro-batch, and a small all-reduce.
    """
    others = _Others()  # of which the cotangent is zero then
    with LogitsTap().listening(range(1), _Apart()), tap.listening(range(1), others):
        session.add_gradient(None, range(1))
    found = session.space.reduce(torch.tensor([float(others.told)], dtype=torch.float64))
    return not bool(found[0])


def _laid_out(node: Any) -> Iterator[Any]:
    """Yield autograd's nodes of the tensors of which one has the numbers, in another layout."""
    while node is not None:
        yield node
        if not any(layout in node.name() for layout in LAYOUTS):
            return
        node = node.next_functions[0][0]


def _strike_gates(session: Session, watch: _Watch) -> None:
    """Let modules of which a softmax follows, and no cross entropy, have none."""
    doubtful = watch.doubtful()
    some = session.space.reduce(torch.tensor([float(len(doubtful))], dtype=torch.float64))
    if not some[0]:
        return
    judge = _Doubts(session, watch, [same[0] for same in doubtful])
    with judge.judging():
        session.add_gradient(None, range(1))
    for same in doubtful:
        if same[0] in judge.failed:
            watch.strike(same)


def _named(name: str, named: Sequence[tuple[str, nn.Module]]) -> int:
    names = [n for n, _ in named]
    name = "" if name == ITSELF else name
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
    trained = torch.tensor([any(p.requires_grad for p in m.parameters()) for _, m in named])
    if not bool((trained & (table[:, [CALLED, ELSEWHERE]].sum(1) == ranks)).any()):
        raise UnsupportedError(
            "ds_hessian does not support operators of the outputs of a model of which every module "
            "that is trained is called more than once for a micro-batch, as one tower for both "
            "sides of pairs: put the model into a module that returns all that the loss takes in "
            'one call, or use operator "hessian"'
        )
    if not bool(once.any()):
        raise ConfigError(
            "no module returned a tensor in just one call of the forward: name the one that "
            'returns the outputs, outputs="..."'
        )
    return int(order.argmax())


def _alike(session: Session, watch: _Watch, chosen: int) -> tuple[Tensor, Tensor]:
    """Return of each module whether its outputs have the cross entropy of the chosen one's, and
    whether the chosen one returned this very tensor, on every rank that saw one.
    """
    found = torch.zeros(3, len(watch.named), dtype=torch.float64)
    of_chosen = watch.outputs.get(chosen)
    for number, outputs in watch.outputs.items():
        same = _same(outputs, of_chosen)
        found[int(same), number] = 1.0
        # Other numbers may be equal to them at these weights alone, as those of a frozen layer
        # beside a low-rank update that is still zero.
        found[2, number] = not (same and _stored(outputs) == _stored(of_chosen))
    others, same, apart = session.space.reduce(found.reshape(-1)).reshape(3, -1)
    alike = (same > 0) & (others == 0)
    return alike, alike & (apart == 0)


def _stored(outputs: tuple[Tensor, Tokens] | None) -> int:
    return 0 if outputs is None else outputs[0].untyped_storage().data_ptr()


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
            "ds_hessian does not support a Gauss-Newton operator of several heads, each with a "
            f"cross entropy: {several}; name the one that is meant, outputs=..., so that those of "
            'others are in the residual, or use operator "hessian"'
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
    some = heard(x, x.amax(-1, keepdim=True)) & heard(y, y.amax(-1, keepdim=True))
    x, y = (z.masked_fill(~some, 0.0) for z in (x, y))  # of masked classes neither tells
    apart = x - y
    means = apart.sum(-1, keepdim=True) / some.sum(-1, keepdim=True)
    rest = (apart - means).masked_fill_(~some, 0.0).abs().max()
    return bool(rest <= 2 * roundoff * torch.maximum(x.abs().max(), y.abs().max()))
