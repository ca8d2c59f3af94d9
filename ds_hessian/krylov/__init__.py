"""Krylov methods: serial-looking code on operators and vector spaces."""

from ds_hessian.krylov.lanczos import LanczosState, lanczos, top_vector
from ds_hessian.krylov.quadrature import slq, trace_estimate
from ds_hessian.krylov.records import LanczosRun, RitzDecomposition, ritz

__all__ = [
    "LanczosRun",
    "LanczosState",
    "RitzDecomposition",
    "lanczos",
    "ritz",
    "slq",
    "top_vector",
    "trace_estimate",
]
