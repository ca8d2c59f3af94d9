"""A picture of several spectra: densities over one another, extremes and trace beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_hessian.records.comparison import Comparison
from ds_hessian.records.estimate import Estimate
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy
from ds_hessian.show.spectrum_view import DECADES, ZOOM_FROM
from ds_hessian.show.style import BLUE, EIGENVALUE, INK, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NAMED = 8
"""Spectra that get a legend entry each; more get a colour scale."""


def comparison_picture(comparison: Comparison, path: Path) -> Path:
    """Draw several spectra.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import colormaps

    spectra = comparison.spectra
    colors = colormaps["viridis"](np.linspace(0.0, 0.9, len(spectra)))
    figure = new_figure(11.5, 6.0, layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=[1.5, 1.0])
    draw_densities(figure.add_subplot(grid[:, 0]), comparison, colors)
    extremes, trace = figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[1, 1])
    values = spectra.values()
    _draw_series(extremes, comparison, [s.eigenvalue_max for s in values], BLUE, "largest")
    _draw_series(extremes, comparison, [s.eigenvalue_min for s in values], VERMILLION, "smallest")
    extremes.set_ylabel("extreme eigenvalues")
    extremes.legend(fontsize=8.5, frameon=False)
    _draw_series(trace, comparison, [s.trace for s in values], INK, "trace")
    trace.set_ylabel("trace")
    figure.suptitle(f"{len(spectra)} Hessian spectra", x=0.01, ha="left", weight="bold", color=INK)
    return save_figure(figure, path)


def draw_densities(axes: Axes, comparison: Comparison, colors: Any) -> None:
    """Draw the densities of all spectra on the same axes."""
    densities = [s.density() for s in comparison.spectra.values()]
    top = max(float(d.values.max()) for d in densities)
    floor = top * 10.0**-DECADES
    named = len(densities) <= MOST_NAMED
    for name, density, color in zip(comparison.spectra, densities, colors, strict=True):
        values = np.maximum(density.values, floor * 1e-3)
        axes.plot(
            density.grid, values, color=color, linewidth=1.2, label=name if named else "_hidden"
        )
    low, high = (f(f(d.grid) for d in densities) for f in (min, max))
    bulk = max(max(map(abs, s.bulk())) for s in comparison.spectra.values())
    axes.set_xlabel(EIGENVALUE)
    if bulk > 0 and high - low > ZOOM_FROM * bulk:
        axes.set_xscale("symlog", linthresh=10.0 ** np.round(np.log10(bulk)))  # clear of ticks
        axes.set_xlabel(f"{EIGENVALUE}, logarithmic beyond the bulk")
    axes.set_yscale("log")
    axes.set_ylim(floor, 2 * top)
    axes.set_ylabel("spectral density")
    if named:
        axes.legend(fontsize=8.5, frameon=False)
    else:
        _draw_scale(axes, comparison)
    tidy(axes)


def _draw_scale(axes: Axes, comparison: Comparison) -> None:
    """Draw a colour bar, where there are too many spectra for a legend."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap

    shown = LinearSegmentedColormap.from_list("", colormaps["viridis"](np.linspace(0.0, 0.9, 64)))
    bar = axes.figure.colorbar(ScalarMappable(cmap=shown), ax=axes, location="top", aspect=60)
    chosen = np.linspace(0, len(comparison.spectra) - 1, 5).round().astype(int)
    names = list(comparison.spectra)
    if comparison.by_step:
        names = [f"step {s.provenance.step:,}" for s in comparison.spectra.values()]
    ticks = (chosen / (len(names) - 1)).tolist()
    bar.set_ticks(ticks, labels=[names[number] for number in chosen])
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _draw_series(
    axes: Axes, comparison: Comparison, estimates: list[Estimate], color: str, label: str
) -> None:
    """Draw values with error bars over the training step, or over the names."""
    spectra = comparison.spectra
    x: list[int] = list(range(len(spectra)))
    if comparison.by_step:
        x = [s.provenance.step for s in spectra.values()]
        axes.set_xlabel("training step")
    elif len(spectra) <= MOST_NAMED:
        axes.set_xticks(x, labels=spectra, rotation=20, ha="right")
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
