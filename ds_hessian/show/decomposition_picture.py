"""A picture of H = G + R: three densities over one another, and what they add up to."""

from __future__ import annotations

from pathlib import Path

from ds_hessian.records.decomposition import HessianDecomposition
from ds_hessian.show.canvas import new_figure, save_figure
from ds_hessian.show.comparison_picture import draw_densities
from ds_hessian.show.style import BLUE, GREEN, INK, VERMILLION, count

COLORS = (INK, BLUE, VERMILLION)
"""H, G and R."""


def decomposition_picture(parts: HessianDecomposition, path: Path) -> Path:
    """Draw the densities, with traces and negative curvature below.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, source = new_figure(9.5, 5.6, layout="constrained"), parts.provenance
    axes = figure.add_subplot()
    draw_densities(axes, parts, COLORS)
    axes.axvline(0.0, color=GREEN, linewidth=0.6)
    texts = ("H", "G, Gauss-Newton", "R = H - G")
    for line, text in zip(axes.get_lines(), texts, strict=False):
        line.set_label(text)
    axes.legend(fontsize=9, frameon=False)
    traces = ", ".join(
        f"tr {name} {s.trace}" for name, s in zip("HGR", parts.spectra.values(), strict=True)
    )
    negative = f"negative eigenvalues: {parts.negative('hessian')} in H, "
    negative += f"{parts.negative('residual')} in R"
    axes.set_title(f"{traces}\n{negative}", fontsize=8.5, loc="left", color=INK)
    title = f"H = G + R, {count(parts.hessian.n)} parameters, step {source.step:,}"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK)
    return save_figure(figure, path)
