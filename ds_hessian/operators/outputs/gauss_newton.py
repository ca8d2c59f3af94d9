"""The Gauss-Newton matrix and the empirical Fisher matrix of tokens as operators.

    G v  =  J' H_out J v        J = df/dw at the outputs f, H_out the Hessian of the loss in them

H = G + R with the residual R, in which the model's own second derivatives are. For cross entropy G
is the (true) Fisher matrix; it is positive semidefinite where the loss is convex in the outputs.
The empirical Fisher matrix is a sum over tokens, `sum omega_t g_t g_t'`, with their gradients.

Cost of a product: 5/3 gradients where the loss in the outputs is known, 8/3 else
(`ds_hessian.operators.outputs.passes`), and trials on one micro-batch, of which there are
some for the first two vectors and few afterwards. Memory per rank: four vectors (six, where part of
the loss does not pass the outputs), and differences of outputs of about one.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.config import OutputMatrix
from ds_hessian.errors import NumericsError
from ds_hessian.operators.checks import in_units, measurable, require_step
from ds_hessian.operators.displacement.belief import VISIBLE
from ds_hessian.operators.displacement.figures import quotient
from ds_hessian.operators.outputs.differences import (
    Before,
    Figures,
    OutputDifferences,
    nonlinearity,
)
from ds_hessian.operators.outputs.estimates import UNEXPECTED
from ds_hessian.operators.outputs.forms import Ladder
from ds_hessian.operators.outputs.passes import Sums
from ds_hessian.operators.outputs.steps import LADDER, MOST, OutputSteps
from ds_hessian.operators.outputs.trials import Trial
from ds_hessian.operators.protocol import COVERAGE, Form, OperatorCost, Product

MEASURED = 2
"""Vectors of which the noise of the micro-batch is measured of which most goes back: the second is
rich in outliers."""


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
        self._differences = OutputDifferences(session, outputs, matrix)
        self.scale = self._differences.scale
        self.outputs: str | None = self._differences.words
        self.outputs_read = self._differences.read
        self._ladder = Ladder()
        self._steps = OutputSteps(
            session.unit_roundoff,
            self._differences.weight_norm,
            1 / self._differences.count,
            0 if self.cost.kinks_crossed is not None else len(self._differences.beside) - 1,
            None if displacement == "auto" else float(displacement),
            self._differences.of_loss,
        )

    @property
    def cost(self) -> OperatorCost:
        """The cost of the products so far, and of a gradient."""
        return self._differences.cost

    @property
    def gradient(self) -> Tensor:
        """The gradient at w, divided by `scale`."""
        return self._differences.gradient

    @property
    def gradient_norm(self) -> float:
        """The norm |g(w)| of the gradient of the loss, over all ranks."""
        return self.space.norm(self.gradient) * self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the cost so far, and what the next product depends on beside weights and
        micro-batches, as JSON values.
        """
        made = self._differences
        kept = {"pilot": made.pilot.start, "dtype": str(made.passes.dtype)}
        return {"steps": self._steps.state_dict(), "cost": asdict(self.cost), **kept}

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another operator of the same matrix."""
        pilot = figures["pilot"]
        if pilot != self._differences.pilot.start and pilot < self._differences.count:
            self._differences.take_pilot(pilot)  # more ranks may have fewer
        self._steps.load_state_dict(figures["steps"])
        passes = self._differences.passes
        if figures.get("dtype") != str(passes.dtype):  # as more ranks have shorter vectors
            self._steps.forget_loss()
        passes.rho = self._steps.learnt.rho or passes.rho
        self._differences.cost = OperatorCost(**figures["cost"])

    def lessons(self) -> dict[str, Any] | None:
        """Return what spares trials in the next measurement of the run; None for nothing."""
        found = self._steps.lessons()
        return {"steps": found} if found else None

    def begin(self, lessons: dict[str, Any]) -> None:
        """Begin with the `lessons` of the same matrix at other weights of the run."""
        self._steps.begin(lessons["steps"])

    # ---- products

    def matvec(self, v: Tensor) -> Product:
        """Return `G v` and estimates of its error, for `v` `(n_local,)` fp32 of nonzero length.

        Raises:
            NumericsError: v is zero or not finite, the product is not finite, or a given step is
                lost in the rounding of the weights.
        """
        started, (v, length, unit) = time.perf_counter(), measurable(v, self.space)
        h, out, found, trials, bent = self._first(v, length)
        judged = self._steps.judge(found.trial), self._pilot_after(found)
        better, pilot = self.space.of_rank_0(*judged)
        values = found.trial.values
        rho = self._narrow(values * self._steps.share(found.trial))
        if rho or better != h:
            del out  # before that of another displacement
            out, found = self._differences.at(v, length, better, bent)
            self._widen(rho, values, found.trial.values)
            fails = found.trial.lost or not found.trial.finite
            (worse,) = self.space.of_rank_0(fails and self._steps.fixed is None)
            if worse:
                del out
                out, found = self._differences.at(v, length, h, bent)
            _require_finite(found.trial)
            self._steps.judge(found.trial)
            (pilot,) = self.space.of_rank_0(self._pilot_after(found))
        self._hear_largest(v, length, found)
        doubt = found.trial.apart
        if self.cost.kinks_crossed is not None:  # the error is of first order in h, as r is
            doubt = max(doubt, found.trial.nonlinearity * found.trial.size)
        noise, error = self._steps.conclude(found.trial, doubt)
        self._take_pilot(int(pilot))
        self._note_product(found.choices)
        self.cost.trials += trials
        self.cost.product_seconds += time.perf_counter() - started
        product = self._made(out, found, length, noise, error, trials)
        given = self._steps.fixed is not None
        require_step(product, self._differences.of_weights if given else 0.0)
        return in_units(product, unit, self.space)

    def _first(self, v: Tensor, length: float) -> tuple[float, Tensor, Figures, int, range]:
        """Return displacement, product, figures, the number of discarded trials, and micro-batches
        whose outputs are doubted. Where it is not finite, and its pilot is, it is made anew nearer;
        the first one, of a pilot that tells nothing of it, with another.
        """
        made, discarded = self._differences, 0
        while True:
            h, out, sums, trials = self._search(v, length)
            bent = made.beside if self._steps.doubts_outputs else range(0)
            found = made.finish(v, length, h, out, sums, bent)
            discarded += trials
            anew = found.trial.finite and self._steps.begins_anew(found.trial)
            nearer, pilot = self.space.of_rank_0(
                not found.trial.finite and self._steps.stays_below(h),
                found.typical if anew else made.pilot.start,
            )
            if not nearer and not self._take_pilot(int(pilot)):
                _require_finite(found.trial)
                return h, out, found, discarded, bent
            discarded += 1
            del out

    def _pilot_after(self, found: Figures) -> int:
        """Return the micro-batch that trials are to be of after a product."""
        unlike = self._steps.is_unlike(found.trial)
        return found.typical if unlike else self._differences.pilot.start

    def _hear_largest(self, v: Tensor, length: float, found: Figures) -> None:
        """Measure the noise of the micro-batch of which most goes back into the model, where that
        is far more than the pilot's: of the first two vectors.
        """
        made, backs = self._differences, found.backs
        most = max(range(len(backs)), key=backs.__getitem__)
        apart = backs[most] > VISIBLE**2 * backs[made.pilot.start]
        first = self._steps.learnt.products < MEASURED and not made.passes_by
        (one,) = self.space.of_rank_0(most if first and apart else -1)
        if one >= 0:
            noise = made.noise_of(v, found.trial.h, length, int(one))
            self._steps.note_largest(noise)

    def _take_pilot(self, one: int) -> bool:
        """Have this micro-batch for the pilot; return whether that is another."""
        if one == self._differences.pilot.start:
            return False
        self._differences.take_pilot(one)
        self._steps.take_pilot()
        return True

    def product_at(self, v: Tensor, h: float) -> Product:
        """Return the product at displacement h, without trials or estimates of its error.

        Raises:
            NumericsError: v is zero or not finite, or the product is not finite.
        """
        started, (v, length, unit) = time.perf_counter(), measurable(v, self.space)
        out, found = self._differences.at(v, length, h)
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
        found = self._differences.forms(v, h, micro_batches)
        if not np.isfinite(found).all():
            raise NumericsError(
                f"a quadratic form at displacement {h:.3e} is not finite: the outputs are not "
                "finite there; use a smaller displacement"
            )
        return found

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v` by its forms, at the displacement where these change least
        (`ds_hessian.operators.outputs.forms`).
        """
        steps, started = self._steps, time.perf_counter()
        made = self._differences
        known = made.passes.product is not None
        v, length, _ = measurable(v, self.space)
        self._choose_rho(v, length, steps.learnt.h)
        ladder, first = copy.deepcopy(self._ladder), steps.learnt.rho
        rho = before = 0.0
        while True:
            value, error, h = self._ladder.settled(
                lambda h, some: made.forms(v, h, some),
                steps.learnt.h,
                steps.least,
                None if known else lambda h, one: made.doubted(v, h, one),
                None if known else lambda: made.bends,
            )
            bent = quotient(float(made.bends.mean()), abs(value), nothing=0.0)
            bent = max(bent, self._ladder.valued)
            if self._widen(rho, before, bent):
                break
            rho, before = self._narrow(bent), bent
            if not rho:
                break
            self._ladder.forget()
        (told,) = self.space.of_rank_0(COVERAGE * error < abs(value))
        if not told:  # of a vector that G maps to nothing, which tells nothing of others
            self._ladder = ladder
            if first:
                self._use(first)
        if not math.isfinite(value):
            raise NumericsError(
                f"the curvature at displacement {h:.3e} is not finite: neither are the outputs"
            )
        self._note_product(made.choices)
        self.cost.product_seconds += time.perf_counter() - started
        return Form(value, error, h)

    # ---- trials

    def _search(self, v: Tensor, length: float) -> tuple[float, Tensor, Sums, int]:
        """Make trials on the pilot until one is accepted, which the product then finishes.

        Returns:
            Its h, what it has added up, its sums, and the number of discarded trials.
        """
        made, trials, lost = self._differences, list[Trial](), 0
        (h,) = self.space.of_rank_0(self._steps.first_h())
        made.before = None
        self._choose_rho(v, length, h)
        while True:
            out = self.space.zeros()
            known = made.passes.product is not None
            doubted = not trials and not known and self._steps.doubts_values
            sums = made.evaluate(out, v, h / length, made.pilot, True, doubted)
            trial = made.figures(v, length, h, out, sums, made.share).trial
            if self._steps.begins_taught and not trials:
                (sure,) = self.space.of_rank_0(self._steps.confirms(trial))
                self._steps.go_on(trial.size if sure else None)
                if not sure:
                    made.passes.forget()
                    del out
                    h, out, sums, count = self._search(v, length)
                    return h, out, sums, lost + 1 + count
            other = self._steps.after_lost(trial, trials) if lost < MOST else None
            (other,) = self.space.of_rank_0(other or 0.0)
            if other:
                h, lost = other, lost + 1
                trials = trials if len(trials) > 1 else []
                continue
            trials.append(self._steps.without_noise_of_loss(trial))
            if doubted:
                self._steps.learnt.note_values(made.values(h, length), trials[0])
            if len(trials) == 1 and not self._steps.learnt.products:
                self._steps.note_backward(made.backward(v, out, h, length), trials[0])
            made.passes.forget()
            better, accept = self.space.of_rank_0(*self._steps.advise(trials))
            if accept:
                made.before = None
                return h, out, sums, lost + len(trials) - 1
            made.before = Before(out, made.unit(h, length) / made.share)
            h = better

    def _choose_rho(self, v: Tensor, length: float, h: float) -> None:
        """Choose rho, unless that is done: the loss may bend over less than a unit of the outputs,
        over which truncation is as rho^2 and noise as one over rho. Smaller ones are tried as long
        as the error falls as truncation does, and larger ones where it does not: of a loss in 16
        bits, or of outputs far larger than a unit, which are rounded to a share of their size, and
        over which the loss may bend. The best one is between two of them, which show both.
        """
        passes, found = self._differences.passes, self._steps.learnt
        if passes.product is not None or found.rho:
            return
        found.rho = first = rho = passes.rho
        if not self._differences.smooth:
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
            (between,) = self.space.of_rank_0(self._steps.learnt.balanced(errors[high]))
            found.rho = min(max(between, low), high)
        passes.rho = found.rho

    def _differenced(self, v: Tensor, length: float, h: float, rho: float) -> tuple[float, float]:
        """Return the relative error of the pilot's product from differencing the loss over rho,
        once by a third difference of the cotangents and once by a second one.
        """
        made = self._differences
        made.passes.rho = rho
        out, error = self.space.zeros(), self.space.zeros()
        sums = made.evaluate(out, v, h / length, made.pilot, True, True)
        made.third(error, made.pilot)
        made.passes.forget()
        values = self.space.reduce(sums.values).tolist()
        off, size = self.space.norm(error), self.space.norm(out)
        return off / size if size > 0 else math.inf, nonlinearity(*values) ** 2

    def _narrow(self, values: float) -> float:
        """Make rho smaller where a product of all micro-batches is off by more than the noise from
        differencing the loss; return what it was if it is to be made again, 0 otherwise.
        """
        if self._differences.passes.product is not None or not self._differences.smooth:
            return 0.0
        (rho,) = self.space.of_rank_0(self._steps.learnt.narrower(values) or 0.0)
        return self._use(rho) if rho else 0.0

    def _widen(self, rho: float, before: float, after: float) -> bool:
        """Go back to the rho before a smaller one with which differencing the loss is off by no
        less: that is noise, as of all cotangents of a vector that G maps to nothing.
        """
        if not rho:
            return False
        (noise,) = self.space.of_rank_0(not after * rho < before * self._steps.learnt.rho)
        if noise:
            self._use(rho)
        return bool(noise)

    def _use(self, rho: float) -> float:
        """Take another rho; return the one before."""
        learnt, passes = self._steps.learnt, self._differences.passes
        before = learnt.rho
        learnt.narrow(rho)
        passes.rho = rho
        return before

    def _made(
        self,
        out: Tensor,
        found: Figures,
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
