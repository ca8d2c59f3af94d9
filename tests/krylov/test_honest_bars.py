"""Bars where the products are worse than they say, or too coarse for the tolerance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from ds_hessian.krylov import eigenpairs, lanczos, ritz, solve, xtrace
from ds_hessian.krylov.sharpness import Subspace, refine
from ds_hessian.operators import Product
from tests.krylov.matrices import SPECTRA, Matrix

TRUTH = np.r_[np.linspace(0.0, 1.0, 120), 4.0, 9.0, 20.0]


class Lying(Matrix):
    """Products of a matrix plus an unsymmetric one of that norm, which are said to be exact."""

    def __init__(self, matrix: Tensor, wrong: float, seed: int) -> None:
        super().__init__(matrix)
        generator = torch.Generator().manual_seed(seed)
        n = len(matrix)
        u = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        u = torch.linalg.qr(u).Q
        self.wrong = wrong * u[:, :1] @ u[:, 1:].T

    def matvec(self, v: Tensor) -> Product:
        """See `LinearOperator`."""
        product = super().matvec(v)
        return replace(product, vector=product.vector + self.shard(self.wrong @ self.full(v)))


@pytest.mark.parametrize("wrong", [1.0, 30.0])
def test_bars_hold_what_the_asymmetry_of_the_products_shows(wrong: float) -> None:
    held, extremes = [], []
    for seed in range(20):
        operator = Lying(Matrix.of(TRUTH, basis=seed).matrix, wrong, seed)
        fresh = operator.fresh(seed)
        pairs = ritz(lanczos(operator, fresh(0), 30, fresh))
        held += list(abs(pairs.values[:, None] - TRUTH).min(1) <= pairs.errors)
        found = eigenpairs(operator, fresh(0), 1, fresh, "LA", max_matvecs=60)
        extremes.append(abs(found.values[0] - TRUTH).min() <= found.errors[0])
    assert np.mean(held) >= 0.95 and np.mean(extremes) >= 0.95


def test_exact_products_keep_their_errors() -> None:
    for name in ("spiked", "huge", "tiny", "rank-deficient"):
        operator = Matrix.of(SPECTRA[name])
        run = lanczos(operator, operator.fresh()(0), 40, operator.fresh())
        scale = abs(SPECTRA[name]).max()
        assert run.product_errors.max() <= 1.1e-7 * scale, name


def test_a_residual_as_large_as_the_products_errors_is_not_converged_but_limited() -> None:
    operator = Matrix.of(TRUTH, noise=0.1)
    pairs = eigenpairs(operator, operator.fresh()(0), 1, operator.fresh(), "LA", tolerance=1e-4)
    assert not pairs.converged.any() and pairs.limited == (True,)
    b = operator.fresh(3)(0)
    found = solve(operator, b, [0.5], operator.fresh(), tolerance=1e-6, num_matvecs=40)
    assert not found.converged.any()
    assert found.limited == (
        bool(
            found.residuals[0] <= 0.2 * operator.matvec(found.x[0]).norm * float(found.x[0].norm())
        ),
    )
    subspace = Subspace(operator)
    subspace.add(b)
    (pair,) = refine(subspace, [None], 1e-6, 40)
    assert not pair.converged(1e-6) and pair.limited(1e-6)


def test_exact_products_converge_and_are_not_called_limited() -> None:
    operator = Matrix.of(TRUTH)
    pairs = eigenpairs(operator, operator.fresh()(0), 2, operator.fresh(), "LA")
    assert pairs.converged.all() and not any(pairs.limited)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_xtrace_of_a_space_that_it_spans_is_the_trace(n: int) -> None:
    values = np.array([-2.0, 0.5, 3.0])[:n]
    operator = Matrix.of(values)
    found = xtrace(operator, operator.fresh(), 8)
    assert found.value == pytest.approx(values.sum(), rel=1e-6)
    assert 0 <= found.bound < 1e-5 and found.error == 0.0
