"""The Hessian as an operator: differences of the gradient along a vector, with step control.

    central        H v = (g(w + h v) - g(w - h v)) / 2h
    forward        H v = (g(w + h v) - g(w)) / h
    fourth_order   H v = (8 (g(w + h v) - g(w - h v)) - (g(w + 2 h v) - g(w - 2 h v))) / 12h

Cost of a product, in gradients over all micro-batches: 2 (forward 1, fourth_order 4) and, for
trials of the displacement on a *pilot* of one micro-batch in eight, some 0.2 - 0.4 more; one for
the third difference of the first product; rarely a second product, where the pilot turns out to
differ from the rest. Where runs of the host are costly (`Session.costly_runs`), trials are of all
micro-batches from the third product on: 2.3 - 2.5 gradients in as many runs, for 2.2 in five. Each
trial costs three small all-reduces, in 16 bits four until it is known what steps lack, a third
difference of the pilot one, a product four. Memory per rank, in vectors of
`n_local` fp32: one for each gradient of a trial, two for those at w (of all micro-batches and of
the pilot) and two for the products of trials, or one of them and a third difference: forward and
central 6, fourth_order 8, which has one more for a moment in each trial. A finished product
overwrites its first gradient. With a tolerance, central differences become one-sided ones where
these are good enough: 1.0 - 1.2 gradients, in the same memory; and, below
`ds_hessian.config.EXTRAPOLATED`, those of fourth order where nothing cheaper is, in theirs.

Source: the paper's equation (1); `ds_hessian.operators.displacement.schemes`; the step is that of
`ds_hessian.operators.displacement.control`; the sides, `ds_hessian.operators.displacement.sides`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.backends.protocol import Session
from ds_hessian.errors import NumericsError
from ds_hessian.operators.checks import (
    in_units,
    kinks_crossed,
    measurable,
    require_finite,
    require_step,
)
from ds_hessian.operators.clock import add_gradient
from ds_hessian.operators.displacement.belief import SATURATING
from ds_hessian.operators.displacement.control import Advice, StepController
from ds_hessian.operators.displacement.figures import distance, quotient, removed_square, tangent
from ds_hessian.operators.displacement.line import Line
from ds_hessian.operators.displacement.schemes import SCHEMES, Scheme, SchemeName
from ds_hessian.operators.displacement.sides import BOTH, DOUBTED, Sides
from ds_hessian.operators.displacement.steps import DECADE
from ds_hessian.operators.displacement.trials import Trial
from ds_hessian.operators.displacement.witnesses import keeps_pilots
from ds_hessian.operators.protocol import Form, OperatorCost, Product

PILOT = 8
"""The pilot has one in PILOT micro-batches, rounded up."""

SEARCHED = 2
"""Vectors whose displacement is searched for: a random one, and the next, rich in outliers."""

SCALED = 1.3
"""Factor of a loss whose gradient rounds otherwise: no number of few bits, which leave some as they
are."""


def pilot_of(count: int) -> int:
    """Return the number of the pilot's micro-batches, of so many."""
    return math.ceil(count / PILOT)


