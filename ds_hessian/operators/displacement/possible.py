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
from collections.abc import Sequence

import numpy as np

from ds_hessian.operators.displacement.belief import (
    FREEDOM,
    LARGEST,
    NODES,
    SATURATING,
    SCATTER,
    UNEXPECTED,
    Belief,
    student,
)
from ds_hessian.operators.displacement.steps import AMPLIFY, differences
from ds_hessian.operators.displacement.trials import ROUNDOFF, THIRD, Trial


def possible_truncation(
    belief: Belief, trial: Trial, product: Trial, micro_batches: int, known: float = 1.0
) -> float:
    """Return the root mean square of a product's truncation, relative; 0 where r tells nothing of
    it, and with formulas that have other witnesses.

    Where the trial has no third difference, changes of earlier trials have told what is known.

    Args:
        belief: What is known of the vector.
        trial: The pilot's accepted trial.
        product: The product of the slice.
        micro_batches: Their number in the slice.
        known: The ratio of second differences, `farther`, of which products have shown that it is
            no sign of truncation.
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
    uneven = 1.0
    if around.spread and around.roundoff <= ROUNDOFF:  # where third differences of all decide
        uneven = min(max(farther(belief, trial, product) / known, 1.0), micro_batches)
    bent = min(max(_bent(belief, product), bend * product.h), LARGEST[1])
    truncated = np.minimum(kappa * uneven * bent, 1.0) * bent
    return math.sqrt(float(weight @ truncated**2 / weight.sum()))


def farther(belief: Belief, trial: Trial, product: Trial) -> float:
    """Return the second difference of the slice, r |D| for its step, over that of its pilot."""
    _, bend = belief.of_pilot()
    pilot = math.exp(bend) * product.h * trial.size
    return _bent(belief, product) * product.size / pilot


def _bent(belief: Belief, product: Trial) -> float:
    """Return r of the slice without its noise."""
    noise = belief.around.quiet * math.exp(belief.of_pilot()[0])
    shown = noise / belief.hidden / (product.h * product.size)
    return math.sqrt(max(product.nonlinearity**2 - 3 * shown**2, 0.0))


def shown_by_others(trials: Sequence[Trial]) -> float:
    """Return the relative error of the last trial that others of the vector show without a model; 0
    for none.

    In 16 bits a ratio of few rounded numbers may be small by luck, and the trial with the smallest
    one is the one that is accepted. But with h a ratio changes by no more than in proportion to h,
    or to 1 / h: less than a trial nearby allows is luck. And what D has changed by from a shorter
    displacement is an error of the longer one, but for the noise of the shorter one.
    """
    last = trials[-1]
    sound = [trial for trial in trials if trial.sound and trial.h != last.h]
    if not last.sound:
        return 0.0
    ratio = max((t.nonlinearity * min(last.h / t.h, t.h / last.h) for t in sound), default=0.0)
    found = 0.0
    if ratio > UNEXPECTED * last.nonlinearity:
        found = min(ratio, LARGEST[0]) if ratio > SATURATING else ratio / math.sqrt(3)
    for pair in differences(trials):
        below, near = pair.below, pair.above.h < AMPLIFY * pair.below.h
        noise = below.nonlinearity * below.size / math.sqrt(3)
        if pair.above.h == last.h > below.h and near and below.sound:
            if pair.change > UNEXPECTED * noise:
                found = max(found, math.sqrt(pair.change**2 - noise**2) / last.size)
    return found
