"""Records of single analyses: what the Krylov method found, what it cost, what it was measured on.

Not converging is data in them. Small arrays are the same on every rank; vectors stay sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ds_hessian.krylov import (
    BlockCoupling,
    DampedSystems,
    Eigenpairs,
    OffBlockShare,
    Solution,
    TraceEstimate,
)
from ds_hessian.krylov.records import Array
from ds_hessian.records.base import Measured
from ds_hessian.records.estimate import Estimate
from ds_hessian.records.fields import Axes

SYSTEMS = {
    "dampings": Axes("d", finite=True),
    "residuals": Axes("d", least=0),
    "converged": Axes("d", kind="b"),
    "negative_curvature": Axes("d", kind="b"),
}
"""Arrays of every record of damped systems."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianEigenpairs(Eigenpairs, Measured):
    """Extreme eigenpairs of the Hessian, and where in the model their vectors lie.

    Attributes:
        concentrations: {parameter name: `(k,)`} share of each eigenvector's squared norm that lies
            in the parameter; sums to 1 over the parameters.
        sampling_errors: `(k,)` standard errors of the values, to first order, from having measured
            on these micro-batches only (see `SamplingErrors`); empty if not asked for.
    """

    kind: ClassVar[str] = "eigenpairs"
    arrays: ClassVar[dict[str, Axes]] = {
        "values": Axes("k", finite=True),
        "errors": Axes("k", least=0),
        "residuals": Axes("k", least=0),
        "product_errors": Axes("k", least=0),
        "displacements": Axes("k"),
        "converged": Axes("k", kind="b"),
        "concentrations": Axes("k", named=True),
        "sampling_errors": Axes("k", optional=True, least=0),
        "participation": Axes("k", optional=True, least=0),
    }
    sharded: ClassVar[dict[str, str]] = {"vectors": "k"}

    concentrations: Mapping[str, Array]
    sampling_errors: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianTrace(TraceEstimate, Measured):
    """The trace of the Hessian, and of its diagonal blocks where they were asked for."""

    kind: ClassVar[str] = "trace"
    arrays: ClassVar[dict[str, Axes]] = {
        "samples": Axes("samples"),
        "block_values": Axes("B"),
        "block_errors": Axes("B", least=0),
    }
    labels: ClassVar[dict[str, str]] = {"blocks": "B"}
    pairs: ClassVar[tuple[str, ...]] = ("frobenius",)


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSolution(Solution, Measured):
    """Solutions of (H + damping I) x = b, one for each damping, and how well each is solved."""

    kind: ClassVar[str] = "solution"
    arrays: ClassVar[dict[str, Axes]] = SYSTEMS | {
        "errors": Axes("d", least=0),
        "steps": Axes("d", kind="i"),
    }
    pairs: ClassVar[tuple[str, ...]] = ("curvature",)
    sharded: ClassVar[dict[str, str]] = {"x": "d"}


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

    kind: ClassVar[str] = "influence"
    arrays: ClassVar[dict[str, Axes]] = SYSTEMS | {
        "scores": Axes("d", "N"),
        "errors": Axes("d", "N", least=0),
    }

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
            without Adam, or where the step is zero.
        update_norm: |u|, with the learning rate of that step (the present one where no step was
            made since the attach); None without Adam.
        gradient_norm: |g|.
        loss: Mean loss over the measured micro-batches.
        warm: Whether it started from an earlier measurement.
        num_matvecs: Products made.
        gradient_curvature_error: Bound on the error of `gradient_curvature`, of its product; None
            in records of versions without it.
        update_curvature_error: The same of `update_curvature`.
    """

    kind: ClassVar[str] = "sharpness"

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
    gradient_curvature_error: float | None = None
    update_curvature_error: float | None = None

    @property
    def along(self) -> dict[str, Estimate]:
        """Curvatures along the gradient and Adam's last step, as far as they were measured; errors
        that are not known are NaN.
        """
        pairs = {
            "gradient": (self.gradient_curvature, self.gradient_curvature_error),
            "update": (self.update_curvature, self.update_curvature_error),
        }
        return {
            name: Estimate(value, math.nan if error is None else error)
            for name, (value, error) in pairs.items()
            if value is not None
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianBlockCoupling(BlockCoupling, Measured):
    """The masked-probe test: how much of each block's part of Hv the other blocks make."""

    kind: ClassVar[str] = "block_coupling"
    arrays: ClassVar[dict[str, Axes]] = {
        "sizes": Axes("B"),
        "relative_errors": Axes("B", least=0),
        "cosines": Axes("B"),
        "noises": Axes("B", least=0),
        "null_relative_errors": Axes("B", least=0),
        "null_cosines": Axes("B"),
    }
    labels: ClassVar[dict[str, str]] = {"names": "B"}


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianOffBlockShare(OffBlockShare, Measured):
    """The share of the off-diagonal blocks in the Hessian's squared Frobenius norm."""

    kind: ClassVar[str] = "off_block_share"
