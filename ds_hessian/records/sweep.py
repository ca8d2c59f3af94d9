"""The record of a displacement sweep: curvature against scale along a few directions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hessian.errors import NumericsError, ResultError
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.provenance import Cost, Provenance

Array = NDArray[np.float64]

PER_DIRECTION = ("curvatures", "norms", "changes", "nonlinearities", "fidelities")


@dataclass(frozen=True, kw_only=True, eq=False)
class DisplacementSweep:
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
        nonlinearities: `(D, k)` see `Product`; NaN where not measured.
        fidelities: `(D, k)` cosine of realised and intended displacement.
        loss: Mean loss at the weights; None if not known.
        gradient_norm: Of that loss; None if not known.
        cost: What it took, the search for the directions included.
        provenance: What it was measured on.
    """

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
    cost: Cost
    provenance: Provenance

    def __post_init__(self) -> None:
        shape = (len(self.directions), len(self.displacements))
        if 0 in shape or not (np.diff(self.displacements) > 0).all():
            raise ResultError(
                f"a sweep needs directions and ascending displacements, got {self.directions} and "
                f"{self.displacements}"
            )
        for name in self.array_names():
            array = np.array(getattr(self, name), dtype=np.float64)
            wanted = shape if name in PER_DIRECTION else shape[1:]
            if array.shape != wanted:
                raise ResultError(f"{name} must be {wanted}, got {array.shape}")
            if name not in ("changes", "nonlinearities") and not np.isfinite(array).all():
                raise NumericsError(f"{name} must be finite, got {array}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def array_names(cls) -> list[str]:
        """Names of the array fields."""
        return [field.name for field in fields(cls) if field.type == "Array"]

    @property
    def relative_changes(self) -> Array:
        """`(D, k)` changes over the larger of the two norms; NaN for the first."""
        before = np.concatenate([self.norms[:, :1], self.norms[:, :-1]], axis=1)
        size = np.maximum(self.norms, before)
        return np.divide(self.changes, size, out=np.full_like(size, np.nan), where=size > 0)

    def best(self, direction: str) -> int:
        """Index of the displacement on the plateau: where the product changes least."""
        changes = self.relative_changes[self.directions.index(direction)]
        return int(np.nanargmin(changes)) if np.isfinite(changes).any() else 0

    def plateau(self, direction: str) -> Estimate:
        """`v'Hv` where the product changes least, with the change there as its error."""
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

    def save(self, folder: str | Path) -> Path:
        """Write `sweep.json` (to read) and `sweep.npz` (arrays); returns the folder.

        Raises:
            OSError: the folder cannot be written.
        """
        from ds_hessian.records.store import save

        return save(self, Path(folder))

    @staticmethod
    def load(folder: str | Path) -> DisplacementSweep:
        """The record that `save` wrote, bit for bit.

        Raises:
            ResultError: files are missing, damaged, or of another schema.
        """
        from ds_hessian.records.store import load

        return load(DisplacementSweep, Path(folder))

    def plot(self, path: str | Path) -> Path:
        """Draw curvature and change against h; the format follows from the name.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from ds_hessian.show.sweep_picture import plot_sweep

        return plot_sweep(self, Path(path))

    def __eq__(self, other: object) -> bool:
        """All fields equal, arrays bit for bit (NaN equals itself)."""
        if not isinstance(other, DisplacementSweep):
            return NotImplemented
        arrays = set(self.array_names())
        return all(
            getattr(self, f.name).tobytes() == getattr(other, f.name).tobytes()
            if f.name in arrays
            else getattr(self, f.name) == getattr(other, f.name)
            for f in fields(self)
        )

    __hash__ = None  # type: ignore[assignment]
