"""The model as one fixed function of its weights: decisions are held, dropout is off.

Routers of experts choose by `topk`: a function with jumps, of which a difference of gradients at
two points measures the jumps. ReLU, max pooling and their like have kinks, of which it counts those
that it passes. Here each such decision is recorded at the weights, for each micro-batch, and made
again wherever else the function is evaluated: values are gathered at the recorded indices, and
elements stay on their sides of the kinks (`ds_hessian.backends.pieces`). The Hessian is then that
of the smooth piece of the loss on which the weights lie, which is what a double backward computes.

Decisions are intercepted as torch's functions are called (`torch.topk`, `Tensor.argmax`,
`functional.relu`, `x > 0`, ...), in any model and loss. The i-th decision of a micro-batch's
forward is the i-th that was recorded; a forward without gradients leaves out what is computed with
gradients only (losses of routers), so there the next one counts that the same line of the model has
made. In a backward, a decision is made again where activations are recomputed; it is recognised by
its input, since schedules of pipelines have several micro-batches and layers under way.

An embedding with a `padding_idx` reads that row, and gives it no gradient: to training it is a
constant. It is held as well, at its value at the weights, so that gradients at displaced weights
are those of one function, masked or not, and where an output's row is tied to it.

Kinks of functions that cannot be held (`ds_hessian.backends.kinks`), or of all where the settings
say so, are crossed: functions are evaluated as they are, but it is noted that there are some.

Memory: the recorded indices, in one byte for each chosen expert of at most 256; one bit for each
element at a kink (two where a function has two), and one or two bytes for each element that is left
by pooling. Where the sides of kinks need more than `allowed` bytes, all of them are given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_hessian.backends import compositions, kinks, pieces
from ds_hessian.backends.applied import applying
from ds_hessian.backends.bits import compact
from ds_hessian.backends.choices import (
    DIMS,
    SAME,
    SAMPLED,
    Choice,
    PieceError,
    Sides,
    called,
    chooses,
    dim_of,
    fingerprint,
    indices_of,
    line_of_call,
    sides_of,
)
from ds_hessian.backends.constants import Constants, leaves, refuse_lost, refuse_solves
from ds_hessian.backends.dropping import PROBABILITIES, drops
from ds_hessian.backends.hooks import unheard, unseen
from ds_hessian.backends.in_python import COMPOSED, INERT, is_composed, undispatched
from ds_hessian.backends.kinks import argument, with_argument
from ds_hessian.backends.pieces import Kinked
from ds_hessian.backends.state import STATISTICS, State, is_a_hosts, tensors_in, written_by
from ds_hessian.defaults import defaults_of_job
from ds_hessian.errors import MeasurementError, UnsupportedError

HELD = {*pieces.NAMES, *compositions.EXPANDED}
"""Functions whose sides of kinks are held."""

Decision = Choice | Sides


class FixedFunction(TorchFunctionMode):
    """The mode in which the passes of one measurement run.

    Args:
        dropout: Whether functions drop as training's do; else their probability is 0.
        allowed: The bytes that may be held of the sides of kinks; 0 to cross all kinks.

    Attributes:
        holds: Whether sides of kinks are held.
        over: Whether they have been given up, since they need more memory than is allowed.
        held: The bytes that are held of them.
        state: What forwards change, which is told of the calls in watched ones.
        note_graph: Called with what the first backwards of micro-batches begin from, where these
            recompute activations; sessions call it with outputs and losses.
    """

    _evaluating: ClassVar[int] = 0

    @classmethod
    def is_evaluated(cls) -> bool:
        """Return whether a forward in this process now is one of a measurement, not of training."""
        return cls._evaluating > 0

    def __init__(self, dropout: bool, allowed: int = 0) -> None:
        super().__init__()
        self._dropout, self._allowed = dropout, allowed
        self.holds, self.over, self.held = allowed > 0, False, 0
        self.state: State | None = None
        self.note_graph: Callable[[Tensor], object] = lambda output: None
        self._recorded: dict[Hashable, list[Decision]] = {}
        self._first = True
        self._key: Hashable = None
        self._made = 0  # decisions of the present forward so far
        # The decisions of this run's forwards, with fingerprints of their inputs: the latest ones
        # as tensors, the others by call, shape and fingerprint.
        self._inputs: list[tuple[Decision, str, Tensor]] = []
        self._known: dict[tuple[str, torch.Size], dict[tuple[float, ...], Decision]] = {}
        # What backwards decide beyond their forwards, by the decision of a forward that came
        # before.
        self._later: dict[int, list[Decision]] = {}
        # What written backwards decide, by micro-batch, name, shape and line; and how many of these
        # calls this run has made.
        self._backwards: dict[Hashable, list[Sides]] = {}
        self._called: dict[Hashable, int] = {}
        self._alone = True  # whether this run has one micro-batch
        self._latest: Decision | None = None
        self._since = 0
        self._learning = False  # whether a forward of this run is its micro-batch's first
        self._recomputes = False  # whether backwards evaluate functions with kinks
        self._tallies: dict[Hashable, Tensor] = {}
        self._constants, self._within = Constants(), False  # whether a forward is under way
        self._padding = Constants()  # rows of embeddings for padding
        self._bodies: dict[Any, Callable[..., Any]] = {}
        self._derives = set[Hashable]()  # forwards that take derivatives themselves
        self._seen = False  # whether a function has decided, was to drop, or has read padding
        self._kinked: Tensor | None = None  # whether values lie on both sides of a kink

    # ---- evaluations

    @contextmanager
    def running(self, keys: Iterable[Hashable] = ()) -> Iterator[None]:
        """Run forwards and backwards in the body; `at` says which forward begins.

        Args:
            keys: The forwards, where these are known. Once all have been evaluated, and have
                not chosen or dropped anything, or read padding, functions are called as they are.
        """
        self._latest, self._since, self._learning = None, 0, False
        given = list(keys)
        self._alone = len(given) == 1
        self._constants.begin()
        self._padding.begin()
        self._called.clear()
        seen = self._seen or any(self._constants.of(key) for key in given)
        plain = bool(given) and not seen and all(key in self._recorded for key in given)
        FixedFunction._evaluating += 1
        try:
            with defaults_of_job(), nullcontext() if plain else self._on():
                yield
        finally:
            FixedFunction._evaluating -= 1
            self._inputs.clear()
            self._known.clear()
            if self.state is not None:  # before anything else of the measurement is undone
                self.state.settle()

    @contextmanager
    def _on(self) -> Iterator[None]:
        """Be the mode of the body."""
        with applying(self, self._apply), self:
            yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward that `at` has begun, from the state before the measurement."""
        self._within = True
        try:
            with nullcontext() if self.state is None else self.state.forward(self._first):
                yield
        finally:
            self._within = False

    def without_graph(self, keys: Iterable[Hashable]) -> AbstractContextManager[object]:
        """Return the context of forwards alone: with a graph where constants of gradients are
        known by it, or where forwards take derivatives.
        """
        graph = any(self._constants.of(key) or key in self._derives for key in keys)
        return nullcontext() if graph else torch.no_grad()

    def at(self, key: Hashable) -> None:
        """Begin the forward of a micro-batch; its first one records the decisions."""
        self._key, self._first, self._made = key, key not in self._recorded, 0
        self._constants.at(key, self._first)
        self._padding.at(key, self._first)
        self._learning |= self._first
        self._recorded.setdefault(key, [])
        self._tallies.pop(key, None)

    @contextmanager
    def evaluating(self, key: Hashable) -> Iterator[None]:
        """Run forward and backward of one micro-batch in the body."""
        with self.running([key]):
            self.at(key)
            yield

    def choices(self, keys: Iterable[Hashable]) -> Tensor:
        """Return `(4,)` fp64: the number of choices that the last of each of these forwards has
        held, and how many of them it would have made otherwise; the same of the elements at kinks.
        """
        total = torch.zeros(4, dtype=torch.float64)
        for tally in (self._tallies[key] for key in keys if key in self._tallies):
            total = total.to(tally.device) + tally
        return total

    @property
    def smooth(self) -> bool:
        """Whether no function with kinks that are not held has been called, or all values were on
        one side of them, in the forwards at the weights so far.
        """
        return self._kinked is None or not self._kinked.item()

    def release(self) -> None:
        """Give up the sides of kinks, which are crossed from now on. Choices stay held."""
        if not self.holds:
            return
        self.holds = False
        if self.held:
            self._kinked = torch.ones((), dtype=torch.bool)
        before = self._recorded.get(self._key, [])[: self._made]
        self._made = sum(isinstance(each, Choice) for each in before)
        for decisions in (*self._recorded.values(), *self._later.values()):
            decisions[:] = [each for each in decisions if isinstance(each, Choice)]
        self._backwards.clear()
        for known in self._known.values():
            for print_ in [p for p, each in known.items() if isinstance(each, Sides)]:
                del known[print_]
        self._inputs = [each for each in self._inputs if isinstance(each[0], Choice)]
        self.held = 0

    # ---- calls of torch's functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Make a call of one of torch's functions."""
        kwargs = kwargs or {}
        if func in INERT:
            return func(*args, **kwargs)
        if self._learning and func is torch.autograd.backward and _in_backward():
            for output in tensors_in((*args, *kwargs.values())):
                self.note_graph(output)
        if self._within and func is torch.autograd.grad and not _in_backward():
            return self._derivative(func, types, args, kwargs)
        return self._watched(func, types, args, kwargs)

    def _derivative(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Take a derivative in a forward, whose cotangents are none of the loss."""
        self._derives.add(self._key)
        self._seen = True
        with unheard():
            return self._watched(func, types, args, kwargs)

    def _watched(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call, and tell the watched state of it."""
        state = self._watching(_in_backward())
        if state is None:
            return self._followed(func, types, args, kwargs)
        with unseen():
            state.before(func, args, kwargs)
        made = self._followed(func, types, args, kwargs)
        with unseen():
            state.after(func, args, kwargs, made)
        return made

    def _followed(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call with the constants of the gradient, and follow what comes of it."""
        constants, name, back = self._constants, getattr(func, "__name__", ""), _in_backward()
        if not self._follows(back):
            return self._call(func, types, args, kwargs)
        if back and func is torch.autograd.grad and constants.of(self._key):
            refuse_solves()
        written = [] if name in STATISTICS else written_by(name, args, kwargs)
        attribute = getattr(func, "__self__", None)
        if not back and name == "requires_grad_":
            constants.begin_graph(args[0])
        elif name == "__set__":  # of an attribute: no use of its value
            if args[1] is True and not back and attribute is Tensor.requires_grad:
                constants.begin_graph(args[0])
        elif name not in pieces.COMPARISONS:
            leaving = leaves(name, args, kwargs)
            if not (leaving and is_a_hosts()):
                args, kwargs = constants.held(name, (args, kwargs), written, leaving, back)
        made = self._call(func, types, args, kwargs)
        detaches = name == "detach" or attribute is Tensor.data
        constants.note(name, (*args, *kwargs.values()), written, made, detaches)
        return made

    def _follows(self, back: bool) -> bool:
        """Return whether constants are followed in the present call."""
        derives = back and self._within  # a derivative that the forward takes
        transformed = torch._C._are_functorch_transforms_active()
        return self._constants.following and not (transformed or derives)

    def _watching(self, back: bool) -> State | None:
        """Return the state that is watched in the present call; None for none."""
        state = self.state
        return state if state is not None and state.watching and not back else None

    def _apply(self, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a function with a written backward with the constants of the gradient."""
        constants, back = self._constants, _in_backward()
        if (state := self._watching(back)) is not None:
            with torch._C.DisableTorchFunction(), unseen():
                state.before(apply, args, {})
        if not self._follows(back):
            return apply(*args)
        with torch._C.DisableTorchFunction():
            args, _ = constants.held("apply", (args, {}), [], False, back)
        read = constants.read
        made = apply(*args)
        with torch._C.DisableTorchFunction():
            if constants.read > read and not back:
                refuse_lost(args)
            constants.note("apply", args, [], made)
        return made

    def _call(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kwargs, name = compositions.whole(func, kwargs), getattr(func, "__name__", "")
        if name in PROBABILITIES and not self._dropout:
            self._seen |= drops(name, args, kwargs)
            args, kwargs = with_argument(args, kwargs, *PROBABILITIES[name], 0.0)
        elif name in DIMS and self._key is not None and chooses(name, args, kwargs):
            self._seen = True
            return self._choose(func, name, args, kwargs)
        elif name.strip("_") in HELD and self.holds and self._key is not None:
            return self._hold(func, types, args, kwargs)
        elif func is torch.embedding_renorm_:
            raise _rescales()
        elif func is functional.embedding and self._key is not None:
            return self._embed(func, args, kwargs)
        elif func in COMPOSED or is_composed(func, types):
            return self._composed(func, args, kwargs)
        self._look_for_kinks(name, args, kwargs)
        return func(*args, **kwargs)

    def _composed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function in Python, and see what it calls."""
        if func not in self._bodies:
            self._bodies[func] = undispatched(func)
        with self:
            return self._bodies[func](*args, **kwargs)

    def _look_for_kinks(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a function that is called as it is has kinks, at the weights."""
        name = name.strip("_")
        found = None
        if self._first and name in kinks.NAMES:
            with unseen():
                found = kinks.kinked(name, args, kwargs)
        if found is not None:
            before = self._kinked
            self._kinked = found if before is None else found | before.to(found.device)

    def _choose(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        x: Tensor = argument(args, kwargs, 0, "input")
        with unseen():
            choice = self._choice(func, name, args, kwargs, x)
        return choice.result(x)

    def _choice(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        x: Tensor,
    ) -> Choice:
        with torch.no_grad():
            indices = indices_of(name, func(*args, **kwargs))
        dim = dim_of(name, args, kwargs)
        most = x.numel() if dim is None else x.shape[dim]
        now = Choice(name, x.shape, dim, compact(indices, most), line_of_call())
        if _in_backward():  # which recomputes
            return self._again(now, called(name, args, kwargs), x)
        recorded = self._recorded[self._key]
        if self._first:
            recorded.append(now)
        choice = self._next(recorded, now)
        assert isinstance(choice, Choice)
        count = torch.full((), choice.number, dtype=torch.float64, device=x.device)
        changed = choice.changes(indices).to(torch.float64)
        self._note(choice, called(name, args, kwargs), torch.stack([count, changed]), 0, x)
        return choice

    # ---- kinks

    def _hold(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what a function with kinks returns on the sides where the weights are."""
        made = compositions.expanded(func.__name__, args, kwargs)
        if made is not None:
            with self:
                return made()
        kinked = pieces.found(func, args, kwargs)
        if kinked is None and is_composed(func, types):
            return self._composed(func, args, kwargs)
        sides: Sides | None = None
        if kinked is not None:
            of_call = self._sides_again if _in_backward() else self._sides
            with unseen():
                sides = of_call(kinked, func, args, kwargs)
        if kinked is None or sides is None or sides.held is None:
            self._look_for_kinks(func.__name__, args, kwargs)
            return func(*args, **kwargs)
        self._seen = True
        return sides.value(kinked)

    def _sides(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides | None:
        """Return the sides in a forward; None where they have been given up."""
        recorded = self._recorded[self._key]
        constant = _constant(kinked)
        if self._first:
            made = replace(self._recording(kinked, func, args, kwargs), constant=constant)
            if not self.holds:
                return None
            recorded.append(made)
        if constant and not self._is_next(recorded, kinked):
            return None
        now = Sides(kinked.name, kinked.operands[0].shape, (), constant=constant)
        if not torch.is_grad_enabled():
            now = Sides(kinked.name, kinked.operands[0].shape, line_of_call())
        sides = self._next(recorded, now)
        assert isinstance(sides, Sides)
        if sides.held is None:
            self._made += 1
            return sides
        call = called(kinked.name, args, kwargs)
        self._note(sides, call, sides.tally(kinked), 2, *kinked.operands)
        return sides

    def _is_next(self, recorded: list[Decision], kinked: Kinked) -> bool:
        """Go on to the sides of a call without gradients; return whether there are any.

        What is detached from the weights may change with them all the same, as the mask
        `x.detach() > 0` does, and is held. But a model may call it once only, as to make a
        distribution: it is found by its line, and those before it are left out.
        """
        made, line = self._made, line_of_call()
        while made < len(recorded) and _is_constant(recorded[made]):
            if recorded[made].line == line and recorded[made].name == kinked.name:
                self._made = made
                return recorded[made].shape == kinked.operands[0].shape
            made += 1
        return False

    def _recording(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides:
        """Return the sides at the weights; without any where they cannot be held."""
        line, shape = line_of_call(), kinked.operands[0].shape
        with torch.no_grad():
            # What is compared with the function itself: of many elements, some.
            x = kinked.operands[0]
            some = x.detach().reshape(-1)[:: max(1, x.numel() // SAMPLED)] if kinked.alone else x
            given = some.detach().clone() if kinked.in_place else some
            args = tuple(given if a is x else a for a in args)
            kwargs = {k: given if a is x else a for k, a in kwargs.items() if k != "out"}
            real = func(*args, **kwargs)
        real = real[0] if kinked.indices else real
        sides = sides_of(kinked, line, some, real)
        if sides is None:
            return Sides(kinked.name, shape, line)
        self.held += sides.nbytes
        if self.held > self._allowed:
            self.over = True
            self.release()
        return sides

    def _sides_again(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides | None:
        """Return the sides in a backward, which recomputes activations; None for what it computes
        beside these.
        """
        known = self._recognised(called(kinked.name, args, kwargs), kinked.operands)
        if known is not None:
            assert isinstance(known, Sides)
            self._latest, self._since, self._recomputes = known, 0, True
            return known
        if not torch.is_grad_enabled():
            return self._sides_in_backward(kinked, func, args, kwargs)
        if _constant(kinked):
            return None
        self._recomputes = True
        later = self._later.setdefault(id(self._latest), [])
        if self._since == len(later):
            if not self._learning:
                raise _differs(f"{kinked.name} in a backward")
            made = self._recording(kinked, func, args, kwargs)
            if not self.holds:
                return None
            later.append(made)
        found = later[self._since]
        self._since += 1
        if (found.name, found.shape) != (kinked.name, kinked.operands[0].shape):
            raise _differs(f"{kinked.name} in a backward")
        assert isinstance(found, Sides)
        return found

    def _sides_in_backward(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides | None:
        """Return the sides in a backward that somebody has written, as of `torch.autograd.Function`
        or a hook; None where they are not known.

        The backward of one micro-batch calls them in the same order in each pass. Where a run has
        several, as in a pipeline, they are not told apart.
        """
        call = (self._key, kinked.name, kinked.operands[0].shape, line_of_call())
        found, number = self._backwards.setdefault(call, []), self._called.get(call, 0)
        self._called[call] = number + 1
        if self._learning and number == len(found):
            made = self._recording(kinked, func, args, kwargs)
            if not self.holds:
                return None
            if not self._alone:
                self._kinked = torch.ones((), dtype=torch.bool) if made.nbytes else self._kinked
                return None
            found.append(made)
        return found[number] if number < len(found) else None

    def _embed(
        self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Return the embeddings, with the row for padding as it is at the weights.

        Raises:
            UnsupportedError: the function rescales rows of the weights in place.
        """
        if argument(args, kwargs, 3, "max_norm") is not None:
            raise _rescales()
        read = func(*args, **kwargs)
        padding = argument(args, kwargs, 2, "padding_idx")
        if padding is None:
            return read
        tokens, weight = (argument(args, kwargs, i, n) for i, n in enumerate(("input", "weight")))
        padded = tokens == (padding if padding >= 0 else weight.shape[0] + padding)
        with unseen():
            row = self._padding.value(weight[padding].detach(), _in_backward())
            self._seen |= self._first and bool(padded.any())
        return torch.where(padded.unsqueeze(-1), row, read)

    def _next(self, recorded: list[Decision], now: Decision) -> Decision:
        if not torch.is_grad_enabled():
            lines = [decision.line for decision in recorded[self._made :]]
            self._made += lines.index(now.line) if now.line in lines else len(lines)
        elif not (isinstance(now, Sides) and now.constant):
            while self._made < len(recorded) and _is_constant(recorded[self._made]):
                self._made += 1
        if self._made < len(recorded):
            decision = recorded[self._made]
            if (decision.name, decision.shape) == (now.name, now.shape):
                return decision
        what = f"number {self._made + 1} is now {now.name} of a tensor of shape {tuple(now.shape)}"
        if self.holds:
            raise _differs(what)
        raise MeasurementError(
            "the model chooses differently often off the weights, or without gradients: its choice "
            f"{what}, so that it cannot be held; its control flow must depend on neither"
        )

    def _note(
        self, decision: Decision, call: str, counts: Tensor, at: int, *inputs: Tensor
    ) -> None:
        self._made += 1
        if isinstance(decision, Choice) or self._learning or self._recomputes:
            self._inputs.append((decision, call, fingerprint(*inputs)))
        tally = self._tallies.get(self._key)
        if tally is None:
            tally = torch.zeros(4, dtype=torch.float64, device=counts.device)
        self._tallies[self._key] = tally.to(counts.device)
        self._tallies[self._key][at : at + 2] += counts

    def _again(self, now: Choice, call: str, x: Tensor) -> Choice:
        """Return what a backward is to choose: what a forward of this run has chosen for the same
        input, or, where recomputation chooses what the forward has not (losses of routers, which
        are computed with gradients only), what the first backward has chosen after that.
        """
        choice = self._recognised(call, (x,))
        if choice is not None:
            assert isinstance(choice, Choice)
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
        assert isinstance(choice, Choice)
        return choice

    def _recognised(self, call: str, inputs: tuple[Tensor, ...]) -> Decision | None:
        """Return the decision of a forward of this run that had the same inputs."""
        if self._inputs:  # all at once: each transfer waits for the device
            prints = torch.stack([print_ for _, _, print_ in self._inputs]).tolist()
            for (decision, made, _), found in zip(self._inputs, prints, strict=True):
                kind = made, decision.shape
                self._known.setdefault(kind, {})[tuple(found)] = decision
            self._inputs.clear()
        known = self._known.get((call, inputs[0].shape), {})
        if not known:
            return None
        here = tuple(fingerprint(*inputs).tolist())
        if here in known:
            return known[here]
        nearest = min(known, key=lambda there: math.dist(here, there))
        return known[nearest] if math.dist(here, nearest) < SAME * math.hypot(*here) else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _constant(kinked: Kinked) -> bool:
    """Return whether a call does not depend on weights, as far as that is known."""
    return torch.is_grad_enabled() and not any(t.requires_grad for t in kinked.operands)


def _is_constant(decision: Decision) -> bool:
    return isinstance(decision, Sides) and decision.constant


def _differs(what: str) -> PieceError:
    return PieceError(
        f"the model calls functions with kinks differently often off the weights, or without "
        f"gradients: {what}, so that their sides cannot be held; its control flow must depend on "
        'neither, or finite_difference.kinks be "crossed"'
    )


def _rescales() -> UnsupportedError:
    return UnsupportedError(
        "ds_hessian does not support embeddings with max_norm, whose forward rescales rows "
        "of the weights in place, without a gradient; leave max_norm out"
    )
