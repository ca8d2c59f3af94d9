"""Warnings that follow from a spectrum's own diagnostics, each with its advice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FIDELITY = 0.99
"""A product below it has a realised step that is off v by more than 8 degrees."""
ERROR = 0.1
"""Relative error of a product above which eigenvalues are poor; theirs is of the same size."""
NONLINEARITY = 0.3
"""Nonlinearity above which the error model of the step control does not hold."""
ASYMMETRY = 3.0
"""An entry of the projected Hessian cannot be off by more than its product's error."""


@dataclass(frozen=True)
class Diagnostics:
    """Diagnostics of the products of a spectrum: P probes, m products each.

    Attributes:
        automatic: Whether each product chose its own displacement.
        fidelities: `(P, m)` cosine of the realised and the intended displacement.
        relative_errors: `(P, m)` estimated error over the product's norm; 0 where unknown.
        nonlinearities: `(P, m)` nonlinearity ratio; NaN where not measured.
        product_errors: `(P, m)` estimated absolute error of each product; 0 where unknown.
        asymmetries: `(P,)` largest asymmetry of the projected Hessian.
    """

    automatic: bool
    fidelities: Array
    relative_errors: Array
    nonlinearities: Array
    product_errors: Array
    asymmetries: Array

    def warnings(self) -> tuple[str, ...]:
        """Return one sentence for each thing that is wrong, with its advice."""
        found = (self._fidelity(), self._error(), self._nonlinearity(), self._asymmetry())
        return tuple(text for text in found if text)

    def _fidelity(self) -> str:
        low = self.fidelities < FIDELITY
        if not low.any():
            return ""
        larger = "weights in fp32 for the measurement, or a larger fixed displacement"
        return (
            f"{_count(low)} moved the weights along something else than intended (fidelity down "
            f"to {self.fidelities.min():.2f}): their step is lost in the rounding of the weights; "
            f"use {larger if self.automatic else 'a larger displacement'}"
        )

    def _error(self) -> str:
        high = self.relative_errors > ERROR
        if not high.any():
            return ""
        advice = "fp32 weights and passes, or more micro-batches" if self.automatic else '"auto"'
        return (
            f"{_count(high)} have an estimated error above {ERROR:.0%} (up to "
            f"{self.relative_errors.max():.0%}): use {advice}"
        )

    def _nonlinearity(self) -> str:
        curved = np.nan_to_num(self.nonlinearities) > NONLINEARITY
        if not curved.any():
            return ""
        advice = "fp32 weights and passes" if self.automatic else "a smaller displacement"
        return (
            f"{_count(curved)} reach beyond where the gradient is about linear (nonlinearity up to "
            f"{np.nanmax(self.nonlinearities):.2f}), so they average the curvature; use {advice}"
        )

    def _asymmetry(self) -> str:
        most = ASYMMETRY * self.product_errors.max(axis=1)
        if not ((self.asymmetries > most) & (most > 0)).any():
            return ""
        return (
            f"the projected Hessian is not symmetric by {self.asymmetries.max():.2g}, more than "
            "its products' estimated errors allow: the gradient may not be deterministic or the "
            "loss not smooth; the error bars are too small"
        )


def relative_errors(product_errors: Array, alphas: Array, betas: Array) -> Array:
    """Return `(P, m)` errors of products over their norms `|H q_j|`; 0 where unknown.

    The norms follow from the tridiagonals: `H q_j` has the parts beta_{j-1}, alpha_j and beta_j.
    """
    before = np.pad(betas[:, :-1], ((0, 0), (1, 0)))
    size = np.sqrt(before**2 + alphas**2 + betas**2)
    return np.divide(product_errors, size, out=np.zeros_like(size), where=size > 0)


def _count(mask: NDArray[np.bool_]) -> str:
    return f"{int(mask.sum())} of {mask.size} products"
