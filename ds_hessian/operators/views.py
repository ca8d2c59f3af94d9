"""Operators that wrap another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.backends.restricted import Restricted
from ds_hessian.operators.protocol import (
    Curvature,
    Form,
    LinearOperator,
    OperatorCost,
    Product,
    Watched,
)

Scale = Tensor | Callable[[Tensor], Tensor]
"""A symmetric matrix S: its diagonal `(n_local,)` fp32, or a function of vectors."""


class Metric(Protocol):
    """A positive matrix D, known by the inverse roots of its shifts.

    Attributes:
        least: The smallest eigenvalue of D, on all ranks.
    """

    least: float

    def inverse_root(self, shift: float) -> Scale:
        """Return (D + shift)^-1/2. Collective."""
        ...


def scaled(v: Tensor, scale: Scale) -> Tensor:
    """Return S v, a new vector."""
    return v * scale if isinstance(scale, Tensor) else scale(v)


def scaled_in_place(v: Tensor, scale: Scale) -> Tensor:
    """Return S v, in the memory of v where S is a diagonal."""
    return v.mul_(scale) if isinstance(scale, Tensor) else scale(v)


class Congruent:
    """S (H + shift I) S: a preconditioned Hessian.

    The eigenvalues of `D^-1/2 H D^-1/2`, with D the diagonal by which Adam divides, are the
    curvatures that Adam's steps see.

    Args:
        operator: The operator H.
        scale: S.
        shift: The shift of H, in its units.

    One product of H and one small all-reduce a product, two with a shift.
    """

    def __init__(self, operator: LinearOperator, scale: Scale, shift: float = 0.0) -> None:
        self.operator, self.scale, self.shift = operator, scale, shift
        self.space = operator.space

    def matvec(self, v: Tensor) -> Product:
        """Return the product with `v` `(n_local,)`. The error is that of the product of H, which is
        assumed to be scaled by S like `(H + shift I) S v`.
        """
        inner = scaled(v, self.scale)
        product = self.operator.matvec(inner)
        w, error = product.vector.add_(inner, alpha=self.shift), product.error
        if self.shift and error is not None:  # of the sum, which may be far shorter
            plain, length = self.space.dots([(w, w), (inner, inner)]).tolist()
            error *= product.norm * (length / plain) ** 0.5 if plain > 0 else 1.0
        w = scaled_in_place(w, self.scale)
        squares = self.space.dots([(w, w), (v, v)]).tolist()
        return replace(product, vector=w, norm=(squares[0] / squares[1]) ** 0.5, error=error)

    def contradicted(self) -> None:
        """Tell the operator. Collective."""
        if isinstance(self.operator, Watched):
            self.operator.contradicted()


class Embedded:
    """P H P on the vectors of the whole job, from the curvature of a restriction: a `Curvature`.

    P selects the coordinates of the chosen parameters; products are zero outside of them.

    Args:
        inner: The curvature of the restricted job.
        restricted: The restriction.

    One product of the restriction and one small all-reduce a product.
    """

    def __init__(self, inner: Curvature, restricted: Restricted) -> None:
        self.inner, self.restricted = inner, restricted
        self.space, self.scale = restricted.whole.space, inner.scale

    @property
    def session(self) -> Session:
        """The measurement of the restricted job."""
        return self.inner.session

    @property
    def gradient(self) -> Tensor:
        """The gradient, divided by `scale`, zero outside of the chosen parameters."""
        return self.restricted.embed(self.inner.gradient)

    @property
    def cost(self) -> OperatorCost:
        """The cost of the products so far."""
        return self.inner.cost

    @property
    def outputs(self) -> str | None:
        """The outputs on which the curvature depends."""
        return self.inner.outputs

    @property
    def outputs_read(self) -> tuple[int, bool]:
        """The size of these, and whether the loss in them is known."""
        return self.inner.outputs_read

    @property
    def gradient_norm(self) -> float:
        """The norm of the chosen part of the gradient. Collective."""
        return self.inner.gradient_norm

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the restricted curvature."""
        return self.inner.state_dict()

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from the state of another one."""
        self.inner.load_state_dict(figures)

    def product_at(self, v: Tensor, h: float) -> Product:
        """Return the product with P v at displacement h, without estimates of its error."""
        return self._embedded(v, self.inner.product_at(self.restricted.select(v), h))

    def forms(self, v: Tensor, h: float, micro_batches: range | None = None) -> NDArray[np.float64]:
        """Return `v'P H_i P v / v'v` for micro-batch i of all ranks, `(G,)`."""
        inside = self.restricted.select(v)
        found = self.inner.forms(inside, h, micro_batches)
        return np.asarray(found * self._part(inside, v))

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v`, of which only P v is curved."""
        inside = self.restricted.select(v)
        form, part = self.inner.along(inside), self._part(inside, v)
        return replace(form, value=form.value * part, error=form.error * part)

    def _part(self, inside: Tensor, v: Tensor) -> float:
        """Return `|P v|^2 / |v|^2`."""
        return (self.restricted.space.norm(inside) / self.space.norm(v)) ** 2

    def matvec(self, v: Tensor) -> Product:
        """Return `P H P v` for `v` `(n_local,)` of the whole job.

        Raises:
            NumericsError: P v is zero.
        """
        return self._embedded(v, self.inner.matvec(self.restricted.select(v)))

    def contradicted(self) -> None:
        """Tell the curvature of the restriction. Collective."""
        if isinstance(self.inner, Watched):
            self.inner.contradicted()

    def _embedded(self, v: Tensor, product: Product) -> Product:
        w = self.restricted.embed(product.vector)
        squares = self.space.dots([(w, w), (v, v)]).tolist()
        return replace(product, vector=w, norm=(squares[0] / squares[1]) ** 0.5)
