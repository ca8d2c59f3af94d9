"""Lanczos on matrices with a chosen spectrum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ds_hessian.errors import NumericsError
from ds_hessian.krylov import LanczosState, ritz, slq, trace_estimate
from ds_hessian.operators import Product
from ds_hessian.vectors import Fragment, Layout, VectorSpace, random_vector


class Diagonal:
    """A diagonal matrix in a random orthogonal basis, as an operator."""

    def __init__(self, eigenvalues: NDArray[np.float64]) -> None:
        n = len(eigenvalues)
        generator = torch.Generator().manual_seed(0)
        q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
        self.matrix = q @ torch.diag(torch.tensor(eigenvalues)) @ q.T
        self.layout = Layout([Fragment("w", 0, n, torch.Size([n]))])
        self.space = VectorSpace(n)

    def matvec(self, v: torch.Tensor) -> Product:
        w = (self.matrix @ v.double()).float()
        return Product(w, float(w.norm()), 1.0, None, None, 1.0, 1e-7, 0)


SPECTRA = {
    "spiked": np.r_[np.linspace(0, 1, 300), 10.0, 20.0, 50.0, -5.0],
    "semicircle": 2 * np.cos(np.pi * (np.arange(400) + 0.5) / 400),
    "two-valued": np.r_[np.ones(60), 2 * np.ones(40)],
    "rank-deficient": np.r_[np.zeros(200), np.arange(1.0, 6.0)],
    "zero": np.zeros(50),
    "n < m": np.array([-1.0, 0.5, 3.0]),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_decomposition_identity_orthogonality_and_no_nan(name: str) -> None:
    operator = Diagonal(SPECTRA[name])
    n, m = operator.space.n, min(25, operator.space.n)
    fresh = lambda k: random_vector(operator.layout, operator.space, 0, k)  # noqa: E731
    state = LanczosState(operator, fresh(0), 25, fresh)
    while not state.done:
        state.step()
    run, q = state.run(), state.basis.double()
    t = np.diag(run.alphas) + np.diag(run.betas[:-1], 1) + np.diag(run.betas[:-1], -1)
    assert run.num_matvecs == m and np.isfinite(t).all()
    scale = max(abs(SPECTRA[name]).max(), 1e-30)
    # fp32 vectors: each entry of Q'Q and of the residual carries a few u = 6e-8 of its scale.
    assert (q @ q.T - torch.eye(m)).abs().max() < 2e-6
    residual = operator.matrix @ q.T - q.T @ torch.tensor(t)
    assert residual[:, : m - 1].norm(dim=0).max() < 32 * 6e-8 * scale * 2
    if n > m:
        assert abs(float(residual[:, -1].norm()) - run.betas[-1]) < 32 * 6e-8 * scale * 2


def test_outliers_are_found_once_with_bars_that_hold() -> None:
    operator = Diagonal(SPECTRA["spiked"])
    run = slq(operator, operator.layout, 40, 1, seed=0)[0]
    pairs = ritz(run)
    assert (pairs.values > 5).sum() == 3 and (pairs.values < -1).sum() == 1
    for truth in (10.0, 20.0, 50.0, -5.0):
        i = int(abs(pairs.values - truth).argmin())
        assert abs(pairs.values[i] - truth) <= pairs.errors[i] + 50 * 6e-8
    assert run.asymmetry < 1e-5


def test_three_all_reduces_a_step() -> None:
    operator = Diagonal(SPECTRA["semicircle"])
    run = slq(operator, operator.layout, 20, 1, seed=0)[0]
    assert run.all_reduces == 3 * 20


def test_more_probes_begin_with_the_runs_of_fewer() -> None:
    operator = Diagonal(SPECTRA["semicircle"])
    one = slq(operator, operator.layout, 10, 1, seed=4)
    three = slq(operator, operator.layout, 10, 3, seed=4)
    assert np.array_equal(one[0].alphas, three[0].alphas)
    assert not np.array_equal(three[1].alphas, three[0].alphas)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_trace_bars_hold_for_spiked_spectra(kind: str) -> None:
    operator = Diagonal(SPECTRA["spiked"])
    truth = SPECTRA["spiked"].sum()
    hits = 0
    for seed in range(40):
        runs = slq(operator, operator.layout, 15, 2, seed, kind)
        trace, error = trace_estimate(runs, [ritz(r) for r in runs], operator.space.n)
        hits += abs(trace - truth) <= 2 * error
    assert hits >= 36  # two standard errors: 95 % of 40 is 38, less 1.5 of its own deviation


def test_no_steps_is_refused() -> None:
    operator = Diagonal(SPECTRA["zero"])
    with pytest.raises(NumericsError, match="at least 1"):
        slq(operator, operator.layout, 0, 1, seed=0)
