"""A tolerance of eigenvalues: the cheapest differences that reach it, and bars that hold."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ds_hessian
from ds_hessian.errors import MeasurementError
from ds_hessian.krylov import LanczosState, RitzDecomposition, ritz
from ds_hessian.operators import FiniteDifferenceHessian, Product
from ds_hessian.operators.displacement.control import StepController
from ds_hessian.operators.displacement.schemes import SCHEMES
from ds_hessian.operators.displacement.sides import Sides
from ds_hessian.operators.protocol import COVERAGE
from ds_hessian.vectors import random_vector
from tests.operators.nets import (
    Batch,
    Exact,
    backend_of,
    batches,
    dense,
    loss_of,
    measuring,
    mlp,
    preempted,
    train,
)
from tests.operators.test_honest_estimates import halves, kinked, logistic, uneven
from tests.tiers import cells

STEPS = 30


def normalised() -> nn.Module:
    """With layer normalisation; 963 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 32),
        nn.LayerNorm(32),
        nn.GELU(),
        nn.Linear(32, 16),
        nn.SiLU(),
        nn.Linear(16, 3),
    )


Make = tuple[Callable[[], nn.Module], int, Callable[[int], list[Batch]]]
NETS: dict[str, Make] = {
    "untrained": (mlp, 0, batches),
    "trained": (mlp, 40, batches),
    "memorised": (mlp, 400, batches),
    "normalised": (normalised, 40, batches),
    "kinked": (kinked, 40, batches),
    "uneven": (uneven, 40, batches),
    "logistic": (logistic, 0, halves),
}


@dataclass
class Run:
    """A Lanczos run with products of one net, beside its exact eigenvalues.

    Attributes:
        operator: The operator, after the run.
        pairs: The Ritz values and their bars.
        exact: Eigenvalues of the dense fp64 Hessian, ascending.
        errors, told: Of each product of a unit vector, absolute; and their estimates.
        one_sided: Of each product.
    """

    operator: FiniteDifferenceHessian
    pairs: RitzDecomposition
    exact: NDArray[np.float64]
    errors: NDArray[np.float64]
    told: NDArray[np.float64]
    one_sided: NDArray[np.bool_]

    @property
    def largest(self) -> float:
        """The largest eigenvalue in magnitude."""
        return float(abs(self.exact).max())

    @property
    def gradients(self) -> float:
        """Evaluated for a product, on average."""
        return self.operator.cost.gradient_evaluations / self.operator.cost.products


class Noted:
    """An operator whose products are compared with exact ones."""

    def __init__(self, operator: FiniteDifferenceHessian, exact: Exact) -> None:
        self.operator, self.space, self.exact = operator, operator.space, exact
        self.found = list[tuple[float, float, bool]]()

    def matvec(self, v: Tensor) -> Product:
        """Of the operator."""
        before = self.operator.cost.one_sided
        product = self.operator.matvec(v)
        length = float(v.double().norm())
        error = float((product.vector.double() - self.exact(v)).norm()) / length
        one_sided = self.operator.cost.one_sided > before
        self.found.append((error, (product.error or 0.0) * product.norm, one_sided))
        return product

    def contradicted(self) -> None:
        """Tell the operator."""
        self.operator.contradicted()


@functools.cache
def run(name: str, count: int, tolerance: float | None, bf16: bool = False) -> Run:
    make, steps, data = NETS[name]
    given = data(count)
    net = train(make(), given, steps)
    # Of micro-batches of one size the mean is that of all examples.
    merged = torch.cat([x for x, _ in given]), torch.cat([y for _, y in given])
    backend, exact = backend_of(net, bf16), Exact(net, [merged])
    n = backend.layout.n_local

    def fresh(k: int) -> Tensor:
        return random_vector(backend.layout, backend.space, seed=k)

    with measuring(backend, given) as session:
        operator = FiniteDifferenceHessian(session, tolerance=tolerance)
        noted = Noted(operator, exact)
        state = LanczosState(noted, fresh(0), min(STEPS, n), fresh)
        while not state.done:
            state.step()
    errors, told, one_sided = map(np.array, zip(*noted.found, strict=True))
    true = torch.linalg.eigvalsh(dense(exact, n)).numpy()
    return Run(operator, ritz(state.run()), true, errors, told, one_sided)


