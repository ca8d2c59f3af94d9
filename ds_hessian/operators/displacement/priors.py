"""What is expected of a vector before its first trial: of the first one of a run, of the one after
it, which is rich in outliers, and of every other from the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_hessian.operators.displacement.belief import Estimate
from ds_hessian.operators.displacement.trials import Trial

NOISE = Estimate(1.5, 2.0)
"""Prior of N in units of u |w| |Hv|, v random: rounding changes each weight by u of itself."""

BEND = Estimate(0.7, 2.0)
"""Prior of b |w| for a random vector."""

AFTER_PROBE = Estimate(2.0, 1.3)
"""Ratio of b of the next Krylov vector, rich in outliers, to that of a random vector."""

FIRST_STEP = 6.0
"""Ratio of the best h of a random vector to the first trial of the next."""

NOISE_DRIFT, BEND_DRIFT = 0.15, 0.5
"""Standard deviations from vector to vector, of logarithms."""

NOISE_SPREAD = 0.5
"""Largest standard deviation of ln N after the first vector."""

BEND_SPREAD = math.hypot(BEND.spread, AFTER_PROBE.spread)
"""Largest of ln b: that of the second vector, of which nothing has been seen. Where a constant h is
too small to show b, the tails of each vector's estimate would widen that of the next without end.
"""

KAPPA_SPREAD = 0.6
"""Standard deviation of ln kappa from vector to vector."""


def expected_noise(trials: Sequence[Trial], rounding: float) -> Estimate:
    """Return the prior of the first vector's ln N: no more than r shows in any trial.

    |w| says nothing of it where the curvature is that of parameters which are far smaller.

    Args:
        trials: The trials that are usable.
        rounding: The unit roundoff of the passes times |w|.
    """
    least = min(trials, key=lambda trial: trial.nonlinearity)
    expected = NOISE.mean + math.log(rounding * least.size)
    shown = [t.nonlinearity * t.h * t.size / math.sqrt(3) for t in trials]
    return Estimate(min([expected, *(math.log(s) for s in shown if s > 0)]), NOISE.spread)


def drifted(noise: Estimate, bend: Estimate) -> tuple[Estimate, Estimate]:
    """Return what a vector's ln N and ln b let expect of the next one's."""
    return (
        Estimate(noise.mean, min(math.hypot(noise.spread, NOISE_DRIFT), NOISE_SPREAD)),
        Estimate(bend.mean, min(math.hypot(bend.spread, BEND_DRIFT), BEND_SPREAD)),
    )
