"""The decisions of a model at its weights, which it makes again wherever it is evaluated.

The i-th decision of a micro-batch's forward is the i-th that was recorded; a forward without
gradients leaves out what is computed with gradients only (losses of routers), so there the next one
counts that the same line of the model has made. In a backward, a decision is made again where
activations are recomputed; it is recognised by its input, since schedules of pipelines have several
micro-batches and layers under way.

Memory: the recorded indices, in one byte for each chosen expert of at most 256; one bit for each
element at a kink (two where a function has two), and one or two bytes for each element that is left
by pooling. Where the sides of kinks need more than `allowed` bytes, all of them are given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends import kinks
from ds_hessian.backends.bits import compact
from ds_hessian.backends.choices import (
    SAME,
    SAMPLED,
    Choice,
    Line,
    PieceError,
    Sides,
    called,
    dim_of,
    fingerprint,
    indices_of,
    line_of_call,
    sides_of,
)
from ds_hessian.backends.hooks import unseen
from ds_hessian.backends.pieces import Kinked
from ds_hessian.errors import MeasurementError

Decision = Choice | Sides


class Decisions:
    """What the forwards of one measurement have decided at the weights, and its replay.

    Args:
        allowed: The bytes that may be held of the sides of kinks; 0 to cross all kinks.

    Attributes:
        holds: Whether sides of kinks are held.
        over: Whether they have been given up, since they need more memory than is allowed.
        held: The bytes that are held of them.
        key: The micro-batch whose forward was begun last; None before any.
        first: Whether that forward is its first, which records.
        learning: Whether a forward of this run is its micro-batch's first.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.holds, self.over, self.held = allowed > 0, False, 0
        self.key: Hashable = None
        self.first, self.learning = True, False
        self._recorded: dict[Hashable, list[Decision]] = {}
        self._made = 0  # decisions of the present forward so far
        # The decisions of this run's forwards, with fingerprints of their inputs: the latest ones
        # as tensors, the others by call, shape and fingerprint.
        self._inputs: list[tuple[Decision, str, Tensor]] = []
        self._known: dict[tuple[str, torch.Size], dict[tuple[float, ...], Decision]] = {}
        # What backwards decide beyond their forwards, by the decision of a forward that came
        # before; by micro-batch where none did.
        self._later: dict[tuple[Hashable, int], list[Decision]] = {}
        # What written backwards decide, by micro-batch, name, shape and line; and how many of these
        # calls this run has made.
        self._backwards: dict[Hashable, list[Sides]] = {}
        self._called: dict[Hashable, int] = {}
        self._alone = True  # whether this run has one micro-batch
        self._latest: Decision | None = None
        self._since = 0
        self._recomputes = False  # whether backwards evaluate functions with kinks
        self._tallies: dict[Hashable, Tensor] = {}
        self._kinked: Tensor | None = None  # whether values lie on both sides of a kink

    # ---- forwards

    def begin(self, alone: bool) -> None:
        """Begin a run of forwards and backwards, of one micro-batch `alone` or of several."""
        self._latest, self._since, self._alone, self.learning = None, 0, alone, False
        self._called.clear()

    def end(self) -> None:
        """End the run: no backward comes whose forward it has."""
        self._inputs.clear()
        self._known.clear()

    def at(self, key: Hashable) -> None:
        """Begin the forward of a micro-batch; its first one records the decisions."""
        self.key, self.first, self._made = key, key not in self._recorded, 0
        self.learning |= self.first
        self._recorded.setdefault(key, [])
        self._tallies.pop(key, None)

    def has(self, keys: Sequence[Hashable]) -> bool:
        """Return whether all these forwards have been recorded."""
        return all(key in self._recorded for key in keys)

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
        before = self._recorded.get(self.key, [])[: self._made]
        self._made = sum(isinstance(each, Choice) for each in before)
        for decisions in (*self._recorded.values(), *self._later.values()):
            decisions[:] = [each for each in decisions if isinstance(each, Choice)]
        self._backwards.clear()
        for known in self._known.values():
            for print_ in [p for p, each in known.items() if isinstance(each, Sides)]:
                del known[print_]
        self._inputs = [each for each in self._inputs if isinstance(each[0], Choice)]
        self.held = 0

    def beside(self) -> Decisions:
        """Return others, as of a function that is called beside the model."""
        return Decisions(self._allowed)

    @property
    def made(self) -> int:
        """The number of decisions of the present forward so far."""
        return self._made

    def lines_since(self, since: int) -> tuple[Line, ...]:
        """Return where the present forward has decided, since so many decisions."""
        return tuple(each.line for each in self._recorded[self.key][since : self._made])

    def give_up(self, since: int, choices: bool) -> None:
        """Give up what the present forward, a first one, has decided since so many decisions: the
        sides of kinks, which are crossed, and maybe choices.
        """
        recorded = self._recorded[self.key]
        given_up = [d for d in recorded[since:] if choices or isinstance(d, Sides)]
        recorded[since:] = [d for d in recorded[since:] if all(d is not g for g in given_up)]
        self._made = len(recorded)
        self._inputs = [each for each in self._inputs if all(each[0] is not d for d in given_up)]
        sides = [d for d in given_up if isinstance(d, Sides)]
        self.held -= sum(d.nbytes for d in sides)
        if sides:
            self._kinked = torch.ones((), dtype=torch.bool)

    def look_for_kinks(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether a function that is called as it is has kinks, at the weights."""
        name = name.strip("_")
        found = None
        if self.first and name in kinks.NAMES:
            with unseen():
                found = kinks.kinked(name, args, kwargs)
        if found is not None:
            before = self._kinked
            self._kinked = found if before is None else found | before.to(found.device)

    # ---- choices

    def choice(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        x: Tensor,
    ) -> Choice:
        """Return the choice among `x` that the present call of a function makes again."""
        with torch.no_grad():
            indices = indices_of(name, func(*args, **kwargs))
        dim = dim_of(name, args, kwargs)
        most = x.numel() if dim is None else x.shape[dim]
        now = Choice(name, x.shape, dim, compact(indices, most), line_of_call())
        if in_backward():  # which recomputes
            return self._again(now, called(name, args, kwargs), x)
        recorded = self._recorded[self.key]
        if self.first:
            recorded.append(now)
        choice = self._next(recorded, now)
        assert isinstance(choice, Choice)
        count = torch.full((), choice.number, dtype=torch.float64, device=x.device)
        changed = choice.changes(indices).to(torch.float64)
        self._note(choice, called(name, args, kwargs), torch.stack([count, changed]), 0, x)
        return choice

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
        later = self._later_ones()
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

    # ---- sides of kinks

    def sides(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides | None:
        """Return the sides of the present call; None where they are not known, or are given up."""
        if in_backward():
            return self._sides_again(kinked, func, args, kwargs)
        return self._sides_in_forward(kinked, func, args, kwargs)

    def _sides_in_forward(
        self, kinked: Kinked, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sides | None:
        recorded = self._recorded[self.key]
        constant = _constant(kinked)
        if self.first:
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
        later = self._later_ones()
        if self._since == len(later):
            if not self.learning:
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
        call = (self.key, kinked.name, kinked.operands[0].shape, line_of_call())
        found, number = self._backwards.setdefault(call, []), self._called.get(call, 0)
        self._called[call] = number + 1
        if self.learning and number == len(found):
            made = self._recording(kinked, func, args, kwargs)
            if not self.holds:
                return None
            if not self._alone:
                self._kinked = torch.ones((), dtype=torch.bool) if made.nbytes else self._kinked
                return None
            found.append(made)
        return found[number] if number < len(found) else None

    def _later_ones(self) -> list[Decision]:
        """Return what backwards have decided after the latest decision of a forward.

        That decision tells the micro-batch, also to a run of several that were learnt one by one.
        Before any, it is the one of the run, if that has one alone.
        """
        key = self.key if self._alone and self._latest is None else None
        return self._later.setdefault((key, id(self._latest)), [])

    # ---- of a forward, in the order of their calls

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
        if isinstance(decision, Choice) or self.learning or self._recomputes:
            self._inputs.append((decision, call, fingerprint(*inputs)))
        tally = self._tallies.get(self.key)
        if tally is None:
            tally = torch.zeros(4, dtype=torch.float64, device=counts.device)
        self._tallies[self.key] = tally.to(counts.device)
        self._tallies[self.key][at : at + 2] += counts

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


def in_backward() -> bool:
    """Return whether this is in a backward."""
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