def assert_bars_hold(found: Run) -> None:
    """In 95 % of the Ritz values some eigenvalue is within the bar, and in all within twice."""
    off = abs(found.pairs.values[:, None] - found.exact).min(axis=1) / found.pairs.errors
    assert (off <= 1).mean() >= 0.95 and off.max() < 2, off


TABLE = [
    *(("trained", 1, 1e-2), ("trained", 4, 1e-1), ("trained", 8, 1e-2), ("trained", 8, 1e-3)),
    *(("normalised", 16, 1e-2), ("normalised", 16, 1e-3), ("memorised", 8, 1e-2)),
    *(("untrained", 8, 1e-2), ("uneven", 8, 1e-2), ("kinked", 8, 1e-1), ("kinked", 16, 1e-2)),
]


@pytest.mark.parametrize(
    ("name", "count", "tolerance"),
    cells(TABLE, [("trained", 8, 1e-2)]),
)
def test_eigenvalues_are_within_bars_and_bars_within_the_tolerance(
    name: str, count: int, tolerance: float
) -> None:
    found = run(name, count, tolerance)
    assert_bars_hold(found)
    told = found.told / np.maximum(found.errors, 1e-30)
    assert told[found.one_sided].min(initial=1.0) > 0.2, told
    allowed = tolerance * found.largest
    one_sided = found.told[found.one_sided]
    assert (2 * one_sided <= allowed).all(), one_sided / allowed
    assert found.errors[found.one_sided].max(initial=0) < allowed
    cost = found.operator.cost
    assert cost.one_sided == found.one_sided.sum() and cost.products == len(found.errors)


@pytest.mark.parametrize(
    ("name", "count"), cells([("trained", 8), ("normalised", 16)], [("trained", 8)])
)
def test_one_per_cent_costs_little_more_than_a_gradient_a_product(name: str, count: int) -> None:
    assert run(name, count, 1e-2).gradients < 1.2


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "count", "tolerance", "bf16"),
    [
        ("trained", 4, 1e-8, False),  # beyond fp32
        ("trained", 4, 1e-2, True),  # beyond 16 bits
    ],
)
def test_where_one_side_does_not_reach_it_products_are_central_to_the_bit(
    name: str, count: int, tolerance: float, bf16: bool
) -> None:
    found, central = run(name, count, tolerance, bf16), run(name, count, None, bf16)
    assert not found.one_sided.any()
    assert found.pairs.values.tolist() == central.pairs.values.tolist()
    assert found.operator.cost.beyond_tolerance > STEPS / 2  # and the record says so
    assert found.operator.cost.trials == central.operator.cost.trials


@pytest.mark.parametrize(
    ("name", "count"), cells([("trained", 8), ("trained", 4)], [("trained", 8)])
)
def test_where_central_differences_do_not_reach_it_those_of_fourth_order_do(
    name: str, count: int
) -> None:
    """And central ones are taken again where they suffice."""
    found = run(name, count, 5e-5)
    cost = found.operator.cost
    assert cost.extrapolated > 0 and cost.one_sided == 0
    assert found.gradients < 4.6
    assert_bars_hold(found)
    told = found.told / np.maximum(found.errors, 1e-30)
    assert told.min() > 0.2, told
    beyond = COVERAGE * found.told > 5e-5 * found.largest
    assert beyond.sum() <= 1 + cost.beyond_tolerance < 4, (beyond.sum(), cost)


def test_logistic_regression_at_zero_is_blind_and_takes_both_sides() -> None:
    """Its one-sided differences are as exact as central ones; nothing seen says so."""
    found = run("logistic", 8, 1e-2)
    assert not found.one_sided.any()
    assert_bars_hold(found)


