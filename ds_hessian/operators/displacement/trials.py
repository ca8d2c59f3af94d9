"""Trials: what products at one displacement show, and how they change from one to another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROUNDOFF = 2.0**-24
"""Unit roundoff of fp32, in which w + h v is formed, and products are, whatever the dtype of the
passes: a step below this share of |w| is lost (parameters may be far smaller than |w|).
"""

THIRD = math.sqrt(20 / 18)
"""Noise of the third difference in units of that of D: g's counts 1 + 9 + 9 + 1 times over 36, in D
twice over 4."""


@dataclass(frozen=True)
class Trial:
    """A product of pilot or slice.

    Attributes:
        h: Its displacement.
        size: Its norm |D|.
        nonlinearity: Its nonlinearity ratio.
        change: |D - D'| from an earlier trial; inf for the first, and where something is not
            finite.
        since: The displacement of that trial; None for the one before.
        off: The tangent of the angle between v and the realised step; where it is known
            (`StepController.weighed`), what rounding makes of D over |D|.
        removed: The second-order part of the difference that Richardson's extrapolation removes,
            relative to |D|; 0 with a formula that removes none.
        third: |g(w + 2hv) - 3 g(w + hv) + 3 g(w) - g(w - hv)| / 6h, the third difference, of the
            same micro-batches; inf where it is not finite, None where it was not evaluated.
        stepped: Whether others show that it stays on a step of rounding
            (`ds_hessian.operators.displacement.steps`).
        second: The norm of the second difference, |g(w + hv) + g(w - hv) - 2 g(w)| / 2h; 0 where
            it is not known.
    """

    h: float
    size: float
    nonlinearity: float
    change: float = math.inf
    since: float | None = None
    off: float = 0.0
    removed: float = 0.0
    third: float | None = None
    stepped: bool = False
    second: float = 0.0

    @property
    def finite(self) -> bool:
        """True if size and ratio are finite; otherwise it shows only that h was too large."""
        return math.isfinite(self.size) and math.isfinite(self.nonlinearity)

    @property
    def lost(self) -> bool:
        """True if rounding hides what v does: of the weights, where it made more of the step than v
        did, or of what is computed from them. h is too small.
        """
        return self.stepped or self.off >= 1.0

    @property
    def extrapolated(self) -> float:
        """The truncation error that extrapolation leaves, from what it removed.

        Of a wave of frequency k along v it removes k^2 h^2 / 6 and leaves k^4 h^4 / 30; the mean of
        k^4 is three times the square of that of k^2 if frequencies are normally distributed.
        """
        return 3 * 36 / 30 * self.removed**2

    @property
    def usable(self) -> bool:
        """True if its size and its ratio tell something."""
        return self.finite and self.size > 0

    @property
    def sound(self) -> bool:
        """True if they tell of v: rounding does not hide what it does."""
        return self.usable and not self.lost


@dataclass(frozen=True)
class Change:
    """The change of D between two trials, or from one trial to no truncation (`Trial.third`).

    Attributes:
        above, below: The trials with the larger and the smaller displacement; the same one for a
            third difference.
        value: The norm of the change.
    """

    above: Trial
    below: Trial
    value: float

    @property
    def alone(self) -> bool:
        """True for the third difference of one trial."""
        return self.above is self.below

    @property
    def size(self) -> float:
        """The larger of the two norms |D|."""
        return max(self.above.size, self.below.size)

    @property
    def rounding(self) -> float:
        """The noise in the change, in units of N."""
        above, below = 1 / self.above.h, 1 / self.below.h
        return THIRD * above if self.alone else math.hypot(above, below)

    @property
    def lost(self) -> float:
        """The most that steps along something else than v can make of the change."""
        trials = (self.above,) if self.alone else (self.above, self.below)
        return math.hypot(*(trial.off * trial.size for trial in trials))

    def power(self, order: int) -> float:
        """Return what the truncation is proportional to."""
        return self.above.h**order - (0.0 if self.alone else self.below.h**order)

    def part(self, rounding: float) -> float:
        """Return the share of |D| that is truncation, if noise makes `rounding`."""
        return math.sqrt(max(self.value**2 - rounding**2, 0.0)) / self.size


def changes_of(trials: Sequence[Trial]) -> list[Change]:
    """Return the change to the last trial, and its third difference, where they show something."""
    *before, last = trials
    if not last.sound:
        return []
    changes = list[Change]()
    for earlier in [t for t in before if last.since in (None, t.h)][-1:]:
        if earlier.sound and 0 < last.change < math.inf:
            above, below = sorted((earlier, last), key=lambda trial: -trial.h)
            changes.append(Change(above, below, last.change))
    if last.third is not None and math.isfinite(last.third):
        changes.append(Change(last, last, max(last.third, ROUNDOFF * last.size)))
    return changes
