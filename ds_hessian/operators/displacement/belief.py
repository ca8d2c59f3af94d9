"""Probabilities of rounding noise and nonlinearity, learnt from trials and products.

Notation: D(h) is the difference of a unit vector at displacement h, r its *nonlinearity ratio*
|g(w + hv) + g(w - hv) - 2 g(w)| / |g(w + hv) - g(w - hv)|, which costs no gradient. For a scheme of
order p, with S = |Hv|, r and the error follow from two numbers, the noise N and the *bend* b, the
curvature of the gradient along v:

    r     =  sqrt(3 (N / (h |D|))^2 + (b h)^2)           b h is 1.1 where it saturates
    error =  sqrt((N / (h S))^2 + (kappa (b h)^p)^2)     relative, smallest at h*

N is the rounding noise of the gradients and hardly depends on v or h; 1 / b is a length that
belongs to v. One r cannot separate rounding from nonlinearity; several, at different h, can, and
the estimates from earlier vectors are the prior. An estimate from the *pilot* (some of the
micro-batches) holds for the whole slice up to a spread. Measured values of kappa, of the factors
between pilot and slice and of the drifts from vector to vector are in docs/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]

STEP, REACH = 0.25, 5.0
"""The distance of the table's logarithms, and their reach to both sides of the expected value, in
standard deviations (at least 7, a factor of 1000).
"""

SATURATION = 1.1
"""The nonlinearity ratio where h is far too large."""

SCATTER, FREEDOM = 0.25, 5.0
"""Scatter of ln r around its formula: a Student distribution, twice as wide from SATURATING on."""

SATURATING = 0.4

VISIBLE, KAPPA_SCATTER = 3.0, 0.35
"""A change above VISIBLE times what noise makes shows truncation; the error of ln kappa from it."""

LARGER = 1.5
"""Ratio of the slice's kappa to the pilot's."""

UNLIKE = 0.4
"""Mean deviation of ln b between pilot and slice, vectors apart."""

TAIL = 3.0
"""Degrees of freedom of the prior of a vector's b."""

LARGEST = 2.0, 1.2
"""Largest values of the parts of an error, noise and b h: larger ones are indistinguishable."""

NEGLIGIBLE = 1e-5
"""Cells of the table below this share of the most probable one are left out of averages."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of a positive number: mean and standard deviation of its natural logarithm."""

    mean: float
    spread: float

    def widened(self, spread: float) -> Estimate:
        """Return the estimate after a random change."""
        return Estimate(self.mean, math.hypot(self.spread, spread))

    def corrected(self, seen: float, scatter: float) -> Estimate:
        """Return the estimate after observing `seen`, with error `scatter`, for the logarithm."""
        gain = self.spread**2 / (self.spread**2 + scatter**2)
        return Estimate(self.mean + gain * (seen - self.mean), self.spread * math.sqrt(1 - gain))


@dataclass(frozen=True)
class Trial:
    """A product of pilot or slice: its displacement, its norm |D|, its nonlinearity ratio, and
    |D - D'| from the trial before (inf for the first, and where something is not finite).
    """

    h: float
    size: float
    nonlinearity: float
    change: float = math.inf

    @property
    def finite(self) -> bool:
        """True if size and ratio are finite; otherwise it shows only that h was too large."""
        return math.isfinite(self.size) and math.isfinite(self.nonlinearity)


@dataclass(frozen=True)
class Surroundings:
    """Known quantities that are the same for all vectors of a slice.

    Attributes:
        order: The order p of the scheme.
        quiet: The ratio of the slice's N to the pilot's.
        bend, size: The logarithms of the ratios of the slice's b and S to the pilot's.
        spread: Mean deviation of `bend`; zero where the pilot is the slice.
    """

    order: int
    quiet: float
    bend: float
    size: float
    spread: float


@dataclass(frozen=True)
class Outlook:
    """The expected error at the best displacement and at the last one.

    Attributes:
        h: The displacement with the least expected ln(error).
        regret: The mean loss in ln(error) at h that is due to the uncertainty of N and b.
        excess: The additional loss from staying at the displacement of the last trial.
        noise, error: Relative noise and error at the displacement of the last trial.
    """

    h: float
    regret: float
    excess: float
    noise: float
    error: float


