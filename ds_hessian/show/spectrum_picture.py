"""A picture of a spectrum: single eigenvalues as stems, and the rest as far as it is known."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy, write_title
from ds_hessian.show.spectrum_table import products_line
from ds_hessian.show.spectrum_view import (
    BEYOND,
    BOUNDS,
    LOCATED,
    NOISE,
    SINGLE,
    Interval,
    SpectrumView,
    Stem,
)
from ds_hessian.show.style import (
    BLUE,
    EIGENVALUE,
    GREY,
    INK,
    MATRICES,
    VERMILLION,
    count,
    micro_batches,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION = 150
"""Characters of a line of the caption."""
MOST_TICKS = 5
"""Numbers along the narrow axes of the bulk, where more would overlap."""


def spectrum_picture(spectrum: HessianSpectrum, path: Path) -> Path:
    """Draw a spectrum.

    Raises:
        ImportError: matplotlib is not installed.
    """
    view = SpectrumView.of(spectrum)
    figure = new_figure(11.5, 6.4)
    grid = figure.add_gridspec(
        2,
        2,
        width_ratios=[1.5, 1.0],
        left=0.07,
        right=0.985,
        top=0.79,
        bottom=0.235,
        hspace=0.5,
        wspace=0.17,
    )
    whole = figure.add_subplot(grid[:, 0])
    _draw_whole(whole, view)
    _draw_below(figure.add_subplot(grid[0, 1]), view)
    _draw_density(figure.add_subplot(grid[1, 1]), view)
    source = spectrum.provenance
    loss = "" if spectrum.loss is None else f", loss {spectrum.loss:.4g}"
    write_title(
        figure,
        f"{MATRICES[source.operator]} spectrum",
        f"{count(spectrum.n)} parameters, step {source.step:,}{loss}   |   {source.layout}, "
        f"{source.arithmetic}, {micro_batches(source.num_micro_batches)}",
    )
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.105), ncols=5, fontsize=9,
        frameon=False, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip
    _write_below(figure, spectrum, view)
    _move_exponents(figure)
    return save_figure(figure, path)


def _draw_whole(axes: Axes, view: SpectrumView) -> None:
    """Draw stems, and the number of eigenvalues at or beyond each value."""
    bottom = min(0.5, view.n / 4)
    axes.set_yscale("log")
    band, curve = view.beyond_bounds, view.beyond
    assert band.upper is not None
    low, high = (np.maximum(end, bottom * 1e-3) for end in (band.y, band.upper))
    axes.fill_between(band.x, low, high, color=BLUE, alpha=0.22, linewidth=0, label=BOUNDS)
    heights = np.maximum(curve.y, bottom * 1e-3)
    axes.plot(curve.x, heights, color=BLUE, linewidth=1.3, label=BEYOND)
    _draw_stems(axes, view.singles, bottom, SINGLE, filled=True)
    _draw_stems(axes, view.located, bottom, LOCATED, filled=False)
    axes.set_xlim(*view.whole)
    axes.set_ylim(bottom, 1.6 * max(float(curve.y.max()), float(high.max()), 1.0))
    for i in view.labels:
        value = view.singles[i].estimate.value
        axes.annotate(
            short(value),
            (value, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=9,
            color=VERMILLION,
        )
    _draw_zero_and_noise(axes, view, view.whole)
    axes.set_xlabel(EIGENVALUE)
    axes.set_ylabel("number of eigenvalues at or beyond")
    _tidy_log(axes)


def _draw_stems(
    axes: Axes, stems: tuple[Stem, ...], bottom: float, label: str, filled: bool
) -> None:
    if not stems:
        return
    values = [stem.estimate.value for stem in stems]
    heights = [stem.beyond for stem in stems]
    errors = [stem.estimate.error for stem in stems]
    axes.vlines(values, bottom, heights, color=VERMILLION, linewidth=1.1, alpha=0.8, zorder=3)
    style: Style = {"color": VERMILLION, "capsize": 3, "elinewidth": 1.4, "zorder": 4}
    style |= {"markersize": 5, "mfc": VERMILLION if filled else "white", "label": label}
    axes.errorbar(values, heights, xerr=errors, fmt="o", **style)


def _draw_below(axes: Axes, view: SpectrumView) -> None:
    """Draw the cumulative distribution over the bulk, with its bounds."""
    band, curve = view.below_bounds, view.below
    assert band.upper is not None
    axes.fill_between(band.x, band.y, band.upper, color=BLUE, alpha=0.22, linewidth=0)
    axes.plot(curve.x, curve.y, color=BLUE, linewidth=1.3)
    axes.set_ylim(-0.02, 1.04)
    axes.set_title("the bulk: share of the eigenvalues at or below", loc="left", fontsize=10)
    _draw_zero_and_noise(axes, view, view.bulk)
    axes.set_xlim(*view.bulk)
    axes.locator_params(axis="x", nbins=MOST_TICKS)
    tidy(axes)


def _draw_density(axes: Axes, view: SpectrumView) -> None:
    """Draw the density in bins, and the Ritz values that they are made of."""
    if len(view.edges):
        axes.stairs(view.density, view.edges, color=BLUE, fill=True, alpha=0.25)
        axes.stairs(view.density, view.edges, color=BLUE, linewidth=1.2)
        axes.set_ylim(0, 1.15 * float(view.density.max()))
    else:
        axes.set_yticks([])
    inside = (view.ritz_values >= view.bulk[0]) & (view.ritz_values <= view.bulk[1])
    ticks = view.ritz_values[inside]
    axes.plot(ticks, np.zeros(len(ticks)), "|", color=INK, markersize=9, clip_on=False, zorder=5)
    axes.set_title(f"its density in {view.bin_widths}", loc="left", fontsize=10)
    if not len(view.edges):
        axes.set_title(view.bin_widths, loc="left", fontsize=10)
    _draw_zero_and_noise(axes, view, view.bulk)
    axes.set_xlim(*view.bulk)
    axes.locator_params(axis="x", nbins=MOST_TICKS)
    axes.set_xlabel("eigenvalue; ticks: Ritz values")
    tidy(axes)


def _draw_zero_and_noise(axes: Axes, view: SpectrumView, interval: Interval) -> None:
    """Draw a line at zero, and a band of values that may be zero."""
    if interval[0] <= 0 <= interval[1]:
        axes.axvline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    noise = view.noise_in(interval)
    if noise is not None:
        axes.axvspan(*noise, color=GREY, alpha=0.25, linewidth=0, zorder=0, label=NOISE)


def _move_exponents(figure: Figure) -> None:
    """Move the axis' common factor ("1e-8") into its label, which it would otherwise overlap."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            factor = axis.get_major_formatter().get_offset()
            axis.get_offset_text().set_visible(False)
            if factor:
                axis.set_label_text(f"{axis.get_label_text()} [{factor}]".strip())


def _tidy_log(axes: Axes) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(LogLocator(numticks=1))
    tidy(axes)


def _write_below(figure: Figure, spectrum: HessianSpectrum, view: SpectrumView) -> None:
    """Write the caption, and below it how the spectrum was measured."""
    s, source = spectrum, spectrum.provenance
    noise = f"{s.product_noise:.1e}" if s.product_errors.any() else "not known"
    probes = f"{s.num_probes} {source.probe} probe{'s' * (s.num_probes > 1)}, seed {source.seed}"
    lines = [
        *textwrap.wrap(view.caption, CAPTION)[:2],
        f"trace {s.trace}   |   {probes}   |   products {products_line(s)}, noise {noise}",
    ]
    for row, line in enumerate(lines):
        style: Style = {"color": INK if row < len(lines) - 1 else GREY}
        text = line.replace("$", r"\$")
        figure.text(0.02, 0.08 - 0.033 * row, text, fontsize=9.5, **style)
