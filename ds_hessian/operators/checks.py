"""What every curvature requires of its vectors and of the gradient at the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.errors import NumericsError
from ds_hessian.operators.displacement.figures import tangent
from ds_hessian.operators.protocol import Product
from ds_hessian.vectors import VectorSpace


def length_of(v: Tensor, space: VectorSpace) -> float:
    """Return `|v|` of a vector `(n_local,)` of which a product can be taken.

    Raises:
        NumericsError: v is zero or not finite.

    Collective: one small all-reduce.
    """
    length = space.norm(v)
    if not (math.isfinite(length) and length > 0):
        raise NumericsError(f"a product needs a finite vector other than zero; |v| = {length}")
    return length


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


def require_step(product: Product) -> Product:
    """Return a product, unless it is zero because its step was lost: then nothing tells its error.

    Raises:
        NumericsError: the step was lost in the rounding of the weights.
    """
    if product.norm == 0 and tangent(product.fidelity) >= 1:
        raise NumericsError(
            f"a step of the displacement {product.displacement:.3e} is lost in the rounding of the "
            'weights, which leaves no product; use a larger displacement, or "auto"'
        )
    return product
