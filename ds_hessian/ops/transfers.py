"""A file of a rank's own, read and written in the background: by DeepSpeed's asynchronous IO where
it is built, else by two threads. The same bytes, the same buffers; errors are OSErrors.

The file has no name, so it vanishes with the process, and gets its room when it is opened: a full
disk is an error then, not in the middle of a run. Asynchronous IO goes past the system's cache of
files; the threads go through it.

DeepSpeed's asynchronous IO does not look at what the kernel says about a request
(csrc/aio/common/deepspeed_aio_common.cpp, `_do_io_complete`). So the last word of each unit is kept
when it is written, and made wrong in the buffer before it is read: what was not written or read, or
not to its end, shows, unless the word was the same before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ds_hessian.ops import async_io

REQUEST_BYTES, DEPTH = 1 << 20, 32
"""Bytes of a request, and requests at a time: DeepSpeed's default, and enough for an NVMe disk."""

WORD = 8


class Threads:
    """Positional reads and writes by two threads, one for each kind.

    Args:
        file: Descriptor.
        unit: Bytes; offsets and lengths are multiples of it.
        size: Bytes of the file.
    """

    def __init__(self, file: int, unit: int, size: int) -> None:
        self._file, self._pending = file, dict[bool, list[Future[None]]]({True: [], False: []})
        self._pools = {reading: ThreadPoolExecutor(1) for reading in (True, False)}

    def start(self, reading: bool, buffer: Tensor, offset: int) -> None:
        """Read into a buffer of bytes, or write it, from an offset of the file on."""
        call = os.preadv if reading else os.pwritev
        task = self._pools[reading].submit(_transfer, call, self._file, buffer, offset)
        self._pending[reading].append(task)

    def finish(self, reading: bool) -> None:
        """Wait for all reads, or all writes.

        Raises:
            OSError: one of them failed.
        """
        pending, self._pending[reading] = self._pending[reading], []
        wait(pending)
        for task in pending:
            task.result()

    def close(self) -> None:
        """Wait for pending requests, and ignore their errors."""
        for pool in self._pools.values():
            pool.shutdown()


