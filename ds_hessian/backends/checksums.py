"""Checksums of tensors that several ranks have whole, by which differences between them show."""

from __future__ import annotations

import torch
from torch import Tensor

SLICE = 1 << 22
"""Elements whose checksum is computed at once, in fp64."""


def checksums(values: Tensor, start: int) -> tuple[float, float, float]:
    """Return two sums of a flat tensor with weights that depend on their places, and its 2-norm.

    Of tensors that have nothing to do with each other, sums differ by about the norm, whatever the
    length: two that agree to a share s of it by chance have a probability of about s^2.

    Args:
        values: A part of a flattened tensor.
        start: Its place there.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=values.device)
    for first in range(0, values.numel(), SLICE):
        part = values[first : first + SLICE].double()
        places = torch.arange(start + first, start + first + part.numel(), device=part.device)
        turns = places.double()
        sums += torch.stack([part @ turns.cos(), part @ turns.sin(), part @ part])
    along, across, square = sums.tolist()
    return along, across, float(square**0.5)


def sign(rank: int, ranks: int) -> float:
    """Return the factor of a rank's checksums in sums that are 0 where all ranks have the same."""
    return ranks - 1.0 if rank == 0 else -1.0
