"""Eigenpairs of matrices with a chosen spectrum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.errors import NumericsError
from ds_hessian.krylov import Eigenpairs, Storage, eigenpairs
from ds_hessian.krylov.eigenpairs import _measured
from ds_hessian.operators import Product
from tests.krylov.matrices import SPECTRA, Matrix, rotation
from tests.ranks import RankPool
from tests.tiers import cells


def truth(name: str, k: int, which: str) -> Any:
    values = SPECTRA[name]
    order = {"LM": -abs(values), "LA": -values, "SA": values}[which]
    return values[np.argsort(order, kind="stable")][:k]


def find(name: str, k: int, which: Any, **options: Any) -> tuple[Eigenpairs, Any]:
    """The pairs, and |H y - theta y| of the whole vectors in fp64."""
    operator = Matrix.of(SPECTRA[name])
    pairs = eigenpairs(operator, operator.fresh()(0), k, operator.fresh(), which, **options)
    y = torch.stack([operator.full(v) for v in pairs.vectors]).T
    residual = operator.matrix @ y - y * torch.tensor(pairs.values)
    return pairs, residual.norm(dim=0).numpy()


SEPARATED = [("spiked", "LM"), ("spiked", "LA"), ("rank-deficient", "LM"), ("n < m", "SA")]
OPTIONS = {"basis_size": 14, "max_matvecs": 100}


@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
@pytest.mark.parametrize("name", SPECTRA)
def test_an_eigenvalue_lies_within_every_bar_and_residuals_are_true(name: str, which: str) -> None:
    pairs, residuals = find(name, min(3, len(SPECTRA[name])), which, **OPTIONS)
    scale = max(abs(SPECTRA[name]).max(), 1e-30)
    rounding = 1e-6 * scale  # of the fp32 vectors
    nearest = abs(pairs.values[:, None] - SPECTRA[name]).min(1)
    assert (nearest <= pairs.errors + rounding).all()
    assert (residuals <= pairs.errors + rounding).all()
    assert (pairs.residuals[pairs.converged] <= 1.01e-3 * scale).all()
    if (name, which) in SEPARATED:
        assert pairs.converged.all()
        wanted = truth(name, len(pairs.values), which)
        assert (abs(pairs.values - wanted) <= pairs.errors + rounding).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("name", "which"), SEPARATED)
def test_pairs_do_not_depend_on_the_number_of_ranks(
    name: str, which: str, world_size: int, ranks: Callable[[int], RankPool]
) -> None:
    one, _ = find(name, 3, which, **OPTIONS)
    many, residuals = ranks(world_size).run(find, name, 3, which, **OPTIONS)[0]
    rounding = 1e-6 * abs(SPECTRA[name]).max()
    assert (abs(one.values - many.values) <= one.errors + rounding).all()
    assert (residuals <= many.errors + rounding).all()


def participation_bound(y: torch.Tensor, angle: float) -> float:
    """How far `sum y_i^4` is moved, to first order, by an angle: 4 |y^3| times the change of y."""
    return 1.1 * 4 * float((y**3).norm()) * angle


@pytest.mark.parametrize("world_size", [1, 2])
def test_participations_are_those_of_the_exact_vectors(
    world_size: int, ranks: Callable[[int], RankPool]
) -> None:
    one, _ = find("spiked", 3, "LA", tolerance=1e-5)
    many, _ = ranks(world_size).run(find, "spiked", 3, "LA", tolerance=1e-5)[0]
    exact = rotation(len(SPECTRA["spiked"]))[np.argsort(-SPECTRA["spiked"])[:3].tolist()]
    for found in (one, many):
        for y, residual, ratio in zip(exact, found.residuals, found.participation, strict=True):
            angle = residual / 9 + 1e-6  # the gaps are 30, 10 and 9; rounding of the vectors
            assert abs(ratio - float((y**4).sum())) <= participation_bound(y, angle)
    assert 1 / 304 < one.participation.min() and one.participation.max() < 6 / 304  # random: 3 / n


def test_participation_of_one_coordinate_is_1_and_of_an_even_vector_1_over_n() -> None:
    operator = Matrix.of(np.arange(10.0))
    one, even = torch.eye(10)[3], torch.full((10,), 0.7)
    assert operator.space.participations([one, even]).tolist() == pytest.approx([1, 0.1], rel=1e-7)


def test_restarts_bound_the_basis_and_find_what_a_large_basis_finds() -> None:
    small, _ = find("marchenko-pastur", 4, "LA", basis_size=12, tolerance=1e-4)
    large, _ = find("marchenko-pastur", 4, "LA", basis_size=150, tolerance=1e-4)
    assert small.restarts > 2 and large.restarts == 0
    assert small.converged.all() and large.converged.all()
    assert np.allclose(small.values, large.values, rtol=1e-6)


class Numbered(Matrix):
    """Each product has its number for a displacement."""

    def matvec(self, v: torch.Tensor) -> Product:
        """See `LinearOperator`."""
        return dataclasses.replace(super().matvec(v), displacement=float(self.products))


def test_pairs_whose_measured_values_change_places_are_sorted_with_all_that_is_theirs() -> None:
    values = np.array([1.0, 5.0, 3.0])
    operator, q = Numbered.of(values), rotation(3)
    vectors = torch.stack([operator.shard(row) for row in q])
    found = _measured(operator, vectors.clone(), "LM", 1e-3, 0, 0, 0.0, 0.0)
    assert found.values == pytest.approx([5, 3, 1], rel=1e-6)
    assert found.displacements.tolist() == [2, 3, 1]
    for i, row in zip((1, 2, 0), found.vectors, strict=True):
        assert torch.allclose(row, vectors[i], atol=1e-6)


def test_a_good_start_needs_few_products() -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    cold = eigenpairs(operator, operator.fresh()(0), 1, operator.fresh())
    warm = eigenpairs(operator, cold.vectors[0], 1, operator.fresh())
    assert warm.num_matvecs <= 2 < cold.num_matvecs


CASES = {
    "exact": (0.0, Storage()),
    "noisy": (1e-3, Storage()),
    "bf16 basis": (0.0, Storage(torch.bfloat16)),
}


@pytest.mark.parametrize("kind", cells(CASES, ["noisy"]))
def test_bars_hold_in_95_of_100_cases(kind: str) -> None:
    noise, storage = CASES[kind]
    values = np.r_[np.linspace(0, 1, 120), 4.0, 9.0, 20.0, -3.0]
    held, residuals = [], []
    for seed in range(100):
        operator = Matrix.of(values, noise, seed, basis=seed % 5)
        start, fresh = operator.fresh(seed)(0), operator.fresh(seed)
        pairs = eigenpairs(operator, start, 4, fresh, basis_size=12, storage=storage)
        held.append(abs(pairs.values - [20.0, 9.0, 4.0, -3.0]) <= pairs.errors)
        y = operator.full(pairs.vectors[0])
        residuals.append(float((operator.matrix @ y - pairs.values[0] * y).norm()))
        assert residuals[-1] <= pairs.errors[0] + 1e-6 * 20
    print(f"{kind}: held in {np.mean(held):.3f}")
    assert np.mean(held) >= 0.95


def test_impossible_requests_are_refused() -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    start = operator.fresh()(0)
    with pytest.raises(NumericsError, match="within 1 .. 304"):
        eigenpairs(operator, start, 0, operator.fresh())
    with pytest.raises(NumericsError, match="at least k \\+ 2 = 5 vectors, got 4"):
        eigenpairs(operator, start, 3, operator.fresh(), basis_size=4)
