"""Estimates on families that no constant was chosen on: benchmarks/attack.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ds_hessian.backends import kinks
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.outputs.gauss_newton import GaussNewton
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import relative
from tests.tiers import cells

LEAST = 0.2
"""No estimate is a smaller part of the error."""


Found = dict[str, Any]


def told(
    attack: Found, name: str, arithmetic: str, count: int, seed: int = 0
) -> NDArray[np.float64]:
    """Estimates over errors of the products of a family, and the estimates."""
    products = list(attack["products"](attack["problem"](name, arithmetic, count, seed)))
    return np.array([(each.told, each.told * each.error) for each in products]).T


OF_SLOPES = ("elu", "celu", "huber", "loss 1e-8")
AMONG_KINKS = (
    *("relu", "leaky relu", "relu6", "max pooling", "hinge"),
    *(*OF_SLOPES, "smooth l1", "squared hinge"),
)

EVEN = [
    (name, count)
    for name in ("even loss at 0", "even loss", "zero head, 2 classes", "hot zero head")
    for count in (1, 4, 8, 16)
]


@pytest.mark.parametrize(("name", "count"), cells(EVEN, [("even loss at 0", 4)]))
def test_the_third_difference_sees_what_the_second_does_not(
    attack: Found, name: str, count: int
) -> None:
    """Third derivatives that vanish, or nearly: each product has a witness of its own."""
    ratios, _ = told(attack, name, "fp32", count)
    assert ratios.min() > LEAST and np.median(ratios) < 3, ratios


@pytest.mark.parametrize("arithmetic", ["bf16", "bf16 masters in bf16"])
@pytest.mark.parametrize(
    ("name", "count"),
    cells([(name, n) for name, n in EVEN if name.startswith("even")], [("even loss", 8)]),
)
def test_rounding_that_is_opposite_on_both_sides_is_in_the_error(
    attack: Found, name: str, count: int, arithmetic: str
) -> None:
    """The second difference of an odd gradient has none of it, whatever it is of each product."""
    ratios, _ = told(attack, name, arithmetic, count)
    assert ratios.min() > LEAST, ratios


@pytest.mark.parametrize(
    ("name", "most"),
    cells([("sine", 0.7), ("uneven scales", 0.1), ("badly scaled", 0.3)], [("uneven scales", 0.1)]),
)
def test_where_most_displacements_saturate_or_are_rounded_the_others_are_found(
    attack: Found, name: str, most: float
) -> None:
    """Far out the difference is a hundredth of the product, and an error of 200 % of it nothing.
    Where weights are of unlike size, the best steps are lost in those that have no curvature.
    """
    ratios, estimates = told(attack, name, "bf16", 1)
    assert ratios.min() > LEAST, ratios
    assert np.median(estimates / ratios) < most, estimates / ratios


@pytest.mark.parametrize("count", cells([1, 4, 8, 16], [4]))
def test_the_rounding_of_one_weight_among_many_is_seen(attack: Found, count: int) -> None:
    """A bias of 1024, with much curvature: its rounding was opposite on both sides of w."""
    ratios, _ = told(attack, "huge bias", "fp32", count)
    assert np.mean(ratios < LEAST) < 0.25 and np.median(ratios) < 3, ratios


@pytest.mark.parametrize(
    ("name", "count", "seed"),
    cells(
        [
            *((name, count, 0) for name in AMONG_KINKS for count in (4, 8, 16)),
            *((name, 16, seed) for name in ("relu", "max pooling", "celu") for seed in (1, 3, 4)),
        ],
        [("relu", 4, 0), ("elu", 4, 0)],
    ),
)
def test_among_kinks_the_second_difference_is_the_error(
    attack: Found, name: str, count: int, seed: int
) -> None:
    """Also those of micro-batches outside of the pilot, and of the gradient's slope. The second
    difference has what smooth parts bend too.
    """
    ratios, estimates = told(attack, name, "fp32", count, seed)
    assert ratios.min() > LEAST and np.median(ratios) < 1 / LEAST, ratios
    if name in OF_SLOPES:  # the step is that of one-sided differences
        assert np.median(estimates) < 4 * math.sqrt(ROUNDOFF), estimates


@pytest.mark.parametrize(
    ("name", "count"),
    cells(
        [
            (n, c)
            for n in ("hinge", "squared hinge", "relu6", "relu", "max pooling")
            for c in (4, 8, 16)
        ],
        [("relu", 8)],
    ),
)
def test_kinks_of_unknown_functions_are_seen_by_the_third_difference(
    attack: Found, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in TorchScript. Of the pilot of 8 of the ReLU net no unit changes sign, of others some
    do.
    """
    monkeypatch.setattr(kinks, "NAMES", ())
    ratios, _ = told(attack, name, "fp32", count)
    assert ratios.min() > LEAST and np.median(ratios) < 3, ratios


@pytest.mark.parametrize(
    ("name", "count", "seed"),
    cells(
        [
            *(("uneven scales", count, seed) for count in (4, 8, 16) for seed in (1, 2)),
            *(("sure attention", 8, 0), ("focal", 8, 0), ("deep", 8, 0), ("unequal", 8, 1)),
            *(("badly scaled", count, seed) for count, seed in ((8, 0), (4, 2), (8, 2))),
        ],
        [("uneven scales", 4, 1), ("badly scaled", 8, 0)],
    ),
)
def test_a_slice_that_bends_more_than_its_pilot_has_a_larger_estimate(
    attack: Found, name: str, count: int, seed: int
) -> None:
    """Its third difference is noise, and the truncation of the others up to 50 times as large: also
    where few of them make it, which bend no more than the pilot on average.
    """
    ratios, _ = told(attack, name, "fp32", count, seed)
    assert ratios.min() > LEAST and np.median(ratios) < 3, ratios


