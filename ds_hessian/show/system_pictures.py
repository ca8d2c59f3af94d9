"""Pictures of damped systems, of the influence of examples, and of a self-test."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_hessian.records.analyses import HessianInfluence, HessianSolution
from ds_hessian.records.fields import Array
from ds_hessian.records.verdict import SelfTest
from ds_hessian.show.block_pictures import about, largest, name_rows, rows_figure
from ds_hessian.show.canvas import Style, save_figure, tidy
from ds_hessian.show.style import BLUE, COLORS, GREY, PHRASES, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST = 1e-18
"""Values of a check at or below it are drawn there, on the logarithmic axis' left end."""


def solution_picture(solution: HessianSolution, path: Path) -> Path:
    """Draw the relative residual and the error of the solution for each damping."""
    title = f"Solutions with the inverse of {PHRASES[solution.provenance.operator]}"
    figure = rows_figure(14, title, f"{solution.method}   |   {about(solution)}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    labels = [f"{damping:.3g}" for damping in solution.dampings]
    for axes, values, unit in (
        (upper, solution.residuals, "relative residual\n|r| / |b|"),
        (lower, solution.errors, "distance to the\nexact solution"),
    ):
        _draw_over_dampings(axes, values, solution)
        axes.set_ylabel(unit)
    lower.set_xticks(range(len(labels)), labels=labels)
    lower.set_xlabel("damping (loss per squared parameter)")
    upper.legend(fontsize=8.5, frameon=False)
    return save_figure(figure, path)


def _draw_over_dampings(axes: Axes, values: Array, solution: HessianSolution) -> None:
    x, drawn = np.arange(len(values)), np.isfinite(values) & (values > 0)
    for mask, color, label in (
        (solution.converged, BLUE, "converged"),
        (~solution.converged, VERMILLION, "not converged"),
    ):
        if mask.any():
            style: Style = {"color": color, "markersize": 6, "label": label}
            axes.plot(x[mask & drawn], values[mask & drawn], "o", **style)
    axes.set_yscale("log" if drawn.any() else "linear")
    axes.set_xlim(-0.5, len(x) - 0.5)
    for i in np.flatnonzero(~drawn):
        text = "infinite" if np.isinf(values[i]) else f"{values[i]:.2g}"
        axes.annotate(text, (i, 0.5), xycoords=("data", "axes fraction"), ha="center", color=GREY)
    tidy(axes)


def influence_picture(influence: HessianInfluence, path: Path) -> Path:
    """Draw the score of each example with its bar, a marker for each damping."""
    shown = largest(np.abs(influence.scores).max(axis=0))
    shown = sorted(shown, key=lambda i: -influence.scores[0, i])
    names = [f"example {i}" for i in shown]
    loss = f"the query's loss is {influence.query_loss:.4g}   |   {about(influence)}"
    figure = rows_figure(len(names) + 2, "Influence of training examples", loss)
    axes = figure.subplots()
    for number, damping in enumerate(influence.dampings):
        errors = influence.errors[number, shown]
        bars = np.where(np.isfinite(errors), errors, 0.0)
        style: Style = {"color": COLORS[number % len(COLORS)], "label": f"damping {damping:.3g}"}
        scores = influence.scores[number, shown]
        axes.errorbar(scores, range(len(shown)), xerr=bars, fmt="o", capsize=3, **style)
    axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    text = "" if np.isfinite(influence.errors).all() else "; without a bar: error not bounded"
    axes.set_xlabel(f"score (loss of the query): positive ones help{text}")
    axes.legend(fontsize=8.5, frameon=False)
    name_rows(axes, names)
    return save_figure(figure, path)


def self_test_picture(verdict: SelfTest, path: Path) -> Path:
    """Draw the value of each check against its limit."""
    failed = sum(not check.passed for check in verdict.checks)
    text = "all is well" if not failed else f"{failed} of {len(verdict.checks)} checks failed"
    product = f"random vectors: error {verdict.error:.1e} at h = {verdict.displacement:.2e}"
    figure = rows_figure(len(verdict.checks) + 4, f"Hessian self-test: {text}", product)
    axes = figure.subplots()
    for row, check in enumerate(verdict.checks):
        color = BLUE if check.passed else VERMILLION
        axes.plot(max(check.limit, SMALLEST), row, "|", color=GREY, markersize=16, mew=2)
        if np.isfinite(check.value):
            axes.plot(max(check.value, SMALLEST), row, "o", color=color, markersize=7)
        else:
            axes.annotate("not measured", (0.5, row), xycoords=("axes fraction", "data"))
    axes.set_xscale("log")
    axes.set_xlabel("dot: measured, at most; bar: limit; red: failed; 0 is drawn at the left end")
    name_rows(axes, [check.name for check in verdict.checks])
    return save_figure(figure, path)
