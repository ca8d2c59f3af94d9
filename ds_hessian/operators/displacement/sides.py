"""One side or both: the cheapest difference that reaches a tolerance.

A product of one side, F = (g(w + s h v) - g(w)) / (s h) with s = 1 or -1, costs one gradient. The
one at w is known, and kept. Its error is known without a model where g(w - s h v) is known too:

    F - D  =  (g(w + hv) + g(w - hv) - 2 g(w)) / 2h          of norm r |D|

is all that the central difference D of the same h does not have, its truncation (h / 2 times the
third derivative along v, v) with the rounding of the gradient at w. In terms of the noise N and the
bend b of `ds_hessian.operators.displacement.belief`, which every trial teaches,

    |F - Hv|  =  sqrt((2 N / h)^2 + (b h |Hv|)^2)            2 N: two roundings over h instead of 2h

A tolerance is a bound on what products contribute to the bars of eigenvalues, relative to the
largest: COVERAGE times a product's error may be the tolerance times the largest |Hv| so far, which
no eigenvalue in magnitude is below. N and b count at DOUBT mean deviations above their estimates;
what b may have become grows from vector to vector. So the other side of a pilot is evaluated where
the error is in doubt, not in every product. h is the one at which this error is smallest; where it
is measured, the one that is expected to be best.

All micro-batches are evaluated on both sides, by a central difference, for the first product, for
one in CHECKED after that, and where one side is not enough or the witnesses say that the model does
not hold. Its h is good enough where its error is. Where that is not expected either (`reaches`),
the product is one of fourth order, as far as that one is expected to be enough. Truncation of like
vectors is alike: with the signs of a Rudin-Shapiro sequence it adds up in no combination of
products to more than independent errors do, as error bars assume.

Source: Rudin, Proc. Amer. Math. Soc. 10 (1959): its partial sums of length n are O(sqrt(n)) at
every frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from ds_hessian.config import EXTRAPOLATED
from ds_hessian.operators.displacement.belief import SATURATING, Estimate
from ds_hessian.operators.displacement.control import APART, StepController
from ds_hessian.operators.displacement.estimates import KINKED
from ds_hessian.operators.displacement.schemes import SCHEMES, Scheme
from ds_hessian.operators.displacement.trials import Trial
from ds_hessian.operators.protocol import COVERAGE

ROUNDINGS = 2.0
"""Noise of a one-sided difference in units of that of the central one of the same h."""

DOUBT = 2.0
"""Mean deviations of ln N and ln b within which an error counts as possible: 98 % of a normal
distribution are below."""

LONGER = 3.0
"""A product this many times as long as all those that were checked is of another kind of vector,
such as the first one of a run after a random vector; the next of the same run is not."""

TRIES = 3
"""Trials at most before both sides are taken."""

CHECKED = 24
"""Products of one side after which one of both sides shows what the pilot does not: 4 % of them."""

KEPT = ("scale", "checked", "since", "central", "contradicted", "errors")

BOTH, DOUBTED = 0.0, -1.0
"""No displacement: both sides. No error: the product is to be made again."""


class Sides:
    """The choice between one side and both, from product to product.

    Args:
        tolerance: The tolerance of eigenvalues, relative to the largest in magnitude.
        control: The controller of the central differences.

    Attributes:
        scale: The largest |Hv| of a unit vector so far.
        checked: The same of products whose other side was evaluated, on the pilot at least.
        since: Products since the last one of both sides.
        central: Products of both sides.
        contradicted: Products less symmetric than their errors allow.
        errors: The estimated error of each product, absolute.
    """

    def __init__(self, tolerance: float, control: StepController) -> None:
        self.tolerance, self.control = tolerance, control
        self.scale, self.checked = 0.0, 0.0
        self.since, self.central, self.contradicted = 0, 0, 0
        self.errors = list[float]()
        self._known: tuple[Estimate, Estimate] | None = None  # of this vector: ln N and ln b
        self._seen = 0.0  # the nonlinearity ratio of its last trial

    def state_dict(self) -> dict[str, Any]:
        """Return what the next choice depends on, as JSON values."""
        return {name: copy(getattr(self, name)) for name in KEPT}

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from another `state_dict`."""
        for name in KEPT:
            setattr(self, name, copy(figures[name]))

    @property
    def beyond(self) -> int:
        """The number of products whose error is larger than the tolerance allows."""
        return sum(not self._reached(error, self.scale) for error in self.errors)

    @property
    def extrapolates(self) -> bool:
        """Whether differences of fourth order may be what reaches the tolerance."""
        return self.tolerance < EXTRAPOLATED and not self.control.narrow

    @property
    def scheme(self) -> Scheme:
        """The one-sided formula of the next product, with the sign that it has in the sequence."""
        number = self.control.products
        side = -1 if (number & (number >> 1)).bit_count() % 2 else 1
        return replace(SCHEMES["forward"], differences=((side, 0, 1.0),))

    def propose(self) -> tuple[float, bool]:
        """Return the displacement of the next product, BOTH if it takes both sides; and whether
        its error is in doubt, so that the other side of the pilot is needed.
        """
        control, self._seen = self.control, 0.0
        control.first_h()
        if control.products == 0 or control.noise is None or self._mistrusted:
            return BOTH, False
        self._known = control.noise, control.bend
        h = self._best_h(self.scale)
        if self._reached(self._error(h, self.scale), self.scale):
            return h, False
        # Where it is measured, h is the one that is expected to be best. The other side of a pilot
        # that is all micro-batches gives the central difference.
        size = self.scale * control.longer
        h = self._best_h(size, deviations=0.0)
        likely = self._reached(self._error(h, size, deviations=0.0), size)
        return (BOTH, False) if control.whole or not likely else (h, True)

    @property
    def _mistrusted(self) -> bool:
        """True where both sides are needed, whatever the estimates."""
        control = self.control
        # Some central products without either outweigh it.
        strange = control.rough + self.contradicted > KINKED * self.central
        return control.narrow or control.blind or strange or self.since >= CHECKED

    def judge(self, trials: Sequence[Trial]) -> float:
        """Return the displacement to take after trials on the pilot: the last one's to accept it,
        another one to try, or BOTH.
        """
        last, control = trials[-1], self.control
        if not last.sound or last.nonlinearity > SATURATING:
            return BOTH
        belief = control.learn(trials)
        if belief.blind or belief.contradicted:
            return BOTH
        self._known, self._seen = belief.estimates(), last.nonlinearity
        size = last.size * math.exp(control.size_unlike)
        if self._reached(self._witnessed(last.h, size), size):
            return last.h
        h = self._best_h(size, deviations=0.0)
        new = min(abs(math.log(h / trial.h)) for trial in trials) > APART
        likely = self._reached(self._error(h, size, deviations=0.0), size)
        return h if new and likely and len(trials) < TRIES else BOTH

    def reaches(self, control: StepController) -> bool:
        """Return whether a formula is expected to reach the tolerance for the longest products."""
        if control.noise is None or not self.scale:
            return True
        return self._reached(control.foreseen(self.scale)[1] * self.scale, self.scale)

    def suffices(self, trials: Sequence[Trial]) -> bool:
        """Return whether the last trial of a central difference, compared with another one, is
        enough: its displacement need not be the best.
        """
        last, belief = trials[-1], self.control.belief
        told = belief is not None and not belief.blind and not belief.contradicted
        if len(trials) < 2 or not told or last.lost or last.nonlinearity > SATURATING:
            return False
        size = last.size * math.exp(self.control.size_unlike)
        return self._reached(self.control.expected_error(last) * size, size)

    def spares(self, product: Trial) -> bool:
        """Return whether a central product that was judged is enough, though another is better."""
        outlook = self.control.outlook
        if outlook is None or product.nonlinearity > SATURATING:
            return False
        return self._reached(outlook.error * product.size, product.size)

    def conclude(self, product: Trial, tried: bool) -> float:
        """Return the relative error of a product of one side, or DOUBTED.

        Args:
            product: The product.
            tried: Whether the other side of the pilot was evaluated.
        """
        size = product.size
        error = self._witnessed(product.h, size)
        if not size or not self._reached(error, size):
            return DOUBTED
        if tried:
            self.checked = max(self.checked, size)
        elif size > LONGER * self.checked:
            return DOUBTED
        self.scale = max(self.scale, size)
        self.since += 1
        self.errors.append(error)
        self.control.conclude_one_sided(product)
        return error / size

    def conclude_both(self, size: float, error: float | None) -> bool:
        """Take note of a product of both sides; returns whether it reaches the tolerance."""
        self.since, self.central = 0, self.central + 1
        self.scale, self.checked = max(self.scale, size), max(self.checked, size)
        self.errors.append((error or 0.0) * size)
        return self._reached(self.errors[-1], size)

    # ---- errors, absolute

    def _reached(self, error: float, size: float) -> bool:
        return COVERAGE * error <= self.tolerance * max(self.scale, size)

    def _witnessed(self, h: float, size: float) -> float:
        """Return the error of a product of that norm: of the model, or what a trial has seen."""
        return max(self._error(h, size), self._seen * size)

    def _error(self, h: float, size: float, deviations: float = DOUBT) -> float:
        noise, bend = self._at(deviations)
        return math.hypot(noise / h, bend * h * size)

    def _best_h(self, size: float, deviations: float = DOUBT) -> float:
        """Return the displacement with the smallest error for a product of that norm.

        It is no more than that of a central difference, at which the next terms are its error.
        """
        noise, bend = self._at(deviations)
        h = math.sqrt(noise / (bend * size))
        return max(min(h, self.control.h), self.control.smallest)

    def _at(self, deviations: float) -> tuple[float, float]:
        """Return noise and bend of all micro-batches, so many mean deviations above expected."""
        assert self._known is not None
        noise, bend = (math.exp(e.mean + deviations * e.spread) for e in self._known)
        return ROUNDINGS * self.control.quiet * noise, bend
