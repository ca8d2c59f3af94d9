"""The parts of a page: the records of a run, and the sections that show them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ds_hessian.errors import ResultError
from ds_hessian.records.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.records.base import Measured
from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.records.sweep import DisplacementSweep

R = TypeVar("R")
M = TypeVar("M", bound=Measured)
Figure = dict[str, Any]
"""`{"data": traces, "layout": axes and titles}`, as plotly.js documents them."""
Part = dict[str, Any]
"""A part of a figure (a trace, an axis, a shape) as plotly.js takes it."""

SHOWN: tuple[type[Measured], ...] = (
    HessianSpectrum,
    HessianSharpness,
    HessianCurvatures,
    HessianEigenpairs,
    HessianTrace,
    HessianBlockCoupling,
    HessianOffBlockShare,
    HessianBlockSpectra,
    HessianKronecker,
    HessianSolution,
    HessianInfluence,
    DisplacementSweep,
)
"""Kinds of records that the page shows."""


class Label(str):
    """Text that names a training step.

    Attributes:
        step: The step.
    """

    step: int

    def __new__(cls, text: str, step: int) -> Label:
        """Return the text with its step."""
        label = super().__new__(cls, text)
        label.step = step
        return label

    @property
    def name(self) -> str:
        """The text without the word: a name on an axis of steps, which may not repeat there."""
        return self.removeprefix("step ")


@dataclass(frozen=True, eq=False)
class Run:
    """Records with the name of their folder each, in the order of training steps.

    Attributes:
        name: Name of the run.
        records: `(folder, record)`; kinds other than `SHOWN` are left out.
        folder: Where the folders are; None if they are on no disk.

    Raises:
        ResultError: there are none.
    """

    name: str
    records: tuple[tuple[str, Any], ...]
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not any(isinstance(record, SHOWN) for _, record in self.records):
            kinds = ", ".join(kind.__name__ for kind in SHOWN)
            raise ResultError(f"nothing to show of {self.name}: it has no record of {kinds}")

    @property
    def operator(self) -> str:
        """The operator that is drawn over training: the Hessian, if it was measured."""
        found = [r.provenance.operator for _, r in self.records if isinstance(r, SHOWN)]
        return "hessian" if "hessian" in found else str(found[0])

    def every(self, kind: type[R]) -> list[R]:
        """Return the records of a kind, of all operators."""
        return [record for _, record in self.records if isinstance(record, kind)]

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of a kind, of the operator that is drawn over training."""
        found: list[Any] = self.every(kind)
        return [record for record in found if record.provenance.operator == self.operator]

    def labelled(self, kind: type[R]) -> list[tuple[Label, R]]:
        """Return the records of a kind with their steps, and their folders where steps repeat."""
        found = [(name, record) for name, record in self.records if isinstance(record, kind)]
        counts = Counter(step_of(record) for _, record in found)
        return [
            (Label(text if counts[step] == 1 else f"{text} ({name})", step), record)
            for name, record in found
            for step in [step_of(record)]
            for text in [f"step {step:,}"]
        ]


def run_in(folder: Path) -> Run:
    """Return all records in a folder that a page shows.

    Raises:
        ResultError: there is no such folder, nothing to show in it, or a record in it is broken.
    """
    records = [
        ((found.resolve() if found == folder else found).name, record)
        for kind in SHOWN
        for found, record in records_in(folder, kind).items()
    ]
    ordered = tuple(sorted(records, key=lambda pair: step_of(pair[1])))
    return Run(folder.resolve().name, ordered, folder.resolve())


def page_of(folder: Path) -> Path:
    """Return the path of the page of a run's folder: it has the run's name."""
    return folder / f"{folder.resolve().name or 'run'}.html"


def records_in(folder: Path, kind: type[M]) -> dict[Path, M]:
    """Return `{its folder: record}` of a folder that has a record of this kind, or of those one
    below.

    In the order of their steps; empty if there are none.

    Raises:
        ResultError: there is no such folder, or a record in it is broken.
    """
    if not folder.is_dir():
        raise ResultError(f"no such folder: {folder}")
    name = f"{kind.kind}.json"
    if os.path.lexists(folder / name):  # a link that leads nowhere is a broken record, not none
        return {folder: kind.load(folder)}
    places = (place for place in sorted(folder.iterdir()) if os.path.lexists(place / name))
    found = {place: kind.load(place) for place in places}
    return dict(sorted(found.items(), key=lambda item: step_of(item[1])))


def step_of(record: Any) -> int:
    """Return the training step at which a record was measured."""
    return int(record.provenance.step)


@dataclass(frozen=True)
class Chart:
    """A figure on the page.

    Attributes:
        figure: What is drawn.
        height: In pixels.
        wide: Whether it takes the whole width of a large screen, or half of it.
    """

    figure: Figure
    height: int = 320
    wide: bool = False


@dataclass(frozen=True)
class State:
    """The content of a section for one choice of its slider.

    Attributes:
        label: Text of the choice.
        rows: Name and text of figures; the name `warning` makes them stand out.
        charts: In order.
    """

    label: str
    rows: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Section:
    """A heading, its explanation, and its states; the page's slider chooses one of several."""

    title: str
    text: str
    states: tuple[State, ...]

    @property
    def slots(self) -> int:
        """Return the number of figures that there is room for."""
        return max(len(state.charts) for state in self.states)