class Belief:
    """Probabilities of one vector's ln N (rows, the pilot's) and ln b (columns, the slice's).

    Args:
        noise, bend, kappa: The priors before the first trial.
        around: The quantities common to all vectors of the slice.
    """

    def __init__(
        self, noise: Estimate, bend: Estimate, kappa: Estimate, around: Surroundings
    ) -> None:
        self.around, self.kappa, self.truncation_seen = around, kappa, False
        rows, columns = (_offsets(estimate.spread) for estimate in (noise, bend))
        self.noise, self.bend = noise.mean + rows, bend.mean + columns
        normal = -0.5 * (rows / noise.spread) ** 2
        self._expected = normal[:, None] + _student(columns / bend.spread, TAIL)
        self._pilot = np.zeros_like(self._expected)  # of the trials; columns: the pilot's b
        self._slice = np.zeros_like(self._expected)  # of the products
        self._bend_of_pilot = bend.mean

    def observe_trial(self, trial: Trial) -> None:
        """Learn from a product of the pilot."""
        self._pilot += self._likelihood(trial, 1.0)
        expected = _blurred(self._expected, -self.around.bend, self.around.spread)
        self._bend_of_pilot = self._columns(expected + self._pilot).mean

    def observe_change(self, first: Trial, second: Trial) -> None:
        """Learn kappa from the change between two trials, if truncation is seen in it."""
        order = self.around.order
        above, below = sorted((first, second), key=lambda trial: -trial.h)
        noise, bend = (math.exp(logarithm) for logarithm in self.of_pilot())
        size, rounding = max(above.size, below.size), noise * math.hypot(1 / above.h, 1 / below.h)
        bent = above.nonlinearity > 2 * math.sqrt(3) * noise / (above.h * size)
        if bent and VISIBLE * rounding < second.change < SATURATING * size:
            part = math.sqrt(second.change**2 - rounding**2) / size
            seen = math.log(part / (above.h**order - below.h**order)) - order * math.log(bend)
            self.kappa = self.kappa.corrected(seen, KAPPA_SCATTER)
            self.truncation_seen = True

    def observe_product(self, product: Trial) -> None:
        """Learn from a product of all micro-batches, if these are more than the pilot."""
        if self.around.spread:
            self._slice += self._likelihood(product, self.around.quiet)

    def estimates(self) -> tuple[Estimate, Estimate]:
        """Return estimates of the pilot's ln N and the slice's ln b."""
        table = self._table()
        return self._rows(table), self._columns(table)

    def of_pilot(self) -> tuple[float, float]:
        """Return the pilot's ln N and ln b, from its trials."""
        return self._rows(self._expected + self._pilot).mean, self._bend_of_pilot

    # ---- decisions

    def outlook(self, last: Trial, displacements: Array, of_pilot: bool) -> Outlook:
        """Compare the displacements for the slice, after a trial (`of_pilot`) or a product."""
        noise, bend, weight = self._cells(self._table())
        return self._outlook(last, displacements, of_pilot, noise, bend, weight)

    def search(self, last: Trial, displacements: Array) -> tuple[float, float]:
        """Return the regret of the pilot (as `Outlook.regret`), and the displacement at which a
        trial's outcome is least certain, so that it is the most informative.
        """
        noise, bend, weight = self._cells(self._expected + self._pilot)
        regret = self._outlook(last, displacements, True, noise, bend, weight).regret
        h = displacements[:, None]
        ratio = np.log(_ratio(noise, bend, h, np.hypot(_signal(last, noise), noise / h)))
        doubt = _mean(ratio**2, weight) - _mean(ratio, weight) ** 2
        return regret, float(displacements[int(doubt.argmax())])

    def _outlook(
        self,
        last: Trial,
        displacements: Array,
        of_pilot: bool,
        noise: Array,
        bend: Array,
        weight: Array,
    ) -> Outlook:
        around = self.around
        if of_pilot:
            signal = math.exp(around.size) * _signal(last, noise)
        else:
            signal = _signal(last, around.quiet * noise)
        h = np.append(displacements, last.h)[:, None]
        rounding = np.minimum(around.quiet * noise / (h * signal), LARGEST[0])
        # Second differences of unlike micro-batches cancel where third ones need not.
        mixed = np.sqrt((bend**2 + math.exp(2 * self._bend_of_pilot)) / 2)
        truncation = self._kappa_of_slice * np.minimum(mixed * h, LARGEST[1]) ** around.order
        error = np.hypot(rounding, truncation)
        expected = _mean(np.log(error), weight)
        best = int(expected[:-1].argmin())
        return Outlook(
            h=float(displacements[best]),
            regret=float(expected[best] - np.log(error[:-1].min(axis=0)) @ weight),
            excess=float(expected[-1] - expected[best]),
            noise=float(np.exp(np.log(rounding[-1]) @ weight)),
            error=float(np.exp(expected[-1])),
        )

    # ---- the table

    @property
    def _kappa_of_slice(self) -> float:
        return math.exp(self.kappa.mean) * (LARGER if self.around.spread else 1.0)

    def _likelihood(self, trial: Trial, quiet: float) -> Array:
        if not (trial.finite and trial.size > 0 and trial.nonlinearity > 0):
            return np.zeros_like(self._expected)
        noise, bend = np.exp(self.noise)[:, None], np.exp(self.bend)
        off = np.log(trial.nonlinearity / _ratio(quiet * noise, bend, trial.h, trial.size))
        wide = 2.0 if trial.nonlinearity > SATURATING else 1.0
        return _student(off / (SCATTER * wide), FREEDOM)

    def _table(self) -> Array:
        pilot = _blurred(self._pilot, self.around.bend, self.around.spread)
        return self._expected + pilot + self._slice

    def _cells(self, table: Array) -> tuple[Array, Array, Array]:
        """Return N, b and probability of the cells that are not negligible."""
        weight = np.exp(table - table.max())
        rows, columns = np.nonzero(weight > NEGLIGIBLE)
        weight = weight[rows, columns]
        return np.exp(self.noise[rows]), np.exp(self.bend[columns]), weight / weight.sum()

    def _rows(self, table: Array) -> Estimate:
        return _estimate(self.noise, np.exp(table - table.max()).sum(axis=1))

    def _columns(self, table: Array) -> Estimate:
        return _estimate(self.bend, np.exp(table - table.max()).sum(axis=0))


