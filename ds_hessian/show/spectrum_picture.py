"""A picture of a spectrum: log density above, Ritz stems below, the bulk enlarged beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_hessian.records.density import Density
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy
from ds_hessian.show.spectrum_table import products_line
from ds_hessian.show.spectrum_view import WHOLE, Panel, views_of
from ds_hessian.show.style import BLUE, EIGENVALUE, GREY, INK, MATRICES, VERMILLION, count, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def spectrum_picture(spectrum: HessianSpectrum, path: Path) -> Path:
    """Draw a spectrum.

    Raises:
        ImportError: matplotlib is not installed.
    """
    density = spectrum.density()
    panels = [Panel.of(spectrum, density, view) for view in views_of(spectrum, density)]
    zoomed = len(panels) > 1
    figure = new_figure(10.5 if zoomed else 8.5, 6.0)
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
    for column, panel in enumerate(panels):
        upper = figure.add_subplot(grid[0, column])
        lower = figure.add_subplot(grid[1, column], sharex=upper)
        _draw_density(upper, density, panel)
        _draw_stems(lower, panel)
        if column == 0:
            upper.set_ylabel("spectral density")
            lower.set_ylabel("weight")
        if zoomed:
            upper.set_title(panel.view.name, loc="left", fontsize=10, color=INK)
    _write_around(figure, spectrum, density)
    _move_exponents(figure)
    return save_figure(figure, path)


def _draw_density(axes: Axes, density: Density, panel: Panel) -> None:
    hidden, whole = panel.bottom * 1e-3, panel.view.name == WHOLE
    values = np.maximum(density.values, hidden)
    axes.set_yscale("log")
    axes.fill_between(density.grid, hidden, values, color=BLUE, alpha=0.18, linewidth=0)
    band = density.band()
    if band is not None:
        low, high = (np.maximum(end, hidden) for end in band)
        axes.fill_between(density.grid, low, high, color=BLUE, alpha=0.35, linewidth=0, zorder=1)
    axes.plot(density.grid, values, color=BLUE, linewidth=1.4)
    axes.set_xlim(*panel.view.interval)
    room = 10 ** (0.32 if whole and panel.outliers else 0.1)
    decades = np.log10(panel.top / panel.bottom)
    axes.set_ylim(panel.bottom, panel.top * room ** max(1.0, decades / 5))
    _draw_zero_and_noise(axes, panel)
    _draw_outliers(axes, panel)
    if whole:
        _draw_labels(axes, panel)
    _tidy(axes)
    axes.tick_params(labelbottom=False)


def _draw_outliers(axes: Axes, panel: Panel) -> None:
    style: Style = {
        "color": VERMILLION,
        "markersize": 6,
        "elinewidth": 1.4,
        "capsize": 3,
        "zorder": 4,
    }
    for outlier, height in zip(panel.outliers, panel.heights, strict=True):
        axes.errorbar(outlier.value, height, xerr=outlier.error, fmt="v", **style)


def _draw_labels(axes: Axes, panel: Panel) -> None:
    """Draw values above the markers."""
    for i in panel.labels:
        axes.annotate(
            short(panel.outliers[i].value),
            (panel.outliers[i].value, panel.heights[i]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            va="bottom",
            rotation=90,
            fontsize=9,
            color=VERMILLION,
            zorder=5,
        )


def _draw_zero_and_noise(axes: Axes, panel: Panel) -> None:
    """Draw a line at zero, and a band of values that may be zero."""
    if panel.zero:
        axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    if panel.noise is not None:
        axes.axvspan(*panel.noise, color=GREY, alpha=0.2, linewidth=0, zorder=0)


def _draw_stems(axes: Axes, panel: Panel) -> None:
    stems = panel.stems
    axes.set_yscale("log")
    for color, values, weights, zorder in (
        (BLUE, stems.values, stems.weights, 2),
        (VERMILLION, stems.outlier_values, stems.outlier_weights, 3),
    ):
        axes.vlines(values, stems.bottom, weights, color=color, linewidth=1.0, alpha=0.8)
        axes.plot(values, weights, "o", color=color, markersize=3.2, zorder=zorder)
    axes.set_ylim(stems.bottom, 4.0)
    axes.set_xlabel(EIGENVALUE)
    _draw_zero_and_noise(axes, panel)
    _tidy(axes)


def _move_exponents(figure: Figure) -> None:
    """Move the axis' common factor ("1e-8") into its label, which it would otherwise overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        factor = axes.xaxis.get_major_formatter().get_offset()
        axes.xaxis.get_offset_text().set_visible(False)
        if factor and axes.get_xlabel():
            axes.set_xlabel(f"{axes.get_xlabel()}  [{factor}]")


def _tidy(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(LogLocator(numticks=1))
    tidy(axes)


def _write_around(figure: Figure, spectrum: HessianSpectrum, density: Density) -> None:
    """Write the title above, figures below."""
    s, source = spectrum, spectrum.provenance
    loss = "" if s.loss is None else f", loss {s.loss:.4g}"
    title = f"{MATRICES[source.operator]} spectrum"
    figure.text(0.02, 0.945, title, fontsize=15, weight="bold", color=INK)
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
