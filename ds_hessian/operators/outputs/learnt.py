"""What the products of one Gauss-Newton operator have shown, by which the next one is made."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ds_hessian.operators.displacement.belief import VISIBLE
from ds_hessian.operators.displacement.priors import NOISE_SPREAD
from ds_hessian.operators.displacement.trials import ROUNDOFF
from ds_hessian.operators.outputs.trials import Trial
from ds_hessian.operators.protocol import COVERAGE

TYPICAL = 1.0
"""kappa before it is measured: 2/3 for an exponential, more where curvature is concentrated."""

SPREAD = 1.0
"""Scatter of ln kappa before it is measured: Student's, of three degrees of freedom, of 159
products of the 20 families of benchmarks/families.py."""

TINY = 1e-30
"""A change, an error, or a square of one, that counts as none."""


OF_LOSS = ("values", "bent", "rho", "loss_roundoff")
"""What is learnt of differencing the loss in the outputs."""

UNTAUGHT = (*OF_LOSS, "largest", "gain", "backward", "of_nothing", "firsts", "taught")
"""What each measurement learns itself."""


@dataclass
class Learnt:
    """What products have shown so far; see `ds_hessian.operators.outputs.estimates`.

    Attributes:
        h: The displacement of the next vector's first trial.
        largest: Above it something was not finite.
        noise: N of the pilot.
        noise_spread: The standard deviation of its logarithm, for the next vector.
        ratio_noise: The noise of r, times h and the spread.
        bend: b of the last vector.
        kappa: kappa, by which displacements are chosen: the geometric mean of the last vectors'.
        kappa_spread: The standard deviation of its logarithm, for the next vector.
        square: The mean of kappa^2 over the vectors that have shown it, for estimates of others.
        shown: Their number.
        of_nothing: The largest kappa S of products that were all error, of vectors that G maps to
            nothing: for others of these.
        spread: `Trial.spread` of the first vector of this kind, of which these three are.
        gain: The size of the first product over the spread of its outputs.
        backward: nu.
        values: The relative error from differencing the loss in the outputs; 0 where it is known.
        bent: `Trial.values` of the trial of which that was measured.
        rho: The displacement of the outputs of a loss that is known by its values
            (`ds_hessian.operators.outputs.passes`); 0 before it is chosen.
        loss_roundoff: The noise of differencing such a loss, times rho: before it is measured, the
            roundoff of the outputs that the loss takes.
        unseen: Whether r was no more than its noise in the last product: h may be too small.
        products: Their number.
        firsts: What the first two products have taught, for later measurements.
        taught: What those of an earlier one have, with which this began; None for nothing.
    """

    h: float
    largest: float
    noise: float = 0.0
    noise_spread: float = NOISE_SPREAD
    ratio_noise: float = 0.0
    bend: float = 0.0
    kappa: float = TYPICAL
    kappa_spread: float = SPREAD
    square: float = TYPICAL**2
    shown: int = 0
    of_nothing: float = 0.0
    spread: float = 0.0
    gain: float = 0.0
    backward: float = 0.0
    values: float = 0.0
    bent: float = 0.0
    rho: float = 0.0
    loss_roundoff: float = ROUNDOFF
    unseen: bool = False
    products: int = 0
    firsts: list[Any] = field(default_factory=list)
    taught: list[Any] | None = None

    # ---- measurements of a run

    def note_first(self, h: float, size: float) -> None:
        """Keep what is learnt after one of the first two products, with its displacement and the
        size of the pilot's.
        """
        known = {name: value for name, value in asdict(self).items() if name not in UNTAUGHT}
        self.firsts = [*self.firsts, [h, size, known]]

    def taught_for(self, number: int) -> Learnt:
        """Return what the first or the second vector begins with: lessons, and what this
        measurement has shown so far.
        """
        assert self.taught is not None
        h, _, known = self.taught[number]
        return replace(self, **{**known, "h": h, "unseen": False, "products": number})

    def confirms(self, size: float, bend: float) -> bool:
        """Return whether the first trial is as lessons let expect: of a size that is not far from
        theirs, and of outputs that bend alike.
        """
        assert self.taught is not None
        (_, before, known), _ = self.taught
        pairs = (size, before, VISIBLE**2), (bend, known["bend"], VISIBLE)
        return all(a <= most * b and b <= most * a for a, b, most in pairs)

    def scaled(self, size: float) -> Learnt:
        """Return what the first vector goes on with after its first trial, which has confirmed the
        lessons: their noise is as much larger as the product is.
        """
        assert self.taught is not None
        (_, before, _), _ = self.taught
        larger = size / before if before else 1.0
        taught = [
            [h, of, known | {"noise": larger * known["noise"]}] for h, of, known in self.taught
        ]
        return replace(self, taught=taught, noise=larger * self.noise)

    # ---- of a loss that is known by its values alone

    def narrower(self, values: float) -> float | None:
        """Return the `balanced` rho, of a loss without kinks, where that is less than half of the
        present one; None otherwise.

        Truncation is as rho^2, and of the present rho it is `values`; noise is the roundoff over
        rho.
        """
        found = self.balanced(values)
        return found if found < self.rho / 2 else None

    def balanced(self, values: float) -> float:
        """Return the rho at which truncation is as large as noise, if the error is `values` at the
        present one, all of it truncation.
        """
        return (self.loss_roundoff * self.rho**2 / max(values, TINY)) ** (1 / 3)

    def narrow(self, rho: float) -> None:
        """Go on with a smaller rho, over which the noise of the backward is as much larger."""
        self.backward *= self.rho / rho
        self.rho = rho

    def note_values(self, error: float, trial: Trial) -> None:
        """Learn the error from differencing the loss in the outputs of such a trial: after the
        first one, of none that is all error.
        """
        if not (trial.size > 0 and math.isfinite(error)):
            return
        error /= trial.size
        if not self.values or COVERAGE * max(error, trial.values) < 1:
            self.values, self.bent = error, trial.values

    def of_loss(self, bent: float) -> float:
        """Return the relative error from differencing the loss, of a product with such
        `Trial.values`: truncation goes with them, of all micro-batches and of its own vector.
        """
        noise = min(self.loss_roundoff / self.rho, self.values) if self.rho else 0.0
        more = max(1.0, bent / self.bent) if self.bent else 1.0
        truncation = math.sqrt(self.values**2 - noise**2) * more
        return min(max(math.hypot(truncation, noise), bent), 1.0)
