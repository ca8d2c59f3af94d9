"""The spectrum at a step: log density with Ritz stems below, the bulk and the outliers enlarged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_hessian.records.density import Array, Density, bulk_interval
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Figure, Run, Section, State
from ds_hessian.show.page.style import EIGENVALUE, LOG, clear, titled
from ds_hessian.show.spectrum_picture import (
    BLUE,
    GREY,
    VERMILLION,
    Interval,
    density_limits,
    labelled,
    short,
    views_of,
)
from ds_hessian.show.table import table_rows

WHOLE, BULK = "whole spectrum", "bulk, enlarged"
TEXT = (
    "Smoothed density of the Hessian's eigenvalues on a logarithmic axis (its area is 1), below it "
    "the Ritz values with the share of the spectrum that each stands for. Triangles are outliers: "
    "single eigenvalues away from the bulk, with bounds on their errors. Dashed: zero; grey: where "
    "a value cannot be told from it. Drag to enlarge, double-click to go back."
)


def spectra(run: Run) -> list[Section]:
    """A state for each measured step."""
    states = tuple(
        State(label, (*_loss(s), *table_rows(s)), tuple(_charts(s)))
        for label, s in run.labelled(HessianSpectrum)
    )
    return [Section("Spectrum", TEXT, states)] if states else []


def _loss(spectrum: HessianSpectrum) -> list[tuple[str, str]]:
    s, found = spectrum, list[str]()
    if s.loss is not None:
        found.append(f"{s.loss:.4g}")
    if s.gradient_norm is not None:
        found.append(f"|gradient| {s.gradient_norm:.3g}")
    return [("loss", ", ".join(found))] if found else []


@dataclass(frozen=True)
class View:
    """What a figure shows of the spectrum."""

    name: str
    interval: Interval
    log: bool = False

    def shows(self, values: ArrayLike) -> NDArray[np.bool_]:
        """Which of the values lie in it."""
        return (np.asarray(values) >= self.interval[0]) & (np.asarray(values) <= self.interval[1])

    def place(self, value: float) -> float:
        """Where a value lies on the axis."""
        return math.log10(value) if self.log else value

    @property
    def range(self) -> Interval:
        """Ends of the axis."""
        return self.place(self.interval[0]), self.place(self.interval[1])


def _charts(spectrum: HessianSpectrum) -> list[Chart]:
    density = spectrum.density(_grid(spectrum))
    whole, *bulk = views_of(spectrum, density)
    enlarged = [View(BULK, view) for view in bulk]
    outliers = _outlier_view(spectrum)
    if bulk and outliers is not None:
        enlarged.append(outliers)
    charts = [Chart(_figure(spectrum, density, View(WHOLE, whole)), 460, wide=True)]
    wide = len(enlarged) == 1
    return charts + [Chart(_figure(spectrum, density, view), 400, wide) for view in enlarged]


def _grid(spectrum: HessianSpectrum) -> Array:
    """Points that show every kernel: 27 for each, 257 over all."""
    values, widths = spectrum.ritz_values, spectrum.density().width
    around = values[..., None] + widths[..., None] * np.linspace(-6.5, 6.5, 27)
    span = np.linspace((values - 7 * widths).min(), (values + 7 * widths).max(), 257)
    return np.unique(np.concatenate([around.ravel(), span]))


def _outlier_view(spectrum: HessianSpectrum) -> View | None:
    """The outliers above the bulk, which lie decades apart; None where there are none."""
    rows = zip(spectrum.ritz_values, spectrum.weights, strict=True)
    top = max(bulk_interval(*row)[1] for row in rows)
    shown = [o for o in spectrum.outlier_eigenvalues() if o.value - o.error > max(top, 0.0)]
    if not shown:
        return None
    low = min(0.8 * o.value for o in shown)
    high = max(1.15 * o.value + 2 * o.error for o in shown)
    return View("outliers above the bulk, logarithmic", (low, high), log=True)


def _figure(spectrum: HessianSpectrum, density: Density, view: View) -> Figure:
    """Density above, stems below, in one view."""
    bottom, top = density_limits(spectrum, density, view.interval, whole=view.name == WHOLE)
    outliers = [o for o in spectrum.outlier_eigenvalues() if view.shows(o.value)]
    heights = np.interp([o.value for o in outliers], density.grid, density.values)
    heights = np.maximum(heights, bottom)
    decades = math.log10(top / bottom)
    room = [0.06 * decades]
    if len(outliers):  # for the label of the highest
        room.append(0.3 * decades - math.log10(top / heights.max()))
    stems, lowest = _stems(spectrum, view)
    x = {"range": view.range} | (_log_ticks(view.interval) if view.log else {})
    layout = {
        "xaxis": x | {"anchor": "y", "showticklabels": False},
        "xaxis2": x | titled(EIGENVALUE) | {"anchor": "y2", "matches": "x"},
        "yaxis": _log_axis("spectral density", bottom, top, max(room)) | {"domain": [0.34, 1.0]},
        "yaxis2": _log_axis("weight", lowest, 1.0, 0.6)
        | {"domain": [0.0, 0.29], "anchor": "x2", "nticks": 4},
        "showlegend": False,
        "annotations": _labels(outliers, heights, view),
        "shapes": [] if view.log else _zero_and_noise(spectrum, view.interval),
    }
    data = [*_curves(density, view, bottom), _triangles(outliers, heights), *stems]
    return {"data": data, "layout": titled(view.name) | layout}


def _log_ticks(interval: Interval) -> dict[str, Any]:
    """A logarithmic axis with 1, 2 and 5 of each decade written out; powers if there are many."""
    low, high = (math.floor(math.log10(end)) for end in interval)
    digits = (1, 2, 5) if high - low < 4 else (1,)
    places = [digit * 10.0**decade for decade in range(low, high + 1) for digit in digits]
    return {"type": "log", "tickvals": places, "ticktext": [f"{place:g}" for place in places]}


def _log_axis(name: str, bottom: float, top: float, room: float) -> dict[str, Any]:
    return titled(name) | LOG | {"range": [math.log10(bottom), math.log10(top) + room]}


def _curves(density: Density, view: View, bottom: float) -> list[dict[str, Any]]:
    """The density, and below it the band over the probes."""
    inside = np.convolve(view.shows(density.grid), [1, 1, 1], "same") > 0  # and a neighbour each
    band = density.band()
    curves = np.stack([density.values, *(band or ())])[:, inside]
    x, curves = _thinned(density.grid[inside], np.maximum(curves, bottom * 1e-3))
    common = {"type": "scatter", "mode": "lines", "x": x.astype(np.float32)}
    mean, *edges = [common | {"y": row.astype(np.float32)} for row in curves]
    for edge, fill in zip(edges, ("none", "tonexty"), strict=False):
        style = {"fill": fill, "fillcolor": clear(BLUE, 0.35), "hoverinfo": "skip"}
        edge |= style | {"name": "95 % over probes", "line": {"width": 0}}
    mean |= {
        "name": "density",
        "line": {"color": BLUE, "width": 1.6},
        "fill": "tozeroy",
        "fillcolor": clear(BLUE, 0.18),
        "hovertemplate": "%{x:.5g}: density %{y:.3g}<extra></extra>",
    }
    return [*edges, mean]


def _thinned(x: Array, curves: Array) -> tuple[Array, Array]:
    """Without points that a straight line between their neighbours meets to 1 %, for the file."""
    while len(x) > 2:
        logs = np.log(curves)
        share = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        line = logs[:, :-2] + share * (logs[:, 2:] - logs[:, :-2])
        spare = np.pad((abs(line - logs[:, 1:-1]) < 2e-3).all(0), 1)
        spare[::2] = False  # never two neighbours at once
        if not spare.any():
            break
        x, curves = x[~spare], curves[:, ~spare]
    return x, curves


def _stems(spectrum: HessianSpectrum, view: View) -> tuple[list[dict[str, Any]], float]:
    """Ritz values with their weights, and where the axis begins."""
    values, weights = spectrum.ritz_values, spectrum.weights
    shown = view.shows(values) & (weights > 0)
    bottom = float(weights[shown].min(initial=1.0)) / 10
    mask, stems = spectrum.outliers(), list[dict[str, Any]]()
    for name, color, chosen in (
        ("Ritz value", BLUE, shown & ~mask),
        ("outlier", VERMILLION, shown & mask),
    ):
        stem: dict[str, Any] = {"symmetric": False, "width": 0, "thickness": 1.0, "color": color}
        stem |= {"array": np.zeros(chosen.sum()), "arrayminus": weights[chosen] - bottom}
        stems.append(
            {
                "type": "scatter",
                "name": name,
                "x": values[chosen],
                "y": weights[chosen],
                "mode": "markers",
                "marker": {"color": color, "size": 4},
                "error_y": stem,
                "hovertemplate": "%{x:.6g}: weight %{y:.3g}",
                "xaxis": "x2",
                "yaxis": "y2",
            }
        )
    return stems, bottom


def _triangles(outliers: list[Estimate], heights: Array) -> dict[str, Any]:
    errors = np.array([o.error for o in outliers])
    return {
        "type": "scatter",
        "name": "outliers",
        "x": np.array([o.value for o in outliers]),
        "y": heights,
        "text": list(map(str, outliers)),
        "mode": "markers",
        "marker": {"symbol": "triangle-down", "color": VERMILLION, "size": 9},
        "error_x": {"array": errors, "color": VERMILLION, "thickness": 1.4, "width": 4},
        "hovertemplate": "eigenvalue %{text}<extra></extra>",
    }


def _labels(outliers: list[Estimate], heights: Array, view: View) -> list[dict[str, Any]]:
    places = [view.place(o.value) for o in outliers]
    style = {"textangle": -90, "showarrow": False, "yshift": 9, "yanchor": "bottom"}
    style["font"] = {"color": VERMILLION, "size": 11}
    return [
        style | {"x": places[i], "y": math.log10(heights[i]), "text": short(outliers[i].value)}
        for i in labelled(places, view.range, apart=0.04)
    ]


def _zero_and_noise(spectrum: HessianSpectrum, view: Interval) -> list[dict[str, Any]]:
    """A line at zero, and a band where a value cannot be told from it, in both rows."""
    shapes = list[dict[str, Any]]()
    noise = spectrum.product_noise
    low, high = max(-noise, view[0]), min(noise, view[1])
    for axis in ("", "2"):
        place = {"xref": f"x{axis}", "yref": f"y{axis} domain", "y0": 0, "y1": 1}
        if view[0] <= 0 <= view[1]:
            line = {"color": GREY, "width": 1, "dash": "dash"}
            shapes.append(place | {"type": "line", "x0": 0, "x1": 0, "line": line})
        if noise > 2e-3 * (view[1] - view[0]) and low < high:
            style = {"type": "rect", "fillcolor": GREY, "opacity": 0.2, "layer": "below"}
            shapes.append(place | style | {"x0": low, "x1": high, "line": {"width": 0}})
    return shapes
