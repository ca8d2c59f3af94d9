"""The Gauss-Newton matrix and the empirical Fisher matrix of tokens as operators.

    G v  =  J' H_out J v        J = df/dw at the outputs f, H_out the Hessian of the loss in them

H = G + R with the residual R, in which the model's own second derivatives are. For cross entropy G
is the (true) Fisher matrix; it is positive semidefinite where the loss is convex in the outputs.
The empirical Fisher matrix is a sum over tokens, `sum omega_t g_t g_t'`, with their gradients.

Cost of a product: 5/3 gradients where the loss in the outputs is known, 8/3 else
(`ds_hessian.operators.outputs.passes`), and trials on the first micro-batch, of which there are
some for the first two vectors and few afterwards. Memory per rank: four vectors (six, where part of
the loss does not pass the outputs), and differences of outputs of about one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import Session
from ds_hessian.config import OutputMatrix
from ds_hessian.errors import NumericsError, UnsupportedError
from ds_hessian.memory import FP32
from ds_hessian.operators.checks import (
    in_units,
    is_lost,
    measurable,
    require_finite,
    require_step,
)
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.outputs.forms import SAMPLE, Ladder
from ds_hessian.operators.outputs.passes import OutputProduct, Passes, Sums
from ds_hessian.operators.outputs.reading import Reading
from ds_hessian.operators.outputs.steps import LADDER, MOST, UNEXPECTED, OutputSteps
from ds_hessian.operators.outputs.trials import Trial
from ds_hessian.operators.protocol import Form, OperatorCost, Product


@dataclass(frozen=True)
class _Figures:
    """Figures over all ranks of an evaluation, of a unit vector.

    Attributes:
        trial: The product.
        fidelity: Cosine between the realised displacement and v.
        choices: `Session.choices` at the displaced weights, of all ranks.
    """

    trial: Trial
    fidelity: float
    choices: Sequence[float]


@dataclass(frozen=True)
class _Before:
    """The trial before: what it added up, and the factor from that to a product."""

    vector: Tensor
    unit: float


class GaussNewton:
    """G at the session's weights, over its micro-batches: a `Curvature`.

    Args:
        session: The measurement.
        displacement: `"auto"`, or the value of h: the length of the step in parameter space.
        outputs: The name of the module that returns the outputs; None to find it.
        matrix: Which matrix of the outputs.

    Attributes:
        outputs: The module of the outputs, and how the loss in them is known, in words.
        outputs_read: Bytes of the largest outputs, and whether the loss in them is known.

    Raises:
        ConfigError: the outputs cannot be found.
        NumericsError: the gradient at the weights is not finite.
        UnsupportedError: the outputs have no single Gauss-Newton matrix, or a Fisher matrix is
            asked for and the loss is no cross entropy.

    Collective: the constructor evaluates the gradient once.
    """

    def __init__(
        self,
        session: Session,
        displacement: float | Literal["auto"] = "auto",
        outputs: str | None = None,
        matrix: OutputMatrix = "ggn",
    ) -> None:
        self.session, self.space = session, session.space
        self.cost = OperatorCost()
        reading = Reading(session, outputs)
        self.gradient = reading.gradient
        self.cost.gradient_seconds = reading.seconds
        self.cost.kinks_crossed = reading.kinks_crossed
        require_finite(self.gradient, self.space)
        assert session.gradient_scale is not None
        self.scale = session.gradient_scale
        self.outputs: str | None = reading.words
        self.outputs_read = reading.largest, reading.kind is not None
        count = session.num_micro_batches
        one, self._count = reading.pilot, count
        self._pilot, self._rest = range(one, one + 1), [range(one), range(one + 1, count)]
        start = min(one, max(count - SAMPLE, 0))
        self._beside = range(start, min(start + SAMPLE, count))
        self._passes = Passes(
            session,
            reading.tap,
            self._product_of(reading, matrix),
            ROUNDOFF ** (1 / (2 if reading.kinked else 3)),
            *self._room(reading.largest),
            reading.cotangents,
            self._pilot,
        )
        self._smooth = not reading.kinked
        self._around = self._gradient_around() if reading.passes_by else None
        self._before: _Before | None = None
        self._ladder = Ladder()
        # What the last forms of all are off by differencing the loss, by a product's measure.
        self._bends = np.zeros(count)
        self._choices = [0.0] * 4  # `Session.choices` at that of the last forms of all
        self._steps = OutputSteps(
            session.unit_roundoff,
            session.weight_norm(),
            1 / count,
            0 if self.cost.kinks_crossed is not None else len(self._beside) - 1,
            None if displacement == "auto" else float(displacement),
        )

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

    def _room(self, largest: int) -> tuple[int, int]:
        """Return the bytes of the largest outputs, and of the smallest vector, of all ranks."""
        outputs, vectors = self.space.of_all_ranks(largest, FP32 * self.space.n_local)
        return int(outputs.max()), int(vectors.min())

    def _gradient_around(self) -> dict[range, Tensor]:
        """Return the gradients of pilot and rest that do not pass the outputs.

        Differences of two evaluations do not have them.
        """
        found = {some: self.space.zeros() for some in (self._pilot, *self._rest) if some}
        for some, out in found.items():
            self._passes.around(out, some)
        return found

    @property
    def gradient_norm(self) -> float:
        """The norm |g(w)| of the gradient of the loss, over all ranks."""
        return self.space.norm(self.gradient) * self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the cost so far, and what the next product depends on beside weights and
        micro-batches, as JSON values.
        """
        return {"steps": self._steps.state_dict(), "cost": asdict(self.cost)}

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another operator of the same matrix."""
        self._steps.load_state_dict(figures["steps"])
        self._passes.rho = self._steps.learnt.rho or self._passes.rho
        self.cost = OperatorCost(**figures["cost"])

    # ---- products

    def matvec(self, v: Tensor) -> Product:
        """Return `G v` and estimates of its error, for `v` `(n_local,)` fp32 of nonzero length.

        Raises:
            NumericsError: v is zero or not finite, the product is not finite, or a given step is
                lost in the rounding of the weights.
        """
        started, (v, length, unit) = time.perf_counter(), measurable(v, self.space)
        h, out, found, trials, bent = self._first(v, length)
        (better,) = self.space.of_rank_0(self._steps.judge(found.trial))
        if self._narrow(found.trial.values) or better != h:
            del out  # before that of another displacement
            out, found = self._at(v, length, better, bent)
            fails = found.trial.lost or not found.trial.finite
            (worse,) = self.space.of_rank_0(fails and self._steps.fixed is None)
            if worse:
                del out
                out, found = self._at(v, length, h, bent)
            _require_finite(found.trial)
            self._steps.judge(found.trial)
        doubt = found.trial.apart
        if self.cost.kinks_crossed is not None:  # the error is of first order in h, as r is
            doubt = max(doubt, found.trial.nonlinearity * found.trial.size)
        noise, error = self._steps.conclude(found.trial, doubt)
        self._note_product(found.choices)
        self.cost.trials += trials
        self.cost.product_seconds += time.perf_counter() - started
        product = require_step(self._made(out, found, length, noise, error, trials))
        return in_units(product, unit, self.space)

    def _first(self, v: Tensor, length: float) -> tuple[float, Tensor, _Figures, int, range]:
        """Return displacement, product, figures, the number of discarded trials, and micro-batches
        whose outputs are doubted. Where it is not finite, and its pilot is, it is made anew nearer.
        """
        discarded = 0
        while True:
            h, out, sums, trials = self._search(v, length)
            bent = self._beside if self._steps.doubts_outputs else range(0)
            found = self._finish(v, length, h, out, sums, bent)
            discarded += trials
            (nearer,) = self.space.of_rank_0(not found.trial.finite and self._steps.stays_below(h))
            if not nearer:
                _require_finite(found.trial)
                return h, out, found, discarded, bent
            discarded += 1
            del out

    def product_at(self, v: Tensor, h: float) -> Product:
        """Return the product at displacement h, without trials or estimates of its error.

        Raises:
            NumericsError: v is zero or not finite, or the product is not finite.
        """
        started, (v, length, unit) = time.perf_counter(), measurable(v, self.space)
        out, found = self._at(v, length, h)
        _require_finite(found.trial)
        self._note_product(found.choices)
        self.cost.product_seconds += time.perf_counter() - started
        return in_units(self._made(out, found, length, None, None, 0), unit, self.space)

    def _note_product(self, choices: Sequence[float]) -> None:
        """Count a product, and what was held in it."""
        self.cost.products += 1
        self.cost.decided(choices)

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'G_i v / v'v` for micro-batch i of all ranks, `(G,)`; the mean is that of G.

        Cost: two forwards over all micro-batches where the loss in the outputs is known, else a
        product; one small all-reduce.

        Raises:
            NumericsError: v is zero or not finite, or a form is not finite.
        """
        found = self._forms(v, h, micro_batches)
        if not np.isfinite(found).all():
            raise NumericsError(
                f"a quadratic form at displacement {h:.3e} is not finite: the outputs are not "
                "finite there; use a smaller displacement"
            )
        return found

    def _forms(self, v: Tensor, h: float, micro_batches: range | None) -> NDArray[np.float64]:
        """Return the forms, finite or not."""
        v, length, _ = measurable(v, self.space)
        every = micro_batches or range(self._count)
        unit, total, values = self._form_unit(h, length), Sums(), list[Tensor]()
        if self._passes.product is not None:
            mine = self._passes.forms(v, h / length, every, total)
            self.cost.gradient_evaluations += 2 / 3 * len(every) / self._count
        else:
            waste, mine = self.space.zeros(), []
            for i in every:
                sums = self._evaluate(waste, v, h / length, range(i, i + 1), True)
                mine.append(sums.form / self._passes.kappa**2)
                total.choices += sums.choices
                values.append(sums.values)
        parts = [torch.tensor(mine, dtype=torch.float64), total.choices, *values]
        figures = self.space.reduce(torch.cat(parts)).numpy()
        forms, choices, bent = np.split(figures, [len(mine), len(mine) + len(total.choices)])
        forms = np.asarray(unit * forms)
        if micro_batches is None:
            self._choices = choices.tolist()
            if values:
                ratios = [_nonlinearity(*pair) ** 2 for pair in bent.reshape(-1, 2).tolist()]
                self._bends = np.array(ratios) * abs(forms)
        return forms

    def _form_unit(self, h: float, length: float) -> float:
        """Return the factor from a micro-batch's `<delta, H_out delta>` to the form of a unit
        vector.
        """
        return self._count * self.scale / (2 * _stepped(h, length)) ** 2

    def _doubted(self, v: Tensor, h: float, one: int) -> tuple[float, float]:
        """Return the form of a micro-batch, and its error from differencing the loss in the
        outputs.
        """
        v, length, _ = measurable(v, self.space)
        waste, some = self.space.zeros(), range(one, one + 1)
        sums = self._evaluate(waste, v, h / length, some, True, True)
        unit = self._form_unit(h, length) / self._passes.kappa**2
        mine = torch.tensor([sums.form, self._third(waste, some)], dtype=torch.float64)
        self._passes.forget()
        form, error = self.space.reduce(mine).tolist()
        return unit * form, unit * error

    def _third(self, out: Tensor, some: range) -> float:
        """Add the error from differencing the loss in the outputs in the last evaluation, of some
        micro-batches; return that of this rank's form.
        """
        error = self._passes.third(out, some)
        self.cost.gradient_evaluations += 2 * len(some) / self._count
        return error

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v` by its forms, at the displacement where these change least
        (`ds_hessian.operators.outputs.forms`).
        """
        steps, started = self._steps, time.perf_counter()
        known = self._passes.product is not None
        v, length, _ = measurable(v, self.space)
        self._choose_rho(v, length, steps.learnt.h)
        while True:
            value, error, h = self._ladder.settled(
                lambda h, some: self._forms(v, h, some),
                steps.learnt.h,
                steps.least,
                None if known else lambda h, one: self._doubted(v, h, one),
                None if known else lambda: self._bends,
            )
            bent = _ratio(float(self._bends.mean()), abs(value), nothing=0.0)
            if not self._narrow(max(bent, self._ladder.valued)):
                break
            self._ladder.forget()
        if not math.isfinite(value):
            raise NumericsError(
                f"the curvature at displacement {h:.3e} is not finite: neither are the outputs"
            )
        self._note_product(self._choices)
        self.cost.product_seconds += time.perf_counter() - started
        return Form(value, error, h)

    def _evaluate(
        self,
        out: Tensor,
        v: Tensor,
        step: float,
        some: range,
        first: bool,
        doubted: bool = False,
        bent: range = range(0),
    ) -> Sums:
        sums = self._passes.evaluate(out, v, step, some, first, doubted, bent)
        if self._around is not None:
            out.sub_(self._around[some])
        passes = self._passes.gradients * len(some) + len(set(some) & set(bent)) / 3
        self.cost.gradient_evaluations += passes / self._count
        return sums

    def _at(
        self, v: Tensor, length: float, h: float, bent: range = range(0)
    ) -> tuple[Tensor, _Figures]:
        """Return the product at displacement h, and its figures."""
        out = self.space.zeros()
        sums = self._evaluate(out, v, h / length, self._pilot, True)
        return out, self._finish(v, length, h, out, sums, bent)

    def _finish(
        self,
        v: Tensor,
        length: float,
        h: float,
        out: Tensor,
        sums: Sums,
        bent: range = range(0),
    ) -> _Figures:
        """Add the other micro-batches to the pilot's product; return the figures of all."""
        for some in filter(len, self._rest):
            more = self._evaluate(out, v, h / length, some, False, bent=bent)
            sums.thirds += more.thirds
            sums.squares += more.squares
            sums.form += more.form
            sums.back += more.back
            sums.choices += more.choices
            sums.values += more.values
        found = self._figures(v, length, h, out, sums, 1.0)
        out.mul_(self._unit(h, length) * length)
        return found

    def _unit(self, h: float, length: float) -> float:
        """Return the factor from what an evaluation adds to `G v` of a unit vector."""
        return self.scale / (2 * _stepped(h, length) * self._passes.kappa)

    def _figures(
        self, v: Tensor, length: float, h: float, out: Tensor, sums: Sums, share: float
    ) -> _Figures:
        """Return the figures of an evaluation of a share of the micro-batches, for the mean."""
        pairs = [(out, out), (out, v)]
        if self._before is not None:
            pairs += [(self._before.vector, self._before.vector), (self._before.vector, out)]
        dots = ops.dots(pairs, self.space.n_owned).cpu()
        mine = torch.tensor([sums.form, sums.back], dtype=torch.float64)
        parts = [sums.squares, mine, sums.change, sums.choices, sums.values, sums.thirds, dots]
        figures = self.space.reduce(torch.cat(parts)).tolist()
        _, count, first, second, whole, q, back, along, moved, *figures = figures
        decided, (values, bent), thirds = figures[:4], figures[4:6], figures[6:9]
        square, dot, *before = figures[9:]
        unit, kappa, change = self._unit(h, length) / share, self._passes.kappa, math.inf
        form = q * self.scale / (share * (2 * _stepped(h, length) * kappa) ** 2)
        if before and self._before is not None:
            other = self._before.unit
            apart = unit**2 * square + other**2 * before[0] - 2 * unit * other * before[1]
            change = math.sqrt(max(apart, 0.0)) if math.isfinite(apart) else math.inf
        size = math.sqrt(square) * unit if square >= 0 else math.inf
        fidelity = -_ratio(along, math.sqrt(moved) * length, nothing=0.0)
        trial = Trial(
            h=h,
            size=size,
            nonlinearity=_nonlinearity(first, second),
            roundoff=self.session.unit_roundoff * math.sqrt(whole / first) if first > 0 else 0.0,
            spread=math.sqrt(first / count) / (2 * h) if first > 0 else 0.0,
            form=form,
            back=unit * math.sqrt(share * back) if back >= 0 else math.inf,
            change=change,
            values=_nonlinearity(values, bent) ** (2 if self._smooth else 1),
            third=math.sqrt(_ratio(thirds[2], thirds[0], nothing=0.0)),
            beside=_nonlinearity(*thirds[:2]),
            apart=abs(dot * unit / length - form),
            lost=is_lost(size, fidelity),
        )
        return _Figures(trial, fidelity, decided)

    # ---- trials

    def _search(self, v: Tensor, length: float) -> tuple[float, Tensor, Sums, int]:
        """Make trials on the pilot until one is accepted, which the product then finishes.

        Returns:
            Its h, what it has added up, its sums, and the number of discarded trials.
        """
        trials, lost, share = list[Trial](), 0, len(self._pilot) / self._count
        (h,) = self.space.of_rank_0(self._steps.first_h())
        self._before = None
        self._choose_rho(v, length, h)
        while True:
            out = self.space.zeros()
            doubted = not trials and self._passes.product is None and self._steps.doubts_values
            sums = self._evaluate(out, v, h / length, self._pilot, True, doubted)
            trial = self._figures(v, length, h, out, sums, share).trial
            other = self._steps.after_lost(trial, trials) if lost < MOST else None
            (other,) = self.space.of_rank_0(other or 0.0)
            if other:
                h, lost = other, lost + 1
                trials = trials if len(trials) > 1 else []
                continue
            trials.append(self._steps.without_noise_of_loss(trial))
            if doubted:
                self._measure_values(trials[0], length, share)
            if len(trials) == 1 and not self._steps.learnt.products:
                self._measure_backward(v, length, out, trials[0], share)
            self._passes.forget()
            better, accept = self.space.of_rank_0(*self._steps.advise(trials))
            if accept:
                self._before = None
                return h, out, sums, lost + len(trials) - 1
            self._before = _Before(out, self._unit(h, length) / share)
            h = better

    def _measure_backward(
        self, v: Tensor, length: float, out: Tensor, trial: Trial, share: float
    ) -> None:
        """Measure the noise of the backward: the same differences, at weights displaced by their
        rounding.
        """
        again = self.space.zeros()
        self._passes.repeat(again, v, self._pilot)
        if self._around is not None:
            again.sub_(self._around[self._pilot])
        self.cost.gradient_evaluations += self._passes.backwards / self._count
        apart = self.space.norm(again.sub_(out)) * self._unit(trial.h, length) / share
        self._steps.note_backward(apart, trial)

    def _choose_rho(self, v: Tensor, length: float, h: float) -> None:
        """Choose rho, unless that is done: the loss may bend over less than a unit of the outputs,
        over which truncation is as rho^2 and noise as one over rho. Smaller ones are tried as long
        as the error falls as truncation does, and larger ones where it does not: of a loss in 16
        bits, or of outputs far larger than a unit, which are rounded to a share of their size, and
        over which the loss may bend. The best one is between two of them, which show both.
        """
        passes, found = self._passes, self._steps.learnt
        if passes.product is not None or found.rho:
            return
        found.rho = first = rho = passes.rho
        if not self._smooth:
            return
        error, bent = self._differenced(v, length, h, rho)
        if error < self._steps.least_error:  # of 16 bits: no other rho would show
            return
        errors, noisy = {rho: error}, not error <= UNEXPECTED * bent
        while not noisy:
            rho, last = rho / LADDER, errors[rho]
            errors[rho], _ = self._differenced(v, length, h, rho)
            noisy = not errors[rho] < last / LADDER
        rho = first
        while not errors[rho] > UNEXPECTED * min(errors.values()) and LADDER * rho <= 1:
            rho *= LADDER
            errors[rho], _ = self._differenced(v, length, h, rho)
        rungs = sorted(errors)
        best = max(rungs.index(min(errors, key=errors.__getitem__)), 1)
        low, high = rungs[best - 1], rungs[best]
        if math.isfinite(errors[low]) and errors[high] > 0:
            found.rho, found.loss_roundoff = high, errors[low] * low
            (between,) = self.space.of_rank_0(self._steps.balanced(errors[high]))
            found.rho = min(max(between, low), high)
        passes.rho = found.rho

    def _differenced(self, v: Tensor, length: float, h: float, rho: float) -> tuple[float, float]:
        """Return the relative error of the pilot's product from differencing the loss over rho,
        once by a third difference of the cotangents and once by a second one.
        """
        self._passes.rho = rho
        out, error = self.space.zeros(), self.space.zeros()
        sums = self._evaluate(out, v, h / length, self._pilot, True, True)
        self._third(error, self._pilot)
        self._passes.forget()
        values = self.space.reduce(sums.values).tolist()
        return _ratio(self.space.norm(error), self.space.norm(out)), _nonlinearity(*values) ** 2

    def _narrow(self, values: float) -> bool:
        """Make rho smaller where a product of all micro-batches is off by more than the noise from
        differencing the loss; return whether it is to be made again.
        """
        if self._passes.product is not None or not self._smooth:
            return False
        (rho,) = self.space.of_rank_0(self._steps.narrower(values) or 0.0)
        if not rho:
            return False
        self._steps.narrow(rho)
        self._passes.rho = rho
        return True

    def _measure_values(self, trial: Trial, length: float, share: float) -> None:
        """Measure the error of a product that comes from differencing the loss in the outputs."""
        error = self.space.zeros()
        self._third(error, self._pilot)
        unit = self._unit(trial.h, length) / share
        self._steps.note_values(self.space.norm(error) * unit, trial)

    def _made(
        self,
        out: Tensor,
        found: _Figures,
        length: float,
        noise: float | None,
        error: float | None,
        trials: int,
    ) -> Product:
        ratio = found.trial.nonlinearity
        return Product(
            vector=out,
            norm=found.trial.size,
            displacement=found.trial.h,
            nonlinearity=None if math.isinf(ratio) else ratio,
            noise=noise,
            fidelity=found.fidelity,
            error=error,
            trials=trials,
        )


def _require_finite(trial: Trial) -> None:
    """Raise where a product of all micro-batches is not finite, on every rank."""
    if not trial.finite:
        raise NumericsError(
            f"the product at displacement {trial.h:.3e} is not finite: the outputs or the loss are "
            'not finite there; use a smaller displacement, or "auto"'
        )


def _stepped(h: float, length: float) -> float:
    """Return the displacement that is made of h: `displace` rounds its factor of v to fp32."""
    return float(np.float32(h / length)) * length


def _nonlinearity(first: float, second: float) -> float:
    """Return the norm of second differences over that of first ones, from their squares."""
    if second == 0:
        return 0.0
    return math.sqrt(second / first) if second > 0 and first > 0 else math.inf


def _ratio(a: float, b: float, nothing: float = math.inf) -> float:
    return a / b if b > 0 else nothing
