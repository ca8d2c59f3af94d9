"""Everything that a picture of a spectrum shows, computed once for all renderers.

A spectrum is known in three ways, and each is drawn as what it is:

* *single eigenvalues*: Ritz values that have converged away from the bulk. Each is an eigenvalue
  within its bar, and is drawn as a stem;
* *located values*: Ritz values outside of the bulk whose bars exclude their neighbours, but that
  are not isolated enough to be counted. Some eigenvalue lies within each bar: hollow stems;
* *the rest*, which no Ritz value resolves: the number of eigenvalues at or beyond x (to the right
  of the median those at or above, to the left those at or below) with its 95 % bounds, and a
  density in bins of at least three Ritz values of each probe, whose widths are drawn.

Nothing is smoothed. The renderers (`ds_hessian.show.spectrum_picture` with matplotlib,
`ds_hessian.show.page.density` with plotly) only draw it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.density import merge_probes
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.style import count, short

Array = NDArray[np.float64]
Interval = tuple[float, float]

SINGLE = "single eigenvalue, with its bar"
LOCATED = "located, not isolated"
BEYOND = "eigenvalues at or beyond"
BOUNDS = "95 % bounds"
NOISE = "may be 0: errors of the products"

IN_A_BIN = 3
"""Ritz values of each probe that a bin of the density holds at least."""
CENTRAL = 0.98
"""The panel of the bulk shows this share of the eigenvalues, and a Ritz value to either side."""
POINTS = 33
"""Points over the bulk at which bounds are computed; between them they hold as steps."""
MOST_GAPS = 16
"""Gaps between stems in which bounds are computed too."""
WIDTH = 1e-5
"""Ritz values that differ by less than this share of the largest are one: rounding in fp32."""
MOST_LABELS = 10
APART = 0.055
"""Labels are at least this share of the axis apart."""


@dataclass(frozen=True)
class Stem:
    """A value that is drawn by itself.

    Attributes:
        estimate: The eigenvalue with its bar.
        beyond: Number of eigenvalues at or beyond it: the height of the stem.
    """

    estimate: Estimate
    beyond: float


@dataclass(frozen=True)
class Curve:
    """A line through points, or with `upper` the band between two lines."""

    x: Array
    y: Array
    upper: Array | None = None


@dataclass(frozen=True)
class SpectrumView:
    """What there is to draw of a spectrum.

    Attributes:
        n: Number of eigenvalues.
        singles: Single eigenvalues, in descending order.
        located: Located values, in descending order.
        labels: Which of the single eigenvalues get a label.
        beyond: Number of eigenvalues at or beyond each value, as steps.
        beyond_bounds: Its bounds.
        below: Share of the eigenvalues at or below each value, as steps.
        below_bounds: Its bounds.
        edges: `(b + 1,)` ends of the bins of the density; empty if there are too few Ritz values.
        density: `(b,)` share of the eigenvalues for each unit of eigenvalue in a bin.
        ritz_values: All Ritz values of the rest, ascending.
        whole: Ends of the axis of the whole spectrum.
        bulk: Ends of the axis of the bulk.
        noise: The products' median error: values below it may be 0; 0 where unknown.
        caption: One sentence that says what was found.
    """

    n: int
    singles: tuple[Stem, ...]
    located: tuple[Stem, ...]
    labels: tuple[int, ...]
    beyond: Curve
    beyond_bounds: Curve
    below: Curve
    below_bounds: Curve
    edges: Array
    density: Array
    ritz_values: Array
    whole: Interval
    bulk: Interval
    noise: float
    caption: str

    @classmethod
    def of(cls, spectrum: HessianSpectrum) -> SpectrumView:
        """Return the view of a spectrum."""
        s = spectrum
        order = np.argsort(s.ritz_values, axis=None)
        values, weights = s.ritz_values.ravel()[order], s.reduced_weights.ravel()[order]
        weights = weights / s.num_probes
        alone = (s.outliers() | _located(s)).ravel()[order]
        singles, located = _stems(s, s.outliers()), _stems(s, _located(s) & ~s.outliers())
        bulk = _bulk(values, weights, alone, s)
        whole = _whole(s, [*singles, *located], bulk)
        at = _points(bulk, whole, [stem.estimate.value for stem in (*singles, *located)])
        lower, upper = s.cumulative_bounds(at)
        below = np.cumsum(weights)
        middle = float(values[min(int(np.searchsorted(below, 0.5)), len(values) - 1)])
        edges, density = _bins(values[~alone], weights[~alone], s.num_probes)
        positions = [(o.estimate.value - whole[0]) / (whole[1] - whole[0]) for o in singles]
        return cls(
            n=s.n,
            singles=singles,
            located=located,
            labels=labelled(positions, [abs(o.estimate.value) for o in singles]),
            beyond=_beyond(values, weights, middle, whole, s.n),
            beyond_bounds=_beyond_bounds(at, lower, upper, middle, s.n),
            below=_stairs(values, below, whole),
            below_bounds=_below_bounds(at, lower, upper),
            edges=edges,
            density=density,
            ritz_values=values[~alone],
            whole=whole,
            bulk=bulk,
            noise=s.product_noise,
            caption=_caption(s, singles, values, below),
        )

    def noise_in(self, interval: Interval) -> Interval | None:
        """Return the values in an interval that may be 0; None where they are too few to see."""
        low, high = interval
        ends = max(-self.noise, low), min(self.noise, high)
        seen = self.noise > 2e-3 * (high - low) and ends[0] < ends[1]
        return ends if seen else None

    @property
    def bin_widths(self) -> str:
        """The widths of the bins as text."""
        if not len(self.edges):
            return f"fewer than {IN_A_BIN} unresolved Ritz values: no density"
        widths = np.diff(self.edges)
        low, high = short(float(widths.min())), short(float(widths.max()))
        return f"bins of {low if low == high else f'{low} to {high}'}, {IN_A_BIN} Ritz values each"


def labelled(places: Sequence[float], importance: Sequence[float]) -> tuple[int, ...]:
    """Return which places get a label, the most important first, where none overlap.

    Args:
        places: Where they are, as shares of the axis.
        importance: The larger, the sooner it is chosen.
    """
    chosen = list[int]()
    for i in sorted(range(len(places)), key=lambda i: -importance[i]):
        apart = all(abs(places[i] - places[other]) >= APART for other in chosen)
        if apart and len(chosen) < MOST_LABELS:
            chosen.append(i)
    return tuple(chosen)


def _located(s: HessianSpectrum) -> NDArray[np.bool_]:
    """Return which Ritz values lie outside of the bulk, with bars that exclude their neighbours."""
    low, high = s.bulk()
    gaps = np.diff(s.ritz_values, axis=1, prepend=-np.inf, append=np.inf)
    nearest = np.minimum(gaps[:, :-1], gaps[:, 1:])
    outside = (s.ritz_values < low) | (s.ritz_values > high)
    return np.asarray(outside & (2 * s.ritz_errors < nearest), dtype=np.bool_)


def _stems(s: HessianSpectrum, mask: NDArray[np.bool_]) -> tuple[Stem, ...]:
    """Return each marked eigenvalue once, in descending order."""
    found = [Estimate(*pair) for pair in merge_probes(s.ritz_values, s.ritz_errors, mask)]
    return tuple(Stem(estimate, _count_beyond(s, estimate)) for estimate in found)


def _count_beyond(s: HessianSpectrum, estimate: Estimate) -> float:
    """Return the number of eigenvalues at or beyond a value, itself included."""
    room = 3 * estimate.error + 1e-3 * abs(estimate.value)  # as in merge_probes
    below = s.n * float(s.cumulative(estimate.value + room))
    above = s.n * (1 - float(s.cumulative(estimate.value - room)))
    return max(min(below, above), min(1.0, s.n / 2))


def _bulk(values: Array, weights: Array, alone: NDArray[np.bool_], s: HessianSpectrum) -> Interval:
    rest, shares = values[~alone], np.cumsum(weights[~alone])
    if not len(rest):
        rest, shares = values, np.cumsum(weights)
    tail = (1 - CENTRAL) / 2 * shares[-1]
    first = max(int(np.searchsorted(shares, tail)) - 1, 0)
    last = min(int(np.searchsorted(shares, shares[-1] - tail)) + 1, len(rest) - 1)
    low, high = float(rest[first]), float(rest[last])
    least = max(s.eigenvalue_max.error, 0.05 * max(abs(low), abs(high))) or 1.0
    margin = 0.06 * (high - low) if high - low > WIDTH * least else least
    return low - margin, high + margin


def _whole(s: HessianSpectrum, stems: Sequence[Stem], bulk: Interval) -> Interval:
    estimates = [s.eigenvalue_max, s.eigenvalue_min, *(stem.estimate for stem in stems)]
    ends = [(e.value - e.error, e.value + e.error) for e in estimates]
    low = min(bulk[0], *(end for end, _ in ends))
    high = max(bulk[1], *(end for _, end in ends))
    margin = 0.03 * (high - low)
    return low - margin, high + margin


def _points(bulk: Interval, whole: Interval, stems: Sequence[float]) -> Array:
    """Return where bounds are computed: over the bulk, and between stems."""
    places = np.sort(np.concatenate([[whole[0], bulk[0], bulk[1], whole[1]], stems]))
    middles, widest = (places[1:] + places[:-1]) / 2, np.argsort(-np.diff(places), kind="stable")
    even = np.linspace(0, len(middles) - 1, MOST_GAPS).round().astype(int)
    chosen = middles[np.concatenate([widest[:MOST_GAPS], even])]
    return np.unique(np.concatenate([np.linspace(*bulk, POINTS), chosen, whole]))


def _bins(values: Array, weights: Array, probes: int) -> tuple[Array, Array]:
    """Return edges and densities of bins of at least `IN_A_BIN` Ritz values of each probe."""
    bins = len(values) // (IN_A_BIN * probes)
    least = WIDTH * float(abs(values).max(initial=0.0))
    if bins < 1 or values[-1] - values[0] <= least:
        return np.empty(0), np.empty(0)
    starts = np.linspace(0, len(values), bins + 1).round().astype(int)
    inner = [(values[i - 1] + values[i]) / 2 for i in starts[1:-1]]
    edges = np.array([values[0], *inner, values[-1]])
    shares = np.add.reduceat(weights, starts[:-1])
    wide = np.append(True, np.diff(edges) > least)  # coinciding values have no width: merged
    if not wide[-1]:
        wide[np.flatnonzero(wide)[-1]], wide[-1] = False, True
    groups = np.searchsorted(np.flatnonzero(wide)[1:], np.arange(1, len(edges)))
    shares = np.bincount(groups, shares)
    return edges[wide], shares / np.diff(edges[wide])


def _stairs(values: Array, heights: Array, ends: Interval) -> Curve:
    """Return the line that rises to each height at its value."""
    x = np.repeat(np.concatenate([[ends[0]], values, [ends[1]]]), 2)[1:-1]
    y = np.repeat(np.concatenate([[0.0], heights]), 2)
    return Curve(x, y)


def _beyond(values: Array, weights: Array, middle: float, ends: Interval, n: int) -> Curve:
    left, below = values <= middle, n * np.cumsum(weights)
    above = n * np.cumsum(weights[::-1])[::-1]
    rising = _stairs(values[left], below[left], (ends[0], middle))
    falling = _stairs(-values[~left][::-1], above[~left][::-1], (-ends[1], -middle))
    x = np.concatenate([rising.x, -falling.x[::-1]])
    return Curve(x, np.concatenate([rising.y, falling.y[::-1]]))


def _below_bounds(at: Array, lower: Array, upper: Array) -> Curve:
    """Return bounds that hold at every x: monotone, so those of the next point outwards."""
    x = np.repeat(at, 2)[1:-1]
    return Curve(x, np.repeat(lower[:-1], 2), np.repeat(upper[1:], 2))


def _beyond_bounds(at: Array, lower: Array, upper: Array, middle: float, n: int) -> Curve:
    band = _below_bounds(at, lower, upper)
    assert band.upper is not None
    left = band.x <= middle
    low = np.where(left, band.y, 1 - band.upper)
    return Curve(band.x, n * low, n * np.where(left, band.upper, 1 - band.y))


def _caption(s: HessianSpectrum, singles: Sequence[Stem], values: Array, below: Array) -> str:
    """Return what was found, in one sentence."""
    largest, smallest = s.eigenvalue_max, s.eigenvalue_min
    if not values.any():
        return f"All {count(s.n)} eigenvalues are 0."
    apart = f"{len(singles) or 'none'} stand{'s' * (len(singles) < 2)} alone"
    low, high = (float(values[min(int(np.searchsorted(below, q)), len(values) - 1)]) for q in Q90)
    text = f"Of {count(s.n)} eigenvalues {apart}; the largest is {largest}"
    noise = max(s.product_noise, smallest.error)
    if smallest.value < -noise:
        text += f", the most negative {smallest}"
    else:
        text += ", and none is seen below 0 beyond its bar"
    if short(low) != short(high):
        text += f"; about 90 % lie between {short(low)} and {short(high)}"
    return text + "."


Q90 = (0.05, 0.95)
"""Quantiles between which the caption says 90 % of the eigenvalues lie."""
