"""What is held of choices and of the sides of kinks: indices in few bytes, booleans in one bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_hessian.backends.hooks import shown, unseen

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
_BYTE = 8


def compact(indices: Tensor, most: int) -> Tensor:
    """Return indices below `most` in the narrowest type that has them."""
    fitting = [d for d in _INTEGERS if most - 1 <= torch.iinfo(d).max]
    return indices.to(fitting[0])


class Bits:
    """The elements of a boolean tensor, one bit each; none where all are alike.

    Args:
        mask: A boolean tensor that overlaps nothing, in whatever order of its dims.

    Attributes:
        alike: What all elements are; None where they differ.
    """

    def __init__(self, mask: Tensor) -> None:
        self.shape, self._stride, self.device = mask.shape, mask.stride(), mask.device
        true = int(torch.count_nonzero(mask))
        self.alike: bool | None = None
        self._packed: Tensor | None = None
        if true in (0, mask.numel()):
            self.alike = true > 0
            return
        flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
        over = -mask.numel() % _BYTE
        if over:
            flat = torch.nn.functional.pad(flat, (0, over))
        rows = flat.view(_BYTE, -1)  # far apart: whole rows are faster than neighbours
        packed = rows[0].clone()
        for place in range(1, _BYTE):
            packed |= rows[place] << place
        self._packed = packed

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return 0 if self._packed is None else self._packed.nbytes

    @property
    def none(self) -> bool:
        """Whether no element is true."""
        return self.alike is False

    def bytes(self) -> Tensor:
        """Return ones and zeros, uint8, in the order of the dims in which they were given."""
        if self._packed is None:
            alike = int(bool(self.alike))
            return torch.full(self.shape, alike, dtype=torch.uint8, device=self.device)
        places = torch.arange(_BYTE, dtype=torch.uint8, device=self.device)
        flat = (self._packed.unsqueeze(0) >> places.unsqueeze(1)).bitwise_and_(1).view(-1)
        return flat.as_strided(self.shape, self._stride)

    def part(self, place: int, count: int) -> Tensor:
        """Return the `place`-th eighth of the ones and zeros, `(count,)` uint8, in the order in
        which the elements were stored.
        """
        if self._packed is None:
            alike = int(bool(self.alike))
            return torch.full((count,), alike, dtype=torch.uint8, device=self.device)
        return (self._packed[:count] >> place).bitwise_and_(1)

    def mask(self) -> Tensor:
        """Return the boolean tensor."""
        with unseen():
            made = self.bytes().view(torch.bool)
        return shown(made)

    def differs(self, mask: Tensor) -> Tensor:
        """Return where another mask is not this one; it may be overwritten."""
        if self.alike is not None:
            return mask.logical_not_() if self.alike else mask
        return mask.logical_xor_(self.mask())

    def stored_as(self, x: Tensor) -> bool:
        """Return whether the elements of a tensor are stored in the order of these."""
        return x.shape == self.shape and x.stride() == self._stride


def eighths(count: int) -> list[slice]:
    """Return the parts of so many elements, as they lie in memory, of `Bits.part`."""
    size = -(-count // _BYTE)
    return [slice(k * size, min((k + 1) * size, count)) for k in range(_BYTE)]


Held = Bits | Tensor
"""Booleans, or indices."""


def held_of(found: Tensor, most: int) -> Held:
    """Return what is to be kept of a mask, or of indices below `most`."""
    return Bits(found) if found.dtype == torch.bool else compact(found, most)
