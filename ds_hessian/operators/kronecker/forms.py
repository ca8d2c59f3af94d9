"""A curvature of one weight matrix in a Kronecker eigenbasis.

    K  =  (U_B (x) U_A) diag(values) (U_B (x) U_A)'     K X  =  U_B (values * (U_B' X U_A)) U_A'

for a weight and vectors `X` of shape `(m, n)`: K-FAC and Shampoo, whose values are outer products
of the factors' eigenvalues; EK-FAC, whose values are free; and a diagonal, whose bases are
identities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_hessian.operators.displacement.trials import ROUNDOFF

TIED = 8
"""Eigenvalues that are no more roundings than this apart are equal as far as is known."""


@dataclass(frozen=True)
class Eigenform:
    """A symmetric positive semidefinite matrix of order m n.

    Attributes:
        values: `(m, n)` eigenvalues.
        left: `(m, m)` eigenvectors of the output side, in columns; None for the identity.
        right: `(n, n)` those of the input side.
        rounding: Error of its eigenvalues by rounding, in units of the largest one: that of fp32
            sums, of which factors are.
    """

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    rounding: float = ROUNDOFF

    @classmethod
    def of_factors(cls, left: Tensor, right: Tensor, scale: float = 1.0) -> Eigenform:
        """Return `scale * left (x) right` of two symmetric factors, of which the lower triangles
        are read, decomposed in fp64.
        """
        (b, left_vectors), (a, right_vectors) = (
            torch.linalg.eigh(factor.double()) for factor in (left, right)
        )
        values = scale * torch.outer(b.clamp_min(0), a.clamp_min(0))
        return cls(values, left_vectors, right_vectors)

    def rotated(self, x: Tensor) -> Tensor:
        """Return `X (..., m, n)` in the eigenbasis."""
        x = x if self.left is None else self.left.T @ x
        return x if self.right is None else x @ self.right

    def back(self, x: Tensor) -> Tensor:
        """Return `X (..., m, n)` of the eigenbasis in the parameters' basis."""
        x = x if self.left is None else self.left @ x
        return x if self.right is None else x @ self.right.T

    def apply(self, x: Tensor, function: Callable[[Tensor], Tensor] = lambda v: v) -> Tensor:
        """Return `f(K) X`, with `f` applied to the eigenvalues."""
        return self.back(function(self.values) * self.rotated(x))

    def turned(self, generator: torch.Generator) -> Eigenform | None:
        """Return the same matrix in other eigenvectors, drawn from those of eigenvalues that are
        equal to rounding; None where it has no others.

        Of fewer samples than dimensions a factor has a null space, in which any basis is one of
        eigenvectors, and the one that was found is that of the rounding.
        """
        limit = TIED * self.rounding * float(self.values.abs().max())
        left = _turned(self.left, self.values, limit, generator)
        right = _turned(self.right, self.values.T, limit, generator)
        if left is self.left and right is self.right:
            return None
        return replace(self, left=left, right=right)

    @property
    def norm(self) -> float:
        """The Frobenius norm."""
        return float(self.values.norm())

    @property
    def mean(self) -> float:
        """The mean eigenvalue."""
        return float(self.values.mean())


def _turned(
    vectors: Tensor | None, values: Tensor, limit: float, generator: torch.Generator
) -> Tensor | None:
    """Return eigenvectors `(k, k)`, rotated at random among neighbours whose rows of `values` are
    within a limit of each other; the same object where there are none.
    """
    if vectors is None:
        return None
    apart = (values[1:] - values[:-1]).abs().amax(1) > limit
    ends = [0, *(1 + apart.nonzero()[:, 0]).tolist(), len(values)]
    turned = vectors
    for first, end in zip(ends[:-1], ends[1:], strict=True):
        if end - first > 1:
            turned = vectors.clone() if turned is vectors else turned
            random = torch.randn(end - first, end - first, generator=generator).to(vectors)
            turned[:, first:end] = vectors[:, first:end] @ torch.linalg.qr(random)[0]
    return turned
