"""Records that are a few figures, with nothing to draw at one step: their tables."""

from __future__ import annotations

from typing import Any

from ds_hessian.records.analyses import HessianEigenpairs, HessianSharpness, HessianTrace
from ds_hessian.records.base import Measured
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.show.page.run import Run, Section, State
from ds_hessian.show.tables import table
from ds_hessian.table import Table

TEXT = "What was measured, as the command line prints it."
KINDS: dict[str, type[Measured]] = {
    "Sharpness": HessianSharpness,
    "Curvature along directions": HessianCurvatures,
    "Eigenvalues": HessianEigenpairs,
    "Trace": HessianTrace,
}


def figures(run: Run) -> list[Section]:
    """Return a section for each of these kinds, of the records that no other section shows."""
    sections = []
    for title, kind in KINDS.items():
        shown = [(label, table(r)) for label, r in run.labelled(kind) if not _has_parts(r)]
        states = tuple(State(label, _rows(found), ()) for label, found in shown)
        sections += [Section(title, TEXT, states)] if states else []
    return sections


def _rows(found: Table) -> tuple[tuple[str, str], ...]:
    return tuple((name, text) for name, text in found.rows) or (("found", found),)


def _has_parts(record: Any) -> bool:
    """Return whether it has layers or blocks, which `layers` draws."""
    return bool(getattr(record, "concentrations", None) or getattr(record, "blocks", None))
