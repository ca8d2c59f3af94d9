"""The stored vectors of a Krylov method: in which dtype, where, and what is made of them.

Rows may be rounded to bf16; a rounded row is no longer of unit length, so its length is kept beside
it and every coefficient counts for the unit vector along the row. How rows travel: see
`ds_hessian.krylov.rows`.

A rank that cannot read or write its file continues, so that the others do not wait for it, with NaN
as its partial sums until the next reduction, after which all ranks raise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian import ops
from ds_hessian.krylov.rows import DiskRows, HostRows, NearRows, Rows
from ds_hessian.memory import shown
from ds_hessian.ranks import agree, together
from ds_hessian.vectors import VectorSpace

Array = NDArray[np.float64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Storage:
    """Dtype and location of basis vectors.

    Attributes:
        dtype: `torch.float32`, or `torch.bfloat16` for half the memory at 1.5e-3 relative error of
            each vector, which the error bars of Ritz values include.
        tier: `accelerator`, with the parameters; `host`, in (pinned) memory; `disk`, in a file
            without a name in `folder`, which vanishes with the process, read and written in the
            background by DeepSpeed's asynchronous IO where it is built, else by threads.
        folder: Folder of the file; None for the system's temporary folder.
    """

    dtype: torch.dtype = torch.float32
    tier: Literal["accelerator", "host", "disk"] = "accelerator"
    folder: str | None = None

    def allocate(self, space: VectorSpace, capacity: int) -> Rows:
        """Allocate room for `capacity` vectors.

        Raises:
            MeasurementError: on the disk of some rank there is none.

        Collective on disk.
        """
        shape, device = (space.n_local, capacity, self.dtype), space.device
        if self.tier == "disk":
            with together(self.doing("making room for"), space.group, device):
                rows = DiskRows(*shape, device, self.folder)
            if space.rank == 0:
                size = shown(capacity * space.n_local * self.dtype.itemsize)
                logger.info("%s (%s a rank) %s", self.doing("keeping"), size, rows.way)
            return rows
        if self.tier == "host" and device.type != "cpu":
            return HostRows(*shape, device)
        return NearRows(*shape, device)

    def doing(self, what: str) -> str:
        """The activity on a basis on disk, as messages name it."""
        return f"{what} a basis on disk in {self.folder or 'the temporary folder'}"


class Basis:
    """`capacity` vectors in some storage, addressed by row.

    Args:
        space: Space of the vectors.
        capacity: Number of rows.
        storage: Dtype and location of the vectors.

    Attributes:
        rows: The vectors, as stored.
        inverse_squares: `(capacity,)` 1 / |row|^2; 1 for fp32 rows.
        rounding: `(capacity,)` what rounding changed in each row, relative to its length.

    Raises:
        MeasurementError: there is no room for them on some rank's disk; or, of the methods that
            reduce, some rank's file could not be read or written.
    """

    def __init__(self, space: VectorSpace, capacity: int, storage: Storage | None = None) -> None:
        self.space, self.storage = space, storage or Storage()
        self.rows = self.storage.allocate(space, capacity)
        self.exact = self.storage.dtype == torch.float32
        self.inverse_squares = np.ones(capacity)
        self.rounding = np.zeros(capacity)
        self._failure: OSError | None = None

    def store(self, row: int, w: Tensor, scale: float) -> Tensor:
        """Write `scale * w`, of unit length, into a row; w is lost.

        Returns partial sums `(2,)` which, reduced, go to `settle`; none `(0,)` for fp32 rows.
        """
        owned, target = self.space.n_owned, self.rows.view(row)
        if self.exact:
            ops.normalize_store(w, scale, w if target is None else target, None, owned)
            if target is None:
                self._try(lambda: self.rows.write(row, w))
            return torch.zeros(0, dtype=torch.float64)
        kept = torch.empty_like(w, dtype=self.storage.dtype) if target is None else target
        rounded = torch.empty_like(w)
        square = ops.normalize_store(w, scale, rounded, kept, owned)
        along = scale * ops.dots([(w, rounded)], owned)
        if target is None:
            self._try(lambda: self.rows.write(row, kept))
        return torch.cat([square, along])

    def replace(self, row: int, values: Tensor) -> None:
        """Overwrite a row as stored with `values` `(n_local,)` fp32, which the dtype can hold."""
        self._try(lambda: self.rows.write(row, values.to(self.space.device, self.storage.dtype)))

    def settle(self, row: int, sums: Tensor) -> None:
        """Apply the reduced sums of `store`."""
        if len(sums):
            square, along = sums.tolist()
            self.inverse_squares[row] = 1 / square
            self.rounding[row] = math.sqrt(max(0.0, 1 - 2 * along + square))

    def vector(self, row: int) -> Tensor:
        """Return a row as a vector, `(n_local,)` fp32, of the length it is stored in.

        It may share memory with the basis.
        """
        found: list[Tensor] = []
        self._try(lambda: found.append(self.rows.read(row).float()))
        # Where it cannot be read, until the ranks know: any vector but zero.
        return found[0] if found else torch.ones(self.space.n_local, device=self.space.device)

    def read(self, row: int) -> Tensor:
        """Return a row as it is stored, `(n_local,)`; it may share memory with the basis.

        Raises:
            OSError: this rank cannot read it, or an earlier one failed.
        """
        if self._failure is not None:
            raise self._failure
        return self.rows.read(row)

    def combine(self, coefficients: Array) -> Tensor:
        """Return `coefficients` `(k, count)` times the first `count` unit vectors: `(k, n_local)`
        fp32.

        NaN on a rank that could not read its rows; see `agree`.
        """
        k, count = coefficients.shape
        weights = torch.tensor(coefficients * np.sqrt(self.inverse_squares[:count]))
        out = torch.zeros(k, self.space.n_local, device=self.space.device)

        def form() -> None:
            for at, block in self.rows.blocks(count):
                ops.combine(block, weights, out[:, at])

        self._try(form)
        if self._failure is not None:
            out.fill_(math.nan)
        return out

    def rotate(self, coefficients: Array) -> None:
        """Replace the first k rows by `coefficients` `(k, count)` times the first `count` unit
        vectors.

        `coefficients` has orthonormal rows. Made in place, block by block. Collective for rounded
        rows: one all-reduce.
        """
        k, count = coefficients.shape
        weights = torch.tensor(coefficients * np.sqrt(self.inverse_squares[:count]))
        partials = torch.zeros(0 if self.exact else 2 * k, dtype=torch.float64)

        def rotate() -> None:
            for at, block in self.rows.blocks(count):
                made = torch.empty(k, block.shape[1], device=block.device)
                ops.combine(block, weights, made)
                self.rows.replace(at, made if self.exact else self._rounded(made, at, partials))

        self._try(rotate)
        totals = partials if self.exact else self.reduce(partials)
        for i in range(k):
            self.settle(i, totals[2 * i : 2 * i + 2])

    def _rounded(self, made: Tensor, at: slice, partials: Tensor) -> Tensor:
        """Return rows of some columns in the basis' dtype; adds their sums to those of `settle`."""
        owned = self._owned(at)
        kept = torch.empty_like(made, dtype=self.storage.dtype)
        rounded = torch.empty_like(made[0])
        for i, (w, row) in enumerate(zip(made, kept, strict=True)):
            square = ops.normalize_store(w, 1.0, rounded, row, owned)
            sums = torch.cat([square, ops.dots([(w, rounded)], owned)])
            partials[2 * i : 2 * i + 2] += sums.cpu()
        return kept

    def project(self, w: Tensor, count: int, first: int = 0) -> Tensor:
        """Return `(count - first,)` partial sums: dot products of the rows `first` to `count`, as
        stored, with w.
        """
        return self._sum(
            count, count - first, lambda at, q: ops.project(q, w[at], self._owned(at)), first
        )

    def subtract(self, w: Tensor, dots: Tensor) -> Tensor:
        """Compute `w <- w - projection`, in place, from the reduced `dots` of `project`.

        Returns `(1,)` partial `<w, w>`.
        """
        c = self._coefficients(dots, w)
        return self._sum(len(dots), 1, lambda at, q: ops.subtract(q, w[at], c, self._owned(at)))

    def subtract_project(self, w: Tensor, dots: Tensor) -> Tensor:
        """Apply `subtract`, then `project`, in one pass."""
        c = self._coefficients(dots, w)
        count = len(dots)
        return self._sum(
            count, count, lambda at, q: ops.subtract_project(q, w[at], c, self._owned(at))
        )

    def _sum(
        self, count: int, size: int, term: Callable[[slice, Tensor], Tensor], first: int = 0
    ) -> Tensor:
        """Return the sum of `term(columns, rows)`, `(size,)`, over the blocks of the rows `first`
        to `count`.
        """
        terms: list[Tensor] = []
        self._try(lambda: terms.extend(term(at, q) for at, q in self.rows.blocks(count, first)))
        if self._failure is not None:
            return torch.full((size,), math.nan, dtype=torch.float64, device=self.space.device)
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def _owned(self, at: slice) -> int:
        """Return how many of some columns this rank owns."""
        return min(max(self.space.n_owned - at.start, 0), at.stop - at.start)

    def orthogonalize(self, w: Tensor, count: int) -> tuple[Array, float]:
        """Make w orthogonal to the first rows by classical Gram-Schmidt, twice, in place.

        Returns:
            Its coefficients along the unit vectors `(count,)`, and the norm that is left.

        Collective: three all-reduces, one for an empty basis.
        """
        if count == 0:
            return np.zeros(0), self.space.norm(w)
        first = self.reduce(self.project(w, count))
        second = self.reduce(self.subtract_project(w, first))
        square = self.reduce(self.subtract(w, second))
        coefficients = (first + second).numpy() * np.sqrt(self.inverse_squares[:count])
        return coefficients, math.sqrt(float(square[0]))

    def reduce(self, partials: Tensor) -> Tensor:
        """Apply `VectorSpace.reduce` to partial sums of this basis, which every rank could form."""
        sums = self.space.reduce(partials)
        if not bool(torch.isfinite(sums).all()):
            self.agree()
        return sums

    def agree(self) -> None:
        """Return if every rank could read and write its file so far, else raise on all of them.

        Collective on disk.
        """
        if self.storage.tier == "disk":
            doing = self.storage.doing("keeping")
            agree(self._failure, doing, self.space.group, self.space.device)

    def _try(self, use: Callable[[], object]) -> None:
        """Use the rows, unless they have failed before; only a disk may fail on one rank alone."""
        if self.storage.tier != "disk":
            use()
            return
        try:
            if self._failure is None:
                use()
        except OSError as error:  # raised on all ranks by `agree`
            self._failure = error

    def _coefficients(self, dots: Tensor, w: Tensor) -> Tensor:
        return (dots * torch.from_numpy(self.inverse_squares[: len(dots)])).to(w.device)
