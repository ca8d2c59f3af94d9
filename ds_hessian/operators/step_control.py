"""Choosing the displacement h of each product by measurement.

Notation: v is a unit vector, D(h) the finite-difference product at displacement h, p the order of
its scheme. For h neither far too large nor far too small, the error of D(h) is

    sqrt((N / h)^2 + (T h^p)^2)        smallest at        h* = (N / (sqrt(p) T))^(1 / (p + 1))

N is the rounding noise of the gradients, of everything in a pass that rounds; it hardly depends on
v or h. T is the truncation error, and belongs to v. Both are seen in the one quantity that contains
nothing else: the change of the product between two displacements a > b,

    |D(a) - D(b)|^2  =  N^2 (1/a^2 + 1/b^2)  +  T^2 (a^p - b^p)^2

A *trial* is D at one displacement on the pilot, a few of the micro-batches. For the first vector,
trials descend until the change grows again: there N is read off. Every other vector gets a trial
above its proposed h, where T shows, and one at it, which becomes part of the product if h is near
h*. The pilot's relative truncation error T / |D| stands for that of all micro-batches; the ratio of
their noises is measured once, by a second full product.

Everything here is arithmetic on numbers that all ranks share. Figures: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ds_hessian.operators.schemes import Scheme

AMPLIFY = 8.0
"""The trial above h has this many times the truncation error: enough to be seen over the pilot's
noise, which is larger than that of the whole slice."""

DESCENT = 4.0
"""From trial to trial while the noise is unknown."""

PLATEAU = 0.5
"""A change over DESCENT of less than this, relative, lies between saturation and noise."""

SATURATED = 0.4
"""A larger relative change says that h is far outside of where the error model holds."""

ACCEPT_LOW, ACCEPT_HIGH = 0.5, 1.5
"""h / h* for which a trial is good enough: the error is then at most 1.6 times the least one."""

VISIBLE, HIDDEN = 1.5, 0.15
"""A change above VISIBLE times what noise makes shows truncation. In one below, truncation is
assumed to be the part HIDDEN: then h* comes out well above the trial, which is not accepted."""

QUIET = 1.2
"""A change below QUIET times what noise makes is nothing else: larger steps must be seen."""

LOST = 3.0
"""A change that is saturated and above LOST times what noise makes says that h is too large."""

AFTER_PROBE = 10.0
"""From a random probe to the next Krylov vector, rich in outliers, h* falls by 3 - 30."""

UNLIKE, REPEAT = 2.0, 2.0
"""Where the nonlinearity ratio of all micro-batches is above UNLIKE times the pilot's (with few of
them, also below 1 / UNLIKE), the product is repeated if its error is above REPEAT times the least
one."""

CHECK_ALL = 32
"""From this many micro-batches on, every vector has a trial above h; with fewer, where trials weigh
more, every second, third, ... vector, and in between the change of the pilot's nonlinearity ratio
stands for that of its truncation error."""

CALIBRATE = 16
"""From this many micro-batches on, the noise of all of them is measured, by a second product of the
first vector; with fewer it is taken for that of independent micro-batches."""

MAX_TRIALS = 10

LEARNT = ("h", "noise", "noise_ratio", "truncation", "unlike", "bend", "floor", "products")
"""Attributes of a `StepController` that change from product to product."""


@dataclass(frozen=True)
class Trial:
    """A product of the pilot: its displacement, its norm |D|, |D - D'| from the trial before (inf
    for the first, and where something is not finite), and its nonlinearity ratio (None: unknown).
    """

    h: float
    size: float
    change: float
    nonlinearity: float | None = None


@dataclass(frozen=True)
class Advice:
    """What to do after a trial: use its displacement, or try `h`."""

    h: float
    accept: bool


@dataclass(frozen=True)
class _Pair:
    """Two consecutive trials."""

    first: Trial
    second: Trial

    @property
    def above(self) -> float:
        return max(self.first.h, self.second.h)

    @property
    def below(self) -> float:
        return min(self.first.h, self.second.h)

    @property
    def change(self) -> float:
        return self.second.change

    @property
    def relative(self) -> float:
        size = max(self.first.size, self.second.size)
        return self.change / size if math.isfinite(self.change) and size > 0 else math.inf

    @property
    def noise(self) -> float:
        """N, if the change is nothing but noise; it cannot be more."""
        return self.change / math.hypot(1 / self.above, 1 / self.below)


class StepController:
    """Carries h, noise and truncation from product to product.

    Args:
        scheme: Gives the order.
        unit_roundoff: Of the dtype in which the passes compute; sets the scale of the first trial.
        weight_norm: |w|, likewise.
        pilot: Number of micro-batches in a trial.
        num_micro_batches: All of them.
        fixed: A displacement that is used whatever the trials say; they estimate its error.
    """

    def __init__(
        self,
        scheme: Scheme,
        unit_roundoff: float,
        weight_norm: float,
        pilot: int,
        num_micro_batches: int,
        fixed: float | None = None,
    ) -> None:
        scale = weight_norm if weight_norm > 0 else 1.0
        self.order, self.fixed = scheme.order, fixed
        self.above = AMPLIFY ** (1 / scheme.order)
        sparing = CHECK_ALL / (2 if scheme.one_sided else 1)  # these have no nonlinearity ratio
        self.interval = math.ceil(sparing / num_micro_batches)
        self.h = fixed or unit_roundoff ** (1 / (scheme.order + 1)) * scale
        self.smallest, self.largest = unit_roundoff / 16 * scale, scale
        self.noise: float | None = None  # N of the pilot
        self.noise_ratio = math.sqrt(pilot / num_micro_batches)  # N of all in units of it
        self.few = pilot < num_micro_batches < CALIBRATE
        self.whole = pilot == num_micro_batches
        self.truncation = 0.0  # T / |D| of the pilot
        self.unlike = 1.0  # that of all micro-batches in units of it
        self.bend: float | None = None  # nonlinearity ratio over h, of the same vector
        self.floor = 0.0  # of the relative error, where the model does not hold
        self.products = 0

    def state_dict(self) -> dict[str, float | None]:
        """What the products so far have taught, as JSON values."""
        return {name: getattr(self, name) for name in LEARNT}

    def load_state_dict(self, figures: Mapping[str, float | None]) -> None:
        """Go on from another controller's `state_dict`."""
        for name in LEARNT:
            setattr(self, name, figures[name])

    # ---- before and during the trials of a vector

    def first_h(self) -> float:
        """The displacement of the next vector's first trial."""
        if not self.few:
            self.unlike = 1.0
        searching = self.fixed is None and self.noise is None
        due = self.products < 2 or self.products % self.interval == 0
        return self.h * self.above if due and not searching else self.h

    def advise(self, trials: list[Trial]) -> Advice:
        """Judge the trials made for the current vector so far."""
        here = trials[-1].h
        pairs = [_Pair(a, b) for a, b in pairwise(trials)]
        if self.fixed is not None:
            if pairs:
                self._learn(pairs)
            return Advice(self.fixed, here == self.fixed)
        if self.noise is None and not self._find_noise(pairs):
            target = self._explore(trials, pairs)
            if target and len(trials) < MAX_TRIALS and (not pairs or pairs[-1].change > 0):
                return Advice(target, False)
            best = min(pairs, key=lambda pair: pair.relative)
            self.noise = best.noise  # no more than that
            if best.relative > PLATEAU:
                return Advice(math.sqrt(best.above * best.below), False)
        if not pairs:
            return self._follow(trials[-1])
        return self._approach(trials[-1], pairs, final=len(trials) > MAX_TRIALS)

    def _follow(self, trial: Trial) -> Advice:
        """One trial, with noise and truncation known from the vectors before."""
        bend = trial.nonlinearity / trial.h if trial.nonlinearity else None
        if bend and self.bend and trial.size and trial.h == self.h:
            assert self.noise is not None
            self.truncation *= (bend / self.bend) ** self.order
            self.bend = bend
            best = self._best_h(self.noise * self.noise_ratio / trial.size)
            if not self._is_near(trial.h, best):
                return Advice(best, False)
        return Advice(self.h, trial.h == self.h)

    def _find_noise(self, pairs: list[_Pair]) -> bool:
        """Whether the last step down led into the noise, which is then known."""
        if len(pairs) < 2:
            return False
        best, last = min(pairs, key=lambda pair: pair.relative), pairs[-1]
        if best.relative > PLATEAU or last.below > best.below or last.change < 2 * best.change:
            return False
        self.noise = last.noise
        return True

    def _explore(self, trials: list[Trial], pairs: list[_Pair]) -> float | None:
        """Down; now and then up, as long as no plateau is seen. None at the end of the range."""
        low, high = min(t.h for t in trials) / DESCENT, max(t.h for t in trials) * DESCENT
        lost = all(pair.relative > PLATEAU for pair in pairs)
        if high < self.largest and (low < self.smallest or (lost and len(trials) % 4 == 0)):
            return high
        return low if low >= self.smallest else None

    def _approach(self, last: Trial, pairs: list[_Pair], final: bool) -> Advice:
        """With the noise known: towards h*."""
        self._learn(pairs)
        self.bend = last.nonlinearity / last.h if last.nonlinearity else None
        if self.floor and not final:
            target = self._leave_saturation(pairs)
            return Advice(target, target == last.h)
        assert self.noise is not None
        top = min(pairs, key=self._bound)
        further = self._clamp(self.above * top.above)
        if top.noise < QUIET * self.noise and not final and further > max(top.above, last.h):
            return Advice(further, False)
        best = self._best_h(self.noise * self.noise_ratio / last.size if last.size else 0.0)
        if final or self._is_near(last.h, best) or pairs[-1].change == 0:
            return Advice(last.h, True)
        target = self._clamp(min(max(best, last.h / 30), last.h * 8))
        return Advice(target, target == last.h)

    def _leave_saturation(self, pairs: list[_Pair]) -> float:
        """Down from where h is too large; up, never down, where there is nothing but noise."""
        assert self.noise is not None
        large = [pair for pair in pairs if pair.noise > LOST * self.noise]
        if pairs[-1] in large:
            return self._clamp(pairs[-1].below / DESCENT)
        ceiling = min((pair.below for pair in large), default=math.inf)
        return self._clamp(min(8 * pairs[-1].below, math.sqrt(pairs[-1].below * ceiling)))

    def _learn(self, pairs: list[_Pair]) -> None:
        """Truncation: each pair that is not saturated bounds it, and the noise, from above."""
        valid = [pair for pair in pairs if pair.relative <= SATURATED]
        if self.noise is not None:
            self.noise = min([self.noise, *(pair.noise for pair in valid)])
        self.floor = 0.0 if valid else pairs[-1].relative
        if not valid:
            return
        best = min(valid, key=self._bound)
        share = (self.noise or 0.0) / best.noise if best.change else 1.0
        visible = math.sqrt(1 - share**2) if share < 1 / VISIBLE else HIDDEN
        self.truncation = visible * self._bound(best)

    def _bound(self, pair: _Pair) -> float:
        """On the truncation, were it the whole change."""
        return pair.relative / (pair.above**self.order - pair.below**self.order)

    def _best_h(self, noise: float) -> float:
        """h* for a relative noise `noise / h`."""
        truncation = math.sqrt(self.order) * self.truncation * self.unlike
        best = (noise / truncation) ** (1 / (self.order + 1)) if truncation else math.inf
        return self._clamp(best)

    def _is_near(self, h: float, best: float) -> bool:
        return ACCEPT_LOW <= h / best <= ACCEPT_HIGH

    def _clamp(self, h: float) -> float:
        return min(max(h, self.smallest), self.largest)

    # ---- after a product

    @property
    def wants_full_noise(self) -> bool:
        """Whether to make this product once more, over all micro-batches, at another h."""
        return self.products == 0 and (self.noise is None or not (self.whole or self.few))

    def set_full_noise(self, first: Trial, second: Trial) -> float:
        """From two full products of one vector, the second h well below the first.

        Returns the h at which the first should have been made; its own if that is near enough.
        """
        pair = _Pair(first, second)
        share = (
            self.truncation
            * self.unlike
            * (pair.above**self.order - pair.below**self.order)
            * first.size
        )
        noise = pair.noise * math.sqrt(max(1 - (share / pair.change) ** 2, 0.25))
        self.noise_ratio = noise / self.noise if self.noise else 1.0
        self.noise = self.noise or noise
        if self.fixed is not None or self.floor or not first.size:
            return first.h
        best = self._best_h(noise / first.size)
        return first.h if self._is_near(first.h, best) else best

    def better_h(self, h: float, size: float, nonlinearity: float | None, pilot: float) -> float:
        """Compare the nonlinearity ratio of a full product of norm `size` with that of its pilot.

        Where all micro-batches are much less linear than the pilot, so is their truncation error
        assumed to be larger; with few of them, where the pilot's is inferred from nonlinearity
        anyway, smaller or larger in every case. Returns the h at which to repeat the product; its
        own if it can stay.
        """
        if not nonlinearity or not self.noise or not 0 < pilot < math.inf:
            return h
        ratio = nonlinearity / pilot
        like = (1 / UNLIKE if self.few else 0.0) < ratio < UNLIKE
        self.unlike = 1.0 if like and not self.few else ratio**self.order
        if like or self.fixed is not None:
            return h
        noise = self.noise * self.noise_ratio / size
        best = self._best_h(noise)
        truncation = self.truncation * self.unlike
        least = math.hypot(noise / best, truncation * best**self.order)
        error = math.hypot(noise / h, truncation * h**self.order)
        return best if error > REPEAT * least else h

    def assess(self, h: float, size: float) -> tuple[float | None, float | None]:
        """Relative noise and error of a full product of norm `size`; moves h for the next."""
        self.products += 1
        truncation = max(self.truncation * self.unlike * h**self.order, self.floor)
        if self.noise is None or size == 0:
            return None, truncation if size else None
        absolute = self.noise * self.noise_ratio / h
        noise = absolute / math.sqrt(max(size**2 - absolute**2, size**2 / 4))
        if self.fixed is None:
            best = self._best_h(noise * h)
            self.h = best / AFTER_PROBE if self.products == 1 else best
        return noise, math.hypot(noise, truncation)