@pytest.mark.parametrize(("name", "seed"), cells([("hot", 0), ("steep softplus", 1)], [("hot", 0)]))
def test_what_the_pilot_takes_for_a_kink_is_looked_for_in_the_slice(
    attack: Found, name: str, seed: int
) -> None:
    """A smooth net with a kappa far from the usual: r, a hundred times the error, was told."""
    ratios, _ = told(attack, name, "fp32", 8, seed)
    assert LEAST < ratios.min() and ratios.max() < 10, ratios


@pytest.mark.full
@pytest.mark.parametrize("count", [4, 8])
def test_a_pilot_whose_ratio_is_far_smaller_is_given_up(attack: Found, count: int) -> None:
    """A net that is sure of all micro-batches but one, which makes gradient and noise."""
    found = list(attack["products"](attack["problem"]("sure", "fp32", count, 1)))
    assert min(each.told for each in found) > LEAST
    assert np.median([each.error for each in found]) < 0.05  # up to 0.8 with the pilot's trials


def gauss_newton(attack: Found, name: str, count: int, products: int = 6) -> tuple[Any, ...]:
    """Estimates over errors of Gauss-Newton products of a family, the errors, and the outputs."""
    p = attack["problem"](name, "fp32", count)
    outputs = "logits" if hasattr(p.backend.module, "logits") else "net"
    exact = ExactGaussNewton(p.backend.module, outputs, lambda net, b: net(*b), p.batches)
    v, ratios, errors = p.vectors[0][0], list[float](), list[float]()
    with p.measuring() as session:
        operator = GaussNewton(session)
        for i in range(products):
            truth, product = exact(v), operator.matvec(v)
            assert product.error is not None
            errors.append(relative(product.vector, truth))
            ratios.append(product.error / errors[-1])
            rest = truth - (truth @ v.double()) * v.double() if i % 2 else truth
            v = (rest / rest.norm()).float()
    return np.array(ratios), np.array(errors), operator.outputs


@pytest.mark.parametrize(
    ("name", "count"),
    cells(
        [
            (name, count)
            for name in ("steep softplus", "huber", "smooth l1", "squared hinge")
            for count in (1, 4, 16)
        ],
        [("steep softplus", 4), ("huber", 4)],
    ),
)
def test_a_loss_known_by_its_values_has_an_error_of_its_own(
    attack: Found, name: str, count: int
) -> None:
    """A softplus as steep as the displacement of the outputs is long; kinks of the slope, which few
    outputs pass, and those of the pilot need not.
    """
    ratios, errors, outputs = gauss_newton(attack, name, count)
    assert outputs == "net: a loss known by its values"
    assert ratios.min() > LEAST and np.median(ratios) < 3.5, ratios
    assert np.median(ratios * errors) < 3e-4


@pytest.mark.parametrize(
    ("name", "count"),
    cells(
        [(n, c) for n in ("leaky relu", "relu", "relu6", "celu") for c in (1, 4, 16)],
        [],
    ),
)
def test_kinks_on_the_first_ladder_leave_gauss_newton_its_noise(
    attack: Found, name: str, count: int
) -> None:
    """A trial that passes a kink is unlike all others; a fit to it had found no noise at all."""
    ratios, errors, _ = gauss_newton(attack, name, count)
    assert errors.max() < 5e-3, errors
    assert ratios.min() > LEAST, ratios


@pytest.mark.full
def test_what_a_third_difference_of_all_micro_batches_shows_is_kept(attack: Found) -> None:
    """A deep net whose other micro-batches bend ten times more than the pilot: without, estimates
    of these products are 0.19 to 134 of their errors.
    """
    ratios, _ = told(attack, "deep", "fp32", 16, seed=7)
    assert LEAST < ratios.min() and ratios.max() < 5, ratios


@pytest.mark.parametrize("seed", cells([7, 8], [7]))
def test_steps_in_which_a_weight_stays_are_in_the_error(attack: Found, seed: int) -> None:
    """A bias near 1024, which h v does not reach: neither ratio nor third difference shows that D
    has no part of it. Estimates of products that were 0.1 to 0.2 off were 0.001 to 0.01 of that.
    """
    ratios, estimates = told(attack, "huge bias", "fp32", 16, seed=seed)
    assert ratios.min() > LEAST, ratios
    assert np.median(estimates) < 1e-2, estimates


@pytest.mark.full
def test_a_saturated_trial_is_no_step_of_rounding(attack: Found) -> None:
    """Its ratio of 0.36 shows too little: an outlier of parameters 1e4 apart was 0.3 off."""
    _, estimates = told(attack, "uneven scales", "fp32", 16, seed=7)
    assert estimates.max() < 1e-3, estimates


def test_the_first_product_has_the_error_of_its_slice_and_not_of_the_pilot(attack: Found) -> None:
    """Of a deep net, whose micro-batches differ: it was a tenth of the error."""
    first, *_ = attack["products"](attack["problem"]("deep", "fp32", 8, 0))
    assert first.told > 1 / 3


SMOOTH = ("attention", "tied", "regression", "gru", "swiglu", "rms normalisation")


@pytest.mark.full
@pytest.mark.parametrize(("count", "most"), [(1, 0.6), (4, 0.35), (8, 0.2)])
def test_trials_are_spent_sparingly(attack: Found, runs: Found, count: int, most: float) -> None:
    """Extra gradients of a product, in the run of a spectrum by default."""
    extra = [
        runs["extra_of_run"](attack["problem"](name, "fp32", count, seed))
        for name in SMOOTH
        for seed in (0, 1, 2)
    ]
    assert np.mean(extra) < most, extra
