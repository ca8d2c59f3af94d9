"""Blocks of the matrix on the page: their spectra and distances, and Kronecker factors."""

from __future__ import annotations

import numpy as np

from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.records.density import Array
from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.show.block_spectra_picture import seen, ticks
from ds_hessian.show.page.run import Chart, Figure, Run, Section, State
from ds_hessian.show.page.style import SHARES, figure, name_axis, rows_height, titled
from ds_hessian.show.style import EIGENVALUE, barred
from ds_hessian.show.tables import block_spectra_rows

SPECTRA = (
    "The spectrum of each diagonal block: the share of its eigenvalues in each cell. Linear near "
    "0, logarithmic beyond. A Jensen-Shannon distance of 0 means the same spectra, 1 spectra that "
    "do not overlap."
)


FACTORS = (
    "Kronecker-factored curvatures beside the matrix's block of each weight: the cosine of the "
    "two matrices, and the share of the block's squared norm on the diagonal of the factors' "
    "eigenbasis, each with its error; the last column is the parameters' own basis."
)


def blocks(run: Run) -> list[Section]:
    """Return the sections of the spectra of blocks, and of Kronecker factors."""
    spectra = tuple(_state(label, r) for label, r in run.labelled(HessianBlockSpectra))
    factors = tuple(_factors(label, r) for label, r in run.labelled(HessianKronecker))
    sections = [Section("Spectra of blocks", SPECTRA, spectra)] if spectra else []
    return sections + ([Section("Kronecker factors", FACTORS, factors)] if factors else [])


def _factors(label: str, found: HessianKronecker) -> State:
    names, kinds, height = list(found.layers), list(found.kinds), rows_height(len(found.layers))
    shares = np.column_stack([found.shares, found.plain_shares])
    errors = np.column_stack([found.share_errors, found.plain_share_errors])
    cosines = _numbers("cosine", found.cosines, found.cosine_errors, names, kinds)
    diagonal = _numbers("diagonal share", shares, errors, names, [*kinds, "parameters"])
    charts = Chart(cosines, height), Chart(diagonal, height)
    fewest = ", ".join(f"{k} {found.samples[:, j].min():,}" for j, k in enumerate(kinds))
    return State(label, (("fewest samples", fewest),), charts)


def _numbers(
    title: str, values: Array, errors: Array, names: list[str], columns: list[str]
) -> Figure:
    pairs = zip(values, errors, strict=True)
    cells = {
        "type": "heatmap",
        "z": values,
        "text": [[barred(*cell, digits=2) for cell in zip(*pair, strict=True)] for pair in pairs],
        "x": columns,
        "y": names,
        "colorscale": SHARES,
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1,
        "texttemplate": "%{text}",
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{x}: %{text}<extra></extra>",
    }
    x = titled("") | {"type": "category", "showgrid": False}
    return figure(title, [cells], x, name_axis(names) | {"showgrid": False})


def _state(label: str, spectra: HessianBlockSpectra) -> State:
    height = rows_height(len(spectra.names)) + 20
    charts = (Chart(_densities(spectra), height), Chart(_distances(spectra), height))
    return State(label, tuple(block_spectra_rows(spectra)), charts)


def _densities(spectra: HessianBlockSpectra) -> Figure:
    grid, shares = spectra.densities()
    cells = _cells(seen(shares), np.arange(len(grid)), spectra) | {
        "colorbar": {"title": {"text": "log10"}, "thickness": 10, "outlinewidth": 0},
        "text": np.broadcast_to(np.array([f"{v:.3g}" for v in grid]), shares.shape).tolist(),
        "hovertemplate": "%{y}, eigenvalue %{text}: 10^%{z:.2f}<extra></extra>",
    }
    positions, labels = ticks(spectra)
    x = titled(EIGENVALUE) | {"tickmode": "array", "tickvals": positions, "ticktext": labels}
    return figure("density", [cells], x | {"showgrid": False}, name_axis(spectra.names))


def _distances(spectra: HessianBlockSpectra) -> Figure:
    cells = _cells(spectra.distances, list(spectra.names), spectra) | {
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{x}: %{z:.3f}<extra></extra>",
    }
    x = titled("") | {"type": "category", "showticklabels": False, "showgrid": False}
    return figure("distances", [cells], x, name_axis(spectra.names) | {"showticklabels": False})


def _cells(z: object, x: object, spectra: HessianBlockSpectra) -> Figure:
    return {"type": "heatmap", "z": z, "x": x, "y": list(spectra.names), "colorscale": SHARES}
