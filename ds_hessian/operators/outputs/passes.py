"""Passes of a Gauss-Newton product: differences of outputs, and their way back into the model.

    delta = f(w + h v) - f(w - h v)                             two forwards, no graph
    J' H_out delta                                              one forward and backward at w

with `H_out delta` in place of the cotangent where the loss in the outputs is known; else, of the
job's own loss, with `(c(f + rho delta) - c(f - rho delta)) / 2 rho`, of two forwards and backwards
at w, of which the first one ends at the outputs. They are differenced there, and the outputs are
in fp64 where the loss takes that: one that bends within the rounding of outputs (the logarithm of
what a probability lacks to 1) has no such differences in fp32, nor has any in 16 bits.

Memory: the differences of a group of micro-batches, fp32: as many as fit into one vector, and one
at least; where the loss is known by its values, the cotangents of the group as well, and a sample
of those of each micro-batch (`tap.SAMPLES`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import Session
from ds_hessian.operators.outputs.losses import rounding_of, size_of
from ds_hessian.operators.outputs.planned import group_of
from ds_hessian.operators.outputs.tap import Listener, Silence, Tap, nothing, sample

Note = Callable[[int, Tensor], None]
"""Does something with the outputs of a micro-batch."""

OutputProduct = Callable[[int, Tensor, Tensor], Tensor]
"""`(micro-batch, f, u)` to `H_out u` in units of the gradient's terms, in the shape of f, fp32."""


@dataclass
class Sums:
    """Sums of this rank over the outputs of an evaluation.

    Attributes:
        squares: `(5,)` fp64: the squares of delta and their number; of a sample, those of the first
            and of the second differences, and of the outputs themselves.
        form: `<kappa delta, H_out kappa delta>`.
        backs: The square of `H_out kappa delta`, which goes back into the model, of each call
            of the module of the outputs.
        change: `(2,)`: what `displace` returned for the way from `w + h v` to `w - h v`.
        choices: `(4,)` fp64: `Session.choices` of the forwards at `w - h v`.
        values: `(2,)` fp64: the squares of the first and of the second differences of a sample of
            the cotangents, where `Passes.cotangents` has them at the weights.
        thirds: `(3,)` fp64: the squares of the first and second differences of a sample of the
            outputs and of a third of their third ones, of micro-batches that have these.
    """

    squares: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    form: float = 0.0
    backs: dict[int, float] = field(default_factory=dict)
    change: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    choices: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    values: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    thirds: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))


class _Recorder:
    """Has something done with the outputs of each micro-batch of a pass."""

    reads = False

    def __init__(self, note: Note) -> None:
        self.note = note

    def outputs(self, index: int, f: Tensor) -> None:
        self.note(index, f)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> None:
        raise AssertionError("a forward without a graph has no cotangent")


class _Known:
    """Puts `H_out delta` in place of the cotangent."""

    reads = True

    def __init__(self, session: Session, group: Group, product: OutputProduct, sums: Sums) -> None:
        self.session, self.group, self.product, self.sums = session, group, product, sums

    def outputs(self, index: int, f: Tensor) -> None:
        self.group.bend(index, f, self.sums)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        u = self.group.differences[index]
        found = self.product(index, f, u)
        self.sums.form += _dot(found, u)
        self.sums.backs[index] = _square(found)
        return found.div_(self.session.cotangent_scale).to(c.dtype)


