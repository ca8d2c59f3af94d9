"""Picture of Kronecker factors beside a matrix: layers and kinds, as colours and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.show.block_pictures import about, largest, name_rows, rows_figure
from ds_hessian.show.canvas import save_figure
from ds_hessian.show.style import BLUE, INK, PHRASES, barred

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]


def kronecker_picture(found: HessianKronecker, path: Path) -> Path:
    """Draw the cosine of each layer and kind, and the diagonal shares of their eigenbases."""
    shown = largest(found.norms)
    names = [found.layers[i] for i in shown]
    matrix = PHRASES[found.provenance.operator]
    figure = rows_figure(len(names) + 2, f"Kronecker factors beside {matrix}", about(found))
    left, right = figure.subplots(1, 2)
    _draw(left, found.cosines[shown], found.cosine_errors[shown], found.kinds, names)
    left.set_xlabel("cosine of K and the block, with its error")
    shares = np.column_stack([found.shares, found.plain_shares])[shown]
    errors = np.column_stack([found.share_errors, found.plain_share_errors])[shown]
    _draw(right, shares, errors, [*found.kinds, "parameters"], [""] * len(names))
    right.set_xlabel("share of the block on the diagonal of the eigenbasis")
    return save_figure(figure, path)


def _draw(
    axes: Axes, values: Array, errors: Array, columns: Sequence[str], names: Sequence[str]
) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["#FFFFFF", BLUE])
    axes.imshow(values, cmap=colors, vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        text = barred(float(value), float(errors[row, column]), digits=2)
        color = "white" if value > 0.6 else INK
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=7)
    name_rows(axes, names)
    axes.grid(False)
    axes.set_xticks(range(len(columns)), labels=list(columns))
