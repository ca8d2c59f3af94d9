"""Krylov methods: serial-looking code on operators and vector spaces."""

from ds_hessian.krylov.basis import Storage
from ds_hessian.krylov.lanczos import LanczosOptions, LanczosState, lanczos
from ds_hessian.krylov.quadrature import slq, trace_estimate
from ds_hessian.krylov.records import LanczosRun, RitzDecomposition, ritz

__all__ = [
    "LanczosOptions",
    "LanczosRun",
    "LanczosState",
    "RitzDecomposition",
    "Storage",
    "lanczos",
    "ritz",
    "slq",
    "trace_estimate",
]
