"""What trials and products tell of the error of Gauss-Newton products, as a function of the step.

Only outputs are differenced; the backward is at w. So a product's relative error, as a function of
the displacement h of a unit vector, is

    error^2  =  (N / (h |P|))^2  +  (kappa (b h)^2 S / |P|)^2  +  (nu |H_out J v| / |P|)^2

N    rounding noise of the outputs, as products see it; hardly depends on the vector
b    the bend of the outputs along the vector: their nonlinearity ratio r, the norm of the second
     difference of the outputs over that of the first, is b h where it is above its own noise. It
     costs no pass: the outputs at w are those of the backward's forward
S    the size of which truncation is a share: |P|, but no less than the product of the first vector
     whose outputs move as much, since G may map v to next to nothing, and its other derivatives not
kappa, nu   truncation in units of r^2; rounding noise of the backward

N and kappa are measured by products at two displacements on the pilot, which truncation and noise
part differently (`ds_hessian.operators.outputs.steps`). nu is measured once, by a backward at
weights displaced by their rounding. Where the loss in the outputs is known by its values alone,
differencing it has an error of its own, which a third difference of the cotangents shows.
Some micro-batches beside the pilot have third differences of the outputs, which show truncation to
a factor of 0.4 to 4 (nine in ten of 1030 products of 60 families) where r^2 alone leaves 0.25 to
32. kappa scatters from vector to vector, too: where a vector does not show its own, an estimate has
the root of the mean square of those that did; in 16 bits of those of its kind, whose outputs move
about as much: kappa of vectors towards the top can be 60 times that of random ones.
Every product bears one more witness: v'(Gv) by the backward and by the outputs alone differ by no
more than the error. Where they differ by more than noise does, it is by the truncation along v, and
kappa is no less than what makes that. Nor is the relative error less than theirs: of 720 products
of 20 families it was 0 to 3 times the error, 0.4 in the median, where kappa was the pilot's.

The gradient of G at w is zero by construction, so the ratio that judges differences of gradients
would misjudge its noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ds_hessian.operators.displacement.belief import LARGEST, VISIBLE, Estimate
from ds_hessian.operators.displacement.priors import KAPPA_SPREAD as DRIFT
from ds_hessian.operators.displacement.priors import NOISE_DRIFT, NOISE_SPREAD
from ds_hessian.operators.displacement.steps import least_displacement
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.displacement.witnesses import products_of_a_third
from ds_hessian.operators.outputs.fitted import Shown, fitted, two_terms
from ds_hessian.operators.outputs.forms import KIND
from ds_hessian.operators.outputs.learnt import OF_LOSS, SPREAD, TINY, TYPICAL, Learnt
from ds_hessian.operators.outputs.trials import BENT, Trial
from ds_hessian.operators.protocol import COVERAGE

UNEXPECTED = 2.0
"""Ratio of a change to what is expected of it, above which something else has made it: a kink."""

ROUNDINGS = 1.5
"""Standard deviation of ln N of the first vector around the roundoff of its outputs: in the median
of 16 families in bf16 it is 0.7 of that, and 3 to 10 of deeper nets, which round more often."""

OF_SECOND = math.sqrt(1 + 4 + 1)
"""Noise of the second difference of outputs that are rounded once, in units of their roundoff."""

OF_THIRD = math.sqrt(1 + 9 + 9 + 1) / 3 / OF_SECOND
"""Noise of a third of the third difference of the outputs in units of that of the second."""

AFTER_PROBE = 6.0
"""Ratio of the best h of a random vector to the first trial of the next, rich in outliers."""

INDEPENDENT = 0.25
"""The noise of k pilots falls as k^-0.25: micro-batches share the rounding of the weights. From 1
to 4 and to 16 of them the exponent was 0.1 to 0.4 on most calibration families of
benchmarks/families.py (attention, convolution, regression; fp32 and bf16)."""


class OutputEstimates:
    """N, kappa, b and nu of one operator's products, and the error that they make expected.

    Args:
        unit_roundoff: That of the passes.
        weight_norm: `|w|`.
        pilot: Share of the pilot in the micro-batches.
        beside: How many micro-batches have third differences beside it.
        fixed: A displacement for every product, or None.
        of_loss: The roundoff of the outputs that a loss takes which is known by its values.
    """

    def __init__(
        self,
        unit_roundoff: float,
        weight_norm: float,
        pilot: float,
        beside: int,
        fixed: float | None,
        of_loss: float = ROUNDOFF,
    ) -> None:
        scale = weight_norm if weight_norm > 0 else 1.0
        self.unit_roundoff, self.rounding, self.fixed = unit_roundoff, unit_roundoff * scale, fixed
        # Where weights differ in scale, the best displacement may be far below the largest's unit.
        self.smallest = least_displacement(scale)
        self.least = self.rounding / 64  # which rounding of the weights loses
        self.quiet, self.beside = pilot**INDEPENDENT, beside
        # The backward rounds what it returns of each micro-batch.
        self.least_error = max(ROUNDOFF, math.sqrt(pilot / 3) * unit_roundoff)
        self.thirds = 2 * products_of_a_third(pilot)  # of two passes each
        first = fixed or 3 * unit_roundoff ** (1 / 3) * scale
        self._fresh = Learnt(first, 3 * scale, loss_roundoff=of_loss)
        self.learnt = replace(self._fresh)
        self._lowest = self.smallest  # below it the present vector's steps are lost
        self._bend = 0.0  # of the present vector
        self._seen = 0.0  # the largest |P| of its trials
        self._doubt = 0.0  # what its last trial has shown that the model does not explain
        self._kappa = self._noise = 0.0  # as the present vector's trials have it
        self._noisy = Estimate(0.0, ROUNDINGS)  # ln N, as they have it
        self._growth = 0.0  # of the present vector's outputs
        self._curved = Estimate(math.log(TYPICAL), SPREAD)  # ln kappa of the pilot
        self._others = self._curved  # of the others
        self._shown = False  # whether it is the present vector's own kappa
        self._light = 1.0  # by how much the first product is larger than the pilot alone has it

    def state_dict(self) -> dict[str, Any]:
        """Return what the next product depends on, as JSON values."""
        return asdict(self.learnt)

    def load_state_dict(self, figures: Mapping[str, Any]) -> None:
        """Continue from another's `state_dict`."""
        self.learnt = Learnt(**figures)

    def lessons(self) -> list[Any] | None:
        """Return, as JSON values, what spares trials of the first two vectors of a like measurement
        at other weights of the run; None where nothing was learnt.
        """
        found = self.learnt.firsts
        return found if len(found) == 2 and self.fixed is None else None

    def begin(self, lessons: list[Any]) -> None:
        """Begin with the `lessons` of an earlier measurement of the run."""
        if self.fixed is None:
            self.learnt = replace(self.learnt, taught=lessons).taught_for(0)

    @property
    def begins_taught(self) -> bool:
        """Whether the first vector begins with lessons."""
        return self.learnt.taught is not None and self.learnt.products == 0

    def confirms(self, trial: Trial) -> bool:
        """Return whether the first trial confirms the lessons."""
        self._bend = self.learnt.bend
        return trial.finite and self.learnt.confirms(trial.size, self._bend_of(trial))

    def go_on(self, size: float | None) -> None:
        """Go on with lessons, for products of this size; or anew (None), as if there were none."""
        self.learnt = self.learnt.scaled(size) if size is not None else replace(self._fresh)

    def forget_loss(self) -> None:
        """Forget what is known of differencing the loss, which is done otherwise from now on."""
        fresh = {name: getattr(self._fresh, name) for name in OF_LOSS}
        self.learnt = replace(self.learnt, **fresh)

    # ---- from trials

    def note_backward(self, apart: float, trial: Trial) -> None:
        """Learn nu from the distance of two products that differ in the backward's rounding."""
        if trial.back > 0 and math.isfinite(apart):
            self.learnt.backward = apart / (math.sqrt(2) * trial.back)

    def note_largest(self, noise: float) -> None:
        """Learn nu from the noise of the micro-batch of which most goes back, by the norm of that:
        it is not less for being one of many.
        """
        if math.isfinite(noise):
            self.learnt.backward = noise / self.quiet

    def without_noise_of_loss(self, trial: Trial) -> Trial:
        """Return a trial, without a change that the noise of the loss explains: this is the same at
        all displacements, and says nothing of them.
        """
        noisy = self.learnt.loss_roundoff > ROUNDOFF
        noise = self.learnt.values * trial.size if noisy else 0.0
        return trial if trial.change > UNEXPECTED * noise else replace(trial, change=0.0)

    def _unexplained(self, trials: list[Trial]) -> float:
        """Return the largest relative change across the last trial's displacement that is more than
        the model explains, as far as N and kappa are known.
        """
        h, found = trials[-1].h, 0.0
        for a, b in zip(trials, trials[1:], strict=False):
            if not self._noise or not min(a.h, b.h) <= h <= max(a.h, b.h):
                continue
            if a.beyond or b.beyond:  # and the displacement is not
                continue
            bent = self._bend**2 * abs(a.h**2 - b.h**2) * self._scale(b)
            bent *= math.exp(self._curved.mean + self._curved.spread)
            noise = math.hypot(self._rounding(a), self._rounding(b))
            noise *= math.exp(self._noisy.spread)
            expected = math.hypot(noise, bent, self._of_loss(a, b))
            if b.size and math.isfinite(b.change) and b.change > UNEXPECTED * expected:
                found = max(found, b.change / b.size)
        return found

    def _fit(self, trials: list[Trial]) -> None:
        """Fit N, kappa, the bend and the ratio's noise to all trials of the vector."""
        finite = [t for t in trials if t.finite]
        pairs = [(a, b) for a, b in zip(trials, trials[1:], strict=False) if a.finite and b.finite]
        for most in (1,) if self.unit_roundoff > ROUNDOFF else (1, 0):
            # In 16 bits noise begins where saturation ends: what changes from there tells of kappa.
            pairs = [(a, b) for a, b in pairs if a.beyond + b.beyond <= most] or pairs
        size = min(t.size for t in finite)
        bent, noisy = [], []
        for a, b in pairs:
            change = max(b.change, TINY)
            bent.append(abs(a.h**2 - b.h**2) * size / change)
            noisy.append(math.hypot(self._shorter(a), self._shorter(b)) / change)
        truncation, _ = two_terms(bent, noisy)
        bending = [t for t in finite if 0 < t.nonlinearity < BENT]
        ratio = [t.h / t.nonlinearity for t in bending]
        rounding = [self._shorter(t) / (t.spread * t.nonlinearity) for t in bending]
        bend, self.learnt.ratio_noise = two_terms(ratio, rounding) if ratio else (0.0, 0.0)
        self._bend = bend or math.sqrt(truncation / TYPICAL)
        first = max(finite, key=lambda t: t.size)
        rounded = math.hypot(first.roundoff, self.unit_roundoff / 2) * first.size
        self._noisy = Estimate(math.log(rounded / self._shorter(first)), ROUNDINGS)
        self._curved = Estimate(math.log(TYPICAL), SPREAD)
        self._learn([self._changed(a, b) for a, b in pairs if self._tells(a, b)])
        self._shown = True
        self._noise = max(self._noise, 1e-3 * self.rounding * size)

    def _learn(self, shown: list[Shown]) -> None:
        """Learn N and kappa from what trials have shown."""
        self._noisy, self._curved = fitted(shown, self._noisy, self._curved)
        self._noise, self._kappa = math.exp(self._noisy.mean), math.exp(self._curved.mean)

    def _tells(self, a: Trial, b: Trial) -> bool:
        """Return whether the change between two trials tells of N and kappa: not where both are
        beyond what a power describes.
        """
        within = self._bend * min(a.h, b.h) < LARGEST[1]
        return within and 0 < b.change < math.inf and min(a.size, b.size) > 0

    def _changed(self, a: Trial, b: Trial) -> Shown:
        """Return the change between two trials."""
        size, u = min(a.size, b.size), self.unit_roundoff
        return Shown(
            value=b.change,
            noisy=math.hypot(1 / a.h, 1 / b.h),
            grown=math.hypot(self._grows(a), self._grows(b)),
            most=math.hypot(u, u) * size,
            bent=abs(self._square(a.h) - self._square(b.h)) * min(self._scale(a), self._scale(b)),
            rest=math.hypot(self._of_loss(a, b), ROUNDOFF * size),
        )

    def _heard(self, trial: Trial) -> Shown:
        """Return what the witness of a trial says: no more than its noise and its truncation.

        Rounding of the backward is of all coordinates, and next to none of it along v.
        """
        return Shown(
            value=trial.apart,
            noisy=1 / trial.h,
            grown=self._grows(trial),
            most=self.unit_roundoff * trial.size,
            bent=self._square(trial.h) * self._scale(trial),
            rest=self.least_error * trial.size,
            least=True,
        )

    def _observe(self, trials: list[Trial]) -> None:
        """Learn from the last trial of a later vector, and from its change to the one before."""
        last = trials[-1]
        if len(trials) == 1 and self.unit_roundoff > ROUNDOFF:
            self._forget_others(last)
        self._observe_ratio(trials[-2:])
        self._bend = self.learnt.bend
        for trial in trials:
            self._bend = self._bend_of(trial)
        self._noisy = Estimate(math.log(self.learnt.noise), self.learnt.noise_spread)
        self._curved = Estimate(math.log(self.learnt.kappa), self.learnt.kappa_spread)
        finite = [t for t in trials if t.finite and t.size > 0]
        pairs = [(a, b) for a, b in zip(finite, finite[1:], strict=False) if self._tells(a, b)]
        if self._bend:
            heard = [self._heard(t) for t in finite if self._hears(t)]
            self._learn([self._changed(a, b) for a, b in pairs] + heard)
        for a, b in pairs[-1:]:
            noise = math.hypot(self._rounding(a), self._rounding(b), self._of_loss(a, b))
            self._shown = b.change > VISIBLE * noise

    def _forget_others(self, trial: Trial) -> None:
        """Forget the kappa of vectors of another kind, whose outputs move much more, or less: those
        towards the top after random ones, or random ones after them. In 16 bits the witness raises
        it, and changes that lower it are rounding; in fp32 third differences show it.
        """
        found, square = self.learnt, trial.spread**2
        if not found.spread**2 <= KIND * square <= KIND**2 * found.spread**2:
            self._kappa = found.kappa = TYPICAL
            found.kappa_spread = SPREAD
            self._curved = Estimate(math.log(TYPICAL), SPREAD)
            found.square, found.shown, found.spread = TYPICAL**2, 0, trial.spread

    def _observe_ratio(self, pair: list[Trial]) -> None:
        """Learn the noise of r from two trials: where r is larger at the smaller displacement."""
        above, below = max(pair, key=lambda t: t.h), min(pair, key=lambda t: t.h)
        if above.finite and below.finite and below.nonlinearity > above.nonlinearity:
            noise = below.nonlinearity * below.spread / self._shorter(below)
            self.learnt.ratio_noise = max(self.learnt.ratio_noise, noise)

    # ---- the model

    def _bend_of(self, trial: Trial) -> float:
        if self._shows_bend(trial):
            return math.sqrt(trial.nonlinearity**2 - self._noise_of_ratio(trial) ** 2) / trial.h
        return min(self._bend, trial.nonlinearity / trial.h) if self._bend else 0.0

    def _shows_bend(self, trial: Trial) -> bool:
        return trial.nonlinearity > 2 * self._noise_of_ratio(trial)

    def _noise_of_ratio(self, trial: Trial) -> float:
        noise = self.learnt.ratio_noise * self._shorter(trial)
        return noise / trial.spread if trial.spread else math.inf

    def _grows(self, trial: Trial) -> float:
        """Return the growth of a trial's outputs, over no less than a step that is not lost."""
        return min(trial.growth, 1 / self.least)

    def _shorter(self, trial: Trial) -> float:
        """Return the factor from N to the noise of a trial, of outputs that grow with h."""
        return math.hypot(1 / trial.h, self._grows(trial))

    def _rounding(self, trial: Trial) -> float:
        """Return the noise of a trial's product."""
        return self._rounding_at(trial.h, trial.size, self._grows(trial))

    def _rounding_at(self, h: float, size: float, growth: float) -> float:
        share = min(self._noise * growth, self.unit_roundoff * size)
        return math.hypot(self._noise / h, share)

    def _scale(self, trial: Trial) -> float:
        """Return of what truncation is a share: the size of the product, or of one whose outputs
        move as much as the trial's and bend elsewhere. Where G maps a vector to next to nothing,
        the third derivative of its outputs is no smaller than others'.
        """
        return max(trial.size, self.learnt.gain * trial.spread)

    def share(self, trial: Trial) -> float:
        """Return a product's size as a share of what products of such outputs have."""
        return trial.size / self._scale(trial) if trial.size else 0.0

    def _best(self, trial: Trial) -> float:
        """Return the displacement at which the error of all micro-batches is expected least."""
        bent = math.sqrt(2) * self._kappa * self._bend**2 * self._scale(trial)
        if self._noise <= 0 or bent <= 0:
            return self._clamp(self.learnt.h)
        return self._clamp((self.quiet * self._noise / bent) ** (1 / 3))

    def _excess(self, trial: Trial, best: float) -> float:
        """Return the error expected at a trial's h, over that at the best one."""
        back = math.hypot(self.quiet * self._backward(trial), self.least_error)
        errors = [self.error(h, trial, self.quiet) for h in (trial.h, best)]
        here, there = (math.hypot(error, back) for error in errors)
        return here / there

    def _backward(self, trial: Trial) -> float:
        """Return the relative error of the pilot's backward."""
        return self.learnt.backward * trial.back / trial.size

    def error(self, h: float, trial: Trial, quiet: float, kappa: float | None = None) -> float:
        """Return the relative error that is expected of the trial's product at a displacement,
        without the backward's.
        """
        truncation = (self._kappa if kappa is None else kappa) * self._square(h)
        truncation /= self.share(trial)
        noise = self._rounding_at(h, trial.size, self._growth) / trial.size
        return math.hypot(min(quiet * noise, 2.0), truncation)

    def _square(self, h: float) -> float:
        """Return (b h)^2, of which kappa is a multiple: as far as it tells."""
        return min(self._bend * h, LARGEST[1]) ** 2

    def _clamp(self, h: float) -> float:
        return min(max(h, self._lowest), self.learnt.largest)

    def _of_loss(self, a: Trial, b: Trial) -> float:
        """Return what differencing the loss makes of the change between two trials: rho is the same
        share of the differences of the outputs up to a power of 2.
        """
        return math.hypot(*(self.learnt.of_loss(trial.values) * trial.size for trial in (a, b)))

    # ---- from products

    def _hear(self, product: Trial) -> None:
        """Raise kappa to what the witness of a product shows of truncation."""
        if not self._hears(product):
            return
        bent = self._square(product.h)
        noise = self.quiet * self._rounding(product)
        noise = math.hypot(noise, self.least_error * product.size)
        if bent > 0 and product.apart > UNEXPECTED * noise:
            rest = math.sqrt(product.apart**2 - noise**2)
            self._kappa = max(self._kappa, rest / (bent * self._scale(product)))

    def _hears(self, trial: Trial) -> bool:
        """Return whether the witness of a trial tells of truncation, as it does in 16 bits: third
        differences are rounding there, and in fp32 they show it, without taking noise that varies
        for it.
        """
        return self.unit_roundoff > ROUNDOFF and trial.apart > 0

    def _along(self, product: Trial) -> float:
        """Return how far v'(Gv) by the backward and by the outputs alone are apart, relative: what
        truncation, of all micro-batches, makes of the curvature along v it makes of the product.
        One that is all error tells nothing.
        """
        told = COVERAGE * product.apart < product.form
        return product.apart / product.form if told else 0.0

    def _kappa_beside(self, product: Trial) -> Estimate | None:
        """Return kappa of the micro-batches beside the pilot, whose third differences tell of it
        beside what the pilot has shown of its own; None where they tell nothing.
        """
        noise = max(self._noise_of_ratio(product), OF_SECOND * product.roundoff)
        if not 0 < product.third < math.inf or not UNEXPECTED * noise < product.beside <= BENT:
            return None
        bent = product.beside**2 - noise**2
        return self._others.after_change(product.third, OF_THIRD * noise, bent)

    def _mixed(self, kappa: float, beside: float) -> float:
        """Return kappa of the pilot and of the micro-batches beside it."""
        return math.sqrt((kappa**2 + self.beside * beside**2) / (1 + self.beside))

    def conclude(self, product: Trial, doubt: float) -> tuple[float | None, float | None]:
        """Learn from the product that is kept; return its relative noise and error.

        Args:
            product: The product of all micro-batches.
            doubt: What witnesses say against it, in its units: the difference of v'(Gv) by the
                backward and v'Gv by the outputs or, if more, where kinks are crossed, its length
                times r.
        """
        found = self.learnt
        if product.size == 0:
            return None, None
        if not self._noise:  # products of the pilot were 0, which tells nothing of the others
            return None, max(1.0, doubt / product.size)
        beside = self._kappa_beside(product)
        kappa = self._kappa
        if beside is not None:  # the error has its mean, displacements the geometric one
            kappa = self._mixed(self._kappa, math.exp(beside.mean + beside.spread**2 / 2))
            self._kappa, self._shown = self._mixed(self._kappa, math.exp(beside.mean)), True
        back = self.quiet * self._backward(product)
        noise = math.hypot(self.quiet * self._rounding(product) / product.size, back)
        kappa = kappa if self._shown else max(kappa, math.sqrt(found.square))
        kappa = max(kappa, found.of_nothing / self._scale(product))
        error = self.error(product.h, product, self.quiet, kappa)
        error = math.hypot(error, back)
        if product.nonlinearity > BENT:  # it does not tell how far the outputs bend
            # Nor does the product's length, of which the trials may have shown more.
            error = max(error, product.nonlinearity, self._seen / product.size)
        values = found.of_loss(product.values)
        error = max(error, doubt / product.size, self._doubt, self._along(product))
        error = math.hypot(error, values, self.least_error)
        found.products += 1
        first = found.products == 1
        if first or COVERAGE * error < 1:
            self._conclude(product, first)
        elif self._shown:  # it is all error, which shows nothing of others
            found.of_nothing = max(found.of_nothing, self._kappa * self._scale(product))
        return noise, error

    def _conclude(self, product: Trial, first: bool) -> None:
        """Keep what the product has shown for the next one."""
        found = self.learnt
        if self._shown:
            found.shown += 1
            found.square += (self._kappa**2 - found.square) / found.shown
        found.noise, told = self._noise / self._light, math.exp(self._curved.mean)
        found.kappa = self._kappa if first else math.sqrt(told * self._kappa)
        found.noise_spread = min(math.hypot(self._noisy.spread, NOISE_DRIFT), NOISE_SPREAD)
        found.kappa_spread = min(math.hypot(self._curved.spread, DRIFT), SPREAD)
        found.spread = found.spread or product.spread
        if first and product.spread > 0:
            found.gain = product.size / product.spread
        found.bend, found.unseen = self._bend, not self._shows_bend(product)
        if self.fixed is None:
            found.h = self._clamp(self._best(product) / (AFTER_PROBE if first else 1.0))
        if len(found.firsts) < 2:
            found.note_first(product.h, self._seen)
        if first and found.taught is not None:
            self.learnt = found.taught_for(1)
