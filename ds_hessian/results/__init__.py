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
from ds_hessian.results.comparison import Comparison
from ds_hessian.results.density import Density
from ds_hessian.results.estimate import Estimate, SamplingErrors
from ds_hessian.results.monitor import figures_of, monitor_events, write_tensorboard, write_wandb
from ds_hessian.results.parts import density_of_parts
from ds_hessian.results.progress import SpectrumProgress
from ds_hessian.results.provenance import SCHEMA_VERSION, Cost, Provenance
from ds_hessian.results.spectrum import PICTURE, HessianSpectrum
from ds_hessian.results.sweep import DisplacementSweep
from ds_hessian.results.verdict import Check, SelfTest

__all__ = [
    "PICTURE",
    "SCHEMA_VERSION",
    "Check",
    "Comparison",
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
    "SamplingErrors",
    "SelfTest",
    "SpectrumProgress",
    "density_of_parts",
    "figures_of",
    "monitor_events",
    "write_tensorboard",
    "write_wandb",
]
