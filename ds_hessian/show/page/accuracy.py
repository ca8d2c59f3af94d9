"""Cost of the results, and accuracy of the products that they are made of."""

from __future__ import annotations

import numpy as np

from ds_hessian.records.density import Array
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Figure, Label, Run, Section, State, step_of
from ds_hessian.show.page.style import Series, figure, log_axis, over_steps, positive, titled
from ds_hessian.show.style import BLUE, COLORS, GREEN, GREY, VERMILLION

COST = "Wall-clock time of the spectra; one gradient is over the same micro-batches."
ACCURACY = (
    "Estimated error of each Hessian-vector product, relative to its norm; the displacement h at "
    "which it was made; and its nonlinearity: how much of the gradient's change is not linear in h."
)


def costs(run: Run) -> list[Section]:
    """Return the costs over training; nothing for a single spectrum, whose figures are in its
    table.
    """
    spectra = run.of(HessianSpectrum)
    if len(spectra) < 2:
        return []
    steps = [step_of(s) for s in spectra]
    labels = [label for label, s in run.labelled(HessianSpectrum) if s in spectra]
    charts = [Chart(_times(spectra, labels)), _in_gradients(spectra, steps)]
    if any(s.product_errors.any() for s in spectra):
        charts.append(_errors(spectra, steps))
    if any(s.eigenvalue_max.value and s.eigenvalue_max.error for s in spectra):
        charts.append(_bounds(spectra, steps))
    return [Section("Cost and accuracy, over training", COST, (State("", (), tuple(charts)),))]


def _times(spectra: list[HessianSpectrum], labels: list[Label]) -> Figure:
    """Return a chart of the seconds of each spectrum, stacked."""
    products = np.array([s.cost.products * s.cost.seconds_per_product for s in spectra])
    gradients = np.array([s.cost.seconds_per_gradient for s in spectra])
    rest = np.array([s.cost.seconds_total for s in spectra]) - products - gradients
    data = [
        {
            "type": "bar",
            "name": name,
            "x": [label.name for label in labels],
            "y": seconds,
            "marker": {"color": color},
            "hovertemplate": "step %{x}: %{y:.3g} s",
        }
        for name, color, seconds in (
            ("products", BLUE, products),
            ("one gradient", GREEN, gradients),
            ("rest", GREY, np.maximum(rest, 0)),
        )
    ]
    x = titled("training step") | {"type": "category", "nticks": 8}
    drawn = figure("time of a spectrum", data, x, titled("seconds"), legend=True)
    drawn["layout"]["barmode"] = "stack"
    return drawn


def _in_gradients(spectra: list[HessianSpectrum], steps: list[int]) -> Chart:
    timed = [s.cost.product_time_in_gradients for s in spectra]
    counted = [s.cost.gradients_per_product for s in spectra]
    series = [
        Series("counted", GREY, steps, counted, dashed=True),
        Series("timed", BLUE, steps, [np.nan if t is None else t for t in timed]),
    ]
    drawn = over_steps("cost of a product", "gradients", series)
    drawn["layout"]["yaxis"]["rangemode"] = "tozero"
    return Chart(drawn)


def _errors(spectra: list[HessianSpectrum], steps: list[int]) -> Chart:
    found = [s.relative_errors for s in spectra]
    series = [
        Series("median", BLUE, steps, [float(np.median(e)) or np.nan for e in found]),
        Series("worst", VERMILLION, steps, [float(e.max()) or np.nan for e in found]),
    ]
    return Chart(over_steps("relative error of the products", "estimated error", series, log=True))


def _bounds(spectra: list[HessianSpectrum], steps: list[int]) -> Chart:
    largest = [s.eigenvalue_max for s in spectra]
    relative = [e.error / abs(e.value) if e.value and e.error else np.nan for e in largest]
    series = [Series("largest eigenvalue", BLUE, steps, relative)]
    title = "error of the largest eigenvalue"
    return Chart(over_steps(title, "bound, relative to it", series, log=True))


def accuracy(run: Run) -> list[Section]:
    """Return a state for each spectrum: its products one by one."""
    states = []
    for label, s in run.labelled(HessianSpectrum):
        charts = [
            _products("estimated relative error", s.relative_errors),
            _products("displacement h", s.displacements),
            _products("nonlinearity", s.nonlinearities),
        ]
        shown = tuple(chart for chart in charts if chart is not None)
        rows = () if s.product_errors.any() else (("product errors", "not known"),)
        states.append(State(label, rows, shown))
    return [Section("Products", ACCURACY, tuple(states))] if states else []


def _products(name: str, values: Array) -> Chart | None:
    """Return a chart of `(P, m)` figures over the number of the product; None without any."""
    if not (values > 0).any():
        return None
    data = [
        {
            "type": "scatter",
            "name": f"probe {number}",
            "x": list(range(1, len(row) + 1)),
            "y": positive(row),
            "mode": "lines+markers",
            "marker": {"size": 4},
            "line": {"color": COLORS[number % len(COLORS)], "width": 1.2},
            "hovertemplate": "product %{x}: %{y:.3g}",
        }
        for number, row in enumerate(values)
    ]
    named = 1 < len(values) <= len(COLORS)
    return Chart(figure(name, data, titled("product"), log_axis(name, values), legend=named))
