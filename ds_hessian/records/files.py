"""Files that appear whole or not at all, whenever the process or the machine stops.

A file is written under an unpredictable name beside its target, flushed to the disk, renamed over
the target, and the folder is flushed too. The name is made anew (`O_EXCL`) and never followed
through a symbolic link (`O_NOFOLLOW`). Its writer holds a lock on it; what a killed writer left
behind has no lock, and the next writer of the same target removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, ClassVar
from weakref import WeakValueDictionary

from ds_hessian.errors import ConfigError, ResultError

NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def path_of(path: object) -> Path:
    """Return what a caller gives as a path.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"a path must be a text or a Path, got {path!r:.60}")
    return Path(path)


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading.

    A pipe to which nobody writes, or a device that does not end, would keep this rank, and all that
    wait for it.

    Raises:
        OSError: it cannot be read.
        ResultError: it is not a regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise ResultError(f"{path} is not a regular file")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that replaces `path` when the block ends without an exception.

    The folder is made if there is none. A block that raises leaves the old file as it was.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    file = os.fdopen(os.open(temporary, NEW, 0o666), "wb")
    try:
        with file:
            _lock(file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)
    remove_abandoned(path.parent, temporaries(re.escape(path.name)))


def flush_folder(folder: Path) -> None:
    """Flush a folder to the disk: names that were made or renamed in it survive a power cut.

    Some network file systems cannot, and say so; their servers do it by themselves.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Let other writers of the folder wait until the block ends, where the file system has locks.

    Neither a writer that is killed nor one that cannot close the folder leaves a lock. The folder
    is made if there is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Take the lock of an open file; False if another process has it, or there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def temporaries(names: str) -> str:
    """Return a regular expression of the temporary names of files, from one of their names."""
    return rf"\.(?:{names})\.[0-9a-f]{{16}}\.tmp"


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove files in a folder whose names match a regular expression and whose writer is gone."""
    for entry in folder.iterdir():
        if re.fullmatch(names, entry.name):
            _remove_if_abandoned(entry)


def _remove_if_abandoned(path: Path) -> None:
    try:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # also of a pipe
        descriptor = os.open(path, flags)
    except OSError:
        return  # removed meanwhile, or not a file of ours
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and _lock(descriptor):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


class Claim:
    """The claim of this process on a folder, until it is released or the process ends.

    It is a lock on a hidden file of the folder, which says whose it is. Within one process it is
    not exclusive: the folder is claimed until all of its claims are released. A file system without
    locks has no claims.

    Raises:
        ConfigError: another process has claimed the folder; the message names it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock: _Lock | None = _Lock.of(folder)

    def release(self) -> None:
        """Let other processes claim the folder."""
        self._lock = None


class _Lock:
    """The lock of this process on a folder, while there is a reference to it.

    All claims of a process share it: the system drops every lock that a process has on a file as
    soon as it closes one descriptor of the file.
    """

    _of: ClassVar[WeakValueDictionary[tuple[int, Path], _Lock]] = WeakValueDictionary()

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, _locked(path)
        who = f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}"
        weakref.finalize(self, _unlock, path, self._descriptor, os.getpid())
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, who.encode(), 0)

    @classmethod
    def of(cls, folder: Path) -> _Lock:
        """Return the lock that this process has on a folder, or take it."""
        path = folder.resolve() / ".in_use"
        key = os.getpid(), path  # a process that was forked from this one has not its locks
        found = cls._of.get(key)
        if found is None or not _is_at(found._descriptor, path):
            found = cls._of[key] = cls(path)
        return found


def _locked(path: Path) -> int:
    """Return a descriptor of the file that other processes find there, locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            who = os.pread(descriptor, 200, 0).decode(errors="replace")
            os.close(descriptor)
            raise ConfigError(
                f"{path.parent} is in use by {who or 'another process'}: wait for its end, or name "
                "another folder"
            ) from None
        except OSError:  # no locks here
            return descriptor
        if _is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner has removed it meanwhile


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one that others find at a path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def _unlock(path: Path, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # not a child that was forked from it
        try:
            if _is_at(descriptor, path):
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