def test_kinks_of_other_micro_batches_than_the_pilot_end_one_sided_products() -> None:
    """Lanczos reports products less symmetric than their errors allow."""
    data = batches(8)
    backend = backend_of(train(mlp(), data, 40))
    with measuring(backend, data) as session:
        operator = FiniteDifferenceHessian(session, tolerance=1e-2)
        sides = list[int]()
        for number in range(10):  # ten of both sides outweigh a contradiction
            before = operator.cost.one_sided
            operator.matvec(random_vector(backend.layout, backend.space, seed=number))
            sides.append(operator.cost.one_sided - before)
            if number == 3:
                operator.contradicted()
    assert sum(sides[:4]) and not sum(sides[4:]), sides


@pytest.mark.parametrize("tolerance", cells([1e-2, 1e-4], [1e-2]))
def test_an_operator_continues_from_another_ones_state_with_the_same_bits(
    tolerance: float,
) -> None:
    data = batches(8)
    backend = backend_of(train(mlp(), data, 40))
    vectors = [random_vector(backend.layout, backend.space, seed=i) for i in range(8)]
    with measuring(backend, data) as session:
        first = FiniteDifferenceHessian(session, tolerance=tolerance)
        for v in vectors[:4]:
            first.matvec(v)
        second = FiniteDifferenceHessian(session, tolerance=tolerance)
        second.load_state_dict(first.state_dict())
        for v in vectors[4:]:
            a, b = first.matvec(v), second.matvec(v)
            assert torch.equal(a.vector, b.vector) and a.error == b.error
    assert first.cost == replace(second.cost, **timings(first))
    assert first.cost.one_sided + first.cost.extrapolated > 0


def timings(operator: FiniteDifferenceHessian) -> dict[str, float]:
    """What no two operators have in common."""
    cost = operator.cost
    return {"gradient_seconds": cost.gradient_seconds, "product_seconds": cost.product_seconds}


def test_signs_add_up_at_no_frequency() -> None:
    """Else truncation of like vectors would add up in an eigenvector's product."""
    controller = StepController(SCHEMES["central"], 2.0**-24, 1.0, 1, 8)
    sides, signs = Sides(1e-2, controller), list[int]()
    for controller.products in range(256):
        ((side, other, weight),) = sides.scheme.differences
        assert (abs(side), other, weight) == (1, 0, 1.0)
        signs.append(side)
    for count in (16, 40, 256):
        sums = abs(np.fft.fft(signs[:count], 4096))
        assert sums.max() < (2 + 2**0.5) * count**0.5  # a constant sign: count


@pytest.mark.parametrize("analysis", cells(["spectrum", "eigenpairs"], ["spectrum"]))
def test_an_interrupted_measurement_ends_with_the_same_bits(analysis: str, tmp_path: Path) -> None:
    data = batches(8)
    net = train(mlp(), data, 40)

    def measured(loss: Callable[..., Tensor], **resume: object) -> tuple[object, int]:
        hessian = ds_hessian.attach(net, config={"progress": False, "num_matvecs": 20})
        hessian.use(data, loss)
        if analysis == "spectrum":
            spectrum = hessian.spectrum(tolerance=1e-2, **resume)
            return spectrum.alphas.tolist(), spectrum.cost.one_sided
        pairs = hessian.eigenpairs(k=2, tolerance=1e-2, scheme="auto", **resume)
        return pairs.values.tolist(), pairs.cost.one_sided

    for call in (60, 30):  # the second one continues
        with pytest.raises(MeasurementError, match="preempted"):
            measured(preempted(call), resume=str(tmp_path))
    found = measured(loss_of, resume=str(tmp_path))
    assert found == measured(loss_of) and found[1] > 0


def test_the_state_of_an_operator_does_not_change_with_its_next_products() -> None:
    data = batches(4)
    backend = backend_of(train(mlp(), data, 20))
    with measuring(backend, data) as session:
        operator = FiniteDifferenceHessian(session, tolerance=1e-2)
        operator.matvec(random_vector(backend.layout, backend.space, seed=0))
        state = operator.state_dict()
        before = json.dumps(state)
        operator.matvec(random_vector(backend.layout, backend.space, seed=1))
    assert json.dumps(state) == before
