"""The spectrum at a step: single eigenvalues as stems, and the rest as far as it is known."""

from __future__ import annotations

import math

import numpy as np

from ds_hessian.records.density import Array
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Chart, Figure, Part, Run, Section, State
from ds_hessian.show.page.style import LOG, clear, titled
from ds_hessian.show.spectrum_table import spectrum_rows
from ds_hessian.show.spectrum_view import (
    BEYOND,
    BOUNDS,
    LOCATED,
    NOISE,
    SINGLE,
    Curve,
    Interval,
    SpectrumView,
    Stem,
)
from ds_hessian.show.style import BLUE, EIGENVALUE, GREY, INK, VERMILLION, short

TITLE = "Spectrum"
TEXT = (
    "Stems are single eigenvalues away from the bulk, with bounds on their errors; hollow ones are "
    "located, but not isolated enough to be counted. The line counts the eigenvalues at or beyond "
    "each value, seen from the middle of the spectrum; the bulk, enlarged, has the share at or "
    "below each value, and a density in bins that hold three Ritz values of each probe. Nothing is "
    "smoothed: bounds hold at each value with 95 % confidence over the probes. Dashed: zero; grey: "
    "what cannot be told from it. Drag to enlarge, double-click to go back."
)


def spectra(run: Run) -> list[Section]:
    """Return a state for each measured step."""
    return [Section(TITLE, TEXT, states)] if (states := _states(run)) else []


def _states(run: Run) -> tuple[State, ...]:
    found = list[State]()
    for label, s in run.labelled(HessianSpectrum):
        view = SpectrumView.of(s)
        rows = (("found", view.caption), *_loss(s), *spectrum_rows(s))
        charts = (
            Chart(_whole(view), 440, wide=True),
            Chart(_below(view), 300),
            Chart(_density(view), 300),
        )
        found.append(State(label, rows, charts))
    return tuple(found)


def _loss(spectrum: HessianSpectrum) -> list[tuple[str, str]]:
    s, found = spectrum, list[str]()
    if s.loss is not None:
        found.append(f"{s.loss:.4g}")
    if s.gradient_norm is not None:
        found.append(f"|gradient| {s.gradient_norm:.3g}")
    return [("loss", ", ".join(found))] if found else []


def _whole(view: SpectrumView) -> Figure:
    """Return stems, and the number of eigenvalues at or beyond each value."""
    bottom = min(0.5, view.n / 4)
    upper = view.beyond_bounds.upper
    assert upper is not None
    top = 1.6 * max(float(view.beyond.y.max()), float(upper.max()), 1.0)
    data = [
        *_band(view.beyond_bounds, bottom * 1e-3),
        _line(view.beyond, BEYOND, bottom * 1e-3),
        *_stems(view.singles, bottom, SINGLE, filled=True),
        *_stems(view.located, bottom, LOCATED, filled=False),
    ]
    layout = {
        "xaxis": titled(EIGENVALUE) | {"range": view.whole},
        "yaxis": titled("number of eigenvalues at or beyond")
        | LOG
        | {"range": [math.log10(bottom), math.log10(top)]},
        "showlegend": True,
        "legend": {"y": -0.16, "yanchor": "top"},
        "margin": {"t": 84, "b": 110},
        "annotations": _labels(view),
        "shapes": _zero_and_noise(view, view.whole),
    }
    return {"data": data, "layout": titled("whole spectrum") | layout}


def _below(view: SpectrumView) -> Figure:
    """Return the cumulative distribution over the bulk, with its bounds."""
    data = [*_band(view.below_bounds), _line(view.below, "at or below")]
    layout = {
        "xaxis": titled("eigenvalue") | {"range": view.bulk},
        "yaxis": titled("share of the eigenvalues") | {"range": [-0.02, 1.04]},
        "showlegend": False,
        "shapes": _zero_and_noise(view, view.bulk),
    }
    return {"data": data, "layout": titled("the bulk: share at or below") | layout}


