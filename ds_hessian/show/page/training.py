"""Figures over training steps: density, eigenvalues and where they become unstable, loss, rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hessian.records.analyses import HessianSharpness
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Figure, Part, Run, Section, State, step_of
from ds_hessian.show.page.style import Series, on_steps, over_steps, titled
from ds_hessian.show.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    INK,
    MATRICES,
    PURPLE,
    VERMILLION,
    short,
)
from ds_hessian.show.training_view import LEAST, Axis, crossings, edge_of, spread, tracks

TEXT = (
    "Bars are bounds for eigenvalues, standard errors for the trace. The largest eigenvalue can be "
    "larger than its bar says, where a few more products would find another. Dashed is the edge of "
    "stability of the job's own optimizer, where its learning rate is known: above it, its steps "
    "overshoot along that eigenvector on a quadratic loss (2 / learning rate for SGD; for Adam 38 "
    "/ learning rate with beta1 = 0.9, of the Hessian preconditioned by Adam)."
)
MAP = "eigenvalues over training: how many lie where"
CURVATURE = "loss per squared parameter"
EDGE = "edge of stability"
COUNTS = [[0.0, "#D6E9F3"], [0.5, "#56A7D2"], [1.0, "#08306B"]]
"""Colour scale of the number of eigenvalues in a cell, one to all; the page has its dark one."""

Curved = HessianSpectrum | HessianSharpness


def training(run: Run) -> list[Section]:
    """Return one state; nothing where there is only one step."""
    spectra, sharpness = run.of(HessianSpectrum), run.of(HessianSharpness)
    curvatures = run.every(HessianCurvatures)
    if len({step_of(record) for record in [*spectra, *sharpness, *curvatures]}) < 2:
        return []
    charts = [Chart(_map(spectra), 460, wide=True)] if len(spectra) > 1 else []
    charts += [_eigenvalues(spectra, sharpness)] if spectra or sharpness else []
    steps = [step_of(s) for s in spectra]
    if len(spectra) > 1:
        trace = [Series.of("trace", INK, steps, [s.trace for s in spectra])]
        charts.append(Chart(over_steps("trace", CURVATURE, trace)))
    charts += _losses([*spectra, *sharpness]) + _along(sharpness) + _directions(curvatures)
    rows = tuple(_stability([*spectra, *sharpness], sharpness))
    return [Section("Over training", TEXT, (State("", rows, tuple(charts)),))]


def _map(spectra: list[HessianSpectrum]) -> Figure:
    """Return the number of eigenvalues as colours over steps, with tracks of the extreme ones."""
    axis, steps = Axis.of(spectra), [step_of(s) for s in spectra]
    edges = axis.edges()
    counts = np.stack([spread(s, edges) for s in spectra], axis=1)
    logs = np.where(counts >= LEAST, np.log10(np.maximum(counts, LEAST)), np.nan)
    top = float(np.log10(max(s.n for s in spectra)))
    powers = list(range(0, int(top) + 1, 1 + int(top) // 6))
    places = axis.at(edges)
    cells: Part = {
        "type": "heatmap",
        "name": "eigenvalues",
        "x": steps,
        "y": np.asarray((places[1:] + places[:-1]) / 2, dtype=np.float32),
        "z": np.asarray(logs, dtype=np.float32),
        "colorscale": COUNTS,
        "zmin": 0,
        "zmax": top,
        "colorbar": {
            "title": {"text": "eigenvalues", "side": "right"},
            "tickvals": powers,
            "ticktext": [f"{10**p:,}" if p < 5 else f"1e{p}" for p in powers],
            "thickness": 10,
            "outlinewidth": 0,
        },
        "hovertemplate": "step %{x:,}: 10^%{z:.1f} eigenvalues<extra></extra>",
    }
    data = [cells, *_tracks(spectra, steps, axis)]
    ticks = axis.ticks()
    layout = {
        "xaxis": titled("training step") | {"tickformat": ",d", "showgrid": False},
        "yaxis": titled(CURVATURE)
        | {"tickvals": axis.at([value for value, _ in ticks]).tolist()}
        | {"ticktext": [text for _, text in ticks], "showgrid": False},
        "showlegend": False,
    }
    return on_steps({"data": data, "layout": titled(MAP) | layout})


def _tracks(spectra: Sequence[HessianSpectrum], steps: list[int], axis: Axis) -> list[Part]:
    lines = []
    for track in tracks(spectra):
        values = [np.nan if e is None else e.value for e in track]
        lines.append(
            {
                "type": "scatter",
                "name": "track",
                "x": steps,
                "y": axis.at(values),
                "text": ["" if e is None else str(e) for e in track],
                "mode": "lines+markers",
                "line": {"color": VERMILLION, "width": 1.2},
                "marker": {"size": 4, "color": VERMILLION},
                "hovertemplate": "step %{x:,}: %{text}<extra></extra>",
            }
        )
    return lines


def _eigenvalues(spectra: list[HessianSpectrum], sharpness: list[HessianSharpness]) -> Chart:
    steps = [step_of(s) for s in spectra]
    between = [
        (step, outlier)
        for step, s in zip(steps, spectra, strict=True)
        for outlier in s.outlier_eigenvalues()
        if outlier not in (s.eigenvalue_max, s.eigenvalue_min)
    ]
    series = []
    if between:
        values = [outlier for _, outlier in between]
        series.append(Series.of("outliers", GREY, [s for s, _ in between], values, lines=False))
    if sharpness:
        found = [s.eigenvalue_max for s in sharpness]
        at = [step_of(s) for s in sharpness]
        series.append(Series.of("largest (sharpness)", GREEN, at, found, lines=not spectra))
    if spectra:
        largest, smallest = zip(
            *((s.eigenvalue_max, s.eigenvalue_min) for s in spectra), strict=True
        )
        series.append(Series.of("largest", BLUE, steps, largest))
        series.append(Series.of("smallest", VERMILLION, steps, smallest))
    series += _edges([*spectra, *sharpness], preconditioned=False)
    drawn = over_steps("eigenvalues", CURVATURE, series)
    drawn["layout"]["showlegend"] = True
    return Chart(drawn, 420, wide=True)


def _edges(records: Sequence[Curved], preconditioned: bool) -> list[Series]:
    """Return the edge of stability over training, where the optimizer has one."""
    known = {step_of(r): edge_of(r.provenance.optimizer, preconditioned) for r in records}
    found = {step: edge for step, edge in sorted(known.items()) if edge is not None}
    values = list(found.values())
    return [Series(EDGE, PURPLE, list(found), values, dashed=True)] if found else []


def _stability(
    records: Sequence[Curved], sharpness: Sequence[HessianSharpness]
) -> list[tuple[str, str]]:
    """Return where the edge of stability is crossed, in words."""
    ordered = sorted(records, key=step_of)
    rows = [
        _crossed(
            "stability",
            "largest eigenvalue",
            [step_of(r) for r in ordered],
            [r.eigenvalue_max.value for r in ordered],
            [edge_of(r.provenance.optimizer) for r in ordered],
        )
    ]
    adam = [(r, r.preconditioned) for r in sharpness if r.preconditioned is not None]
    rows.append(
        _crossed(
            "stability (Adam)",
            "largest preconditioned eigenvalue",
            [step_of(r) for r, _ in adam],
            [estimate.value for _, estimate in adam],
            [edge_of(r.provenance.optimizer, preconditioned=True) for r, _ in adam],
        )
    )
    return [row for row in rows if row is not None]


def _crossed(
    name: str,
    what: str,
    steps: Sequence[int],
    values: Sequence[float],
    edges: Sequence[float | None],
) -> tuple[str, str] | None:
    known = [(value, edge) for value, edge in zip(values, edges, strict=True) if edge is not None]
    if not known:
        return None
    value, edge = known[-1]
    text = f"the {what} is {short(value / edge)} of the edge of stability at the last step"
    if found := crossings(steps, values, edges):
        text += "; it went above the edge at step " + ", ".join(f"{step:,}" for step in found[:8])
    return name, text


def _losses(records: Sequence[Curved]) -> list[Chart]:
    """Return loss and gradient norm of the measured micro-batches, and the learning rate."""
    found: dict[str, dict[int, float]] = {"loss": {}, "gradient norm": {}, "learning rate": {}}
    for record in records:
        optimizer = record.provenance.optimizer
        for name, value in (
            ("loss", record.loss),
            ("gradient norm", record.gradient_norm),
            ("learning rate", None if optimizer is None else optimizer.learning_rate),
        ):
            if value is not None:
                found[name][step_of(record)] = value
    units = {
        "loss": "loss",
        "gradient norm": "loss per parameter",
        "learning rate": "learning rate",
    }
    return [
        Chart(over_steps(name, units[name], [Series(name, INK, sorted(values), ordered)]))
        for name, values in found.items()
        if len(values) > 1
        for ordered in [[values[step] for step in sorted(values)]]
    ]


def _along(sharpness: list[HessianSharpness]) -> list[Chart]:
    if len(sharpness) < 2:
        return []
    steps = [step_of(s) for s in sharpness]
    curvatures = []
    for name, label, color in (
        ("gradient", "gradient", BLUE),
        ("update", "Adam's last step", PURPLE),
    ):
        known = [
            (step, s.along[name])
            for step, s in zip(steps, sharpness, strict=True)
            if name in s.along
        ]
        if known:
            curvatures.append(Series.of(label, color, *zip(*known, strict=True)))
    charts = [Chart(over_steps("curvature along", CURVATURE, curvatures))]
    adam = [(step, s.preconditioned) for step, s in zip(steps, sharpness, strict=True)]
    found = [(step, estimate) for step, estimate in adam if estimate is not None]
    if found:
        at, estimates = zip(*found, strict=True)
        title = "largest, preconditioned by Adam"
        lines = [Series.of("preconditioned", GREEN, at, estimates)]
        lines += _edges(sharpness, preconditioned=True)
        charts.append(Chart(over_steps(title, "1 / learning rate", lines)))
    return charts


def _directions(curvatures: list[HessianCurvatures]) -> list[Chart]:
    """Return the curvature along each direction, one chart for each operator."""
    charts = []
    for operator in dict.fromkeys(c.provenance.operator for c in curvatures):
        mine = [c for c in curvatures if c.provenance.operator == operator]
        series = []
        names = dict.fromkeys(name for c in mine for name in c.directions)
        for number, name in enumerate(names):
            found = [(step_of(c), c.along(name)) for c in mine if name in c.directions]
            steps, estimates = zip(*found, strict=True)
            series.append(Series.of(name, COLORS[number % len(COLORS)], steps, estimates))
        if len(mine) > 1:
            title = f"curvature along directions, {MATRICES[operator]}"
            charts.append(Chart(over_steps(title, CURVATURE, series)))
    return charts
