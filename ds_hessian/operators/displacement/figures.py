"""Figures of trials and products from sums over coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hessian import ops


def removed_square(inner: Tensor, outer: Sequence[Tensor], weight: float, owned: int) -> Tensor:
    """Return this rank's part of the square of what extrapolation takes from the inner difference.

    Args:
        inner: The inner difference, times its weight.
        outer: The outer one, times its own; none with formulas that do not extrapolate.
        weight: The weight of the inner difference.
        owned: Coordinates that this rank owns.
    """
    if not outer:
        return torch.zeros(1, dtype=torch.float64, device=inner.device)
    (other,), share = outer, 1 / weight - 1
    ii, io, oo = ops.dots([(inner, inner), (inner, other), (other, other)], owned)
    return (share**2 * ii - 2 * share * io + oo).reshape(1)


def distance(a: float, b: float, dot: float) -> float:
    """Return `|x - y|` from norms and inner product (in fp64: exact to 1e-8 of the norms)."""
    square = a * a + b * b - 2 * dot
    return math.sqrt(max(square, 0.0)) if math.isfinite(square) else math.inf


def tangent(cosine: float) -> float:
    """Return the tangent of the angle with that cosine, at most 1 (a step of rounding alone)."""
    sine = math.sqrt(max(1 - cosine**2, 0.0))
    return 1.0 if cosine <= sine else sine / cosine


def quotient(a: float, b: float, nothing: float = math.inf) -> float:
    """Return a / b; where b is 0, 0 if a is 0 too, and `nothing` if it is not."""
    if b > 0:
        return a / b
    return 0.0 if a == b == 0 else nothing
