"""What changes between displacements tell of N and kappa of Gauss-Newton products.

A change of a product between two displacements is made of noise and of truncation,

    change^2  =  N^2 noisy^2  +  (kappa bent)^2  +  rest^2

up to its scatter: of noise in d directions it is a draw of chi_d, whose density in its logarithm is
as x^d exp(-d x^2 / 2), x the ratio to what is expected. G of few effective directions has small d,
and changes along the product. A draw of a normal distribution can be any small number, so that a
small change says little there, and what is expected of N counts beside it; a large change is no
such draw, but may be a kink, so that there the tail is Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_hessian.operators.displacement.belief import (
    FREEDOM,
    KAPPA_SCATTER,
    TAIL,
    UNEXPECTED,
    Array,
    Estimate,
    estimate,
    student,
)

NODES = np.arange(-12.0, 12.01, 0.25)
"""Of the table of N and kappa, in their logarithms, around what is expected."""

TINY = 1e-30
"""A square of a change that counts as none."""

MANY = 5.0
"""Directions of noise, at most: rounding is no normal distribution, and N hardly one number."""


@dataclass(frozen=True)
class Change:
    """A change between two displacements.

    Attributes:
        value: Its norm.
        noisy: Noise that falls with h, of N 1.
        grown: Noise that does not, of N 1.
        most: The most that this can be.
        bent: Truncation, of kappa 1.
        rest: What is neither.
        aligned: Cosine between it and the product.
    """

    value: float
    noisy: float
    grown: float
    most: float
    bent: float
    rest: float
    aligned: float

    def likelihood(self, noise: Array, kappa: Array) -> Array:
        """Return the logarithm of its probability, up to a constant."""
        rounding = np.hypot(self.noisy * noise, np.minimum(self.grown * noise, self.most))
        off = np.log(self.value / np.hypot(np.hypot(rounding, self.bent * kappa), self.rest))
        less = self.directions * (np.minimum(off, 0) + (1 - np.exp(2 * np.minimum(off, 0))) / 2)
        return less + student(np.maximum(off, 0) / KAPPA_SCATTER, FREEDOM)

    @property
    def directions(self) -> float:
        """How many directions the noise has, as far as the change tells."""
        told = self.value > UNEXPECTED * self.rest  # else it has any direction
        return 1 / max(self.aligned**2, 1 / MANY) if told else 1.0


def fitted(
    changes: Sequence[Change], noise: Estimate, kappa: Estimate
) -> tuple[Estimate, Estimate]:
    """Return ln N and ln kappa after these changes, of what is expected of them before."""
    logarithms = noise.mean + NODES, kappa.mean + NODES
    table = student(NODES / noise.spread, TAIL)[:, None] + student(NODES / kappa.spread, TAIL)
    n, k = np.exp(logarithms[0])[:, None], np.exp(logarithms[1])
    for change in changes:
        table = table + change.likelihood(n, k)
    weight = np.exp(table - table.max())
    return estimate(logarithms[0], weight.sum(1)), estimate(logarithms[1], weight.sum(0))


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


def _inverse(squares: NDArray[np.float64]) -> list[float]:
    return [float(1 / square) for square in squares if square > 0]
