"""N and kappa of Gauss-Newton products from what trials in 16 bits have shown."""

from __future__ import annotations

import math

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
