"""Lanczos with full reorthogonalisation by classical Gram-Schmidt, twice (CGS2).

For a symmetric operator H and a unit vector q_1 it builds orthonormal q_1 .. q_m and the
tridiagonal T = Q' H Q with H Q = Q T + beta_m q_{m+1} e_m'.

Cost: m products; m x n_local elements for the basis; three all-reduces a step, of at most m + 1
scalars each, and three reads of the basis so far:

    c  = Q' w                 w = H q_j: all dot products in one pass, alpha_j = c_j
    w  = w - Q c,  c' = Q' w  fused
    w  = w - Q c',  beta = |w|

Twice is enough: Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101 (2005).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import NumericsError
from ds_hessian.krylov.records import LanczosRun
from ds_hessian.operators import LinearOperator, Product

BREAKDOWN = 32 * 2.0**-24
"""beta below this share of the largest |T| is rounding of the fp32 vectors: the Krylov space is
exhausted. Relative, since no absolute bound fits Hessians from 1e-8 to 1e8."""

Progress = Callable[["LanczosState"], None]


class LanczosState:
    """A run as it grows; `run()` freezes it.

    Args:
        operator: Symmetric operator.
        start: Unit start vector, `(n_local,)` fp32.
        num_matvecs: Steps m wanted; at most the dimension of the space are made.
        fresh: `fresh(k)` gives the k-th unit random vector with which to go on when the Krylov
            space is exhausted (repeated eigenvalues, low rank).
    """

    def __init__(
        self,
        operator: LinearOperator,
        start: Tensor,
        num_matvecs: int,
        fresh: Callable[[int], Tensor],
    ) -> None:
        self.operator, self.space, self.fresh = operator, operator.space, fresh
        self.num_matvecs = min(num_matvecs, self.space.n)
        if self.num_matvecs < 1:
            raise NumericsError(f"num_matvecs must be at least 1, got {num_matvecs}")
        self.basis = self.space.basis(self.num_matvecs)
        self.basis[0].copy_(start)
        self.alphas: list[float] = []
        self.betas: list[float] = []
        self.diagnostics: list[tuple[float, ...]] = []
        self.projected = np.zeros((self.num_matvecs, self.num_matvecs))
        self.restarts = 0
        self.all_reduces = 0

    @property
    def steps(self) -> int:
        """Products made so far."""
        return len(self.alphas)

    @property
    def done(self) -> bool:
        """All steps made."""
        return self.steps == self.num_matvecs

    def step(self) -> None:
        """One product, one new basis vector. Collective."""
        j = self.steps
        product = self.operator.matvec(self.basis[j])
        before = self.space.all_reduces
        w, basis = product.vector, self.basis[: j + 1]
        c = self.space.reduce(ops.project(basis, w, self.space.n_owned))[:-1]
        self.projected[: j + 1, j] = c
        self.alphas.append(float(c[j]))
        again = self.space.reduce(
            ops.subtract_project(basis, w, c.to(w.device), self.space.n_owned)
        )[:-1]
        square = self.space.reduce(ops.subtract(basis, w, again.to(w.device), self.space.n_owned))
        beta = math.sqrt(float(square[0]))
        self.diagnostics.append(_figures(product))
        self._append(w, beta)
        self.all_reduces += self.space.all_reduces - before

    def _append(self, w: Tensor, beta: float) -> None:
        scale = max(map(abs, (*self.alphas, *self.betas, beta)))
        if beta > BREAKDOWN * scale:
            self.betas.append(beta)
        else:  # an invariant subspace: go on in its complement
            self.betas.append(0.0)
            if not self.done:
                w, beta = self._fresh_direction()
        if not self.done:
            ops.normalize_store(w, 1 / beta, self.basis[self.steps], None, self.space.n_owned)

    def _fresh_direction(self) -> tuple[Tensor, float]:
        """A random vector orthogonal to the basis, and its length."""
        self.restarts += 1
        basis = self.basis[: self.steps]
        w = self.fresh(self.restarts)
        for _ in range(2):
            c = self.space.reduce(ops.project(basis, w, self.space.n_owned))[:-1]
            square = self.space.reduce(ops.subtract(basis, w, c.to(w.device), self.space.n_owned))
        return w, math.sqrt(float(square[0]))

    def run(self) -> LanczosRun:
        """The record of the steps made so far."""
        k = self.steps
        a = self.projected[:k, :k]
        # Column j holds q_i'(H q_j) for i <= j; what Lanczos sets to zero, or takes from betas,
        # is the mirror image. The difference is what the products' errors broke.
        mirror = np.triu(a, 1) - np.diag(self.betas[: k - 1], 1)
        figures = np.array(self.diagnostics).T
        return LanczosRun(
            alphas=np.array(self.alphas),
            betas=np.array(self.betas),
            product_errors=figures[0],
            displacements=figures[1],
            nonlinearities=figures[2],
            fidelities=figures[3],
            trials=figures[4],
            asymmetry=float(np.abs(mirror).max(initial=0.0)),
            all_reduces=self.all_reduces,
        )


def _figures(product: Product) -> tuple[float, ...]:
    """What is kept of a product: its vector becomes the next basis vector."""
    return (
        (product.error or 0.0) * product.norm,
        product.displacement,
        math.nan if product.nonlinearity is None else product.nonlinearity,
        product.fidelity,
        float(product.trials),
    )


def lanczos(
    operator: LinearOperator,
    start: Tensor,
    num_matvecs: int,
    fresh: Callable[[int], Tensor],
    progress: Progress | None = None,
) -> LanczosRun:
    """Run `num_matvecs` steps of Lanczos.

    Args:
        operator: Symmetric operator.
        start: Unit start vector, `(n_local,)` fp32.
        num_matvecs: Steps wanted.
        fresh: See `LanczosState`.
        progress: Called after each step, on every rank.

    Raises:
        NumericsError: a product is not finite.

    Collective.
    """
    state = LanczosState(operator, start, num_matvecs, fresh)
    while not state.done:
        state.step()
        if progress is not None:
            progress(state)
    return state.run()


def top_vector(state: LanczosState) -> Tensor:
    """The unit Ritz vector of the largest Ritz value, `(n_local,)` fp32.

    Cost: one read of the basis, one all-reduce.
    """
    from scipy.linalg import eigh_tridiagonal

    k = state.steps
    _, vectors = eigh_tridiagonal(np.array(state.alphas), np.array(state.betas[: k - 1]))
    out = state.space.zeros().unsqueeze(0)
    coefficients = torch.from_numpy(vectors[:, -1:].T.copy()).to(out.device)
    ops.combine(state.basis[:k], coefficients, out)
    return out[0] / state.space.norm(out[0])
