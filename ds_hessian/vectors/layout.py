"""The coordinates of the model that a rank stores, and their positions in its vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A block of a parameter, as tensor or expert parallelism cuts it.

    Attributes:
        offset: Index of the block's first element in each dim of the unsharded parameter.
        shape: Shape of the block.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fragment:
    """A run of coordinates of one parameter, as one rank stores it.

    Attributes:
        name: The parameter's checkpoint name.
        start: Flat index of the first coordinate in the box.
        numel: Number of coordinates, contiguous in the box.
        shape: Shape of the unsharded parameter.
        owned: False on all but one of the ranks that hold a replica of these coordinates.
        box: The block of the parameter that the run is in; None for the whole parameter.
    """

    name: str
    start: int
    numel: int
    shape: torch.Size
    owned: bool = True
    box: Box | None = None

    @classmethod
    def in_block(
        cls, name: str, start: int, numel: int, shape: torch.Size, box: Box, owned: bool = True
    ) -> Fragment:
        """Make a run in a block of the parameter; without a box if it is a run of the parameter."""
        if box.shape[1:] == shape[1:]:  # rows: one after the other there too
            first = box.offset[0] * shape[1:].numel() if shape else 0
            return cls(name, first + start, numel, shape, owned)
        return cls(name, start, numel, shape, owned, box)

    def index(
        self, first: int = 0, last: int | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return flat int64 indices, in the unsharded parameter, of coordinates `first` to `last`.

        They do not depend on the parameter's first dim, so a vocabulary's padding changes none.
        """
        last = self.numel if last is None else last
        rest = torch.arange(self.start + first, self.start + last, device=device)
        if self.box is None:
            return rest
        index, inner = torch.zeros_like(rest), math.prod(self.box.shape)
        for offset, block, whole in zip(self.box.offset, self.box.shape, self.shape, strict=True):
            inner //= block
            index = index * whole + offset + rest // inner
            rest = rest % inner
        return index

    def place(self, device: torch.device | str = "cpu") -> slice | Tensor:
        """Return an index of all coordinates in the flattened whole parameter: a slice, or where
        these are not one run in it, `index`.
        """
        if self.box is None:
            return slice(self.start, self.start + self.numel)
        return self.index(device=device)


class Layout:
    """The order of a rank's fragments in its vectors: owned ones first, no padding.

    A vector is a flat fp32 tensor of `n_local` elements; its first `n_owned` are the coordinates
    that count in global sums (see `ds_hessian.vectors.space`).
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.order = sorted(range(len(fragments)), key=lambda i: not fragments[i].owned)
        """Position i of the layout holds `fragments[order[i]]` of the constructor's argument."""
        self.fragments = [fragments[i] for i in self.order]
        self.n_local = sum(f.numel for f in fragments)
        self.n_owned = sum(f.numel for f in fragments if f.owned)

    def __iter__(self) -> Iterator[tuple[Fragment, slice]]:
        """Yield each fragment with the part of a vector that holds it."""
        offset = 0
        for fragment in self.fragments:
            yield fragment, slice(offset, offset + fragment.numel)
            offset += fragment.numel
