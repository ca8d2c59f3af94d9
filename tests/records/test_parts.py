"""The density's sampling error against its spread over independently drawn micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_hessian.errors import ResultError
from ds_hessian.krylov import slq
from ds_hessian.records import HessianSpectrum, density_of_parts
from tests.krylov.matrices import Matrix
from tests.records.makers import COST, PROVENANCE, semicircle, spectrum_of

PARTS, N, POPULATION = 4, 60, 200
GRID, WIDTH = np.linspace(-1.5, 7.0, 18), 0.5


@pytest.fixture(scope="module")
def draw() -> Callable[[np.random.Generator, int, int], HessianSpectrum]:
    """`draw(random, count, probe seed)`: a spectrum of so many micro-batches of a population.

    Their Hessians have a common part with an outlier at 5, and noise as large as its bulk.
    """
    random = np.random.default_rng(0)
    common = np.diag(np.r_[np.linspace(0, 1, N - 1), 5.0])
    noise = random.normal(size=(POPULATION, N, N)) / np.sqrt(N)
    hessians = common + (noise + noise.transpose(0, 2, 1))

    def one(random: np.random.Generator, count: int, seed: int) -> HessianSpectrum:
        chosen = random.integers(0, POPULATION, count)
        operator = Matrix(torch.tensor(hessians[chosen].mean(0)))
        runs = slq(operator, operator.layout, 20, 1, seed)
        data = replace(PROVENANCE, data_fingerprint=str(random.integers(1 << 60)), seed=seed)
        return HessianSpectrum.from_runs(runs, N, COST, data)

    return one


@pytest.mark.full
def test_the_stated_error_is_that_of_other_draws_whatever_the_probe(
    draw: Callable[[np.random.Generator, int, int], HessianSpectrum],
) -> None:
    for seed in (0, 1):  # each probe has a density of its own, with the data's spread around it
        random = np.random.default_rng(1 + seed)
        found = [
            density_of_parts([draw(random, 4, seed) for _ in range(PARTS)], GRID, WIDTH)
            for _ in range(60)
        ]
        values = np.array([density.values for density in found])
        stated = np.sqrt(np.mean([density.errors**2 for density in found], axis=0))  # type: ignore[operator]
        seen = values.mean(0) > 0.01
        ratio = np.median((stated / values.std(0, ddof=1))[seen])
        low, high = np.array([density.band() for density in found]).transpose(1, 0, 2)
        held = ((low <= values.mean(0)) & (values.mean(0) <= high))[:, seen].mean()
        print(f"probe {seed}: stated / true {ratio:.2f}, band of 95 % holds in {held:.3f}")
        # 60 draws know a standard deviation to 9 %.
        assert 0.8 < ratio < 1.25 and held > 0.92


def test_the_same_spectrum_everywhere_has_no_error() -> None:
    one = spectrum_of(semicircle(200), m=12)
    parts = [
        replace(one, provenance=replace(PROVENANCE, data_fingerprint=str(i))) for i in range(3)
    ]
    density = density_of_parts(parts)
    assert density.errors is not None and density.errors.max() < 1e-12 * density.values.max()
    assert np.allclose(density.values, one.density(density.grid).values)
    assert density.mass == pytest.approx(1.0, abs=1e-6)


def test_what_differs_in_more_than_its_data_is_refused() -> None:
    one = spectrum_of(semicircle(200), m=12)
    other = replace(one, provenance=replace(PROVENANCE, data_fingerprint="other"))
    with pytest.raises(ResultError, match="at least 2 parts, got 1"):
        density_of_parts([one])
    with pytest.raises(ResultError, match="of the same micro-batches"):
        density_of_parts([one, one])
    for wrong in (
        spectrum_of(semicircle(200), m=13),
        replace(other, provenance=replace(other.provenance, seed=1)),
        replace(other, provenance=replace(other.provenance, num_micro_batches=3)),
    ):
        with pytest.raises(ResultError, match="must be spectra of one model"):
            density_of_parts([one, wrong])
