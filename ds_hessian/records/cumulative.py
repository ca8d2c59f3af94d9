"""Bounds on the cumulative distribution of eigenvalues, from what Lanczos knows of it.

Two things stand between a probe's Ritz values and the share of eigenvalues at or below x:

* quadrature: m steps know 2 m + 1 moments of the probe's own measure, which bound it left of x
  (`ds_hessian.krylov.measure_bounds`). Errors of the products move eigenvalues, so the bounds are
  taken at x less, and x plus, three times the largest of them;
* chance: of a share p of n eigenvalues, a random unit vector's measure has p in the mean and the
  variance `2 p (1 - p) / (n + 2)` (Beta; with Rademacher entries at most `2 p (1 - p) / n`). Over P
  probes that is the variance of a frequency in `P (n + 2) / 2` trials, and Wilson's score interval
  turns the bounds of the measure into bounds of p, also where p n is only a few.

An outlier that counts as one eigenvalue (`reduced_weights`) is counted, not estimated: it is taken
out of the measure, and both apply to the rest. It has to be one to each probe: one that has much
of it takes it for several, and those that have little would count it in full.

Sources: Chen, Trogdon, Ubaru, ICML 2021, section 3; Wilson, J. Am. Stat. Assoc. 22 (1927).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_hessian.krylov import measure_bounds
from ds_hessian.krylov.records import COVERAGE

Array = NDArray[np.float64]

ROUNDING = 32 * 2.0**-24
"""Rounding of eigenvalues by fp32 vectors, relative to the largest."""


@dataclass(frozen=True)
class Probe:
    """One probe's Lanczos decomposition after m products.

    Attributes:
        alphas: `(m,)` diagonal of the tridiagonal.
        betas: `(m,)` off-diagonal of the tridiagonal; the last belongs to the residual.
        values: `(m,)` Ritz values.
        weights: `(m,)` their weights.
        errors: `(m,)` bounds on their errors.
        product_error: The largest estimated error of a product.
        single: `(m,)` which Ritz values count as one eigenvalue each.
    """

    alphas: Array
    betas: Array
    values: Array
    weights: Array
    errors: Array
    product_error: float
    single: NDArray[np.bool_]


def cumulative_bounds(
    probes: Sequence[Probe], n: int, x: Array, confidence: float
) -> tuple[Array, Array]:
    """Return bounds on the share of the n eigenvalues at or below x, of the shape of x.

    Raises:
        ValueError: the confidence is not between 0 and 1.
    """
    from scipy.special import ndtri  # type: ignore[import-untyped]

    if not 0 < confidence < 1:
        raise ValueError(f"the confidence must be between 0 and 1, got {confidence}")
    probes = _agreeing(probes)
    low, high, fewest, most = np.mean([_bounds(probe, x.ravel()) for probe in probes], axis=0)
    counted = float(np.mean([probe.single.sum() for probe in probes]))
    rest = n - counted
    trials = len(probes) * (rest + 2) / 2
    z = float(ndtri((1 + confidence) / 2))
    lower = (fewest + rest * _wilson(low, trials, -z)) / n
    upper = (most + rest * _wilson(high, trials, z)) / n
    return lower.reshape(x.shape), np.minimum(upper, 1.0).reshape(x.shape)


def _agreeing(probes: Sequence[Probe]) -> list[Probe]:
    """Return the probes with those outliers as single ones that are so to all of them."""
    found = []
    for probe in probes:
        single = probe.single.copy()
        for i in np.flatnonzero(single):
            apart = [abs(q.values - probe.values[i]) - q.errors for q in probes]
            single[i] = all(
                (a[q.single] <= probe.errors[i]).any() for a, q in zip(apart, probes, strict=True)
            )
        found.append(replace(probe, single=single))
    return found


def _bounds(p: Probe, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return bounds on a probe's measure without the counted outliers, and on their number, up to
    x.
    """
    scale = max(float(abs(p.values).max()), float(p.betas.max()))
    moved = max(COVERAGE * p.product_error, ROUNDING * scale)
    low, _ = measure_bounds(p.alphas, p.betas, x - moved)
    _, high = measure_bounds(p.alphas, p.betas, x + moved)
    values, weights = p.values[p.single], p.weights[p.single]
    errors = np.maximum(p.errors[p.single], moved)
    surely, perhaps = (values + errors) <= x[:, None], (values - errors) <= x[:, None]
    rest = max(1 - float(weights.sum()), np.finfo(np.float64).tiny)
    low = np.clip((low - perhaps @ weights) / rest, 0.0, 1.0)
    high = np.clip((high - surely @ weights) / rest, 0.0, 1.0)
    return low, high, surely.sum(1).astype(np.float64), perhaps.sum(1).astype(np.float64)


def _wilson(share: Array, trials: float, z: float) -> Array:
    """Return the end of Wilson's interval on the side of z, which is signed."""
    spread = np.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    ends = (share + z**2 / (2 * trials) + z * spread) / (1 + z**2 / trials)
    return np.asarray(np.clip(ends, 0.0, 1.0))
