"""The record of Kronecker-factored curvatures beside the true one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ds_hessian.krylov.kronecker import Comparison
from ds_hessian.krylov.records import Array
from ds_hessian.records.base import Measured
from ds_hessian.records.fields import Axes

FIGURES = ("cosine", "scale", "share", "extreme", "solve")
"""The figures of each layer and kind that have an error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianKronecker(Measured):
    """How close k Kronecker-factored curvatures K are to the block C of each of L weights.

    NaN stands for what was not measured. Errors contain the standard errors of the probes, which
    are themselves uncertain: with p probes figures are off by multiples of them as in Student's
    distribution of p - 1 degrees of freedom, or less often.

    Attributes:
        layers: Names of the weights.
        kinds: Names of the curvatures: `kfac`, `ekfac`, `shampoo`, `klshampoo`, `adam`.
        sizes: `(L, 2)` outputs and inputs of each layer.
        samples: `(L, k)` tokens (K-FAC, EK-FAC), micro-batches (Shampoo) or optimizer steps (Adam)
            behind each K; tokens on which the loss depends in the layer, so that padding is none.
            With few of them an eigenbasis can be worse than the parameters' own.
        cosines: `(L, k)` `<C, K> / |C| |K|`; the relative distance at the best scale is
            `sqrt(1 - cosine^2)`.
        cosine_errors: `(L, k)` their errors, of probes and products.
        scales: `(L, k)` the factor at which K is closest to C.
        scale_errors: `(L, k)` their errors.
        shares: `(L, k)` share of `|C|^2` on the diagonal of K's eigenbasis.
        share_errors: `(L, k)` their errors; NaN with two probes.
        extremes: `(L, k)` the largest eigenvalue of `(K + d)^-1/2 C (K + d)^-1/2`, from below; d is
            `ridge` times K's mean eigenvalue.
        extreme_errors: `(L, k)` bounds on their errors: some eigenvalue is that near.
        solves: `(L, k)` the cosine of `(c K + l)^-1 g` and `(C + l)^-1 g`, with g the gradient, c
            the best scale and l `dampings`; NaN where `unsolved` says why.
        solve_errors: `(L, k)` their errors: of c, and a bound on that of the solution with C.
        norms: `(L,)` `|C|_F`, in loss per squared parameter.
        norm_errors: `(L,)` their errors.
        tops: `(L,)` the largest eigenvalue of C in magnitude, from below.
        plain_shares: `(L,)` share of `|C|^2` on the diagonal in the parameters' own basis.
        plain_share_errors: `(L,)` their errors; NaN with two probes.
        dampings: `(L,)` l: `damping` times `tops` beyond C's smallest eigenvalue, where that is
            negative, so that C + l is definite; empty in records of versions without it, which
            have `damping` times `tops`.
        residuals: `(L,)` relative residual of the damped solution with C.
        mismatches: `(L,)` relative distance of what the hooks saw to the job's gradient.
        draws: Times that labels were drawn from the model; 0 for the labels of the data.
        damping: See `solves`.
        ridge: See `extremes`.
        left_out: Other weights of two dims or more, with the reason.
        num_matvecs: Products made.
    """

    kind: ClassVar[str] = "kronecker"
    arrays: ClassVar[dict[str, Axes]] = {
        "sizes": Axes("L", "2", kind="i"),
        "samples": Axes("L", "k", kind="i"),
        "cosines": Axes("L", "k"),
        "cosine_errors": Axes("L", "k", least=0),
        "scales": Axes("L", "k"),
        "scale_errors": Axes("L", "k", least=0),
        "shares": Axes("L", "k"),
        "share_errors": Axes("L", "k", least=0),
        "extremes": Axes("L", "k"),
        "extreme_errors": Axes("L", "k", least=0),
        "solves": Axes("L", "k"),
        "solve_errors": Axes("L", "k", least=0),
        "norms": Axes("L", least=0),
        "norm_errors": Axes("L", least=0),
        "tops": Axes("L"),
        "plain_shares": Axes("L"),
        "plain_share_errors": Axes("L", least=0),
        "dampings": Axes("L", optional=True),
        "residuals": Axes("L", least=0),
        "mismatches": Axes("L"),
    }
    labels: ClassVar[dict[str, str]] = {"layers": "L", "kinds": "k"}

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    sizes: Array
    samples: Array
    cosines: Array
    cosine_errors: Array
    scales: Array
    scale_errors: Array
    shares: Array
    share_errors: Array
    extremes: Array
    extreme_errors: Array
    solves: Array
    solve_errors: Array
    norms: Array
    norm_errors: Array
    tops: Array
    plain_shares: Array
    plain_share_errors: Array
    residuals: Array
    mismatches: Array
    draws: int
    damping: float
    ridge: float
    left_out: Mapping[str, str]
    num_matvecs: int
    dampings: Array = field(default_factory=lambda: np.zeros(0))

    @property
    def unknown(self) -> dict[str, str]:
        """Layers that have no figures, or some K that has none, with the reason."""
        found = {}
        for name, norm, cosines in zip(self.layers, self.norms, self.cosines, strict=True):
            without = [k for k, cosine in zip(self.kinds, cosines, strict=True) if np.isnan(cosine)]
            if norm == 0:
                found[name] = (
                    "its C is zero: on these micro-batches nothing depends on the weight (units "
                    "behind it that are all dead, or a layer that is not used)"
                )
            elif without:
                found[name] = f"K is zero ({', '.join(without)}): the weight has no gradient"
        return found

    @property
    def unsolved(self) -> dict[str, str]:
        """Other layers of which some damped solutions are not compared, with the reason."""
        found, unknown = {}, self.unknown
        for i, name in enumerate(self.layers):
            without = np.isnan(self.solves[i])
            away = [k for k, c in zip(self.kinds, self.scales[i], strict=True) if not c > 0]
            if name in unknown or not without.any():
                continue
            if len(away) < without.sum():
                # Of a definite system with this damping it would have to be larger.
                short = self.residuals[i] > self.damping / 4
                found[name] = (
                    f"the solution with C is not known: its relative residual is "
                    f"{self.residuals[i]:.1e}; a larger basis or damping helps"
                    if short
                    else "the solution with C is not known: rounding leaves nothing of a gradient "
                    "whose tokens cancel, or errors of products are too large"
                )
            else:
                found[name] = f"the best scale of K is not positive ({', '.join(away)})"
        return found


def columns(comparisons: Mapping[str, Comparison], kinds: tuple[str, ...]) -> dict[str, Array]:
    """Return the arrays of the record that comparisons by layer make."""
    found = list(comparisons.values())
    arrays: dict[str, list[Any]] = {
        "norms": [c.norm[0] for c in found],
        "norm_errors": [c.norm[1] for c in found],
        "tops": [c.top for c in found],
        "plain_shares": [c.share[0] for c in found],
        "plain_share_errors": [c.share[1] for c in found],
        "dampings": [c.damping for c in found],
        "residuals": [c.residual for c in found],
    }
    for figure in FIGURES:
        pairs = [[getattr(c.kinds[k], figure) for k in kinds] for c in found]
        arrays[f"{figure}s"] = [[pair[0] for pair in row] for row in pairs]
        arrays[f"{figure}_errors"] = [[pair[1] for pair in row] for row in pairs]
    return {name: np.array(values, dtype=np.float64) for name, values in arrays.items()}
