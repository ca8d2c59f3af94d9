"""Warnings that follow from a spectrum's own diagnostics, each with its cause and its advice."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hessian.config import EXTRAPOLATED
from ds_hessian.krylov.records import COVERAGE

Array = NDArray[np.float64]

FIDELITY = 0.99
"""A product below it has a realised step that is off v by more than 8 degrees."""
ERROR = 0.1
"""Error of a product, over the largest product's norm, above which eigenvalues are poor; theirs is
of the same size."""
NONLINEARITY = 0.3
"""Nonlinearity above which the error model of the step control does not hold."""
ROUNDING = 3**0.5
"""Nonlinearity in units of the relative error that rounding alone makes: docs/numerics.md."""
ASYMMETRY = 3.0
"""An entry of the projected Hessian cannot be off by more than its product's error."""


@dataclass(frozen=True)
class Diagnostics:
    """Diagnostics of the products of a spectrum: P probes, m products each.

    Attributes:
        automatic: Whether each product chose its own displacement.
        tolerance: The accuracy wanted of eigenvalues, relative to the largest; None for none.
        narrow: Whether the passes ran in less than fp32.
        wide: What would run them in fp32.
        fidelities: `(P, m)` cosine of the realised and the intended displacement.
        norms: `(P, m)` norm of each product of a unit vector.
        nonlinearities: `(P, m)` nonlinearity ratio; NaN where not measured.
        product_errors: `(P, m)` estimated absolute error of each product; 0 where unknown.
        asymmetries: `(P,)` largest asymmetry of the projected Hessian.
        rounding: `(P,)` what rounding of the basis contributes to it.
    """

    automatic: bool
    tolerance: float | None
    narrow: bool
    wide: str
    fidelities: Array
    norms: Array
    nonlinearities: Array
    product_errors: Array
    asymmetries: Array
    rounding: Array

    def warnings(self) -> tuple[str, ...]:
        """Return one sentence for each thing that is wrong, with its cause and its advice."""
        found = (
            *(self._fidelity(), self._error(), self._tolerance()),
            *(self._nonlinearity(), self._asymmetry()),
        )
        return tuple(text for text in found if text)

    def _fidelity(self) -> str:
        low = self.fidelities < FIDELITY
        if not low.any():
            return ""
        larger = "or a larger fixed displacement" if self.automatic else "or a larger displacement"
        return (
            f"{_count(low)} moved the weights along something else than intended (fidelity down "
            f"to {self.fidelities.min():.2f}): their step is lost in the rounding of the weights; "
            f"use {self.wide if self.narrow else 'weights in fp32'}, {larger}"
        )

    def _error(self) -> str:
        errors = _over(self.product_errors, self.norms.max(axis=1, keepdims=True))
        high = errors > ERROR
        if not high.any():
            return ""
        return (
            f"{_count(high)} have an estimated error above {ERROR:.0%} of the largest product (up "
            f"to {errors.max():.0%}): {self._cause(high)}"
        )

    def _tolerance(self) -> str:
        if self.tolerance is None:
            return ""
        bars = COVERAGE * _over(self.product_errors, np.full_like(self.norms, self.norms.max()))
        beyond = bars > self.tolerance
        if not beyond.any():
            return ""
        tight = self.tolerance < EXTRAPOLATED and not self.narrow
        tried = "any" if tight else "one-sided or central"
        fourth = "accept a larger one" if tight else "those of fourth_order are more exact"
        return (
            f"{_count(beyond)} do not reach the tolerance of {self.tolerance:g} by {tried} "
            f"differences: they make bars of up to {bars.max():.1e} of the largest product; "
            f"{f'use {self.wide}' if self.narrow else fourth}"
        )

    def _cause(self, high: NDArray[np.bool_]) -> str:
        """Return what makes these errors, and what to do."""
        if not self.automatic:
            return 'the displacement is a fixed one; use "displacement": "auto"'
        if self.narrow:
            return f"the gradients are rounded to 16 bits; use {self.wide}"
        nothing = self.norms <= self.product_errors
        if nothing.mean() > 0.5:
            largest = self.product_errors[nothing].max()
            return f"most are no more than that: the curvature along them is 0, to {largest:.1e}"
        if self._unsmooth.any() or self._bent[high].any():
            return (
                "the loss is not smooth there (ReLU, max pooling, clamping) or not deterministic, "
                "so that no displacement is right; the error bars hold it"
            )
        return "the gradients are small beside their rounding; use more micro-batches"

    @property
    def _bent(self) -> NDArray[np.bool_]:
        """The products whose nonlinearity is more than rounding explains."""
        found = np.nan_to_num(self.nonlinearities)
        explained = ROUNDING * _over(self.product_errors, self.norms)
        return np.asarray((found > NONLINEARITY) & (found > explained))

    @property
    def _unsmooth(self) -> NDArray[np.bool_]:
        """The products whose error is the asymmetry of the projected Hessian."""
        return np.asarray((self.product_errors == self.asymmetries[:, None]) & (self._least > 0))

    @property
    def _least(self) -> Array:
        """The asymmetry beyond rounding."""
        return np.maximum(self.asymmetries - self.rounding, 0.0)[:, None]

    def _nonlinearity(self) -> str:
        curved = self._bent
        if not curved.any():
            return ""
        wide = self.wide if self.narrow else "more micro-batches"
        return (
            f"{_count(curved)} reach beyond where the gradient is about linear (nonlinearity up to "
            f"{self.nonlinearities[curved].max():.2f}), so they average the curvature; use "
            f"{wide if self.automatic else 'a smaller displacement'}"
        )

    def _asymmetry(self) -> str:
        most = ASYMMETRY * self.product_errors.max(axis=1)
        if not ((self.asymmetries > most + self.rounding) & (most > 0)).any():
            return ""
        return (
            f"the projected Hessian is not symmetric by {self.asymmetries.max():.2g}, more than "
            "its products' estimated errors allow: the gradient may not be deterministic or the "
            "loss not smooth; the error bars are too small"
        )


def wide_passes(reason: str) -> str:
    """Return what would run the passes in fp32, where `reason` says why they were not."""
    if reason:
        return f"passes or weights in fp32 ({reason})"
    return '"precision": "fp32" in finite_difference'


def norms_of_products(alphas: Array, betas: Array) -> Array:
    """Return `(P, m)` norms `|H q_j|` from the tridiagonals.

    `H q_j` has the parts beta_{j-1}, alpha_j and beta_j.
    """
    before = np.pad(betas[:, :-1], ((0, 0), (1, 0)))
    return np.asarray(np.sqrt(before**2 + alphas**2 + betas**2))


def relative_errors(product_errors: Array, alphas: Array, betas: Array) -> Array:
    """Return `(P, m)` errors of products over their norms; 0 where unknown."""
    return _over(product_errors, norms_of_products(alphas, betas))


def _over(errors: Array, norms: Array) -> Array:
    """Return the ratio, 0 where there is no norm."""
    sizes = np.broadcast_to(norms, errors.shape)
    return np.divide(errors, sizes, out=np.zeros_like(errors), where=sizes > 0)


def _count(mask: NDArray[np.bool_]) -> str:
    return f"{int(mask.sum())} of {mask.size} products"
