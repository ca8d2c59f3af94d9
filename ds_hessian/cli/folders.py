"""Records on disk: a folder of one step, or a run's folder with one for each step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from click import format_filename

from ds_hessian.errors import ResultError
from ds_hessian.records import HessianSpectrum
from ds_hessian.records.base import Measured
from ds_hessian.show.page import Run
from ds_hessian.show.page.run import SHOWN, step_of

R = TypeVar("R", bound=Measured)


def records_in(folder: Path, kind: type[R]) -> dict[Path, R]:
    """Return `{its folder: record}` of a folder that has a record of this kind, or of those one
    below.

    In the order of their steps; empty if there are none.

    Raises:
        ResultError: there is no such folder, or a record in it is broken.
    """
    if not folder.is_dir():
        raise ResultError(f"no such folder: {folder}")
    name = f"{kind.kind}.json"
    if (folder / name).exists():
        return {folder: kind.load(folder)}
    found = {path.parent: kind.load(path.parent) for path in sorted(folder.glob(f"*/{name}"))}
    return dict(sorted(found.items(), key=lambda item: step_of(item[1])))


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


def run_in(folder: Path) -> Run:
    """Return all records in a folder that a page shows.

    Raises:
        ResultError: there is no such folder, nothing to show in it, or a record in it is broken.
    """
    records = [
        (found.name, record) for kind in SHOWN for found, record in records_in(folder, kind).items()
    ]
    return Run(folder.resolve().name, tuple(sorted(records, key=lambda pair: step_of(pair[1]))))


def named_spectra(folders: Iterable[Path]) -> dict[str, HessianSpectrum]:
    """Return all spectra of several folders by their paths, each once, in the order given.

    Raises:
        ResultError: as `spectra_in`.
    """
    found = (pair for folder in folders for pair in spectra_in(folder).items())
    return {format_filename(path): spectrum for path, spectrum in found}
