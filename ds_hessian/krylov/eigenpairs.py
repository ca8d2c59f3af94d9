"""Extreme eigenpairs by thick-restart Lanczos, with true residuals.

Cost: products until the residuals are small enough, and one more for each reported pair;
`basis_size` vectors for the basis, then k for the eigenvectors (`ds_hessian.planning`).

Source: Wu, Simon, SIAM J. Matrix Anal. 22 (2000); error bars: Parlett, The Symmetric Eigenvalue
Problem, theorem 4.5.1: an eigenvalue lies within |H y - theta y| of theta, for any unit y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.errors import NumericsError
from ds_hessian.krylov.basis import Storage
from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, Progress, absolute_error
from ds_hessian.krylov.records import COVERAGE, Array
from ds_hessian.operators import LinearOperator

Which = Literal["LM", "LA", "SA"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Eigenpairs:
    """k eigenpairs, the wanted end of the spectrum first.

    Attributes:
        values: `(k,)` Rayleigh quotients of the vectors, in loss per squared parameter.
        errors: `(k,)` bound on the distance to the nearest eigenvalue: the true residual, and three
            times the error of the product by which it was measured, added in squares.
        residuals: `(k,)` |H y - theta y|, measured with one product each.
        product_errors: `(k,)` estimated absolute error of those products.
        displacements: `(k,)` h of those products.
        converged: `(k,)` whether the residual is within the tolerance.
        limited: `(k,)` whether it is not, but as small as the products' errors let it be: more
            products bring nothing, more exact ones do. Empty in records of versions without it.
        participation: `(k,)` inverse participation ratio of each vector, `sum v_i^4` of the unit
            vector: 1 for a single parameter, 1 / n for a vector spread evenly over n, 3 / n for a
            random (Gaussian) one. Empty in records of versions without it.
        vectors: `(k, n_local)` fp32, this rank's part of the unit eigenvectors.
        which: `LM` largest magnitude, `LA` largest, `SA` smallest.
        num_matvecs: Products made, those for the residuals included.
        restarts: Thick restarts of the basis.
        asymmetry: Largest asymmetry seen in the projected matrix; 0 for exact products.

    An eigenvalue of multiplicity p is found up to p times, but a run can end before all copies are
    seen, since they grow from rounding; the same holds for an eigenvector that the start vector
    happens to miss.
    """

    values: Array
    errors: Array
    residuals: Array
    product_errors: Array
    displacements: Array
    converged: NDArray[np.bool_]
    vectors: Tensor
    which: Which
    num_matvecs: int
    restarts: int
    asymmetry: float
    limited: tuple[bool, ...] = ()
    participation: Array = field(default_factory=lambda: np.zeros(0))


def eigenpairs(
    operator: LinearOperator,
    start: Tensor,
    k: int,
    fresh: Callable[[int], Tensor],
    which: Which = "LM",
    tolerance: float = 1e-3,
    max_matvecs: int = 300,
    basis_size: int | None = None,
    storage: Storage | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    """Compute the k extreme eigenpairs of a symmetric operator.

    Args:
        operator: Symmetric operator.
        start: Unit start vector `(n_local,)`: random, or a guess (an earlier eigenvector).
        k: Pairs wanted; at most the dimension.
        fresh: Random unit vectors by number, for exhausted Krylov spaces.
        which: `LM` largest magnitude, `LA` largest, `SA` smallest.
        tolerance: Bound on residuals, relative to the largest Ritz value in magnitude. Below the
            products' errors iterating brings nothing, and ends.
        max_matvecs: Products to make at most, before those for the residuals.
        basis_size: Vectors kept; None for 2 k + 20.
        storage: Storage of the basis.
        progress: Called after each step, on every rank.

    Raises:
        NumericsError: k or basis_size is impossible, or a product is not finite.

    Collective.
    """
    n = operator.space.n
    if not 1 <= k <= n:
        raise NumericsError(f"k must be within 1 .. {n} (the number of parameters), got {k}")
    size = min(n, 2 * k + 20 if basis_size is None else basis_size)
    if size < min(n, k + 2):
        raise NumericsError(f"the basis must hold at least k + 2 = {k + 2} vectors, got {size}")
    options = LanczosOptions(storage=storage or Storage())
    state, restarts = LanczosState(operator, start, size, fresh, options), 0
    del start  # the basis has it
    before: Array = np.zeros(0)  # wanted values when the Krylov space was last exhausted
    while True:
        state.step()
        if progress is not None:
            progress(state)
        values, vectors = np.linalg.eigh(state.tridiagonal)
        chosen = select(values, k, which)
        limit = _limit(state, values, tolerance)
        small = bool((state.betas[-1] * abs(vectors[-1, chosen]) <= limit).all())
        settled = small and state.steps >= k
        if state.betas[-1] == 0:  # further copies of the same values may lie beside this space
            settled &= len(before) == k and bool((abs(before - values[chosen]) <= limit).all())
            before = values[chosen]
        elif len(before):
            settled = False
        if state.steps == n or state.products >= max(max_matvecs, k) or settled:
            break
        if state.done:
            state.restart(np.sort(select(values, min(size - 1, (k + size) // 2), which)))
            restarts += 1
    found = state.combine(vectors[:, chosen].T)
    products, asymmetry = state.products, state.asymmetry
    seen = state.unexplained
    del state  # the basis makes room
    return _measured(operator, found, which, tolerance, products, restarts, asymmetry, seen)


def select(values: Array, k: int, which: Which) -> NDArray[np.int64]:
    """Return the indices of the k wanted values, the most wanted first."""
    key = {"LM": -abs(values), "LA": -values, "SA": values}[which]
    return np.argsort(key, kind="stable")[:k]


def _limit(state: LanczosState, values: Array, tolerance: float) -> float:
    """Return the residual that is small enough, or as small as the products allow."""
    noise = max(figures[0] for figures in state.diagnostics)
    return max(tolerance * float(abs(values).max()), noise)


def _measured(
    operator: LinearOperator,
    found: Tensor,
    which: Which,
    tolerance: float,
    products: int,
    restarts: int,
    asymmetry: float,
    unexplained: float,
) -> Eigenpairs:
    """Measure residuals and make the record of these vectors; see `LanczosState.unexplained`."""
    figures = np.array([_rayleigh(operator, y) for y in found])
    values, residuals, errors, displacements = figures.T
    order = select(values, len(values), which)
    values, residuals, errors = values[order], residuals[order], errors[order]
    errors = np.maximum(errors, unexplained)
    converged = residuals <= tolerance * float(abs(values).max())
    limited = ~converged & (residuals <= COVERAGE * errors)
    return Eigenpairs(
        values=values,
        errors=np.hypot(residuals, COVERAGE * errors),
        residuals=residuals,
        product_errors=errors,
        displacements=displacements[order],
        converged=converged,
        limited=tuple(map(bool, limited)),
        vectors=found[order.tolist()],
        which=which,
        num_matvecs=products + len(values),
        restarts=restarts,
        asymmetry=asymmetry,
        participation=operator.space.participations(list(found))[order.tolist()].numpy(),
    )


def _rayleigh(operator: LinearOperator, y: Tensor) -> tuple[float, float, float, float]:
    """Normalise a vector; return its Rayleigh quotient, residual, product's error and h."""
    product = operator.matvec(y)
    w = product.vector
    yy, yw, ww = operator.space.dots([(y, y), (y, w), (w, w)]).tolist()
    value = yw / yy
    residual = math.sqrt(max(0.0, ww / yy - value**2))
    y.mul_(1 / math.sqrt(yy))
    return value, residual, absolute_error(product), product.displacement