def _ratio(noise: Array, bend: Array, h: Array | float, size: Array | float) -> Array:
    """Return the nonlinearity ratio."""
    bent = bend * h
    saturating = bent / np.sqrt(1 + (bent / SATURATION) ** 2)
    return np.sqrt(3 * np.minimum(noise / (h * size), 1.0) ** 2 + saturating**2)


def _signal(trial: Trial, noise: Array) -> Array:
    """Return |Hv|, the part of |D| that is not noise."""
    return np.sqrt(trial.size**2 - np.minimum(noise / trial.h, 0.9 * trial.size) ** 2)


def _mean(figures: Array, weight: Array) -> Array:
    """Average over the cells, by einsum: threads of BLAS would wait for those of other ranks."""
    return np.asarray(np.einsum("ij,j->i", figures, weight))


def _offsets(spread: float) -> Array:
    count = math.ceil(max(7.0, REACH * spread) / STEP)
    return STEP * np.arange(-count, count + 1)


def _student(t: Array, freedom: float) -> Array:
    return -(freedom + 1) / 2 * np.log1p(t**2 / freedom)


def _estimate(logarithm: Array, weight: Array) -> Estimate:
    weight = weight / weight.sum()
    mean = float(logarithm @ weight)
    return Estimate(mean, math.sqrt(max(float(logarithm**2 @ weight) - mean**2, STEP**2 / 12)))


def _blurred(table: Array, shift: float, width: float) -> Array:
    """Shift the columns by `shift` and a random part of mean deviation `width`."""
    if not width:
        return table
    position = STEP * np.arange(table.shape[1])
    apart = position - position[:, None] - shift
    kernel = np.exp(-np.abs(apart) / width)
    kernel /= kernel.sum(axis=1, keepdims=True)
    moved = np.einsum("ij,jk->ik", np.exp(table - table.max()), kernel)
    return np.asarray(np.log(moved + 1e-12 * moved.max()))
