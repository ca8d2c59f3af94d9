"""Choosing the displacement of Gauss-Newton products by measurement.

Trials are products of the pilot, one of the micro-batches: for the first vector at as many
displacements, each a quarter of the one before (and less, where the outputs bend too much at
several), as it takes to see both sides of the valley of the error
(`ds_hessian.operators.outputs.estimates`); of the second, and then of one in SELDOM, at two. Third
differences of the cotangents and of the outputs are made of the first two vectors, and then as
often as that is cheap.
The pilot is a micro-batch with a typical part in the products: where its own are much smaller than
those of all, another one takes its place, and where they tell nothing of the first product, this is
made anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_hessian.operators.displacement.belief import VISIBLE, Estimate
from ds_hessian.operators.displacement.control import OTHER
from ds_hessian.operators.displacement.priors import NOISE_SPREAD
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.displacement.witnesses import has_thirds
from ds_hessian.operators.outputs.estimates import UNEXPECTED, OutputEstimates
from ds_hessian.operators.outputs.fitted import alike
from ds_hessian.operators.outputs.learnt import OF_LOSS, SPREAD, TYPICAL
from ds_hessian.operators.outputs.trials import Trial, marked

LADDER = 4.0
"""Ratio of the displacements of the first vector's trials."""

MOST, NEAR = 9, 2
"""Trials of a vector, at most, and steps of the ladder after which the next is longer, where the
outputs bend too much at all of them: along parameters that are far smaller than |w|."""

ACCEPT, REPEAT = 1.5, 2.5
"""Ratio of the expected error to the least possible, up to which a trial is accepted, and above
which a product is made again."""

SELDOM = 16
"""One vector in so many, the second first, has a second trial, so that kappa and N are measured
anew."""

THIRDS = 2 * SELDOM
"""One vector in so many, the second first, and the first one of all have third differences of the
outputs of some micro-batches beside the pilot."""

ABOVE = 2.5
"""Ratio of the displacement of that trial to the best one."""


