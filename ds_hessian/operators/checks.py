"""What every curvature requires of its vectors and of the gradient at the weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import NumericsError
from ds_hessian.operators.displacement.figures import quotient, tangent
from ds_hessian.operators.protocol import Product
from ds_hessian.vectors import VectorSpace

USUAL = 2.0**100
"""Lengths up to here, and down to its inverse: steps of 1e-6 to 1e6 along such a vector are, in its
units, normal numbers of fp32."""


def measurable(v: Tensor, space: VectorSpace) -> tuple[Tensor, float, float]:
    """Return a vector `(n_local,)` of which a product can be taken as `unit u`: u, `|u|`, unit.

    It is v itself, with a unit of 1, unless v is so long or short that fp32 has no steps along it;
    then the unit is a power of 2, and u a copy, of a length from 1 to 4.

    Raises:
        NumericsError: v is zero or not finite.

    Collective: one small all-reduce, two for such a vector.
    """
    length = space.norm(v)
    if not (math.isfinite(length) and length > 0):
        raise NumericsError(f"a product needs a finite vector other than zero; |v| = {length}")
    if 1 / USUAL <= length <= USUAL:
        return v, length, 1.0
    root = 2.0 ** math.floor(math.log2(length) / 2)  # fp32 has it, and its inverse
    scaled = (v / root).div_(root)
    return scaled, space.norm(scaled), root * root


def in_units(product: Product, unit: float, space: VectorSpace) -> Product:
    """Return the product of a `measurable` vector as that of the vector of which it was made.

    Its error has what fp32 cannot hold of it near the ends of its range.

    Raises:
        NumericsError: it is beyond them.

    Collective: one small all-reduce where the unit is not 1.
    """
    if unit == 1:
        return product
    root = math.sqrt(unit)
    vector = (product.vector * root).mul_(root)
    lost = (vector / root).div_(root).sub_(product.vector)
    squares = space.dots([(lost, lost), (product.vector, product.vector)]).tolist()
    if not math.isfinite(squares[0]):
        raise NumericsError(
            f"the product of a vector of length {unit:.0e} is beyond the numbers of fp32: divide "
            "the vector by its length"
        )
    error = (product.error or 0.0) + quotient(math.sqrt(squares[0]), math.sqrt(squares[1]))
    return replace(product, vector=vector, error=error)


def kinks_crossed(session: Session) -> str | None:
    """Return why displacements cross kinks of the loss; None if there are none near the weights on
    any rank, or all of them are held.

    Where the sides of kinks are too many for the memory of some rank, all ranks cross them: one
    layer of the model may be on several.

    Args:
        session: A measurement of which all micro-batches have been evaluated at the weights.

    Returns:
        The reason in words; empty where the settings say so.

    Collective: one small all-reduce.
    """
    kinks = session.kinks
    mine = torch.tensor([not kinks.smooth, kinks.over], dtype=torch.float64)
    rough, over = session.space.reduce(mine).tolist()
    if over:
        kinks.release()
        return "their sides would take more than a quarter of some rank's free memory"
    if not rough:
        return None
    return "some are of functions that cannot be held" if kinks.holds else ""


def require_finite(gradient: Tensor, space: VectorSpace) -> None:
    """Raise if the gradient at the weights `(n_local,)` is not finite.

    Raises:
        NumericsError: there is no curvature.

    Collective: one small all-reduce.
    """
    if not math.isfinite(space.norm(gradient)):
        raise NumericsError(
            "the gradient at the current weights is not finite, so there is no curvature: look at "
            "the loss on these micro-batches"
        )


def is_lost(size: float, fidelity: float, h: float, rounding: float) -> bool:
    """Return whether a product of this length may be zero because its step was lost: of the weights
    as they are, or of what passes make of them, which autocast rounds.

    Args:
        size: The length.
        fidelity: Cosine between the realised displacement and v.
        h: The displacement.
        rounding: The length of all weights' rounding in the passes.
    """
    return size == 0 and (tangent(fidelity) >= 1 or h < rounding)


def require_step(product: Product, rounding: float) -> None:
    """Raise if a product may be zero because its step was lost: then nothing tells its error.

    Args:
        product: The product.
        rounding: As `is_lost` has it where the displacement was given; 0 where it was searched, and
            longer ones were tried.

    Raises:
        NumericsError: the step was lost in the rounding of the weights.
    """
    if is_lost(product.norm, product.fidelity, product.displacement, rounding):
        raise NumericsError(
            f"a step of the displacement {product.displacement:.3e} is lost in the rounding of the "
            'weights, which leaves no product; use a larger displacement, or "auto"'
        )
