"""A picture of a spectrum: log density above, Ritz stems below, the bulk enlarged beside them.

Matplotlib is imported on use and through its objects only (no pyplot, no global state, no
display). Colours are from Okabe and Ito's palette, which the common colour-blindnesses keep apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.density import Density, bulk_interval
from ds_hessian.records.estimate import Estimate
from ds_hessian.show.table import products_line

if TYPE_CHECKING:
    from ds_hessian.records.spectrum import HessianSpectrum

Interval = tuple[float, float]

BLUE, VERMILLION, GREY, INK = "#0072B2", "#D55E00", "#8A8A8A", "#222222"
ZOOM_FROM = 5.0
"""The bulk gets a panel of its own where the whole spectrum is this many times as wide."""
MOST_LABELS = 8


def plot(spectrum: HessianSpectrum, path: Path) -> Path:
    """See `HessianSpectrum.plot`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    density = spectrum.density()
    views = views_of(spectrum, density)
    zoomed = len(views) > 1
    figure = Figure(figsize=(10.5 if zoomed else 8.5, 6.0), facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        2,
        2 if zoomed else 1,
        height_ratios=[2.6, 1.0],
        width_ratios=[1.55, 1.0] if zoomed else None,
        left=0.09,
        right=0.975,
        top=0.83 if zoomed else 0.86,
        bottom=0.215,
        hspace=0.07,
        wspace=0.2,
    )
    for column, view in enumerate(views):
        upper = figure.add_subplot(grid[0, column])
        lower = figure.add_subplot(grid[1, column], sharex=upper)
        _draw_density(upper, spectrum, density, view, labels=column == 0)
        _draw_stems(lower, spectrum, view)
        if column == 0:
            upper.set_ylabel("spectral density")
            lower.set_ylabel("weight")
        if zoomed:
            text = "whole spectrum" if column == 0 else "bulk, enlarged"
            upper.set_title(text, loc="left", fontsize=10, color=INK)
    _write_around(figure, spectrum, density)
    _move_exponents(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def views_of(spectrum: HessianSpectrum, density: Density) -> list[Interval]:
    """The whole spectrum, and the bulk where that would be too small in it."""
    whole, bulk = _whole(spectrum, density), _bulk(spectrum, density)
    return [whole, bulk] if whole[1] - whole[0] > ZOOM_FROM * (bulk[1] - bulk[0]) else [whole]


def _whole(spectrum: HessianSpectrum, density: Density) -> Interval:
    """The range with all values, their kernels, and a margin."""
    low = float((spectrum.ritz_values - 3.5 * density.width).min())
    high = float((spectrum.ritz_values + 3.5 * density.width).max())
    margin = 0.03 * (high - low)
    return low - margin, high + margin


def _bulk(spectrum: HessianSpectrum, density: Density) -> Interval:
    """The union of the probes' bulks, with a margin; at least a few kernels wide."""
    rows = zip(spectrum.ritz_values, spectrum.weights, strict=True)
    ends = [bulk_interval(values, weights) for values, weights in rows]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    inside = (spectrum.ritz_values >= low) & (spectrum.ritz_values <= high)
    margin = max(0.15 * (high - low), 4 * float(np.median(density.width[inside])))
    return low - margin, high + margin


def density_limits(
    spectrum: HessianSpectrum, density: Density, view: Interval, whole: bool
) -> Interval:
    """Lowest and highest density to show in a view: its peaks, and six decades if it is whole."""
    shown = (density.grid >= view[0]) & (density.grid <= view[1])
    top = float(density.values[shown].max(initial=0.0)) or 1.0
    mask = spectrum.outliers()
    mask &= (spectrum.ritz_values >= view[0]) & (spectrum.ritz_values <= view[1])
    peaks = np.interp(spectrum.ritz_values[mask], density.grid, density.values)
    floor = 1e-6 * top if whole else 0.2 * float(density.values[shown].min(initial=top))
    floor = max(floor, 1e-6 * top)
    bottom = max(min(floor, 0.1 * float(peaks.min(initial=np.inf))), 1e-14 * top)
    return bottom, top


def _draw_density(
    axes: Any, spectrum: HessianSpectrum, density: Density, view: Interval, labels: bool
) -> None:
    bottom, top = density_limits(spectrum, density, view, whole=labels)
    values = np.maximum(density.values, bottom * 1e-3)
    axes.set_yscale("log")
    axes.fill_between(density.grid, bottom * 1e-3, values, color=BLUE, alpha=0.18, linewidth=0)
    band = density.band()
    if band is not None:
        low, high = (np.maximum(end, bottom * 1e-3) for end in band)
        axes.fill_between(density.grid, low, high, color=BLUE, alpha=0.35, linewidth=0, zorder=1)
    axes.plot(density.grid, values, color=BLUE, linewidth=1.4)
    axes.set_xlim(*view)
    outliers = [o for o in spectrum.outlier_eigenvalues() if view[0] <= o.value <= view[1]]
    heights = np.interp([o.value for o in outliers], density.grid, density.values)
    room = 10 ** (0.32 if labels and outliers else 0.1)
    decades = np.log10(top / bottom)
    axes.set_ylim(bottom, top * room ** max(1.0, decades / 5))
    _draw_zero_and_noise(axes, spectrum, view)
    for outlier, height in zip(outliers, np.maximum(heights, bottom), strict=True):
        axes.errorbar(
            outlier.value,
            height,
            xerr=outlier.error,
            fmt="v",
            color=VERMILLION,
            markersize=6,
            elinewidth=1.4,
            capsize=3,
            zorder=4,
        )
    if labels:
        _label(axes, outliers, heights, view)
    _tidy(axes)
    axes.tick_params(labelbottom=False)


def _draw_zero_and_noise(axes: Any, spectrum: HessianSpectrum, view: Interval) -> None:
    """A line at zero, and a band where a value cannot be told from it."""
    axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    noise = spectrum.product_noise
    if noise > 2e-3 * (view[1] - view[0]):
        axes.axvspan(-noise, noise, color=GREY, alpha=0.2, linewidth=0, zorder=0)


def _label(
    axes: Any, outliers: list[Estimate], heights: NDArray[np.float64], view: Interval
) -> None:
    """Values above the markers."""
    for i in labelled([outlier.value for outlier in outliers], view):
        axes.annotate(
            short(outliers[i].value),
            (outliers[i].value, heights[i]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90,
            fontsize=9,
            color=VERMILLION,
            zorder=5,
        )


def labelled(places: Sequence[float], view: Interval, apart: float = 0.035) -> list[int]:
    """Which get a label, of places on an axis: those furthest from zero, where none overlap."""
    chosen = list[int]()
    for i in sorted(range(len(places)), key=lambda i: -abs(places[i])):
        gaps = [abs(places[i] - places[other]) / (view[1] - view[0]) for other in chosen]
        if len(chosen) < MOST_LABELS and all(gap >= apart for gap in gaps):
            chosen.append(i)
    return chosen


def _draw_stems(axes: Any, spectrum: HessianSpectrum, view: Interval) -> None:
    values, weights = spectrum.ritz_values, spectrum.weights
    mask = spectrum.outliers()
    shown = (values >= view[0]) & (values <= view[1]) & (weights > 0)
    bottom = float(weights[shown].min(initial=1.0)) / 10
    axes.set_yscale("log")
    for color, chosen, zorder in ((BLUE, shown & ~mask, 2), (VERMILLION, shown & mask, 3)):
        axes.vlines(values[chosen], bottom, weights[chosen], color=color, linewidth=1.0, alpha=0.8)
        axes.plot(values[chosen], weights[chosen], "o", color=color, markersize=3.2, zorder=zorder)
    axes.set_ylim(bottom, 4.0)
    axes.set_xlabel("eigenvalue (loss per squared parameter)")
    _draw_zero_and_noise(axes, spectrum, view)
    _tidy(axes)


def _move_exponents(figure: Any) -> None:
    """The axis' common factor ("1e-8") into its label, which it would otherwise overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        factor = axes.xaxis.get_major_formatter().get_offset()
        axes.xaxis.get_offset_text().set_visible(False)
        if factor and axes.get_xlabel():
            axes.set_xlabel(f"{axes.get_xlabel()}  [{factor}]")


def _tidy(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(LogLocator(numticks=1))
    tidy(axes)


def tidy(axes: Any) -> None:
    """The frame and grid of every picture's axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, color=GREY)


def _write_around(figure: Any, spectrum: HessianSpectrum, density: Density) -> None:
    """Title above, figures below."""
    s, source = spectrum, spectrum.provenance
    loss = "" if s.loss is None else f", loss {s.loss:.4g}"
    figure.text(0.02, 0.945, "Hessian spectrum", fontsize=15, weight="bold", color=INK)
    figure.text(
        0.02,
        0.9,
        f"{count(s.n)} parameters, step {source.step:,}{loss}   |   {source.layout}, "
        f"{source.model_dtype}, {source.num_micro_batches} micro-batches",
        fontsize=10,
        color=INK,
    )
    outliers = int(len(s.outlier_eigenvalues()))
    low, high = density.width.min(), density.width.max()
    noise = (
        f"{s.product_noise:.1e} (grey band where visible)"
        if s.product_errors.any()
        else "not known"
    )
    if not s.ritz_values.any():
        figure.axes[0].annotate(
            "every Ritz value is 0", (0.02, 0.92), xycoords="axes fraction", color=VERMILLION
        )
    lines = [
        f"largest {s.eigenvalue_max}     smallest {s.eigenvalue_min}     trace {s.trace}     "
        f"outliers (converged) {outliers}",
        f"products {products_line(s)}     noise of a product {noise}",
        f"Gaussian smoothing, one width per Ritz value: {low:.1e} to {high:.1e}     "
        f"probes: {s.num_probes} {source.probe}, seed {source.seed} "
        + ("(band: 95 % over probes)" if s.num_probes > 1 else "(no band: one probe)"),
    ]
    for row, line in enumerate(lines):
        figure.text(0.02, 0.088 - 0.034 * row, line, fontsize=8.5, color=INK)


def count(n: int) -> str:
    """A number of parameters, short: `1.24 B`."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"


def short(value: float) -> str:
    """A value to three digits."""
    return f"{value:.3g}" if abs(value) < 100 or abs(value) >= 1e5 else f"{value:.0f}"
