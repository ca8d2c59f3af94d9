"""A number with its error bar."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_hessian.errors import NumericsError


@dataclass(frozen=True)
class Estimate:
    """A measured value.

    Attributes:
        value: The value, in the unit of the quantity.
        error: One standard error, or the bound that the quantity's documentation names; same unit.

    Raises:
        NumericsError: the error is negative.
    """

    value: float
    error: float

    def __post_init__(self) -> None:
        if self.error < 0:
            raise NumericsError(f"an error must be at least 0, got {self.value} ± {self.error}")

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        """Return value and error, to two digits of it: `84.53 ± 0.12`, `(1.20 ± 0.34)e-08`."""
        value, error = self.value, self.error
        if not (math.isfinite(value) and math.isfinite(error)):
            return f"{value:.6g} ± {error:.2g}"
        if error == 0:
            return f"{value:.6g} ± 0"
        exponent = math.floor(math.log10(max(abs(value), error)))
        if error < 1e-6 * abs(value):
            return f"{value:.7g} ± {error:.1g}"
        if -3 <= exponent < 6:
            return _fixed(value, error)
        scale = 10.0**exponent
        return f"({_fixed(value / scale, error / scale)})e{exponent:+03d}"


@dataclass(frozen=True)
class SamplingErrors:
    """Standard errors of a spectrum's figures from having measured on these micro-batches only.

    They are the distance to the same figures of all the data from which the micro-batches were
    drawn, and come beside the errors of products and probes. An interval takes Student's
    distribution of `micro_batches - 1` degrees of freedom, which matters with few.

    Attributes:
        eigenvalue_max: Standard error of the largest eigenvalue, to first order.
        eigenvalue_min: Standard error of the smallest eigenvalue, to first order.
        trace: Standard error of the trace, from the probes' quadratic forms.
        micro_batches: Number of independent draws G: micro-batches of a rank.
    """

    eigenvalue_max: float
    eigenvalue_min: float
    trace: float
    micro_batches: int


def _fixed(value: float, error: float) -> str:
    decimals = max(0, 1 - math.floor(math.log10(error)))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"
