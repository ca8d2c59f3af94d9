"""Choosing the displacement h of each product by measurement.

A *trial* is the product at one displacement on the pilot, a few of the micro-batches; it is part
of the product over all of them if its displacement is accepted. Trials and finished products
determine the rounding noise N and the bend b, a measure of the gradient's nonlinearity
(`ds_hessian.operators.displacement.belief`), hence the error at every h:

* The first vector's trials are the most informative ones, until the best h is known well enough.
* Every other vector's first trial is at the best h by the estimates from the earlier vectors
  (`ds_hessian.operators.displacement.estimates`); it is accepted unless it shows that another h is
  expected to be much better.
* An accepted trial has a third difference, which is what its error is, noise and truncation alike
  (`Belief`): of all vectors where the pilot is small, and of all after one that was a surprise.
* Where the second difference of a trial far exceeds the first, both sides have saturated alike: the
  next ones are a decade shorter each, until one is clear.
* Two trials that contradict each other have one between them, which tells whether the shorter one
  stays on a step of rounding (`ds_hessian.operators.displacement.steps`).
* The first trial of a run is far out, and so is one of a vector in SELDOM: there truncation is more
  than noise, and shows in the change to the next trial, and with it kappa, its size in units of
  (b h)^p. Where there are no third differences (in 16 bits, and of first order), a vector in a few
  has a trial above h, as it costs, and each one with many micro-batches (ALWAYS).
* A product OTHER times as long as its pilot's, which may be zero, says that trials of the pilot
  tell nothing: it is made anew with trials of all micro-batches, as are all after it.
* A finished product that turns out to be far from its best h is repeated, and so is one with kinks
  that its pilot has not: where r is no more than noise. One that bends far more than its pilot (of
  the first two vectors, more), and more than any so far that was found smooth, has a third
  difference of its own, which tells; where there is none, it counts as kinked. So has the first
  one of a run: how the slice differs from its pilot nothing else has told.

Everything here is arithmetic on numbers that all ranks share; the displacements used are rank 0's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from ds_hessian.operators.displacement.belief import (
    LARGEST,
    SATURATING,
    STEP,
    UNEXPECTED,
    UNLIKE,
    VISIBLE,
    Array,
    Belief,
    Estimate,
    Outlook,
    Surroundings,
    wall_of,
)
from ds_hessian.operators.displacement.estimates import Estimates
from ds_hessian.operators.displacement.possible import (
    farther,
    possible_truncation,
    shown_by_others,
)
from ds_hessian.operators.displacement.priors import (
    BEND_SPREAD,
    KAPPA_SPREAD,
    expected_noise,
)
from ds_hessian.operators.displacement.steps import (
    AMPLIFY,
    DECADE,
    beyond,
    difference,
    longest_step,
    marked,
)
from ds_hessian.operators.displacement.trials import ROUNDOFF, Trial
from ds_hessian.operators.displacement.witnesses import (
    has_thirds,
    products_of_a_third,
    products_of_a_trial_above,
)
from ds_hessian.operators.protocol import COVERAGE

KNOWN = 0.08
"""The first vector's trials continue until the regret is no more than this."""

WORTH = 0.6
"""Loss in ln(error) for which a product is made again, or a trial with a third difference, which
the next one would need too, or one of all micro-batches after those of a pilot; half of it for
others of all, by a kappa that may be off by 3, and a third of it for a pilot's, which cost less."""

DOUBTFUL = math.exp(2 * UNLIKE)
"""Smooth micro-batches bend more than the pilot by this factor in 1 of 40 products, if the ln b of
pilot and slice differ normally: cause for doubt while no Krylov vector is known."""

OTHER = 14.0
"""The slice's |D| over that of a pilot that tells of it, at most (docs/numerics.md, Pilots)."""

SUMMED = 2.0
"""Roundoffs of fp32 that a gradient has by its sums, at least, whatever the dtype of the passes.
Gradients of both sides that are opposite round alike, and their differences show none of it:
products of even losses were 3 - 10 roundoffs off."""

CANCELS = 4.0
"""The largest |Hv| over one from which on D has more roundoffs: larger terms cancel in it, which
round as they do elsewhere (of an even loss 12 roundoffs where |Hv| is a fortieth, 1 in others)."""

NEAR = 3
"""Trials that a scan has within a decade of each other; each one after them, where neither rounding
nor saturation was found to end, goes a decade farther than the one before."""

