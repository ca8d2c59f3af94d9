"""Which coordinates of the model a rank stores, and where they lie in its vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fragment:
    """A contiguous run of coordinates of one parameter, as one rank stores it.

    Attributes:
        name: The parameter's checkpoint name.
        start: Flat index, in the *unsharded* parameter, of the first coordinate.
        numel: Number of coordinates.
        shape: Shape of the unsharded parameter.
        owned: False on all but one of the ranks that hold a replica of these coordinates.
    """

    name: str
    start: int
    numel: int
    shape: torch.Size
    owned: bool = True


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
        """Each fragment with the part of a vector that holds it."""
        offset = 0
        for fragment in self.fragments:
            yield fragment, slice(offset, offset + fragment.numel)
            offset += fragment.numel
