"""What a spectrum's own diagnostics say against it, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ds_hessian.records.spectrum import HessianSpectrum

FIDELITY = 0.99
"""Below it the realised step is off v by more than 8 degrees."""
ERROR = 0.1
"""Relative error of a product; an eigenvalue's error is of the same size."""
NONLINEARITY = 0.3
"""Above it the error model of the step control does not hold."""
ASYMMETRY = 3.0
"""An entry of the projected Hessian cannot be off by more than its product's error."""


def warnings_of(spectrum: HessianSpectrum) -> tuple[str, ...]:
    """One sentence for each thing that is wrong, with its advice."""
    s, found = spectrum, list[str]()
    auto = s.provenance.displacement == "auto"
    larger = (
        "a larger displacement"
        if not auto
        else "weights in fp32 for the measurement, or a larger fixed displacement"
    )
    low = s.fidelities < FIDELITY
    if low.any():
        found.append(
            f"{_count(low)} moved the weights along something else than intended (fidelity down "
            f"to {s.fidelities.min():.2f}): their step is lost in the rounding of the weights; "
            f"use {larger}"
        )
    relative = relative_errors(s)
    high = relative > ERROR
    if high.any():
        advice = "fp32 weights and passes, or more micro-batches" if auto else '"auto"'
        found.append(
            f"{_count(high)} have an estimated error above {ERROR:.0%} (up to "
            f"{relative.max():.0%}): use {advice}"
        )
    curved = np.nan_to_num(s.nonlinearities) > NONLINEARITY
    if curved.any():
        advice = "fp32 weights and passes" if auto else "a smaller displacement"
        found.append(
            f"{_count(curved)} reach beyond where the gradient is about linear (nonlinearity up to "
            f"{np.nanmax(s.nonlinearities):.2f}), so they average the curvature; use {advice}"
        )
    most = ASYMMETRY * s.product_errors.max(axis=1)
    if ((s.asymmetries > most) & (most > 0)).any():
        found.append(
            f"the projected Hessian is not symmetric by {s.asymmetries.max():.2g}, more than its "
            "products' estimated errors allow: the gradient may not be deterministic or the loss "
            "not smooth; the error bars are too small"
        )
    return tuple(found)


def relative_errors(spectrum: HessianSpectrum) -> NDArray[np.float64]:
    """`(P, m)` estimated error of each product over its norm; 0 where unknown."""
    size = _product_norms(spectrum)
    return np.divide(spectrum.product_errors, size, out=np.zeros_like(size), where=size > 0)


def _product_norms(spectrum: HessianSpectrum) -> NDArray[np.float64]:
    """`|H q_j|` of each Lanczos vector, from the tridiagonals."""
    before = np.pad(spectrum.betas[:, :-1], ((0, 0), (1, 0)))
    return np.sqrt(before**2 + spectrum.alphas**2 + spectrum.betas**2)


def _count(mask: NDArray[np.bool_]) -> str:
    return f"{int(mask.sum())} of {mask.size} products"
