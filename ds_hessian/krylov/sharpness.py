"""Top eigenvalues of H and of D^-1/2 H D^-1/2 from one small subspace, for use during training.

Both are Rayleigh-Ritz problems on the same vectors V and their products H V:

    H x = theta x            V'HV c = theta V'V c
    H x = theta D x          V'HV c = theta V'DV c

so that a product serves both, and other curvatures as well (along the gradient, or along an
optimizer's step). The vectors are the last measurement's x of both problems, those other
directions, and preconditioned residuals `D^-1 (H x - theta D x)` of the problem that has converged
less.

Cost: one product a vector and three small all-reduces for each Rayleigh-Ritz problem; memory: two
vectors for each product.

Source: Knyazev, SIAM J. Sci. Comput. 23 (2001) (LOBPCG's subspace); error bars: Parlett, The
Symmetric Eigenvalue Problem, theorem 4.5.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.krylov.records import COVERAGE, ROUNDOFF, Array
from ds_hessian.operators import LinearOperator

DEPENDENT = 1e-4
"""Vectors of which so little is left beside the others are left out: coefficients stay below the
inverse root, and so does what they make of the products' errors."""


@dataclass(frozen=True)
class RitzPair:
    """The largest Ritz value of `D^-1/2 H D^-1/2` (of H, without D) in a subspace.

    Attributes:
        value: In units of H over D.
        error: Bound on the distance to the nearest eigenvalue: the residual, and three times the
            errors of the products in it, added in squares.
        residual: `|D^-1/2 (H x - value D x)|`.
        product_error: The estimated part of the products' errors in it.
        x: `(n_local,)` with `x'Dx = 1`; the eigenvector is `D^1/2 x`.
        direction: `(n_local,)` `D^-1 (H x - value D x)`, in which to extend the subspace.
    """

    value: float
    error: float
    residual: float
    product_error: float
    x: Tensor
    direction: Tensor

    def converged(self, tolerance: float) -> bool:
        """Return whether the residual is within the relative tolerance."""
        return self.residual <= tolerance * abs(self.value)

    def limited(self, tolerance: float) -> bool:
        """Return whether the residual exceeds it, but is as small as the products' errors allow."""
        small = self.residual <= COVERAGE * self.product_error
        return small and not self.converged(tolerance)


class Subspace:
    """Unit vectors and their products.

    Args:
        operator: Symmetric operator H.
    """

    def __init__(self, operator: LinearOperator) -> None:
        self.operator, self.space = operator, operator.space
        self.vectors, self.products = list[Tensor](), list[Tensor]()
        self.errors = list[float]()

    def __len__(self) -> int:
        return len(self.vectors)

    def add(self, v: Tensor) -> tuple[float, float]:
        """Multiply a vector other than zero; returns the curvature `v'Hv / v'v` and its error.

        Collective.
        """
        unit = v / self.space.norm(v)
        product = self.operator.matvec(unit)
        self.vectors.append(unit)
        self.products.append(product.vector)
        self.errors.append(max(product.error or 0.0, ROUNDOFF))
        return self.space.dot(unit, product.vector), COVERAGE * self.errors[-1] * product.norm

    def top(self, metric: Tensor | None = None) -> RitzPair:
        """Return the largest Ritz value, for the diagonal D `(n_local,)` or without. Collective."""
        gram = self._matrix(self.vectors, self.vectors, metric)
        inner = self._matrix(self.vectors, self.products)
        value, c = _largest((inner + inner.T) / 2, gram)
        x, r = self._combine(c, self.vectors), self._combine(c, self.products)
        r.sub_(x if metric is None else x * metric, alpha=value)
        vectors = [*self.products, r]
        *lengths, square = np.sqrt(self._squares(vectors, metric))
        product_error = math.sqrt(float(np.sum((c * self.errors * lengths) ** 2)))
        return RitzPair(
            value=value,
            error=math.hypot(float(square), COVERAGE * product_error),
            residual=float(square),
            product_error=product_error,
            x=x,
            direction=r if metric is None else r.div_(metric),
        )

    def _combine(self, c: Array, vectors: Sequence[Tensor]) -> Tensor:
        out = self.space.zeros()
        for a, v in zip(c.tolist(), vectors, strict=True):
            out.add_(v, alpha=a)
        return out

    # One scaled copy of a vector at a time.

    def _matrix(
        self, left: Sequence[Tensor], right: Sequence[Tensor], metric: Tensor | None = None
    ) -> Array:
        rows = [self._dots(a if metric is None else a * metric, right) for a in left]
        return np.asarray(self.space.reduce(torch.cat(rows)).numpy().reshape(len(rows), -1))

    def _squares(self, vectors: Sequence[Tensor], metric: Tensor | None) -> Array:
        """Return `w' D^-1 w` of each."""
        partials = [self._dots(w if metric is None else w / metric, [w]) for w in vectors]
        return np.asarray(self.space.reduce(torch.cat(partials)).numpy())

    def _dots(self, a: Tensor, others: Sequence[Tensor]) -> Tensor:
        return ops.dots([(a, b) for b in others], self.space.n_owned)


def _largest(inner: Array, gram: Array) -> tuple[float, Array]:
    """Return the largest theta with `inner c = theta gram c`, and c, where gram may be nearly
    singular.
    """
    scale = 1 / np.sqrt(np.diag(gram))
    sizes, q = np.linalg.eigh(gram * np.outer(scale, scale))
    kept = sizes > DEPENDENT * sizes[-1]
    basis = scale[:, None] * q[:, kept] / np.sqrt(sizes[kept])
    values, vectors = np.linalg.eigh(basis.T @ inner @ basis)
    return float(values[-1]), basis @ vectors[:, -1]


def refine(
    subspace: Subspace, metrics: Sequence[Tensor | None], tolerance: float, max_matvecs: int
) -> list[RitzPair]:
    """Return top pairs for each metric D; extends the subspace until they converge, or to
    `max_matvecs`.

    Collective.
    """
    while True:
        pairs = [subspace.top(metric) for metric in metrics]
        worst = max(pairs, key=lambda pair: pair.residual / max(abs(pair.value), 1e-300))
        enough = worst.converged(tolerance) or worst.limited(tolerance)
        if enough or len(subspace) >= max_matvecs:
            return pairs
        if not torch.isfinite(worst.direction).all() or worst.residual == 0:
            return pairs
        direction = worst.direction
        del pairs, worst  # their memory, before the product
        subspace.add(direction)
        del direction
