"""The stored vectors of a Krylov method: in which dtype, where, and how they are streamed.

Rows may be rounded to bf16; a rounded row is no longer of unit length, so its length is kept beside
it and every coefficient counts for the unit vector along the row. Off the accelerator rows travel
in blocks, the next one on its way while the current one is used.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.vectors import VectorSpace

Array = NDArray[np.float64]

BLOCK_BYTES = 256 << 20
"""Of one block of rows on its way to the accelerator; two are there at a time."""


def rotation_bytes(formed: int, travelling: int, dtype: torch.dtype) -> int:
    """Bytes of one coordinate in `Basis.rotate`: of the rows formed, one of them being rounded, and
    of those on their way.
    """
    rounding = 0 if dtype == torch.float32 else 4 + dtype.itemsize
    return 4 * formed + rounding + dtype.itemsize * travelling


@dataclass(frozen=True)
class Storage:
    """Where and how basis vectors are kept.

    Attributes:
        dtype: `torch.float32`, or `torch.bfloat16` for half the memory at 1.5e-3 relative error of
            each vector, which the error bars of Ritz values include.
        place: `accelerator`, with the parameters; `host`, in (pinned) memory; `disk`, in a file
            without a name in `folder`, which vanishes with the process.
        folder: Of the file; None for the system's temporary folder.
    """

    dtype: torch.dtype = torch.float32
    place: Literal["accelerator", "host", "disk"] = "accelerator"
    folder: str | None = None

    def allocate(self, space: VectorSpace, rows: int) -> Tensor:
        """Room for `rows` vectors, `(rows, n_local)`."""
        shape = (rows, space.n_local)
        if self.place == "accelerator":
            return torch.zeros(shape, dtype=self.dtype, device=space.device)
        if self.place == "host":
            return torch.zeros(shape, dtype=self.dtype, pin_memory=space.device.type == "cuda")
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="ds_hessian_basis_") as file:
            size = max(math.prod(shape), 1)
            file.truncate(size * self.dtype.itemsize)
            mapped = torch.from_file(file.name, shared=True, size=size, dtype=self.dtype)
        return mapped[: math.prod(shape)].view(shape)


class Basis:
    """`capacity` vectors in some storage, addressed by row.

    Args:
        space: Of the vectors.
        capacity: Number of rows.
        storage: See `Storage`.

    Attributes:
        inverse_squares: `(capacity,)` 1 / |row|^2; 1 for fp32 rows.
        rounding: `(capacity,)` what rounding changed in each row, relative to its length.
    """

    def __init__(self, space: VectorSpace, capacity: int, storage: Storage | None = None) -> None:
        self.space, self.storage = space, storage or Storage()
        self.rows = self.storage.allocate(space, capacity)
        self.exact = self.storage.dtype == torch.float32
        self.inverse_squares = np.ones(capacity)
        self.rounding = np.zeros(capacity)

    def store(self, row: int, w: Tensor, scale: float) -> Tensor:
        """Write `scale * w`, of unit length, into a row; w is lost.

        Returns partial sums `(2,)` which, reduced, go to `settle`; none `(0,)` for fp32 rows.
        """
        owned, target = self.space.n_owned, self.rows[row]
        here = target.device == self.space.device
        if self.exact:
            ops.normalize_store(w, scale, target if here else w, None, owned)
            if not here:
                target.copy_(w)
            return torch.zeros(0, dtype=torch.float64)
        kept = target if here else torch.empty_like(target, device=self.space.device)
        rounded = torch.empty_like(w)
        square = ops.normalize_store(w, scale, rounded, kept, owned)
        along = scale * ops.dots([(w, rounded)], owned)
        if not here:
            target.copy_(kept)
        return torch.cat([square, along])

    def settle(self, row: int, sums: Tensor) -> None:
        """Take in the reduced sums of `store`."""
        if len(sums):
            square, along = sums.tolist()
            self.inverse_squares[row] = 1 / square
            self.rounding[row] = math.sqrt(max(0.0, 1 - 2 * along + square))

    def vector(self, row: int) -> Tensor:
        """A row as a vector on the accelerator, `(n_local,)` fp32, of the length it is stored in.

        It may share memory with the basis.
        """
        return self.rows[row].to(self.space.device, torch.float32)

    def blocks(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """The first rows, on the accelerator, in blocks."""
        if self.rows.device == self.space.device:
            yield slice(0, count), self.rows[:count]
            return
        size = max(1, BLOCK_BYTES // max(1, self.space.n_local * self.storage.dtype.itemsize))
        parts = [slice(a, min(a + size, count)) for a in range(0, count, size)]
        ahead = [self.rows[p].to(self.space.device, non_blocking=True) for p in parts[:1]]
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            block = ahead.pop()
            if following is not None:
                ahead.append(self.rows[following].to(self.space.device, non_blocking=True))
            yield part, block

    def combine(self, coefficients: Array) -> Tensor:
        """`coefficients` `(k, count)` times the first `count` unit vectors: `(k, n_local)` fp32."""
        k, count = coefficients.shape
        weights = coefficients * np.sqrt(self.inverse_squares[:count])
        out = torch.zeros(k, self.space.n_local, device=self.space.device)
        part = out  # the first block's, and where the basis is near, the only one's
        for at, block in self.blocks(count):
            if at.start > 0 and part is out:
                part = torch.empty_like(out)
            ops.combine(block, torch.tensor(weights[:, at]), part)
            if part is not out:
                out += part
        return out

    def rotate(self, coefficients: Array) -> None:
        """The first k rows become `coefficients` `(k, count)` times the first `count` unit vectors.

        `coefficients` has orthonormal rows. Made in place, some coordinates at a time, in at most
        `BLOCK_BYTES` beside the basis. Collective for rounded rows: one all-reduce.
        """
        k, count = coefficients.shape
        space, near = self.space, self.rows.device == self.space.device
        weights = torch.tensor(coefficients * np.sqrt(self.inverse_squares[:count]))
        width = max(1, BLOCK_BYTES // rotation_bytes(k, 0 if near else count, self.storage.dtype))
        partials = torch.zeros(0 if self.exact else 2 * k, dtype=torch.float64)
        for start in range(0, space.n_local, width):
            at = slice(start, min(start + width, space.n_local))
            block = self.rows[:count, at].to(space.device)
            made = torch.empty(k, at.stop - start, device=space.device)
            ops.combine(block, weights, made)
            if self.exact:
                self.rows[:k, at] = made
                continue
            owned = min(max(space.n_owned - start, 0), len(made[0]))
            kept = torch.empty_like(made[0], dtype=self.storage.dtype)
            rounded = torch.empty_like(made[0])
            for i, w in enumerate(made):
                square = ops.normalize_store(w, 1.0, rounded, kept, owned)
                sums = torch.cat([square, ops.dots([(w, rounded)], owned)])
                partials[2 * i : 2 * i + 2] += sums.cpu()
                self.rows[i, at] = kept.to(self.rows.device)
        totals = partials if self.exact else space.reduce(partials)
        for i in range(k):
            self.settle(i, totals[2 * i : 2 * i + 2])

    def project(self, w: Tensor, count: int) -> Tensor:
        """`(count,)` partial sums: dot products of the first rows, as stored, with w."""
        owned = self.space.n_owned
        return torch.cat([ops.project(block, w, owned)[:-1] for _, block in self.blocks(count)])

    def subtract(self, w: Tensor, dots: Tensor) -> Tensor:
        """`w <- w - projection`, in place, from the reduced `dots` of `project`.

        Returns `(1,)` partial `<w, w>`.
        """
        c = self._coefficients(dots, w)
        for at, block in self.blocks(len(dots)):
            square = ops.subtract(block, w, c[at], self.space.n_owned)
        return square

    def subtract_project(self, w: Tensor, dots: Tensor) -> Tensor:
        """`subtract`, then `project`; in one pass where the rows are on the accelerator."""
        if self.rows.device == w.device:
            c, rows = self._coefficients(dots, w), self.rows[: len(dots)]
            return ops.subtract_project(rows, w, c, self.space.n_owned)[:-1]
        self.subtract(w, dots)
        return self.project(w, len(dots))

    def orthogonalize(self, w: Tensor, count: int) -> tuple[Array, float]:
        """Make w orthogonal to the first rows by classical Gram-Schmidt, twice, in place.

        Returns:
            Its coefficients along the unit vectors `(count,)`, and the norm that is left.

        Collective: three all-reduces, one for an empty basis.
        """
        if count == 0:
            return np.zeros(0), self.space.norm(w)
        first = self.space.reduce(self.project(w, count))
        second = self.space.reduce(self.subtract_project(w, first))
        square = self.space.reduce(self.subtract(w, second))
        coefficients = (first + second).numpy() * np.sqrt(self.inverse_squares[:count])
        return coefficients, math.sqrt(float(square[0]))

    def _coefficients(self, dots: Tensor, w: Tensor) -> Tensor:
        return (dots * torch.from_numpy(self.inverse_squares[: len(dots)])).to(w.device)
