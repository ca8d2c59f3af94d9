"""Differences of a model's outputs along a vector, and what they are pulled back to: the products
and quadratic forms of a Gauss-Newton matrix at a displacement, and what these show.

An evaluation is of a pilot, or of the other micro-batches, which finish its product. Memory: see
`ds_hessian.operators.outputs.gauss_newton`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import Session
from ds_hessian.config import OutputMatrix
from ds_hessian.errors import UnsupportedError
from ds_hessian.operators.checks import is_lost, measurable, require_finite
from ds_hessian.operators.displacement.figures import quotient
from ds_hessian.operators.outputs.forms import SAMPLE
from ds_hessian.operators.outputs.passes import OutputProduct, Passes, Sums
from ds_hessian.operators.outputs.reading import Reading
from ds_hessian.operators.outputs.trials import Trial
from ds_hessian.operators.protocol import OperatorCost


@dataclass(frozen=True)
class Figures:
    """Figures over all ranks of an evaluation, of a unit vector.

    Attributes:
        trial: The product.
        fidelity: Cosine between the realised displacement and v.
        choices: `Session.choices` at the displaced weights, of all ranks.
        backs: The square of what goes back into the model of each micro-batch, up to a factor.
    """

    trial: Trial
    fidelity: float
    choices: Sequence[float]
    backs: Sequence[float]

    @property
    def typical(self) -> int:
        """The micro-batch with the part in the product that is nearest to one of all alike."""
        mean = sum(self.backs) / len(self.backs)
        return max(range(len(self.backs)), key=lambda i: _alike(self.backs[i], mean))


@dataclass(frozen=True)
class Before:
    """The trial before: what it added up, and the factor from that to a product."""

    vector: Tensor
    unit: float


class OutputDifferences:
    """Products and forms of a Gauss-Newton matrix from differences of the outputs.

    Args:
        session: The measurement.
        outputs: The name of the module that returns the outputs; None to find it.
        matrix: Which matrix of the outputs.

    Attributes:
        gradient: The gradient at w, summed over all micro-batches.
        scale: `Session.gradient_scale`.
        words: The module of the outputs, and how the loss in them is known.
        read: Bytes of the largest outputs, and whether the loss in them is known.
        pilot, beside: The micro-batch of trials (`take_pilot`), and those whose outputs may be
            doubted.
        smooth: Whether the loss has no kinks in the outputs.
        of_loss: The roundoff of the outputs that a loss takes which is known by its values.
        passes: The passes of an evaluation.
        weight_norm: The norm |w| of the weights.
        of_weights: That of their rounding in the passes.
        before: The trial with which the next one is compared; None for none.
        bends: What the last forms of all are off by differencing the loss, by a product's measure.
        choices: `Session.choices` at the displacement of the last forms of all.
        cost: What was evaluated so far.

    Raises: as `GaussNewton`. Collective: every method, and the constructor, which evaluates the
    gradient once.
    """

    def __init__(self, session: Session, outputs: str | None, matrix: OutputMatrix) -> None:
        self.session, self.space, self.cost = session, session.space, OperatorCost()
        reading = Reading(session, outputs)
        self.gradient = reading.gradient
        self.cost.gradient_seconds = reading.seconds
        self.cost.kinks_crossed = reading.kinks_crossed
        require_finite(self.gradient, self.space)
        assert session.gradient_scale is not None
        self.scale = session.gradient_scale
        self.words = reading.words
        self.read = reading.largest, reading.kind is not None
        count = session.num_micro_batches
        self.count = count
        self._split(reading.pilot)
        self.smooth, self.of_loss = not reading.kinked, torch.finfo(reading.dtype).eps / 2
        self.passes = Passes(
            session,
            reading.tap,
            self._product_of(reading, matrix),
            self.of_loss ** (1 / (3 if self.smooth else 2)),
            reading.dtype,
            *reading.room(),
            reading.cotangents,
            self.pilot,
        )
        self._around = self._gradient_around() if reading.passes_by else None
        self.weight_norm = session.weight_norm()
        self.of_weights = session.unit_roundoff * self.weight_norm
        self.before: Before | None = None
        self.bends = np.zeros(count)
        self.choices = [0.0] * 4

    def _split(self, one: int) -> None:
        self.pilot, self._rest = range(one, one + 1), [range(one), range(one + 1, self.count)]
        start = min(one, max(self.count - SAMPLE, 0))
        self.beside = range(start, min(start + SAMPLE, self.count))

    def take_pilot(self, one: int) -> None:
        """Have this micro-batch for the pilot from now on."""
        self._split(one)
        self.passes.pilot = self.pilot
        if self._around is not None:
            self.session.displace(None, 0.0)
            self._around = self._gradient_around()
            self.cost.gradient_evaluations += 1

    @property
    def passes_by(self) -> bool:
        """Whether a part of a loss that is known does not pass the outputs."""
        return self._around is not None

    @property
    def share(self) -> float:
        """The pilot's share of the micro-batches."""
        return len(self.pilot) / self.count

    def _product_of(self, reading: Reading, matrix: OutputMatrix) -> OutputProduct | None:
        if matrix == "fisher":
            if reading.kind != "cross entropy":
                raise UnsupportedError(
                    "ds_hessian does not support an empirical Fisher matrix of another loss than "
                    f'cross entropy, as at {reading.tap.name!r}; use operator "ggn"'
                )
            return lambda i, f, u: reading.tokens[i].fisher(f, u)
        if reading.kind is None:
            return None
        kept = reading.tokens if reading.kind == "cross entropy" else reading.squares
        return lambda i, f, u: kept[i].hessian(f, u)

    def _gradient_around(self) -> dict[range, Tensor]:
        """Return the gradients of pilot and rest that do not pass the outputs.

        Differences of two evaluations do not have them.
        """
        found = {some: self.space.zeros() for some in (self.pilot, *self._rest) if some}
        for some, out in found.items():
            self.passes.around(out, some)
        return found

    # ---- products

    def evaluate(
        self,
        out: Tensor,
        v: Tensor,
        step: float,
        some: range,
        first: bool,
        doubted: bool = False,
        bent: range = range(0),
    ) -> Sums:
        """Add the products of some micro-batches at w +- step v to `out`, up to `unit`; return
        their sums. `Passes.evaluate` has the other arguments.
        """
        sums = self.passes.evaluate(out, v, step, some, first, doubted, bent)
        if self._around is not None:
            out.sub_(self._around[some])
        passes = self.passes.gradients * len(some) + len(set(some) & set(bent)) / 3
        self.cost.gradient_evaluations += passes / self.count
        return sums

    def at(
        self, v: Tensor, length: float, h: float, bent: range = range(0)
    ) -> tuple[Tensor, Figures]:
        """Return the product at displacement h, and its figures."""
        out = self.space.zeros()
        sums = self.evaluate(out, v, h / length, self.pilot, True)
        return out, self.finish(v, length, h, out, sums, bent)

    def finish(
        self,
        v: Tensor,
        length: float,
        h: float,
        out: Tensor,
        sums: Sums,
        bent: range = range(0),
    ) -> Figures:
        """Add the other micro-batches to the pilot's product; return the figures of all."""
        for some in filter(len, self._rest):
            more = self.evaluate(out, v, h / length, some, False, bent=bent)
            sums.thirds += more.thirds
            sums.squares += more.squares
            sums.form += more.form
            sums.backs |= more.backs
            sums.choices += more.choices
            sums.values += more.values
        found = self.figures(v, length, h, out, sums, 1.0)
        out.mul_(self.unit(h, length) * length)
        return found

    def unit(self, h: float, length: float) -> float:
        """Return the factor from what an evaluation adds to `G v` of a unit vector."""
        return self.scale / (2 * _stepped(h, length) * self.passes.kappa)

    def figures(
        self, v: Tensor, length: float, h: float, out: Tensor, sums: Sums, share: float
    ) -> Figures:
        """Return the figures of an evaluation of a share of the micro-batches, for the mean."""
        pairs = [(out, out), (out, v)]
        if self.before is not None:
            pairs += [(self.before.vector, self.before.vector), (self.before.vector, out)]
        dots = ops.dots(pairs, self.space.n_owned).cpu()
        mine = torch.tensor([sums.form], dtype=torch.float64)
        parts = [mine, sums.change, sums.choices, sums.values, sums.thirds, dots]
        every = torch.cat([self._by_micro_batch(sums.backs), sums.squares, *parts])
        figures = self.space.reduce(every).tolist()
        backs, figures = figures[: self.count], figures[self.count :]
        _, count, first, second, whole, q, along, moved, *figures = figures
        decided, (values, bent), thirds = figures[:4], figures[4:6], figures[6:9]
        square, dot, *before = figures[9:]
        back = sum(backs)
        unit, kappa, change = self.unit(h, length) / share, self.passes.kappa, math.inf
        form = q * self.scale / (share * (2 * _stepped(h, length) * kappa) ** 2)
        if before and self.before is not None:
            other = self.before.unit
            apart = unit**2 * square + other**2 * before[0] - 2 * unit * other * before[1]
            change = math.sqrt(max(apart, 0.0)) if math.isfinite(apart) else math.inf
        size = math.sqrt(square) * unit if square >= 0 else math.inf
        fidelity = -quotient(along, math.sqrt(moved) * length, nothing=0.0)
        trial = Trial(
            h=h,
            size=size,
            nonlinearity=nonlinearity(first, second),
            roundoff=self.session.unit_roundoff * math.sqrt(whole / first) if first > 0 else 0.0,
            spread=math.sqrt(first / count) / (2 * h) if first > 0 else 0.0,
            form=form,
            back=unit * math.sqrt(share * back) if back >= 0 else math.inf,
            change=change,
            values=nonlinearity(values, bent) ** (2 if self.smooth else 1),
            third=math.sqrt(quotient(thirds[2], thirds[0], nothing=0.0)),
            beside=nonlinearity(*thirds[:2]),
            apart=abs(dot * unit / length - form),
            growth=math.sqrt(first / whole) / (2 * h) if whole > 0 else math.inf,
            lost=is_lost(size, fidelity, h, self.of_weights),
        )
        return Figures(trial, fidelity, decided, backs)

    def _by_micro_batch(self, calls: Mapping[int, float]) -> Tensor:
        """Return sums over the calls of the outputs' module for each micro-batch, `(count,)`."""
        found = torch.zeros(self.count, dtype=torch.float64)
        for i, value in calls.items():
            found[i // self.passes.tap.per_unit] += value
        return found

    def backward(self, v: Tensor, out: Tensor, h: float, length: float) -> float:
        """Return the noise of the backward in the pilot's product `out`: the same differences, at
        weights displaced by their rounding.
        """
        again = self.space.zeros()
        self.passes.repeat(again, v, self.pilot)
        if self._around is not None:
            again.sub_(self._around[self.pilot])
        self.cost.gradient_evaluations += self.passes.backwards / self.count
        return self.space.norm(again.sub_(out)) * self.unit(h, length) / self.share

    def noise_of(self, v: Tensor, h: float, length: float, one: int) -> float:
        """Return the noise of a micro-batch's part in a product over the norm of what goes back of
        it: what another rounding of the weights, and of outputs whose loss is known by its values,
        makes of both the differences and the backward.
        """
        some, apart = range(one, one + 1), self.space.zeros()
        for self.passes.rounded in (v, None):
            apart.neg_()
            sums = self.evaluate(apart, v, h / length, some, False)
        back = float(self.space.reduce(self._by_micro_batch(sums.backs))[one])
        return quotient(self.space.norm(apart), math.sqrt(2 * back), nothing=0.0)

    def values(self, h: float, length: float) -> float:
        """Return the error of the pilot's product that comes from differencing the loss."""
        error = self.space.zeros()
        self.third(error, self.pilot)
        return self.space.norm(error) * (self.unit(h, length) / self.share)

    def third(self, out: Tensor, some: range) -> float:
        """Add the error from differencing the loss in the outputs in the last evaluation, of some
        micro-batches; return that of this rank's form.
        """
        error = self.passes.third(out, some)
        self.cost.gradient_evaluations += 2 * len(some) / self.count
        return error

    # ---- forms

    def forms(self, v: Tensor, h: float, micro_batches: range | None) -> NDArray[np.float64]:
        """Return the forms, finite or not."""
        v, length, _ = measurable(v, self.space)
        every = micro_batches or range(self.count)
        unit, total, values = self._form_unit(h, length), Sums(), list[Tensor]()
        if self.passes.product is not None:
            mine = self.passes.forms(v, h / length, every, total)
            self.cost.gradient_evaluations += 2 / 3 * len(every) / self.count
        else:
            waste, mine = self.space.zeros(), []
            for i in every:
                sums = self.evaluate(waste, v, h / length, range(i, i + 1), True)
                mine.append(sums.form / self.passes.kappa**2)
                total.choices += sums.choices
                values.append(sums.values)
        parts = [torch.tensor(mine, dtype=torch.float64), total.choices, *values]
        figures = self.space.reduce(torch.cat(parts)).numpy()
        forms, choices, bent = np.split(figures, [len(mine), len(mine) + len(total.choices)])
        forms = np.asarray(unit * forms)
        if micro_batches is None:
            self.choices = choices.tolist()
            if values:
                ratios = [nonlinearity(*pair) ** 2 for pair in bent.reshape(-1, 2).tolist()]
                self.bends = np.array(ratios) * abs(forms)
        return forms

    def _form_unit(self, h: float, length: float) -> float:
        """Return the factor from a micro-batch's `<delta, H_out delta>` to the form of a unit
        vector.
        """
        return self.count * self.scale / (2 * _stepped(h, length)) ** 2

    def doubted(self, v: Tensor, h: float, one: int) -> tuple[float, float]:
        """Return the form of a micro-batch, and its error from differencing the loss in the
        outputs.
        """
        v, length, _ = measurable(v, self.space)
        waste, some = self.space.zeros(), range(one, one + 1)
        sums = self.evaluate(waste, v, h / length, some, True, True)
        unit = self._form_unit(h, length) / self.passes.kappa**2
        mine = torch.tensor([sums.form, self.third(waste, some)], dtype=torch.float64)
        self.passes.forget()
        form, error = self.space.reduce(mine).tolist()
        return unit * form, unit * error


def _stepped(h: float, length: float) -> float:
    """Return the displacement that is made of h: `displace` rounds its factor of v to fp32."""
    return float(np.float32(h / length)) * length


def _alike(a: float, b: float) -> float:
    """Return the smaller of two figures over the larger one."""
    return quotient(min(a, b), max(a, b))


def nonlinearity(first: float, second: float) -> float:
    """Return the norm of second differences over that of first ones, from their squares."""
    if second == 0:
        return 0.0
    return math.sqrt(second / first) if second > 0 and first > 0 else math.inf
