"""Traces of matrices with a chosen spectrum, their bars, and those of diagonal blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.errors import NumericsError
from ds_hessian.krylov import (
    Storage,
    hutch_plus_plus,
    hutchinson,
    lanczos,
    ritz,
    trace_estimate,
    xtrace,
)
from ds_hessian.operators import Product
from ds_hessian.vectors import Partition, random_vector
from tests.krylov.matrices import SPECTRA, Matrix
from tests.ranks import RankPool
from tests.tiers import cells

METHODS = {"hutchinson": hutchinson, "hutch++": hutch_plus_plus, "xtrace": xtrace}
DECAYING = np.r_[0.7 ** np.arange(40) * 10, np.zeros(160)]


def estimate(method: str, name: str) -> Any:
    operator = Matrix.of(SPECTRA[name])
    found = METHODS[method](operator, operator.fresh(3), 24)
    assert operator.products == found.num_matvecs <= 24
    return found


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("method", METHODS)
def test_traces_are_near_the_truth_for_every_spectrum(method: str, name: str) -> None:
    found = estimate(method, name)
    assert np.isfinite([found.value, found.error, found.bound]).all()
    # Of 30 cases one in three runs has one beyond its 99 % bound; twice that is one in 10^4.
    distance = abs(found.value - SPECTRA[name].sum())
    assert distance <= 2 * found.bound + 1e-6 * abs(SPECTRA[name]).max()


@pytest.mark.parametrize("method", METHODS)
def test_traces_do_not_depend_on_the_number_of_ranks(
    method: str, ranks: Callable[[int], RankPool]
) -> None:
    one = estimate(method, "spiked")
    for found in ranks(2).run(estimate, method, "spiked"):
        assert found.value == pytest.approx(one.value, rel=1e-5)
        assert found.bound == pytest.approx(one.bound, rel=1e-3)


@pytest.mark.parametrize("products", [6, 12])
def test_errors_of_few_samples_beside_a_range_are_not_small_by_chance(products: int) -> None:
    """Two samples may be next to each other: in their errors, distances were 14 to 180 in the root
    of the mean square, and 1.6 to 2.2 of four.
    """
    for values in (np.r_[np.linspace(-1, 1, 150), 8.0, -7.0], 0.8 ** np.arange(150)):
        distances = []
        for seed in range(60):
            operator = Matrix.of(values, 0.0, seed)
            found = hutch_plus_plus(operator, operator.fresh(seed), products)
            distances.append((found.value - values.sum()) / found.error)
        assert 0.5 < np.sqrt(np.mean(np.square(distances))) < 1.3


KINDS = {
    "exact": (0.0, Storage()),
    "noisy": (1e-3, Storage()),
    "bf16 basis": (0.0, Storage(torch.bfloat16)),
}


@pytest.mark.parametrize("kind", cells(KINDS, ["noisy"]))
@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_in_95_of_100_cases(method: str, kind: str) -> None:
    noise, storage = KINDS[kind]
    if method == "hutchinson" and kind == "bf16 basis":
        pytest.skip("Hutchinson stores no basis")
    options = {} if method == "hutchinson" else {"storage": storage}
    values = np.r_[np.linspace(0, 1, 120), 4.0, 9.0, 20.0, -3.0]
    held = []
    for seed in range(100):
        operator = Matrix.of(values, noise, seed, basis=seed % 5)
        found = METHODS[method](operator, operator.fresh(seed), 12, **options)
        held.append(abs(found.value - values.sum()) <= found.bound)
    print(f"{method}, {kind}: held in {np.mean(held):.3f}")
    assert np.mean(held) >= 0.95


def test_standard_errors_of_xtrace_are_not_too_small_where_the_spectrum_decays() -> None:
    """Its estimates share vectors: as independent ones they would say two thirds of the error."""
    values = 0.8 ** np.arange(75)
    off, said, held = [], [], []
    for seed in range(40):
        operator = Matrix.of(values, basis=seed % 5)
        found = xtrace(operator, operator.fresh(seed), 20)
        off.append(found.value - values.sum())
        said.append(found.error)
        held.append(abs(off[-1]) <= found.bound)
    assert np.mean(np.square(off)) < np.mean(np.square(said)) < 10 * np.mean(np.square(off))
    assert all(held)


class Lost(Matrix):
    """Products of which a twentieth of the length is left, in any direction, which they state."""

    def matvec(self, v: torch.Tensor) -> Product:
        """See `LinearOperator`."""
        exact = super().matvec(v)
        random = torch.randn(self.space.n, generator=self.generator, dtype=torch.float64)
        left = 0.05 * exact.norm * float(v.norm()) * random / random.norm()
        return replace(exact, vector=self.shard(left), norm=0.05 * exact.norm, error=20.0)


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_where_products_are_their_errors(method: str) -> None:
    for values in (np.linspace(0, 1, 120), np.linspace(-1, 1.2, 120)):
        operator = Lost(Matrix.of(values).matrix)
        found = METHODS[method](operator, operator.fresh(), 12)
        assert abs(found.value - values.sum()) <= found.bound
        run = lanczos(operator, operator.fresh()(0), 5, operator.fresh())
        value, error = trace_estimate([run], [ritz(run)], operator.space.n)
        assert abs(value - values.sum()) <= 2 * error
        partition = Partition(operator.layout, operator.space, {"a": "x", "b": "y", "c": "z"})
        blocks = hutchinson(operator, operator.fresh(), 12, partition)
        diagonals = operator.matrix.diag().split(list(operator.sizes.values()))
        traces = [float(diagonal.sum()) for diagonal in diagonals]
        assert (abs(blocks.block_values - traces) <= 2 * blocks.block_errors).all()
        assert blocks.frobenius is not None
        assert abs(blocks.frobenius[0] - np.linalg.norm(values)) <= 2 * blocks.frobenius[1]


def test_a_decaying_spectrum_shows_what_the_stored_vectors_buy() -> None:
    errors = {}
    for name, method in METHODS.items():
        squares = []
        for seed in range(10):
            operator = Matrix.of(DECAYING)
            found = method(operator, operator.fresh(seed), 40)
            squares.append((found.value - DECAYING.sum()) ** 2)
        errors[name] = float(np.sqrt(np.mean(squares)))
    assert errors["hutch++"] < 0.1 * errors["hutchinson"]
    assert errors["xtrace"] < 0.1 * errors["hutch++"]


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_frobenius_norm_and_traces_of_blocks(kind: Any) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    partition = Partition(operator.layout, operator.space, {"a": "x", "b": "y", "c": "x"})
    assert partition.names == ["x", "y"] and partition.sizes.sum() == operator.space.n

    def draw(k: int) -> torch.Tensor:
        return random_vector(operator.layout, operator.space, 1, k, kind)

    found = hutchinson(operator, draw, 200, partition)
    assert found.frobenius is not None
    assert found.frobenius[0] == pytest.approx(
        np.linalg.norm(SPECTRA["spiked"]), abs=4 * found.frobenius[1]
    )
    first, second, _ = operator.sizes.values()
    diagonal = operator.matrix.diag().numpy()
    middle = diagonal[first : first + second].sum()
    exact = np.array([diagonal.sum() - middle, middle])
    assert (abs(found.block_values - exact) <= 4 * found.block_errors).all()
    assert found.block_values.sum() == pytest.approx(found.value)
    # The variance of z'Sz is 2 |S|^2 for Gaussian z, without S' diagonal for signs; S is the
    # symmetric part of the block's rows. The standard deviation of 200 is known to a twentieth.
    rows = torch.zeros_like(operator.matrix)
    rows[first : first + second] = operator.matrix[first : first + second]
    symmetric = (rows + rows.T) / 2
    if kind == "rademacher":
        symmetric.fill_diagonal_(0)
    exact_error = float(symmetric.norm()) * (2 / 200) ** 0.5
    assert found.block_errors[1] == pytest.approx(exact_error, rel=0.3)


@pytest.mark.parametrize("spectrum", [[2.0], [0.0], [1.5, -1.0], [0.0, 3.0]])
@pytest.mark.parametrize("num_matvecs", [4, 6, 30])
@pytest.mark.parametrize("method", METHODS)
def test_traces_of_one_and_two_parameters_are_numbers(
    method: str, num_matvecs: int, spectrum: list[float]
) -> None:
    operator = Matrix.of(np.array(spectrum))
    found = METHODS[method](operator, operator.fresh(3), num_matvecs)
    assert operator.products == found.num_matvecs <= num_matvecs
    assert abs(found.value - sum(spectrum)) <= found.bound + 1e-6
    if len(spectrum) == 1:
        assert found.error == pytest.approx(0, abs=1e-6)


def test_too_few_products_are_refused() -> None:
    operator = Matrix.of(SPECTRA["zero"])
    with pytest.raises(NumericsError, match="at least 2 products, got 1"):
        hutchinson(operator, operator.fresh(), 1)
    with pytest.raises(NumericsError, match="XTrace .* at least 4 products, got 3"):
        xtrace(operator, operator.fresh(), 3)