class FiniteDifferenceHessian:
    """H at the session's weights, over its micro-batches: a `Curvature`.

    Args:
        session: The measurement.
        displacement: `"auto"`, or the value of h: the length of the step in parameter space.
        scheme: The difference formula; see `ds_hessian.operators.displacement.schemes`.
        tolerance: The tolerance of eigenvalues, relative to the largest: then central differences
            are replaced by one-sided ones wherever these reach it, and by those of fourth order
            where only these do. None for never.

    Raises:
        NumericsError: the gradient at the weights is not finite.

    Collective: the constructor evaluates the gradient once.
    """

    def __init__(
        self,
        session: Session,
        displacement: float | Literal["auto"] = "auto",
        scheme: SchemeName = "central",
        tolerance: float | None = None,
    ) -> None:
        self.session, self.space = session, session.space
        self.displacement = displacement
        self.cost = OperatorCost()
        self.outputs: str | None = None
        self.outputs_read = 0, False
        count = session.num_micro_batches
        self._all, self._pilot = range(count), range(pilot_of(count))
        self._rest = range(len(self._pilot), count)
        self._gradients = dict[int, Tensor]()
        self._trial: tuple[Trial, Tensor] | None = None
        self._warm, self._timed = False, (0.0, 0)  # seconds and micro-batches of evaluations
        self._removed = 0.0  # `Trial.removed` of the last product
        self._decided = [0.0] * 4  # `Session.choices` of the last product, of all ranks
        self.gradient, self._pilot_gradient = self._start()
        assert session.gradient_scale is not None
        self.scale = session.gradient_scale
        self._weight_norm = session.weight_norm()
        self.cost.kinks_crossed = kinks_crossed(session)
        self._controllers = dict[SchemeName, StepController]()
        self._rounding: float | None = None  # N of the gradients, once it was measured
        self._scheme = scheme
        self._take(scheme)
        self._sides = None if tolerance is None else Sides(tolerance, self._controller)

    def _start(self) -> tuple[Tensor, Tensor]:
        """Return the gradients at w of all micro-batches and of the pilot; set the loss's scale."""
        session = self.session
        session.displace(None, 0.0)
        gradient = self.space.zeros()
        self._add_gradient(gradient, self._pilot)
        pilot = gradient.clone()
        self._add_gradient(gradient, self._rest)
        require_finite(gradient, self.space)
        return gradient, pilot

    def _take(self, scheme: SchemeName) -> None:
        """Make products of both sides by this formula, with what is known of noise and bend."""
        self.formula, self.scheme, self._trial = scheme, SCHEMES[scheme], None
        self._points = [node for a, b, _ in self.scheme.differences for node in (a, b)]
        # A trial needs both sides for its nonlinearity ratio; the last one is the product's first.
        self._trial_points = [1, -1] if self.scheme.one_sided else self._points
        for node in {*self.scheme.nodes, -1} - {*self._gradients}:
            self._gradients[node] = self.space.zeros()
        self._controller = self._controller_of(scheme)

    def _controller_of(self, scheme: SchemeName) -> StepController:
        if scheme not in self._controllers:
            self._controllers[scheme] = StepController(
                SCHEMES[scheme],
                self.session.unit_roundoff,
                self._weight_norm,
                len(self._pilot),
                len(self._all),
                None if self.displacement == "auto" else float(self.displacement),
                self.cost.kinks_crossed is None,
                self.gradient_norm,
                self._rounding or 0.0,
            )
        return self._controllers[scheme]

    @property
    def gradient_norm(self) -> float:
        """The norm |g(w)| of the gradient of the loss, over all ranks."""
        return self.space.norm(self.gradient) * self.scale

    def state_dict(self) -> dict[str, Any]:
        """Return the cost so far, and what the next product depends on beside weights and
        micro-batches, as JSON values.
        """
        steps, *others = (control.state_dict() for control in self._controllers.values())
        found: dict[str, Any] = {"steps": steps, "cost": asdict(self.cost)}
        if self._sides is not None:
            found["sides"] = self._sides.state_dict()
        if others:
            found |= {"formula": self.formula, "fourth_order": others[0]}
        if self._controller.whole:
            found["whole"] = True
        if self._rounding is not None:
            found["rounding"] = self._rounding
        return found

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of another operator of the same Hessian."""
        if figures.get("whole"):
            self._try_all()
        self._take_rounding(figures.get("rounding"))
        self._controller.load_state_dict(figures["steps"])
        if "formula" in figures:
            self._controller_of("fourth_order").load_state_dict(figures["fourth_order"])
            self._take(figures["formula"])
        if self._sides is not None:
            self._sides.control = self._controller
            self._sides.load_state_dict(figures["sides"])
        self.cost = OperatorCost(**figures["cost"])

    def lessons(self) -> dict[str, Any] | None:
        """Return what spares trials in the next measurement of the run; None for nothing."""
        first, *_ = self._controllers.values()
        learnt = first.lessons()
        return learnt and learnt | {"whole": first.whole and first.of_pilot is None}

    def begin(self, lessons: dict[str, Any]) -> None:
        """Begin with the `lessons` of the same Hessian at other weights of the run."""
        if lessons.get("whole"):
            self._try_all()
        self._controller.begin(lessons)

    def matvec(self, v: Tensor) -> Product:
        """Return `H v` and estimates of its error, for `v` `(n_local,)` fp32 of nonzero length.

        Raises:
            NumericsError: v is zero or not finite, the product is not finite, or a given step is
                lost in the rounding of the weights.
        """
        started, trials = time.perf_counter(), list[Trial]()
        line = Line(self.session, v, self._weight_norm)
        product = require_step(self._on_one_side(line, trials) or self._on_all_sides(line, trials))
        self.cost.products += 1
        self.cost.decided(self._decided)
        self.cost.trials += product.trials
        if self._sides is not None:
            self.cost.extrapolated += self.formula == "fourth_order"
            self.cost.beyond_tolerance = self._sides.beyond
        self.cost.product_seconds += time.perf_counter() - started
        return in_units(product, line.unit, self.space)

    def _on_all_sides(self, line: Line, trials: list[Trial], repeats: bool = True) -> Product:
        """Return the product by the scheme's formula, after such trials on both sides.

        With `repeats` it is made again if its steps lack too much of v.
        """
        if not trials:
            self._change_formula()
            self._make_few_runs()
        h = self._search(line, trials)
        self._evaluate(line, h, self._rest, self._points)
        try:
            raw = self._assemble(line, h, self.scheme)
        except NumericsError:  # on every rank; the pilot alone is finite here
            if self.displacement != "auto" or not self._rest:
                raise
            return self._of_all(line, trials)
        outcome = self._outcome(raw)
        better = h
        (unlike,) = self.space.of_rank_0(self._controller.is_unlike(trials[-1], outcome))
        if not unlike:
            better, outcome = self._judge_product(line, raw, outcome)
            if outcome.third is not None:
                (unlike,) = self.space.of_rank_0(self._controller.is_unlike(trials[-1], outcome))
        if unlike:
            del raw
            return self._of_all(line, trials)
        if better != h:
            del raw  # its vector, before that of another displacement
            trials.append(self._try(line, better, self._trial_points))
            (lost,) = self.space.of_rank_0(trials[-1].lost and self.displacement == "auto")
            if lost:  # nothing better: all that its step shows is rounding
                better = h
                trials.append(self._try(line, better, self._trial_points))
            (doubted,) = self.space.of_rank_0(self._controller.doubts(trials[-1]))
            if doubted:
                self._witness(line, trials)
            if trials[-1].usable:
                self._controller.learn(trials)
            self._trial = None
            self._evaluate(line, better, self._rest, self._points)
            raw = self._assemble(line, better, self.scheme)
            _, outcome = self._judge_product(line, raw, self._outcome(raw))
        noise, error = self._controller.conclude(outcome)
        off = tangent(raw.fidelity)
        (lacking,) = self.space.of_rank_0(self._controller.lacks(outcome, error, off))
        if lacking:
            slope, off = self._slope_of_lacking(line, better)
            of_lacking = self._controller.learn_lacking(outcome, slope, off, noise or 0.0)
            (again,) = self.space.of_rank_0(
                repeats and self._controller.goes_farther(outcome, of_lacking)
            )
            if again:
                del raw
                self.cost.trials += len(trials)
                return self._on_all_sides(line, [], repeats=False)
            error = max(error or 0.0, of_lacking)
        if self._sides is not None:
            enough = self._sides.conclude_both(raw.norm, error)
            if self._sides.extrapolates and self._again(enough):
                del raw
                self._sides.errors.pop()
                self.cost.trials += len(trials)
                return self._on_all_sides(line, [])
        return replace(raw, noise=noise, error=error, trials=len(trials) - 1)

    def _of_all(self, line: Line, trials: list[Trial]) -> Product:
        """Return the product after trials of all micro-batches: those of the pilot tell nothing."""
        self.cost.trials += len(trials)
        self._try_all()
        return self._on_all_sides(line, [])

    def _slope_of_lacking(self, line: Line, h: float) -> tuple[float, float]:
        """Return |Hd| of the pilot, where d is the unit vector along what the steps from w - hv to
        w + hv lack of v, and the share of v that they lack; in the memory of the gradients.
        """
        lacking, gradient = self._gradients[-1], self._gradients[1]
        length = line.lacking(h, lacking)
        if not length:
            return 0.0, 0.0
        step = h
        while True:
            off = line.leave(lacking, step / length)
            (lost,) = self.space.of_rank_0(off >= 1 and step < self._weight_norm)
            if not lost:
                break
            step *= DECADE
        self._add_gradient(gradient.zero_(), self._pilot)
        share = len(self._pilot) / len(self._all)
        self.cost.gradient_evaluations += share
        slope = self.space.norm(gradient.sub_(self._pilot_gradient)) * self.scale / (share * step)
        return slope if math.isfinite(slope) else math.inf, length / line.length

    def _make_few_runs(self) -> None:
        """Where runs are costly, make trials of all micro-batches from the third vector on: then it
        is known where, and nearly each trial is the product.
        """
        control = self._controller
        kept = keeps_pilots(self.scheme.one_sided, control.narrow, self._sides is not None)
        taught = control.products >= SEARCHED and not control.whole
        if self.session.costly_runs and taught and not kept:
            self._take_slice()
            control.take_slice()

    def _take_slice(self) -> None:
        self._pilot, self._rest = self._all, range(0)
        self._pilot_gradient = self.gradient

    def _try_all(self) -> None:
        """Make trials on all micro-batches from now on, and learn anew."""
        self._take_slice()
        self._controllers.clear()
        self._take(self._scheme)
        if self._sides is not None:
            self._sides.control = self._controller

    def _judge_product(self, line: Line, product: Product, outcome: Trial) -> tuple[float, Trial]:
        """Return the displacement at which to repeat a product, its own to keep it; and its trial,
        with a third difference where it is doubted.
        """
        better, doubts = self._better(outcome), self._controller.doubts_of_slice(outcome)
        doubts &= self._sides is None or not self._sides.spares(outcome)
        better, doubted = self.space.of_rank_0(better, doubts)
        if doubted:
            outcome = replace(outcome, third=self._third_of_slice(line, product))
            (better,) = self.space.of_rank_0(self._better(outcome))
        return better, outcome

    def _better(self, outcome: Trial) -> float:
        """Return the displacement at which to repeat a product; its own to keep it."""
        better = self._controller.judge(outcome)
        return outcome.h if self._sides is not None and self._sides.spares(outcome) else better

    def _again(self, enough: bool) -> bool:
        """Return whether a product is to be made again, by another formula, which is then taken.

        Of the first one nobody knows yet how large the largest products are.
        """
        failed = not enough and self.formula == "central" and self.cost.products > 0
        (everywhere,) = self.space.of_rank_0(failed)
        return bool(everywhere) and self._change_formula()

    def _change_formula(self) -> bool:
        """Take central differences, or those of fourth order where these alone are expected to
        reach the tolerance; return whether it is another formula than before.
        """
        if self._sides is None or not self._sides.extrapolates:
            return False
        names: list[SchemeName] = ["central", "fourth_order"]
        for name in names:
            if name != self.formula:
                self._controller_of(name).adopt(self._controller)
        central, fourth = (self._sides.reaches(self._controller_of(name)) for name in names)
        (better,) = self.space.of_rank_0(fourth and not central)
        before = self.formula
        self._use(names[bool(better)])
        return self.formula != before

    def _use(self, scheme: SchemeName) -> None:
        """Take another formula, with what is known of the vectors."""
        if scheme != self.formula and self._sides is not None:
            self._controller_of(scheme).adopt(self._controller)
            self._take(scheme)
            self._sides.control = self._controller

    def _on_one_side(self, line: Line, trials: list[Trial]) -> Product | None:
        """Return the product from one side and the gradient at w; None where both are needed.

        Then `trials` has those of the pilot so far, of which the last one is in the gradients.
        """
        if self._sides is None:
            return None
        self._use("central")
        scheme = self._sides.scheme
        ((side, _, _),) = scheme.differences
        h, doubtful = self.space.of_rank_0(*self._sides.propose())
        while h != BOTH and doubtful:
            trials.append(self._try(line, h, [side, -side]))
            (better,) = self.space.of_rank_0(self._sides.judge(trials))
            h, doubtful = better, better != h
        if h == BOTH:
            return None
        if not trials:
            self._restart()
        self._evaluate(line, h, self._rest if trials else self._all, [side, 0])
        self._trial, error = None, DOUBTED
        with suppress(NumericsError):  # of a product that is not finite, on every rank
            raw = self._assemble(line, h, scheme)
            (error,) = self.space.of_rank_0(self._sides.conclude(self._outcome(raw), bool(trials)))
        if error == DOUBTED:
            self.cost.trials += len(trials)
            trials.clear()
            return None
        self.cost.one_sided += 1
        return replace(raw, error=error, trials=max(len(trials) - 1, 0))

    def contradicted(self) -> None:
        """Take both sides until products are what their errors say. Collective."""
        if self._sides is not None:
            self._sides.contradicted += 1

    def product_at(self, v: Tensor, h: float) -> Product:
        """Return the plain difference at displacement h, without trials or estimates of its error.

        Raises:
            NumericsError: v is zero or not finite, or the product is not finite.
        """
        started = time.perf_counter()
        line = Line(self.session, v, self._weight_norm)
        product = self._difference(line, h)
        self.cost.products += 1
        self.cost.decided(self._decided)
        self.cost.product_seconds += time.perf_counter() - started
        return in_units(product, line.unit, self.space)

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'H_i v / v'v` for micro-batch i of all ranks, `(G,)`, from slopes along v.

        Cost: two gradients over all micro-batches; two small all-reduces. The gradients are in the
        memory of a product's.

        Raises:
            NumericsError: v is zero or not finite, or a slope is not finite.
        """
        session, space, every = self.session, self.space, micro_batches or self._all
        v, length, _ = measurable(v, space)
        gradient, slopes = self._gradients[-1], list[Tensor]()
        for sign in (1.0, -1.0):
            session.displace(v, sign * h / length, across=sign < 0)
            for i in every:
                gradient.zero_()
                session.add_gradient(gradient, range(i, i + 1))
                slopes.append(sign * ops.dots([(gradient, v)], space.n_owned))
        found = space.reduce(torch.cat(slopes)).numpy().reshape(2, len(every)).sum(0)
        if not np.isfinite(found).all():
            raise NumericsError(
                f"a slope at displacement {h:.3e} is not finite: the loss is not finite there; use "
                "a smaller displacement"
            )
        return np.asarray(len(self._all) * self.scale / (2 * h * length) * found)

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v`, by a product."""
        product = self.matvec(v)
        dot, square = self.space.dots([(v, product.vector), (v, v)]).tolist()
        return Form(dot / square, (product.error or 0.0) * product.norm, product.displacement)

    def _difference(self, line: Line, h: float) -> Product:
        self._restart()
        self._evaluate(line, h, self._all, self._points)
        return self._assemble(line, h, self.scheme)

    # ---- gradients

    def _restart(self) -> None:
        for gradient in self._gradients.values():
            gradient.zero_()

    def _evaluate(self, line: Line, h: float, micro_batches: range, points: Sequence[int]) -> None:
        """Add these micro-batches' gradients at all points, beginning at the current one."""
        if not micro_batches:
            return
        step = h / line.length
        if line.is_at(points[-1] * step):
            pairs = [points[i : i + 2] for i in range(0, len(points), 2)]
            points = [*pairs[-1][::-1], *(node for pair in pairs[:-1] for node in pair)]
        for node in points:
            line.move(node * step, inner=abs(node) <= 1)
            if node:
                self._add_gradient(self._gradients[node], micro_batches)
        evaluated = sum(node != 0 for node in points)
        self.cost.gradient_evaluations += evaluated * len(micro_batches) / len(self._all)

    def _add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """Add the gradients of these micro-batches to `out`, and time them.

        The clock disregards the first evaluation, once there is another: kernels are built or tuned
        in it, just in time.
        """
        if not micro_batches:
            return
        seconds = add_gradient(self.session, out, micro_batches)
        evaluated = len(micro_batches)
        if self._warm:
            self._timed = self._timed[0] + seconds, self._timed[1] + evaluated
        else:
            self._warm = True
        total, count = self._timed if self._timed[1] else (seconds, evaluated)
        self.cost.gradient_seconds = total / count * len(self._all)

    # ---- trials

    def _search(self, line: Line, trials: list[Trial]) -> float:
        """Add trials on the pilot until one is accepted, which the product then finishes; returns
        its displacement.
        """
        while not trials:
            (h,) = self.space.of_rank_0(self._controller.first_h())
            self._add_trial(line, h, trials)
            (over,) = self.space.of_rank_0(self._controller.overshoots(trials[-1]))
            if over:  # the first of a run: the next one is not so far out
                trials.clear()
                self._trial = None
        while True:
            advice = self._controller.advise(trials)
            if self._sides is not None and self._sides.suffices(trials):
                advice = Advice(trials[-1].h, True)
            doubts = self._controller.doubts(trials[-1])
            h, accept, doubted = self.space.of_rank_0(advice.h, advice.accept, doubts)
            if not accept:
                if self._trial is None:  # the third difference was in its memory
                    self._trial = trials[-1], self._pilot_product(trials[-1].h)[0]
                self._add_trial(line, h, trials)
            elif doubted:
                self._witness(line, trials)
            else:
                self._trial = None
                return h

    def _add_trial(self, line: Line, h: float, trials: list[Trial]) -> None:
        """Add a trial; it is made again where its gradients gave way to what its step lacks."""
        earlier = self._trial
        trials.append(self._try(line, h, self._trial_points))
        if not self._controller.may_weigh:
            return
        (weighs,) = self.space.of_rank_0(self._controller.weighs(trials))
        if weighs:
            self._trial = earlier
            self._controller.lacking, _ = self._slope_of_lacking(line, h)
            trials[-1] = self._try(line, h, self._trial_points)

    def _try(self, line: Line, h: float, points: Sequence[int]) -> Trial:
        """Return the pilot's product at displacement h, whose gradients stay."""
        self._restart()
        self._evaluate(line, h, self._pilot, points)
        trial = self._judge(line, h)
        if self._rounding is None and self._controller.narrow:
            self._measure_rounding(self._gradients[points[-1]], trial)
        return trial

    def _measure_rounding(self, gradient: Tensor, trial: Trial) -> None:
        """Measure N of gradients in 16 bits by the pilot's at the present weights, which is that of
        the trial, and that of a scaled loss. Where the trial saturates, its noise is to that at w
        as the gradients are.
        """
        other, share = self.space.zeros(), len(self._pilot) / len(self._all)
        self.session.add_gradient(other, self._pilot, SCALED)
        self.cost.gradient_evaluations += share
        other.sub_(gradient)
        squares = self.space.dots([(x, x) for x in (other, gradient, self._pilot_gradient)])
        apart, here, there = squares.sqrt().tolist()
        alike = trial.nonlinearity <= SATURATING or there >= here
        found = apart * (1.0 if alike else there / here) * self.scale / (2 * share)
        if math.isfinite(found):
            self._take_rounding(found * math.sqrt(self._controller.quiet))

    def _take_rounding(self, rounding: float | None) -> None:
        """Go on with such a noise of the slice's gradients; None where it was not measured."""
        self._rounding = rounding
        for control in self._controllers.values():
            control.in_gradients = rounding or 0.0

    def _witness(self, line: Line, trials: list[Trial]) -> None:
        """Add its third difference to the last trial, in the memory of its product."""
        self._trial = None
        third, h = self.space.zeros(), trials[-1].h
        self._add_farther(third, line, h, self._pilot)
        third.add_(self._gradients[1], alpha=-3).add_(self._pilot_gradient, alpha=3)
        third.sub_(self._gradients[-1])
        found = self._third_difference(third, h, self._pilot)
        trials[-1] = replace(trials[-1], third=found)

    def _third_of_slice(self, line: Line, product: Product) -> float:
        """Return that of a product which has been assembled, in the memory of its gradient."""
        third, h = self._gradients[1].zero_(), product.displacement
        self._add_farther(third, line, h, self._all)
        # g(w + hv) is g(w - hv) + 2h Hv.
        third.add_(product.vector, alpha=-6 * h / (self.scale * line.length))
        third.add_(self.gradient, alpha=3).sub_(self._gradients[-1], alpha=4)
        return self._third_difference(third, h, self._all)

    def _add_farther(self, out: Tensor, line: Line, h: float, micro_batches: range) -> None:
        """Add the gradient at w + 2hv to `out`."""
        line.move(2 * h / line.length, inner=False)
        self._add_gradient(out, micro_batches)
        self.cost.gradient_evaluations += len(micro_batches) / len(self._all)

    def _third_difference(self, third: Tensor, h: float, micro_batches: range) -> float:
        """Return `Trial.third` from the sum of gradients of these micro-batches."""
        unit = self.scale * len(self._all) / (6 * h * len(micro_batches))
        norm = self.space.norm(third) * unit
        return norm if math.isfinite(norm) else math.inf

    def _judge(self, line: Line, h: float) -> Trial:
        """Return the trial of the pilot's product, compared with an earlier one."""
        inner = (self._gradients[1], self._gradients[-1], self._pilot_gradient)
        ratio = ops.curvature_ratio(*inner, self.space.n_owned)
        sums = self.space.reduce(torch.cat([ratio, line.change.to(ratio.device)]))
        d2, s2, along, moved = sums.tolist()
        earlier, (product, removed) = self._trial, self._pilot_product(h)
        pairs = [(product, product)]
        pairs += [(product, earlier[1])] if earlier is not None else []
        pairs += [(removed, removed)] if removed is not None else []
        square, *dots = self.space.dots(pairs).tolist()
        size = math.sqrt(square) if math.isfinite(square) else math.inf
        change = math.inf if earlier is None else distance(size, earlier[0].size, dots[0])
        share = quotient(math.sqrt(dots[-1]), size) if removed is not None else 0.0
        cosine = line.sign * quotient(along, math.sqrt(moved) * line.length, nothing=0.0)
        nonlinearity = quotient(math.sqrt(s2), math.sqrt(d2))
        since = None if earlier is None else earlier[0].h
        trial = Trial(h, size, nonlinearity, change, since, tangent(cosine), share)
        second = math.sqrt(s2) * self.scale * len(self._all) / (2 * h * len(self._pilot))
        trial = self._controller.weighed(replace(trial, second=second))
        if earlier is None or self._controller.compares_with(trial, earlier[0]):
            self._trial = trial, product
        return trial

    def _pilot_product(self, h: float) -> tuple[Tensor, Tensor | None]:
        """Return the pilot's product, and what extrapolation took from its inner difference."""
        scale = self.scale * len(self._all) / len(self._pilot)
        parts = list[Tensor]()
        for a, b, _ in self.scheme.differences:
            base = self._gradients[b] if b else self._pilot_gradient
            parts.append(torch.sub(self._gradients[a], base).mul_(scale / ((a - b) * h)))
        inner, *outer = parts
        if not outer:
            return inner, None
        (_, _, weight), *others = self.scheme.differences
        total = inner * weight
        for part, (_, _, other) in zip(outer, others, strict=True):
            total.add_(part, alpha=other)
        return total, inner.sub_(total)

    # ---- products

    def _assemble(self, line: Line, h: float, scheme: Scheme) -> Product:
        """Assemble the product from the gradients, without estimates of its error."""
        owned, length = self.space.n_owned, line.length
        sums = {"along": line.change[:1], "moved": line.change[1:]}
        (inner, _, weight), *outer = scheme.differences
        for a, b, part in scheme.differences:
            base, middle = (self._gradients[b], self.gradient) if b else (self.gradient, None)
            # The gradients are sums; this gives the weighted part of H v at v's own length.
            half = (a - b) * h / (2 * part * self.scale * length)
            partials = ops.difference(self._gradients[a], base, half, middle, owned)
            if a == inner:
                sums["inner"], sums["second"] = partials.split(1)
        vector = self._gradients[inner]
        self._gradients[inner] = torch.empty_like(vector)
        sums["removed"] = removed_square(
            vector, [self._gradients[a] for a, _, _ in outer], weight, owned
        )
        for a, _, _ in outer:
            vector.add_(self._gradients[a])
        sums["square"] = ops.dots([(vector, vector)], owned) if outer else sums["inner"]
        decided = self.session.choices(self._all).to(vector.device).split(1)
        sums |= {f"decided {i}": part for i, part in enumerate(decided)}
        figures = self._reduce(sums)
        self._decided = [figures[f"decided {i}"] for i in range(len(decided))]
        square, second = figures["square"], figures["second"]
        self._removed = quotient(
            math.sqrt(max(figures["removed"], 0.0)), math.sqrt(max(square, 0.0))
        )
        if not (math.isfinite(square) and math.isfinite(second)):
            raise NumericsError(
                f"the product at displacement {h:.3e} is not finite: the loss is not finite there; "
                "use a smaller displacement"
                + (', or "auto"' if self.displacement != "auto" else "")
            )
        first = 2 * h * math.sqrt(figures["inner"]) / (weight * self.scale * length)
        moved = math.sqrt(figures["moved"]) * length
        ratio = quotient(math.sqrt(second), first)
        return Product(
            vector=vector,
            norm=math.sqrt(square) / length,
            displacement=h,
            nonlinearity=None if scheme.one_sided or math.isinf(ratio) else ratio,
            noise=None,
            fidelity=line.sign * quotient(figures["along"], moved, nothing=0.0),
            error=None,
            trials=0,
        )

    def _outcome(self, product: Product) -> Trial:
        """Return the figures of a product as a trial of the whole slice."""
        bent = math.nan if product.nonlinearity is None else product.nonlinearity
        return Trial(product.displacement, product.norm, bent, removed=self._removed)

    def _reduce(self, partials: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum this rank's named partial sums over all ranks, in one all-reduce."""
        sums = self.space.reduce(torch.cat([part.reshape(1) for part in partials.values()]))
        return dict(zip(partials, sums.tolist(), strict=True))
