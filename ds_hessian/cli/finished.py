"""What is finished of a series: the measurements that `--resume` does not make again.

Beside its record a measurement leaves `<analysis>.source.json`: what the record was made of, and
its hash. The measurement is finished where it would be made of the same again, and the record is
still the one that it wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_hessian.errors import ConfigError

if TYPE_CHECKING:
    from ds_hessian.checkpoints import Checkpoint
    from ds_hessian.cli.request import Work

BESIDE = ("checkpoints", "settings", "config", "stage", "output", "resume", "only_plan")
"""Fields of a request that change no figure of a record, or that count by what they come to."""


NOTE = "{}.source.json"
"""The name of the note of an analysis."""
Source = dict[str, Any]
"""What a record is made of, as JSON values."""


def require_writable(folder: Path) -> None:
    """Refuse a folder in which no record could be written once it is measured.

    Raises:
        ConfigError: it, or what it would be made in, is a file or may not be written.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"no folder {folder} can be written: {there} is a file, or read-only")


def source_of(work: Work, checkpoint: Checkpoint) -> Source:
    """Return what the record of a checkpoint would be made of, as JSON values."""
    from ds_hessian.resume import settings_of

    request, analysis = work.request, work.analysis
    asked = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in BESIDE}
    read = [checkpoint.folder, checkpoint.config, request.tokenizer, request.data_file]
    found = {
        "checkpoint": checkpoint.path,
        **asked,
        "arguments": analysis.settings() | work.arguments,
        "settings": settings_of(work.config) | {"sampling": work.config.sampling},
        "files": {str(path.resolve()): _stamp(path) for path in read if path is not None},
    }
    kept: Source = json.loads(json.dumps(found, default=_plain))
    return kept


def _plain(value: Any) -> object:
    if isinstance(value, Path):
        return str(value.resolve())
    return vars(value) if is_dataclass(value) else str(value)


def _stamp(path: Path) -> str:
    """Return a hash of the names, sizes and times of a file, or of those in a folder."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(_files(path)):
        state = file.stat()
        line = f"{file.relative_to(path)} {state.st_size} {state.st_mtime_ns}\n"
        found.update(line.encode(errors="surrogateescape"))
    return found.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """Yield the files that can be read from a path: of a folder those in it and in its `zero`."""
    found = (path, *path.glob("*"), *path.glob("zero/*/*"))
    return (file for file in found if file.is_file())


def is_finished(folder: Path, source: Source, series: list[Path]) -> bool:
    """Return whether a folder holds the record that is made of this.

    Args:
        folder: The folder.
        source: What it would be made of.
        series: All checkpoints that are measured now: their records may be replaced.

    Raises:
        ConfigError: the folder holds a record of another checkpoint, which would stay, or be lost.
    """
    measured = {str(path.resolve()) for path in series}
    there = list(_sources(folder))
    for other in there:
        replaced = other["analysis"] == source["analysis"] and other["checkpoint"] in measured
        if other["checkpoint"] != source["checkpoint"] and not replaced:
            raise ConfigError(
                f"{folder} holds the {other['analysis']} of {other['checkpoint']}: name another "
                "folder (--output), or remove it"
            )
    return source in there


def _sources(folder: Path) -> Iterator[Source]:
    """Yield what the records in a folder were made of that are as they were written."""
    from ds_hessian.records.files import opened

    for note in sorted(folder.glob(NOTE.format("*"))):
        try:
            with opened(note) as file:
                kept = json.loads(file.read().decode())
            source, (record, digest) = kept["source"], kept["record"]
            known = isinstance(source["checkpoint"], str) and isinstance(source["analysis"], str)
            if known and _digest(folder / record) == digest:
                yield source
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue  # no note of ours, or without its record


def note_finished(folder: Path, source: Source, kind: str) -> None:
    """Note of what the record of a kind in a folder was made.

    Raises:
        OSError: the folder cannot be written.
    """
    from ds_hessian.records.files import replacing

    record = f"{kind}.json"
    kept = {"record": [record, _digest(folder / record)], "source": source}
    with replacing(folder / NOTE.format(source["analysis"])) as file:
        file.write(json.dumps(kept, indent=1).encode())


def _digest(path: Path) -> str:
    from ds_hessian.records.files import opened

    with opened(path) as file:
        return hashlib.sha256(file.read()).hexdigest()
