"""Results: records with error bars and provenance, their files, pictures and monitor events."""

from ds_hessian.results.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.results.density import Density
from ds_hessian.results.estimate import Estimate
from ds_hessian.results.monitor import monitor_events
from ds_hessian.results.progress import SpectrumProgress
from ds_hessian.results.provenance import SCHEMA_VERSION, Cost, Provenance
from ds_hessian.results.spectrum import HessianSpectrum
from ds_hessian.results.sweep import DisplacementSweep
from ds_hessian.results.verdict import Check, SelfTest

__all__ = [
    "SCHEMA_VERSION",
    "Check",
    "Cost",
    "Density",
    "DisplacementSweep",
    "Estimate",
    "HessianBlockCoupling",
    "HessianEigenpairs",
    "HessianInfluence",
    "HessianOffBlockShare",
    "HessianSharpness",
    "HessianSolution",
    "HessianSpectrum",
    "HessianTrace",
    "Provenance",
    "SelfTest",
    "SpectrumProgress",
    "monitor_events",
]
