"""Curvature over the model: eigenvectors and traces by layer, and the coupling of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hessian.records.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianOffBlockShare,
    HessianTrace,
)
from ds_hessian.records.density import Array
from ds_hessian.records.estimate import Estimate
from ds_hessian.show.layers import layer_shares
from ds_hessian.show.page.run import Chart, Figure, Run, Section, State, step_of
from ds_hessian.show.page.style import (
    SHARES,
    Series,
    clear,
    figure,
    name_axis,
    over_steps,
    rows_height,
    titled,
)
from ds_hessian.show.style import BLUE, GREY, INK, VERMILLION, short
from ds_hessian.show.tables import eigenvalue_rows

EIGENVECTORS = (
    "Share of each eigenvector's squared norm that lies in each layer; a column sums to 100 %."
)
TRACES = "Trace of each block's diagonal part of the matrix, with standard errors."
COUPLING = (
    "The masked-probe test: for a probe v, how much of a block's part of Hv is made by the other "
    "blocks. Grey circles are what a matrix without structure gives; a block diagonal matrix has "
    "error 0 and cosine 1. Bars: what the products' errors can make."
)
SHARE = "Share of the off-diagonal blocks in the matrix's squared Frobenius norm."
MOST_CELLS = 200
"""Cells of a map that get their number written in."""


def layers(run: Run) -> list[Section]:
    """Return sections of what was measured: eigenvectors, traces of blocks, coupling."""
    return [*_concentrations(run), *_traces(run), *_couplings(run), *_shares(run)]


def _concentrations(run: Run) -> list[Section]:
    records = [(label, r) for label, r in run.labelled(HessianEigenpairs) if r.concentrations]
    if not records:
        return []
    title, sections = "Eigenvectors by layer", []
    if len(records) > 1:
        names = list(dict.fromkeys(name for _, r in records for name in layer_shares(r)))
        table = [[layer_shares(r).get(name, [np.nan])[0] for _, r in records] for name in names]
        columns = [label.name for label, _ in records]
        drawn = _map("the first eigenvector", np.array(table), names, columns, "training step")
        overview = State("", (), (Chart(drawn, rows_height(len(names)), wide=True),))
        sections.append(Section(f"{title}, over training", EIGENVECTORS, (overview,)))
    states = tuple(
        State(label, tuple(eigenvalue_rows(r)), (_eigenvectors(r),)) for label, r in records
    )
    return [*sections, Section(title, EIGENVECTORS, states)]


def _eigenvectors(pairs: HessianEigenpairs) -> Chart:
    shares = layer_shares(pairs)
    columns = [f"{i + 1}: {short(float(value))}" for i, value in enumerate(pairs.values)]
    names, table = list(shares), np.array(list(shares.values()))
    if len(columns) == 1:
        x, unit = 100 * table[:, 0], "share of the squared norm, %"
        drawn = _bars(f"eigenvector of {columns[0]}", unit, names, x, None)
    else:
        drawn = _map("eigenvectors", table, names, columns, "eigenvector: its eigenvalue")
    return Chart(drawn, rows_height(len(names)), wide=True)


def _map(
    title: str, shares: Array, names: Sequence[str], columns: Sequence[str], axis: str
) -> Figure:
    """Return shares `(names, columns)` as colours, and as numbers where there is room."""
    numbered = shares.size <= MOST_CELLS and len(columns) <= 12
    cells = {
        "type": "heatmap",
        "z": 100 * shares,
        "x": list(columns),
        "y": list(names),
        "colorscale": SHARES,
        "zmin": 0,
        "xgap": 1,
        "ygap": 1,
        "texttemplate": "%{z:.0f}" if numbered else "",
        "colorbar": {"title": {"text": "%"}, "thickness": 10, "outlinewidth": 0},
        "hovertemplate": "%{y}, %{x}: %{z:.2f} %<extra></extra>",
    }
    x = titled(axis) | {"type": "category", "showgrid": False, "nticks": 12}
    return figure(title, [cells], x, name_axis(names) | {"showgrid": False})


def _bars(
    title: str, unit: str, names: Sequence[str], values: Array, errors: Array | None
) -> Figure:
    bars = {
        "type": "bar",
        "x": values,
        "y": list(names),
        "orientation": "h",
        "width": 0.65,
        "marker": {"color": clear(BLUE, 0.6)},
        "hovertemplate": "%{y}: %{x:.5g}<extra></extra>",
    }
    if errors is not None:
        bars["error_x"] = {"array": errors, "color": INK, "thickness": 1.2, "width": 3}
    return figure(title, [bars], titled(unit), name_axis(names))


def _traces(run: Run) -> list[Section]:
    states = []
    for label, r in run.labelled(HessianTrace):
        if not r.blocks:
            continue
        unit = "loss per squared parameter"
        drawn = _bars("traces of blocks", unit, r.blocks, r.block_values, r.block_errors)
        rows = (("trace", str(Estimate(r.value, r.error))),)
        states.append(State(label, rows, (Chart(drawn, rows_height(len(r.blocks)), wide=True),)))
    return [Section("Trace by block", TRACES, tuple(states))] if states else []


def _couplings(run: Run) -> list[Section]:
    states = []
    for label, r in run.labelled(HessianBlockCoupling):
        height = rows_height(len(r.names)) + 24
        error = _dots(
            "relative error", r.names, r.relative_errors, r.null_relative_errors, r.noises
        )
        cosine = _dots("cosine", r.names, r.cosines, r.null_cosines, None)
        share = f"{r.share:.3f} of |Hv|^2 is made by off-diagonal blocks"
        states.append(
            State(label, (("share", share),), (Chart(error, height), Chart(cosine, height)))
        )
    return [Section("Block coupling", COUPLING, tuple(states))] if states else []


def _dots(
    name: str, blocks: Sequence[str], values: Array, null: Array, noises: Array | None
) -> Figure:
    """Return measured values of blocks, and those of a matrix without structure."""
    common = {"type": "scatter", "y": list(blocks), "mode": "markers"}
    common["hovertemplate"] = "%{y}: %{x:.4g}"
    circle = {"symbol": "circle-open", "color": GREY, "size": 8}
    plain = common | {"name": "no structure", "x": null, "marker": circle}
    found = common | {"name": "measured", "x": values, "marker": {"color": BLUE, "size": 8}}
    if noises is not None:
        found["error_x"] = {"array": noises, "thickness": 1.2, "width": 3}
    axis = titled(name) | {"rangemode": "tozero"}
    return figure(name, [plain, found], axis, name_axis(blocks), legend=True)


def _shares(run: Run) -> list[Section]:
    records = run.labelled(HessianOffBlockShare)
    if not records:
        return []
    if len(records) == 1:
        _, r = records[0]
        text = f"{Estimate(r.value, r.error)}; a matrix without structure has {r.null:.3f}"
        state = State("", (("off-block share", text),), ())
    else:
        steps = [step_of(r) for _, r in records]
        found = [Estimate(r.value, r.error) for _, r in records]
        series = [
            Series("no structure", GREY, steps, [r.null for _, r in records], dashed=True),
            Series.of("off-block share", VERMILLION, steps, found),
        ]
        state = State("", (), (Chart(over_steps("off-block share", "share", series), wide=True),))
    return [Section("Off-block share", SHARE, (state,))]