def _transfer(
    call: Callable[[int, list[memoryview], int], int], file: int, buffer: Tensor, offset: int
) -> None:
    view, done = memoryview(buffer.numpy().data), 0
    while done < len(view):
        moved = call(file, [view[done:]], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the file ends before what is to be read")
        done += moved


class Asynchronous:
    """The same by DeepSpeed's `aio_handle`, one for each kind, so that one can be waited for.

    Args:
        file: Descriptor, opened for direct IO.
        unit: Bytes; offsets and lengths are multiples of it.
        size: Bytes of the file.
        module: `async_io`.
    """

    def __init__(self, file: int, unit: int, size: int, module: ModuleType) -> None:
        self._file, self._path, self._stride = file, f"/proc/self/fd/{file}", unit // WORD
        self._handles = {
            reading: module.aio_handle(REQUEST_BYTES, DEPTH, False, True, 1)
            for reading in (True, False)
        }
        self._pending = {True: 0, False: 0}
        self._words = torch.zeros(size // unit, dtype=torch.int64)  # as last written; then read
        self._reads: list[tuple[Tensor, Tensor]] = []

    def start(self, reading: bool, buffer: Tensor, offset: int) -> None:
        """Submit a read or a write; of a write, the last word of each unit is remembered."""
        words = buffer.view(torch.int64)[self._stride - 1 :: self._stride]
        first = offset // WORD // self._stride
        kept = self._words[first : first + len(words)]
        handle = self._handles[reading]
        if reading:
            words.copy_(~kept)
            self._reads.append((words, kept))
            failed = handle.async_pread(buffer, self._path, offset)
        else:
            kept.copy_(words)
            failed = handle.async_pwrite(buffer, self._file, offset)
        if failed:
            raise OSError(errno.EIO, "DeepSpeed's asynchronous IO takes no request")
        self._pending[reading] += 1

    def finish(self, reading: bool) -> None:
        """Wait for all reads, or all writes; a failed write shows when it is read."""
        pending, self._pending[reading] = self._pending[reading], 0
        if pending:  # with none, `wait` ends the process
            self._handles[reading].wait()
        if reading:
            reads, self._reads = self._reads, []
            if not all(torch.equal(words, kept) for words, kept in reads):
                raise OSError(errno.EIO, "what was read is not what should have been written")

    def close(self) -> None:
        """Wait for pending requests, and ignore their errors."""
        for reading in (True, False):
            if self._pending[reading]:  # a handle that goes with requests ends the process
                self._handles[reading].wait()
                self._pending[reading] = 0

    def locked(self, size: int) -> Tensor:
        """Return locked memory of so many bytes; `release` frees it."""
        buffer: Tensor = self._handles[True].new_cpu_locked_tensor(
            size, torch.empty(0, dtype=torch.uint8)
        )
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Free what `locked` returned."""
        self._handles[True].free_cpu_locked_tensor(buffer)


class BackgroundFile:
    """A file without a name, and buffers for it.

    Args:
        folder: Folder of the file; None for the system's temporary folder.
        size: Bytes.
        unit: Bytes, a multiple of 512; all offsets and lengths are multiples of it.
        buffers: Bytes of each buffer.
        pinned: Whether an accelerator copies from the buffers.

    Attributes:
        buffers: Tensors of bytes, in pinned memory where an accelerator copies from them; gone with
            the file.
        way: Method of reading and writing, with the reason; for people.
        descriptor: Descriptor of the file.

    Raises:
        OSError: the folder is not there or cannot be written, or the disk has not the room.
    """

    def __init__(
        self, folder: str | None, size: int, unit: int, buffers: list[int], pinned: bool
    ) -> None:
        room = tempfile.TemporaryFile(dir=folder, prefix="ds_hessian_basis_", buffering=0)
        self.descriptor = room.fileno()
        self._close: Any = weakref.finalize(self, room.close)
        _make_room(room.fileno(), size)
        module, self.way = _usable(room.fileno(), 0 if pinned else sum(buffers))
        if module is None:
            transfers: Threads | Asynchronous = Threads(room.fileno(), unit, size)
            self.buffers = _ordinary(buffers, pinned)
            locked: list[Tensor] = []
        else:
            _direct(room.fileno())
            transfers = Asynchronous(room.fileno(), unit, size, module)
            locked = [] if pinned else [transfers.locked(b) for b in buffers]
            self.buffers = locked or _ordinary(buffers, pinned)
        self.start, self.finish = transfers.start, transfers.finish
        self._close.detach()
        self._close = weakref.finalize(self, _close, transfers, locked, room)


def _ordinary(sizes: list[int], pinned: bool) -> list[Tensor]:
    # Written, so that the system finds their memory now and not in the middle of the run.
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pinned).fill_(0) for size in sizes]


def _close(transfers: Any, locked: list[Tensor], room: Any) -> None:
    transfers.close()
    for buffer in locked:
        transfers.release(buffer)
    room.close()


def _make_room(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _direct(file: int) -> None:
    import fcntl  # not on every system

    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


def _usable(file: int, locked: int) -> tuple[ModuleType | None, str]:
    """Return the op if it can be used for this file with so many bytes of locked memory."""
    module, reason = async_io.find()
    if module is None:
        return None, f"by threads ({reason})"
    try:
        os.close(os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT))
    except OSError:
        return None, "by threads (the folder's file system has no direct IO)"
    if locked and not _can_lock(locked):
        return None, f"by threads ({locked} bytes of memory cannot be locked: see ulimit -l)"
    return module, f"by DeepSpeed's asynchronous IO ({reason})"


def _can_lock(size: int) -> bool:
    """Return whether so much memory can be locked: DeepSpeed ends the process where it cannot."""
    with mmap.mmap(-1, size) as room:
        first = ctypes.c_char.from_buffer(room)
        libc = ctypes.CDLL(None)
        can = libc.mlock(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size)) == 0
        del first  # the mapping closes when nobody points into it
    return can
