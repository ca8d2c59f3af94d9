"""Fused vector kernels of this rank's shard; see `ds_hessian.ops.dispatch` for the contracts."""

from ds_hessian.ops.dispatch import (
    Shards,
    add_square,
    combine,
    curvature_ratio,
    difference,
    displace,
    dots,
    fill_gaussian,
    fill_rademacher,
    normalize_store,
    project,
    subtract,
    subtract_project,
)
from ds_hessian.ops.native import implementation, prepare
from ds_hessian.ops.random import gaussian, rademacher
from ds_hessian.ops.report import report

__all__ = [
    "Shards",
    "add_square",
    "combine",
    "curvature_ratio",
    "difference",
    "displace",
    "dots",
    "fill_gaussian",
    "fill_rademacher",
    "gaussian",
    "implementation",
    "normalize_store",
    "prepare",
    "project",
    "rademacher",
    "report",
    "subtract",
    "subtract_project",
]
