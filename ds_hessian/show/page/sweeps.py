"""Curvature against scale: what a displacement sweep measured."""

from __future__ import annotations

import numpy as np

from ds_hessian.records.sweep import DisplacementSweep
from ds_hessian.show.page.run import Chart, Run, Section, State
from ds_hessian.show.page.style import Series, over, positive
from ds_hessian.show.style import COLORS

TEXT = (
    "v'Hv along unit directions, averaged over displacements up to ±h, in units of its plateau; "
    "and how much Hv changes from one displacement to the next: it falls as rounding does, is "
    "least on the plateau, and rises where h leaves the neighbourhood of the weights."
)
LENGTH = "displacement h (length in parameter space)"
HIGHEST = 4.0
"""Upper end of the axis, in plateaus: rounding noise can be many."""


def sweeps(run: Run) -> list[Section]:
    """Return a state for each sweep."""
    states = tuple(_state(label, sweep) for label, sweep in run.labelled(DisplacementSweep))
    return [Section("Curvature against scale", TEXT, states)] if states else []


def _state(label: str, sweep: DisplacementSweep) -> State:
    rows, relative, changes = [], list[Series](), list[Series]()
    h, highest = sweep.displacements.tolist(), 1.0
    for number, name in enumerate(sweep.directions):
        plateau, best = sweep.plateau(name), sweep.best(name)
        color = COLORS[number % len(COLORS)]
        rows.append((f"v'Hv, {name}", f"{plateau} at h = {h[best]:.2g}"))
        curvatures = sweep.curvatures[number] / (plateau.value or 1.0)
        highest = max(highest, float(curvatures[best:].max()))
        relative.append(Series(name, color, h, curvatures))
        changes.append(Series(name, color, h, positive(sweep.relative_changes[number])))
    drawn = over(LENGTH, "curvature", "v'Hv / its plateau", relative, log=False)
    top = min(1.15 * highest, HIGHEST)
    drawn["layout"]["yaxis"]["range"] = [min(-0.6, -0.25 * top), max(top, 2.2)]
    charts = [Chart(drawn, 360)]
    if any(np.isfinite(series.values).any() for series in changes):
        below = over(LENGTH, "change of Hv", "relative to the next smaller h", changes, log=True)
        charts.append(Chart(below, 360))
    return State(label, tuple(rows), tuple(charts))
