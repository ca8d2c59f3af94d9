"""Records of single analyses: what the Krylov method found, what it cost, what it was measured on.

Not converging is data in them. Small arrays are the same on every rank; vectors stay sharded.
All can be saved and loaded (`ds_hessian.records.store`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ds_hessian.krylov import (
    BlockCoupling,
    DampedSystems,
    Eigenpairs,
    OffBlockShare,
    Solution,
    TraceEstimate,
)
from ds_hessian.krylov.records import Array
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.provenance import Cost, Provenance


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What every record of an analysis says.

    Attributes:
        cost: What it took.
        provenance: What it was measured on.
    """

    cost: Cost
    provenance: Provenance

    def save(self, folder: str | Path) -> Path:
        """Write `<kind>.json` (to read) and `<kind>.npz` (arrays); returns the folder.

        `<kind>` is `eigenpairs`, `trace`, `solution`, ... Sharded vectors are left out, which
        `HessianEngine.save` writes too. Call it on one rank.

        Raises:
            OSError: the folder cannot be written.
        """
        from ds_hessian.records.store import save

        return save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The record that `save` wrote, bit for bit; sharded vectors are `(k, 0)`.

        Raises:
            ResultError: files are missing, damaged, or of another schema.
        """
        from ds_hessian.records.store import load

        return load(cls, Path(folder))


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianEigenpairs(Eigenpairs, Measured):
    """Extreme eigenpairs of the Hessian; see `ds_hessian.krylov.Eigenpairs`.

    Attributes:
        concentrations: {parameter name: `(k,)`} share of each eigenvector's squared norm that lies
            in the parameter; sums to 1 over the parameters.
        sampling_errors: `(k,)` standard errors of the values, to first order, from having measured
            on these micro-batches only (see `SamplingErrors`); empty if not asked for.
    """

    concentrations: Mapping[str, Array]
    sampling_errors: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianTrace(TraceEstimate, Measured):
    """Trace of the Hessian; see `ds_hessian.krylov.TraceEstimate`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSolution(Solution, Measured):
    """Solutions of (H + damping I) x = b; see `ds_hessian.krylov.Solution`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianInfluence(DampedSystems, Measured):
    """Influence of N training examples on a query's loss, `g_q' (H + damping I)^-1 g_i`.

    To first order, an example left out of the mean of N changes the query's loss by its score over
    N: a positive score is an example that helps (Koh, Liang, ICML 2017). H and the mean are those
    of the measured micro-batches.

    With negative curvature the weights are at no minimum, and a score says little.

    Attributes:
        scores: `(d, N)` in units of the query's loss.
        errors: `(d, N)` estimate of each score's error: that of the solution times `|g_i|`.
        query_loss: Mean loss of the query.
    """

    scores: Array
    errors: Array
    query_loss: float


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSharpness(Measured):
    """Curvature along a training run; eigenvalues each with the bound on their error.

    *Some* eigenvalue lies within the error of each; after steps in which the top one changed places
    with another, a warm start can follow the wrong one for a measurement.

    Attributes:
        eigenvalue_max: The largest eigenvalue of H, in loss per squared parameter.
        preconditioned: The largest eigenvalue of `D^-1/2 H D^-1/2` with D what Adam divides by, in
            the unit of 1 / learning rate; None without Adam. Adam with beta1 = 0.9 is at the edge
            of stability where it is 38 / learning rate (Cohen et al., arXiv 2207.14484).
        converged: Whether the residual of each of them is within the tolerance.
        limited: Whether it is not, but as small as the products' errors let it be. Empty in records
            of versions without it.
        gradient_curvature: `g'Hg / g'g` along the gradient of the measured loss.
        update_curvature: `u'Hu / u'u` along Adam's last step, without its weight decay; None
            without Adam.
        update_norm: |u|, with the present learning rate; None without Adam.
        gradient_norm: |g|.
        loss: Mean loss over the measured micro-batches.
        warm: Whether it started from an earlier measurement.
        num_matvecs: Products made.
    """

    eigenvalue_max: Estimate
    preconditioned: Estimate | None
    converged: tuple[bool, ...]
    gradient_curvature: float
    update_curvature: float | None
    update_norm: float | None
    gradient_norm: float
    loss: float
    warm: bool
    num_matvecs: int
    limited: tuple[bool, ...] = ()

    def table(self) -> str:
        """One line for people."""
        text = f"largest eigenvalue {self.eigenvalue_max}"
        if self.preconditioned is not None:
            text += f", preconditioned {self.preconditioned}"
        if not all(self.converged):
            text += f" ({'limited by the products' if any(self.limited) else 'not converged'})"
        step = self.provenance.step
        return f"Hessian sharpness at step {step}: {text}; {self.num_matvecs} products"


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianBlockCoupling(BlockCoupling, Measured):
    """The masked-probe test of the Hessian; see `ds_hessian.krylov.BlockCoupling`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianOffBlockShare(OffBlockShare, Measured):
    """Off-block share of the Hessian's norm; see `ds_hessian.krylov.OffBlockShare`."""
