"""Peaks of memory, of files without a name and of a resume folder, exact whoever runs when.

Memory is counted at each allocation by `peaks.cpp`, which ranks are started with (`counting`).
Files are added up wherever they can grow: after each reservation of room, and each renaming.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

SOURCE = Path(__file__).with_suffix(".cpp")


@contextmanager
def counting(folder: Path) -> Iterator[None]:
    """Processes that are started (not forked) in the body count what they allocate."""
    from ds_hessian.ops.toolchain import find_compiler

    library = folder / "peaks.so"
    command = [find_compiler(), "-std=c++17", "-O2", "-shared", "-fPIC", "-w", str(SOURCE)]
    subprocess.run([*command, "-o", str(library)], check=True)
    with mock.patch.dict(os.environ, LD_PRELOAD=str(library)):
        yield


@contextmanager
def peaks(folder: Path | None = None) -> Iterator[list[int]]:
    """Bytes over those at the beginning: of memory, of files without a name, and of this rank's
    vectors in a folder. Filled in at the end of the body.
    """
    library, found = ctypes.CDLL(None), [0, 0, 0]
    library.peak_bytes.restype = ctypes.c_long
    gc.collect()
    before = _unnamed()

    def grown() -> None:
        found[1] = max(found[1], _unnamed() - before)
        found[2] = max(found[2], _kept(folder))

    with ExitStack() as spies:
        for name in ("posix_fallocate", "rename"):
            spies.enter_context(mock.patch.object(os, name, _then(getattr(os, name), grown)))
        library.peak_start()
        yield found
        found[0] = library.peak_bytes()


def _then(function: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        look()
        return out

    return called


def _unnamed() -> int:
    """Bytes of this process' open files that are in no folder."""
    files: dict[int, int] = {}  # one may be open more than once
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if os.readlink(link).endswith(" (deleted)"):
                found = os.stat(link)
                files[found.st_ino] = 512 * found.st_blocks
    return sum(files.values())


def _kept(folder: Path | None) -> int:
    if folder is None:
        return 0
    kept = 0
    for path in folder.rglob(f"rank{dist.get_rank()}/*.safetensors"):
        with suppress(FileNotFoundError):  # of a run that rank 0 is removing
            kept += path.stat().st_size
    return kept
