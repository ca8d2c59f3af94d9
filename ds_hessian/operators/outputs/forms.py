"""v'Gv by forwards alone, with its error: the cheapest curvature of a job.

    v'Gv  =  sum over tokens of delta' H_out delta / (2 h)^2,    delta = f(w + h v) - f(w - h v)

Two forwards over all micro-batches, two thirds of a gradient; nothing is kept for a backward. The
form is that of a square, so that rounding of the outputs enters it in second order, and the first
order of what is left falls as h^2: between the two it hardly depends on h, and the change from one
displacement to another is the error. It is measured on the first micro-batch, at a ladder of
displacements for the first vector and at one beside the best for others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ds_hessian.operators.outputs.gauss_newton import GaussNewton
from ds_hessian.operators.protocol import Curvature

STEP = 3.0
"""Ratio of the displacements that are compared."""

RUNGS = 6
"""Displacements of a first vector."""

SMALL = 1e-2
"""A later vector whose form changes by more goes down the ladder too."""


@dataclass(frozen=True)
class Form:
    """The curvature along a vector.

    Attributes:
        value: `v'Cv / v'v`, in loss per squared parameter.
        error: An estimate of its error.
        displacement: h.
    """

    value: float
    error: float
    displacement: float


class Forms:
    """Curvatures of one operator along vectors.

    Args:
        operator: A Gauss-Newton or Fisher matrix by forwards alone; another by its products.
    """

    def __init__(self, operator: Curvature) -> None:
        self.operator, self._h = operator, 0.0

    def along(self, v: Tensor) -> Form:
        """Return the curvature along `v` `(n_local,)`.

        Raises:
            NumericsError: v is zero or not finite, or the form is not finite.

        Collective.
        """
        operator = self.operator
        if isinstance(operator, GaussNewton):
            return self._by_outputs(operator, v)
        product, space = operator.matvec(v), operator.space
        dot, square = space.dots([(v, product.vector), (v, v)]).tolist()
        error = (product.error or 0.0) * product.norm
        return Form(dot / square, error, product.displacement)

    def _by_outputs(self, operator: GaussNewton, v: Tensor) -> Form:
        relative = math.inf
        if self._h:
            here, beside = (self._pilot(operator, v, self._h * r) for r in (1.0, STEP))
            # Not over STEP^2, though truncation falls so: other micro-batches may bend more.
            relative = _change(here, beside)
        if relative > SMALL:
            relative = self._descend(operator, v)
        value = float(operator.forms(v, self._h).mean())
        operator.cost.products += 1
        return Form(value, relative * abs(value), self._h)

    def _descend(self, operator: GaussNewton, v: Tensor) -> float:
        """Take the displacement where the form changes least; return the change."""
        top = STEP * operator.first_displacement
        heights = [top / STEP**k for k in range(RUNGS)]
        found = [self._pilot(operator, v, h) for h in heights]
        changes = [_change(a, b) for a, b in zip(found, found[1:], strict=False)]
        best = int(np.argmin(changes))
        self._h = heights[best]  # the noise of the lower one is larger
        # Two that agree by chance have neighbours that do not.
        near = [changes[i] for i in (best - 1, best + 1) if 0 <= i < len(changes)]
        return max(changes[best], min(near, default=0.0) / STEP**2)

    def _pilot(self, operator: GaussNewton, v: Tensor, h: float) -> float:
        return float(operator.forms(v, h, range(1)).mean())


def _change(a: float, b: float) -> float:
    size = max(abs(a), abs(b))
    return abs(a - b) / size if size > 0 else 0.0
