"""Records on disk: `<kind>.json` for people and tools, `<kind>.npz` for the arrays.

The JSON holds every scalar, what follows from the arrays, and the SHA-256 of the NPZ, so that a
truncated file or two files of different records are noticed. This module knows files only; which
fields a record has and how they are stored is in `ds_hessian.records.fields`.

A record is written so that either the old one or the new one can be read at every instant:

1. the arrays appear as `<kind>.<SHA-256, 16 digits>.npz`;
2. the JSON replaces the old one, in one rename: from here on the record is the new one;
3. the arrays are renamed to `<kind>.npz`.

A reader takes whichever of the two NPZ files has the hash that the JSON names.

Files can come from anywhere. Whatever they declare, reading takes memory of about their own size:
members of the NPZ must be stored as `numpy.savez` stores them, uncompressed, and their sizes must
agree with that of the file before anything is allocated.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np

from ds_hessian.errors import ResultError
from ds_hessian.records.fields import Array, Json
from ds_hessian.records.files import (
    flush_folder,
    one_writer,
    opened,
    remove_abandoned,
    replacing,
    temporaries,
)
from ds_hessian.records.provenance import SCHEMA_VERSION

Arrays = dict[str, Array]

LARGEST_JSON = 2**25
"""Bytes of a JSON file: names of half a million parameters."""
MOST_VALUES = 2**19
"""Values in a JSON file; each takes about 60 bytes of memory, however short its text is."""
MOST_MEMBERS = 2**14
"""Arrays in an NPZ file."""
HEADER = re.compile(
    rb"\{'descr': '([<>|][biufc][0-9]{1,2})', 'fortran_order': (False|True), "
    rb"'shape': \(([0-9, ]*)\), \}[ ]*\n"
)
"""The header of an array of numbers, as numpy writes it."""


def write(folder: Path, kind: str, content: Mapping[str, object], arrays: Arrays) -> Path:
    """Write both files of a record in one commit; returns the folder.

    Raises:
        OSError: the folder cannot be written.
    """
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
    content = {
        "schema_version": SCHEMA_VERSION,
        **content,
        "arrays": {"file": f"{kind}.npz", "sha256": digest},
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with one_writer(folder):
        _commit(folder, kind, digest, {"npz": buffer.getbuffer(), "json": text.encode()})
    return folder


def _commit(folder: Path, kind: str, digest: str, data: Mapping[str, bytes | memoryview]) -> None:
    aside = _aside(folder, kind, digest)
    with replacing(aside) as file:
        file.write(data["npz"])
    try:
        with replacing(folder / f"{kind}.json") as file:
            file.write(data["json"])
    except BaseException:
        if not _holds(folder / f"{kind}.json", data["json"]):  # else it names these arrays
            aside.unlink(missing_ok=True)
        raise
    os.rename(aside, folder / f"{kind}.npz")
    flush_folder(folder)
    # Writers that were killed before their commit may have left arrays of other hashes.
    arrays = rf"{re.escape(kind)}\.[0-9a-f]{{16}}\.npz"
    remove_abandoned(folder, f"{arrays}|{temporaries(arrays)}")


def _holds(path: Path, data: bytes | memoryview) -> bool:
    try:
        return _read_bytes(path) == data
    except (OSError, ResultError):
        return False


def read(folder: Path, kind: str) -> tuple[Json, Arrays]:
    """Read both files of a record: the JSON's content, and the arrays.

    Raises:
        ResultError: files are missing, damaged, or of another schema.
    """
    content = _read_json(folder / f"{kind}.json", kind)
    digest = _check(content, folder, kind)
    while True:
        try:
            data = _read_npz(folder, kind, digest)
            break
        except ResultError:
            content = _read_json(folder / f"{kind}.json", kind)
            before, digest = digest, _check(content, folder, kind)
            if digest == before:
                raise
            # A writer has replaced the record meanwhile: its arrays are looked for instead.
    try:
        return content, dict(_arrays(data))
    except (BadZipFile, NotImplementedError, ValueError, EOFError, struct.error) as error:
        raise ResultError(f"{folder} does not hold a {kind}: its NPZ: {error}") from error


def _aside(folder: Path, kind: str, digest: str) -> Path:
    return folder / f"{kind}.{digest[:16]}.npz"


# ---- reading


def _read_bytes(path: Path, most: int | None = None) -> bytes:
    """Return the content of a regular file of at most so many bytes.

    Raises:
        OSError: it cannot be read.
        ResultError: it is not a regular file, or larger.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise ResultError(f"{path} has {size} bytes, no record has over {most}")
        return file.read(size)


