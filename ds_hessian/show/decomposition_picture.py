"""A picture of H = G + R: three spectra on one axis, and what they add up to."""

from __future__ import annotations

from pathlib import Path

from ds_hessian.records.decomposition import HessianDecomposition
from ds_hessian.show.canvas import new_figure, save_figure
from ds_hessian.show.comparison_picture import draw_ridges
from ds_hessian.show.style import BLUE, INK, VERMILLION, count

COLORS = (INK, BLUE, VERMILLION)
"""H, G and R."""


def decomposition_picture(parts: HessianDecomposition, path: Path) -> Path:
    """Draw the spectra, with traces and negative curvature below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, source = new_figure(9.5, 5.6, layout="constrained"), parts.provenance
    names = ("H", "G, Gauss-Newton", "R = H - G")
    draw_ridges(figure.add_subplot(), list(parts.spectra.values()), names, COLORS)
    traces = ", ".join(
        f"tr {name} {s.trace}" for name, s in zip("HGR", parts.spectra.values(), strict=True)
    )
    negative = f"sum of the negative eigenvalues: {parts.negative('hessian')} in H, "
    negative += f"{parts.negative('residual')} in R"
    figure.supxlabel(f"{traces}\n{negative}", x=0.01, ha="left", fontsize=8.5, color=INK)
    title = f"H = G + R, {count(parts.hessian.n)} parameters, step {source.step:,}"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK)
    return save_figure(figure, path)
