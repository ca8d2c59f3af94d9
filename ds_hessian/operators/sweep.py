"""Curvature against scale: one direction, products at many displacements.

The difference of gradients over a finite h is an average of the Hessian along the path,

    v' (g(w + h v) - g(w - h v)) / 2h  =  1/2h  integral of v' H(w + t v) v  over t in [-h, h],

so that v'Hv as a function of h is a measurement of the loss surface at scale h, between the noise
at small h and where the loss ceases to be defined. Cost: one product for each displacement (with
central differences two gradients); one vector more than the operator's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ds_hessian.backends.protocol import Session
from ds_hessian.operators.protocol import Curvature


@dataclass(frozen=True)
class SweepPoint:
    """The product at one displacement along a unit vector.

    Attributes:
        curvature: `v'Hv`, in loss per squared parameter.
        norm: `|Hv|`.
        change: `|Hv - Hv'|` from the next smaller displacement; NaN for the smallest.
        nonlinearity: The nonlinearity ratio of `Product`; NaN where not measured.
        fidelity: The fidelity of `Product`.
    """

    curvature: float
    norm: float
    change: float
    nonlinearity: float
    fidelity: float


def default_range(session: Session) -> list[float]:
    """Return three displacements in each decade, from rounding noise to |w|. Collective.

    u^(1/3) |w| is about the best one (the paper's remark 3.2), u^(2/3) |w| then deep in the noise.
    """
    lowest = math.log10(session.unit_roundoff ** (2 / 3) / 10)
    count = math.ceil(-3 * lowest)
    norm = session.weight_norm() or 1.0
    return [norm * 10 ** (lowest * i / count) for i in range(count, -1, -1)]


def sweep(operator: Curvature, v: Tensor, displacements: Sequence[float]) -> list[SweepPoint]:
    """Take products with `v` `(n_local,)` at ascending displacements.

    Raises:
        NumericsError: v is zero or not finite, or a product is not finite.

    Collective.
    """
    space, length = operator.space, operator.space.norm(v)
    points, last = list[SweepPoint](), None
    for h in displacements:
        product = operator.product_at(v, h)
        current = product.vector
        pairs = [(v, current)] if last is None else [(v, current), (current.sub(last),) * 2]
        along, *square = space.dots(pairs).tolist()
        points.append(
            SweepPoint(
                curvature=along / length**2,
                norm=product.norm,
                change=math.sqrt(square[0]) / length if square else math.nan,
                nonlinearity=math.nan if product.nonlinearity is None else product.nonlinearity,
                fidelity=product.fidelity,
            )
        )
        last = current
    return points
