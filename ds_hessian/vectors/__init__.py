"""Sharded vectors: their layout, inner products, probes, and agreement between ranks."""

from ds_hessian.vectors.agreement import checkpoint, together
from ds_hessian.vectors.layout import Fragment, Layout
from ds_hessian.vectors.partition import Partition, by_layer, by_pattern
from ds_hessian.vectors.probes import ProbeKind, random_vector
from ds_hessian.vectors.space import VectorSpace

__all__ = [
    "Fragment",
    "Layout",
    "Partition",
    "ProbeKind",
    "VectorSpace",
    "by_layer",
    "by_pattern",
    "checkpoint",
    "random_vector",
    "together",
]
