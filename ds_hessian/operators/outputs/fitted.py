"""What trials tell of N and kappa of Gauss-Newton products.

A change of a product between two displacements is made of noise and of truncation,

    change^2  =  N^2 noisy^2  +  (kappa bent)^2  +  rest^2

up to its scatter, and a witness is no more than that. A noise of few directions can be any small
number, a large change is no such draw, but may be a kink: so that the tails of both are long. Two
changes determine N and kappa, and are draws: what is expected of both counts beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hessian.operators.displacement.belief import (
    FREEDOM,
    KAPPA_SCATTER,
    TAIL,
    Array,
    Estimate,
    estimate,
    student,
)
from ds_hessian.operators.displacement.priors import KAPPA_SPREAD as DRIFT
from ds_hessian.operators.outputs.learnt import SPREAD, TINY, TYPICAL

NODES = np.arange(-12.0, 12.01, 0.25)
"""Of the table of N and kappa, in their logarithms, around what is expected."""


@dataclass(frozen=True)
class Shown:
    """What a trial, or two of them, have shown.

    Attributes:
        value: The norm of a change, or what a witness says.
        noisy: Noise that falls with h, of N 1.
        grown: Noise that does not, of N 1.
        most: The most that this can be.
        bent: Truncation, of kappa 1.
        rest: What is neither.
        least: Whether noise and truncation can be more than the value.
    """

    value: float
    noisy: float
    grown: float
    most: float
    bent: float
    rest: float
    least: bool = False

    def likelihood(self, noise: Array, kappa: Array) -> Array:
        """Return the logarithm of its probability, up to a constant."""
        rounding = np.hypot(self.noisy * noise, np.minimum(self.grown * noise, self.most))
        off = np.log(self.value / np.hypot(np.hypot(rounding, self.bent * kappa), self.rest))
        return student((np.maximum(off, 0) if self.least else off) / KAPPA_SCATTER, FREEDOM)


def fitted(shown: Sequence[Shown], noise: Estimate, kappa: Estimate) -> tuple[Estimate, Estimate]:
    """Return ln N and ln kappa after these, of what is expected of them before."""
    if not shown:
        return noise, kappa
    logarithms = noise.mean + NODES, kappa.mean + NODES
    table = student(NODES / noise.spread, TAIL)[:, None] + student(NODES / kappa.spread, TAIL)
    n, k = np.exp(logarithms[0])[:, None], np.exp(logarithms[1])
    for each in shown:
        table = table + each.likelihood(n, k)
    weight = np.exp(table - table.max())
    return estimate(logarithms[0], weight.sum(1)), estimate(logarithms[1], weight.sum(0))


def alike(kappa: Estimate) -> Estimate:
    """Return what ln kappa of some micro-batches lets expect of others': both scatter around what
    all have in common, so that a part of what is unusual in it is its own.
    """
    share, typical = 1 - (DRIFT / SPREAD) ** 2, math.log(TYPICAL)
    mean = typical + share * (kappa.mean - typical)
    return Estimate(mean, math.hypot(share * kappa.spread, DRIFT * math.sqrt(1 + share)))


def two_terms(first: list[float], second: list[float]) -> tuple[float, float]:
    """Return x, y >= 0 with `(x first)^2 + (y second)^2` near 1 for all entries but a few.

    Their logarithms are to be small, in absolute value, in the sum: changes span many orders of
    magnitude, and one that passes a kink, or saturates, is unlike all others. The sum is smallest
    near where one term alone fits an entry, so that each of these is tried.
    """
    a, b = np.square(first), np.square(second)
    if not (a.max() > 0 and b.max() > 0):
        return 0.0, 0.0
    tried = [(x, y) for x in (0.0, *_inverse(a)) for y in (0.0, *_inverse(b)) if x or y]
    sums = [np.abs(np.log(np.maximum(x * a + y * b, TINY))).sum() for x, y in tried]
    x, y = tried[int(np.argmin(sums))]
    return math.sqrt(x), math.sqrt(y)


def _inverse(squares: Array) -> list[float]:
    return [float(1 / square) for square in squares if square > 0]
