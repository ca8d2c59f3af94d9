"""Gram-Schmidt (twice) against a basis in memory and on disk, and how much of the disk it hides.

Each way takes its three passes over the same rows in the same run: in memory; in a file that is
mapped and read as pages are touched, the yardstick; and in `DiskRows`, by threads and, where it is
built, by DeepSpeed's asynchronous IO. Files are cached by the system, or their pages are dropped
before each pass, as where a basis is larger than the memory; asynchronous IO goes past the cache.
The disk alone is the same three passes with nothing computed.

    OMP_NUM_THREADS=1 python benchmarks/basis.py --elements 8000000 --folder .
"""

from __future__ import annotations

import argparse
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date

import torch

from ds_hessian.krylov import Storage
from ds_hessian.krylov.basis import Basis
from ds_hessian.krylov.rows import DiskRows, NearRows
from ds_hessian.ops import async_io
from ds_hessian.vectors import VectorSpace

Drop = Callable[[], None]


def nothing() -> None:
    """Leave the cache as it is."""


def fill(basis: Basis) -> None:
    """Random rows, nearly orthonormal."""
    for i in range(basis.rows.capacity):
        generator = torch.Generator().manual_seed(i)
        row = torch.randn(basis.space.n_local, generator=generator)
        basis.store(i, row, basis.space.n_local**-0.5)


def passes(basis: Basis, w: torch.Tensor, drop: Drop) -> float:
    """Seconds of CGS2 of w, without those of `drop` before each pass."""
    count, seconds = basis.rows.capacity, 0.0
    dots = torch.zeros(count, dtype=torch.float64)
    for step in (
        lambda: dots.copy_(basis.project(w, count)),
        lambda: dots.copy_(basis.subtract_project(w, dots)),
        lambda: basis.subtract(w, dots),
    ):
        drop()
        began = time.perf_counter()
        step()
        seconds += time.perf_counter() - began
    basis.agree()
    return seconds


def reading(basis: Basis, drop: Drop) -> float:
    """Seconds of three passes of the disk alone."""
    seconds = 0.0
    for _ in range(3):
        drop()
        began = time.perf_counter()
        for _ in basis.rows.blocks(basis.rows.capacity):
            pass
        seconds += time.perf_counter() - began
    return seconds


def mapped(basis: Basis, folder: str) -> tuple[Drop, mmap.mmap]:
    """Put a near basis into a mapped file; what drops its pages."""
    rows = basis.rows
    assert isinstance(rows, NearRows)
    with tempfile.TemporaryFile(dir=folder) as file:
        size = rows._rows.numel() * rows._rows.element_size()
        os.posix_fallocate(file.fileno(), 0, size)
        mapping, descriptor = mmap.mmap(file.fileno(), size), os.dup(file.fileno())
    there = torch.frombuffer(mapping, dtype=rows._rows.dtype).view_as(rows._rows)
    there.copy_(rows._rows)
    rows._rows = there

    def drop() -> None:
        mapping.flush()
        mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    return drop, mapping


def dropping(basis: Basis) -> Drop:
    """What drops the pages of a basis on disk."""
    rows = basis.rows
    assert isinstance(rows, DiskRows)
    rows._file.finish(reading=False)
    descriptor = rows._file.descriptor
    os.fsync(descriptor)
    return lambda: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measure(args: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """For each way, the seconds of CGS2 and of the disk alone, with each repetition."""
    space, storage = VectorSpace(args.elements), Storage(DTYPES[args.dtype], "disk", args.folder)
    found: dict[str, tuple[list[float], list[float]]] = {}
    generator = torch.Generator().manual_seed(-1)
    w = torch.randn(args.elements, generator=generator)

    def repeat(name: str, basis: Basis, drop: Drop, disk: bool) -> None:
        passes(basis, w.clone(), drop)
        found[name] = (
            [passes(basis, w.clone(), drop) for _ in range(args.repeats)],
            [reading(basis, drop) for _ in range(args.repeats if disk else 0)],
        )
        seconds = statistics.median(found[name][0])
        print(f"  {name}: {seconds:.2f} s", flush=True)

    near = Basis(space, args.rows, Storage(storage.dtype))
    fill(near)
    repeat("memory", near, nothing, False)
    drop, mapping = mapped(near, args.folder)
    repeat("mapped file, cached", near, nothing, False)
    repeat("mapped file, dropped", near, drop, False)
    del near, drop, mapping
    os.environ[async_io.SETTING] = "off"
    disk = Basis(space, args.rows, storage)
    fill(disk)
    repeat("threads, cached", disk, nothing, True)
    repeat("threads, dropped", disk, dropping(disk), True)
    del disk
    os.environ[async_io.SETTING] = "auto"
    if async_io.find()[0] is not None:
        disk = Basis(space, args.rows, storage)
        fill(disk)
        repeat("asynchronous", disk, nothing, True)
    return found


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    args = parser.parse_args()
    size = args.elements * args.rows * DTYPES[args.dtype].itemsize
    print(
        f"{date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"{args.rows} x {args.elements} in {args.dtype}, {size / 1e9:.1f} GB; "
        f"asynchronous IO: {async_io.find()[1]}"
    )
    found = measure(args)
    memory = statistics.median(found["memory"][0])
    print("| basis | CGS2, s | of memory's | disk alone, s | GB/s | of the larger of both |")
    print("|---|---|---|---|---|---|")
    for name, (times, disk) in found.items():
        seconds, alone = statistics.median(times), statistics.median(disk) if disk else 0.0
        rate = f"{3 * size / 1e9 / alone:.2f}" if disk else ""
        of_both = f"{seconds / max(memory, alone):.2f}" if disk else ""
        shown = f"{alone:.2f}" if disk else ""
        print(f"| {name} | {seconds:.2f} | {seconds / memory:.2f} | {shown} | {rate} | {of_both} |")


if __name__ == "__main__":
    main()
