"""Everything that a picture of a spectrum shows, computed once for all renderers.

The renderers (`ds_hessian.show.spectrum_picture` with matplotlib, `ds_hessian.show.page.density`
with plotly) only draw it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_hessian.records.density import Density
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum

Array = NDArray[np.float64]
Interval = tuple[float, float]

WHOLE, BULK = "whole spectrum", "bulk, enlarged"
ZOOM_FROM = 5.0
"""The bulk gets a panel of its own where the whole spectrum is this many times as wide."""
MOST_LABELS = 8
APART = 0.04
"""Labels are at least this share of the axis apart."""
DECADES = 6
"""Decades of density that the whole spectrum shows below its highest peak."""


@dataclass(frozen=True)
class View:
    """The part of the eigenvalue axis that a panel shows."""

    name: str
    interval: Interval
    log: bool = False

    def shows(self, values: ArrayLike) -> NDArray[np.bool_]:
        """Return which of the values lie in it."""
        return (np.asarray(values) >= self.interval[0]) & (np.asarray(values) <= self.interval[1])

    def position(self, value: float) -> float:
        """Return where a value lies on the axis."""
        return math.log10(value) if self.log else value

    @property
    def range(self) -> Interval:
        """The ends of the axis."""
        return self.position(self.interval[0]), self.position(self.interval[1])


@dataclass(frozen=True)
class Stems:
    """Ritz values with their weights; the axis of the weights begins at `bottom`."""

    bottom: float
    values: Array
    weights: Array
    outlier_values: Array
    outlier_weights: Array


@dataclass(frozen=True)
class Panel:
    """Everything that is drawn in one view of a spectrum.

    Attributes:
        view: The part of the axis.
        bottom: Lowest density on the axis.
        top: Highest density in the view.
        outliers: Outliers in the view, in descending order.
        heights: Density at each of them, at least `bottom`.
        labels: Which of the outliers get a label.
        stems: Ritz values in the view.
        zero: Whether the view has the eigenvalue 0.
        noise: Interval of values that may be 0; None where it is too small to see.
    """

    view: View
    bottom: float
    top: float
    outliers: list[Estimate]
    heights: Array
    labels: list[int]
    stems: Stems
    zero: bool
    noise: Interval | None

    @classmethod
    def of(cls, spectrum: HessianSpectrum, density: Density, view: View) -> Panel:
        """Return what there is to draw of the spectrum in this view."""
        bottom, top = _limits(spectrum, density, view)
        outliers = [o for o in spectrum.outlier_eigenvalues() if view.shows(o.value)]
        heights = np.interp([o.value for o in outliers], density.grid, density.values)
        low, high = view.interval
        noise = spectrum.product_noise
        ends = max(-noise, low), min(noise, high)
        seen = not view.log and noise > 2e-3 * (high - low) and ends[0] < ends[1]
        return cls(
            view=view,
            bottom=bottom,
            top=top,
            outliers=outliers,
            heights=np.maximum(heights, bottom),
            labels=labelled([view.position(o.value) for o in outliers], view.range),
            stems=_stems(spectrum, view),
            zero=not view.log and low <= 0 <= high,
            noise=ends if seen else None,
        )


def views_of(spectrum: HessianSpectrum, density: Density) -> list[View]:
    """Return the whole spectrum, and the bulk where that would be too small in it."""
    low = float((spectrum.ritz_values - 3.5 * density.width).min())
    high = float((spectrum.ritz_values + 3.5 * density.width).max())
    margin = 0.03 * (high - low)
    whole = View(WHOLE, (low - margin, high + margin))
    bulk = View(BULK, _bulk(spectrum, density))
    return [whole, bulk] if _length(whole) > ZOOM_FROM * _length(bulk) else [whole]


def outlier_view(spectrum: HessianSpectrum) -> View | None:
    """Return the outliers above the bulk, which lie decades apart; None where there are none."""
    top = spectrum.bulk()[1]
    shown = [o for o in spectrum.outlier_eigenvalues() if o.value - o.error > max(top, 0.0)]
    if not shown:
        return None
    low = min(0.8 * o.value for o in shown)
    high = max(1.15 * o.value + 2 * o.error for o in shown)
    return View("outliers above the bulk, logarithmic", (low, high), log=True)


def labelled(places: Sequence[float], ends: Interval) -> list[int]:
    """Return which places on an axis get a label: those furthest from 0, where none overlap."""
    chosen = list[int]()
    for i in sorted(range(len(places)), key=lambda i: -abs(places[i])):
        gaps = [abs(places[i] - places[other]) / (ends[1] - ends[0]) for other in chosen]
        if len(chosen) < MOST_LABELS and all(gap >= APART for gap in gaps):
            chosen.append(i)
    return chosen


def _length(view: View) -> float:
    return view.interval[1] - view.interval[0]


def _bulk(spectrum: HessianSpectrum, density: Density) -> Interval:
    """Return the bulk with a margin, at least a few kernels wide."""
    low, high = spectrum.bulk()
    inside = (spectrum.ritz_values >= low) & (spectrum.ritz_values <= high)
    margin = max(0.15 * (high - low), 4 * float(np.median(density.width[inside])))
    return low - margin, high + margin


def _limits(spectrum: HessianSpectrum, density: Density, view: View) -> Interval:
    """Return lowest and highest density to show: the peaks, six decades of the whole spectrum."""
    shown = view.shows(density.grid)
    top = float(density.values[shown].max(initial=0.0)) or 1.0
    mask = spectrum.outliers() & view.shows(spectrum.ritz_values)
    peaks = np.interp(spectrum.ritz_values[mask], density.grid, density.values)
    lowest = 10.0**-DECADES * top
    floor = lowest if view.name == WHOLE else 0.2 * float(density.values[shown].min(initial=top))
    floor = max(floor, lowest)
    bottom = max(min(floor, 0.1 * float(peaks.min(initial=np.inf))), 1e-14 * top)
    return bottom, top


def _stems(spectrum: HessianSpectrum, view: View) -> Stems:
    values, weights, mask = spectrum.ritz_values, spectrum.weights, spectrum.outliers()
    shown = view.shows(values) & (weights > 0)
    bottom = float(weights[shown].min(initial=1.0)) / 10
    rest, outliers = shown & ~mask, shown & mask
    return Stems(bottom, values[rest], weights[rest], values[outliers], weights[outliers])