class _Shifted:
    """Lets the job's loss run at `f + rho delta` and keeps its cotangents, which go no farther; at
    the other side (rho < 0) their difference goes on in place of them. Keeps their part of a third
    difference, where there is to be one.

    Args:
        passes: The evaluation.
        group: The differences.
        rho: The displacement of the outputs, with its sign.
        sums: Sums are added to these.
    """

    reads = False

    def __init__(self, passes: Passes, group: Group, rho: float, sums: Sums) -> None:
        self.session, self.group, self.rho, self.sums = passes.session, group, rho, sums
        self.third, self.middles = passes.third_differences, passes.cotangents
        self.dtype, self.again = passes.dtype, passes.rounded is not None

    def outputs(self, index: int, f: Tensor) -> Tensor:
        if self.rho > 0:
            self.group.bend(index, f, self.sums)
        added = (self.rho * self.group.differences[index]).to(self.dtype)
        return added.add_(rounding_of(f)) if self.again else added

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        if self.third is not None:
            if index not in self.third:
                self.third[index] = torch.zeros_like(c)
            self.third[index].add_(c, alpha=-3.0 if self.rho > 0 else -1.0)
        kept = self.group.cotangents
        if self.rho > 0:
            kept[index] = c.clone()
            return torch.zeros_like(c)
        above, scale = kept.pop(index), self.session.cotangent_scale
        factor = self.group.factors[index]
        if index in self.middles:
            ends = sample(above) * scale, sample(c) * scale
            second = ends[0] + ends[1] - 2 * self.middles[index]
            both = (ends[0] - ends[1]).float(), second.float()
            squares = torch.tensor([_square(x) for x in both])
            self.sums.values += factor**2 * squares
        # The sign is that of what this pass adds.
        difference = above.sub_(c).mul_(factor / (2 * self.rho)).float()
        along = _dot(difference, self.group.differences[index])
        self.sums.form -= factor * along * scale
        self.sums.backs[index] = _square(difference) * scale**2
        return difference.to(c.dtype)


class _Third:
    """Completes the third difference of the cotangents, and puts a third of it, which is the error
    of their first one, in place of those at `f + 2 rho delta`.

    Attributes:
        form: The error of `Sums.form`.
    """

    reads = False

    def __init__(
        self, session: Session, group: Group, rho: float, third: dict[int, Tensor]
    ) -> None:
        self.session, self.group, self.rho, self.third = session, group, rho, third
        self.form = 0.0

    def outputs(self, index: int, f: Tensor) -> Tensor:
        return (2 * self.rho * self.group.differences[index]).to(self.third[index].dtype)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        factor = self.group.factors[index]
        error = self.third[index].add_(c).mul_(factor / (6 * self.rho)).float()
        along = _dot(error, self.group.differences[index])
        self.form += factor * along * self.session.cotangent_scale
        return error.to(c.dtype)


class _Middle(Silence):
    """Adds the cotangents at the outputs to their third difference, and stops them."""

    def __init__(self, third: dict[int, Tensor]) -> None:
        self.third = third

    def outputs(self, index: int, f: Tensor) -> Tensor:
        return nothing(f, self.third[index].dtype)

    def cotangent(self, index: int, f: Tensor, c: Tensor) -> Tensor:
        self.third[index].add_(c, alpha=3.0)
        return super().cotangent(index, f, c)


class Group:
    """Differences of the outputs of some micro-batches, `kappa delta`.

    Attributes:
        differences: `{micro-batch: difference}`, fp32.
        factors: kappa over that of each micro-batch.
        middles: A sample of `f(w + h v) + f(w - h v)`, for the second difference.
        beyond: A sample of `f(w + 2 h v) - 2 f(w + h v)` of some of them, for the third one.
        cotangents: Those at `f + rho kappa delta` of micro-batches that have had it.
    """

    def __init__(self) -> None:
        self.differences, self.factors = dict[int, Tensor](), dict[int, float]()
        self.middles, self.beyond = dict[int, Tensor](), dict[int, Tensor]()
        self.cotangents, self._first = dict[int, Tensor](), dict[int, float]()

    def above(self, index: int, f: Tensor) -> None:
        """Keep a micro-batch's outputs at `w + h v`."""
        self.differences[index] = _copy(f)
        if index in self.beyond:
            self.beyond[index] -= 2 * _unmasked(f)

    def below(self, index: int, f: Tensor) -> None:
        """Take those at `w - h v` from them."""
        above, below = self.differences[index], _copy(f)
        self.middles[index] = _unmasked(above) + _unmasked(below)
        self.differences[index] = _subtract(above, below)
        self._first[index], self.factors[index] = _square(sample(above)), 1.0

    def sizes(self, sums: Sums) -> None:
        """Add the squares of the differences, and their number."""
        for i, d in self.differences.items():
            sums.squares += torch.tensor([_square(d), d.numel(), self._first[i], 0.0, 0.0])

    def bend(self, index: int, f: Tensor, sums: Sums) -> None:
        """Add the squares of the second difference, and of the outputs at w."""
        here = _unmasked(f)
        second = _square(self.middles[index] - 2 * here)
        sums.squares[3] += second
        sums.squares[4] += _square(_moved(here, sample(self.differences[index])))
        if index in self.beyond:
            third = self.beyond[index] - self.middles[index] + 3 * here
            sums.thirds += torch.tensor([self._first[index], second, _square(third) / 9])

    def scale(self, kappa: float, each: dict[int, float]) -> None:
        """Multiply the differences, where a micro-batch has a kappa of its own by that."""
        for i, d in self.differences.items():
            d.mul_(each.get(i, kappa))
            self.factors[i] = kappa / each.get(i, kappa)


