"""The record of a Hessian spectrum.

Everything is small, fp64, on the CPU and the same on every rank; nothing here communicates, so any
rank may read it and one of them writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ds_hessian.errors import NumericsError, ResultError
from ds_hessian.krylov import LanczosRun, ritz, trace_estimate
from ds_hessian.records import density as _density
from ds_hessian.records.cumulative import cumulative_bounds
from ds_hessian.records.density import Density
from ds_hessian.records.estimate import Estimate, SamplingErrors
from ds_hessian.records.provenance import Cost, Provenance

Array = NDArray[np.float64]


PICTURE = "spectrum.png"
"""Name of the picture in a result folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSpectrum:
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
            twice the estimated errors of the products.
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
        cost: What it took.
        provenance: What it was measured on.
        sampling: What other micro-batches would change; None if it was not asked for.
    """

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
    cost: Cost
    provenance: Provenance
    sampling: SamplingErrors | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.n, int) and self.n > 0):
            raise ResultError(f"n must be a number of parameters above 0, got {self.n!r}")
        shape = self.alphas.shape
        if len(shape) != 2 or 0 in shape:
            raise ResultError(f"alphas must be (num_probes, m), neither of them 0; got {shape}")
        for name in self.array_names():
            array = np.array(getattr(self, name), dtype=np.float64)
            wanted = shape[:1] if name == "asymmetries" else shape
            if array.shape != wanted:
                raise ResultError(f"{name} must be {wanted} as the alphas are, got {array.shape}")
            if name != "nonlinearities" and not np.isfinite(array).all():
                raise NumericsError(f"{name} must be finite, got {array}")
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        scalars = (self.trace.value, self.trace.error, self.loss, self.gradient_norm)
        if not all(value is None or np.isfinite(value) for value in scalars):
            raise NumericsError(f"trace, loss and gradient norm must be finite, got {scalars}")

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
        """The record of one Lanczos run for each probe, all of the same length.

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

    @classmethod
    def array_names(cls) -> list[str]:
        """Names of the array fields."""
        return [field.name for field in fields(cls) if field.type == "Array"]

    @property
    def num_probes(self) -> int:
        """Number of probes P."""
        return int(self.alphas.shape[0])

    @property
    def num_matvecs(self) -> int:
        """Lanczos steps m of each probe."""
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
        """Trace over n."""
        return Estimate(self.trace.value / self.n, self.trace.error / self.n)

    @property
    def product_noise(self) -> float:
        """Median absolute error of the products; eigenvalues below it cannot be told from 0."""
        return float(np.median(self.product_errors))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the figures (fidelity, errors, nonlinearity, asymmetry), with advice.

        Empty where nothing does. Printed by `table`, and logged by the engine.
        """
        from ds_hessian.records.advice import warnings_of

        return warnings_of(self)

    def density(self, grid: ArrayLike | None = None, width: float | None = None) -> Density:
        """Smoothed spectral density; integrates to 1 over the real line, and nothing rescales it.

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
        return _density.smooth(
            self.ritz_values, self.reduced_weights, self.ritz_errors, points, width
        )

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
        return _density.reduced_weights(self.weights, self.outliers(), self.n)

    def cumulative(self, x: ArrayLike) -> Array:
        """Share of eigenvalues at or below x, of the shape of x; needs no smoothing width."""
        order = np.argsort(self.ritz_values, axis=None)
        sums = np.cumsum(self.reduced_weights.ravel()[order]) / self.num_probes
        count = np.searchsorted(self.ritz_values.ravel()[order], np.asarray(x), side="right")
        return np.append(0.0, sums)[count]

    def cumulative_bounds(self, x: ArrayLike, confidence: float = 0.95) -> tuple[Array, Array]:
        """Lower and upper bounds on the share of eigenvalues at or below x, of the shape of x.

        They hold at each x by itself with the given confidence over the choice of probes, also for
        one probe; see `ds_hessian.records.cumulative`. Other micro-batches are not in them.

        Raises:
            ValueError: the confidence is not between 0 and 1.
        """
        return cumulative_bounds(self, np.asarray(x, dtype=np.float64), confidence)

    def outliers(self) -> NDArray[np.bool_]:
        """`(P, m)` mask of the Ritz values that are single eigenvalues away from the bulk.

        The bulk of a probe holds the central 80 % of its weight and every neighbour within a
        quarter of the bulk's length (`ds_hessian.records.density.bulk_interval`). An outlier lies
        outside of it and has converged: its error is at most a tenth of the distance to the
        nearest other Ritz value, or below 1e-5 of the largest.
        """
        return _density.outlier_mask(self.ritz_values, self.weights, self.ritz_errors)

    def outlier_eigenvalues(self) -> list[Estimate]:
        """The outliers of all probes, each eigenvalue once, in descending order."""
        found = _density.merge_probes(self.ritz_values, self.ritz_errors, self.outliers())
        return [Estimate(*pair) for pair in found]

    def save(self, folder: str | Path) -> Path:
        """Write `spectrum.json` (to read) and `spectrum.npz` (arrays); returns the folder.

        Files of the same name are replaced, each at once. Call it on one rank.

        Raises:
            OSError: the folder cannot be written.
        """
        from ds_hessian.records.store import save

        return save(self, Path(folder))

    @staticmethod
    def load(folder: str | Path) -> HessianSpectrum:
        """The record that `save` wrote, bit for bit.

        Raises:
            ResultError: files are missing, damaged, or of another schema.
        """
        from ds_hessian.records.store import load

        return load(HessianSpectrum, Path(folder))

    def plot(self, path: str | Path) -> Path:
        """Draw the spectrum; the format follows from the name (.png, .pdf, .svg).

        Raises:
            ImportError: matplotlib is not installed.
        """
        from ds_hessian.show.spectrum_picture import plot

        return plot(self, Path(path))

    def table(self) -> str:
        """A short table for people."""
        from ds_hessian.show.table import table

        return table(self)

    def __eq__(self, other: object) -> bool:
        """All fields equal, arrays bit for bit (NaN equals itself)."""
        if not isinstance(other, HessianSpectrum):
            return NotImplemented
        arrays = set(self.array_names())
        for name in (field.name for field in fields(self)):
            a, b = getattr(self, name), getattr(other, name)
            if name in arrays:
                if a.shape != b.shape or a.tobytes() != b.tobytes():
                    return False
            elif a != b:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]
