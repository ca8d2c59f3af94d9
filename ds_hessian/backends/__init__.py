"""Backends: one folder for each host, and what they share. `protocol` is the contract."""

from ds_hessian.backends.protocol import (
    AdamState,
    Backend,
    Description,
    Objective,
    Passes,
    Precision,
    Session,
)

__all__ = [
    "AdamState",
    "Backend",
    "Description",
    "Objective",
    "Passes",
    "Precision",
    "Session",
]
