"""Records of single analyses: what the Krylov method found, what it cost, what it was measured on.

Not converging is data in them. Small arrays are the same on every rank; vectors stay sharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_hessian.krylov import BlockCoupling, Eigenpairs, OffBlockShare, Solution, TraceEstimate
from ds_hessian.krylov.records import Array
from ds_hessian.results.provenance import Cost, Provenance


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What every record of an analysis says.

    Attributes:
        cost: What it took.
        provenance: What it was measured on.
    """

    cost: Cost
    provenance: Provenance


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianEigenpairs(Eigenpairs, Measured):
    """Extreme eigenpairs of the Hessian; see `ds_hessian.krylov.Eigenpairs`.

    Attributes:
        concentrations: {parameter name: `(k,)`} share of each eigenvector's squared norm that lies
            in the parameter; sums to 1 over the parameters.
    """

    concentrations: Mapping[str, Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianTrace(TraceEstimate, Measured):
    """Trace of the Hessian; see `ds_hessian.krylov.TraceEstimate`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianSolution(Solution, Measured):
    """Solutions of (H + damping I) x = b; see `ds_hessian.krylov.Solution`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianBlockCoupling(BlockCoupling, Measured):
    """The masked-probe test of the Hessian; see `ds_hessian.krylov.BlockCoupling`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HessianOffBlockShare(OffBlockShare, Measured):
    """Off-block share of the Hessian's norm; see `ds_hessian.krylov.OffBlockShare`."""
