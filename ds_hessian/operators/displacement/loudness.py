"""The rounding noise of all micro-batches, where they may be louder than their pilot.

Noise N of the pilot is known from its trials, and that of all micro-batches is taken for `quiet`
times it, as if these were alike. One that is far louder, of examples that a net is wrong about,
shows in no ratio: at the best displacement r is bend. The third difference of a product is noise
and truncation alike. What parts them is a gradient nearer to w, at w + chv: the parabola through
the three of the product differs from it by

    rho(c)  =  g(w + chv) - (1 - c^2) g(w) - (c + c^2) h D - c^2 g(w - hv)

which is c (1 - c^2) h times the truncation T of D, and noise. Of gradients that round independently

    |rho(c)| / sqrt(2)  =  hypot(W_c N, c (1 - c^2) h T / sqrt(2)) ,
    W_c^2  =  1 + (1 - c^2)^2 + (c^2 + c^4) / 2

with an eighth of the truncation that a third difference has beside as much noise. Of weights that
round, which are exact at w, and at w - hv are reached from w + hv, it is N too, as of one rounding
in a step of 2h. Noise hardly depends on the vector, so that it is measured once.
"""

from __future__ import annotations

import math

from ds_hessian.operators.displacement.trials import THIRD, Trial

NEARER = 0.25
"""c. Noise of shorter steps may be less than that of h: what is computed rounds as it does at w."""

ROUNDED = math.sqrt(1 + (1 - NEARER**2) ** 2 + (NEARER**2 + NEARER**4) / 2)
"""W_c."""

BENT = NEARER * (1 - NEARER**2) / math.sqrt(2)
"""Of the truncation over h."""


def possible_noise(product: Trial) -> float:
    """Return the most that N of all micro-batches is, for what a product of them shows: all of its
    third difference, or all of its ratio.
    """
    if product.third is not None and math.isfinite(product.third):
        return product.third * product.h / THIRD
    return product.nonlinearity * product.size * product.h / math.sqrt(3)


def noise_of(apart: float, product: Trial) -> float:
    """Return N of all micro-batches.

    Args:
        apart: |rho(c)| over the square root of 2, in units of the gradient.
        product: The product, with its third difference if that was evaluated.
    """
    square = (apart / ROUNDED) ** 2
    if product.third is not None and math.isfinite(product.third):
        share = (BENT / ROUNDED) ** 2
        square = (square - share * (product.third * product.h) ** 2) / (1 - share * THIRD**2)
    return math.sqrt(max(square, 0.0))
