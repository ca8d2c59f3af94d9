"""Sharded vectors: their layout, inner products, probes, and agreement between ranks."""

from ds_hessian.vectors.agreement import agree, together
from ds_hessian.vectors.layout import Fragment, Layout
from ds_hessian.vectors.probes import ProbeKind, random_vector
from ds_hessian.vectors.space import VectorSpace

__all__ = [
    "Fragment",
    "Layout",
    "ProbeKind",
    "VectorSpace",
    "agree",
    "random_vector",
    "together",
]
