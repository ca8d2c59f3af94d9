"""Bounds on a start vector's spectral measure, against the measure itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_hessian.krylov import lanczos, measure_bounds, negative_bounds
from tests.krylov.matrices import SPECTRA, Matrix, rotation
from tests.tiers import cells

ROUNDOFF = 2.0**-24


@pytest.mark.parametrize("m", cells([1, 2, 5, 12, 40], [1, 5]))
@pytest.mark.parametrize("name", SPECTRA)
def test_the_measure_lies_within_its_bounds_everywhere(name: str, m: int) -> None:
    values = SPECTRA[name]
    scale = abs(values).max() or 1.0
    operator = Matrix.of(values)
    start = operator.fresh()(0)
    run = lanczos(operator, start, m, operator.fresh())
    weights = ((rotation(len(values)) @ operator.full(start)) ** 2).numpy()
    x = np.sort(np.append(np.linspace(-1.1, 1.1, 301) * scale, values[::7]))
    # Rounding of the vectors moves eigenvalues by a few roundoffs.
    moved = 64 * ROUNDOFF * scale
    lower, _ = measure_bounds(run.alphas, run.betas, x - moved)
    _, upper = measure_bounds(run.alphas, run.betas, x + moved)
    measure = (weights * (values <= x[:, None])).sum(1)
    slack = 64 * ROUNDOFF
    assert (lower <= measure + slack).all() and (measure <= upper + slack).all()


def test_bounds_are_those_of_the_best_polynomials() -> None:
    """Linear programming over degree 2 m finds no better ones."""
    from scipy.optimize import linprog

    operator = Matrix.of(SPECTRA["semicircle"])
    run = lanczos(operator, operator.fresh()(0), 3, operator.fresh())
    jacobi = np.diag(np.append(run.alphas, 0.0)) + np.diag(run.betas, 1) + np.diag(run.betas, -1)
    powers = [np.linalg.matrix_power(jacobi, k)[0, 0] for k in range(2 * 3 + 1)]
    at = np.linspace(-4, 4, 1601)
    vandermonde = np.vander(at, len(powers), increasing=True)
    for x in (-1.3, 0.2, 0.9):
        lower, upper = (
            float(end[0]) for end in measure_bounds(run.alphas, run.betas, np.array([x]))
        )
        free = [(None, None)] * len(powers)
        above = linprog(powers, -vandermonde, -(at <= x).astype(float), bounds=free)
        below = linprog(-np.array(powers), vandermonde, (at < x).astype(float), bounds=free)
        # The programs hold on a grid only, which lets them be better by its spacing.
        assert above.fun == pytest.approx(upper, abs=5e-3)
        assert -below.fun == pytest.approx(lower, abs=5e-3)


def test_an_exhausted_space_tells_the_measure() -> None:
    operator = Matrix.of(SPECTRA["two-valued"])
    start = operator.fresh()(0)
    run = lanczos(operator, start, 10, operator.fresh())
    weights = (rotation(100) @ operator.full(start)) ** 2
    ones = float(weights[:60].sum())
    lower, upper = measure_bounds(run.alphas, run.betas, np.array([0.5, 1.5, 2.5]))
    assert np.array_equal(lower, upper)
    assert torch.allclose(torch.tensor(lower), torch.tensor([0.0, ones, 1.0]).double(), atol=1e-5)


@pytest.mark.parametrize("m", [1, 2, 8])
@pytest.mark.parametrize("name", ["spiked", "semicircle", "repeated", "marchenko-pastur", "n < m"])
def test_the_negative_part_lies_within_its_bounds(name: str, m: int) -> None:
    values = SPECTRA[name]
    scale = abs(values).max()
    for sign in (1, -1):
        operator = Matrix.of(sign * values)
        start = operator.fresh()(0)
        run = lanczos(operator, start, m, operator.fresh())
        weights = ((rotation(len(values)) @ operator.full(start)) ** 2).numpy()
        exact = float(weights @ np.minimum(sign * values, 0.0))
        least, most = negative_bounds(run.alphas, run.betas)
        assert least - 1e-5 * scale <= exact <= most + 1e-5 * scale


def test_bounds_of_the_negative_part_are_those_of_the_best_polynomials() -> None:
    from scipy.optimize import linprog

    operator = Matrix.of(SPECTRA["semicircle"] + 0.3)
    run = lanczos(operator, operator.fresh()(0), 3, operator.fresh())
    jacobi = np.diag(np.append(run.alphas, 0.0)) + np.diag(run.betas, 1) + np.diag(run.betas, -1)
    powers = [np.linalg.matrix_power(jacobi, k)[0, 0] for k in range(2 * 3 + 1)]
    at = np.linspace(-5, 5, 2001)
    vandermonde, negative = np.vander(at, len(powers), increasing=True), np.minimum(at, 0.0)
    free = [(None, None)] * len(powers)
    least, most = negative_bounds(run.alphas, run.betas)
    above = linprog(powers, -vandermonde, -negative, bounds=free)
    below = linprog(-np.array(powers), vandermonde, negative, bounds=free)
    assert above.fun == pytest.approx(most, abs=2e-3)
    assert -below.fun == pytest.approx(least, abs=2e-3)


def test_the_negative_part_of_an_exhausted_space_is_known() -> None:
    operator = Matrix.of(-SPECTRA["two-valued"])
    start = operator.fresh()(0)
    run = lanczos(operator, start, 10, operator.fresh())
    ones = float(((rotation(100) @ operator.full(start)) ** 2)[:60].sum())
    least, most = negative_bounds(run.alphas, run.betas)
    assert least == most == pytest.approx(-ones - 2 * (1 - ones), abs=1e-4)
