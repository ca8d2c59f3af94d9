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

The change of D between two displacements is direct evidence, and corrects what r says. Where the
third derivative of the loss vanishes r sees no nonlinearity at any h: a vector whose D changes by
more than r, though r shows noise only, is *blind*, and b is then learnt from changes alone. The
rounding of weights can be opposite at w + hv and w - hv (masters that 16 bits represent) and cancel
in r: a change that the fidelity of the step allows, and r does not, is *hidden* noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ds_hessian.operators.displacement.trials import ROUNDOFF, Change, Trial, changes_of

Array = NDArray[np.floating]

STEP, REACH = 0.25, 5.0
"""The distance of the table's logarithms, and their reach to both sides of the expected value, in
standard deviations (at least 7, a factor of 1000).
"""

NODES = np.linspace(-REACH, REACH, 81)
"""Of the table of kappa, in standard deviations."""

SATURATION = 1.1
"""The nonlinearity ratio where h is far too large."""

SCATTER, FREEDOM = 0.25, 5.0
"""Scatter of ln r around its formula: a Student distribution, twice as wide from SATURATING on."""

SATURATING = 0.4

UNEXPECTED = math.exp(2.57 * SCATTER)
"""A change this much larger than r lets expect of noise is none: 95 % of the distribution."""

UNLIKELY = 2.57
"""Standard deviations that a normal distribution exceeds in 1 of 200 cases. A third difference is
kappa r^2 of a smooth function; a kink of the gradient makes 1/3 or 2/3 of r, one of its slope 1/3
or any share of it, 0 where it is at w + hv / 2."""

KINK = 3.0
"""The ratio of r to the third difference that a kink of the gradient makes, at most."""

VISIBLE, KAPPA_SCATTER = 3.0, 0.35
"""A change above VISIBLE times what noise makes shows truncation; the error of ln kappa from it."""

ALIKE = 3.0
"""N by the rounding of gradients over that by r, above which tokens round alike (it is at most 2.4
else, docs/numerics.md), and over what a single measurement of it shows then."""

LARGER = 1.15
"""Ratio of the slice's kappa to the pilot's: exp(0.27 - 0.13), measured (docs/numerics.md)."""

UNLIKE = 0.4
"""Mean deviation of ln b between pilot and slice, vectors apart."""

TAIL = 3.0
"""Degrees of freedom of the prior of a vector's b."""

LARGEST = 2.0, 1.2
"""The largest relative noise, and the largest b h of which truncation is the power: larger ones are
indistinguishable."""

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

    def after_change(self, value: float, rounding: float, unit: float) -> Estimate:
        """Return the estimate of ln kappa after a change of that norm, in which rounding makes
        `rounding` and a kappa of 1 makes `unit`. One that shows rounding alone lowers it.
        """
        logarithm = self.mean + self.spread * NODES
        off = np.log(value / np.hypot(rounding, np.exp(logarithm) * unit))
        table = student(NODES, TAIL) + student(off / KAPPA_SCATTER, FREEDOM)
        return estimate(logarithm, np.exp(table - table.max()))

    def shared_by(self, before: Estimate, after: Estimate, spread: float) -> Estimate:
        """Return the estimate after one of them, which is like it up to `spread`, has changed from
        `before` to `after`.
        """
        told = after.spread**-2 - before.spread**-2
        if told <= 0:
            return self
        seen = (after.mean * after.spread**-2 - before.mean * before.spread**-2) / told
        return self.corrected(seen, math.hypot(told**-0.5, spread))


@dataclass(frozen=True)
class Surroundings:
    """Known quantities that are the same for all vectors of a slice.

    Attributes:
        order: The order p of the scheme.
        quiet: The ratio of the slice's N to the pilot's.
        bend, size: The logarithms of the ratios of the slice's b and S to the pilot's.
        spread: Mean deviation of `bend`; zero where the pilot is the slice.
        hidden: The ratio of N to the noise that r shows.
        blind: Whether r saw no nonlinearity of the last vector.
        roundoff: The unit roundoff of the passes: no ratio, change or error is known to be less,
            even where the rounding at w + hv and at w - hv is opposite.
        least: The least N of the slice: rounding of its gradients in themselves.
        in_gradients: N of the slice by that rounding, as far as it was measured (`shared`).
    """

    order: int
    quiet: float
    bend: float
    size: float
    spread: float
    hidden: float = 1.0
    blind: bool = False
    roundoff: float = ROUNDOFF
    least: float = 0.0
    in_gradients: float = 0.0


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


