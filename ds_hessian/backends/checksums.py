"""Checksums of tensors that several ranks have whole, by which differences between them show."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE = 1 << 22
"""Elements whose checksum is computed at once, in fp64."""


def checksum(values: Tensor, start: int) -> tuple[float, float]:
    """Return a sum of a flat tensor with signs that depend on their places, and the 1-norm.

    Args:
        values: A part of a flattened tensor.
        start: Its place there.
    """
    check = size = 0.0
    for first in range(0, values.numel(), SLICE):
        part = values[first : first + SLICE].double()
        places = torch.arange(start + first, start + first + part.numel(), device=part.device)
        check += float(part @ places.double().cos())
        size += float(part.abs().sum())
    return check, size


def sign(rank: int, ranks: int) -> float:
    """Return the factor of a rank's checksum in a sum that is 0 where all ranks have the same."""
    return ranks - 1.0 if rank == 0 else -1.0
