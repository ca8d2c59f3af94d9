"""The record of a Hessian spectrum.

Everything is small, fp64, on the CPU and the same on every rank; nothing here communicates, so any
rank may read it and one of them writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_hessian.errors import NumericsError, ResultError
from ds_hessian.krylov import LanczosRun, ritz, trace_estimate
from ds_hessian.krylov.records import PRODUCT_ROUNDING
from ds_hessian.records.advice import Diagnostics, norms_of_products, relative_errors, wide_passes
from ds_hessian.records.base import Measured
from ds_hessian.records.cumulative import Probe, cumulative_bounds
from ds_hessian.records.density import (
    Density,
    bulk_interval,
    merge_probes,
    outlier_mask,
    reduced_weights,
    single_outliers,
    smooth,
)
from ds_hessian.records.estimate import Estimate, SamplingErrors
from ds_hessian.records.fields import Axes
from ds_hessian.records.provenance import Cost, Provenance

Array = NDArray[np.float64]

UNITY = 1e-6
"""Weights of a probe sum to 1 but for rounding, which is far below this."""
LEVELS = 17
"""Eigenvalues over the bulk at which the stored file gives the cumulative distribution."""

PICTURE = "spectrum.png"
"""Name of the picture in a result folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSpectrum(Measured):
    """Spectrum of the Hessian by stochastic Lanczos quadrature; P probes, m products each.

    Hessian entries, eigenvalues and alphas are in units of loss per squared parameter. All arrays
    are fp64 and read-only.

    Attributes:
        n: Number of parameters, the dimension of the Hessian.
        alphas: `(P, m)` diagonals of the tridiagonals.
        betas: `(P, m)` off-diagonals; the last of a row belongs to the residual, a zero marks a
            restart.
        ritz_values: `(P, m)` estimates of eigenvalues, ascending.
        weights: `(P, m)` share of the spectrum that each Ritz value stands for; rows sum to 1. That
            of a single outlier (1/n) has a relative standard deviation above 1 for one probe, which
            `reduced_weights` takes out.
        ritz_errors: `(P, m)` bound on the distance to the nearest eigenvalue: Lanczos' residual and
            three times the estimated errors of the products, added in squares.
        product_errors: `(P, m)` estimated absolute error of each product of a unit vector; 0 where
            unknown.
        displacements: `(P, m)` h of each product.
        nonlinearities: `(P, m)` nonlinearity ratio of each product; NaN where not measured.
        fidelities: `(P, m)` cosine of the realised and the intended displacement.
        trials: `(P, m)` pilot evaluations thrown away.
        asymmetries: `(P,)` `max |A - A'|` of the projected Hessian, 0 for exact products.
        trace: Sum of all eigenvalues, with the probes' standard error.
        loss: Mean loss over the measured micro-batches; None if not known.
        gradient_norm: |gradient| of that loss; None if not known.
        cost: Time and products that it took.
        provenance: The model, the data and the settings that it was measured with.
        sampling: Standard errors of having measured on these micro-batches; None if not asked for.
    """

    kind: ClassVar[str] = "spectrum"
    arrays: ClassVar[dict[str, Axes]] = {
        "alphas": Axes("P", "m", finite=True),
        "betas": Axes("P", "m", finite=True),
        "ritz_values": Axes("P", "m", finite=True),
        "weights": Axes("P", "m", finite=True),
        "ritz_errors": Axes("P", "m", finite=True, least=0),
        "product_errors": Axes("P", "m", finite=True, least=0),
        "displacements": Axes("P", "m", finite=True),
        "nonlinearities": Axes("P", "m"),
        "fidelities": Axes("P", "m", finite=True),
        "trials": Axes("P", "m", finite=True),
        "asymmetries": Axes("P", finite=True),
    }

    n: int
    alphas: Array
    betas: Array
    ritz_values: Array
    weights: Array
    ritz_errors: Array
    product_errors: Array
    displacements: Array
    nonlinearities: Array
    fidelities: Array
    trials: Array
    asymmetries: Array
    trace: Estimate
    loss: float | None
    gradient_norm: float | None
    sampling: SamplingErrors | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and self.n > 0):
            raise ResultError(f"n must be a number of parameters above 0, got {self.n!r}")
        super().__post_init__()
        if 0 in self.alphas.shape:
            shape = self.alphas.shape
            raise ResultError(f"alphas must be (num_probes, m), neither of them 0; got {shape}")
        self._check()
        scalars = (self.trace.value, self.trace.error, self.loss, self.gradient_norm)
        if not all(value is None or np.isfinite(value) for value in scalars):
            raise NumericsError(f"trace, loss and gradient norm must be finite, got {scalars}")

    def _check(self) -> None:
        """Refuse figures that no Lanczos run leaves behind.

        Raises:
            ResultError: weights are no shares, Ritz values do not ascend, or an error is negative.
        """
        sums = self.weights.sum(axis=1)
        if self.weights.min() < 0 or abs(sums - 1).max() > UNITY:
            raise ResultError(f"weights must be at least 0 and sum to 1 in each row, got {sums}")
        if (np.diff(self.ritz_values, axis=1) < 0).any():
            raise ResultError(f"ritz_values must ascend in each row, got {self.ritz_values}")
        for name in ("betas", "ritz_errors", "product_errors", "asymmetries"):
            if getattr(self, name).min() < 0:
                raise ResultError(f"{name} must be at least 0, got {getattr(self, name).min()}")

    @classmethod
    def from_runs(
        cls,
        runs: Sequence[LanczosRun],
        n: int,
        cost: Cost,
        provenance: Provenance,
        loss: float | None = None,
        gradient_norm: float | None = None,
        sampling: SamplingErrors | None = None,
    ) -> HessianSpectrum:
        """Return the record of one Lanczos run for each probe, all of the same length.

        Raises:
            ResultError: there are no runs, or their lengths differ.
            NumericsError: a figure is not finite.
        """
        if not runs or len({run.num_matvecs for run in runs}) > 1:
            lengths = [run.num_matvecs for run in runs]
            raise ResultError(f"a spectrum needs runs of equal length, at least one; got {lengths}")
        pairs = [ritz(run) for run in runs]
        trace, error = trace_estimate(runs, pairs, n)
        return cls(
            n=n,
            alphas=np.stack([run.alphas for run in runs]),
            betas=np.stack([run.betas for run in runs]),
            ritz_values=np.stack([pair.values for pair in pairs]),
            weights=np.stack([pair.weights for pair in pairs]),
            ritz_errors=np.stack([pair.errors for pair in pairs]),
            product_errors=np.stack([run.product_errors for run in runs]),
            displacements=np.stack([run.displacements for run in runs]),
            nonlinearities=np.stack([run.nonlinearities for run in runs]),
            fidelities=np.stack([run.fidelities for run in runs]),
            trials=np.stack([run.trials for run in runs]),
            asymmetries=np.array([run.asymmetry for run in runs]),
            trace=Estimate(trace, error),
            loss=None if loss is None else float(loss),
            gradient_norm=None if gradient_norm is None else float(gradient_norm),
            cost=cost,
            provenance=provenance,
            sampling=sampling,
        )

    @property
    def num_probes(self) -> int:
        """The number of probes P."""
        return int(self.alphas.shape[0])

    @property
    def num_matvecs(self) -> int:
        """The number of Lanczos steps m of each probe."""
        return int(self.alphas.shape[1])

    @property
    def eigenvalue_max(self) -> Estimate:
        """The largest Ritz value of all probes, with the bound on its error.

        Some eigenvalue lies within the error; the largest one can only be larger than that (Ritz
        values approach it from inside), which a few more products show.
        """
        return self._estimate(int(np.argmax(self.ritz_values)))

    @property
    def eigenvalue_min(self) -> Estimate:
        """The smallest Ritz value of all probes, as `eigenvalue_max`."""
        return self._estimate(int(np.argmin(self.ritz_values)))

    def _estimate(self, flat: int) -> Estimate:
        return Estimate(float(self.ritz_values.flat[flat]), float(self.ritz_errors.flat[flat]))

    @property
    def mean_eigenvalue(self) -> Estimate:
        """The trace over n."""
        return Estimate(self.trace.value / self.n, self.trace.error / self.n)

    @property
    def product_noise(self) -> float:
        """The median absolute error of the products; smaller eigenvalues may be 0."""
        return float(np.median(self.product_errors))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the figures (fidelity, errors, nonlinearity, asymmetry), with advice.

        The tuple is empty if there are none. `table` prints them, and the engine logs them.
        """
        norms, source = norms_of_products(self.alphas, self.betas), self.provenance
        inexact = self.ritz_errors.min(axis=1)  # with what rounding of the basis adds to a column
        diagnostics = Diagnostics(
            automatic=source.displacement == "auto",
            tolerance=source.tolerance,
            narrow=source.precision == "model"
            and (bool(source.precision_reason) or source.model_dtype not in ("fp32", "float32")),
            wide=wide_passes(source.precision_reason),
            fidelities=self.fidelities,
            norms=norms,
            nonlinearities=self.nonlinearities,
            product_errors=self.product_errors,
            asymmetries=self.asymmetries,
            rounding=inexact + PRODUCT_ROUNDING * norms.max(axis=1),
        )
        return diagnostics.warnings()

    @property
    def relative_errors(self) -> Array:
        """`(P, m)` estimated error of each product over its norm; 0 where unknown."""
        return relative_errors(self.product_errors, self.alphas, self.betas)

    def density(self, grid: ArrayLike | None = None, width: float | None = None) -> Density:
        """Return the smoothed spectral density; it integrates to 1, and nothing rescales it.

        Made with `reduced_weights`; the standard error over the probes comes with it.

        Args:
            grid: Ascending eigenvalues `(k,)`; None for one that resolves every kernel.
            width: Standard deviation of every Gaussian; None for one width for each Ritz value: one
                local spacing where it has not converged, its error bound where it has (see
                `ds_hessian.records.density.automatic_widths`).

        Raises:
            ValueError: the grid is not ascending, or the width not above 0.
        """
        points = None if grid is None else np.asarray(grid, dtype=np.float64)
        return smooth(self.ritz_values, self.reduced_weights, self.ritz_errors, points, width)

    @property
    def reduced_weights(self) -> Array:
        """`(P, m)` weights for densities and counts, without the probes' chance in the outliers.

        The weight of one eigenvalue is 1/n in the mean, with a standard deviation of `sqrt(2) / n`.
        An outlier (see `outliers`: converged, and isolated from the bulk) gets 1/n itself, and the
        rest of its probe is scaled to what remains; but it keeps its own weight where a single
        eigenvalue would have one as large in less than 1 of 10^4 probes, since a Krylov space shows
        equal eigenvalues as one. Smaller multiplicities, up to about ten, count as one.
        (Variance-reduced SLQ: arXiv 2410.21690.)
        """
        return reduced_weights(self.weights, self.outliers(), self.n)

    def cumulative(self, x: ArrayLike) -> Array:
        """Return the share of eigenvalues at or below x, of the shape of x; needs no smoothing
        width.
        """
        order = np.argsort(self.ritz_values, axis=None)
        sums = np.cumsum(self.reduced_weights.ravel()[order]) / self.num_probes
        count = np.searchsorted(self.ritz_values.ravel()[order], np.asarray(x), side="right")
        return np.append(0.0, sums)[count]

    def cumulative_bounds(self, x: ArrayLike, confidence: float = 0.95) -> tuple[Array, Array]:
        """Return bounds on the share of eigenvalues at or below x, of the shape of x.

        They hold at each x by itself with the given confidence over the choice of probes, also for
        one probe; see `ds_hessian.records.cumulative`. Other micro-batches are not in them.

        Raises:
            ValueError: the confidence is not between 0 and 1.
        """
        points = np.asarray(x, dtype=np.float64)
        return cumulative_bounds(self._probes(), self.n, points, confidence)

    def _probes(self) -> list[Probe]:
        single = single_outliers(self.weights, self.outliers(), self.n)
        return [
            Probe(
                alphas=self.alphas[row],
                betas=self.betas[row],
                values=self.ritz_values[row],
                weights=self.weights[row],
                errors=self.ritz_errors[row],
                product_error=float(self.product_errors[row].max()),
                single=single[row],
            )
            for row in range(self.num_probes)
        ]

    def outliers(self) -> NDArray[np.bool_]:
        """`(P, m)` mask of the Ritz values that are single eigenvalues away from the bulk.

        The bulk of a probe holds the central 80 % of its weight and every neighbour within a
        quarter of the bulk's length (`ds_hessian.records.density.bulk_interval`). An outlier lies
        outside of it and has converged: its error is at most a tenth of the distance to the
        nearest other Ritz value, or below 1e-5 of the largest.
        """
        return outlier_mask(self.ritz_values, self.weights, self.ritz_errors)

    def outlier_eigenvalues(self) -> list[Estimate]:
        """Return the outliers of all probes, each eigenvalue once, in descending order."""
        found = merge_probes(self.ritz_values, self.ritz_errors, self.outliers())
        return [Estimate(*pair) for pair in found]

    def bulk(self) -> tuple[float, float]:
        """Return the ends of the bulk: the union of the intervals that the probes see as theirs."""
        rows = zip(self.ritz_values, self.weights, strict=True)
        ends = [bulk_interval(values, weights) for values, weights in rows]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def derived(self) -> dict[str, object]:
        """Return the headlines, which follow from the fields, for readers of the file."""
        cost = self.cost
        return {
            "num_probes": self.num_probes,
            "num_matvecs": self.num_matvecs,
            "eigenvalue_max": asdict(self.eigenvalue_max),
            "eigenvalue_min": asdict(self.eigenvalue_min),
            "mean_eigenvalue": asdict(self.mean_eigenvalue),
            "outliers": [asdict(outlier) for outlier in self.outlier_eigenvalues()],
            "diagnostics": {
                "product_errors": _range(self.product_errors),
                "displacements": _range(self.displacements),
                "nonlinearities": _range(self.nonlinearities),
                "fidelities": _range(self.fidelities),
                "asymmetry": float(self.asymmetries.max()),
            },
            "density": self._derived_density(),
            "warnings": list(self.warnings),
            "cost_derived": {
                "gradients_per_product": cost.gradients_per_product,
                "product_time_in_gradients": cost.product_time_in_gradients,
                "lanczos_overhead": cost.lanczos_overhead,
            },
        }

    def _derived_density(self) -> dict[str, object]:
        """Return kernel widths, and the cumulative distribution with its bounds at levels of the
        bulk.

        A loaded record gives any other grid, width or confidence.
        """
        density = self.density()
        rows = zip(self.ritz_values, self.reduced_weights, strict=True)
        ends = np.array([bulk_interval(*row) for row in rows])
        values = np.linspace(ends[:, 0].min(), ends[:, 1].max(), LEVELS)
        lower, upper = self.cumulative_bounds(values)
        return {
            "width": _range(density.width),
            "band": f"95 % over {self.num_probes} probes" if self.num_probes > 1 else None,
            "mass": density.mass,
            "cumulative": {
                "confidence": 0.95,
                "eigenvalues": values.tolist(),
                "shares": self.cumulative(values).tolist(),
                "lower": lower.tolist(),
                "upper": upper.tolist(),
            },
        }


def _range(array: Array) -> dict[str, float | None]:
    """Return smallest, median and largest of what was measured; null where nothing was."""
    known = array[~np.isnan(array)]
    if not len(known):
        return {"min": None, "median": None, "max": None}
    figures = {"min": known.min(), "median": np.median(known), "max": known.max()}
    return {key: float(value) if np.isfinite(value) else None for key, value in figures.items()}