def shared(noise: Array, in_gradients: float) -> Array:
    """Return N where the rounding of gradients was measured: no less than that. Where r shows far
    less, tokens round alike, and what one scale of the loss shows of it may be as far off.
    """
    alike = ALIKE * noise < in_gradients
    return np.where(alike, ALIKE * in_gradients, np.maximum(noise, in_gradients))


class Belief:
    """Probabilities of one vector's ln N (rows, the pilot's) and ln b (columns, the slice's).

    Args:
        noise, bend, kappa: The priors before the first trial.
        around: The quantities common to all vectors of the slice.
        trials: The pilot's trials, at least one.

    Attributes:
        expected_kappa: The prior of kappa.
        blind: Whether r sees no nonlinearity of this vector.
        contradicted: Whether the last trial's change is more than r lets expect.
        hidden: The ratio of N to the noise that r shows, as far as changes tell.
        truncation_seen: Whether a change has shown kappa.
        truncation: The slice's relative error over h^p that the last such change shows; 0 for none.
        kinked: Whether a third difference is more than the second lets expect of a smooth function.
    """

    def __init__(
        self,
        noise: Estimate,
        bend: Estimate,
        kappa: Estimate,
        around: Surroundings,
        trials: Sequence[Trial],
    ) -> None:
        self.around, self.kappa, self.truncation_seen = around, kappa, False
        self.expected_kappa = kappa
        self.blind, self.hidden = around.blind, around.hidden
        self.contradicted, self.truncation, self.kinked = False, 0.0, False
        # Curvature of weights far smaller than |w| bends more than any prior expects, as a trial
        # that does not saturate tells; where each does, all may be noise.
        usable = [trial for trial in trials if trial.usable]
        shown = [t.nonlinearity / t.h for t in usable if t.nonlinearity > 0]
        told = any(t.nonlinearity <= SATURATING for t in usable)
        farthest = max((abs(math.log(b) - bend.mean) for b in shown if told), default=0.0)
        rows, columns = _offsets(REACH * noise.spread), _offsets(REACH * bend.spread, farthest)
        self.noise, self.bend = noise.mean + rows, bend.mean + columns
        normal = -0.5 * (rows / noise.spread) ** 2
        self._expected = normal[:, None] + student(columns / bend.spread, TAIL)
        self._pilot = np.zeros_like(self._expected)  # of the trials; columns: the pilot's b
        self._slice = np.zeros_like(self._expected)  # of the products
        self._bend_of_pilot = bend.mean
        changes = [change for i in range(len(trials)) for change in changes_of(trials[: i + 1])]
        self._learn(usable)
        for change in changes:
            self.contradicted = self._doubt(change)
        if (self.blind, self.hidden) != (around.blind, around.hidden):
            self._learn(usable)
        for change in changes:
            if self.blind or change.alone:
                self._pilot += self._likelihood_of_change(change)
        self._find_bend_of_pilot()

    def _learn(self, trials: Sequence[Trial]) -> None:
        """Learn from products of the pilot by themselves."""
        self._pilot = np.zeros_like(self._expected)
        for trial in trials:
            self._pilot += self._likelihood(trial, 1.0)
        self._find_bend_of_pilot()

    def _find_bend_of_pilot(self) -> None:
        expected = _blurred(self._expected, -self.around.bend, self.around.spread)
        self._bend_of_pilot = self._columns(expected + self._pilot).mean

    def _doubt(self, change: Change) -> bool:
        """Compare a change with what r lets expect; return whether truncation is more than r."""
        noise = math.exp(self.of_pilot()[0])
        rounding = noise * change.rounding
        ratio = change.above.nonlinearity
        if change.value <= UNEXPECTED * rounding or ratio > SATURATING:
            return False
        bent, unseen = self._bent(change, noise), change.part(rounding) > UNEXPECTED * ratio
        if change.value <= change.lost and not bent:
            if self.around.roundoff > ROUNDOFF:
                self.hidden = max(self.hidden, self.around.hidden * change.value / rounding)
            return False
        if bent and not unseen:
            self.blind = False
        elif unseen:
            self.blind = True
        return unseen

    def _bent(self, change: Change, noise: float) -> bool:
        """Return whether r shows nonlinearity at the larger displacement."""
        shown = math.sqrt(3) * noise / (self.hidden * change.above.h * change.size)
        return change.above.nonlinearity > 2 * shown

    def observe_change(self, trials: Sequence[Trial], learns: bool = True) -> None:
        """Learn kappa from the last trial's change, if r and truncation are seen in it.

        Args:
            trials: The trials up to it.
            learns: False for a first vector that has no third differences: then the change is no
                more than a witness.
        """
        for change in changes_of(trials):
            self._observe(change, learns)

    def _observe(self, change: Change, learns: bool, of_pilot: bool = True) -> None:
        """Learn from a change of the pilot's trials, or of the product of the slice."""
        order, quiet = self.around.order, 1.0 if of_pilot else self.around.quiet
        noise, bend = (math.exp(logarithm) for logarithm in self.of_pilot())
        if not of_pilot:
            bend = float(self._mixed(np.exp(self.estimates()[1].mean)))
        rounding = max(quiet * noise * change.rounding, self.around.roundoff * change.size)
        clear = change.value < SATURATING * change.size
        visible = change.value > (UNEXPECTED if change.alone else VISIBLE) * rounding
        if change.alone:
            self.truncation = 0.0  # whatever it was farther out
        if change.power(order) <= 0:  # the function is not one
            return
        clear = clear and (change.alone or change.above.nonlinearity <= SATURATING)
        if visible and (change.alone or clear):
            truncation = change.part(rounding) / change.power(order)
            self.truncation = truncation * (self._larger if of_pilot else 1.0)
        bent = self._bent(change, quiet * noise)
        told = change.alone and bent and change.value > VISIBLE * rounding
        if told and change.part(rounding) > self._smooth(change.above, of_pilot):
            self.kinked = True
        elif learns and clear and bent and not self.blind and (visible or not change.alone):
            kappa = 1.0 if of_pilot else self._larger
            unit = kappa * change.size * bend**order * change.power(order)
            self.kappa = self.kappa.after_change(change.value, rounding, unit)
            self.truncation_seen = True

    def _smooth(self, trial: Trial, of_pilot: bool) -> float:
        """Return the most truncation that r lets expect of a smooth function.

        In the slice r says less: second differences of its micro-batches cancel, and it has half of
        what a kink makes at least.
        """
        kappa = self.kappa.mean + UNLIKELY * self.kappa.spread
        smooth = math.exp(kappa) * trial.nonlinearity**self.around.order
        return smooth if of_pilot else max(smooth, trial.nonlinearity / (2 * KINK))

    def observe_removed(self, trial: Trial) -> None:
        """Learn kappa of the fourth order from what extrapolation removed of the second."""
        noise, bend = (math.exp(logarithm) for logarithm in self.of_pilot())
        if trial.usable and trial.removed > VISIBLE * noise / (trial.h * trial.size):
            seen = math.log(trial.extrapolated) - self.around.order * math.log(bend * trial.h)
            self.kappa = self.kappa.corrected(seen, KAPPA_SCATTER)
            self.truncation_seen = True

    def observe_product(self, product: Trial) -> None:
        """Learn from a product of all micro-batches, if these are more than the pilot."""
        new = product.third is None or not self._slice.any()  # which come after it
        if self.around.spread and new:
            self._slice += self._likelihood(product, self.around.quiet)
        for change in changes_of([product]):
            self._observe(change, learns=True, of_pilot=False)

    def hear(self, quiet: float) -> None:
        """Take another ratio of the slice's N to the pilot's, before its products tell anything."""
        self.around = replace(self.around, quiet=quiet)
        self._slice = np.zeros_like(self._expected)

    def shows_noise(self, trial: Trial) -> bool:
        """Return whether r shows noise only, so that it bounds b but does not tell it."""
        shown = math.sqrt(3) * math.exp(self.of_pilot()[0]) / (self.hidden * trial.h * trial.size)
        return not self.blind and trial.nonlinearity < UNEXPECTED * shown

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
        cells = self._cells(self._table())
        return self._outlook(last, displacements, of_pilot, self.around.in_gradients, *cells)

    def search(self, last: Trial, displacements: Array) -> tuple[float, float]:
        """Return the regret of the pilot (as `Outlook.regret`), and the displacement at which a
        trial's outcome is least certain, so that it is the most informative.
        """
        noise, bend, weight = self._cells(self._expected + self._pilot)
        # Without the floor of the rounding of gradients: trials are to tell N.
        regret = self._outlook(last, displacements, True, 0.0, noise, bend, weight).regret
        doubts = list[Array]()
        for h in _blocks(displacements):
            size = np.hypot(_signal(last, noise), noise / h)
            ratio = np.log(_ratio(noise / self.hidden, bend, h, size))
            doubts.append(_mean(ratio**2, weight) - _mean(ratio, weight) ** 2)
        doubt = np.concatenate(doubts)
        return regret, float(displacements[int(doubt.argmax())])

    def _outlook(
        self,
        last: Trial,
        displacements: Array,
        of_pilot: bool,
        in_gradients: float,
        noise: Array,
        bend: Array,
        weight: Array,
    ) -> Outlook:
        around = self.around
        if of_pilot:
            signal = math.exp(around.size) * _signal(last, noise)
        else:
            signal = _signal(last, around.quiet * noise)
        mixed = self._mixed(bend)

        def errors(h: Array) -> tuple[Array, Array]:
            rounded = np.maximum(shared(around.quiet * noise, in_gradients), around.least)
            rounding = rounded / (h * signal)
            reached = _truncated(mixed * h, around.order)
            known = np.hypot(rounding, around.roundoff)
            return rounding, np.hypot(known, self._kappa_of_slice * reached)

        means, smallest = list[Array](), np.full(len(weight), np.inf)
        for h in _blocks(displacements):
            _, error = errors(h)
            means.append(_mean(np.log(error), weight))
            smallest = np.minimum(smallest, error.min(axis=0))
        rounding, error = errors(np.array([[last.h]]))
        expected = np.concatenate([*means, _mean(np.log(error), weight)])
        best = int(expected[:-1].argmin())
        return Outlook(
            h=float(displacements[best]),
            regret=float(expected[best] - np.log(smallest) @ weight),
            excess=float(expected[-1] - expected[best]),
            noise=float(np.exp(np.log(rounding[-1]) @ weight)),
            error=float(np.exp(expected[-1])),
        )

    def _mixed(self, bend: Array) -> Array:
        """Return the bend that makes the slice's truncation, from that which its r shows.

        Second differences of unlike micro-batches cancel where third ones need not.
        """
        return np.asarray(np.sqrt((bend**2 + math.exp(2 * self._bend_of_pilot)) / 2))

    # ---- the table

    @property
    def _kappa_of_slice(self) -> float:
        return math.exp(self.kappa.mean) * self._larger

    @property
    def _larger(self) -> float:
        """The ratio of the slice's truncation to the pilot's: of a blind vector, where r does not
        show what other micro-batches bend, a standard deviation more (b is Laplace's, `_blurred`).
        """
        if not self.around.spread:
            return 1.0
        unknown = self.blind and self.around.roundoff <= ROUNDOFF
        return math.exp(self.around.order * math.sqrt(2) * UNLIKE) if unknown else LARGER

    def _likelihood(self, trial: Trial, quiet: float) -> Array:
        if not trial.usable:
            return np.zeros_like(self._expected)
        least = self.around.roundoff
        seen = max(trial.nonlinearity, least)
        noise, bend = np.exp(self.noise)[:, None], (not self.blind) * np.exp(self.bend)
        shown = quiet * noise / self.hidden
        off = np.log(seen / np.maximum(_ratio(shown, bend, trial.h, trial.size), least))
        wide = 2.0 if trial.nonlinearity > SATURATING else 1.0
        return student(off / (SCATTER * wide), FREEDOM)

    def _likelihood_of_change(self, change: Change) -> Array:
        """Return the likelihood of a change of a blind vector, or of a third difference."""
        noise, bend = np.exp(self.noise)[:, None], np.exp(self.bend)
        rounding, least = noise * change.rounding, self.around.roundoff * change.size
        order, above = self.around.order, change.above.h
        reached = np.minimum(bend * above, LARGEST[1]) ** order
        truncated = math.exp(self.kappa.mean) * reached * change.power(order) / above**order
        total = np.hypot(rounding, change.size * truncated)
        off = np.log(change.value / np.maximum(total, least))
        if self.blind:
            return student(off / KAPPA_SCATTER, FREEDOM)
        share = change.size * truncated / total
        return student(off / np.hypot(SCATTER, share * self.kappa.spread), FREEDOM)

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
        return estimate(self.noise, np.exp(table - table.max()).sum(axis=1))

    def _columns(self, table: Array) -> Estimate:
        return estimate(self.bend, np.exp(table - table.max()).sum(axis=0))


