"""What a Gauss-Newton operator reads in the gradient at the weights: outputs and loss.

Outputs and loss are read in the one gradient that an operator needs anyway. Beside it, one
micro-batch of a cross entropy is evaluated once more, with something added to the outputs, since a
cotangent like that of a cross entropy may be one of a loss whose weights of tokens depend on the
outputs (focal loss); where these are in 16 bits, as it is in fp32, too. So is each micro-batch with
other weights, whose loss may be another one. Where the loss is no cross entropy, each micro-batch
is evaluated twice more with something added to the outputs, to see whether the loss is quadratic in
them, and the first one once more as it is where the outputs had to be found; none is after one that
shows that it is not. A loss that is neither is evaluated once more, of outputs in fp64, in which
its cotangents are sampled, where there is room for it; where it takes none, or rounds them, and
these are in 16 bits, in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import MeasurementError
from ds_hessian.memory import FP32
from ds_hessian.operators.checks import kinks_crossed
from ds_hessian.operators.clock import add_gradient
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.outputs.find import find_outputs, known_outputs
from ds_hessian.operators.outputs.losses import (
    Secant,
    Squares,
    Tokens,
    beside_outputs,
    group_of,
    keeps_weights,
    read_cross_entropy,
    read_squares,
    size_of,
    uneven,
)
from ds_hessian.operators.outputs.planned import fits_fp64
from ds_hessian.operators.outputs.required import (
    require_curved,
    require_one_head,
    require_same_around,
    requiring_fp32,
    requiring_others,
)
from ds_hessian.operators.outputs.tap import nothing, sample

Read = TypeVar("Read", Tokens, Squares)

REACH = 2.0
"""How far outputs go, at least, for a cross entropy to be verified. Probabilities change by factors
there: of many nearly even classes, weights that depend on the label's show it by nothing less.
"""

FAR = 2.0**10
"""The farther of the two displacements of the outputs, in units of the nearer one, at most."""


class _Listener(ABC):
    """Reads something at the outputs.

    Attributes:
        failed: Micro-batches whose loss is not of the kind that is read.
        largest: Bytes of the largest outputs, in fp32.
        samples: A sample of the cotangents of each micro-batch that passed as it is.
        scales: `Session.cotangent_scale` in the backward of each micro-batch of a pass of several.
        told: Micro-batches with a cotangent other than zero.
    """

    reads = True

    def __init__(self) -> None:
        self.failed = self.largest = 0
        self.samples: dict[int, Tensor] = {}
        self.scales: dict[int, float] = {}
        self.told = set[int]()

    def _note(self, index: int, c: Tensor) -> None:
        """Keep a sample of a micro-batch's cotangents, and whether there are any."""
        self.samples[index] = sample(c).to(torch.promote_types(c.dtype, torch.float32), copy=True)
        if bool(c.any()):
            self.told.add(index)

    def outputs(self, index: int, f: Tensor) -> Tensor | None:
        self.largest = max(self.largest, FP32 * f.numel())
        return self._addend(index, f)

    def _addend(self, index: int, f: Tensor) -> Tensor | None:
        return None

    @abstractmethod
    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        """As `tap.Listener` has it."""


class _Reader(_Listener):
    """Reads cross entropies, in units of the cotangents.

    Attributes:
        others: The cotangents of other losses; None if they are not kept.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session, self.head = session, session.head
        self.tokens: dict[int, Tokens] = {}
        self.others: dict[int, Tensor] | None = {}

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        self._note(index, c)
        self.scales[index] = self.session.cotangent_scale
        found = read_cross_entropy(f, c, group_of(f, self.head))
        if found is not None:
            self.tokens[index] = found
            return
        self.failed += 1
        if self.others is not None:
            self.others[index] = c.clone()


class _Wide(_Listener):
    """Keeps samples of the cotangents of outputs in fp32, or in fp64.

    Args:
        dtype: Which of the two.

    Attributes:
        finer: Micro-batches with cotangents that fp32 would round.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.finer = dtype, 0

    def _addend(self, index: int, f: Tensor) -> Tensor:
        return nothing(f, self.dtype)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        self._note(index, c)
        self.finer += not c.float().to(c.dtype).equal(c)
        return torch.zeros_like(c)