class OutputSteps(OutputEstimates):
    """The displacements of one operator's products.

    Args: those of `OutputEstimates`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._anew = False  # whether another pilot was taken for the first vector

    # ---- trials

    def first_h(self) -> float:
        """Return the displacement of the next vector's first trial."""
        found = self.learnt
        self._bend, self._kappa, self._noise = found.bend, found.kappa, found.noise
        self._noisy = Estimate(math.log(found.noise or 1.0), found.noise_spread)
        self._curved = Estimate(math.log(found.kappa), found.kappa_spread)
        self._shown, self._lowest, self._light = False, self.smallest, 1.0
        return self.fixed or self._clamp(found.h * (ABOVE if self._due or found.unseen else 1.0))

    @property
    def _due(self) -> bool:
        count = self.learnt.products
        return self.fixed is None and count % SELDOM == 1

    @property
    def doubts_outputs(self) -> bool:
        """Whether this vector's product is to have a third difference of the outputs, by which
        micro-batches beside the pilot show their kappa; in 16 bits it is rounding.
        """
        count, narrow = self.learnt.products, self.unit_roundoff > ROUNDOFF
        return self.beside > 0 and has_thirds(2, narrow) and (count == 0 or count % THIRDS == 1)

    @property
    def doubts_values(self) -> bool:
        """Whether this vector's trial is to have a third difference of the cotangents: where none
        has been, and as the second vector is not like the first.
        """
        count = self.learnt.products
        return not self.learnt.values or (count - 1) % self.thirds == 0

    def after_lost(self, trial: Trial, trials: list[Trial]) -> float | None:
        """Return the displacement of the next trial where this one's step is lost; None elsewhere,
        and where there is none. What is learnt of displacements does not hold for such a vector,
        which begins anew as the first one did.

        Args:
            trial: The trial.
            trials: Those of the first vector before.
        """
        if not trial.lost or self.fixed is not None or LADDER * trial.h > self.learnt.largest:
            return None
        self._lowest = LADDER * trial.h
        if self.learnt.products:
            kept = {name: getattr(self.learnt, name) for name in OF_LOSS}
            self.learnt = replace(self._fresh, **kept)
            return self._clamp(self.learnt.h)
        return self._fitted(trials)[0] if len(trials) > 1 else self._lowest

    def stays_below(self, h: float) -> bool:
        """Take note of a displacement at which a product is not finite; return whether there are
        shorter ones.
        """
        if self.fixed is not None or h / LADDER < self.least:
            return False
        self.learnt.largest = h / LADDER
        return True

    def advise(self, trials: list[Trial]) -> tuple[float, bool]:
        """Return the displacement to use next, and whether it is that of the last trial, accepted.

        With a fixed displacement the first vector has a trial beside it, for its error.
        """
        trials[:] = marked(trials)
        found = self._advise(trials)
        self._seen = self._largest(trials)
        self._doubt = self._unexplained(trials)
        return found

    def _advise(self, trials: list[Trial]) -> tuple[float, bool]:
        last, count = trials[-1], len(trials)
        self._growth = self._grows(last)
        if last.size == 0 or count > MOST:
            return last.h, True
        if not last.finite:
            if self.fixed is not None:
                return last.h, True  # the product will say so
            self.learnt.largest = last.h / LADDER
            return self.learnt.largest, False
        if self.fixed is not None:
            return self._beside(trials)
        if self.learnt.products == 0 and not self.begins_taught:
            return self._descend(trials)
        self._observe(trials)
        if self._due and count == 1:
            return self._clamp(min(self._best(last), last.h / ABOVE)), False
        return self._accepted(trials)

    def _largest(self, trials: Sequence[Trial]) -> float:
        """Return the largest |P| of trials that are not noise, or else that of the last one."""
        finite = [t for t in trials if t.finite]
        clear = [t for t in finite if t.size > UNEXPECTED * self._rounding(t)]
        return max((t.size for t in clear or finite[-1:]), default=0.0)

    def _beside(self, trials: list[Trial]) -> tuple[float, bool]:
        """Make trials of the first vector at half the displacement, at its double and at it."""
        assert self.fixed is not None
        if self.learnt.products or len(trials) == 4:
            if self.learnt.products == 0:
                self._fit(trials)
            else:
                self._observe(trials)
            return self.fixed, True
        return (self.fixed * (0.5, 2.0, 1.0)[len(trials) - 1]), False

    def _descend(self, trials: list[Trial]) -> tuple[float, bool]:
        """Walk down the ladder, or up, until the changes between its steps have a least one."""
        if not self._accepting(trials):
            here, heights = trials[-1].h, [t.h for t in trials if t.finite]
            lowest = min((t for t in trials if t.finite), key=lambda t: t.h)
            if lowest.beyond and lowest.h / LADDER > self.least:
                # Each step of the ladder that has led nowhere makes the next ones longer.
                steps = int(math.log(lowest.h / self.least, LADDER))
                return lowest.h / LADDER ** min(max(1, len(heights) - NEAR), steps), False
            changes = self._changes(trials)
            if len(changes) < 2:
                return here / LADDER, False
            low, high = min(changes, key=lambda pair: changes[pair])
            if changes[low, high] <= ROUNDOFF:  # nothing is to be found below
                return self._fitted(trials)
            # Far above the bend, and far below the noise, all changes are LADDER - 1: the curvature
            # can be that of parameters far smaller than the norm of all.
            if changes[low, high] > 1 and min(heights) / LADDER > self.least:
                return min(heights) / LADDER, False
            if low == min(heights) and low / LADDER > self.least:
                return low / LADDER, False
            if high == max(heights) and high * LADDER**2 <= self.learnt.largest:
                return high * LADDER**2, False
            if here == max(heights):  # after a step up: its neighbour below
                return here / LADDER, False
        return self._fitted(trials)

    def _fitted(self, trials: list[Trial]) -> tuple[float, bool]:
        """Fit the model to the first vector's trials; return as `advise`."""
        self._fit(trials)
        return self._accepted(trials)

    def _accepted(self, trials: list[Trial]) -> tuple[float, bool]:
        """Return as `advise`, by the error expected at the last trial and at the best h."""
        last = trials[-1]
        bent = min((t.h for t in trials if t.finite and t.beyond), default=math.inf)
        best = min(self._best(last), max(bent / LADDER, self.smallest))
        good = self._excess(last, best) <= ACCEPT
        return (last.h, True) if good or len(trials) >= MOST else (best, False)

    def _accepting(self, trials: list[Trial]) -> bool:
        """Return whether the last trial left the ladder, for the best displacement."""
        if len(trials) >= MOST - 1:
            return True
        steps = [math.log(t.h / trials[0].h) / math.log(LADDER) for t in trials]
        return any(abs(step - round(step)) > 1e-6 for step in steps)

    def _changes(self, trials: list[Trial]) -> dict[tuple[float, float], float]:
        """Return the changes between neighbours of the ladder, relative, by (low h, high h)."""
        found = {}
        for a, b in zip(trials, trials[1:], strict=False):
            low, high = sorted((a.h, b.h))
            near = high < 1.5 * LADDER * low and not (a.beyond and b.beyond)
            if near and math.isfinite(b.change) and min(a.size, b.size) > 0:
                found[low, high] = b.change / min(a.size, b.size)
        return found

    # ---- after a product

    def judge(self, product: Trial) -> float:
        """Return the displacement at which to make a product again, or its own."""
        if product.size == 0 or not product.finite:
            return product.h
        unlike = self._seen > 0 and self.is_unlike(product)
        if self.learnt.products == 0 and unlike:
            # Of a random vector, the noise of the others is as their part in it.
            light = max(self._light, product.size / self._seen)
            self._noise *= light / self._light
            self._light = light
        self._growth, self._others = self._grows(product), alike(self._curved)
        bend = self._bend_of(product)
        if unlike or bend > UNEXPECTED * self._bend:  # kappa is that of the pilot, or it bends less
            self._kappa, self._shown = TYPICAL, False
            self._others = Estimate(math.log(TYPICAL), SPREAD)
        self._bend = max(self._bend, bend)
        self._hear(product)
        if self.fixed is not None:
            return product.h
        best = self._best(product)
        return best if self._excess(product, best) > REPEAT else product.h

    def is_unlike(self, product: Trial) -> bool:
        """Return whether the pilot has so small a part in a product that it tells little of it."""
        return product.size > VISIBLE * self._seen

    def begins_anew(self, product: Trial) -> bool:
        """Return whether the pilot has told nothing of the first product, which is to be made with
        another one: once.
        """
        first = not self.learnt.products and not self._anew
        return first and product.size > OTHER * self._seen

    def take_pilot(self) -> None:
        """Go on with a typical micro-batch for the pilot, of which the last one's kappa tells as
        much as of any other. What was learnt before the first product does not hold for it.
        """
        found = self.learnt
        if not found.products:
            self._anew, self.learnt = True, replace(self._fresh)
            return
        kappa = alike(Estimate(math.log(found.kappa), found.kappa_spread))
        found.noise, found.noise_spread = found.noise * self._light, NOISE_SPREAD
        found.kappa, found.kappa_spread = math.exp(kappa.mean), min(kappa.spread, SPREAD)
