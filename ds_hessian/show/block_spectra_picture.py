"""Pictures of the spectra of blocks: a row for each block, and their distances."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.show.block_pictures import about, largest, name_rows, rows_figure
from ds_hessian.show.canvas import save_figure
from ds_hessian.show.style import BLUE, EIGENVALUE, PHRASES, short

Array = NDArray[np.float64]

FAINTEST = 1e-4
"""Smallest share of a block's eigenvalues in a cell that has a colour."""
DECADES = (-1.0, -1e-1, -1e-2, 0.0, 1e-2, 1e-1, 1.0)
"""Ticks of the eigenvalue axis, in units of the largest eigenvalue in magnitude."""


def ticks(spectra: HessianBlockSpectra) -> tuple[list[int], list[str]]:
    """Return the cells and the labels of round shares of the largest eigenvalue."""
    grid, _ = spectra.densities()
    top = float(np.nanmax(abs(spectra.ritz_values)))
    values = [share * top for share in DECADES]
    return [int(abs(grid - v).argmin()) for v in values], [short(v) for v in values]


def seen(shares: Array) -> Array:
    """Return the decimal logarithms of the shares that have a colour; NaN for the rest."""
    return np.log10(np.where(shares > FAINTEST, shares, np.nan))


def block_spectra_picture(spectra: HessianBlockSpectra, path: Path) -> Path:
    """Draw the density of each block's eigenvalues as colours, and the blocks' distances."""
    from matplotlib.colors import LinearSegmentedColormap

    colors = LinearSegmentedColormap.from_list("", ["#EAF2F8", BLUE, "#00263D"])
    shown = largest(spectra.sizes)
    names = [spectra.names[i] for i in shown]
    text = f"mean distance {spectra.heterogeneity:.2f}   |   {about(spectra)}"
    title = f"Spectra of the blocks of {PHRASES[spectra.provenance.operator]}"
    figure = rows_figure(len(names) + 3, title, text)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _, shares = spectra.densities()
    map_ = left.imshow(seen(shares)[shown], cmap=colors, aspect="auto", interpolation="nearest")
    figure.colorbar(map_, ax=left, label="share of the block, log10", location="bottom", shrink=0.6)
    cells, labels = ticks(spectra)
    left.set_xticks(cells, labels=labels)
    left.set_xlabel(EIGENVALUE)
    name_rows(left, names)
    apart = spectra.distances[np.ix_(shown, shown)]
    map_ = right.imshow(apart, cmap=colors, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    figure.colorbar(map_, ax=right, label="Jensen-Shannon distance", location="bottom", shrink=0.6)
    name_rows(right, [""] * len(names))
    right.set_xticks([])
    right.set_xlabel("blocks, in the same order")
    for axes in (left, right):
        axes.grid(False)
    return save_figure(figure, path)
