"""Kronecker-factored curvatures: what optimizers use in place of the Hessian of a weight."""

from ds_hessian.operators.kronecker.factors import (
    KINDS,
    Factors,
    Kind,
    Settings,
    estimate,
)
from ds_hessian.operators.kronecker.forms import Eigenform
from ds_hessian.operators.kronecker.kept import Adapter, KeptFactors
from ds_hessian.operators.kronecker.layers import Layer, find_layers, foreseen_shapes
from ds_hessian.operators.kronecker.metric import KroneckerMetric
from ds_hessian.operators.kronecker.planned import memory_of_factors, owners

__all__ = [
    "KINDS",
    "Adapter",
    "Eigenform",
    "Factors",
    "KeptFactors",
    "Kind",
    "KroneckerMetric",
    "Layer",
    "Settings",
    "estimate",
    "find_layers",
    "foreseen_shapes",
    "memory_of_factors",
    "owners",
]
