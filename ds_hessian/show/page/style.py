"""Axes, series and colours that all figures of the page have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ds_hessian.records.density import Array
from ds_hessian.records.estimate import Estimate
from ds_hessian.show.page.run import Figure, Part
from ds_hessian.show.style import BLUE, COLORS, GREY, INK
from ds_hessian.show.training_view import Axis, step_scale

SHARES = [[0.0, "#FFFFFF"], [1.0, BLUE]]
"""Colour scale of shares."""
AXIS = {
    "showgrid": True,
    "gridcolor": "#E6E6E6",
    "zeroline": False,
    "showline": True,
    "linecolor": GREY,
    "ticks": "outside",
    "ticklen": 4,
    "tickcolor": GREY,
    "automargin": True,
    "exponentformat": "power",
    "title": {"font": {"size": 12}, "standoff": 8},
}
LOG = {"type": "log", "nticks": 6, "tickfont": {"size": 10}}
TEMPLATE = {
    "layout": {
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "title": {
            "font": {"size": 14},
            **{"x": 0.0, "xanchor": "left", "xref": "container"},
            **{"y": 1.0, "yanchor": "top", "yref": "container", "pad": {"t": 10}},
        },
        "margin": {"l": 56, "r": 14, "t": 40, "b": 44},
        "colorway": list(COLORS),
        "paper_bgcolor": "#FFFFFF",
        "plot_bgcolor": "#FFFFFF",
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hovermode": "closest",
        "dragmode": "zoom",
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "font": {"size": 11}},
    }
}
"""The template of all figures; the page holds it once."""


def clear(color: str, alpha: float) -> str:
    """Return the colour `#RRGGBB` with transparency."""
    return "rgba({}, {}, {}, {})".format(*bytes.fromhex(color[1:]), alpha)


def titled(text: str) -> Part:
    """Return the title of a figure or an axis."""
    return {"title": {"text": text}}


def figure(title: str, data: Sequence[Part], x: Part, y: Part, legend: bool = False) -> Figure:
    """Return traces in one pair of axes."""
    room = {"margin": {"t": 64 if legend else 40}, "showlegend": legend}
    return {"data": data, "layout": titled(title) | {"xaxis": x, "yaxis": y} | room}


def log_axis(name: str, values: Array) -> Part:
    """Return a logarithmic axis for the values above 0: at least a decade."""
    known = np.log10(values[values > 0])
    middle, half = (known.min() + known.max()) / 2, 0.55 * max(float(np.ptp(known)), 0.9)
    return titled(name) | LOG | {"range": [float(middle - half), float(middle + half)]}


def name_axis(names: Sequence[str]) -> Part:
    """Return an axis with a row for each name, the first on top; every one is written."""
    return {
        "type": "category",
        "range": [len(names) - 0.5, -0.5],
        "tickmode": "array",
        "tickvals": list(names),
        "ticklabelstandoff": 2,
    }


def positive(values: Array) -> Array:
    """Return the values that a logarithmic axis can show; NaN for the rest."""
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def rows_height(count: int) -> int:
    """Return the pixels of a figure with a row for each of so many names."""
    return 110 + max(22 * count, 60)


@dataclass(frozen=True)
class Series:
    """Values over training steps, or over another quantity."""

    name: str
    color: str
    at: Sequence[float]
    values: ArrayLike
    errors: ArrayLike | None = None
    dashed: bool = False
    lines: bool = True

    @classmethod
    def of(
        cls, name: str, color: str, at: Sequence[float], estimates: Sequence[Estimate], **kw: Any
    ) -> Series:
        """Return a series of values with error bars."""
        values, errors = [e.value for e in estimates], [e.error for e in estimates]
        return cls(name, color, at, values, errors, **kw)


def over_steps(title: str, unit: str, series: Sequence[Series], log: bool = False) -> Figure:
    """Return series over the training step, markers joined by lines."""
    x = titled("training step") | {"tickformat": ",d"}
    drawn = _lines(title, x, unit, series, log, "step %{x:,}: %{y:.5g}")
    return on_steps(drawn)


def on_steps(drawn: Figure) -> Figure:
    """Return a figure over training steps with an axis on which they do not crowd.

    Steps at logarithmic spacing are placed at asinh(step / scale), so that step 0 has a place too.
    The entry `meta` tells the page where to draw a line at the selected step.
    """
    steps = np.concatenate([np.asarray(part["x"], dtype=float) for part in drawn["data"]])
    scale = step_scale(steps)
    drawn["layout"]["meta"] = {"steps": scale}
    if scale is None:
        return drawn
    axis = Axis(scale, float(steps.min()), float(steps.max()))
    for part in drawn["data"]:
        shown = np.broadcast_to(part["x"], np.shape(part.get("z", part["x"])))
        part["customdata"] = shown.tolist()
        part["x"] = axis.at(part["x"])
        part["hovertemplate"] = part["hovertemplate"].replace("%{x:,}", "%{customdata:,}")
    ticks = [value for value, _ in axis.ticks()]
    drawn["layout"]["xaxis"] |= {
        "tickvals": axis.at(ticks).tolist(),
        "ticktext": [f"{value:,.0f}" for value in ticks],
    }
    return drawn


def over(quantity: str, title: str, unit: str, series: Sequence[Series], log: bool) -> Figure:
    """Return series over a positive quantity, on a logarithmic axis."""
    values = np.concatenate([np.asarray(s.at, dtype=float) for s in series])
    x = log_axis(quantity, values)
    return _lines(title, x, unit, series, log, quantity.split(" (")[0] + " %{x:.3g}: %{y:.5g}")


def _lines(
    title: str, x: Part, unit: str, series: Sequence[Series], log: bool, hover: str
) -> Figure:
    data = [_trace(s) | {"hovertemplate": hover} for s in series]
    values = np.concatenate([trace["y"] for trace in data])
    y = log_axis(unit, values) if log else titled(unit)
    return figure(title, data, x, y, legend=len(series) > 1)


def _trace(series: Series) -> Part:
    s = series
    bars = {}
    if s.errors is not None:
        errors = np.asarray(s.errors, dtype=float)
        bars = {"error_y": {"array": errors, "thickness": 1.2, "width": 3}}
    return bars | {
        "type": "scatter",
        "name": s.name,
        "x": list(s.at),
        "y": np.asarray(s.values, dtype=float),
        "mode": "lines+markers" if s.lines else "markers",
        "line": {"color": s.color, "width": 1.4, "dash": "dash" if s.dashed else "solid"},
        "marker": {"size": 5, "color": s.color},
        "opacity": 1.0 if s.lines else 0.6,
    }