class _Verifier(_Listener):
    """Reads whether the loss is a cross entropy at other outputs too, with the same weights.

    These are in fp32, so that a cotangent shows what is lost in one of 16 bits: label smoothing of
    nearly even probabilities is a cross entropy of smaller weights there.

    Only the gradient that does not pass the outputs goes on into the model.

    Attributes:
        widens: Whether weights are read anew at the outputs as they are, where these are in 16
            bits: a twentieth of a weight is lost in them.
    """

    def __init__(self, session: Session, tokens: Mapping[int, Tokens]) -> None:
        super().__init__()
        self.session, self.tokens, self.widens = session, dict(tokens), False
        self._added: dict[int, Tensor] = {}

    def _addend(self, index: int, f: Tensor) -> Tensor:
        if self.widens:
            return nothing(f)
        self._added[index] = beside_outputs(f, REACH)
        return self._added[index]

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        scale, known = self.session.cotangent_scale, self.tokens.get(index)
        found = read_cross_entropy(f, c, group_of(f, self.session.head))
        if known is None or found is None:
            self.failed += 1
        elif self.widens:
            self.tokens[index] = found.scaled(scale)
        else:
            self.failed += not keeps_weights(known, f, c, scale, self._added.pop(index))
        return torch.zeros_like(c)


class _Prober(_Listener):
    """Reads whether the loss is quadratic: passes as it is, and with something added on each side.

    In these two only the gradient that does not pass the outputs goes on into the model.

    Args:
        before: The cotangents of micro-batches that have had the first pass, which are used up.

    Attributes:
        passes: Passes of the micro-batch so far.
        widens: Whether the first one is made again in fp32, where outputs are in 16 bits: their
            cotangents have too few digits for a slope.
    """

    reads, widens = False, False

    def __init__(self, before: dict[int, Tensor]) -> None:
        super().__init__()
        self.passes = 0
        self.squares: dict[int, Squares] = {}
        self._before = before
        self._added: dict[int, Tensor] = {}
        self._near: dict[int, Secant] = {}

    def _addend(self, index: int, f: Tensor) -> Tensor | None:
        if self.widens:
            return nothing(f)
        if self.passes == 1:
            self._added[index] = beside_outputs(f)
        return self._added.get(index)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor | None:
        if self.passes == 0:
            self._before[index] = c.clone()
            if self.widens:
                return torch.zeros_like(c)
            self._note(index, c)
            return None
        if not c.numel():  # of no token the loss is of any kind
            self.squares[index] = Squares(c.float())
            return torch.zeros_like(c)
        secant = Secant.of(self._before[index], c, self._added[index])
        if self.passes == 1:
            self._near[index] = secant
            # So far that cotangents of squares become others, and their rounding is no more of the
            # slope than it is of them.
            reach = size_of(self._before[index]) / secant.steepest
            added = self._added[index]
            ratio = (reach / added.flatten()[0].abs()).nan_to_num(2.0).clamp(2.0, FAR)
            uneven(added).mul_(-ratio)
        else:
            del self._before[index], self._added[index]
            found = read_squares(self._near.pop(index), secant)
            if found is None:
                self.failed += 1
            else:
                self.squares[index] = found
        return torch.zeros_like(c)