def _density(view: SpectrumView) -> Figure:
    """Return the density in bins, and the Ritz values that they are made of."""
    inside = (view.ritz_values >= view.bulk[0]) & (view.ritz_values <= view.bulk[1])
    ticks = view.ritz_values[inside]
    heights = np.concatenate([[0.0], np.repeat(view.density, 2), [0.0]])
    data: list[Part] = [
        {
            "type": "scatter",
            "name": "density",
            "x": _narrow(np.repeat(view.edges, 2)),
            "y": _narrow(heights if len(view.edges) else np.empty(0)),
            "mode": "lines",
            "line": {"color": BLUE, "width": 1.4},
            "fill": "tozeroy",
            "fillcolor": clear(BLUE, 0.22),
            "hovertemplate": "%{x:.5g}: density %{y:.3g}<extra></extra>",
        },
        {
            "type": "scatter",
            "name": "Ritz value",
            "x": _narrow(ticks),
            "y": _narrow(np.zeros(len(ticks))),
            "mode": "markers",
            "marker": {"symbol": "line-ns-open", "size": 9, "color": INK},
            "cliponaxis": False,
            "hovertemplate": "Ritz value %{x:.6g}<extra></extra>",
        },
    ]
    top = 1.1 * float(view.density.max(initial=0.0)) or 1.0
    layout = {
        "xaxis": titled("eigenvalue; ticks: Ritz values") | {"range": view.bulk},
        "yaxis": titled("share per unit of eigenvalue") | {"range": [0, top]},
        "showlegend": False,
        "shapes": _zero_and_noise(view, view.bulk),
    }
    return {"data": data, "layout": titled(view.bin_widths) | layout}


def _narrow(values: Array) -> Array:
    return np.asarray(values, dtype=np.float32)


def _band(band: Curve, bottom: float = 0.0) -> list[Part]:
    """Return the two edges of a band, filled between."""
    assert band.upper is not None
    edge: Part = {"type": "scatter", "mode": "lines", "line": {"width": 0, "color": BLUE}}
    edge |= {"x": _narrow(band.x), "hoverinfo": "skip"}
    low = edge | {"y": _narrow(np.maximum(band.y, bottom)), "showlegend": False, "name": "lower"}
    high = edge | {"y": _narrow(np.maximum(band.upper, bottom)), "name": BOUNDS}
    return [low, high | {"fill": "tonexty", "fillcolor": clear(BLUE, 0.22)}]


def _line(curve: Curve, name: str, bottom: float = 0.0) -> Part:
    return {
        "type": "scatter",
        "name": name,
        "mode": "lines",
        "x": _narrow(curve.x),
        "y": _narrow(np.maximum(curve.y, bottom)),
        "line": {"color": BLUE, "width": 1.5},
        "hovertemplate": "%{x:.5g}: %{y:.4g}<extra></extra>",
    }


def _stems(stems: tuple[Stem, ...], bottom: float, name: str, filled: bool) -> list[Part]:
    """Return markers with bars, and the stems below them."""
    if not stems:
        return []
    heights = np.array([stem.beyond for stem in stems])
    down: Part = {"symmetric": False, "width": 0, "thickness": 1.1, "color": VERMILLION}
    down |= {"array": np.zeros(len(stems)), "arrayminus": heights - bottom}
    errors = np.array([stem.estimate.error for stem in stems])
    return [
        {
            "type": "scatter",
            "name": name,
            "x": np.array([stem.estimate.value for stem in stems]),
            "y": heights,
            "text": [str(stem.estimate) for stem in stems],
            "mode": "markers",
            "marker": {
                "symbol": "circle" if filled else "circle-open",
                "color": VERMILLION,
                "size": 7,
            },
            "error_x": {"array": errors, "color": VERMILLION, "thickness": 1.4, "width": 4},
            "error_y": down,
            "hovertemplate": "eigenvalue %{text}<extra></extra>",
        }
    ]


def _labels(view: SpectrumView) -> list[Part]:
    """Return the values of the stems, above the axes."""
    style: Part = {"textangle": -90, "showarrow": False, "yanchor": "bottom", "yref": "paper"}
    style |= {"y": 1.01, "font": {"color": VERMILLION, "size": 11}}
    values = [view.singles[i].estimate.value for i in view.labels]
    return [style | {"x": value, "text": short(value)} for value in values]


def _zero_and_noise(view: SpectrumView, interval: Interval) -> list[Part]:
    """Return a line at zero, and a band of values that may be zero."""
    shapes, where = list[Part](), {"yref": "y domain", "y0": 0, "y1": 1}
    if interval[0] <= 0 <= interval[1]:
        line = {"color": GREY, "width": 1, "dash": "dash"}
        shapes.append(where | {"type": "line", "x0": 0, "x1": 0, "line": line})
    noise = view.noise_in(interval)
    if noise is not None:
        style: Part = {"type": "rect", "fillcolor": GREY, "opacity": 0.25, "layer": "below"}
        style |= {"x0": noise[0], "x1": noise[1], "line": {"width": 0}, "name": NOISE}
        shapes.append(where | style)
    return shapes
