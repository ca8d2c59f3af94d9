"""Operators that wrap another one."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ds_hessian.operators.protocol import LinearOperator, Product


class Congruent:
    """S (H + shift I) S with a diagonal S: a preconditioned Hessian.

    The eigenvalues of `D^-1/2 H D^-1/2`, with D the diagonal by which Adam divides, are the
    curvatures that Adam's steps see.

    Args:
        operator: The operator H.
        scale: The diagonal of S, `(n_local,)` fp32.
        shift: The shift of H, in its units.

    One product of H and one small all-reduce a product.
    """

    def __init__(self, operator: LinearOperator, scale: Tensor, shift: float = 0.0) -> None:
        self.operator, self.scale, self.shift = operator, scale, shift
        self.space = operator.space

    def matvec(self, v: Tensor) -> Product:
        """Return the product with `v` `(n_local,)`. The relative error is that of the product of H,
        whose error is assumed to be scaled by S like the product.
        """
        inner = v * self.scale
        product = self.operator.matvec(inner)
        w = product.vector.add_(inner, alpha=self.shift).mul_(self.scale)
        squares = self.space.dots([(w, w), (v, v)]).tolist()
        return replace(product, vector=w, norm=(squares[0] / squares[1]) ** 0.5)
