"""Errors that trials show without a model, and what the truncation of a slice may be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ds_hessian.operators.displacement.belief import Belief, Estimate, Surroundings
from ds_hessian.operators.displacement.possible import possible_truncation, shown_by_others
from ds_hessian.operators.displacement.trials import Trial


def test_a_ratio_that_is_small_by_luck_is_not_believed() -> None:
    """Seen in bf16: r of 0.72 and of 0.17, 7 % apart in h, and an error of 0.7."""
    others = [Trial(6.4e-1, 4.8, 2.4), Trial(7.7e-3, 79.0, 0.72, change=60.0, since=6.4e-1)]
    assert shown_by_others([*others, Trial(7.2e-3, 100.0, 0.17)]) > 0.6
    assert shown_by_others([*others, Trial(7.2e-3, 100.0, 0.6)]) == 0


def test_what_changes_from_a_shorter_displacement_is_an_error_of_the_longer() -> None:
    """Seen in bf16: D halves from each displacement to the next, at ratios of 0.3 to 0.4."""
    below = Trial(0.34, 28.7, 0.33)
    assert 0.9 < shown_by_others([below, Trial(0.94, 14.5, 0.4, change=14.4, since=0.34)]) < 1
    # Its noise explains so much; and from a longer one it is truncation of that.
    assert shown_by_others([below, Trial(0.94, 28.7, 0.4, change=7.0, since=0.34)]) == 0
    assert shown_by_others([Trial(0.94, 14.5, 0.4), Trial(0.34, 28.7, 0.33, change=14.4)]) == 0


@pytest.mark.parametrize("smooth", np.geomspace(1e-3, 1, 7))
def test_trials_of_a_smooth_function_show_nothing_by_themselves(smooth: float) -> None:
    """Noise of 1e-2 / h, and a truncation of (smooth h)^2."""

    def ratio(h: float) -> float:
        return math.hypot(math.sqrt(3) * 1e-2 / h, smooth * h)

    longer, h = Trial(8.0, 1.0, ratio(8.0)), 3.0
    change = math.hypot(1e-2 / h, 1e-2 / 8.0, smooth**2 * (64 - h**2))
    trials = [longer, Trial(h, 1.0, ratio(h), change=change, since=8.0)]
    assert shown_by_others(trials) == 0
    assert shown_by_others([*trials, Trial(1.0, 1.0, ratio(1.0), change=1e-2, since=h)]) == 0


def test_few_micro_batches_that_bend_have_more_truncation_than_their_mean() -> None:
    pilot = Trial(1.0, 1.0, 1e-2)
    expected = Estimate(math.log(1e-6), 0.2), Estimate(math.log(1e-2), 0.2), Estimate(0.0, 0.1)
    around = Surroundings(order=2, quiet=0.4, bend=0.0, size=0.0, spread=0.4)
    belief = Belief(*expected, around, [pilot])

    def possible(ratio: float, known: float = 1.0) -> float:
        return possible_truncation(belief, pilot, Trial(1.0, 1.0, ratio), 8, known) / ratio**2

    alike = possible(1e-2)
    assert possible(5e-2) == pytest.approx(5 * alike, rel=0.1)
    assert possible(0.1) == pytest.approx(8 * alike, rel=0.1)  # one has made it all
    # A third difference of all has shown that three times the pilot's are no sign of it.
    assert possible(3e-2, known=3.0) == pytest.approx(alike, rel=0.1)
    assert possible(6e-2, known=3.0) == pytest.approx(2 * alike, rel=0.1)
