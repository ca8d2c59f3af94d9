"""A curvature of one weight matrix in a Kronecker eigenbasis.

    K  =  (U_B (x) U_A) diag(values) (U_B (x) U_A)'     K X  =  U_B (values * (U_B' X U_A)) U_A'

for a weight and vectors `X` of shape `(m, n)`: K-FAC and Shampoo, whose values are outer products
of the factors' eigenvalues; EK-FAC, whose values are free; and a diagonal, whose bases are
identities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Eigenform:
    """A symmetric positive semidefinite matrix of order m n.

    Attributes:
        values: `(m, n)` eigenvalues.
        left: `(m, m)` eigenvectors of the output side, in columns; None for the identity.
        right: `(n, n)` those of the input side.
    """

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

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

    @property
    def norm(self) -> float:
        """The Frobenius norm."""
        return float(self.values.norm())

    @property
    def mean(self) -> float:
        """The mean eigenvalue."""
        return float(self.values.mean())
