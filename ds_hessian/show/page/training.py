"""Figures over training steps: eigenvalues, trace, loss, curvature along gradient and update."""

from __future__ import annotations

import numpy as np

from ds_hessian.records.analyses import HessianSharpness
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Run, Section, State, step_of
from ds_hessian.show.page.style import Series, over_steps
from ds_hessian.show.style import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    INK,
    MATRICES,
    PURPLE,
    VERMILLION,
)

TEXT = (
    "Bars are bounds for eigenvalues, standard errors for the trace. The largest eigenvalue can be "
    "larger than its bar says, where a few more products would find another."
)
CURVATURE = "loss per squared parameter"


def training(run: Run) -> list[Section]:
    """Return one state; nothing where there is only one step."""
    spectra, sharpness = run.of(HessianSpectrum), run.of(HessianSharpness)
    curvatures = run.every(HessianCurvatures)
    if len({step_of(record) for record in [*spectra, *sharpness, *curvatures]}) < 2:
        return []
    charts = [_eigenvalues(spectra, sharpness)] if spectra or sharpness else []
    steps = [step_of(s) for s in spectra]
    if len(spectra) > 1:
        trace = [Series.of("trace", INK, steps, [s.trace for s in spectra])]
        charts.append(Chart(over_steps("trace", CURVATURE, trace)))
    charts += _losses(spectra, sharpness) + _along(sharpness) + _directions(curvatures)
    return [Section("Over training", TEXT, (State("", (), tuple(charts)),))]


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
    drawn = over_steps("eigenvalues", CURVATURE, series)
    drawn["layout"]["showlegend"] = True
    return Chart(drawn, 420, wide=True)


def _losses(spectra: list[HessianSpectrum], sharpness: list[HessianSharpness]) -> list[Chart]:
    """Return loss and gradient norm of the measured micro-batches, from any record with them."""
    found: dict[str, dict[int, float]] = {"loss": {}, "gradient norm": {}}
    records: list[HessianSpectrum | HessianSharpness] = [*spectra, *sharpness]
    for record in records:
        for name, value in (("loss", record.loss), ("gradient norm", record.gradient_norm)):
            if value is not None:
                found[name][step_of(record)] = value
    units = {"loss": "loss", "gradient norm": "loss per parameter"}
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
    curvatures = [Series("gradient", BLUE, steps, [s.gradient_curvature for s in sharpness])]
    updates = [s.update_curvature for s in sharpness]
    if any(value is not None for value in updates):
        curvatures.append(Series("Adam's last step", PURPLE, steps, _known(updates)))
    charts = [Chart(over_steps("curvature along", CURVATURE, curvatures))]
    adam = [(step, s.preconditioned) for step, s in zip(steps, sharpness, strict=True)]
    found = [(step, estimate) for step, estimate in adam if estimate is not None]
    if found:
        at, estimates = zip(*found, strict=True)
        title = "largest, preconditioned by Adam"
        line = [Series.of("preconditioned", GREEN, at, estimates)]
        charts.append(Chart(over_steps(title, "1 / learning rate", line)))
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


def _known(values: list[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]
