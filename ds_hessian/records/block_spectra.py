"""The record of the spectra of diagonal blocks, and how far apart they are.

Spectra are compared as distributions of asinh(eigenvalue / unit), where the unit is `LINEAR` of the
largest eigenvalue in magnitude of all blocks: linear below it, logarithmic above. Each Ritz value
is a Gaussian of standard deviation `WIDTH` there. Their Jensen-Shannon distance, the root of the
divergence in bits, is 0 for the same spectra and 1 for spectra that do not overlap.

Source: Zhang, Chen, Ding, Li, Sun, Luo, Why Transformers need Adam: a Hessian perspective (arXiv
2402.16788), figures 3 and 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ds_hessian.krylov.records import Array
from ds_hessian.records.base import Measured
from ds_hessian.records.fields import Axes
from ds_hessian.records.provenance import Cost, Provenance
from ds_hessian.records.spectrum import HessianSpectrum

LINEAR, WIDTH = 1e-3, 0.35
"""Unit of the scale, and width of a Ritz value on it: from one tenth of the range's end to the end
is 2.3."""

POINTS = 401
"""Points of the grid on which densities are compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianBlockSpectra(Measured):
    """The spectrum of each of B diagonal blocks, by P probes of m Lanczos steps.

    Attributes:
        names: Names of the blocks.
        sizes: `(B,)` coordinates.
        ritz_values: `(B, P, m)` in loss per squared parameter; NaN beyond a block's dimension.
        weights: `(B, P, m)` quadrature weights, 0 there.
        largest: `(B,)` the largest eigenvalue of each block.
        largest_errors: `(B,)` the bounds on their errors.
        smallest: `(B,)` the smallest eigenvalue of each block.
        smallest_errors: `(B,)` the bounds on their errors.
        traces: `(B,)` the traces.
        trace_errors: `(B,)` their standard errors.
        distances: `(B, B)` Jensen-Shannon distances of the spectra, between 0 and 1.
        floors: `(B,)` the distance between the two halves of a block's own probes: a distance of
            two blocks that is not larger says nothing. NaN for a single probe.
        num_matvecs: Products made.
    """

    kind: ClassVar[str] = "block_spectra"
    arrays: ClassVar[dict[str, Axes]] = {
        "sizes": Axes("B"),
        "ritz_values": Axes("B", "P", "m"),
        "weights": Axes("B", "P", "m", finite=True),
        "largest": Axes("B"),
        "largest_errors": Axes("B", least=0),
        "smallest": Axes("B"),
        "smallest_errors": Axes("B", least=0),
        "traces": Axes("B"),
        "trace_errors": Axes("B", least=0),
        "distances": Axes("B", "B"),
        "floors": Axes("B"),
    }
    labels: ClassVar[dict[str, str]] = {"names": "B"}

    names: tuple[str, ...]
    sizes: Array
    ritz_values: Array
    weights: Array
    largest: Array
    largest_errors: Array
    smallest: Array
    smallest_errors: Array
    traces: Array
    trace_errors: Array
    distances: Array
    floors: Array
    num_matvecs: int

    @classmethod
    def of(
        cls, spectra: Mapping[str, HessianSpectrum], provenance: Provenance
    ) -> HessianBlockSpectra:
        """Return the record of spectra by the name of their block."""
        found = list(spectra.values())
        shape = (len(found), found[0].num_probes, max(s.num_matvecs for s in found))
        values, weights = np.full(shape, np.nan), np.zeros(shape)
        for i, s in enumerate(found):
            values[i, :, : s.num_matvecs] = s.ritz_values
            weights[i, :, : s.num_matvecs] = s.weights
        extremes = {
            name: [getattr(s, figure) for s in found]
            for name, figure in (
                ("largest", "eigenvalue_max"),
                ("smallest", "eigenvalue_min"),
                ("trace", "trace"),
            )
        }
        column = {
            (name, part): np.array([getattr(e, part) for e in estimates])
            for name, estimates in extremes.items()
            for part in ("value", "error")
        }
        densities = spread(values, weights)[1]
        floors = np.full(shape[0], np.nan)
        if shape[1] > 1:
            halves = [spread(values, weights, range(i, shape[1], 2))[1] for i in (0, 1)]
            floors = np.array([distance(*pair) for pair in zip(*halves, strict=True)])
        return cls(
            names=tuple(spectra),
            sizes=np.array([float(s.n) for s in found]),
            ritz_values=values,
            weights=weights,
            largest=column["largest", "value"],
            largest_errors=column["largest", "error"],
            smallest=column["smallest", "value"],
            smallest_errors=column["smallest", "error"],
            traces=column["trace", "value"],
            trace_errors=column["trace", "error"],
            distances=np.array([[distance(p, q) for q in densities] for p in densities]),
            floors=floors,
            num_matvecs=sum(s.num_probes * s.num_matvecs for s in found),
            cost=_total([s.cost for s in found]),
            provenance=provenance,
        )

    @property
    def heterogeneity(self) -> float:
        """The mean distance between two different blocks; NaN for a single one."""
        apart = self.distances[np.triu_indices(len(self.names), 1)]
        return float(apart.mean()) if len(apart) else float("nan")

    def densities(self) -> tuple[Array, Array]:
        """Return eigenvalues `(k,)` and the share of each block's spectrum in each cell `(B, k)`.

        The cells have equal widths on the scale of the module, and a row sums to 1.
        """
        return spread(self.ritz_values, self.weights)


def spread(values: Array, weights: Array, probes: range | None = None) -> tuple[Array, Array]:
    """Return the grid's eigenvalues `(k,)` and the shares `(B, k)` of Ritz values `(B, P, m)`.

    Args:
        values: Ritz values; NaN where the weight is 0.
        weights: Their weights.
        probes: The probes that count; None for all.
    """
    known = np.nan_to_num(values)
    unit = LINEAR * float(abs(known).max()) or 1.0
    end = float(np.arcsinh(1 / LINEAR)) + 4 * WIDTH
    grid = np.linspace(-end, end, POINTS)
    chosen = slice(None) if probes is None else list(probes)
    x, w = np.arcsinh(known[:, chosen] / unit), weights[:, chosen]
    shares = np.array(
        [
            np.exp(-0.5 * ((grid[:, None] - xb.reshape(-1)) / WIDTH) ** 2) @ wb.reshape(-1)
            for xb, wb in zip(x, w, strict=True)
        ]
    )
    return unit * np.sinh(grid), shares / shares.sum(1, keepdims=True)


def distance(p: Array, q: Array) -> float:
    """Return the Jensen-Shannon distance of two distributions on the same cells, in [0, 1]."""
    return float(np.sqrt(max(_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2, 0.0)))


def _entropy(p: Array) -> float:
    """Return the entropy in bits."""
    inside = p[p > 0]
    return float(-(inside * np.log2(inside)).sum())


def _total(costs: list[Cost]) -> Cost:
    """Return the cost of several measurements, one after the other."""
    products = sum(c.products for c in costs)
    return Cost(
        seconds_total=sum(c.seconds_total for c in costs),
        seconds_per_product=sum(c.products * c.seconds_per_product for c in costs)
        / max(products, 1),
        seconds_per_gradient=float(np.mean([c.seconds_per_gradient for c in costs])),
        products=products,
        gradient_evaluations=sum(c.gradient_evaluations for c in costs),
        trials=sum(c.trials for c in costs),
        all_reduces=sum(c.all_reduces for c in costs),
        one_sided=sum(c.one_sided for c in costs),
        extrapolated=sum(c.extrapolated for c in costs),
        beyond_tolerance=sum(c.beyond_tolerance for c in costs),
    )
