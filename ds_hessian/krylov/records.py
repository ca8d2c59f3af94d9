"""The results of a Lanczos run: small fp64 arrays, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hessian.operators.protocol import COVERAGE as COVERAGE

Array = NDArray[np.float64]

ROUNDOFF = 2.0**-24
"""Unit roundoff of the fp32 vectors."""

PRODUCT_ROUNDING = 32 * ROUNDOFF
"""Asymmetry of exact products, in units of the largest |T|: inner products of rounded vectors."""


@dataclass(frozen=True)
class LanczosRun:
    """`m` steps of Lanczos from one start vector.

    Attributes:
        alphas: `(m,)` diagonal of the tridiagonal T, in Hessian entries (loss per parameter^2).
        betas: `(m,)` off-diagonal; `betas[j]` couples steps j and j+1, the last is the residual's.
            A zero marks a restart: the Krylov space of what came before was exhausted.
        product_errors: `(m,)` estimated absolute error `|H v_j - product_j|`, at least the
            asymmetry that estimates do not explain; 0 where unknown.
        displacements: `(m,)` h of each product.
        nonlinearities: `(m,)` nonlinearity ratio of each product; NaN where not measured.
        fidelities: `(m,)` cosine of realised displacement and v.
        trials: `(m,)` pilot evaluations thrown away.
        rounding_errors: `(m,)` norm of what rounding of the basis and of the recurrence adds to
            each column of `H Q - Q T`.
        asymmetry: `max |A - A'|` of the projected matrix `A = Q' H Q`, which exact products make
            zero (its entries below the first superdiagonal come for free).
        all_reduces: All-reduces made by Lanczos itself (not by the products).
    """

    alphas: Array
    betas: Array
    product_errors: Array
    displacements: Array
    nonlinearities: Array
    fidelities: Array
    trials: Array
    rounding_errors: Array
    asymmetry: float
    all_reduces: int

    @property
    def num_matvecs(self) -> int:
        """The number of products m."""
        return len(self.alphas)


@dataclass(frozen=True)
class RitzDecomposition:
    """The eigenvalues of T and what they say of the operator.

    Attributes:
        values: `(m,)` Ritz values, ascending.
        weights: `(m,)` squared first components of T's eigenvectors: quadrature weights, sum 1.
        errors: `(m,)` a bound on the distance to the nearest eigenvalue: the residual norm of the
            Ritz pair: `|beta_m s_m|` and `inexact`, in quadrature.
        inexact: `(m,)` the part of it that errors of products and rounding make, `COVERAGE` times.
    """

    values: Array
    weights: Array
    errors: Array
    inexact: Array


def ritz(run: LanczosRun) -> RitzDecomposition:
    """Decompose the run's tridiagonal (`scipy.linalg.eigh_tridiagonal`, fp64).

    The residual of the pair (theta_i, Q s_i) is `beta_m s_mi q_{m+1} - F s_i`, where column j of F
    is the error of product j and of rounding; with independent errors its norm is the root of the
    sum of squares (Parlett, The Symmetric Eigenvalue Problem, 13.2). The estimates of the products'
    errors are themselves 0.3 - 3 times the truth (docs/numerics.md), hence `COVERAGE` of them.
    """
    from scipy.linalg import eigh_tridiagonal

    values, vectors = eigh_tridiagonal(run.alphas, run.betas[:-1])
    residual = abs(run.betas[-1] * vectors[-1])
    errors = COVERAGE * np.hypot(run.product_errors, run.rounding_errors)
    inexact = np.sqrt(errors**2 @ vectors**2)
    return RitzDecomposition(values, vectors[0] ** 2, np.hypot(residual, inexact), inexact)
