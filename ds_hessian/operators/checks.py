"""What every curvature requires of its vectors and of the gradient at the weights."""

from __future__ import annotations

import math

from torch import Tensor

from ds_hessian.errors import NumericsError
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
