"""A picture of a displacement sweep: curvature against h above, its change below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_hessian.records.sweep import DisplacementSweep
from ds_hessian.show.canvas import Style, new_figure, save_figure, tidy, write_title
from ds_hessian.show.style import COLORS, GREY, micro_batches

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P")


def sweep_picture(sweep: DisplacementSweep, path: Path) -> Path:
    """Draw a sweep.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(8.5, 6.4)
    grid = figure.add_gridspec(
        2, 1, height_ratios=[1.5, 1.0], left=0.1, right=0.97, top=0.85, bottom=0.1, hspace=0.1
    )
    upper = figure.add_subplot(grid[0])
    lower = figure.add_subplot(grid[1], sharex=upper)
    _draw_curvatures(upper, sweep)
    _draw_changes(lower, sweep)
    source = sweep.provenance
    loss = "" if sweep.loss is None else f", loss {sweep.loss:.4g}"
    write_title(
        figure,
        "Curvature against scale",
        f"{sweep.n:,} parameters, step {source.step:,}{loss}   |   {source.layout}, "
        f"{source.arithmetic}, {micro_batches(source.num_micro_batches)}, {source.scheme}",
    )
    return save_figure(figure, path)


def _draw_curvatures(axes: Axes, sweep: DisplacementSweep) -> None:
    """Draw each direction in units of its plateau, whose value the legend gives."""
    h, highest = sweep.displacements, 1.0
    for row, name in enumerate(sweep.directions):
        best, plateau = sweep.best(name), sweep.plateau(name)
        relative = sweep.curvatures[row] / (plateau.value or 1.0)
        highest = max(highest, float(relative[best:].max()))
        style: Style = {"color": COLORS[row % 6], "marker": MARKERS[row % 6], "markersize": 4}
        axes.plot(h, relative, linewidth=1.4, label=f"{name}: v'Hv = {plateau}", **style)
        axes.plot(h[best], relative[best], "o", markersize=11, mfc="none", mec=COLORS[row % 6])
    axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set_xscale("log")
    top = min(1.15 * highest, 4.0)
    axes.set_ylim(min(-0.6, -0.25 * top), max(top, 2.2))
    axes.set_ylabel("v'Hv, averaged over ±h\n(in units of the plateau)")
    axes.legend(loc="upper left", frameon=True, framealpha=0.92, edgecolor="none", fontsize=9)
    axes.tick_params(labelbottom=False)
    tidy(axes)


def _draw_changes(axes: Axes, sweep: DisplacementSweep) -> None:
    """Draw the change of the product from one h to the next: falling noise, rising averaging."""
    h, changes = sweep.displacements, sweep.relative_changes
    for row in range(len(sweep.directions)):
        style: Style = {"color": COLORS[row % 6], "marker": MARKERS[row % 6], "markersize": 4}
        axes.plot(h, np.where(changes[row] > 0, changes[row], np.nan), linewidth=1.4, **style)
    axes.set_yscale("log")
    known = changes[np.isfinite(changes) & (changes > 0)]
    low = float(known.min(initial=1.0))
    axes.set_ylim(low / 6, 6.0)
    best = h[[sweep.best(name) for name in sweep.directions]]
    for x, text, align in (
        (h[0], "noise: change ~ 1/h", "left"),
        (float(np.exp(np.log(best).mean())), "plateau", "center"),
        (h[-1], "averaging", "right"),
    ):
        axes.text(x, low / 4, text, ha=align, va="bottom", fontsize=9, color=GREY)
    axes.set_xlabel("displacement h (length in parameter space)")
    axes.set_ylabel("relative change of Hv\nto the next smaller h")
    tidy(axes)
