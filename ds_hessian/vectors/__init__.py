"""Sharded vectors: their layout, inner products, probes, and agreement between ranks."""

from ds_hessian.vectors.agreement import agree, checkpoint, gather_objects, together
from ds_hessian.vectors.layout import Box, Fragment, Layout
from ds_hessian.vectors.partition import Partition, by_layer, by_pattern
from ds_hessian.vectors.probes import ProbeKind, random_vector
from ds_hessian.vectors.space import VectorSpace

__all__ = [
    "Box",
    "Fragment",
    "Layout",
    "Partition",
    "ProbeKind",
    "VectorSpace",
    "agree",
    "by_layer",
    "by_pattern",
    "checkpoint",
    "gather_objects",
    "random_vector",
    "together",
]
