"""v'Gv by forwards alone, with its error: the cheapest curvature of a job.

    v'Gv  =  sum over tokens of delta' H_out delta / (2 h)^2,    delta = f(w + h v) - f(w - h v)

Two forwards over all micro-batches, two thirds of a gradient; nothing is kept for a backward. The
form is that of a square, so that rounding of the outputs enters it in second order, and the first
order of what is left falls as h^2: between the two it hardly depends on h, and the change from one
displacement to another is the error. It is measured on the first micro-batch, at a ladder of
displacements for the first vector and at one beside the best for others. Two forms may agree by
chance, so no error is stated that is less than is usual among the vectors so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

STEP = 3.0
"""Ratio of the displacements that are compared."""

RUNGS = 6
"""Displacements of a first vector."""

SMALL = 1e-2
"""A later vector whose form changes by more goes down the ladder too."""


class Ladder:
    """The displacement of one operator's forms, and their error."""

    def __init__(self) -> None:
        self._h = 0.0
        self._errors = list[float]()  # of the vectors so far, each by its own forms

    def settled(self, form: Callable[[float], float], first: float) -> tuple[float, float]:
        """Return the displacement for the form of a vector, and the relative error there.

        Args:
            form: The form on the first micro-batch, as a function of the displacement. Collective.
            first: A displacement for a vector of which nothing is known.
        """
        relative = math.inf
        if self._h:
            # Not over STEP^2, though truncation falls so: other micro-batches may bend more.
            relative = _change(form(self._h), form(self._h * STEP))
        if relative > SMALL:
            relative = self._descend(form, STEP * first)
        self._errors.append(relative)
        return self._h, max(relative, float(np.median(self._errors)))

    def _descend(self, form: Callable[[float], float], top: float) -> float:
        """Take the displacement where the form changes least; return the change."""
        heights = [top / STEP**k for k in range(RUNGS)]
        found = [form(h) for h in heights]
        changes = [_change(a, b) for a, b in zip(found, found[1:], strict=False)]
        best = int(np.argmin(changes))
        self._h = heights[best]  # the noise of the lower one is larger
        # Two that agree by chance have neighbours that do not.
        near = [changes[i] for i in (best - 1, best + 1) if 0 <= i < len(changes)]
        return max(changes[best], min(near, default=0.0) / STEP**2)


def _change(a: float, b: float) -> float:
    size = max(abs(a), abs(b))
    return abs(a - b) / size if size > 0 else 0.0
