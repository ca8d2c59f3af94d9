"""Spectral density from Ritz values, and which of them are outliers.

The spectral measure of H seen by a probe is a sum of point masses: weight w_i at Ritz value
theta_i. The density smooths every one with a Gaussian and averages over probes:

    density(x) = 1 / num_probes * sum_p sum_i w_pi N(x; theta_pi, width_pi)

It integrates to 1 over the real line whatever the widths are, since every kernel does. The spread
of the probes' densities is its error band; it does not hold what the smoothing itself changes, nor
what other micro-batches would.

Sources: Lin, Saad, Yang, SIAM Review 58 (2016), section 2.3 (one width for all); Bhattacharjee,
Jayaram, Musco, Musco, Ray, arXiv 2410.21690 (weights of converged Ritz values).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NARROWEST = 0.05
"""A kernel is at least this share of its local spacing wide: what a grid and an eye can resolve."""

SINGLE = 1e-4
"""Odds of a single eigenvalue's weight at which it is taken for one of several equal ones."""


@dataclass(frozen=True)
class Density:
    """A smoothed spectral density on a grid.

    Attributes:
        grid: `(k,)` eigenvalues, ascending.
        values: `(k,)` share of all eigenvalues for each unit of eigenvalue, mean of the probes.
        errors: `(k,)` standard error of that mean, from the probes' spread; None for one probe,
            which has no spread.
        width: `(num_probes, m)` standard deviation of the Gaussian of each Ritz value.
        mass: Share of the density that lies between the ends of the grid, exactly (from the
            Gaussians, not from the grid); 1 minus it is what the grid leaves out.
    """

    grid: Array
    values: Array
    errors: Array | None
    width: Array
    mass: float

    def band(self, confidence: float = 0.95) -> tuple[Array, Array] | None:
        """Return the confidence interval of each value over the choice of probes (Student's), not
        below 0.

        None for one probe: take more with `num_probes`.
        """
        from scipy.special import stdtrit  # type: ignore[import-untyped]

        if self.errors is None:
            return None
        half = float(stdtrit(len(self.width) - 1, (1 + confidence) / 2)) * self.errors
        return np.maximum(self.values - half, 0.0), self.values + half


