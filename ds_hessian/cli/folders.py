"""Records on disk: a folder of one step, or a run's folder with one for each step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from click import format_filename

from ds_hessian.errors import ResultError
from ds_hessian.records import HessianSpectrum
from ds_hessian.show.page.run import records_in


def spectra_in(folder: Path) -> dict[Path, HessianSpectrum]:
    """Return `{its folder: record}` of a result folder, or of the results one level below, by step.

    Raises:
        ResultError: there is no such folder, nothing in it, or a record in it is broken.
    """
    found = records_in(folder, HessianSpectrum)
    if not found:
        raise ResultError(
            f"no spectrum in {folder}: it holds neither spectrum.json nor a folder that does"
        )
    return found


def named_spectra(folders: Iterable[Path]) -> dict[str, HessianSpectrum]:
    """Return all spectra of several folders by their paths, each once, in the order given.

    Raises:
        ResultError: as `spectra_in`.
    """
    found = (pair for folder in folders for pair in spectra_in(folder).items())
    return {format_filename(path): spectrum for path, spectrum in found}
