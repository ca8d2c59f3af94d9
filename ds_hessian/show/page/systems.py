"""Damped systems (H + damping I) x = b: how well each is solved, and the influence of examples."""

from __future__ import annotations

import numpy as np

from ds_hessian.records.analyses import HessianInfluence, HessianSolution
from ds_hessian.show.page.run import Chart, Figure, Run, Section, State
from ds_hessian.show.page.style import (
    Series,
    figure,
    name_axis,
    over,
    positive,
    rows_height,
    titled,
)
from ds_hessian.show.style import BLUE, COLORS, VERMILLION
from ds_hessian.show.tables import solution_rows, system_rows

SOLUTIONS = (
    "Solutions of (H + damping I) x = b, H the record's matrix: the relative residual, measured "
    "with one product each, and the estimated distance to the exact solution."
)
INFLUENCE = (
    "By how much the loss of the query would rise, to first order, if an example were left out, "
    "times the number of examples: a positive score is an example that helps. Shown are those with "
    "the largest scores of either sign; bars are the estimated errors."
)
MOST = 20
"""Examples with a row."""


def systems(run: Run) -> list[Section]:
    """Return sections of solutions and of influence."""
    solved = tuple(
        State(label, tuple(solution_rows(r)), _residuals(r))
        for label, r in run.labelled(HessianSolution)
    )
    scored = tuple(_influence(label, r) for label, r in run.labelled(HessianInfluence))
    sections = [Section("Inverse-Hessian solves", SOLUTIONS, solved)] if solved else []
    return sections + ([Section("Influence", INFLUENCE, scored)] if scored else [])


def _residuals(solution: HessianSolution) -> tuple[Chart, ...]:
    """Return residuals over the damping, where there are several."""
    if len(solution.dampings) < 2 or not (solution.dampings > 0).all():
        return ()
    at = solution.dampings.tolist()
    pairs = (
        ("residual", "|r| / |b|", BLUE, solution.residuals),
        ("error of the solution", "|x - exact|", VERMILLION, solution.errors),
    )
    return tuple(
        Chart(over("damping", title, unit, [Series(title, color, at, known)], log=True))
        for title, unit, color, values in pairs
        for known in [positive(values)]
        if np.isfinite(known).any()
    )


def _influence(label: str, influence: HessianInfluence) -> State:
    rows = [("query's loss", f"{influence.query_loss:.4g}"), *system_rows(influence)]
    largest = abs(influence.scores).max(0)
    chosen = np.sort(np.argsort(-largest, kind="stable")[:MOST])
    chosen = chosen[np.argsort(-influence.scores[0, chosen], kind="stable")]
    drawn = _scores(influence, [int(i) for i in chosen])
    if len(chosen) < len(largest):
        rows.append(("examples shown", f"{len(chosen)} of {len(largest)}"))
    return State(label, tuple(rows), (Chart(drawn, rows_height(len(chosen)), wide=True),))


def _scores(influence: HessianInfluence, chosen: list[int]) -> Figure:
    """Return a row for each example, a marker for each damping."""
    names = [f"example {i}" for i in chosen]
    errors = np.where(np.isfinite(influence.errors), influence.errors, np.nan)
    markers = [
        {
            "type": "scatter",
            "name": f"damping {damping:.4g}",
            "x": influence.scores[number, chosen],
            "y": names,
            "mode": "markers",
            "marker": {"color": COLORS[number % len(COLORS)], "size": 7},
            "error_x": {"array": errors[number, chosen], "thickness": 1.2, "width": 3},
            "hovertemplate": "%{y}: %{x:.4g}",
        }
        for number, damping in enumerate(influence.dampings)
    ]
    x = titled("score (loss of the query)") | {"zeroline": True}
    return figure("influence", markers, x, name_axis(names), legend=len(markers) > 1)
