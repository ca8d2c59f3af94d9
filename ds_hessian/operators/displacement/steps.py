"""Steps of rounding, on which a gradient is smooth and its slope wrong.

A probability near 1 has 24 bits, however little it lacks to 1: the gradient of a net that is sure
of its data is a staircase in them, with steps as long as it takes to change the last bit. A shorter
displacement stays on one step, where the rest of the gradient moves and all figures of D are those
of a smooth function, but what the steps add up to is missing. The rounding noise N of longer
displacements is there too, as an error of the slope, and no ratio shows it.

So where D changes between two displacements a > b by more than both of their ratios let expect, and
D(b) is the smaller one, either the longer one has truncation that its ratio does not see (a *blind*
vector), or the shorter one stays on a step. A trial at c, between them and near a, decides. If a
smooth function has those ratios at a and b, the one at c is at most

    hypot(r_a c / a, r_b b |D_b| / (c |D_c|))               bend, and noise

and unseen truncation is nearly gone. On a staircase D(c) is what D(a) is, or the ratio at c shows
the noise, which D(b) cannot be without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_hessian.operators.displacement.belief import SATURATING, SCATTER, UNEXPECTED
from ds_hessian.operators.displacement.trials import ROUNDOFF, Trial

AMPLIFY = 8.0
"""Truncation at the longer of two displacements that are compared over that at the shorter one:
nearly all of the change is truncation then, and the displacements are of one scale."""

DECADE = 10.0
"""Step of scans in h, where ratios tell no direction: while all are saturating, and beyond a cliff.
Noise at its edge is as large as D, and a tenth of it so far out."""


def least_displacement(scale: float) -> float:
    """Return the shortest displacement to try, of weights of norm `scale`: their parts below the
    fp32 roundoff of the largest may be all that a vector moves.
    """
    return ROUNDOFF * scale / 16


@dataclass(frozen=True)
class Difference:
    """Two trials whose products were compared.

    Attributes:
        above, below: The trials with the larger and the smaller displacement.
        change: The norm of the difference of their products.
    """

    above: Trial
    below: Trial
    change: float

    @property
    def explained(self) -> float:
        """The most that the ratios of both let expect."""
        return max(trial.nonlinearity * trial.size for trial in (self.above, self.below))

    @property
    def conflicting(self) -> bool:
        """Whether the change is more than that."""
        return self._tells and self.change > UNEXPECTED * self.explained

    def deciding(self, order: int) -> float | None:
        """Return the displacement of a trial that decides, for a formula of that order; None where
        there is nothing to decide, or no room between them.
        """
        nearer = AMPLIFY ** (1 / order)
        room = self.above.h > nearer**2 * self.below.h
        return self.above.h / nearer if room and self.conflicting else None

    def of_step(self, between: Trial) -> bool:
        """Return whether a third trial shows that the smaller displacement stays on a step.

        A kink that only the larger one crosses is as large as its ratio.
        """
        above, below = self.above, self.below
        if not (below.h < between.h < above.h and between.usable and self._tells):
            return False
        bend = above.nonlinearity * between.h / above.h
        noise = below.nonlinearity * below.h * below.size / (between.h * between.size)
        if between.nonlinearity > UNEXPECTED * math.hypot(bend, noise):
            return self.change > math.exp(SCATTER) * self.explained
        compared = between.since == above.h and 2 * between.change < self.change
        return compared and self.conflicting

    @property
    def _tells(self) -> bool:
        usable = self.below.sound and self.above.usable
        lacks = self.below.size < self.above.size  # it is the longer one if that saturates
        ratio = max(self.above.nonlinearity, self.below.nonlinearity)  # no noise of all of D either
        return usable and lacks and ratio <= SATURATING


def difference(one: Trial, other: Trial) -> Difference:
    """Return what the second trial was compared to."""
    below, above = sorted((one, other), key=lambda trial: trial.h)
    return Difference(above, below, other.change)


def beyond(trials: Sequence[Trial]) -> float | None:
    """Return the displacement of a trial that looks beyond a cliff; None where there is none.

    The ratio of a smooth function falls in proportion to h where it does not saturate. Where it
    falls by far more, the larger displacements may be those that see the steps of rounding: then
    it is less again farther out, as noise is, and D is not what it is below the cliff. Trials that
    lie farther than that say nothing of it.
    """
    known = sorted((t for t in trials if t.sound), key=lambda trial: trial.h)
    for i, (below, above) in enumerate(pairwise(known)):
        falls = below.nonlinearity * above.h < above.nonlinearity * below.h / UNEXPECTED
        if below.nonlinearity <= SATURATING < above.nonlinearity and falls:
            # Trials a decade apart are so up to rounding.
            seen = any(trial.h < 2 * DECADE * above.h for trial in known[i + 2 :])
            return None if seen else DECADE * above.h
    return None


def marked(trials: Sequence[Trial], rounded: float | None) -> list[Trial]:
    """Return the trials, with those marked that stay on a step.

    Args:
        trials: The trials.
        rounded: N by the rounding of gradients in 16 bits; None in fp32. A gradient that changes
            less, or in no bit, stays on a step.
    """
    found = [pair.below for pair in differences(trials) if any(pair.of_step(t) for t in trials)]
    found += [t for t in trials if rounded is not None and t.h * max(t.size, t.second) <= rounded]
    longest = longest_step([*trials, *(replace(trial, stepped=True) for trial in found)])
    return [replace(trial, stepped=trial.h <= longest) for trial in trials]


def longest_step(trials: Sequence[Trial]) -> float:
    """Return the largest displacement that stays on a step, as far as is known; 0 for none."""
    return max((trial.h for trial in trials if trial.stepped), default=0.0)


def differences(trials: Sequence[Trial]) -> Iterator[Difference]:
    """Yield the pairs of trials whose products were compared."""
    for i, trial in enumerate(trials):
        for earlier in [t for t in trials[:i] if trial.since in (None, t.h)][-1:]:
            if 0 < trial.change < math.inf:
                yield difference(earlier, trial)
