"""The base of all records: frozen figures that can be saved, loaded, printed and drawn.

Records hold small arrays, the same on every rank, and vectors that stay sharded. They import
nothing that draws: `table` and `plot` ask the display that the package provides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ds_hessian.display import display
from ds_hessian.errors import HessianError, ResultError
from ds_hessian.records.fields import Array, Axes, Json, packed, settled, unpacked
from ds_hessian.records.files import path_of
from ds_hessian.records.provenance import Cost, Provenance
from ds_hessian.records.store import Arrays, read, write


@dataclass(frozen=True, eq=False)
class Record:
    """The base of all records.

    Two records are equal if all their fields are, arrays bit for bit (NaN equals itself there).

    Attributes:
        kind: Stem of its files, and its name in messages.
        arrays: `{field: axes}` of the array fields.
        labels: `{field: axis}` of the tuples that have an entry for each along an axis.
        sharded: `{field: axis}` of the vectors `(k, n_local)`, of which each rank has its own part.
        pairs: The fields that are a value with its error.
    """

    kind: ClassVar[str]
    arrays: ClassVar[dict[str, Axes]] = {}
    labels: ClassVar[dict[str, str]] = {}
    sharded: ClassVar[dict[str, str]] = {}
    pairs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, array in settled(self).items():
            object.__setattr__(self, name, array)

    def derived(self) -> dict[str, object]:
        """Return what follows from the fields, as JSON values for readers of the file."""
        return {}

    def packed(self) -> tuple[Json, Arrays]:
        """Return the fields as JSON values, and the arrays by name."""
        return packed(self)

    @classmethod
    def unpacked(cls, content: Json, arrays: Mapping[str, Array]) -> Self:
        """Return the record that was packed.

        Raises:
            ResultError: a field is missing, or of another type or shape.
            NumericsError: a figure that must be finite is not.
        """
        record: Self = unpacked(cls, content, arrays)
        return record

    def save(self, folder: str | Path) -> Path:
        """Write `<kind>.json` (to read) and `<kind>.npz` (arrays); returns the folder.

        Sharded vectors are left out, which `Hessian.save` writes too. Files of the same name
        are replaced. Call it on one rank.

        Raises:
            OSError: the folder cannot be written.
        """
        content, arrays = self.packed()
        return write(path_of(folder), self.kind, content | self.derived(), arrays)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Return the record that `save` wrote, bit for bit; sharded vectors are `(k, 0)`.

        Raises:
            ResultError: files are missing, damaged, or of another schema.
        """
        content, arrays = read(path_of(folder), cls.kind)
        try:
            return cls.unpacked(content, arrays)
        except HessianError as error:
            raise ResultError(f"{folder} does not hold a {cls.kind}: {error}") from error

    def table(self) -> str:
        """Return the figures with their errors, as lines of text."""
        return display().table(self)

    def plot(self, path: str | Path) -> Path:
        """Draw the record; the format follows from the name (.png, .pdf, .svg).

        Raises:
            ConfigError: the path is that of a folder.
            ImportError: matplotlib is not installed.
            UnsupportedError: there is no picture of this kind of record; the message says why.
        """
        return display().picture(self, path_of(path))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = (field.name for field in fields(self))
        return all(_same(getattr(self, name), getattr(other, name)) for name in names)


def _same(a: Any, b: Any) -> bool:
    """Compare two values, arrays bit for bit."""
    if isinstance(a, np.ndarray):
        return bool(a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[name], b[name]) for name in a)
    return bool(a == b)


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(Record):
    """The base of the records of analyses.

    Attributes:
        cost: Time and products that the analysis took.
        provenance: The model, the data and the settings that it was measured with.
    """

    cost: Cost
    provenance: Provenance