CANCELLED = math.sqrt(3) * UNEXPECTED
"""A nonlinearity ratio above this one is neither that of noise nor of saturation."""

FARTHER = 3.0
"""Where the longest displacement bends so many times less than what saturates, others are up to so
many times longer: nets that are nearly linear are best measured beyond |w|."""

APART = 0.4
"""Least distance between the trials of a vector, in ln h."""

MAX_TRIALS = 7


@dataclass(frozen=True)
class Advice:
    """The decision after a trial: accept its displacement, or try `h`."""

    h: float
    accept: bool


class StepController(Estimates):
    """The trials of each product: their displacements, what they tell, and when one is accepted.

    Args: those of `Estimates`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()
        self._share_witnesses()
        self.expected = 0.0  # error of the accepted trial before its third difference
        self.accepted: Trial | None = None
        self.seen = 0.0  # the largest |D| of its trials that are not lost
        self.apart = 0.0  # the error of the accepted one that the others show
        self.surveys = True  # whether the first trial of the first vector is far out
        self.belief: Belief | None = None
        self.outlook: Outlook | None = None  # of the last product

    def _share_witnesses(self) -> None:
        counts = self.pilot, self.num_micro_batches
        self.interval = products_of_a_trial_above(self.order, self.narrow, *counts)
        # A pilot that told nothing of the slice tells that its micro-batches are unlike.
        unlike = self.whole and self.num_micro_batches > 1 and self.of_pilot is None
        self.thirds = products_of_a_third(0.0 if unlike else self.pilot / self.num_micro_batches)

    @override
    def take_slice(self) -> None:
        super().take_slice()
        self._share_witnesses()

    # ---- trials of a vector

    def _begin(self) -> None:
        """Forget what holds for one vector alone."""
        self.floor, self.wall = self.smallest, math.inf
        self.kinked = False  # whether its product has kinks that its pilot has not
        self.shown = 0.0  # the slice's truncation over h^p that its own third difference has shown
        self.even = 0.0  # the displacement up to which that has shown no kink

    def first_h(self) -> float:
        """Return the displacement of the next vector's first trial."""
        self.belief = self.outlook = None
        self._begin()
        self.surveys = self.surveys and self._first and self._has_thirds and self.fixed is None
        if self.surveys:
            return self._clamp(SATURATING / 2 / math.exp(self.bend.mean))
        if not self._is_due:
            return self.h
        farther = AMPLIFY ** (1 / self.order)
        if self.order <= 2 and self.bend.spread <= BEND_SPREAD:  # of others the next power shows
            farther = max(farther, math.sqrt(SATURATING / (math.exp(self.bend.mean) * self.h)))
        return self._clamp(self.h * farther)

    @property
    def _is_due(self) -> bool:
        seldom = (self.products - 1) % self.interval == 0
        blind = self.blind and self.narrow  # which has no third difference
        return self.fixed is None and self.products > 0 and (blind or seldom)

    @property
    def _first(self) -> bool:
        """True for the first vector, where no earlier measurement has taught anything."""
        return self.products == 0 and self.taught is None

    def advise(self, trials: list[Trial]) -> Advice:
        """Judge the trials made for the current vector so far."""
        if self.fixed is None:
            trials[:] = marked(trials, self.in_gradients if self.narrow else None)
            self.floor = min(max(self.floor, 2 * longest_step(trials)), self.largest)
        earlier = [trial for trial in trials[:-1] if trial.h == trials[-1].h]
        if earlier and trials[-1].third is None:
            trials[-1] = replace(trials[-1], third=earlier[-1].third)
        last, final = trials[-1], len(trials) >= MAX_TRIALS
        clear = [t for t in trials if t.sound and t.nonlinearity <= SATURATING]
        if self.fixed is None and not clear and any(map(self._is_cancelled, trials)):
            self.bend = self.any_bend  # that of earlier vectors says nothing of this one's
            if not final and last.h / DECADE > self.smallest:
                return Advice(last.h / DECADE, False)
        if last.lost and self.fixed is None:
            self.floor = min(last.h * DECADE, self.largest)
            return self._advice(self.floor, last.h, last.h == self.largest)
        if last.size == 0:
            nearest = min((t.h for t in clear), default=last.h)
            return self._advice(nearest, last.h, final)
        if not last.finite:
            self._stay_below(last.h)
            return self._advice(self.largest, last.h, final)
        compared = next((t for t in trials[-2::-1] if last.since in (None, t.h)), None)
        between = self._between(compared, last) if compared and not final else None
        if between and min(abs(math.log(between / t.h)) for t in trials) > APART:
            return Advice(between, False)
        farther = None if final or self.fixed is not None else beyond(trials)
        if farther is not None and farther < self.largest:
            return Advice(farther, False)
        near = self.largest / math.exp(STEP) < last.h <= self.largest
        if near and not self.bounded and last.nonlinearity < SATURATING / FARTHER:
            self.largest *= FARTHER
        belief = self.learn(trials)
        outlook = belief.outlook(last, self._displacements(), of_pilot=True)
        if last.third is None:
            self.expected = outlook.error
        if earlier and last.third in (None, earlier[-1].third):
            return Advice(last.h, True)  # returned to, when all that it tells was known
        farther = 1 if self.narrow else max(1, len(trials) - NEAR)
        lower = min(trial.h for trial in trials) / DECADE**farther
        free = lower > self.floor or self.floor == self.smallest  # which no step has raised
        scan = self.products == 0 and len(trials) > 1 and free and not final
        if scan and min(t.nonlinearity for t in trials if t.sound) > SATURATING:
            if lower < self.floor:
                self.floor = self.smallest = lower
            return Advice(lower, False)  # r is noise or saturated: no trial tells which
        if self._first and not final and not belief.blind:
            regret, telling = belief.search(last, self._displacements())
            new = min(abs(math.log(telling / t.h)) for t in trials) > APART
            if new and (regret > KNOWN or len(trials) == 1):  # no error without a change
                return Advice(telling, False)
        if self._is_due and len(trials) == 1:
            apart = abs(math.log(outlook.h / last.h))
            below = last.h / AMPLIFY ** (1 / self.order)
            return Advice(outlook.h if apart > APART else below, False)
        share = 3 if not self.whole else 2 if self.of_pilot is None else 1
        enough = WORTH if last.third is not None else WORTH / share
        if last.third is None and belief.shows_noise(last):
            enough = KNOWN
        best = last.h if outlook.excess < enough or len(trials) > MAX_TRIALS else outlook.h
        if best == last.h and self.fixed is None and clear:
            clearest = min(clear, key=lambda trial: trial.nonlinearity)
            vague = last.nonlinearity > UNEXPECTED * clearest.nonlinearity
            if last not in clear or (len(trials) > MAX_TRIALS and vague):
                return Advice(clearest.h, False)
        return self._advice(best, last.h, len(trials) > MAX_TRIALS)

    def _is_cancelled(self, trial: Trial) -> bool:
        """Return whether both sides of a trial have changed alike, by more than noise: h is too
        large, and |D|, which is what is left of them, says nothing of |Hv|.
        """
        noise = math.exp(self.noise.mean) if self.noise else self.in_gradients / self.quiet
        changed = trial.h * trial.second
        alike = CANCELLED * max(noise, self.rounded) < changed < math.inf
        return alike and trial.nonlinearity > CANCELLED

    def compares_with(self, trial: Trial, earlier: Trial) -> bool:
        """Return whether the next trial is compared with this one, and not with an earlier one.

        It is the one that shows least of noise and truncation, but the longer one where another
        trial is to decide which of them is wrong.
        """
        if self._between(earlier, trial):
            return trial.h > earlier.h
        if self.surveys and trial.h < earlier.h:
            return False
        return not trial.nonlinearity > earlier.nonlinearity

    def overshoots(self, trial: Trial) -> bool:
        """Return whether the first trial of a run, which is far out to show truncation, shows none,
        or contradicts what was taught: then the vector begins anew, without it.
        """
        if self.taught is not None and self.products == 0 and self.contradicts(trial):
            self.load_state_dict(self.untaught)
            self.surveys = True
            return True
        over = self.surveys and not (trial.usable and trial.nonlinearity <= SATURATING)
        if over and not trial.finite:
            self._stay_below(trial.h)
        self.surveys = self.surveys and not over
        return over

    def _stay_below(self, h: float) -> None:
        """Take note of a displacement at which something is not finite."""
        self.largest, self.bounded = h / AMPLIFY, True

    def _between(self, earlier: Trial, trial: Trial) -> float | None:
        return None if self.fixed is not None else difference(earlier, trial).deciding(self.order)

    def doubts(self, trial: Trial) -> bool:
        """Return whether the third difference of an accepted trial is to be evaluated."""
        changed = math.inf > trial.change > UNEXPECTED * self.expected * trial.size
        surprised = changed and not self.whole  # of which it would cost a gradient
        due = self.products >= self.next_third or self.blind or surprised
        return due and self._has_thirds and trial.usable and trial.third is None

    @property
    def _has_thirds(self) -> bool:
        return has_thirds(self.order, self.narrow)

    def learn(self, trials: Sequence[Trial]) -> Belief:
        """Return what the current vector's trials tell; the last one is finite and not 0."""
        self.size, self.accepted = trials[-1].size, trials[-1]
        sound = [trial for trial in trials if trial.sound]
        self.wall = wall_of(sound)
        self.belief = belief = self._observe(trials)
        # In 16 bits |Hv| may be what looks like noise where no trial is clear.
        clear = not self.narrow or any(trial.nonlinearity <= SATURATING for trial in sound)
        noise = clear * UNEXPECTED * math.exp(belief.of_pilot()[0])
        self.seen = max((t.size for t in sound if t.h * t.size > noise), default=0.0)
        self.apart = shown_by_others(trials) if self.narrow else 0.0
        for count, trial in enumerate(trials, 1):
            belief.observe_change(trials[:count], learns=self.products > 0 or self._has_thirds)
            belief.observe_removed(trial)
        return belief

    def expected_error(self, trial: Trial) -> float:
        """Return the expected relative error of the slice's product at the h of the last trial."""
        assert self.belief is not None
        return self.belief.outlook(trial, self._displacements(), of_pilot=True).error

    def _advice(self, h: float, here: float, final: bool) -> Advice:
        h = self.fixed or h
        return Advice(h, h == here or (final and self.fixed is None))

    def _observe(self, trials: Sequence[Trial]) -> Belief:
        trials = [t for t in trials if self.fixed is not None or not t.lost]
        noise = self.noise or expected_noise([t for t in trials if t.usable], self.rounding)
        around = Surroundings(
            order=self.order,
            quiet=self.quiet,
            bend=self.bend_unlike,
            size=self.size_unlike,
            spread=0.0 if self.whole else UNLIKE,
            hidden=self.hidden,
            blind=self.blind,
            roundoff=self.roundoff,
            least=self.rounded,
            in_gradients=self.in_gradients,
        )
        return Belief(noise, self.bend, self.kappa.widened(KAPPA_SPREAD), around, trials)

    def _displacements(self) -> Array:
        low, high = math.log(self.floor), math.log(self.largest)
        grid = np.exp(np.linspace(low, high, max(2, math.ceil((high - low) / STEP))))
        return grid[: max(1, int(np.searchsorted(grid, self.wall)))]

    # ---- after a product

    def is_unlike(self, pilot: Trial, product: Trial) -> bool:
        """Return whether a product has far more than its pilot, whose trials then tell nothing: of
        D, or, where its third difference has shown that this is no kink, of r.
        """
        if self.whole:
            return False
        bent = product.third is not None and not self.kinked and self._unlike(product) > OTHER
        return bent or product.size > OTHER * pilot.size

    def doubts_of_slice(self, product: Trial) -> bool:
        """Return whether the third difference of a judged product is to be evaluated, and the
        product judged again.
        """
        if self.outlook is None or self.whole or not self._has_thirds or self._often_rough:
            return False
        if self._first:  # of the slice nothing else has told
            return _bent(product, self.outlook)
        if self.shown:
            return self._is_strange(product, self.outlook)
        assert self.belief is not None
        usual = DOUBTFUL if self.products < 2 else self._usual
        doubted = self._unlike(product) > usual and _bent(product, self.outlook)
        if self.belief.kinked:  # by the pilot's: a kink, or a kappa that is far from the usual
            return doubted or (not self.kinked and _bent(product, self.outlook))
        told = self.belief.contradicted  # then r is the error
        return doubted or (not told and self._possible(product) > COVERAGE * self.outlook.error)

    def _possible(self, product: Trial) -> float:
        """Return the truncation that a product may have for all that is known, relative."""
        assert self.belief is not None and self.accepted is not None
        if self.shown:
            return self.shown * product.h**self.order
        if product.third is not None:
            return 0.0
        told = self.belief, self.accepted, product, self.num_micro_batches
        return possible_truncation(*told, self.harmless[0])

    def judge(self, product: Trial) -> float:
        """Return the h at which to repeat a product of all micro-batches; its own to keep it."""
        if self.belief is None or product.size == 0:
            return product.h
        if product.third is not None:
            self.belief.kinked = False  # what the pilot's said of kinks, this one tells of all
        self.belief.observe_product(product)
        before = self.outlook
        self.outlook = outlook = self.belief.outlook(product, self._displacements(), of_pilot=False)
        if product.third is not None:
            self.kinked = self.belief.kinked
            self.shown = 0.0 if self.kinked else self.belief.truncation
            self._keep_kappa(self.belief)  # at once: a product that is repeated has another belief
            if not self.kinked:
                self.cleared = max(self.cleared, self._unlike(product))
                self.even = product.h
                small = before and self.shown * product.h**self.order <= COVERAGE * before.error
                if small and self.accepted is not None:
                    ratio = farther(self.belief, self.accepted, product)
                    self.harmless = sorted([*self.harmless, ratio])[-2:]
        strange = self._is_strange(product, outlook)
        if self.fixed is None and strange and not self._often_rough:
            # Where its ratio is its error, and noise as large.
            return self._clamp(product.h * math.sqrt(outlook.noise / product.nonlinearity))
        error, worth = outlook.error, math.exp(WORTH)
        if self._first and product.third is not None:  # noise it may be: a shorter step has more
            error, worth = product.third / product.size, DECADE
        best = outlook.error * math.exp(-outlook.excess)
        if error > worth * best and self.fixed is None:
            return outlook.h if self.wall == math.inf else min(outlook.h, product.h)
        return product.h

    def _is_strange(self, product: Trial, outlook: Outlook) -> bool:
        """Return whether a product has kinks that its pilot has not, by more than rounding."""
        told = product.third is not None or product.h <= self.even
        strange = not told and self._unlike(product) > self._usual
        return (self.kinked or strange) and not self.whole and _bent(product, outlook)

    def _unlike(self, product: Trial) -> float:
        """Return the ratio of a product's nonlinearity to the pilot's at the same displacement."""
        assert self.accepted is not None
        pilot = self.accepted.nonlinearity * product.h / self.accepted.h
        return product.nonlinearity / pilot if pilot else math.inf

    def conclude(self, product: Trial) -> tuple[float | None, float | None]:
        """Update the estimates by the product that is kept, the last one given to `judge`.

        Returns:
            Its relative noise and error.
        """
        belief, outlook = self.belief, self.outlook
        possible = self._possible(product) if belief is not None and product.size else 0.0
        self.belief = self.outlook = None
        if belief is None or outlook is None or product.size == 0:
            return None, None
        _, bend = self._carry_over(belief, product)
        truncated = max(belief.truncation * product.h**self.order, possible)
        witnessed = self._witnessed(product, outlook, belief)
        noise = self._noise_of_slice(product, outlook, belief)
        likely = min(math.hypot(noise, truncated), LARGEST[0])
        self.most = max(self.most, product.size)
        summed = SUMMED * ROUNDOFF * max(1.0, self.most / (CANCELS * product.size))
        error = max(outlook.error, witnessed, likely, summed, self.apart)
        if self.accepted is not None and self.accepted.third is not None:
            unexpected = max(witnessed, truncated) > UNEXPECTED * self.expected
            surprising = self.products == 0 or unexpected
            self.next_third = self.products + (1 if surprising else self.thirds)
        if self.fixed is None:
            self.h = outlook.h
        if self.products == 0:
            self._second(bend)
        self.products += 1
        return outlook.noise, error

    @property
    def may_weigh(self) -> bool:
        """Whether what steps lack of v can matter and is not known; the same on every rank."""
        return self.narrow and self.fixed is None and self.lacking is None

    def weighs(self, trials: Sequence[Trial]) -> bool:
        """Return whether to evaluate what the last trial's step lacks of v, once in a run: in 16
        bits that may be large weights along which there is no curvature.

        It is where the step is lost and r is not, and all longer ones saturate.
        """
        *before, last = trials
        clear = any(t.sound and t.nonlinearity <= SATURATING for t in before)
        told = last.usable and last.nonlinearity <= SATURATING and not clear
        return told and last.lost and self.may_weigh

    def weighed(self, trial: Trial) -> Trial:
        """Return a trial whose `off` is the share of D that it makes, where that is known."""
        if not self.narrow or self.lacking is None or not trial.size:
            return trial
        return replace(trial, off=trial.off * min(self.lacking / trial.size, 1.0))

    def lacks(self, product: Trial, error: float | None, off: float) -> bool:
        """Return whether what steps lack of v may make more than a concluded product's error.

        Steps in which a weight stays where it is, since h v is less than its roundoff, have no part
        of D: no ratio, change or third difference shows it. What a random vector lacks makes as
        much of D as of v, and not more than noise. In 16 bits what a weight lacks is all that it
        could be displaced by.

        Args:
            product: The product.
            error: Its relative error as far as is known.
            off: The tangent of the angle between v and the realised step.
        """
        if self.narrow or not error or not product.size:
            return False
        self.least = min(self.least, product.size)
        return off * (self.lacking or self.least) > error * product.size

    def learn_lacking(self, product: Trial, slope: float, off: float, noise: float) -> float:
        """Return the relative error of a product whose steps lack `off` of v, along a vector whose
        own product by the pilot has the norm `slope`; it is noise that r does not show.
        """
        assert self.accepted is not None and self.noise is not None
        self.lacking = slope * product.size / self.accepted.size
        error = off * slope / self.accepted.size
        if error > noise > 0:
            self.hidden *= error / noise
            self.noise = Estimate(self.noise.mean + math.log(error / noise), self.noise.spread)
        return min(error, LARGEST[0])

    def goes_farther(self, product: Trial, error: float) -> bool:
        """Return whether to make a product again that has lost this much, at a larger h, with which
        the next trial then begins.
        """
        if self.fixed is not None or self.products < 2:
            return False
        h, expected = self.foreseen(self.size)
        farther = h > product.h and math.log(error / expected) > WORTH
        if farther:
            self.h = h
        return farther

    def conclude_one_sided(self, product: Trial) -> None:
        """Update the estimates by a product that has the gradient at w for one of its two, with
        trials (`learn`) or without.
        """
        belief, self.belief, self.outlook = self.belief, None, None
        if belief is not None:
            assert self.accepted is not None
            self._carry_over(belief, product)
            self.h = belief.outlook(self.accepted, self._displacements(), of_pilot=True).h
        elif self.noise is not None:
            self._drift(self.noise, self.bend)
        self.products += 1

    def _noise_of_slice(self, product: Trial, outlook: Outlook, belief: Belief) -> float:
        """Return the relative noise of a product, of which micro-batches may share some.

        If r is noise, that of the slice tells. Else it is between the share `quiet` of the pilot's,
        if they share little, and all of it: the geometric mean is within a factor 1.6 of both.
        """
        assert self.accepted is not None
        accepted, pilot = self.accepted, outlook.noise / self.quiet
        if self.narrow:  # that of gradients, if it is more, is the slice's
            pilot = min(pilot, math.exp(belief.of_pilot()[0]) / (product.h * product.size))
        if accepted.third is not None and math.isfinite(accepted.third):
            here = accepted.third / accepted.size * accepted.h / product.h
            pilot = max(pilot, min(here, UNEXPECTED * pilot))
        shown = belief.hidden * product.nonlinearity / math.sqrt(3)
        alike = belief.blind or belief.shows_noise(accepted)
        most = pilot if alike else pilot * math.sqrt(self.quiet)
        return max(outlook.noise, min(shown, most))

    def _witnessed(self, product: Trial, outlook: Outlook, belief: Belief) -> float:
        """Return the error that the product's own ratio shows by itself.

        A large one says more than any model. One that the pilot's does not explain is that of
        micro-batches which are not like the pilot, such as kinks in some of them.
        """
        assert self.accepted is not None
        ratio, pilot = product.nonlinearity, self.accepted.nonlinearity
        ratio = pilot if math.isnan(ratio) else ratio  # of one side there is none
        strange = self._is_strange(product, outlook)
        self.rough += strange or belief.kinked
        # Where changes contradict r, what r shows beyond rounding is a kink.
        kinked = strange or self._often_rough or belief.contradicted or belief.kinked
        longer = self.seen / self.accepted.size
        if max(pilot, ratio) > 1:
            # The second difference exceeds the first: |D| says nothing of |Hv|, which may be as
            # large as that of any trial.
            return max(ratio, longer)
        if ratio > SATURATING or self.order == 1 or (kinked and _bent(product, outlook)):
            # What the two differences of an extrapolation differ by is evidence and no hint.
            shown = min(ratio, product.removed if self.order > 2 else ratio, LARGEST[0])
            return max(shown, longer - 1) if ratio > SATURATING else shown
        return product.extrapolated if product.removed > VISIBLE * outlook.noise else 0.0


def _bent(product: Trial, outlook: Outlook) -> bool:
    """Return whether the ratio of a product is more than rounding."""
    return product.nonlinearity > 2 * math.sqrt(3) * outlook.noise
