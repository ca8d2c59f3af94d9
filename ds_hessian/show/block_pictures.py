"""Pictures of where in the model curvature lies: eigenvectors, traces and coupling by block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.analyses import HessianBlockCoupling, HessianEigenpairs, HessianTrace
from ds_hessian.records.base import Measured
from ds_hessian.records.estimate import Estimate
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy, write_title
from ds_hessian.show.layers import layer_shares
from ds_hessian.show.style import (
    BLUE,
    GREY,
    INK,
    MATRICES,
    PHRASES,
    VERMILLION,
    micro_batches,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

MOST_ROWS = 60
"""Blocks that get a row each; of more, those with the largest figures are drawn."""
ROW, AROUND = 0.24, 1.9
"""Inches of a row, and of everything above and below the rows."""
MOST_CELLS = 240
"""Cells of a map that get their number written in."""


def about(record: Measured) -> str:
    """Return what the record was measured on, in one line."""
    source = record.provenance
    return (
        f"step {source.step:,}   |   {source.layout}, {source.arithmetic}, "
        f"{micro_batches(source.num_micro_batches)}"
    )


def rows_figure(rows: int, title: str, text: str) -> Figure:
    """Return a figure with room for so many rows, and its title."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = AROUND + ROW * max(rows, 5)
    figure = new_figure(9.0, height, layout="constrained")
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.01, 0.01, 0.98, 1 - 0.8 / height))
    write_title(figure, title, text)
    return figure


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Write a name at each row, the first on top."""
    axes.set_yticks(range(len(names)), labels=[shortened(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    tidy(axes)


def shortened(name: str) -> str:
    """Return a name that fits beside a row, as plain text."""
    text = name if len(name) <= 40 else f"{name[:18]}...{name[-19:]}"
    return text.replace("$", r"\$")


def largest(figures: Array) -> list[int]:
    """Return the rows to draw, in their order: all, or those with the largest figures."""
    order = np.argsort(-np.nan_to_num(np.abs(figures)), kind="stable")[:MOST_ROWS]
    return sorted(int(i) for i in order)


def eigenpairs_picture(pairs: HessianEigenpairs, path: Path) -> Path:
    """Draw the eigenvalues with their bars, and the share of each layer in their vectors."""
    shares = layer_shares(pairs)
    table = np.array(list(shares.values())).reshape(len(shares), len(pairs.values))
    shown = largest(table.max(axis=1, initial=0.0))
    names = [list(shares)[i] for i in shown]
    rows = len(names) + 8
    title = f"{len(pairs.values)} {MATRICES[pairs.provenance.operator]} eigenpairs"
    figure = rows_figure(rows, title, about(pairs))
    if names:
        upper, lower = figure.subplots(2, 1, height_ratios=[6, len(names)])
        _draw_shares(lower, table[shown], names, pairs)
    else:
        upper = figure.subplots()
    _draw_eigenvalues(upper, pairs)
    return save_figure(figure, path)


def _draw_eigenvalues(axes: Axes, pairs: HessianEigenpairs) -> None:
    x = np.arange(len(pairs.values))
    for mask, color, label in (
        (pairs.converged, BLUE, "converged"),
        (~pairs.converged, VERMILLION, "not converged"),
    ):
        if mask.any():
            bars: Style = {"yerr": pairs.errors[mask], "color": color, "label": label}
            axes.errorbar(x[mask], pairs.values[mask], fmt="o", capsize=4, markersize=5, **bars)
    axes.axhline(0.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xlim(-0.5, len(x) - 0.5)
    axes.set_xticks(x, labels=[str(i + 1) for i in x])
    axes.set_ylabel("eigenvalue\n(loss per\nsquared parameter)")
    axes.legend(fontsize=8.5, frameon=False)
    tidy(axes)


def _draw_shares(axes: Axes, table: Array, names: list[str], pairs: HessianEigenpairs) -> None:
    """Draw shares `(names, k)` as colours, and as numbers where there is room."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["#FFFFFF", BLUE])
    axes.imshow(100 * table, cmap=colors, vmin=0, aspect="auto")
    if table.size <= MOST_CELLS:
        most = table.max()
        for (row, column), share in np.ndenumerate(table):
            color = "white" if share > 0.6 * most else INK
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=color)
    name_rows(axes, names)
    axes.grid(False)
    labels = [f"{i + 1}: {short(float(value))}" for i, value in enumerate(pairs.values)]
    axes.set_xticks(range(len(labels)), labels=labels, rotation=0 if len(labels) < 9 else 90)
    axes.set_xlabel("eigenvector: its eigenvalue; cells are the layer's share of its norm, %")


def trace_picture(trace: HessianTrace, path: Path) -> Path:
    """Draw the trace of each block with its bars, or each probe's estimate without blocks."""
    total = f"trace {Estimate(trace.value, trace.error)}   |   {about(trace)}"
    title = f"{MATRICES[trace.provenance.operator]} trace"
    if not trace.blocks:
        figure = rows_figure(8, title, total)
        _draw_samples(figure.subplots(), trace)
        return save_figure(figure, path)
    shown = largest(trace.block_values)
    names = [trace.blocks[i] for i in shown]
    figure = rows_figure(len(names), f"{title} by block", total)
    axes = figure.subplots()
    error: Style = {"xerr": trace.block_errors[shown], "ecolor": INK, "capsize": 3}
    axes.barh(range(len(names)), trace.block_values[shown], color=BLUE, alpha=0.6, **error)
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    axes.set_xlabel("trace of the block (loss per squared parameter); bars: standard errors")
    name_rows(axes, names)
    return save_figure(figure, path)


def _draw_samples(axes: Axes, trace: HessianTrace) -> None:
    from matplotlib.ticker import MaxNLocator

    x = np.arange(1, len(trace.samples) + 1)
    axes.plot(x, trace.samples, "o", color=BLUE, markersize=5, label="estimate of one probe")
    axes.axhline(trace.value, color=INK, linewidth=1.2, label="trace")
    low, high = trace.value - trace.bound, trace.value + trace.bound
    axes.axhspan(low, high, color=GREY, alpha=0.2, linewidth=0, label="99 % interval")
    locator = axes.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)
    locator.set_params(integer=True)
    axes.set_xlabel("probe")
    axes.set_ylabel("trace\n(loss per squared parameter)")
    axes.legend(fontsize=8.5, frameon=False)
    tidy(axes)


def block_coupling_picture(coupling: HessianBlockCoupling, path: Path) -> Path:
    """Draw relative error and cosine of each block, beside those without structure."""
    shown = largest(coupling.relative_errors)
    names = [coupling.names[i] for i in shown]
    share = f"off-diagonal blocks make {coupling.share:.3f} of |Hv|^2   |   {about(coupling)}"
    title = f"Coupling of the blocks of {PHRASES[coupling.provenance.operator]}"
    figure = rows_figure(len(names) + 2, title, share)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, found, null, noises, label in (
        (left, coupling.relative_errors, coupling.null_relative_errors, coupling.noises, "error"),
        (right, coupling.cosines, coupling.null_cosines, None, "cosine"),
    ):
        y = range(len(names))
        bars = None if noises is None else noises[shown]
        axes.plot(null[shown], y, "o", mfc="none", mec=GREY, markersize=7, label="no structure")
        style: Style = {"color": BLUE, "capsize": 3, "markersize": 5, "label": "measured"}
        axes.errorbar(found[shown], y, xerr=bars, fmt="o", **style)
        axes.set_xlabel("relative error" if label == "error" else label)
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
        name_rows(axes, names)
    entries = left.get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=2, fontsize=9)
    return save_figure(figure, path)