def smooth(
    values: Array, weights: Array, errors: Array, grid: Array | None, width: float | None
) -> Density:
    """Return the density of `(num_probes, m)` Ritz values; see `HessianSpectrum.density`."""
    from scipy.special import ndtr  # type: ignore[import-untyped]

    if width is not None and not (math.isfinite(width) and width > 0):
        raise ValueError(f"the width must be a finite number above 0, got {width}")
    widths = automatic_widths(values, errors) if width is None else np.full(values.shape, width)
    grid = default_grid(values, widths) if grid is None else np.asarray(grid, dtype=np.float64)
    if grid.ndim != 1 or len(grid) < 2 or not (np.diff(grid) > 0).all():
        raise ValueError(f"the grid must be 1-D, ascending, of at least 2 points; got {grid}")
    rows = np.zeros((len(values), len(grid)))
    for row, *probe in zip(rows, values, weights, widths, strict=True):
        for center, weight, sigma in zip(*probe, strict=True):
            z = (grid - center) / sigma
            row += weight / (sigma * math.sqrt(2 * math.pi)) * np.exp(-0.5 * z**2)
    spread = rows.std(0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else None
    inside = ndtr((grid[-1] - values) / widths) - ndtr((grid[0] - values) / widths)
    mass = float((weights * inside).sum() / len(values))
    return Density(grid, rows.mean(0), spread, widths, mass)


def reduced_weights(weights: Array, outliers: NDArray[np.bool_], n: int) -> Array:
    """Return weights without the chance of the probe; see `HessianSpectrum.reduced_weights`."""
    single = single_outliers(weights, outliers, n)
    count = single.sum(1, keepdims=True)
    rest = np.where(single, 0.0, weights).sum(1, keepdims=True)
    # Without a rest, the outliers are all that there is to divide the mass over.
    share = np.where(rest > 0, 1 / n, 1 / np.maximum(count, 1))
    return np.where(single, share, weights * (1 - count / n) / np.where(rest > 0, rest, 1.0))


def single_outliers(weights: Array, outliers: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """Return a mask of the outliers whose weight can be that of one eigenvalue.

    n times it is chi-squared with one degree of freedom.
    """
    from scipy.special import chdtri

    return outliers & (n * weights <= float(chdtri(1, SINGLE)))


def automatic_widths(values: Array, errors: Array) -> Array:
    """Return one width for each Ritz value, from its error and the distance to its neighbours.

    One width for all either blurs the bulk away (outliers lie at 100 times its size) or leaves
    gaps between Ritz values where there are none in the spectrum. So:

    * the local spacing is the harmonic mean of the distances to the two neighbours of the same
      probe (at the ends: the one distance; with a single value: its error bound);
    * a value that has not converged stands for everything up to its neighbours: one spacing;
    * a converged one is an eigenvalue by itself: its error bound, at least 5 % of the spacing;
    * coinciding values get 5 % of the probe's median spacing.
    """
    return np.stack([_widths(v, e) for v, e in zip(values, errors, strict=True)])


def _widths(values: Array, errors: Array) -> Array:
    scale = float(np.abs(values).max())
    spacing = errors.copy()
    if len(values) > 1:
        gaps = np.diff(values)
        left, right = np.append(gaps[:1], gaps), np.append(gaps, gaps[-1:])
        both = np.maximum(left + right, np.finfo(np.float64).tiny)
        spacing = 2 * left / both * right
    # Values closer than fp32 rounding are copies of one (repeated eigenvalues): no spacing.
    tiny = float(np.finfo(np.float32).tiny)
    apart = spacing[spacing > 1e-6 * scale + tiny]
    typical = float(np.median(apart)) if len(apart) else (scale if scale > tiny else 1.0) * 1e-2
    own = np.clip(errors, NARROWEST * spacing, spacing)
    return np.maximum(own, NARROWEST * typical)


def default_grid(values: Array, widths: Array) -> Array:
    """Return a grid that resolves every kernel: 97 points within 6 widths of each, 1025 over the
    range.
    """
    around = values[..., None] + widths[..., None] * np.linspace(-6, 6, 97)
    span = np.linspace((values - 7 * widths).min(), (values + 7 * widths).max(), 1025)
    return np.unique(np.concatenate([around.ravel(), span]))


def outlier_mask(values: Array, weights: Array, errors: Array) -> NDArray[np.bool_]:
    """Return which of the `(num_probes, m)` Ritz values are outliers; see
    `HessianSpectrum.outliers`.
    """
    rows = zip(values, weights, errors, strict=True)
    return np.stack([_outliers(*row) for row in rows]).astype(np.bool_)


def bulk_interval(values: Array, weights: Array) -> tuple[float, float]:
    """Return the ends of the interval of Ritz values `(m,)` that form the bulk of one probe.

    It starts as the values that hold the central 80 % of the weight, and takes in neighbours as
    long as the gap to the next one is under a quarter of its length so far.
    """
    below = np.cumsum(weights)
    low = min(int(np.searchsorted(below, 0.1 * below[-1])), len(values) - 1)
    high = min(int(np.searchsorted(below, 0.9 * below[-1])), len(values) - 1)
    tiny = 1e-5 * float(np.abs(values).max())  # below fp32 rounding of the vectors: no gap at all
    while True:
        reach = max(0.25 * (values[high] - values[low]), tiny)
        if low > 0 and values[low] - values[low - 1] <= reach:
            low -= 1
        elif high < len(values) - 1 and values[high + 1] - values[high] <= reach:
            high += 1
        else:
            return float(values[low]), float(values[high])


def _outliers(values: Array, weights: Array, errors: Array) -> NDArray[np.bool_]:
    gaps = np.concatenate([[np.inf], np.diff(values), [np.inf]])
    nearest = np.minimum(gaps[:-1], gaps[1:])
    tiny = 1e-5 * float(np.abs(values).max())
    converged = (errors <= 0.1 * nearest) | (errors <= tiny)
    low, high = bulk_interval(values, weights)
    return np.asarray(converged & ((values < low) | (values > high)), dtype=np.bool_)


def merge_probes(
    values: Array, errors: Array, mask: NDArray[np.bool_]
) -> list[tuple[float, float]]:
    """Return outliers of all probes as distinct eigenvalues (value, error), descending.

    Values of different probes are one eigenvalue if they differ by less than the sum of their
    errors, three times, or by 0.1 %; the one with the smallest error stands for it.
    """
    groups: list[list[tuple[float, float, int]]] = []
    found = [(values[i], errors[i], int(i[0])) for i in map(tuple, np.argwhere(mask))]
    for value, error, probe in sorted(found, reverse=True):
        last = groups[-1] if groups else []
        near = last and last[-1][0] - value <= 3 * (last[-1][1] + error) + 1e-3 * abs(value)
        if near and all(probe != other for _, _, other in last):
            last.append((value, error, probe))
        else:
            groups.append([(value, error, probe)])
    best = [min(group, key=lambda entry: entry[1]) for group in groups]
    return [(float(value), float(error)) for value, error, _ in best]
