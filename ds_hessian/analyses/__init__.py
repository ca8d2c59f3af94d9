"""The analyses of a Hessian: one file for each."""

from ds_hessian.analyses.alignment import Alignment
from ds_hessian.analyses.base import Analysis, Blocks, decided, measure, plan_here, share_of
from ds_hessian.analyses.block_spectra import BlockSpectra
from ds_hessian.analyses.blocks import BlockCoupling, OffBlockShare
from ds_hessian.analyses.curvatures import Curvatures
from ds_hessian.analyses.decomposition import Decomposition
from ds_hessian.analyses.eigenpairs import Eigenpairs
from ds_hessian.analyses.influence import Influence
from ds_hessian.analyses.kronecker import Kronecker
from ds_hessian.analyses.measurement import Lessons, Measurement, Subject, with_fallback
from ds_hessian.analyses.registry import ANALYSES, analysis_of, plan_job
from ds_hessian.analyses.self_test import SelfTest
from ds_hessian.analyses.sharpness import Followed, Sharpness
from ds_hessian.analyses.solve import Solve
from ds_hessian.analyses.spectrum import Spectrum
from ds_hessian.analyses.sweep import Sweep
from ds_hessian.analyses.trace import Trace

__all__ = [
    "ANALYSES",
    "Alignment",
    "Analysis",
    "BlockCoupling",
    "BlockSpectra",
    "Blocks",
    "Curvatures",
    "Decomposition",
    "Eigenpairs",
    "Followed",
    "Influence",
    "Kronecker",
    "Lessons",
    "Measurement",
    "OffBlockShare",
    "SelfTest",
    "Sharpness",
    "Solve",
    "Spectrum",
    "Subject",
    "Sweep",
    "Trace",
    "analysis_of",
    "decided",
    "measure",
    "plan_job",
    "share_of",
    "plan_here",
    "with_fallback",
]
