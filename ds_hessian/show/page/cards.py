"""The figures that matter most, with what they mean: the first screen of the page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hessian.records.estimate import Estimate
from ds_hessian.records.spectrum import HessianSpectrum
from ds_hessian.show.page.run import Label, Run
from ds_hessian.show.style import short


class Card(NamedTuple):
    """A figure, and a sentence that says what it means."""

    name: str
    value: str
    meaning: str


Cards = tuple[Card, ...]


def cards_of(run: Run) -> list[tuple[Label, Cards]]:
    """Return the cards of each spectrum of the run."""
    return [(label, _cards(s)) for label, s in run.labelled(HessianSpectrum)]


def _cards(s: HessianSpectrum) -> Cards:
    return (
        Card(
            "largest eigenvalue",
            str(s.eigenvalue_max),
            "The sharpness: how fast the slope grows along the steepest direction of the loss.",
        ),
        Card("most negative eigenvalue", str(s.eigenvalue_min), _negative(s.eigenvalue_min)),
        Card(
            "trace",
            str(s.trace),
            "The sum of all eigenvalues: the mean curvature along a random direction is "
            f"{short(s.mean_eigenvalue.value)}.",
        ),
        _apart(s),
        _trust(s),
    )


def _negative(smallest: Estimate) -> str:
    if smallest.value + smallest.error < 0:
        return "Below 0: the loss bends down along some direction, so this is no minimum."
    if smallest.value < smallest.error:
        return "Not below 0 beyond its bar: no direction was seen along which the loss bends down."
    return "Above 0: along every direction that was seen, the loss bends up."


def _apart(s: HessianSpectrum) -> Card:
    found = s.outlier_eigenvalues()
    edge = max(abs(end) for end in s.bulk())
    meaning = "No eigenvalue has been resolved away from the bulk; more products may."
    if found and edge > 0:
        times = short(abs(max(found, key=lambda o: abs(o.value)).value) / edge)
        meaning = f"Directions of their own: the furthest is {times} times the edge of the bulk."
    return Card("single eigenvalues", str(len(found)), meaning)


def _trust(s: HessianSpectrum) -> Card:
    name = "error of a product"
    if not s.product_errors.any():
        return Card(name, "not known", "The products gave no estimate of their errors.")
    worst = "with warnings, see below" if s.warnings else "no warnings"
    text = f"Relative, in the median; it is in every bar of this page ({worst})."
    return Card(name, f"{100 * float(np.median(s.relative_errors)):.2g} %", text)
