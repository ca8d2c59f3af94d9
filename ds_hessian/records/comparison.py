"""Spectra side by side: of several runs, or of several steps of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_hessian.errors import ResultError
from ds_hessian.records.spectrum import HessianSpectrum

LOSS = ("data_fingerprint", "num_micro_batches", "dropout")
"""What in the provenance makes the measured losses different functions."""
METHOD = ("model_dtype", "precision", "scheme", "displacement", "probe", "seed", "layout")
"""What in the provenance changes how well a spectrum is known, not what it is of."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """At least two spectra with their names, in the order in which they are shown.

    Attributes:
        spectra: `{name: record}`.

    Raises:
        ResultError: there are fewer than two.
    """

    spectra: Mapping[str, HessianSpectrum]

    def __post_init__(self) -> None:
        if len(self.spectra) < 2:
            raise ResultError(
                f"a comparison needs at least two spectra, got {', '.join(self.spectra) or 'none'}"
            )

    @property
    def by_step(self) -> bool:
        """Whether they can be told apart by their training step alone."""
        steps = [s.provenance.step for s in self.spectra.values()]
        return len(set(steps)) == len(steps)

    def table(self) -> str:
        """A row for each spectrum, extreme eigenvalues and trace with their errors, then notes."""
        rows = [("", "step", "loss", "largest", "smallest", "trace", "outliers")]
        for name, s in self.spectra.items():
            loss = "-" if s.loss is None else f"{s.loss:.4g}"
            extremes = (str(s.eigenvalue_max), str(s.eigenvalue_min), str(s.trace))
            count = str(len(s.outlier_eigenvalues()))
            rows.append((name, str(s.provenance.step), loss, *extremes, count))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes())])

    def notes(self) -> tuple[str, ...]:
        """What else than the weights differs between them."""
        losses, methods = self._differing(LOSS), self._differing(METHOD)
        if len({s.n for s in self.spectra.values()}) > 1:
            losses.insert(0, "number of parameters")
        if self._differing(("world_size",)) and "data_fingerprint" in losses:
            losses.remove("data_fingerprint")  # it is of rank 0's share of the data
        found = []
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
