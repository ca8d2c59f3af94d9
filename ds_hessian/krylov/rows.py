"""The storage of a basis' rows: near (where vectors are) or far (from where they are copied).

Wherever they are stored, rows are used in blocks of columns, all rows of a block together, which
are the same for every storage: so are the bits of the results. Far rows travel in these blocks, in
which they are also stored, each in one piece, and the next block is on its way while one is used:

    (blocks, capacity, width)       pinned host memory; or a file, through two buffers of a block
                                    and one of a row, which is written while the run continues
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ds_hessian.ops.transfers import BackgroundFile

logger = logging.getLogger(__name__)

BLOCK_BYTES = 256 << 20
"""Bytes of one block of all rows; two are there at a time, where rows are copied."""

COLUMNS = 4096
"""Widths of blocks are multiples: of what kernels take at a time (csrc/cpu/parallel.h), and of what
direct IO asks for, 512 bytes."""

STAMPS = 32749
"""A prime, so that rows which are written in turn come to the same one rarely."""


def division(n_local: int, capacity: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of blocks of the columns, and their width; the last one may have less in
    use.
    """
    whole = max(1, math.ceil(n_local / COLUMNS))
    most = max(1, BLOCK_BYTES // (max(capacity, 1) * dtype.itemsize * COLUMNS))
    number = math.ceil(whole / most)
    return number, math.ceil(whole / number) * COLUMNS


def block_bytes(n_local: int, capacity: int, dtype: torch.dtype) -> int:
    """Return the bytes of a block of all rows, as it is copied."""
    return capacity * division(n_local, capacity, dtype)[1] * dtype.itemsize


class Rows(Protocol):
    """`capacity` rows of `n_local` elements of one dtype.

    Attributes:
        capacity: Number of rows.
    """

    capacity: int

    def view(self, row: int) -> Tensor | None:
        """Return the row itself, `(n_local,)`, where rows are near; None where they are far."""
        ...

    def read(self, row: int) -> Tensor:
        """Return a row, `(n_local,)`, on the vectors' device; the row itself if rows are near."""
        ...

    def write(self, row: int, values: Tensor) -> None:
        """Write `values` `(n_local,)`, of the dtype of the rows, into a row."""
        ...

    def blocks(self, count: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield columns, and the rows `first` to `count` of them on the vectors' device; valid
        until the next block is requested.
        """
        ...

    def replace(self, columns: slice, values: Tensor) -> None:
        """Write `values` `(k, columns)` over the first rows of the latest block of `blocks`."""
        ...


class NearRows:
    """Rows on the device of the vectors.

    Args:
        n_local: Elements of a row.
        capacity: Rows.
        dtype: Dtype of the rows.
        device: Device of the rows.
    """

    def __init__(
        self, n_local: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity, self._n_local = capacity, n_local
        self._width = division(n_local, capacity, dtype)[1]
        # Rows that begin at multiples of 16 bytes, as those of blocks do, take the same kernels.
        pitch = math.ceil(n_local * dtype.itemsize / 16) * 16 // dtype.itemsize
        self._rows = torch.zeros(capacity, pitch, dtype=dtype, device=device)[:, :n_local]

    def view(self, row: int) -> Tensor | None:
        """Return the row itself."""
        return self._rows[row]

    def read(self, row: int) -> Tensor:
        """Return the row itself, without a copy."""
        return self._rows[row]

    def write(self, row: int, values: Tensor) -> None:
        """Copy the values into the row."""
        self._rows[row] = values

    def blocks(self, count: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield views of the rows, without a copy."""
        for columns in _columns(self._n_local, self._width):
            yield columns, self._rows[first:count, columns]

    def replace(self, columns: slice, values: Tensor) -> None:
        """Copy the values over the first rows."""
        self._rows[: len(values), columns] = values


class HostRows:
    """Rows of an accelerator's vectors in pinned host memory.

    Args:
        n_local: Elements of a row.
        capacity: Rows.
        dtype: Dtype of the rows.
        device: Device of the vectors.
    """

    def __init__(
        self, n_local: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity, self._n_local, self._device = capacity, n_local, device
        number, self._width = division(n_local, capacity, dtype)
        self._rows = torch.zeros(number, capacity, self._width, dtype=dtype, pin_memory=True)

    def view(self, row: int) -> Tensor | None:
        """Return None: the device cannot use these rows without a copy."""
        return None

    def read(self, row: int) -> Tensor:
        """Return a copy of the row on the device."""
        out = torch.empty(self._n_local, dtype=self._rows.dtype, device=self._device)
        for i, columns in enumerate(_columns(self._n_local, self._width)):
            out[columns].copy_(self._rows[i, row, : columns.stop - columns.start])
        return out

    def write(self, row: int, values: Tensor) -> None:
        """Copy the values to the host, block by block."""
        for i, columns in enumerate(_columns(self._n_local, self._width)):
            self._rows[i, row, : columns.stop - columns.start].copy_(values[columns])

    def blocks(self, count: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield copies on the device; the next block is copied while one is used."""
        parts = _columns(self._n_local, self._width)
        ahead = self._rows[0, first:count].to(self._device, non_blocking=True)
        for i, columns in enumerate(parts):
            block = ahead
            if i + 1 < len(parts):
                ahead = self._rows[i + 1, first:count].to(self._device, non_blocking=True)
            yield columns, block[:, : columns.stop - columns.start]

    def replace(self, columns: slice, values: Tensor) -> None:
        """Copy the values to the host, over the first rows of the block."""
        part = self._rows[columns.start // self._width]
        part[: len(values), : columns.stop - columns.start].copy_(values)


class DiskRows:
    """Rows in a file.

    Args:
        n_local: Elements of a row.
        capacity: Rows.
        dtype: Dtype of the rows.
        device: Device of the vectors.
        folder: Folder of the file; None for the system's temporary folder.

    Raises:
        OSError: there is no room for the file; or, of the methods, it could not be read or written.
    """

    def __init__(
        self,
        n_local: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: str | None,
    ) -> None:
        self.capacity, self._n_local, self._device, self._dtype = capacity, n_local, device, dtype
        number, self._width = division(n_local, capacity, dtype)
        segment = self._segment = self._width * dtype.itemsize
        sizes = [*[capacity * segment] * min(number, 2), number * segment]
        unit, pinned = COLUMNS * dtype.itemsize, device.type != "cpu"
        self._file = BackgroundFile(folder, number * capacity * segment, unit, sizes, pinned)
        *self._blocks, self._row = (
            buffer.view(dtype).view(-1, self._width) for buffer in self._file.buffers
        )
        self.way = self._file.way
        self._held = -1  # the row that the row's buffer has
        self._writes = 0

    def view(self, row: int) -> Tensor | None:
        """Return None: rows on disk cannot be used without a copy."""
        return None

    def read(self, row: int) -> Tensor:
        """Return a copy of the row on the device, from the file or from the row's buffer."""
        if row != self._held:
            self._file.finish(reading=False)
            self._held = -1
            for i in range(len(self._row)):
                self._file.start(True, _bytes(self._row[i]), self._offset(i, row))
            self._file.finish(reading=True)
            self._held = row
        return self._row.view(-1)[: self._n_local].to(self._device, copy=True)

    def write(self, row: int, values: Tensor) -> None:
        """Start to write the row; it is on the disk at the latest when the file is read next."""
        self._file.finish(reading=False)
        self._held = row
        self._row.view(-1)[: self._n_local].copy_(values)
        self._stamp(self._row.view(1, -1)[:, self._n_local :])
        for i in range(len(self._row)):
            self._file.start(False, _bytes(self._row[i]), self._offset(i, row))

    def blocks(self, count: int, first: int = 0) -> Iterator[tuple[slice, Tensor]]:
        """Yield copies on the device; the next block is read from the file while one is used."""
        self._file.finish(reading=False)
        parts = _columns(self._n_local, self._width)
        self._read_ahead(0, count, first)
        try:
            for i, columns in enumerate(parts):
                self._file.finish(reading=True)
                if i + 1 < len(parts):
                    self._read_ahead(i + 1, count, first)
                block = self._blocks[i % 2][first:count, : columns.stop - columns.start]
                yield columns, block.to(self._device)
        finally:  # nothing is under way into a buffer that somebody else fills
            self._file.finish(reading=True)

    def _read_ahead(self, i: int, count: int, first: int) -> None:
        # Only now: what `replace` wrote from this buffer is on its way while the other one is used.
        self._file.finish(reading=False)
        if count > first:
            rows = self._blocks[i % 2][first:count]
            self._file.start(True, _bytes(rows), self._offset(i, first))

    def replace(self, columns: slice, values: Tensor) -> None:
        """Start to write the values over the first rows of the block."""
        i = columns.start // self._width
        part = self._blocks[i % 2][: len(values)]
        part[:, : columns.stop - columns.start].copy_(values)
        self._stamp(part[:, columns.stop - columns.start :])
        self._file.start(False, _bytes(part), self._offset(i, 0))
        self._held = -1

    def _stamp(self, unused: Tensor) -> None:
        """Change the end of the last block with each write, so that a lost write shows."""
        self._writes += 1
        unused.view(torch.int16).fill_(self._writes % STAMPS)

    def _offset(self, i: int, row: int) -> int:
        return (i * self.capacity + row) * self._segment


def _bytes(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def _columns(n_local: int, width: int) -> list[slice]:
    return [slice(a, min(a + width, n_local)) for a in range(0, max(n_local, 1), width)]
