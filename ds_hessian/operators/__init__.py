"""Operators: the Hessian as a matrix that is only ever multiplied with vectors."""

from ds_hessian.operators.curvatures import curvature
from ds_hessian.operators.displacement.schemes import SCHEMES, Scheme, SchemeName
from ds_hessian.operators.evaluations import Evaluations, expected_evaluations
from ds_hessian.operators.finite_difference import FiniteDifferenceHessian
from ds_hessian.operators.memory import memory_of_operator, memory_of_sweep
from ds_hessian.operators.outputs.gauss_newton import GaussNewton
from ds_hessian.operators.outputs.planned import Outputs, outputs_of, seen_of
from ds_hessian.operators.protocol import (
    Curvature,
    LinearOperator,
    OperatorCost,
    Product,
    Taught,
    Watched,
)
from ds_hessian.operators.sweep import SweepPoint, default_range, sweep
from ds_hessian.operators.views import Congruent, Embedded, Metric, Scale, scaled, scaled_in_place

__all__ = [
    "SCHEMES",
    "Congruent",
    "Curvature",
    "Embedded",
    "Evaluations",
    "FiniteDifferenceHessian",
    "GaussNewton",
    "LinearOperator",
    "Metric",
    "OperatorCost",
    "Outputs",
    "Product",
    "Scale",
    "Scheme",
    "SchemeName",
    "SweepPoint",
    "Taught",
    "Watched",
    "curvature",
    "default_range",
    "expected_evaluations",
    "memory_of_operator",
    "memory_of_sweep",
    "outputs_of",
    "seen_of",
    "scaled",
    "scaled_in_place",
    "sweep",
]
