"""Spectra side by side: of several runs, or of several steps of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from ds_hessian.errors import ResultError
from ds_hessian.records.base import Record
from ds_hessian.records.fields import Array, Json
from ds_hessian.records.spectrum import HessianSpectrum

MATRIX = ("operator", "outputs", "parameters")
"""Entries of the provenance that say which matrix of the loss was measured."""
LOSS = ("data_fingerprint", "num_micro_batches", "dropout", "batch_statistics")
"""Entries of the provenance that make the measured losses different functions."""
METHOD = ("model_dtype", "precision", "scheme", "displacement", "probe", "seed", "layout")
"""Entries of the provenance that change how well a spectrum is known, not what it is of."""


@dataclass(frozen=True, eq=False)
class Comparison(Record):
    """At least two spectra with their names, in the order in which they are shown.

    Attributes:
        spectra: `{name: record}`.

    Raises:
        ResultError: there are fewer than two.
    """

    kind: ClassVar[str] = "comparison"

    spectra: Mapping[str, HessianSpectrum]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.spectra) < 2:
            raise ResultError(
                f"a comparison needs at least two spectra, got {', '.join(self.spectra) or 'none'}"
            )

    @property
    def by_step(self) -> bool:
        """True if no two spectra have the same training step."""
        steps = [s.provenance.step for s in self.spectra.values()]
        return len(set(steps)) == len(steps)

    def packed(self) -> tuple[Json, dict[str, Array]]:
        """Return the spectra as JSON values by name, and their arrays as `<number>/<field>`."""
        contents, arrays = Json(), dict[str, Array]()
        for number, (name, spectrum) in enumerate(self.spectra.items()):
            contents[name], found = spectrum.packed()
            arrays |= {f"{number}/{field}": array for field, array in found.items()}
        return {"spectra": contents}, arrays

    @classmethod
    def unpacked(cls, content: Json, arrays: Mapping[str, Array]) -> Self:
        """Return the comparison that was packed.

        Raises:
            ResultError: a spectrum is missing, or of another type or shape.
            NumericsError: a figure that must be finite is not.
        """
        contents, spectra = content.get("spectra"), dict[str, HessianSpectrum]()
        if not isinstance(contents, dict):
            raise ResultError("it holds no spectra")
        for number, (name, one) in enumerate(contents.items()):
            if not (isinstance(one, dict) and name.isprintable()):
                raise ResultError(f"spectrum {name!a:.60} must be a JSON object, got {one!a:.60}")
            prefix = f"{number}/"
            own = {f.removeprefix(prefix): a for f, a in arrays.items() if f.startswith(prefix)}
            spectra[name] = HessianSpectrum.unpacked(one, own)
        return cls(spectra)

    def notes(self) -> tuple[str, ...]:
        """Return sentences that name what differs between them beside the weights."""
        matrices = self._differing(MATRIX)
        losses, methods = self._differing(LOSS), self._differing(METHOD)
        if len({s.n for s in self.spectra.values()}) > 1 and "parameters" not in matrices:
            losses.insert(0, "number of parameters")
        if self._differing(("world_size",)) and "data_fingerprint" in losses:
            losses.remove("data_fingerprint")  # it is of rank 0's share of the data
        found = []
        if matrices:
            found.append(f"the matrices are not the same, they differ in {_list(matrices)}")
        if losses:
            found.append(f"the losses are not the same function, they differ in {_list(losses)}")
        if methods:
            found.append(f"measured with different {_list(methods)}")
        return tuple(found)

    def _differing(self, names: tuple[str, ...]) -> list[str]:
        sources = [s.provenance for s in self.spectra.values()]
        return [name for name in names if len({getattr(source, name) for source in sources}) > 1]


def _list(names: list[str]) -> str:
    return ", ".join(name.replace("_", " ") for name in names)
