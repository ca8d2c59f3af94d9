"""Records of results, with error bars and provenance, and their files."""

from ds_hessian.records.alignment import Bounded, HessianAlignment
from ds_hessian.records.analyses import (
    HessianBlockCoupling,
    HessianEigenpairs,
    HessianInfluence,
    HessianOffBlockShare,
    HessianSharpness,
    HessianSolution,
    HessianTrace,
)
from ds_hessian.records.base import Measured, Record
from ds_hessian.records.block_spectra import HessianBlockSpectra
from ds_hessian.records.comparison import Comparison
from ds_hessian.records.curvatures import HessianCurvatures
from ds_hessian.records.decomposition import HessianDecomposition
from ds_hessian.records.density import Density
from ds_hessian.records.estimate import Estimate, SamplingErrors
from ds_hessian.records.kronecker import HessianKronecker
from ds_hessian.records.parts import density_of_parts
from ds_hessian.records.provenance import SCHEMA_VERSION, Cost, Optimizer, Provenance
from ds_hessian.records.spectrum import PICTURE, HessianSpectrum
from ds_hessian.records.sweep import DisplacementSweep
from ds_hessian.records.verdict import Check, SelfTest

Savable = Measured | HessianDecomposition
"""The records that say what they were measured on: those that `Hessian.save` takes."""

__all__ = [
    "PICTURE",
    "SCHEMA_VERSION",
    "Bounded",
    "Check",
    "Comparison",
    "Cost",
    "Density",
    "DisplacementSweep",
    "Estimate",
    "HessianAlignment",
    "HessianBlockCoupling",
    "HessianCurvatures",
    "HessianDecomposition",
    "HessianBlockSpectra",
    "HessianEigenpairs",
    "HessianInfluence",
    "HessianKronecker",
    "HessianOffBlockShare",
    "HessianSharpness",
    "HessianSolution",
    "HessianSpectrum",
    "HessianTrace",
    "Measured",
    "Optimizer",
    "Provenance",
    "Record",
    "SamplingErrors",
    "Savable",
    "SelfTest",
    "density_of_parts",
]
