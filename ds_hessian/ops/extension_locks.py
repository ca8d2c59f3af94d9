"""Locks of torch's just-in-time builds (DeepSpeed's ops) that a killed process has left.

A process that finds another's `lock` in an extension's folder waits until it is gone, without a
word and without a limit (torch/utils/file_baton.py); a process that is killed while it builds
leaves its own there. A living builder holds the file open, which is how the two differ.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def folders() -> list[Path]:
    """Return the folders below which torch builds extensions: the configured one or the default."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(chosen)]
    from torch.utils import cpp_extension

    return [Path(cpp_extension.get_default_build_root())]


def abandoned() -> list[Path]:
    """Return the locks that no process of this machine has open, sorted.

    Other users' processes cannot be looked into: a lock that is not the caller's own is left out,
    and so is every lock where there is no `/proc`.
    """
    if not Path("/proc/self/fd").is_dir():
        return []
    found = sorted(lock for folder in folders() for lock in folder.glob("**/lock"))
    mine = [lock for lock in found if _owner(lock) == os.getuid()]
    held = _open_files() if mine else set()
    return [lock for lock in mine if str(lock.resolve()) not in held]


def _owner(path: Path) -> int | None:
    with suppress(OSError):  # released meanwhile
        return path.stat().st_uid
    return None


def _open_files() -> set[str]:
    """Return the files that are open in any process that this user may inspect."""
    found = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or ended
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    found.add(os.readlink(link))
    return found
