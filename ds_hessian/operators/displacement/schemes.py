"""Difference formulas: which gradients make a product, and how its error falls with h.

A product is a weighted sum of first differences of the gradient g along the unit vector v,

    H v = sum_k weight_k (g(w + a_k h v) - g(w + b_k h v)) / ((a_k - b_k) h) + O(h^order)

The fourth-order formula is Richardson's extrapolation of central differences over h and 2h:
(8 (g_1 - g_-1) - (g_2 - g_-2)) / 12h.

Source: Fornberg, Math. Comp. 51 (1988).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

SchemeName = Literal["forward", "central", "fourth_order"]

KINKS_SPREAD = 0.2
"""Standard deviation of the logarithm of error over r among kinks, as of one-sided differences."""


@dataclass(frozen=True)
class Scheme:
    """A difference formula.

    Attributes:
        order: The order p; the relative truncation error is `tau h^p` for small h.
        differences: `(a, b, weight)` of each first difference.
        truncation: The error's typical size in units of `r^p`, with the nonlinearity ratio r at h.
        truncation_spread: Standard deviation of its logarithm; docs/numerics.md has the figures.
    """

    order: int
    differences: tuple[tuple[int, int, float], ...]
    truncation: float
    truncation_spread: float

    @property
    def nodes(self) -> tuple[int, ...]:
        """The points at which gradients are evaluated, in units of h, without w itself."""
        return tuple(node for a, b, _ in self.differences for node in (a, b) if node)

    @property
    def among_kinks(self) -> Scheme:
        """The same formula of a loss that has kinks, in its gradient or in the gradient's slope.

        A kink within h of w adds something to the gradient on one side: to the first difference,
        of which the product is made, and to the second, which makes r, alike. It grows with the
        number of kinks that are passed, in proportion to h at least.
        """
        return replace(self, order=1, truncation=1.0, truncation_spread=KINKS_SPREAD)

    @property
    def one_sided(self) -> bool:
        """True if the product uses the gradient at w."""
        return any(b == 0 for _, b, _ in self.differences)


SCHEMES: dict[SchemeName, Scheme] = {
    "forward": Scheme(1, ((1, 0, 1.0),), 1.0, 0.2),
    "central": Scheme(2, ((1, -1, 1.0),), 1.15, 0.5),
    "fourth_order": Scheme(4, ((1, -1, 4 / 3), (2, -2, -1 / 3)), 1.0, 1.0),
}