class Reading:
    """Outputs and loss at the session's weights.

    Args:
        session: The measurement.
        outputs: The name of the outputs' module; None to find it.

    Attributes:
        tap: The outputs.
        gradient: The gradient at the weights, divided by the session's scale.
        tokens: By micro-batch, where the loss is cross entropy, in units of the terms of the
            gradient; else empty.
        squares: The same where the loss is quadratic in the outputs.
        kind: Which of the two, on all ranks; None for another loss.
        passes_by: Whether a part of such a loss does not pass the outputs.
        kinks_crossed: Why displacements cross kinks; None if there are none, or all are held.
        kinked: Whether the loss is neither, and kinks are crossed.
        cotangents: If it is neither, a sample of the cotangents of each micro-batch, in units of
            the terms of the gradient; else empty.
        seconds: The time of one gradient over all micro-batches, without what the first builds.
        largest: Bytes of the largest outputs of a micro-batch, in fp32.
        pilot: The first unit that has a loss on most ranks.

    Raises:
        UnsupportedError: the loss is known by its values, and no function of the outputs alone; or
            it is linear in them, and nobody has named them.

    Collective: the constructor.
    """

    def __init__(self, session: Session, outputs: str | None) -> None:
        self.session, self.space = session, session.space
        self.tokens: dict[int, Tokens] = {}
        self.squares: dict[int, Squares] = {}
        self.kind: Literal["cross entropy", "squares"] | None = None
        self.cotangents: dict[int, Tensor] = {}
        self._partial, self.largest, self.seconds = False, 0, 0.0
        self._told = set[int]()
        session.displace(None, 0.0)
        self.gradient = self.space.zeros()
        reader, every = _Reader(session), range(session.num_micro_batches)
        found = self._read_first(outputs, reader)
        others, reader.others = reader.others, None
        done, entropic = 1, not self._failed(reader)
        if not entropic:
            done = self._probe(every, others or {})
            if found and self.kind == "squares":
                curved = any(bool(each.weights.any()) for each in self.squares.values())
                require_curved(session, self.tap, bool(self._told), curved)
        self.seconds += self._pass(reader, self.gradient, every[done:])
        self._scale(reader.tokens, every[done:], reader.scales)
        units = [float(bool(self._told & set(self.tap.calls(every[i : i + 1])))) for i in every]
        told = self.space.reduce(torch.tensor(units, dtype=torch.float64))
        self.pilot = int(told.argmax())
        if entropic and self._verify(reader) and not self._failed(reader):
            self.tokens, self.kind = reader.tokens, "cross entropy"
        self.passes_by = self._partial and self.kind is not None
        self.kinks_crossed = kinks_crossed(session)
        self.kinked = self.kinks_crossed is not None and self.kind is None
        if self.kind is not None:
            self.cotangents.clear()
        elif not (fits_fp64(*self.room()) and self._takes_fp64(every)):
            # Second differences of cotangents need all digits of all of them.
            lacking = self.tap.is_here and not self.cotangents.keys() >= set(
                self.tap.calls(range(1))
            )
            some = every if self._anywhere(self.tap.narrow) else range(self._anywhere(lacking))
            for i in some:
                with requiring_fp32(self.tap):
                    self._pass(_Wide(torch.float32), self.space.zeros(), every[i : i + 1])

    @property
    def dtype(self) -> torch.dtype:
        """That of the outputs that a loss takes which is known by its values: fp64, or fp32 where
        these are large, or the loss does not take fp64, or rounds it.
        """
        return torch.float64 if self.tap.finer else torch.float32

    def room(self) -> tuple[int, int]:
        """Return the bytes of the largest outputs, in fp32, and of the smallest vector, of all
        ranks.

        Collective: a small exchange.
        """
        outputs, vectors = self.space.of_all_ranks(self.largest, FP32 * self.space.n_local)
        return int(outputs.max()), int(vectors.min())

    def _takes_fp64(self, every: range) -> bool:
        """Sample the cotangents of all units of outputs in fp64, the pilot first; return whether
        the loss takes these and does not round them.
        """
        before, self.tap.finer = dict(self.cotangents), True
        for i in sorted(every, key=self.pilot.__ne__):
            listener = _Wide(torch.float64)
            try:
                self._pass(listener, self.space.zeros(), every[i : i + 1])
            except MeasurementError:  # weights of fp32 behind them, or too little memory
                finer = False
            else:
                finer = i != self.pilot or self._anywhere(listener.finer)
            if not finer:
                self.cotangents, self.tap.finer = before, False
                return False
        return True

    def _read_first(self, outputs: str | None, reader: _Reader) -> bool:
        """Find the outputs, and read the first micro-batch, whose gradient is added.

        Return whether neither host nor user has named them.
        """
        known, first, out = known_outputs(self.session, outputs), range(1), self.gradient
        self.tap, tokens = (known, None) if known else find_outputs(self.session, outputs, out)
        if tokens is not None:
            reader.tokens[0] = tokens
            self._told.add(0)
        else:  # where the tap was not known, the gradient has been added
            self._pass(reader, out if known else self.space.zeros(), first)
        self._scale(reader.tokens, first)
        return known is None and outputs is None

    def _verify(self, reader: _Reader) -> bool:
        """Return whether the pilot has a cross entropy at other outputs, too, and micro-batches
        whose weights do not show that theirs is the same loss: one without a loss has any.
        """
        verifier, waste = _Verifier(self.session, reader.tokens), self.space.zeros()
        wide = self._anywhere(any(found.roundoff > ROUNDOFF for found in reader.tokens.values()))
        for i in [self.pilot, *self._unlike(reader.tokens)]:
            one = range(i, i + 1)
            if wide:
                verifier.widens = True
                self._pass(verifier, self.space.zeros(), one)
                verifier.widens = False
            seconds = self._pass(verifier, waste, one)
            self.seconds += seconds if i == self.pilot else 0.0
        self._partial = bool(self.space.norm(waste))
        if self._partial:
            require_one_head(self.session, self.tap)
        return not self._failed(verifier)

    def _unlike(self, tokens: Mapping[int, Tokens]) -> list[int]:
        """Return the units in which weights of some rank are unlike those of its pilot."""
        every = range(self.session.num_micro_batches)
        calls = [self.tap.calls(every[i : i + 1]) for i in every]
        units = [[tokens[k] for k in some if k in tokens] for some in calls]
        pilot = units[self.pilot]
        apart = [float(not all(a.is_like(b) for a in pilot for b in unit)) for unit in units]
        found = self.space.reduce(torch.tensor(apart, dtype=torch.float64)).tolist()
        return [i for i in every if i != self.pilot and found[i]]

    def _probe(self, every: range, before: dict[int, Tensor]) -> int:
        """Read squares, unit by unit as long as they are; return how many units have been.

        Args:
            every: All units.
            before: The cotangents of the first one's micro-batches that are no cross entropy.
        """
        here = set(self.tap.calls(range(1))) if self.tap.is_here else set[int]()
        lacking = self._anywhere(len(here - before.keys()))
        prober, around = _Prober(before), [self.space.zeros(), self.space.zeros()]
        for i in every:
            unit, times = every[i : i + 1], list[float]()
            prober.passes = 0
            if i or lacking:  # the gradient of the first has been added
                out = self.gradient if i else self.space.zeros()
                times.append(self._pass(prober, out, unit))
            if self._anywhere(self.tap.narrow):
                prober.widens = True
                with requiring_fp32(self.tap):
                    self._pass(prober, self.space.zeros(), unit)
                prober.widens = False
            with requiring_others(self.tap):
                for prober.passes, out in enumerate(around, 1):
                    times.append(self._pass(prober, out, unit))
            self.seconds += times[0]
            if not i:
                require_same_around(self.session, self.tap, *around)
                self._partial = bool(self.space.norm(around[0]))
                if self._partial:
                    require_one_head(self.session, self.tap)
            if self._failed(prober):
                return i + 1
            self._scale(prober.squares, unit)
        self.squares, self.kind = prober.squares, "squares"
        return len(every)

    def _pass(self, listener: _Listener, out: Tensor, some: range) -> float:
        """Add the gradient of some units to `out` with a listener; return the seconds."""
        with self.tap.listening(some, listener):
            seconds = add_gradient(self.session, out, some)
        self.largest = max(self.largest, listener.largest)
        self._told |= listener.told
        scales = {} if 0 in some else listener.scales
        for i, c in listener.samples.items():
            self.cotangents[i] = c * scales.get(i, self.session.cotangent_scale)
        listener.samples.clear()
        return seconds

    def _scale(
        self, kept: dict[int, Read], some: range, scales: Mapping[int, float] | None = None
    ) -> None:
        """Bring what was read in some units from units of cotangents to those of the gradient.

        Args:
            kept: What was read.
            some: The units.
            scales: The factor of each micro-batch; None for that of the last backward, which alone
                is known after the first one of a session.
        """
        for i in set(self.tap.calls(some)) & kept.keys():
            kept[i] = kept[i].scaled(scales[i] if scales else self.session.cotangent_scale)

    def _failed(self, listener: _Listener) -> bool:
        """Return whether the loss is of another kind on some rank."""
        return self._anywhere(listener.failed)

    def _anywhere(self, count: int) -> bool:
        """Return whether a count is not 0 on some rank."""
        return bool(self.space.reduce(torch.tensor([float(count)], dtype=torch.float64))[0])

    @property
    def words(self) -> str:
        """The outputs and the loss in them, in words."""
        rest = ", without another part of the loss" if self._partial else ""
        return f"{self.tap.name}: {self.kind or 'a loss known by its values'}{rest}"
