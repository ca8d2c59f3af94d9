"""Several spectra on one axis of eigenvalues, for all renderers: over training, or side by side.

Bulk and outliers lie decades apart, to both sides of 0. The axis is the inverse hyperbolic sine of
the eigenvalue over a scale: linear around 0, logarithmic far from it, and smooth between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_hessian.records.estimate import Estimate
from ds_hessian.records.provenance import Optimizer
from ds_hessian.records.spectrum import HessianSpectrum

Array = NDArray[np.float64]

CELLS = 120
"""Cells into which the axis of a map is divided."""
LEAST = 0.5
"""Eigenvalues in a cell below which it is drawn empty."""
TRACKS = 5
"""The largest and the smallest eigenvalues that are followed over training."""
CROWDED = 6.0
"""Steps of which one distance is so many times the median crowd on a linear axis."""
TICKS_APART = 0.06
"""Ticks are at least this share of the axis apart."""


@dataclass(frozen=True)
class Axis:
    """A symmetric logarithmic axis without a kink.

    Attributes:
        scale: Eigenvalues well below it are on a linear axis, those above on a logarithmic one.
        low: Smallest eigenvalue on it.
        high: Largest eigenvalue on it.
    """

    scale: float
    low: float
    high: float

    @classmethod
    def of(cls, spectra: Sequence[HessianSpectrum]) -> Axis:
        """Return the axis on which all spectra with their bars can be seen."""
        low = min(float((s.ritz_values - s.ritz_errors).min()) for s in spectra)
        high = max(float((s.ritz_values + s.ritz_errors).max()) for s in spectra)
        widths = [float(np.sqrt(_second_moment(s))) for s in spectra]
        scale = float(np.median(widths)) or max(abs(low), abs(high)) or 1.0
        margin = max(0.03 * (high - low) * (high - low < scale), 1e-3 * scale)
        return cls(scale, 1.05 * min(low, 0.0) - margin, 1.05 * max(high, 0.0) + margin)

    def at(self, eigenvalues: ArrayLike) -> Array:
        """Return places on the axis."""
        return np.arcsinh(np.asarray(eigenvalues, dtype=np.float64) / self.scale)

    def edges(self, cells: int = CELLS) -> Array:
        """Return the eigenvalues between which cells of equal size lie, `(cells + 1,)`."""
        ends = self.at([self.low, self.high])
        return self.scale * np.sinh(np.linspace(ends[0], ends[1], cells + 1))

    def ticks(self) -> list[tuple[float, str]]:
        """Return eigenvalues to write at the axis, as far apart as their texts are high."""
        largest = max(abs(self.low), abs(self.high))
        powers = range(math.floor(math.log10(self.scale)), math.floor(math.log10(largest)) + 1)
        wanted = [0.0, *(sign * 10.0**p for p in reversed(powers) for sign in (1, -1))]
        wanted += [sign * 3 * 10.0**p for p in reversed(powers) for sign in (1, -1)]
        start, end = self.at([self.low, self.high])
        chosen = list[float]()
        for value in wanted:
            place = float(self.at(value))
            apart = [abs(place - float(self.at(other))) / (end - start) for other in chosen]
            if self.low <= value <= self.high and min(apart, default=1.0) >= TICKS_APART:
                chosen.append(value)
        return [(value, f"{value:g}") for value in sorted(chosen)]


def step_scale(steps: ArrayLike) -> float | None:
    """Return the first step above 0 if steps are at logarithmic spacing: the scale of their axis.

    None where a linear axis has room for all of them.
    """
    different = np.unique(np.asarray(steps, dtype=np.float64))
    gaps = np.diff(different)
    if not len(gaps) or gaps.max() < CROWDED * np.median(gaps):
        return None
    return float(different[different > 0][0])


def _second_moment(s: HessianSpectrum) -> float:
    """Return the mean square of the central 90 % of the eigenvalues."""
    values, weights = s.ritz_values.ravel(), s.reduced_weights.ravel()
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    below = np.cumsum(weights) / weights.sum()
    central = (below >= 0.05) & (below - weights / weights.sum() <= 0.95)
    return float(np.average(values[central] ** 2, weights=weights[central]))


def spread(s: HessianSpectrum, edges: Array) -> Array:
    """Return the number of eigenvalues in each cell between edges.

    A Ritz value that has not converged stands for everything up to the middles between it and its
    neighbours, and its weight is spread evenly over that; an outlier over its error bar.
    """
    shares = np.zeros(len(edges) - 1)
    rows = zip(s.ritz_values, s.reduced_weights, s.ritz_errors, s.outliers(), strict=True)
    for values, weights, errors, single in rows:
        middles = (values[1:] + values[:-1]) / 2
        first = middles[:1] - values[:1] if len(middles) else errors[:1]
        last = values[-1:] - middles[-1:] if len(middles) else errors[-1:]
        low = np.concatenate([values[:1] - np.abs(first), middles])
        high = np.concatenate([middles, values[-1:] + np.abs(last)])
        low, high = np.where(single, values - errors, low), np.where(single, values + errors, high)
        tiny = 1e-9 * float(abs(edges).max())
        width = np.maximum(high - low, tiny)
        below = np.clip((edges - low[:, None]) / width[:, None], 0.0, 1.0)
        shares += weights @ np.diff(below, axis=1)
    return s.n * shares / s.num_probes


def tracks(spectra: Sequence[HessianSpectrum]) -> list[list[Estimate | None]]:
    """Return the largest eigenvalues of each spectrum by their rank, then the smallest.

    Each is a list over the spectra. The largest and the smallest Ritz value are followed whether
    they have converged or not, the others where they are single eigenvalues above or below 0.
    """
    found = list[list[Estimate | None]]()
    for sign in (1, -1):
        rows = [ranked(s, sign) for s in spectra]
        most = min(max(map(len, rows)), TRACKS)
        found += [[row[i] if i < len(row) else None for row in rows] for i in range(most)]
    return found


def ranked(s: HessianSpectrum, sign: int) -> list[Estimate]:
    """Return the extreme Ritz value of a sign, then single eigenvalues in the order of their size.

    Args:
        s: The spectrum.
        sign: 1 for the largest eigenvalues, -1 for the smallest.
    """
    extreme = s.eigenvalue_max if sign > 0 else s.eigenvalue_min
    others = [o for o in s.outlier_eigenvalues()[::sign] if sign * o.value > 0]
    return [extreme, *(o for o in others if sign * (extreme.value - o.value) > o.error)]


def edge_of(optimizer: Optimizer | None, preconditioned: bool = False) -> float | None:
    """Return the eigenvalue at which the optimizer's steps cease to be stable; None if unknown."""
    if optimizer is None:
        return None
    return optimizer.preconditioned_edge if preconditioned else optimizer.edge


def crossings(
    steps: Sequence[int], values: Sequence[float], edges: Sequence[float | None]
) -> list[int]:
    """Return the steps at which values are above the edge, and were not at the step before."""
    over = [e is not None and value > e for value, e in zip(values, edges, strict=True)]
    before = [False, *over[:-1]]
    return [step for step, now, then in zip(steps, over, before, strict=True) if now and not then]
