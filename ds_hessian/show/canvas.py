"""Matplotlib figures as all pictures use them.

Matplotlib is imported on use and through its objects only: no pyplot, no global state, no display.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hessian.errors import ConfigError
from ds_hessian.records.files import replacing
from ds_hessian.show.style import GREY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 130

Style = dict[str, Any]
"""Keyword arguments that several calls of matplotlib share."""


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """Return an empty white figure, in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="white", **options)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure in the format of its name, at once; returns the path.

    Raises:
        ConfigError: no picture has such a format.
    """
    ending = path.suffix.removeprefix(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if ending and ending not in known:
        raise ConfigError(
            f"{path} is no name of a picture: it must end in one of {', '.join(known)}"
        )
    with replacing(path) as file:
        figure.savefig(file, format=ending or None, dpi=DPI)
    return path


def tidy(axes: Axes) -> None:
    """Set the frame and the grid that all axes have."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, color=GREY)


def write_title(figure: Figure, title: str, about: str) -> None:
    """Write the title, and below it what was measured on what, at the top of a figure."""
    inch = 1 / figure.get_figheight()
    figure.text(0.02, 1 - 0.33 * inch, title, fontsize=15, weight="bold", color=INK)
    figure.text(0.02, 1 - 0.6 * inch, about, fontsize=10, color=INK)
