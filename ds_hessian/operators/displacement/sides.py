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
the error is in doubt, not in every product, and h is the one at which this error is smallest.

All micro-batches are evaluated on both sides, by a central difference, for the first product, for
one in SELDOM after that, and where one side is not enough or the witnesses say that the model does
not hold. Truncation of like vectors is alike: with the signs of a Rudin-Shapiro sequence it adds up
in no combination of products to more than independent errors do, as error bars assume.

Source: Rudin, Proc. Amer. Math. Soc. 10 (1959): its partial sums of length n are O(sqrt(n)) at
every frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds_hessian.operators.displacement.belief import SATURATING, Estimate, Trial
from ds_hessian.operators.displacement.control import APART, KINKED, SELDOM, StepController
from ds_hessian.operators.displacement.schemes import SCHEMES, Scheme
from ds_hessian.operators.protocol import COVERAGE

ROUNDINGS = 2.0
"""Noise of a one-sided difference in units of that of the central one of the same h."""

DOUBT = 2.0
"""Mean deviations of ln N and ln b within which an error counts as possible: 98 % of a normal
distribution are below."""

UNLIKE = 3.0
"""A product this many times as long as all those that were checked is of another kind of vector,
such as the first one of a run after a random vector; the next of the same run is not."""

TRIES = 3
"""Trials at most before both sides are taken."""

KEPT = ("scale", "checked", "since", "central", "contradicted")

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
    """

    def __init__(self, tolerance: float, control: StepController) -> None:
        self.tolerance, self.control = tolerance, control
        self.scale, self.checked = 0.0, 0.0
        self.since, self.central, self.contradicted = 0, 0, 0
        self._known: tuple[Estimate, Estimate] | None = None  # of this vector: ln N and ln b
        self._seen = 0.0  # the nonlinearity ratio of its last trial

    def state_dict(self) -> dict[str, Any]:
        """Return what the next choice depends on, as JSON values."""
        return {name: getattr(self, name) for name in KEPT}

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from another `state_dict`."""
        for name in KEPT:
            setattr(self, name, figures[name])

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
        if control.noise is None or self._mistrusted:
            return BOTH, False
        self._known = control.noise, control.bend
        h = self._best_h()
        expected = self._error(h, self.scale, deviations=0.0)
        doubtful = not self._reached(self._error(h, self.scale), self.scale)
        # The other side of a pilot that is all micro-batches gives the central difference.
        if not self._reached(expected, self.scale) or (doubtful and control.whole):
            return BOTH, False
        return h, doubtful

    @property
    def _mistrusted(self) -> bool:
        """True where both sides are needed, whatever the estimates."""
        control = self.control
        # Some central products without either outweigh it.
        strange = control.rough + self.contradicted > KINKED * self.central
        return control.narrow or control.blind or strange or self.since >= SELDOM

    def judge(self, trials: Sequence[Trial]) -> float:
        """Return the displacement to take after trials on the pilot: the last one's to accept it,
        another one to try, or BOTH.
        """
        last, control = trials[-1], self.control
        if not last.usable or last.lost or last.nonlinearity > SATURATING:
            return BOTH
        belief = control.learn(trials)
        if belief.blind or belief.contradicted:
            return BOTH
        self._known, self._seen = belief.estimates(), last.nonlinearity
        size = last.size * math.exp(control.size_unlike)
        if self._reached(self._witnessed(last.h, size), size):
            return last.h
        h = self._best_h()
        new = min(abs(math.log(h / trial.h)) for trial in trials) > APART
        if new and len(trials) < TRIES and self._reached(self._error(h, size), size):
            return h
        return BOTH

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
        elif size > UNLIKE * self.checked:
            return DOUBTED
        self.scale = max(self.scale, size)
        self.since += 1
        self.control.conclude_one_sided(product)
        return error / size

    def conclude_both(self, size: float, error: float | None) -> bool:
        """Take note of a product of both sides; returns whether it reaches the tolerance."""
        self.since, self.central = 0, self.central + 1
        self.scale, self.checked = max(self.scale, size), max(self.checked, size)
        return error is None or self._reached(error * size, size)

    # ---- errors, absolute

    def _reached(self, error: float, size: float) -> bool:
        return COVERAGE * error <= self.tolerance * max(self.scale, size)

    def _witnessed(self, h: float, size: float) -> float:
        """Return the error of a product of that norm: of the model, or what a trial has seen."""
        return max(self._error(h, size), self._seen * size)

    def _error(self, h: float, size: float, deviations: float = DOUBT) -> float:
        noise, bend = self._at(deviations)
        return math.hypot(noise / h, bend * h * size)

    def _best_h(self) -> float:
        """Return the displacement with the smallest error for a product as long as the longest.

        It is no more than that of a central difference, at which the next terms are its error.
        """
        noise, bend = self._at(DOUBT)
        h = math.sqrt(noise / (bend * self.scale))
        return max(min(h, self.control.h), self.control.smallest)

    def _at(self, deviations: float) -> tuple[float, float]:
        """Return noise and bend of all micro-batches, so many mean deviations above expected."""
        assert self._known is not None
        noise, bend = (math.exp(e.mean + deviations * e.spread) for e in self._known)
        return ROUNDINGS * self.control.quiet * noise, bend