class Passes:
    """Evaluations of `J' H_out J v`.

    Args:
        session: The measurement.
        tap: The outputs.
        product: `H_out`; None where the loss in the outputs is not known.
        rho: The displacement of the outputs where it is not, in units of the rms of delta.
        dtype: That of the outputs which such a loss takes.
        largest: Bytes of the largest outputs of a micro-batch on any rank, in fp32.
        room: Bytes of the smallest rank's vector.
        cotangents: A sample of the cotangents of each micro-batch at the weights, in units of the
            gradient's terms; empty where the loss is known.
        pilot: The micro-batches of whose evaluation there may be a `repeat`.

    Attributes:
        kappa: The factor of the last differences.
        third_differences: Those of the cotangents, as far as they are; None for none.
        rounded: `(n_local,)`: evaluations are of weights of which each is displaced by its own
            rounding, as this points, and of outputs with another one; None for those as they are.
    """

    def __init__(
        self,
        session: Session,
        tap: Tap,
        product: OutputProduct | None,
        rho: float,
        dtype: torch.dtype,
        largest: int,
        room: int,
        cotangents: dict[int, Tensor],
        pilot: range,
    ) -> None:
        self.session, self.tap, self.product, self.rho = session, tap, product, rho
        self.dtype, self.cotangents, self.pilot = dtype, cotangents, pilot
        self.size = group_of(room, largest, dtype.itemsize)
        self.kappa = 1.0
        self.rounded: Tensor | None = None
        self._last: Group | None = None  # while there may be a `repeat`, or a `third`
        self.third_differences: dict[int, Tensor] | None = None

    @property
    def backwards(self) -> int:
        """Passes with a backward of one evaluation."""
        return 1 if self.product else 2

    @property
    def gradients(self) -> float:
        """Gradients of one evaluation: a forward is a third of one."""
        return 2 / 3 + self.backwards

    def evaluate(
        self,
        out: Tensor,
        v: Tensor,
        step: float,
        micro_batches: range,
        first: bool,
        doubted: bool = False,
        bent: range = range(0),
    ) -> Sums:
        """Add `J' H_out kappa delta` of these micro-batches to `out`; return their sums.

        Args:
            out: `(n_local,)` fp32.
            v: `(n_local,)` fp32.
            step: delta is `f(w + step v) - f(w - step v)`.
            micro_batches: The micro-batches.
            first: Whether kappa is chosen, which makes the rms of `kappa delta` about 1.
            doubted: Whether a `third` of these micro-batches may follow.
            bent: Micro-batches of which those among these have a third difference of the outputs: a
                forward more.

        Collective.
        """
        sums = Sums()
        for some in self._groups(micro_batches):
            group = self.differences(v, step, some, sums, bent)
            if first:
                self.kappa = self._chosen(sums.squares[None, :2])[0] or 1.0
                first = False
            group.scale(self.kappa, {} if self.product else self._each(group, some))
            self._displace(None, 0.0)
            self.third_differences = {} if doubted else None
            self.back(out, group, some, sums)
            self._last = group if doubted or micro_batches == self.pilot else None
        return sums

    def repeat(self, out: Tensor, v: Tensor, micro_batches: range) -> None:
        """Add what the last evaluation has added, with its differences, but the backward at weights
        of which each is displaced by its own rounding, as v points.
        """
        assert self._last is not None
        self.session.displace(self._rounding(v), 1.0)
        self.back(out, self._last, micro_batches, Sums())

    def third(self, out: Tensor, micro_batches: range) -> float:
        """Add the error that differencing the loss in the outputs has made in what the last
        evaluation has added, which was `doubted`, of these micro-batches; return that of its form.

        Like a product's (`ds_hessian.operators.displacement.belief`) it is a third difference, of
        cotangents here. Cost: two gradients of them.
        """
        assert self._last is not None and self.third_differences is not None
        self.session.displace(None, 0.0)
        last = _Third(self.session, self._last, self.rho, self.third_differences)
        for listener in _Middle(self.third_differences), last:
            out.neg_()  # so that the gradient that does not pass the outputs, of both, is in none
            self._pass(out, micro_batches, listener)
        return last.form

    def forget(self) -> None:
        """Drop the differences of the last evaluation."""
        self._last = self.third_differences = None

    def back(self, out: Tensor, group: Group, micro_batches: range, sums: Sums) -> None:
        """Add `J' H_out` times the group's differences to `out`, J at the weights as they are."""
        if self.product is not None:
            self._pass(out, micro_batches, _Known(self.session, group, self.product, sums))
            return
        for sign in (1.0, -1.0):
            self._pass(out, micro_batches, _Shifted(self, group, sign * self.rho, sums))
            out.neg_()

    def _pass(self, out: Tensor, some: range, listener: Listener) -> None:
        with self.tap.listening(some, listener):
            self.session.add_gradient(out, some)

    def differences(
        self, v: Tensor, step: float, micro_batches: range, sums: Sums, bent: range
    ) -> Group:
        """Return the differences of the outputs, not scaled yet."""
        some = range(max(micro_batches.start, bent.start), min(micro_batches.stop, bent.stop))
        group = Group()
        if some:
            beyond = group.beyond
            self._outputs(v, 2 * step, some, lambda i, f: beyond.update({i: _unmasked(f)}))
        self._ends(v, step, micro_batches, sums, group.above, group.below)
        group.sizes(sums)
        return group

    def _ends(
        self, v: Tensor, step: float, micro_batches: range, sums: Sums, above: Note, below: Note
    ) -> None:
        """Have the outputs at `w + step v` and those at `w - step v` noted."""
        again = self.rounded is not None
        self._outputs(v, step, micro_batches, _rounded(above) if again else above)
        sums.change = self._outputs(v, -step, micro_batches, below).double().cpu()
        sums.choices += self.session.choices(micro_batches).cpu()

    def _outputs(self, v: Tensor, step: float, micro_batches: range, note: Note) -> Tensor:
        """Have the outputs at `w + step v` noted; return what `displace` did."""
        change = self._displace(v, step)
        with self.tap.listening(micro_batches, _Recorder(note)):
            self.session.forward(micro_batches)
        return change

    def _displace(self, v: Tensor | None, step: float) -> Tensor:
        if self.rounded is None:
            return self.session.displace(v, step)
        x = self._rounding(self.rounded)
        return self.session.displace(x if v is None else x.add_(v, alpha=step), 1.0)

    def _rounding(self, v: Tensor) -> Tensor:
        """Return the rounding of each weight, as v points."""
        return self.session.masters().abs_().copysign_(v).mul_(self.session.unit_roundoff)

    def _each(self, group: Group, some: range) -> dict[int, float]:
        """Return the kappa of each micro-batch, of all ranks: the loss bends within lengths of the
        outputs, of which one micro-batch may move many where another one does not move.
        """
        calls = self.tap.calls(some)
        squares = torch.zeros(len(calls), 2, dtype=torch.float64)
        for i, d in group.differences.items():
            squares[i - calls.start] = torch.tensor([_square(d), d.numel()])
        found = zip(calls, self._chosen(squares), strict=True)
        return {i: kappa for i, kappa in found if kappa is not None}

    def _chosen(self, squares: Tensor) -> list[float | None]:
        """Return the powers of 2 that make the rms of differences about 1; None where they are
        zero, or not finite.

        Args:
            squares: `(k, 2)`: their squares and their number, of this rank.
        """
        whole = self.session.space.reduce(squares.reshape(-1)).reshape(-1, 2).tolist()
        known = [math.isfinite(square) and square > 0 for square, _ in whole]
        return [
            2.0 ** -round(math.log2(math.sqrt(square / count))) if sure else None
            for sure, (square, count) in zip(known, whole, strict=True)
        ]

    def _groups(self, micro_batches: range) -> Iterator[range]:
        for start in range(micro_batches.start, micro_batches.stop, self.size):
            yield range(start, min(start + self.size, micro_batches.stop))

    def forms(self, v: Tensor, step: float, micro_batches: range, sums: Sums) -> list[float]:
        """Return this rank's parts of `delta' H_out delta` of each micro-batch, by forwards alone.
        Choices are added to the sums.

        H_out is that at the mean of the two outputs, which for differences of second order is as
        good as that at w.
        """
        found, product, above = list[float](), self.product, dict[int, Tensor]()
        forms = dict[int, float]()
        assert product is not None

        def note(i: int, f: Tensor) -> None:
            below = _copy(f)
            delta = _subtract(above[i].clone(), below)
            middle = above.pop(i).add_(below).div_(2)
            forms[i] = _dot(product(i, middle, delta), delta)

        for some in self._groups(micro_batches):
            self._ends(v, step, some, sums, lambda i, f: above.update({i: _copy(f)}), note)
            for unit in some:
                found.append(sum(forms.pop(i, 0.0) for i in self.tap.calls(range(unit, unit + 1))))
        return found

    def around(self, out: Tensor, micro_batches: range) -> None:
        """Add the gradient that does not pass the outputs to `out`, at the weights as they are."""
        with self.tap.listening(micro_batches, Silence()):
            self.session.add_gradient(out, micro_batches)


