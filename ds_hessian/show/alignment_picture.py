"""Picture of an alignment: shares of gradient and update along each eigenvector, and angles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ds_hessian.records.alignment import HessianAlignment
from ds_hessian.show.block_pictures import about, rows_figure
from ds_hessian.show.canvas import save_figure, tidy
from ds_hessian.show.style import BLUE, GREY, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def alignment_picture(alignment: HessianAlignment, path: Path) -> Path:
    """Draw the shares along the eigenvectors, and the principal angles where there are some."""
    turned = len(alignment.principal_angles) > 0
    k = len(alignment.values)
    figure = rows_figure(22 if turned else 12, f"Alignment with {k} directions", about(alignment))
    axes = figure.subplots(1 + turned, 1, squeeze=False)[:, 0]
    _draw_shares(axes[0], alignment)
    if turned:
        _draw_angles(axes[1], alignment)
    return save_figure(figure, path)


def _draw_shares(axes: Axes, alignment: HessianAlignment) -> None:
    shares = (
        (alignment.gradient_shares, alignment.gradient, "gradient", BLUE, -0.2),
        (alignment.update_shares, alignment.update, "update", VERMILLION, 0.2),
    )
    for along, share, name, color, shift in shares:
        if share is not None:
            x = np.arange(1, len(along) + 1) + shift
            axes.bar(x, along, 0.36, color=color, label=f"{name}: {share} in all")
    axes.set_xticks(range(1, len(alignment.values) + 1))
    axes.set_xlabel("eigenvector")
    axes.set_ylabel("share")
    if any(share is not None for _, share, *_ in shares):
        axes.legend(fontsize=8.5, frameon=False)
    tidy(axes)


def _draw_angles(axes: Axes, alignment: HessianAlignment) -> None:
    angles = np.degrees(alignment.principal_angles)
    error = math.degrees(alignment.angle)
    low, high = np.minimum(error, angles), np.minimum(error, 90 - angles)
    x = range(1, len(angles) + 1)
    axes.errorbar(x, angles, yerr=[low, high], fmt="o", capsize=4, markersize=5, color=GREY)
    axes.set_xticks(list(x))
    axes.set_ylim(-3, 93)
    axes.set_xlabel("principal angle to the earlier space")
    axes.set_ylabel("degrees")
    tidy(axes)
