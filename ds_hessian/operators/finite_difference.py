"""The Hessian as an operator: differences of the gradient along a vector, with step control.

    central        H v = (g(w + h v) - g(w - h v)) / 2h
    forward        H v = (g(w + h v) - g(w)) / h
    fourth_order   H v = (8 (g(w + h v) - g(w - h v)) - (g(w + 2 h v) - g(w - 2 h v))) / 12h

Cost of a product, in gradients over all micro-batches: 2 (forward 1, fourth_order 4) and, for
trials of the displacement on a *pilot* of one micro-batch in eight, some 0.2 - 0.4 more; one for
the third difference of the first product, and one for the noise of it where the pilot's may not
tell that; rarely a second product, where the pilot turns out to
differ from the rest. Where runs of the host are costly (`Session.costly_runs`), trials are of all
micro-batches from the third product on: 2.3 - 2.5 gradients in as many runs, for 2.2 in five. A
product costs ten small all-reduces with the trial that becomes part of it, two more with a third
difference of the pilot, and each further trial three, in 16 bits four until it is known what steps
lack.

Memory per rank, in vectors of `n_local` fp32: one for each gradient of a trial, two for those at w
(of all micro-batches and of the pilot) and two for the products of trials, or one of them and a
third difference: forward and central 6, fourth_order 8, which has one more for a moment in each
trial. A finished product overwrites its first gradient.

With a tolerance, central differences become one-sided ones where these are good enough: 1.0 - 1.2
gradients, in the same memory; and, below `ds_hessian.config.EXTRAPOLATED`, those of fourth order
where nothing cheaper is, in theirs.

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
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import NumericsError
from ds_hessian.operators.checks import in_units, require_step
from ds_hessian.operators.displacement.control import Advice, StepController
from ds_hessian.operators.displacement.figures import tangent
from ds_hessian.operators.displacement.line import Line
from ds_hessian.operators.displacement.schemes import SCHEMES, Scheme, SchemeName
from ds_hessian.operators.displacement.sides import BOTH, DOUBTED, Sides
from ds_hessian.operators.displacement.trials import Trial
from ds_hessian.operators.displacement.witnesses import keeps_pilots
from ds_hessian.operators.gradients import Gradients
from ds_hessian.operators.protocol import Form, OperatorCost, Product

SEARCHED = 2
"""Vectors whose displacement is searched for: a random one, and the next, rich in outliers."""


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
        self.outputs: str | None = None
        self.outputs_read = 0, False
        self._gradients = Gradients(session)
        self.scale = self._gradients.scale
        self._trial: tuple[Trial, Tensor] | None = None  # with which the next one is compared
        self._controllers = dict[SchemeName, StepController]()
        self._rounding: float | None = None  # N of the gradients, once it was measured
        self._scheme = scheme
        self._take(scheme)
        self._sides = None if tolerance is None else Sides(tolerance, self._controller)

    def _take(self, scheme: SchemeName) -> None:
        """Make products of both sides by this formula, with what is known of noise and bend."""
        self.formula, self.scheme, self._trial = scheme, SCHEMES[scheme], None
        self._gradients.take(self.scheme)
        # A trial needs both sides for its nonlinearity ratio; the last one is the product's first.
        self._trial_points = [1, -1] if self.scheme.one_sided else self._gradients.points
        self._controller = self._controller_of(scheme)

    def _controller_of(self, scheme: SchemeName) -> StepController:
        if scheme not in self._controllers:
            self._controllers[scheme] = StepController(
                SCHEMES[scheme],
                self.session.unit_roundoff,
                self._gradients.weight_norm,
                len(self._gradients.pilot),
                len(self._gradients.all),
                None if self.displacement == "auto" else float(self.displacement),
                self.cost.kinks_crossed is None,
                self.gradient_norm,
                self._rounding or 0.0,
            )
        return self._controllers[scheme]

    @property
    def cost(self) -> OperatorCost:
        """The cost of the products so far, and of a gradient."""
        return self._gradients.cost

    @property
    def gradient(self) -> Tensor:
        """The gradient at w, divided by `scale`."""
        return self._gradients.at_w

    @property
    def gradient_norm(self) -> float:
        """The norm |g(w)| of the gradient of the loss, over all ranks."""
        return self._gradients.norm

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
        self._gradients.cost = OperatorCost(**figures["cost"])

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
        line = Line(self.session, v, self._gradients.weight_norm)
        product = self._on_one_side(line, trials) or self._on_all_sides(line, trials)
        given = self.displacement != "auto"
        require_step(product, self._gradients.of_weights if given else 0.0)
        unseen = 0.0 if product.norm else self._controller.unseen(product.displacement)
        if unseen:
            product = replace(product, norm=unseen, error=1.0)
        self.cost.products += 1
        self.cost.decided(self._gradients.decided)
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
        gradients, h = self._gradients, self._search(line, trials)
        gradients.evaluate(line, h, gradients.rest, gradients.points)
        try:
            raw = self._assemble(line, h, self.scheme)
        except NumericsError:  # on every rank; the pilot alone is finite here
            if self.displacement != "auto" or not gradients.rest:
                raise
            return self._of_all(line, trials)
        outcome = gradients.outcome(raw)
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
            gradients.evaluate(line, better, gradients.rest, gradients.points)
            raw = self._assemble(line, better, self.scheme)
            _, outcome = self._judge_product(line, raw, gradients.outcome(raw))
        noise, error = self._controller.conclude(outcome)
        off = tangent(raw.fidelity)
        (lacking,) = self.space.of_rank_0(self._controller.lacks(outcome, error, off))
        if lacking:
            slope, off = gradients.slope_of_lacking(line, better)
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

    def _make_few_runs(self) -> None:
        """Where runs are costly, make trials of all micro-batches from the third vector on: then it
        is known where, and nearly each trial is the product.
        """
        control = self._controller
        kept = keeps_pilots(self.scheme.one_sided, control.narrow, self._sides is not None)
        taught = control.products >= SEARCHED and not control.whole
        if self.session.costly_runs and taught and not kept:
            self._gradients.take_all()
            control.take_slice()

    def _try_all(self) -> None:
        """Make trials on all micro-batches from now on, and learn anew."""
        self._gradients.take_all()
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
            outcome = replace(outcome, third=self._gradients.third_of_slice(line, product))
        if self._hears(line, product, outcome) or doubted:
            (better,) = self.space.of_rank_0(self._better(outcome))
        return better, outcome

    def _hears(self, line: Line, product: Product, outcome: Trial) -> bool:
        """Measure the noise of all micro-batches where the pilot's may not tell it; return whether
        that was done.
        """
        control, belief = self._controller, self._controller.belief
        if not control.may_hear:
            return False
        doubts = control.doubts_noise(outcome, belief)
        doubts &= self._sides is None or not self._sides.spares(outcome)
        (doubted,) = self.space.of_rank_0(doubts)
        if doubted:
            assert belief is not None
            control.hear(self._gradients.nearer(line, product), outcome, belief)
        return bool(doubted)

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
        gradients = self._gradients
        if not trials:
            gradients.restart()
        gradients.evaluate(line, h, gradients.rest if trials else gradients.all, [side, 0])
        self._trial, error = None, DOUBTED
        with suppress(NumericsError):  # of a product that is not finite, on every rank
            raw = self._assemble(line, h, scheme)
            outcome = gradients.outcome(raw)
            (error,) = self.space.of_rank_0(self._sides.conclude(outcome, bool(trials)))
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
        line = Line(self.session, v, self._gradients.weight_norm)
        product = self._difference(line, h)
        self.cost.products += 1
        self.cost.decided(self._gradients.decided)
        self.cost.product_seconds += time.perf_counter() - started
        return in_units(product, line.unit, self.space)

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'H_i v / v'v` for micro-batch i of all ranks, `(G,)`, from slopes along v.

        Cost: two gradients over all micro-batches; two small all-reduces. The gradients are in the
        memory of a product's.

        Raises:
            NumericsError: v is zero or not finite, or a slope is not finite.
        """
        return self._gradients.forms(v, h, micro_batches)

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v`, by a product."""
        product = self.matvec(v)
        dot, square = self.space.dots([(v, product.vector), (v, v)]).tolist()
        return Form(dot / square, (product.error or 0.0) * product.norm, product.displacement)

    def _difference(self, line: Line, h: float) -> Product:
        gradients = self._gradients
        gradients.restart()
        gradients.evaluate(line, h, gradients.all, gradients.points)
        return self._assemble(line, h, self.scheme)

    def _assemble(self, line: Line, h: float, scheme: Scheme) -> Product:
        """Return the product of gradients that have been evaluated, without estimates of its error.

        Raises:
            NumericsError: it is not finite.
        """
        try:
            return self._gradients.product(line, h, scheme)
        except NumericsError as error:
            if self.displacement == "auto":
                raise
            raise NumericsError(f'{error}, or "auto"') from error

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
                    self._trial = trials[-1], self._gradients.pilot_product(trials[-1].h)[0]
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
            self._controller.lacking, _ = self._gradients.slope_of_lacking(line, h)
            trials[-1] = self._try(line, h, self._trial_points)

    def _try(self, line: Line, h: float, points: Sequence[int]) -> Trial:
        """Return the pilot's product at displacement h, whose gradients stay."""
        gradients, control = self._gradients, self._controller
        gradients.restart()
        gradients.evaluate(line, h, gradients.pilot, points)
        trial = self._compared(line, h)
        if self._rounding is None and control.narrow:
            found = gradients.rounding(points[-1], trial) * math.sqrt(control.quiet)
            self._take_rounding(found if math.isfinite(found) else None)
        return trial

    def _compared(self, line: Line, h: float) -> Trial:
        """Return the trial that was evaluated, and keep its product if the next one is to be
        compared with it.
        """
        found, product = self._gradients.trial(line, h, self._trial)
        trial = self._controller.weighed(found)
        if self._trial is None or self._controller.compares_with(trial, self._trial[0]):
            self._trial = trial, product
        return trial

    def _take_rounding(self, rounding: float | None) -> None:
        """Go on with such a noise of the slice's gradients; None where it was not measured."""
        self._rounding = rounding
        for control in self._controllers.values():
            control.in_gradients = rounding or 0.0

    def _witness(self, line: Line, trials: list[Trial]) -> None:
        """Add its third difference to the last trial, in the memory of its product."""
        self._trial = None
        third = self._gradients.third_of_pilot(line, trials[-1].h)
        trials[-1] = replace(trials[-1], third=third)
