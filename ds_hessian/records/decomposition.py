"""The record of a decomposition H = G + R: the spectra of all three, from the same probes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ds_hessian.errors import ResultError
from ds_hessian.krylov import negative_bounds
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.density import single_outliers
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import plain
from ds_hessian.records.provenance import Provenance
from ds_hessian.records.spectrum import HessianSpectrum

PARTS = ("hessian", "ggn", "residual")


@dataclass(frozen=True, eq=False)
class HessianDecomposition(Comparison):
    """Spectra of the Hessian H, of its Gauss-Newton part G, and of the residual R = H - G.

    G is positive semidefinite where the loss is convex in the outputs: the negative curvature of H
    is made by R, and G takes some of it away.

    Attributes:
        spectra: `{"hessian": H, "ggn": G, "residual": R}`.

    Raises:
        ResultError: it has other parts, or their probes differ.
    """

    kind: ClassVar[str] = "decomposition"

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.spectra) != PARTS:
            raise ResultError(f"a decomposition has {', '.join(PARTS)}, got {list(self.spectra)}")
        if len({(s.n, s.num_probes, s.provenance.seed) for s in self.spectra.values()}) > 1:
            raise ResultError("the parts of a decomposition must have the same probes")

    @property
    def hessian(self) -> HessianSpectrum:
        """The spectrum of H."""
        return self.spectra["hessian"]

    @property
    def gauss_newton(self) -> HessianSpectrum:
        """The spectrum of G."""
        return self.spectra["ggn"]

    @property
    def residual(self) -> HessianSpectrum:
        """The spectrum of R."""
        return self.spectra["residual"]

    @property
    def provenance(self) -> Provenance:
        """The provenance of H's spectrum."""
        return self.hessian.provenance

    @property
    def closure(self) -> Estimate:
        """`tr G + tr R - tr H`, with the error that the products of the three may make.

        The probes are the same, so their own error is not in it.
        """
        traces = [self.gauss_newton.trace, self.residual.trace, self.hessian.trace]
        gap = traces[0].value + traces[1].value - traces[2].value
        return Estimate(gap, sum(_first_product(s) for s in self.spectra.values()))

    @property
    def share_of_residual(self) -> float:
        """`|R|_F / |H|_F`, from the spectra; NaN where H is zero."""
        hessian = _norm(self.hessian)
        return _norm(self.residual) / hessian if hessian else math.nan

    def negative(self, part: str) -> Estimate:
        """The sum of the negative eigenvalues of a part.

        A probe's own sum lies between bounds that its Ritz values leave
        (`ds_hessian.krylov.negative_bounds`), and the value is the middle of these, but where no
        Ritz value is negative beyond its error. The error has half their distance, the standard
        error of the probes, by the variance of a random vector's sum or by their spread where that
        is larger, and what eigenvalues within the products' errors of zero may add.
        """
        s = self.spectra[part]
        single = single_outliers(s.weights, s.outliers(), s.n)
        found = [_negative(s, row, single[row]) for row in range(s.num_probes)]
        sums, halves, variances = np.array(found).T
        noise = s.reduced_weights * np.minimum(s.ritz_errors, s.product_noise)
        spread = sums.std(ddof=1) if len(sums) > 1 else 0.0
        spread = max(float(spread), math.sqrt(variances.mean())) / math.sqrt(len(sums))
        error = math.hypot(spread, halves.mean()) + s.n * float(noise.sum(1).mean())
        return Estimate(float(sums.mean()), error)

    @property
    def surviving(self) -> Estimate:
        """The share of R's negative curvature that is left in H, where G is added to it.

        It is the ratio of the sums of negative eigenvalues, at most 1 for a semidefinite G; NaN
        where R has none.
        """
        left, made = self.negative("hessian"), self.negative("residual")
        if not made.value < 0:
            return Estimate(math.nan, math.nan)
        share = left.value / made.value
        error = math.hypot(left.error, share * made.error) / abs(made.value)
        return Estimate(share, error)

    def derived(self) -> dict[str, object]:
        """Return what follows from the spectra, for readers of the file."""
        return {
            "traces": {name: s.trace.value for name, s in self.spectra.items()},
            "negative": {name: self.negative(name).value for name in PARTS},
            "surviving": str(self.surviving),
            "share_of_residual": plain(self.share_of_residual),
        }


def _negative(
    s: HessianSpectrum, row: int, single: NDArray[np.bool_]
) -> tuple[float, float, float]:
    """Return the sum of the negative eigenvalues by one probe, how far its bounds are from it, and
    the variance of such sums over probes.

    Outliers that count as one eigenvalue each have neither a variance nor bounds.
    """
    weights, values = s.weights[row], np.minimum(s.ritz_values[row], 0.0)
    total = s.n * float(s.reduced_weights[row] @ values)
    rest = float(weights[~single].sum())
    if not rest > 0:
        return total, 0.0, 0.0
    least, most = negative_bounds(s.alphas[row], s.betas[row])
    dims = s.n - int(single.sum())
    low, high = (dims / rest * (bound - float(weights @ values)) for bound in (least, most))
    shares, others = weights[~single] / rest, values[~single]
    # A Ritz value stands for one eigenvalue at least, of which a probe may have seen little.
    second = float(np.maximum(shares, 1 / dims) @ others**2)
    variance = 2 * dims**2 / (dims + 2) * max(second - float(shares @ others) ** 2, 0.0)
    if not (s.ritz_values[row] < -s.ritz_errors[row]).any():
        return total, high - low, variance
    return total + (low + high) / 2, (high - low) / 2, variance


def _norm(s: HessianSpectrum) -> float:
    return math.sqrt(s.n * float((s.weights * s.ritz_values**2).sum(axis=1).mean()))


def _first_product(s: HessianSpectrum) -> float:
    """Return the error of the trace that is due to the probes' own products."""
    return s.n * float(s.product_errors[:, 0].max())