def _read_json(path: Path, kind: str) -> Json:
    try:
        data = _read_bytes(path, LARGEST_JSON)
    except OSError as error:
        raise ResultError(
            f"no {kind} in {path.parent}: cannot read {path.name}: {error}"
        ) from error
    if sum(map(data.count, b",[{")) > MOST_VALUES:
        raise ResultError(f"{path} is damaged: it holds more values than any record has")
    try:
        content = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except ResultError as error:
        raise ResultError(f"{path} is damaged: {error}") from None
    except RecursionError:
        raise ResultError(f"{path} is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise ResultError(f"{path} is damaged, it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ResultError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_constant(text: str) -> None:
    raise ResultError(f"it holds {text}, which no record does")


def _check(content: Mapping[str, object], folder: Path, kind: str) -> str:
    """Return the hash of the arrays that a JSON of this schema names."""
    path, found = folder / f"{kind}.json", content.get("schema_version")
    if type(found) is not int or found != SCHEMA_VERSION:
        provenance = content.get("provenance")
        version = provenance.get("ds_hessian_version") if isinstance(provenance, dict) else None
        raise ResultError(
            f"{path} has schema version {found!r:.40}, this ds_hessian reads {SCHEMA_VERSION}: "
            f"load it with the version that wrote it, {version!s:.40}"
        )
    named = content.get("arrays")
    digest = named.get("sha256") if isinstance(named, dict) else None
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise ResultError(f"{path} does not hold a {kind}: it names no arrays")
    return digest


def _read_npz(folder: Path, kind: str, digest: str) -> bytes:
    """Return the NPZ with this hash: `<kind>.npz`, or that of a writer that stopped after its
    commit.

    Raises:
        ResultError: neither can be read, or has the hash.
    """
    path, aside = folder / f"{kind}.npz", _aside(folder, kind, digest)
    for candidate in (aside, path):
        try:
            data = _read_bytes(candidate)
        except FileNotFoundError as error:
            if candidate == aside:
                continue
            raise ResultError(f"cannot read {path}, which {kind}.json names: {error}") from error
        except OSError as error:
            raise ResultError(f"cannot read {candidate}: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found == digest:
            return data
    raise ResultError(
        f"{path} ({len(data)} bytes) is truncated, changed, or belongs to another {kind}: "
        f"its SHA-256 is {found[:12]}..., {kind}.json says {digest[:12]}..."
    )


def _arrays(data: bytes) -> Iterator[tuple[str, Array]]:
    """Yield the arrays of an NPZ by name, as views of its bytes.

    Raises:
        ValueError: a member is not an array as `numpy.savez` writes it.
    """
    if data.count(b"PK\x01\x02") > MOST_MEMBERS:
        raise ValueError(f"it has more than {MOST_MEMBERS} members")
    with ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
    if len({member.filename for member in members}) < len(members):
        raise ValueError("two of its members have the same name")
    if sum(member.file_size for member in members) > len(data):
        raise ValueError("its members are larger than the file")
    for member in members:
        yield member.filename.removesuffix(".npy"), _array(_member(data, member), member.filename)


def _member(data: bytes, member: ZipInfo) -> memoryview:
    """Return the bytes of a member that is stored uncompressed."""
    name = member.filename
    if member.flag_bits & 0x1:
        raise ValueError(f"{name!r:.60} is encrypted")
    if member.compress_type != ZIP_STORED or member.compress_size != member.file_size:
        raise ValueError(f"{name!r:.60} is compressed; records are stored uncompressed")
    start = member.header_offset
    names = struct.unpack_from("<HH", data, start + 26) if 0 <= start < len(data) else (0, 0)
    first = start + 30 + sum(names)
    if start < 0 or first + member.file_size > len(data):
        raise ValueError(f"{name!r:.60} lies outside of the file")
    return memoryview(data)[first : first + member.file_size]


def _array(content: memoryview, name: str) -> Array:
    """Return the array of a `.npy` file, as a view of its bytes."""
    long = bytes(content[:8]) == b"\x93NUMPY\x02\x00"
    if not long and bytes(content[:8]) != b"\x93NUMPY\x01\x00":
        raise ValueError(f"{name!r:.60} is not an array")
    (length,) = struct.unpack_from("<I" if long else "<H", content, 8)
    first = 8 + (4 if long else 2) + length
    header = HEADER.fullmatch(bytes(content[first - length : min(first, 2**16)]))
    if header is None:
        raise ValueError(f"{name!r:.60} is not an array of numbers")
    descr, fortran, shape = (group.decode() for group in header.groups())
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    dtype = np.dtype(descr)
    if math.prod(sizes) * dtype.itemsize != len(content) - first or len(sizes) > 8:
        raise ValueError(
            f"{name!r:.60} declares an array ({shape:.60}) of {descr}, but has "
            f"{len(content) - first} bytes for it"
        )
    flat = np.frombuffer(content, dtype, offset=first)
    return flat.reshape(sizes, order="F" if fortran == "True" else "C")
