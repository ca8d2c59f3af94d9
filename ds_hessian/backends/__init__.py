"""Backends: one folder for each host, and what they share. `protocol` is the contract."""

from ds_hessian.backends.protocol import (
    DEFAULT_PASSES,
    AdamState,
    Backend,
    Description,
    Objective,
    Passes,
    Precision,
    Session,
)

__all__ = [
    "DEFAULT_PASSES",
    "AdamState",
    "Backend",
    "Description",
    "Objective",
    "Passes",
    "Precision",
    "Session",
]
