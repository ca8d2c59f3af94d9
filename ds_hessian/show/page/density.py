"""The spectrum at a step: log density with Ritz stems below, the bulk and the outliers enlarged."""

from __future__ import annotations

import math

import numpy as np

from ds_hessian.records.density import Array, Density
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Figure, Part, Run, Section, State
from ds_hessian.show.page.style import LOG, clear, titled
from ds_hessian.show.spectrum_table import spectrum_rows
from ds_hessian.show.spectrum_view import Interval, Panel, Stems, View, outlier_view, views_of
from ds_hessian.show.style import BLUE, EIGENVALUE, GREY, VERMILLION, short

TEXT = (
    "Smoothed density of the Hessian's eigenvalues on a logarithmic axis (its area is 1), below it "
    "the Ritz values with the share of the spectrum that each stands for. Triangles are outliers: "
    "single eigenvalues away from the bulk, with bounds on their errors. Dashed: zero; grey: where "
    "a value cannot be told from it. Drag to enlarge, double-click to go back."
)


def spectra(run: Run) -> list[Section]:
    """Return a state for each measured step."""
    states = tuple(
        State(label, (*_loss(s), *spectrum_rows(s)), tuple(_charts(s)))
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


def _charts(spectrum: HessianSpectrum) -> list[Chart]:
    density = spectrum.density(_grid(spectrum))
    whole, *enlarged = views_of(spectrum, density)
    outliers = outlier_view(spectrum)
    if enlarged and outliers is not None:
        enlarged.append(outliers)
    wide = len(enlarged) == 1
    shapes = [(whole, 460, True), *((view, 400, wide) for view in enlarged)]
    return [
        Chart(_figure(density, Panel.of(spectrum, density, view)), height, across)
        for view, height, across in shapes
    ]


def _grid(spectrum: HessianSpectrum) -> Array:
    """Return points that show every kernel: 27 for each, 257 over all."""
    values, widths = spectrum.ritz_values, spectrum.density().width
    around = values[..., None] + widths[..., None] * np.linspace(-6.5, 6.5, 27)
    span = np.linspace((values - 7 * widths).min(), (values + 7 * widths).max(), 257)
    return np.unique(np.concatenate([around.ravel(), span]))


def _figure(density: Density, panel: Panel) -> Figure:
    """Return the density above and the stems below, in one view."""
    view, bottom, top = panel.view, panel.bottom, panel.top
    decades = math.log10(top / bottom)
    room = [0.06 * decades]
    if panel.outliers:  # for the label of the highest
        room.append(0.3 * decades - math.log10(top / panel.heights.max()))
    x = {"range": view.range} | (_log_ticks(view.interval) if view.log else {})
    layout = {
        "xaxis": x | {"anchor": "y", "showticklabels": False},
        "xaxis2": x | titled(EIGENVALUE) | {"anchor": "y2", "matches": "x"},
        "yaxis": _log_axis("spectral density", bottom, top, max(room)) | {"domain": [0.34, 1.0]},
        "yaxis2": _log_axis("weight", panel.stems.bottom, 1.0, 0.6)
        | {"domain": [0.0, 0.29], "anchor": "x2", "nticks": 4},
        "showlegend": False,
        "annotations": _labels(panel),
        "shapes": _zero_and_noise(panel),
    }
    data = [
        *_curves(density, view, bottom),
        _triangles(panel.outliers, panel.heights),
        *_stems(panel.stems),
    ]
    return {"data": data, "layout": titled(view.name) | layout}


def _log_ticks(interval: Interval) -> Part:
    """Return ticks at 1, 2 and 5 of each decade; at powers of ten if there are many."""
    low, high = (math.floor(math.log10(end)) for end in interval)
    digits = (1, 2, 5) if high - low < 4 else (1,)
    places = [digit * 10.0**decade for decade in range(low, high + 1) for digit in digits]
    return {"type": "log", "tickvals": places, "ticktext": [f"{place:g}" for place in places]}


def _log_axis(name: str, bottom: float, top: float, room: float) -> Part:
    return titled(name) | LOG | {"range": [math.log10(bottom), math.log10(top) + room]}


def _curves(density: Density, view: View, bottom: float) -> list[Part]:
    """Return the density, and below it the band over the probes."""
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
    """Drop points that a straight line between their neighbours meets to 1 %, to save space."""
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


def _stems(stems: Stems) -> list[Part]:
    """Return Ritz values with their weights."""
    traces = list[Part]()
    for name, color, values, weights in (
        ("Ritz value", BLUE, stems.values, stems.weights),
        ("outlier", VERMILLION, stems.outlier_values, stems.outlier_weights),
    ):
        stem: Part = {"symmetric": False, "width": 0, "thickness": 1.0, "color": color}
        stem |= {"array": np.zeros(len(values)), "arrayminus": weights - stems.bottom}
        traces.append(
            {
                "type": "scatter",
                "name": name,
                "x": values,
                "y": weights,
                "mode": "markers",
                "marker": {"color": color, "size": 4},
                "error_y": stem,
                "hovertemplate": "%{x:.6g}: weight %{y:.3g}",
                "xaxis": "x2",
                "yaxis": "y2",
            }
        )
    return traces


def _triangles(outliers: list[Estimate], heights: Array) -> Part:
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


def _labels(panel: Panel) -> list[Part]:
    style = {"textangle": -90, "showarrow": False, "yshift": 9, "yanchor": "bottom"}
    style["font"] = {"color": VERMILLION, "size": 11}
    return [
        style
        | {"x": panel.view.position(panel.outliers[i].value), "y": math.log10(panel.heights[i])}
        | {"text": short(panel.outliers[i].value)}
        for i in panel.labels
    ]


def _zero_and_noise(panel: Panel) -> list[Part]:
    """Return a line at zero, and a band of values that may be zero, in both rows."""
    shapes = list[Part]()
    for axis in ("", "2"):
        where = {"xref": f"x{axis}", "yref": f"y{axis} domain", "y0": 0, "y1": 1}
        if panel.zero:
            line = {"color": GREY, "width": 1, "dash": "dash"}
            shapes.append(where | {"type": "line", "x0": 0, "x1": 0, "line": line})
        if panel.noise is not None:
            low, high = panel.noise
            style = {"type": "rect", "fillcolor": GREY, "opacity": 0.2, "layer": "below"}
            shapes.append(where | style | {"x0": low, "x1": high, "line": {"width": 0}})
    return shapes
