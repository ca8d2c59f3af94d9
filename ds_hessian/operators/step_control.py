"""Choosing the displacement h of each product by measurement.

Notation: v is a unit vector, `d = g(w+hv) - g(w-hv)`, `s = g(w+hv) + g(w-hv) - 2 g(w)`, kappa =
|Hv|. To leading order, with an rms gradient rounding noise sigma,

    |d|^2 = (2 h kappa)^2 + 2 sigma^2          |s|^2 = (2 h^2 kappa a)^2 + 6 sigma^2

where 1/a is the length over which the curvature along v changes. The nonlinearity ratio |s|/|d|
costs no gradient beyond g(w). The relative error of the central difference is about

    sqrt((B/h)^2 + (c a^2 h^2)^2)    with    B = hypot(sigma / sqrt(2), rho kappa_rms) / kappa,

smallest at h* = (B / (sqrt(2) c a^2))^(1/3). So h* needs a, kappa and sigma: the first two from one
trial on the truncation branch, sigma from one trial on the noise branch, below h*, near enough to
it that the rounding is that of the product (a far smaller step does not re-roll it). The second
part of B is the rounding of the displaced weights, which s cannot see where w lies on the grid of
its dtype, since w + hv and w - hv are then rounded symmetrically: rho, the length of the realised
step's part across v, is known exactly from the write, and the Hessian stretches it, as it does any
direction unrelated to v, by about kappa_rms, the smallest |Hv| seen (a random probe's).

Everything here is arithmetic on numbers that all ranks share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SATURATED = 0.5
"""Above this ratio neither branch is linear: a step far too large, or nothing but noise."""

TRUNCATION = 1.5
"""c: the truncation error in units of r^2. It is 0.6 - 3, rarely 7; an h too small costs less."""

ACCEPT_LOW, ACCEPT_HIGH = 0.4, 1.6
"""h / h* for which a trial is good enough: the error is then below 2.1 times the least one."""

NOISE_DEPTH = 15.0
"""The noise trial goes this far below h*: there the noise part of |s| is 2 - 3 times the rest."""

STALE = 30.0
"""sigma is measured again once h* has moved this far from where it was measured."""

PRIOR_NOISE = 10.0
"""sigma before it is measured, in units of u |g|; seen: 3 for untrained, 23 for trained nets."""

AFTER_PROBE = 30.0
"""From a random probe to the next Krylov vector, rich in outliers, h* falls by 10 - 100."""

MAX_TRIALS = 10

REPEAT = 2.0
"""A finished product is worth doing again at h* if its estimated error is this many times the least
one: the pilot micro-batch was not like the rest."""


@dataclass(frozen=True)
class Trial:
    """Norms of d and s, per micro-batch, at one displacement h, and rho of the realised step."""

    h: float
    d: float
    s: float
    rho: float

    @property
    def ratio(self) -> float:
        """The nonlinearity ratio |s| / |d| (inf where nothing changed)."""
        return self.s / self.d if self.d > 0 else math.inf


@dataclass(frozen=True)
class Advice:
    """What to do after a trial: use its displacement, or try `h`."""

    h: float
    accept: bool


@dataclass(frozen=True)
class Assessment:
    """What a product's own d and s say of it; see `Product` for the meaning of the fields.

    `better` is an h at which the product should be repeated, or None.
    """

    nonlinearity: float
    noise: float | None
    error: float | None
    better: float | None = None


class StepController:
    """Carries h, a and sigma from product to product.

    Args:
        unit_roundoff: Of the dtype in which the passes compute.
        weight_norm: |w|, which sets the scale of the very first trial.
        gradient_norm: |g(w)| of the pilot micro-batch.
        num_micro_batches: Terms in the full gradient, one in a trial's.
    """

    def __init__(
        self,
        unit_roundoff: float,
        weight_norm: float,
        gradient_norm: float,
        num_micro_batches: int,
    ) -> None:
        scale = weight_norm if weight_norm > 0 else 1.0
        self.h = unit_roundoff ** (1 / 3) * scale
        self.smallest = 4 * unit_roundoff * scale
        self.largest = scale
        self.sigma: float | None = None
        self.sigma_h = math.nan
        self.prior_sigma = PRIOR_NOISE * unit_roundoff * gradient_norm
        # The rounding of the passes is independent between micro-batches, so it averages out.
        self.full_noise = num_micro_batches**-0.5
        self.kappa_rms = math.inf
        self.products = 0

    def propose(self) -> float:
        """The displacement of the next vector's first trial."""
        return self.h

    def advise(self, trials: list[Trial]) -> Advice:
        """Judge the last of the trials made for the current vector."""
        last = trials[-1]
        if len(trials) >= MAX_TRIALS:
            return self._settle(trials)
        if self.sigma is not None and last.s < 1.5 * math.sqrt(6) * self.sigma:
            if self._is_noise_trial(trials):
                return self._after_noise_trial(trials)
            return self._try(8 * last.h)  # a cannot be seen: a larger step, never a smaller one
        if self._is_noise_trial(trials):
            return self._after_noise_trial(trials)
        if not last.ratio < SATURATED:
            return self._leave_saturation(trials)
        best = self._best_h(last)
        if self._sigma_is_stale(best):
            return self._try(best / NOISE_DEPTH)
        if ACCEPT_LOW <= last.h / best <= ACCEPT_HIGH or last.h == self._clamp(best):
            return Advice(last.h, True)
        return self._try(best)

    def assess(self, full: Trial) -> Assessment:
        """Judge a product by its own d and s over all micro-batches, and move h for the next."""
        self.products += 1
        if self.sigma is None:
            return Assessment(full.ratio, None, TRUNCATION * full.ratio**2)
        sigma = self.sigma * self.full_noise
        kappa = self._kappa(full, sigma)
        self.kappa_rms = min(self.kappa_rms, kappa)
        b = self._b(kappa, sigma, full.rho)
        truncation = math.sqrt(max(full.s**2 - 6 * sigma**2, 0.0)) / full.d if full.d > 0 else 1.0
        noise = b / full.h
        error = math.hypot(noise, TRUNCATION * truncation**2)
        best = full.h
        if truncation > 0 and full.ratio < SATURATED:
            best = self._clamp(self._optimum(truncation / full.h, b))
        self.h = self._clamp(full.h / AFTER_PROBE) if self.products == 1 else best
        least = math.sqrt(3) * TRUNCATION * (truncation * best / full.h) ** 2
        repeat = best != full.h and 0 < least * REPEAT < error
        return Assessment(full.ratio, noise, error, best if repeat else None)

    # ---- the model of the module docstring, solved for its unknowns

    @staticmethod
    def _kappa(trial: Trial, sigma: float) -> float:
        return math.sqrt(max(trial.d**2 - 2 * sigma**2, 0.0)) / (2 * trial.h)

    def _b(self, kappa: float, sigma: float, rho: float) -> float:
        if kappa <= 0:
            return math.inf
        return math.hypot(sigma / math.sqrt(2), rho * min(self.kappa_rms, kappa)) / kappa

    @staticmethod
    def _optimum(a: float, b: float) -> float:
        return (b / (math.sqrt(2) * TRUNCATION * a * a)) ** (1 / 3) if a > 0 else math.inf

    def _best_h(self, trial: Trial) -> float:
        """h* of the full product, from one trial on the truncation branch."""
        sigma = self.prior_sigma if self.sigma is None else self.sigma
        truncation2 = max(trial.s**2 - 6 * sigma**2, 0.25 * trial.s**2)
        a = math.sqrt(truncation2) / trial.d / trial.h
        b = self._b(self._kappa(trial, 0.0), sigma * self.full_noise, trial.rho)
        return self._optimum(a, b)

    def _sigma_is_stale(self, best: float) -> bool:
        if self.sigma is None:
            return True
        return not 1 / STALE < best / NOISE_DEPTH / self.sigma_h < STALE

    def _is_noise_trial(self, trials: list[Trial]) -> bool:
        return (
            len(trials) > 1
            and trials[-1].h < 0.5 * min(t.h for t in trials[:-1])
            and (min(t.ratio for t in trials[:-1]) < SATURATED)
        )

    def _after_noise_trial(self, trials: list[Trial]) -> Advice:
        """Take sigma from the last trial; the one before it fixes the truncation branch."""
        last = trials[-1]
        above = min((t for t in trials[:-1] if t.ratio < SATURATED), key=lambda t: t.ratio)
        truncation = above.s * (last.h / above.h) ** 2
        noise2 = last.s**2 - truncation**2
        if noise2 < 0.5 * last.s**2 and last.h > self.smallest:
            return self._try(last.h / 8)  # the noise is smaller than thought: not visible yet
        self.sigma = math.sqrt(max(noise2, 0.0) / 6)
        self.sigma_h = last.h
        best = self._best_h(above)
        if ACCEPT_LOW <= last.h / best <= ACCEPT_HIGH:
            return Advice(last.h, True)
        return self._try(best)

    def _leave_saturation(self, trials: list[Trial]) -> Advice:
        if self.sigma is not None:  # not noise, so far too large a step
            return self._try(trials[-1].h / 10)
        decades = (0, -1, -2, 1, -3, 2, -4)
        if len(trials) < len(decades):  # one value cannot tell the sides apart: look at both
            return self._try(trials[0].h * 10.0 ** decades[len(trials)])
        return self._settle(trials)

    def _settle(self, trials: list[Trial]) -> Advice:
        """Out of trials: the smallest ratio seen is the best that can be said."""
        best = min(trials, key=lambda t: t.ratio)
        return Advice(best.h, best.h == trials[-1].h)

    def _clamp(self, h: float) -> float:
        return min(max(h, self.smallest), self.largest)

    def _try(self, h: float) -> Advice:
        return Advice(self._clamp(h), False)
