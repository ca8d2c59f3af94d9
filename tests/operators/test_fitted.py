"""N and kappa of Gauss-Newton products from changes between displacements."""

from __future__ import annotations

import math

import pytest
import torch

from ds_hessian.operators.displacement.belief import Estimate
from ds_hessian.operators.outputs.fitted import Change, fitted
from ds_hessian.operators.outputs.passes import Group, Sums, of_third
from ds_hessian.operators.outputs.steps import OutputSteps
from ds_hessian.operators.outputs.trials import Trial


def change(value: float, aligned: float, bent: float = 0.0) -> Change:
    """Of N 1 and kappa 1 it is 1 and `bent`."""
    return Change(value, noisy=1.0, grown=0.0, most=0.0, bent=bent, rest=1e-9, aligned=aligned)


def test_rounding_alone_far_out_lowers_kappa() -> None:
    """A kappa of 1 would make 30 times the noise."""
    kappa = Estimate(0.0, 1.2)
    noise, found = fitted([change(1.0, 0.1, bent=30.0)], Estimate(0.0, 0.5), kappa)
    assert found.mean < math.log(0.1) and abs(noise.mean) < 0.5


@pytest.mark.parametrize(("aligned", "least", "most"), [(0.1, 0.0, 0.1), (1.0, 0.2, 1.0)])
def test_few_directions_of_noise_tell_little_of_it(
    aligned: float, least: float, most: float
) -> None:
    """A change of 1/30 of what is expected: of many directions it shows N, of one it is a draw that
    one in 38 is smaller than.
    """
    noise, _ = fitted([change(1 / 30, aligned)], Estimate(0.0, 1.0), Estimate(0.0, 1.2))
    assert least < math.exp(noise.mean) < most


def linear(h: float, size: float, r: float, roundoff: float, change: float) -> Trial:
    """Of a net that is nearly linear, in bf16: r is noise."""
    spread = 0.05 * 2.0**-8 / (2 * h * roundoff)
    return Trial(h, size, r, roundoff, spread, 1.0, 1.0, change=change)


def test_noise_is_no_truncation_of_linear_outputs() -> None:
    """Two changes of which one is twice the noise were fitted by a kappa of 55, and the next
    displacement was a fifth of the best one: an error of 9e-3 for 1.5e-3 (recorded).
    """
    steps = OutputSteps(2.0**-8, 0.118, 1 / 8, 0, None)
    steps.first_h()
    trials = list[Trial]()
    for figures in (
        (5.58e-2, 0.522, 1.6e-2, 5.5e-3, math.inf),
        (1.39e-2, 0.522, 2.6e-2, 2.2e-2, 7.3e-3),
        (3.49e-3, 0.531, 1.2e-1, 8.6e-2, 1.33e-2),
    ):
        trials.append(linear(*figures))
        h, _ = steps.advise(trials)
    assert h > 5e-2


def test_noise_of_outputs_that_grow_stays() -> None:
    """Where outputs are ten times as large at the ends as at w, they are rounded to a share of
    their change: ten times the displacement has the same noise.
    """
    steps = OutputSteps(2.0**-8, 1.0, 1.0, 0, None)
    steps.learnt.noise, steps.learnt.products = 2e-3, 2
    steps.first_h()
    steps.advise([Trial(1.0, 1.0, 1e-4, roundoff=2.0**-8 / 20, spread=1.0, form=1.0, back=1.0)])
    near, far = steps.error(0.01, 1.0), steps.error(10.0, 1.0)
    assert near == pytest.approx(0.2, rel=0.01)
    assert far == pytest.approx(2.0**-8, rel=0.01)  # no more than a roundoff
    steps.advise([Trial(1.0, 1.0, 1e-4, roundoff=2.0**-8 / 2, spread=1.0, form=1.0, back=1.0)])
    assert steps.error(10.0, 1.0) == pytest.approx(2e-3, rel=0.01)


@pytest.mark.parametrize("reach", [2.0, 5.0])
def test_third_differences_that_reach_farther_are_the_same_truncation(reach: float) -> None:
    """Of outputs `t + 0.1 t^2 + 0.02 t^3` it is `0.02 h^2`."""
    h, here = 0.25, torch.zeros(4)

    def f(t: float) -> torch.Tensor:
        return torch.full((4,), t + 0.1 * t**2 + 0.02 * t**3)

    group = Group({0: f(h)}, {0: f(-h)}, {0: f(reach * h)}, reach)
    sums = Sums()
    group.bend(0, here, sums)
    first, _, third = sums.thirds.tolist()
    assert math.sqrt(third / first) == pytest.approx(0.02 * h**2, rel=0.01)


def test_third_differences_that_reach_farther_are_less_noisy() -> None:
    """Their noise grows as the square of the reach, and truncation as its third power."""
    assert of_third(2.0) == pytest.approx(math.sqrt(1 + 9 + 9 + 1) / 3)
    assert of_third(8.0) < of_third(2.0) / 3
