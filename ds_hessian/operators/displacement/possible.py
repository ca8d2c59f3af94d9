"""What a product's truncation may be, for all that its pilot's trial tells.

At the best displacement a third difference of the pilot is rounding more often than not. It then
says no more than that the pilot's truncation is not larger, and kappa, which varies from vector to
vector by more than a factor of two either way, may be any that is. An estimate that must not be far
below the error is the root mean square over what is possible, not the mean of its logarithm.
No truncation is more than r, as that of a kink is: a larger kappa belongs to a smaller r.

Micro-batches that bend more than the pilot have truncation that the pilot has not: kappa times the
square of what *they* bend. So whichever bends more, the pilot or the slice, makes the truncation.
Where the slice has more of a second difference than its pilot, few micro-batches may have made it:
each bends by more than the mean of all, which r is, and squares add up to more than the square of
their mean, at most to as many times it as there are micro-batches.
"""

from __future__ import annotations

import math

import numpy as np

from ds_hessian.operators.displacement.belief import (
    FREEDOM,
    LARGEST,
    NODES,
    SCATTER,
    Belief,
    student,
)
from ds_hessian.operators.displacement.trials import THIRD, Trial


def possible_truncation(belief: Belief, trial: Trial, product: Trial, micro_batches: int) -> float:
    """Return the root mean square of a product's truncation, relative; 0 where r tells nothing of
    it, and with formulas that have other witnesses.

    Where the trial has no third difference, changes of earlier trials have told what is known.

    Args:
        belief: What is known of the vector.
        trial: The pilot's accepted trial.
        product: The product of the slice.
        micro_batches: Their number in the slice.
    """
    around, third = belief.around, trial.third
    tells = third is not None and math.isfinite(third)
    if belief.blind or around.order != 2:
        return 0.0
    noise, bend = (math.exp(logarithm) for logarithm in belief.of_pilot())
    expected = belief.expected_kappa if tells else belief.kappa
    kappa, weight = np.exp(expected.mean + expected.spread * NODES), np.exp(-(NODES**2) / 2)
    if third is not None and tells:
        least = around.roundoff * trial.size
        rounding = max(THIRD * noise / trial.h, least)
        total = np.hypot(rounding, trial.size * kappa * (bend * trial.h) ** 2)
        off = np.log(max(third, least) / total)
        weight = weight * np.exp(student(off / SCATTER, FREEDOM))
    shown = around.quiet * noise / belief.hidden / (product.h * product.size)
    bent = math.sqrt(max(product.nonlinearity**2 - 3 * shown**2, 0.0))
    uneven = 1.0
    if around.spread:
        farther = bent * product.size / (bend * product.h * trial.size)
        uneven = min(max(farther, 1.0), micro_batches)
    bent = min(max(bent, bend * product.h), LARGEST[1])
    truncated = np.minimum(kappa * uneven * bent, 1.0) * bent
    return math.sqrt(float(weight @ truncated**2 / weight.sum()))
