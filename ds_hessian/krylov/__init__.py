"""Krylov methods: serial-looking code on operators and vector spaces."""

from ds_hessian.krylov.basis import Storage
from ds_hessian.krylov.blocks import BlockCoupling, OffBlockShare, block_coupling, off_block_share
from ds_hessian.krylov.eigenpairs import Eigenpairs, Which, eigenpairs
from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, lanczos, ritz_vectors
from ds_hessian.krylov.quadrature import (
    measure_bounds,
    negative_bounds,
    slq,
    trace_estimate,
)
from ds_hessian.krylov.records import LanczosRun, RitzDecomposition, ritz
from ds_hessian.krylov.sharpness import RitzPair, Subspace, refine
from ds_hessian.krylov.solves import DampedSystems, Solution, SolveMethod, solve
from ds_hessian.krylov.traces import TraceEstimate, hutch_plus_plus, hutchinson, xtrace

__all__ = [
    "BlockCoupling",
    "DampedSystems",
    "Eigenpairs",
    "LanczosOptions",
    "LanczosRun",
    "LanczosState",
    "OffBlockShare",
    "RitzDecomposition",
    "RitzPair",
    "Solution",
    "SolveMethod",
    "Storage",
    "Subspace",
    "TraceEstimate",
    "Which",
    "block_coupling",
    "eigenpairs",
    "hutch_plus_plus",
    "hutchinson",
    "lanczos",
    "measure_bounds",
    "negative_bounds",
    "off_block_share",
    "refine",
    "ritz",
    "ritz_vectors",
    "slq",
    "solve",
    "trace_estimate",
    "xtrace",
]
