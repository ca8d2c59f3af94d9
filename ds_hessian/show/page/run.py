"""The parts of a page: the records of a run, and the sections that show them."""

from __future__ import annotations

from dataclasses import dataclass
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
Figure = dict[str, Any]
Part = dict[str, Any]
"""A part of a figure (a trace, an axis, a shape) as plotly.js takes it."""
"""`{"data": traces, "layout": axes and titles}`, as plotly.js documents them."""

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


@dataclass(frozen=True, eq=False)
class Run:
    """Records with the name of their folder each, in the order of training steps.

    Attributes:
        name: Name of the run.
        records: `(folder, record)`; kinds other than `SHOWN` are left out.

    Raises:
        ResultError: there are none.
    """

    name: str
    records: tuple[tuple[str, Any], ...]

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

    def labelled(self, kind: type[R]) -> list[tuple[str, R]]:
        """Return the records of a kind with their steps, and their folders where steps repeat."""
        found = [(name, record) for name, record in self.records if isinstance(record, kind)]
        steps = [step_of(record) for _, record in found]
        return [
            (label if steps.count(step) == 1 else f"{label} ({name})", record)
            for (name, record), step in zip(found, steps, strict=True)
            for label in [f"step {step:,}"]
        ]


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
    """A heading, its explanation, and its states; a slider chooses one of several."""

    title: str
    text: str
    states: tuple[State, ...]