def _truncated(bent: Array, order: int) -> Array:
    """Return the truncation over |D| in units of kappa, from b h.

    Where it saturates the gradient has changed by all that it can, so that |D| falls as 1 / h while
    what it lacks of |Hv| stays.
    """
    within = np.minimum(bent, LARGEST[1])
    return np.asarray(within ** (order - 1) * bent)


def _ratio(noise: Array, bend: Array, h: Array | float, size: Array | float) -> Array:
    """Return the nonlinearity ratio."""
    bent = bend * h
    saturating = bent / np.sqrt(1 + (bent / SATURATION) ** 2)
    return np.sqrt(3 * np.minimum(noise / (h * size), 1.0) ** 2 + saturating**2)


def _signal(trial: Trial, noise: Array) -> Array:
    """Return |Hv|, the part of |D| that is not noise."""
    return np.sqrt(trial.size**2 - np.minimum(noise / trial.h, 0.9 * trial.size) ** 2)


def _blocks(displacements: Array) -> Iterator[Array]:
    """Yield the displacements as columns of 16: a table over all of them takes megabytes."""
    for first in range(0, len(displacements), 16):
        yield displacements[first : first + 16, None]


def _mean(figures: Array, weight: Array) -> Array:
    """Average over the cells, by einsum: threads of BLAS would wait for those of other ranks."""
    return np.asarray(np.einsum("ij,j->i", figures, weight))


def _offsets(*reach: float) -> Array:
    count = math.ceil(max(7.0, *reach) / STEP)
    return STEP * np.arange(-count, count + 1)


def student(t: Array, freedom: float) -> Array:
    """Return the logarithm of Student's density, up to a constant."""
    return -(freedom + 1) / 2 * np.log1p(t**2 / freedom)


def estimate(logarithm: Array, weight: Array) -> Estimate:
    """Return mean and standard deviation of a logarithm, from the weights of its values."""
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


def wall_of(trials: Sequence[Trial]) -> float:
    """Return the least displacement that saturates where a smaller one does not; inf for none.

    A loss can have a wall where no model of noise and bend expects it: no displacement beyond one
    is tried again, and no product is repeated nearer to it.
    """
    clear = [trial.h for trial in trials if trial.nonlinearity <= SATURATING]
    bent = [trial.h for trial in trials if trial.nonlinearity > SATURATING]
    return min((h for h in bent if clear and h > min(clear)), default=math.inf)
