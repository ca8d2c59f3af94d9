"""What is known of noise and nonlinearity, carried from product to product.

Of the first vector of a measurement there is a prior, of each other one what the vectors before let
expect (`ds_hessian.operators.displacement.priors`). The estimates outlive the measurement: in its
state, to resume it, and as lessons for the next one at other weights of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np

from ds_hessian.operators.displacement.belief import (
    LARGER,
    SCATTER,
    UNEXPECTED,
    UNLIKE,
    UNLIKELY,
    Belief,
    Estimate,
    shared,
)
from ds_hessian.operators.displacement.loudness import noise_of, possible_noise
from ds_hessian.operators.displacement.priors import (
    AFTER_PROBE,
    BEND,
    BEND_DRIFT,
    FIRST_STEP,
    KAPPA_SPREAD,
    NOISE_SPREAD,
    drifted,
)
from ds_hessian.operators.displacement.schemes import Scheme
from ds_hessian.operators.displacement.steps import DECADE, least_displacement
from ds_hessian.operators.displacement.trials import ROUNDOFF, Trial

SHARED = 0.9
"""The noise of k pilots falls as k^(-SHARED / 2): micro-batches share the rounding of weights."""

ITSELF = 0.3
"""Rounding of two gradients in themselves, over 2h, in units of u |g| / h, root mean square: their
coordinates are off by 2u / sqrt(12) of the power of two below them, which they exceed by any factor
from 1 to 2 alike, in the logarithm. It is the least noise that a product can have. Where the
gradient at w is not rounded, that of both sides is opposite, and no ratio shows it.
"""

SMALLER = -0.5
"""Initial logarithm of the ratio of the slice's |Hv| to the pilot's."""

MEMORY = 0.3
"""Weight of the last vector in the running ratios of slice and pilot."""

STRANGE = math.exp(5 * UNLIKE)
"""Smooth micro-batches bend more than the pilot by this factor in 1 of 300 products, if the ln b of
pilot and slice differ normally, and in 1 of 40 where it was counted. Such a product is repeated at
a smaller displacement, where few of them are strange again."""

KINKED, FEW = 0.1, 4
"""Share of strange products, and their number, above which all products of a run may have kinks
that the pilot has not."""

LEARNT = (
    *("h", "smallest", "largest", "products", "size", "bend_unlike", "size_unlike"),
    *("hidden", "blind", "rough", "next_third", "cleared", "firsts", "taught"),
    *("least", "most", "lacking", "of_pilot", "bounded", "loud", "harmless"),
)
ESTIMATES = ("noise", "bend", "kappa")
"""Attributes that change from product to product."""
OF_VECTORS = tuple(name for name in (*LEARNT, "noise", "bend") if name != "h")
"""Those of them that do not depend on the formula."""


class Estimates:
    """The estimates of a measurement, and what they let expect of its next product.

    Args:
        scheme: The difference formula.
        unit_roundoff: The unit roundoff of the dtype in which the passes compute.
        weight_norm: The norm |w| of the weights.
        pilot: The number of micro-batches in a trial.
        num_micro_batches: The number of all micro-batches.
        fixed: A displacement to use in every product; trials only estimate its error.
        smooth: Whether the loss has no kinks as far as is known; else the ratios of all products
            count as errors.
        gradient: The norm |g| of the gradient.
        rounding: The noise N of the slice that the rounding of its gradients in 16 bits makes, as
            far as it was measured: that of many tokens may be the same, and hidden from r.
    """

    def __init__(
        self,
        scheme: Scheme,
        unit_roundoff: float,
        weight_norm: float,
        pilot: int,
        num_micro_batches: int,
        fixed: float | None = None,
        smooth: bool = True,
        gradient: float = 0.0,
        rounding: float = 0.0,
    ) -> None:
        self.smooth = smooth
        if not smooth:
            scheme = scheme.among_kinks
        scale = weight_norm if weight_norm > 0 else 1.0
        self.order, self.fixed, self.rounding = scheme.order, fixed, unit_roundoff * scale
        self.h = fixed or unit_roundoff ** (1 / (scheme.order + 1)) * scale
        self.smallest, self.largest = least_displacement(scale), scale
        self.bounded = False  # whether something was not finite farther out
        self.pilot, self.num_micro_batches = pilot, num_micro_batches
        self.roundoff = unit_roundoff
        self.rounded = ITSELF * unit_roundoff * gradient / math.sqrt(num_micro_batches)
        self.in_gradients = rounding
        self.noise: Estimate | None = None
        self.heard = False  # whether the slice's was measured
        self.loud = 1.0  # by how much the slice's is more than its pilot's lets expect
        self.bend = self.any_bend = Estimate(BEND.mean - math.log(scale), BEND.spread)
        self.kappa = Estimate(math.log(scheme.truncation), scheme.truncation_spread)
        self.bend_unlike, self.size_unlike = 0.0, 0.0 if self.whole else SMALLER
        self.size = 0.0  # |Hv| of the pilot's last trial
        self.products = 0
        self.next_third = 0  # the next product whose pilot has one
        self.hidden, self.blind = 1.0, False  # of the last vector, see `Belief`
        self.rough = 0  # products that bend more than the pilot lets expect
        self.cleared = 0.0  # the largest ratio of the slice's r to the pilot's that was no kink
        # The two largest ones of their second differences that were no truncation.
        self.harmless = [1.0, 1.0]
        self.firsts = list[list[float]]()  # of the first two vectors: ln b, its spread, and |D|
        self.taught: dict[str, Any] | None = None
        self.untaught: dict[str, Any] = {}  # what lessons have replaced
        self.of_pilot: dict[str, Any] | None = None  # what was learnt when it gave way to the slice
        self.least, self.most = math.inf, 0.0  # the smallest and largest |Hv| of the slice
        # |Hd| of the unit vector d along which a step lacked a part of v, once it was evaluated
        self.lacking: float | None = None

    @property
    def narrow(self) -> bool:
        """True if the passes have less than 24 bits."""
        return self.roundoff > ROUNDOFF

    @property
    def whole(self) -> bool:
        """True if trials are of all micro-batches."""
        return self.pilot == self.num_micro_batches

    @property
    def quiet(self) -> float:
        """The ratio of the slice's noise to the pilot's."""
        return self.loud * float((self.pilot / self.num_micro_batches) ** (SHARED / 2))

    def take_slice(self) -> None:
        """Make trials of all micro-batches, by what those of the pilot have taught."""
        self.of_pilot = self.lessons()
        if self.noise is not None:
            self.noise = Estimate(self.noise.mean + math.log(self.quiet), self.noise.spread)
        self.kappa = Estimate(self.kappa.mean + math.log(LARGER), self.kappa.spread)
        self.size *= math.exp(self.size_unlike)
        self.pilot = self.num_micro_batches
        self.bend_unlike, self.size_unlike, self.loud = 0.0, 0.0, 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates from the products so far, as JSON values."""
        figures = {name: deepcopy(getattr(self, name)) for name in LEARNT}
        for name in ESTIMATES:
            estimate = getattr(self, name)
            figures[name] = estimate and asdict(estimate)
        return figures

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of others."""
        for name in LEARNT:  # a state of an older version has fewer
            setattr(self, name, deepcopy(figures.get(name, getattr(self, name))))
        for name in ESTIMATES:
            setattr(self, name, figures[name] and Estimate(**figures[name]))

    def adopt(self, other: Estimates) -> None:
        """Continue with what those of another formula have learnt of the same vectors."""
        for name in OF_VECTORS:
            setattr(self, name, getattr(other, name))
        if self.noise is not None and self.size:
            self.h = self.foreseen(self.size)[0]

    def foreseen(self, size: float) -> tuple[float, float]:
        """Return the best displacement of a product of that norm, and its relative error, as far as
        earlier vectors tell.
        """
        assert self.noise is not None
        noise = float(shared(np.exp(self.noise.mean) * self.quiet, self.in_gradients))
        noise = max(noise, self.rounded) / size
        bent = math.exp(self.kappa.mean + self.order * self.bend.mean)
        h = self._clamp((noise / (math.sqrt(self.order) * bent)) ** (1 / (self.order + 1)))
        return h, math.hypot(noise / h, bent * h**self.order)

    def unseen(self, h: float) -> float:
        """Return what |Hv| may be where no bit of a gradient in 16 bits changes within h."""
        return max(self.rounded, self.in_gradients) / h if self.narrow else 0.0

    # ---- measurements of a run

    def lessons(self) -> dict[str, Any] | None:
        """Return, as JSON values, what spares trials of the first two vectors of a like measurement
        at other weights of the run; None where nothing was learnt.
        """
        if self.of_pilot is not None:
            return self.of_pilot
        if self.fixed is not None or self.noise is None or len(self.firsts) < 2:
            return None
        return {
            "noise": self.noise.mean,
            "smooth": self.smooth,
            "kappa": asdict(self.kappa),
            "firsts": self.firsts,
            "bend_unlike": self.bend_unlike,
            "size_unlike": self.size_unlike,
            "cleared": self.cleared,
            "loud": self.loud,
            "smallest": self.smallest,
        }

    def begin(self, lessons: dict[str, Any]) -> None:
        """Begin with the `lessons` of an earlier measurement of the run, if they hold for this."""
        if lessons.get("smooth", True) != self.smooth:
            return
        self.untaught, self.taught = self.state_dict(), lessons
        self.noise = Estimate(lessons["noise"], NOISE_SPREAD)
        self.kappa = Estimate(**lessons["kappa"])
        self.bend_unlike, self.size_unlike = lessons["bend_unlike"], lessons["size_unlike"]
        self.cleared = lessons.get("cleared", 0.0)  # not in those of an older version
        self.loud = lessons.get("loud", 1.0)
        self.smallest = lessons.get("smallest", self.smallest)
        (bend, spread, size), _ = lessons["firsts"]
        self.bend = Estimate(bend, spread).widened(BEND_DRIFT)
        self.h = self.foreseen(size)[0]

    def contradicts(self, trial: Trial) -> bool:
        """Return whether the first trial has another nonlinearity than lessons let expect, or shows
        that they are of products of another size, which have another noise.
        """
        assert self.noise is not None and self.taught is not None
        if not trial.usable or not trial.nonlinearity:
            return True
        (*_, size), _ = self.taught["firsts"]
        if abs(math.log(trial.size / size)) > math.log(DECADE):
            return True
        rounding = math.sqrt(3) * math.exp(self.noise.mean) / (trial.h * trial.size)
        shown = math.hypot(rounding, math.exp(self.bend.mean - self.bend_unlike) * trial.h)
        spread = math.hypot(SCATTER, self.noise.spread, self.bend.spread)
        return abs(math.log(trial.nonlinearity / shown)) > UNLIKELY * spread

    def _second(self, bend: Estimate) -> None:
        """Set the estimates for the second vector, from the bend of the first."""
        if self.taught is None:
            jump = Estimate(bend.mean + AFTER_PROBE.mean, bend.spread)
            self.bend = jump.widened(AFTER_PROBE.spread)
            self.h = self.fixed or self._clamp(self.h / FIRST_STEP)
            return
        (before, *_), (after, spread, _) = self.taught["firsts"]
        jump = Estimate(bend.mean + after - before, math.hypot(bend.spread, spread))
        self.bend = jump.widened(BEND_DRIFT)
        self.h = self.foreseen(self.size * self._jump)[0]

    @property
    def longer(self) -> float:
        """How many times as long as those before the next product is expected to be."""
        return self._jump if self.products == 1 else 1.0

    @property
    def _jump(self) -> float:
        """The ratio of |Hv| of the second vector, rich in outliers, to that of the first, a random
        one: 12 to 27 for smooth nets of tests/operators/test_tolerance.py.
        """
        if self.taught is None:
            return DECADE
        (*_, small), (*_, large) = self.taught["firsts"]
        return float(large / small)

    # ---- of the pilot and the slice

    @property
    def may_hear(self) -> bool:
        """Whether the noise of all micro-batches is to be measured where it is in doubt: by the
        first product, where no lesson tells it; the same on every rank.
        """
        told = self.heard or (self.taught is not None and "loud" in self.taught)
        return self.products == 0 and self.order == 2 and not self.whole and not told

    def doubts_noise(self, product: Trial, belief: Belief | None) -> bool:
        """Return whether to measure it: where a product may have more than its pilot lets expect,
        for all that it shows.
        """
        if belief is None or not product.usable:
            return False
        return possible_noise(product) > UNEXPECTED * self._expected_noise(belief)

    def hear(self, apart: float, product: Trial, belief: Belief) -> None:
        """Learn the noise of all micro-batches from `Gradients.nearer`."""
        found, self.heard = noise_of(apart, product), True
        if math.isfinite(found):
            alike = math.exp(belief.of_pilot()[0]) * self.quiet / self.loud
            self.loud = max(1.0, found / alike)
            belief.hear(self.quiet)

    def _expected_noise(self, belief: Belief) -> float:
        """Return N of the slice, as the pilot's lets expect it."""
        noise = float(shared(np.exp(belief.of_pilot()[0]) * self.quiet, self.in_gradients))
        return max(noise, self.rounded)

    @property
    def _usual(self) -> float:
        """The largest ratio of the slice's nonlinearity to the pilot's that smooth ones have."""
        return max(STRANGE, self.cleared)

    @property
    def _often_rough(self) -> bool:
        """True where the ratios of all products count as errors."""
        return not self.smooth or self.rough > max(FEW, KINKED * self.products)

    # ---- from vector to vector

    def _carry_over(self, belief: Belief, product: Trial) -> tuple[Estimate, Estimate]:
        """Keep what is known of noise and bend for the next vector; returns that of this one."""
        noise, bend = belief.estimates()
        self.hidden, self.blind = belief.hidden, belief.blind
        self._keep_kappa(belief)
        memory = MEMORY if self.products or self.taught else 1.0
        most = math.log(self._usual)
        unlike = min(max(bend.mean - belief.of_pilot()[1], -most), most)
        self.bend_unlike += MEMORY * (unlike - self.bend_unlike)
        self.size_unlike += memory * (math.log(product.size / self.size) - self.size_unlike)
        self._drift(noise, bend)
        if len(self.firsts) < 2:
            self.firsts.append([bend.mean, bend.spread, self.size])
        return noise, bend

    def _keep_kappa(self, belief: Belief) -> None:
        """Keep the kappa that a belief has seen, once."""
        if belief.truncation_seen:
            of_vector = belief.expected_kappa, belief.kappa
            self.kappa = self.kappa.shared_by(*of_vector, KAPPA_SPREAD)
            belief.truncation_seen = False

    def _drift(self, noise: Estimate, bend: Estimate) -> None:
        """Carry the estimates of a vector over to the next one."""
        self.noise, self.bend = drifted(noise, bend)

    def _clamp(self, h: float) -> float:
        return min(max(h, self.smallest), self.largest)
