"""Trials of Gauss-Newton products: what one of some micro-batches shows at one displacement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

BENT = 0.5
"""The nonlinearity ratio above which it does not tell how far the outputs bend."""

GROWN = 32.0
"""Noise of the outputs in units of their roundoff, at most: that of all layers adds up."""


@dataclass(frozen=True)
class Trial:
    """A product of some micro-batches with a unit vector.

    Attributes:
        h: The displacement.
        size: `|P|`.
        nonlinearity: r.
        roundoff: The roundoff of the outputs, relative to their first difference.
        spread: Norm of the outputs' derivative, in the units of r's noise.
        form: `v'Gv` from the outputs alone.
        back: `|H_out J v|`, which goes back into the model, of a micro-batch's size.
        change: `|P - P'|` from the trial before; inf for the first.
        values: The relative error from differencing a loss that is known by its values, by the
            nonlinearity ratio of its cotangents: that itself, as of any difference among kinks
            (`ds_hessian.operators.displacement.schemes.Scheme.among_kinks`), and without these
            `ds_hessian.operators.outputs.learnt.TYPICAL` of its square; else 0.
        third: A third of the third difference of the outputs over the first one, of micro-batches
            that have it; else 0.
        beside: r of these.
        apart: How far v'(Gv) by the backward and by the outputs alone are apart.
        growth: `|J v| / |f|`: where h is longer than the inverse of it, the outputs at its ends are
            rounded to a share of their change, which no longer h makes smaller; 0 if unknown.
        lost: Whether the product is zero, and its step may be lost in the rounding of the weights.
        rounded: Whether a longer trial shows that r is noise (`marked`).
    """

    h: float
    size: float
    nonlinearity: float
    roundoff: float
    spread: float
    form: float
    back: float
    change: float = math.inf
    values: float = 0.0
    third: float = 0.0
    beside: float = 0.0
    apart: float = 0.0
    growth: float = 0.0
    lost: bool = False
    rounded: bool = False

    @property
    def finite(self) -> bool:
        """Whether every figure is; r is none of those of a vector that J maps to zero."""
        r = self.nonlinearity if self.size else 0.0
        return all(map(math.isfinite, (self.size, r, self.form)))

    @property
    def beyond(self) -> bool:
        """Whether the outputs bend so much that no change between such displacements means
        anything: r is large, and no noise.
        """
        bent = self.nonlinearity > BENT and self.roundoff < BENT / GROWN
        return bent and not self.rounded


def marked(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials of a vector, with those marked whose r is noise: that of no other falls as
    h grows.
    """
    clear = [t for t in trials if t.finite and 0 < t.nonlinearity <= BENT]

    def rounded(trial: Trial) -> bool:
        return any(t.h > trial.h and 2 * t.nonlinearity < trial.nonlinearity for t in clear)

    return [replace(trial, rounded=rounded(trial)) for trial in trials]
