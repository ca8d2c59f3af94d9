"""Predictions of a measurement before it is made: memory on each rank, and time."""

from ds_hessian.planning.activations import activations
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
    precision_of,
    refuse_too_large,
    shortage,
    surely_fits,
    way_out,
)
from ds_hessian.planning.job import Job, Recompute
from ds_hessian.planning.machine import ACCELERATOR, CPU, Machine
from ds_hessian.planning.mesh import Mesh
from ds_hessian.planning.precision import ChosenPrecision, chosen, in_precision, in_words
from ds_hessian.planning.shape import Shape
from ds_hessian.planning.share import Share

__all__ = [
    "ACCELERATOR",
    "CPU",
    "ELSEWHERE",
    "FEWEST",
    "Alternative",
    "ChosenPrecision",
    "Job",
    "Machine",
    "Mesh",
    "Needs",
    "Planned",
    "Recompute",
    "Settings",
    "Shape",
    "Share",
    "activations",
    "alternatives",
    "chosen",
    "free_memory",
    "halves",
    "in_precision",
    "in_words",
    "lanczos_options",
    "memory_of_basis",
    "memory_of_lanczos",
    "needs_of",
    "plan",
    "precision_of",
    "refuse_too_large",
    "shortage",
    "storage_of",
    "surely_fits",
    "way_out",
]
