"""Records on disk: `<kind>.json` for people and tools, `<kind>.npz` for the arrays.

The JSON holds every scalar, what follows from the arrays, and the SHA-256 of the NPZ, so that a
truncated file or two files of different records are noticed. This module knows files only; which
fields a record has and how they are stored is in `ds_hessian.records.fields`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ds_hessian.errors import ResultError
from ds_hessian.records.provenance import SCHEMA_VERSION

Arrays = dict[str, np.ndarray[Any, Any]]


def write(folder: Path, kind: str, content: Mapping[str, Any], arrays: Arrays) -> Path:
    """Write both files of a record, each at once; returns the folder.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    content = {
        "schema_version": SCHEMA_VERSION,
        **content,
        "arrays": {"file": f"{kind}.npz", "sha256": digest},
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    parts = {folder / f"{kind}.npz": buffer.getvalue(), folder / f"{kind}.json": text.encode()}
    written: list[Path] = []
    try:
        for target, data in parts.items():
            written.append(target.with_name(f".{target.name}.{os.getpid()}.tmp"))
            write_flushed(written[-1], data)
        for source, target in zip(written, parts, strict=True):
            os.replace(source, target)
    finally:
        for source in written:
            source.unlink(missing_ok=True)
    return folder


def read(folder: Path, kind: str) -> tuple[dict[str, Any], Arrays]:
    """Read both files of a record: the JSON's content, and the arrays.

    Raises:
        ResultError: files are missing, damaged, or of another schema.
    """
    path = folder / f"{kind}.json"
    content = _read_json(path, kind)
    found = content.get("schema_version")
    if found != SCHEMA_VERSION:
        provenance = content.get("provenance")
        version = provenance.get("ds_hessian_version") if isinstance(provenance, dict) else None
        raise ResultError(
            f"{path} has schema version {found}, this ds_hessian reads {SCHEMA_VERSION}: load it "
            f"with the version that wrote it, {version}"
        )
    named = content.get("arrays")
    digest = named.get("sha256") if isinstance(named, dict) else None
    if not isinstance(digest, str):
        raise ResultError(f"{path} does not hold a {kind}: it names no arrays")
    try:
        return content, _read_arrays(folder / f"{kind}.npz", kind, digest)
    except (ValueError, BadZipFile) as error:
        if isinstance(error, ResultError):
            raise
        raise ResultError(f"{folder} does not hold a {kind}: {error!r}") from error


def write_flushed(path: Path, data: bytes) -> None:
    """Write and flush to the disk: the rename must not overtake the content."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except ResultError as error:
        raise ResultError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ResultError(
            f"no {kind} in {path.parent}: cannot read {path.name}: {error}"
        ) from error
    except ValueError as error:
        raise ResultError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_constant(text: str) -> None:
    raise ResultError(f"it holds {text}, which no record does")


def _read_arrays(path: Path, kind: str, sha256: str) -> Arrays:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"cannot read {path}, which {kind}.json names: {error}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise ResultError(
            f"{path} ({len(data)} bytes) is truncated, changed, or belongs to another {kind}: "
            f"its SHA-256 is {found[:12]}..., {kind}.json says {sha256[:12]}..."
        )
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)
