"""v'Gv by forwards alone, with its error: the cheapest curvature of a job.

    v'Gv  =  sum over tokens of delta' H_out delta / (2 h)^2,    delta = f(w + h v) - f(w - h v)

Two forwards over all micro-batches, two thirds of a gradient; nothing is kept for a backward. The
form is that of a square, so that rounding of the outputs enters it in second order, and the first
order of what is left falls as h^2: between the two it hardly depends on h, and the change from one
displacement to another is the error. The displacement is found for the first vector, at a ladder of
displacements of the first micro-batch, and anew where another one says something else. Changes are
measured of the micro-batches with the largest forms first, `SAMPLE` of them, and with each further
vector of one: of all in turn, since some may pass kinks that the others do not, and between them of
the one that changes the sum most. Rounding of the weights is shared by all, so that their changes
add up. Where the loss in the outputs is known by its values, how far it bends is seen of every
micro-batch with each vector; the error of differencing it is measured of the one where that makes
most, and goes with it in the others. A vector whose form is of another size (towards the top, after
random ones) is measured like a first one. Forms may agree by chance, so no error is stated that is
less than is usual among the vectors so far; nor one less than a rounding in fp32 of the softmax and
of the weights of tokens, which is the same at every displacement, so that no change shows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ds_hessian.operators.displacement.trials import ROUNDOFF

Forms = Callable[[float, range | None], NDArray[np.float64]]
"""The forms of a vector at a displacement, of each of some micro-batches (None for all); not finite
where the outputs are not."""

Doubted = Callable[[float, int], tuple[float, float]]
"""The form of a micro-batch at a displacement, and its error from differencing the loss."""

Bends = Callable[[], NDArray[np.float64]]
"""How far the loss bends between the outputs, in the last forms of all micro-batches, of each: what
that makes of the form goes with it."""

STEP = 3.0
"""Ratio of the displacements that are compared."""

TRUNCATION = STEP**2 / (STEP**2 - 1)
"""Truncation of a form in units of its change to the displacement below."""

RUNGS = 6
"""Displacements of a first vector, at least."""

APART = 3.0
"""Forms that differ by more than so many errors of both are on two plateaus."""

SAMPLE = 4
"""Micro-batches whose changes are measured with the first vector."""

KIND = STEP**2
"""Ratio of the forms of two vectors above which changes of one say nothing of the other."""

SMALL = 1e-2
"""A form that changes by more is looked for further down the ladder."""


class Ladder:
    """The displacement of one operator's forms, and their error.

    Attributes:
        valued: The relative error of the last vector's form from differencing the loss.
    """

    def __init__(self) -> None:
        self._h = 0.0
        # Of the sum by each micro-batch's form: with h, and from differencing the loss.
        self._changes: NDArray[np.float64] | None = None
        self._size = 0.0  # the sum of the forms of the vector at which these were begun
        self._bends: NDArray[np.float64] | None = None  # where the second of these were measured
        self._errors = list[float]()  # of the vectors so far, each by its own forms
        self.valued = 0.0

    def settled(
        self,
        forms: Forms,
        first: float,
        least: float,
        doubted: Doubted | None = None,
        bends: Bends | None = None,
    ) -> tuple[float, float, float]:
        """Return the mean form of all micro-batches, its error and its displacement.

        Args:
            forms: The forms of the vector. Collective.
            first: A displacement for a vector of which nothing is known.
            least: A displacement that rounding of the weights loses.
            doubted: The form of one micro-batch and its error from differencing the loss; None
                where the loss is known. Collective.
            bends: How far it bends; None where it is known.
        """
        one, relative = None, 0.0
        if not self._h:
            one, relative = 0, self._descend(forms, 0, STEP * first, least)
        found = forms(self._h, None)
        parts = self._changed(forms, doubted, bends, found)
        worst = int(np.nanargmax(abs(parts[0])))
        if abs(parts[0, worst]) > SMALL and worst != one:
            relative = self._descend(forms, worst, STEP**2 * self._h, least)
            found, self._changes = forms(self._h, None), None
            parts = self._changed(forms, doubted, bends, found)
        # What is not measured yet changes as the rest. Changes of other vectors tell no sign, and
        # what rounding of the weights makes of all micro-batches has one.
        unseen = len(found) / np.count_nonzero(~np.isnan(parts[0]))
        stepped = unseen * float(np.nansum(abs(parts[0])))
        bent = np.sqrt(unseen * np.nansum(parts[1] ** 2)), unseen * abs(np.nansum(parts[1]))
        self.valued = float(max(bent))
        relative = max(math.hypot(max(relative, stepped), self.valued), ROUNDOFF)
        self._errors.append(relative)
        error = max(relative, float(np.median(self._errors))) * float(abs(found).mean())
        return float(found.mean()), error, self._h

    def forget(self) -> None:
        """Drop what the forms of the last vector have shown, which are to be made again."""
        self._h, self._changes = 0.0, None
        self._errors.pop()

    def _changed(
        self,
        forms: Forms,
        doubted: Doubted | None,
        bends: Bends | None,
        found: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return by how much each micro-batch's form changes the sum, relative, from a larger
        displacement on, and by differencing the loss, `(2, G)`; NaN where it is not measured yet.

        Not over STEP^2, though truncation falls so: a kink's part does not.
        """
        size, count = float(abs(found).sum()), len(self._errors)
        now = np.zeros(len(found)) if bends is None else bends()
        if not self._size <= KIND * size <= KIND**2 * self._size:
            self._changes = None
        if self._changes is None or self._bends is None:
            self._size, self._bends = size, np.zeros(len(found))
            self._changes = np.full((2, len(found)), np.nan)
            some = np.argsort(-abs(found), kind="stable")[:SAMPLE]
        elif np.isnan(self._changes).any():
            some = np.flatnonzero(np.isnan(self._changes[0]))[:1]
        else:
            worst = int(abs(self._changes).max(0).argmax())
            some = np.array([worst if count % 2 else count // 2 % len(found)])
        before = self._bends
        self._changes[1] *= np.divide(now, before, out=np.ones_like(now), where=before > 0)
        self._bends = now
        if bends is not None:
            some = np.union1d(some, [now.argmax()])
        for one in map(int, some):
            if doubted is None:
                above, off = float(forms(STEP * self._h, range(one, one + 1))[0]), 0.0
            else:
                above, off = doubted(STEP * self._h, one)
            self._changes[:, one] = _change(found[one], above, size), _change(0.0, off, size)
        return self._changes

    def _descend(self, forms: Forms, number: int, top: float, least: float) -> float:
        """Take the displacement where the form of one micro-batch changes least; return by how
        much.
        """
        one = range(number, number + 1)
        heights, found, changes = [top], [float(forms(top, one)[0])], list[float]()
        # The curvature can be that of parameters far smaller than the norm of all: then forms fall
        # as 1 / h^2 at every height so far.
        while len(heights) < RUNGS or (_falling(changes) and heights[-1] > least):
            if any(found) and not found[-1]:  # rounding has lost the step
                break
            heights.append(heights[-1] / STEP)
            found.append(float(forms(heights[-1], one)[0]))
            changes.append(abs(_change(found[-2], found[-1], abs(found[-2]))))
        errors = [_error(changes, i) for i in range(len(changes))]
        best = int(np.argmin(errors))
        # Outputs that saturate can have a second plateau: the one below it is nearer to the limit.
        for i in range(best + 1, len(changes)):
            apart = abs(found[i] - found[best])
            bars = errors[i] * abs(found[i]) + errors[best] * abs(found[best])
            if apart > max(APART * bars, _noise(found, best, i)):
                best = i
        self._h = heights[best]  # the noise of the lower one is larger
        return errors[best]


def _error(changes: list[float], i: int) -> float:
    """Return the relative error of the form at rung i of a ladder.

    Two that agree by chance have neighbours that do not: of these the lower one has the noise of
    this height, STEP^2 times as large.
    """
    beside = changes[i + 1 : i + 2] or changes[max(i - 1, 0) : i]
    return max([TRUNCATION * changes[i], *(change / STEP**2 for change in beside)])


def _noise(found: list[float], first: int, last: int) -> float:
    """Return the noise of the last form, which is as one over the displacement, by what forms from
    the first one on change the other way: those on the way to another plateau do not.
    """
    way = math.copysign(1.0, found[first] - found[last])
    steps = range(first + 1, last + 1)
    return max(way * (found[i] - found[i - 1]) * STEP ** (last - i) for i in steps)


def _falling(changes: list[float]) -> bool:
    """Return whether a smaller change may be below: the last is the least, or none is small."""
    return min(changes) > SMALL or changes[-1] < min(changes[:-1])


def _change(a: float, b: float, size: float) -> float:
    """Return the change from the first of two forms, whose error it is, in units of a size."""
    if not math.isfinite(a - b):
        return math.inf
    return (b - a) / size if size else (math.inf if b else 0.0)
