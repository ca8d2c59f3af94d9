"""What the truncation of a slice may be."""

from __future__ import annotations

import math

import pytest

from ds_hessian.operators.displacement.belief import Belief, Estimate, Surroundings
from ds_hessian.operators.displacement.possible import possible_truncation
from ds_hessian.operators.displacement.trials import Trial


def test_few_micro_batches_that_bend_have_more_truncation_than_their_mean() -> None:
    pilot = Trial(1.0, 1.0, 1e-2)
    expected = Estimate(math.log(1e-6), 0.2), Estimate(math.log(1e-2), 0.2), Estimate(0.0, 0.1)
    around = Surroundings(order=2, quiet=0.4, bend=0.0, size=0.0, spread=0.4)
    belief = Belief(*expected, around, [pilot])

    def possible(ratio: float) -> float:
        return possible_truncation(belief, pilot, Trial(1.0, 1.0, ratio), 8) / ratio**2

    alike = possible(1e-2)
    assert possible(5e-2) == pytest.approx(5 * alike, rel=0.1)
    assert possible(0.1) == pytest.approx(8 * alike, rel=0.1)  # one has made it all
