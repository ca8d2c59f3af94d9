"""Predictions of a measurement before it is made: memory on each rank, and time."""

from ds_hessian.planning.basis import (
    lanczos_options,
    memory_of_basis,
    memory_of_lanczos,
    storage_of,
)
from ds_hessian.planning.fit import (
    ELSEWHERE,
    FEWEST,
    Alternative,
    Needs,
    Planned,
    Settings,
    alternatives,
    free_memory,
    halves,
    needs_of,
    plan,
    refuse_too_large,
    shortage,
    way_out,
)
from ds_hessian.planning.share import Job, Share

__all__ = [
    "ELSEWHERE",
    "FEWEST",
    "Alternative",
    "Job",
    "Needs",
    "Planned",
    "Settings",
    "Share",
    "alternatives",
    "free_memory",
    "halves",
    "lanczos_options",
    "memory_of_basis",
    "memory_of_lanczos",
    "needs_of",
    "plan",
    "refuse_too_large",
    "shortage",
    "storage_of",
    "way_out",
]
