"""A picture of several spectra: a ridge for each, extremes and trace beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_hessian.records.comparison import Comparison
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy
from ds_hessian.show.style import BLUE, EIGENVALUE, GREY, INK, MATRICES, VERMILLION
from ds_hessian.show.training_view import LEAST, Axis, spread, step_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 8
"""Spectra whose names are written below the series."""
MOST_RIDGES = 24
"""Ridges that are drawn; of more spectra, so many at even distances."""
HEIGHT = 1.8
"""Height of the highest ridge, in distances between ridges."""
LONGEST = 26
"""Characters of a name beside a ridge."""


def comparison_picture(comparison: Comparison, path: Path) -> Path:
    """Draw several spectra.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import colormaps

    spectra = comparison.spectra
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(spectra)))
    figure = new_figure(12.5, 6.4, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[1.6, 1.0])
    names = [_name(comparison, i) for i in range(len(spectra))]
    draw_ridges(figure.add_subplot(grid[:, 0]), list(spectra.values()), names, colors)
    extremes, trace = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    values = spectra.values()
    _draw_series(extremes, comparison, [s.eigenvalue_max for s in values], BLUE, "largest")
    _draw_series(extremes, comparison, [s.eigenvalue_min for s in values], VERMILLION, "smallest")
    extremes.set_ylabel("extreme eigenvalues")
    extremes.legend(fontsize=8.5, frameon=False)
    _draw_series(trace, comparison, [s.trace for s in values], INK, "trace")
    trace.set_ylabel("trace")
    operators = {s.provenance.operator for s in values}
    matrix = f" {MATRICES[operators.pop()]}" if len(operators) == 1 else ""
    figure.suptitle(f"{len(spectra)}{matrix} spectra", x=0.01, ha="left", weight="bold", color=INK)
    return save_figure(figure, path)


def draw_ridges(
    axes: Axes, spectra: Sequence[HessianSpectrum], names: Sequence[str], colors: Any
) -> None:
    """Draw the number of eigenvalues in each cell of one axis, from one to all, as ridges."""
    axis = Axis.of(spectra)
    edges = axis.edges()
    places = np.repeat(axis.at(edges), 2)[1:-1]
    shown = np.unique(np.linspace(0, len(spectra) - 1, min(len(spectra), MOST_RIDGES)).round())
    chosen = [int(i) for i in shown]
    top = np.log10(max(s.n for s in spectra) / LEAST)
    for row, i in enumerate(chosen):
        base = float(len(chosen) - 1 - row)  # the first on top
        counts = np.maximum(spread(spectra[i], edges), LEAST)
        ridge = np.repeat(base + HEIGHT * np.log10(counts / LEAST) / top, 2)
        style: Style = {"zorder": 2 + row, "color": colors[i]}
        axes.fill_between(places, base, ridge, alpha=0.55, linewidth=0, **style)
        axes.plot(places, ridge, linewidth=1.1, **style)
    axes.set_yticks(range(len(chosen) - 1, -1, -1), labels=[names[i] for i in chosen])
    axes.set_ylim(-0.2, len(chosen) - 1 + HEIGHT + 0.1)
    ticks = axis.ticks()
    axes.set_xticks(axis.at([value for value, _ in ticks]), labels=[text for _, text in ticks])
    axes.set_xlim(*axis.at([axis.low, axis.high]))
    axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlabel(EIGENVALUE)
    some = "" if len(chosen) == len(spectra) else f", {len(chosen)} of {len(spectra)} spectra"
    title = f"eigenvalues in each cell of the axis, one to all, logarithmic{some}"
    axes.set_title(title, loc="left", fontsize=10)
    tidy(axes)


def _name(comparison: Comparison, number: int) -> str:
    name, spectrum = list(comparison.spectra.items())[number]
    if comparison.by_step:
        return f"step {spectrum.provenance.step:,}"
    text = name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"
    return text.replace("$", r"\$")


def _draw_series(
    axes: Axes, comparison: Comparison, estimates: list[Estimate], color: str, label: str
) -> None:
    """Draw values with error bars over the training step, or over the names."""
    spectra = comparison.spectra
    x: list[int] = list(range(len(spectra)))
    if comparison.by_step:
        x = [s.provenance.step for s in spectra.values()]
        axes.set_xlabel("training step")
        if (scale := step_scale(x)) is not None:
            axes.set_xscale("asinh", linear_width=scale)
            ticks = [value for value, _ in Axis(scale, min(x), max(x)).ticks()]
            axes.set_xticks(ticks, labels=[f"{value:,.0f}" for value in ticks])
            axes.minorticks_off()
    elif len(spectra) <= MOST_NAMED:
        names = [_name(comparison, i) for i in x]
        axes.set_xticks(x, labels=names, rotation=20, ha="right")
    else:
        axes.set_xlabel("spectrum, in the order given")
    values, errors = [e.value for e in estimates], [e.error for e in estimates]
    style: Style = {
        "color": color,
        "markersize": 4,
        "linewidth": 1.2,
        "capsize": 3,
        "elinewidth": 1.2,
    }
    line = "o-" if comparison.by_step else "o"
    axes.errorbar(x, values, yerr=errors, fmt=line, label=label, **style)
    tidy(axes)
