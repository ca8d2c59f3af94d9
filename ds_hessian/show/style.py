"""Colours of pictures and page, and numbers as short text.

The colours are from Okabe and Ito's palette, which the common colour-blindnesses keep apart.
"""

from __future__ import annotations

import math

BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY, INK = "#8A8A8A", "#222222"
COLORS = (BLUE, VERMILLION, GREEN, PURPLE, "#E69F00", "#56B4E9")
"""Colours of series, in order."""
MATRICES = {
    "hessian": "Hessian",
    "ggn": "Gauss-Newton",
    "residual": "Residual",
    "fisher": "Empirical Fisher",
}
"""Names of the operators, for titles."""
PHRASES = {
    "hessian": "the Hessian",
    "ggn": "the Gauss-Newton matrix",
    "residual": "the residual",
    "fisher": "the empirical Fisher matrix",
}
"""Names of the operators, within a sentence."""
EIGENVALUE = "eigenvalue (loss per squared parameter)"


def count(n: int) -> str:
    """Return a number of parameters as short text: `1.24 B`."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n:,}"


def short(value: float) -> str:
    """Return a value to three digits."""
    return f"{value:.3g}" if abs(value) < 100 or abs(value) >= 1e5 else f"{value:.0f}"


def barred(value: float, error: float, digits: int = 3) -> str:
    """Return a share or cosine with its error, or alone where that is unknown."""
    text = f"{value:.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {error:.{digits}f}"


def micro_batches(number: int) -> str:
    """Return a number of micro-batches in words: `1 micro-batch`, `8 micro-batches`."""
    return f"{number} micro-batch" + "es" * (number != 1)
