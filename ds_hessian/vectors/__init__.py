"""Sharded vectors: their layout, inner products and probes."""

from ds_hessian.vectors.layout import Box, Fragment, Layout
from ds_hessian.vectors.partition import Partition, by_layer, by_pattern
from ds_hessian.vectors.probes import ProbeKind, random_vector, refuse_impossible_probe
from ds_hessian.vectors.space import VectorSpace
from ds_hessian.vectors.transport import collected, distribute, placed

__all__ = [
    "Box",
    "Fragment",
    "Layout",
    "Partition",
    "ProbeKind",
    "VectorSpace",
    "by_layer",
    "by_pattern",
    "collected",
    "distribute",
    "placed",
    "random_vector",
    "refuse_impossible_probe",
]
