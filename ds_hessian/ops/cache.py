"""Just-in-time builds of the kernels, kept under a hash of all that they depend on.

A build is made in a folder of its own and becomes visible by one rename, with its checksum beside
it, so a build that is killed leaves nothing that a later start waits for or loads. Before a module
is loaded, its owner, its mode and its content are checked; what fails is built anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ds_hessian.ops import toolchain

logger = logging.getLogger(__name__)

PATIENCE = 300.0
"""Seconds that a process waits for another one's build before it makes its own."""


def root() -> Path:
    """Return the folder of all builds: `DS_HESSIAN_CACHE_DIR`, else below the user's cache."""
    if chosen := os.environ.get("DS_HESSIAN_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ds_hessian" / "ops"


def obtain(plan: toolchain.Plan) -> tuple[Path, str]:
    """Return the extension of a plan, from the cache or built now, and how it was obtained.

    Raises:
        BuildError: the build failed, or the cache is not safe to load from.
        OSError: the cache cannot be written.
    """
    folder = root() / f"{plan.backend}-{plan.key}"
    target = folder / plan.filename
    folder.parent.mkdir(parents=True, exist_ok=True)
    _require_guarded(folder.parent.resolve())
    reason = f"built just in time, cached: {target}"
    if not _intact(target):
        with _turn(folder.with_name(f"{folder.name}.lock")):
            if not _intact(target):  # another rank may have built it meanwhile
                started = time.perf_counter()
                logger.info("building the ds_hessian kernels for %s", plan.backend)
                _build(plan, folder)
                seconds = time.perf_counter() - started
                reason = f"built just in time in {seconds:.0f} s: {target}"
                logger.info("ds_hessian kernels for %s %s", plan.backend, reason)
    return target, reason


def _require_guarded(folder: Path) -> None:
    """Refuse a folder that others can exchange: where all may write, the sticky bit must be set."""
    for path in (folder, *folder.parents):
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise toolchain.BuildError(
                f"kernels are not loaded from {folder}: every user can exchange what is in {path}; "
                "set DS_HESSIAN_CACHE_DIR to a folder of your own"
            )


def _intact(target: Path) -> bool:
    """Return whether an extension is this user's (or root's), closed to others, and as it was
    built.
    """
    checksum = _checksum_file(target)
    try:
        for path in (target.parent, target, checksum):
            found = path.lstat()
            if found.st_uid not in (0, os.geteuid()) or stat.S_ISLNK(found.st_mode):
                return False
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return False
            if path != target.parent and not stat.S_ISREG(found.st_mode):
                return False
        return checksum.read_text() == _checksum(target)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def _checksum(target: Path) -> str:
    return hashlib.sha256(target.read_bytes()).hexdigest()


def _build(plan: toolchain.Plan, folder: Path) -> None:
    """Build in a temporary folder, and exchange the folder for the result in one step."""
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        built = toolchain.build(plan, scratch / "objects")
        made = scratch / "made"
        made.mkdir()
        target = built.rename(made / plan.filename)
        _checksum_file(target).write_text(_checksum(target))
        for path in (made, *made.iterdir()):
            path.chmod(0o755)  # whatever the umask: others may read it, none may write
        if os.path.lexists(folder):  # damaged, or not this user's
            folder.rename(scratch / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Let one builder work at a time, as far as possible.

    The lock goes with the process that holds it, also when that is killed; one that is stopped, or
    a file system without locks, costs a second build of the same.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        logger.debug("no lock for %s: %s", path, error)
        yield
        return
    try:
        deadline = time.monotonic() + PATIENCE
        while not _locked(handle) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems
        logger.debug("no file locks here: %s", error)
    return True
