"""The record of a displacement sweep: curvature against scale along a few directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ds_hessian.errors import ResultError
from ds_hessian.records.base import Measured
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import Axes

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class DisplacementSweep(Measured):
    """`v'Hv` for D unit directions at k displacements; arrays are fp64 and read-only.

    With central differences `curvatures` is the mean of `v'H(w + t v) v` over t in [-h, h]: at
    small h it is rounding noise, on a plateau the curvature at w, above it that of the loss
    surface at scale h.

    Attributes:
        n: Number of parameters.
        directions: D names.
        displacements: `(k,)` h, ascending, in parameter space.
        curvatures: `(D, k)` v'Hv, loss per squared parameter.
        norms: `(D, k)` |Hv|.
        changes: `(D, k)` |Hv - Hv'| from the next smaller h; NaN for the first.
        nonlinearities: `(D, k)` nonlinearity ratio of each product; NaN where not measured.
        fidelities: `(D, k)` cosine of realised and intended displacement.
        loss: Mean loss at the weights; None if not known.
        gradient_norm: |gradient| of that loss; None if not known.
        cost: Time and products that it took, the search for the directions included.
        provenance: The model, the data and the settings that it was measured with.
    """

    kind: ClassVar[str] = "sweep"
    arrays: ClassVar[dict[str, Axes]] = {
        "displacements": Axes("k", finite=True),
        "curvatures": Axes("D", "k", finite=True),
        "norms": Axes("D", "k", finite=True, least=0),
        "changes": Axes("D", "k", least=0),
        "nonlinearities": Axes("D", "k"),
        "fidelities": Axes("D", "k", finite=True),
    }
    labels: ClassVar[dict[str, str]] = {"directions": "D"}

    n: int
    directions: tuple[str, ...]
    displacements: Array
    curvatures: Array
    norms: Array
    changes: Array
    nonlinearities: Array
    fidelities: Array
    loss: float | None
    gradient_norm: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 in self.curvatures.shape or not (np.diff(self.displacements) > 0).all():
            raise ResultError(
                f"a sweep needs directions and ascending displacements, got {self.directions} and "
                f"{self.displacements}"
            )

    @property
    def relative_changes(self) -> Array:
        """`(D, k)` changes over the larger of the two norms; NaN for the first."""
        before = np.concatenate([self.norms[:, :1], self.norms[:, :-1]], axis=1)
        size = np.maximum(self.norms, before)
        return np.divide(self.changes, size, out=np.full_like(size, np.nan), where=size > 0)

    def best(self, direction: str) -> int:
        """Return the index of the displacement on the plateau: where the product changes least."""
        changes = self.relative_changes[self.directions.index(direction)]
        return int(np.nanargmin(changes)) if np.isfinite(changes).any() else 0

    def plateau(self, direction: str) -> Estimate:
        """Return `v'Hv` where the product changes least, with the change there as its error."""
        row, column = self.directions.index(direction), self.best(direction)
        return Estimate(float(self.curvatures[row, column]), float(self.changes[row, column]))

    def triangular(self) -> Array:
        """`(D, k)` averages over [-h, h] with the triangular kernel `(1 - |t| / h) / h` instead.

        That is what the second difference of the *loss*, `(L(h) - 2 L(0) + L(-h)) / h^2`, averages
        with (the paper's Theorem 3.3); from the flat averages B it is `2/h^2` times the integral of
        `t B(t)` over [0, h], here by the trapezoidal rule.
        """
        h = self.displacements
        weighted = self.curvatures * h
        pieces = (weighted[:, 1:] + weighted[:, :-1]) / 2 * np.diff(h)
        start = weighted[:, :1] * h[0] / 2
        return 2 * np.cumsum(np.concatenate([start, pieces], axis=1), axis=1) / h**2

    def derived(self) -> dict[str, object]:
        """Return the plateau of each direction, for readers of the file."""
        return {
            "plateaus": {
                name: {"displacement": float(self.displacements[self.best(name)])}
                | {"curvature": float(self.plateau(name))}
                for name in self.directions
            }
        }
