"""N and kappa of Gauss-Newton products from what trials in 16 bits have shown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ds_hessian.operators.outputs.steps import OutputSteps
from ds_hessian.operators.outputs.trials import Trial


def unit(size: float = 1.0) -> Trial:
    return Trial(1.0, size, 1e-4, 0.0, 1.0, form=size, back=size)


def test_noise_is_no_truncation_of_linear_outputs() -> None:
    """Two changes of which one is twice the noise were fitted by a kappa of 55, and the next
    displacement was a fifth of the best one: an error of 9e-3 for 1.5e-3 (recorded).
    """
    steps = OutputSteps(2.0**-8, 0.118, 1 / 8, 0, None)
    steps.first_h()
    trials = list[Trial]()
    for h, size, ratio, roundoff, change in (
        (5.58e-2, 0.522, 1.6e-2, 5.5e-3, math.inf),
        (1.39e-2, 0.522, 2.6e-2, 2.2e-2, 7.3e-3),
        (3.49e-3, 0.531, 1.2e-1, 8.6e-2, 1.33e-2),
    ):
        spread = 0.05 * 2.0**-8 / (2 * h * roundoff)
        grown = 2.0**-8 / (2 * h * roundoff)
        trials.append(Trial(h, size, ratio, roundoff, spread, 1.0, 1.0, change, growth=grown))
        following, _ = steps.advise(trials)
    assert following > 5e-2


def test_noise_of_outputs_that_grow_stays() -> None:
    """Where outputs are ten times as large at the ends as at w, they are rounded to a share of
    their change: ten times the displacement has the same noise.
    """
    steps = OutputSteps(2.0**-8, 1.0, 1.0, 0, None)
    steps.learnt.noise, steps.learnt.products = 2e-3, 2
    steps.first_h()
    steps.advise([Trial(1.0, 1.0, 1e-4, 2.0**-8 / 20, 1.0, form=1.0, back=1.0, growth=10.0)])
    near, far = (steps.error(h, unit(), 1.0) for h in (0.01, 10.0))
    assert near == pytest.approx(0.2, rel=0.01)
    assert far == pytest.approx(2.0**-8, rel=0.01)  # no more than a roundoff
    steps.advise([Trial(1.0, 1.0, 1e-4, 2.0**-8 / 2, 1.0, form=1.0, back=1.0, growth=1.0)])
    assert steps.error(10.0, unit(), 1.0) == pytest.approx(2e-3, rel=0.01)


def test_a_witness_that_grows_as_displacements_fall_is_noise() -> None:
    """That of the second displacement is ten times its truncation by the first one's: kappa was 17,
    of an eighth of that, and 74 of the next vector, whose displacement was a quarter of the best.
    """
    steps = OutputSteps(2.0**-8, 6.1, 0.5, 0, None)
    found = steps.learnt
    found.noise, found.kappa, found.bend, found.products = 3.7e-3, 2.2, 0.925, 2
    found.spread = 1.0
    steps.first_h()
    trials = list[Trial]()
    for h, size, ratio, apart, change in (
        (0.157, 6.127, 0.15, 0.058, math.inf),
        (0.0538, 6.312, 0.10, 0.043, 0.036),
    ):
        trials.append(Trial(h, size, ratio, 1e-2, 1.0, 1.0, 1.0, change * size, apart=apart * size))
        following, _ = steps.advise(trials)
    assert following > 5e-2
    assert steps.error(0.0538, unit(6.3), 1.0) > 0.02


def test_saturated_outputs_do_not_tell_of_truncation_below() -> None:
    """A change from where they saturate was a kappa of 0.3, and what it made of the next one was
    not noise: N was a thirtieth of what it is, and an error 9 times what was told (recorded).
    """
    steps = OutputSteps(2.0**-24, 12.0, 1.0, 0, None)
    steps.first_h()
    trials = list[Trial]()
    for h, size, ratio, change in (
        (3.0e-2, 2.756, 0.97, math.inf),
        (1.9e-3, 2.658, 0.43, 1.06),
        (4.7e-4, 2.662, 0.11, 4.8e-3),
        (1.2e-4, 2.653, 4.1e-2, 9.0e-3),
    ):
        rounded = 3.6e-8 / h
        trials.append(Trial(h, size, ratio, rounded, 1.0, size, 1.0, change))
        steps.advise(trials)
    product = replace(trials[-1], change=math.inf)
    assert steps.judge(product) > 2 * product.h  # where rounding is less
    _, error = steps.conclude(product, 0.0)
    assert error is not None and error > 2.1e-3 / 3


def test_a_ratio_that_falls_with_h_is_noise() -> None:
    """Outputs were rounded to 600 units, and their noise was taken for saturation: the shortest
    displacement was accepted, and the product made a million times farther out (recorded).
    """
    steps = OutputSteps(2.0**-24, 12.0, 0.25, 0, None)
    steps.first_h()
    trials = list[Trial]()
    for h, size, ratio, roundoff, change in (
        (3.0e-2, 234.0, 1.0, 1.7e-7, math.inf),
        (1.9e-3, 4135.0, 0.89, 3.6e-7, 3900.0),
        (2.9e-5, 4218.0, 3.9e-2, 4.3e-5, 93.0),
        (7.3e-6, 4194.0, 0.22, 1.7e-4, 25.0),
        (1.8e-6, 2288.0, 0.80, 1.3e-3, 1900.0),
    ):
        trials.append(Trial(h, size, ratio, roundoff, 1.0, size, 1.0, change))
        following, accepted = steps.advise(trials)
    assert not accepted and following > 7e-6
    assert not trials[-1].beyond and trials[1].beyond


def test_in_16_bits_changes_from_saturation_tell_of_truncation() -> None:
    """Between saturation and noise were two trials, and the shortest one, which is all noise, was
    accepted: 0.41 off, told 0.09 (recorded of the family "badly scaled").
    """
    steps = OutputSteps(2.0**-8, 253.4, 0.125, 3, None)
    steps.first_h()
    trials = list[Trial]()
    for h, size, ratio, roundoff, spread, form, change, apart in (
        (120.0, 9.89e-3, 2.59, 6.3e-4, 0.053, 1.5e-4, math.inf, 2.4e-4),
        (29.9, 1.41e-2, 2.51, 2.2e-3, 0.060, 3.1e-4, 6.8e-3, 4.2e-4),
        (7.48, 3.45e-2, 1.96, 3.8e-3, 0.139, 2.2e-3, 2.2e-2, 6.5e-4),
        (1.87, 0.101, 1.75, 5.6e-3, 0.378, 7.1e-3, 9.6e-2, 3.3e-3),
        (0.117, 0.529, 0.788, 4.7e-2, 0.717, 7.2e-2, 0.44, 3.6e-2),
        (2.92e-2, 0.536, 0.356, 0.272, 0.499, 2.6e-2, 0.147, 2.4e-3),
        (7.31e-3, 0.719, 0.614, 0.817, 0.656, 4.1e-2, 0.191, 8.2e-3),
    ):
        trials.append(Trial(h, size, ratio, roundoff, spread, form, 1e-3, change, apart=apart))
        following, accepted = steps.advise(trials)
    assert not accepted and following > 2e-2
