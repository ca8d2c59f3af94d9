"""The record of curvatures along directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ds_hessian.records.base import Measured
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import Array, Axes


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianCurvatures(Measured):
    """Curvatures `v'Cv / v'v` along k directions, of the operator C of the provenance.

    Attributes:
        directions: Their names.
        values: `(k,)` in loss per squared parameter.
        errors: `(k,)` estimates of their errors.
        norms: `(k,)` norms of the directions.
        displacements: `(k,)` the h of each.
        gradient_norm: |g| of the measured loss.
        loss: Mean loss over the measured micro-batches.
    """

    kind: ClassVar[str] = "curvatures"
    arrays: ClassVar[dict[str, Axes]] = {
        "values": Axes("k", finite=True),
        "errors": Axes("k", least=0),
        "norms": Axes("k", finite=True, least=0),
        "displacements": Axes("k", finite=True),
    }
    labels: ClassVar[dict[str, str]] = {"directions": "k"}

    directions: tuple[str, ...]
    values: Array
    errors: Array
    norms: Array
    displacements: Array
    gradient_norm: float
    loss: float

    def along(self, direction: str) -> Estimate:
        """Return the curvature along a direction.

        Raises:
            KeyError: it was not measured.
        """
        if direction not in self.directions:
            raise KeyError(f"no curvature along {direction!r}, there are {self.directions}")
        number = self.directions.index(direction)
        return Estimate(float(self.values[number]), float(self.errors[number]))