def _subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return `a - b`, in place of a: 0 where both are the same infinity, as of a masked class."""
    if math.isfinite(size_of(b)):
        return a.sub_(b)
    masked = b.isinf().logical_and_(a == b)
    return a.sub_(b).masked_fill_(masked, 0.0)


def _unmasked(f: Tensor) -> Tensor:
    """Return a sample of outputs, fp32, 0 for those that are masked by minus infinity, or by the
    least number, of which sums are.
    """
    some = sample(f).float()
    return some.masked_fill(some < torch.finfo(some.dtype).min / 4, 0.0)


def _rounded(note: Note) -> Note:
    """Return what has outputs noted that are rounded otherwise: those that are the same number for
    two weights are rounded alike for both.
    """
    return lambda i, f: note(i, f.float() + rounding_of(f))


def _copy(f: Tensor) -> Tensor:
    """Return a copy in fp32: what follows in the model may write into f."""
    return f.to(torch.float32, copy=True)


def _moved(f: Tensor, delta: Tensor) -> Tensor:
    """Return outputs, with those that are larger than any that moves cut to that: they are
    constants, as those of classes that are masked by a large number, and are not rounded.
    """
    largest = size_of(f.masked_fill(delta == 0, 0.0))
    return f.clamp(-largest, largest)


def _square(x: Tensor) -> float:
    return _dot(x, x)


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the inner product of two fp32 tensors of one shape, in fp64."""
    flat = [x.reshape(-1).contiguous() for x in (a, b)]
    return float(ops.dots([(flat[0], flat[1])], len(flat[0])))
