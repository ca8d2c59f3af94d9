"""Sharded vectors and records: gathered, scattered, on disk, and loaded on any layout.

All functions are collective. Parameters travel between the shards and rank 0 one by one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from ds_hessian.backends.protocol import Backend
from ds_hessian.backends.restricted import Restricted
from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.ranks import collective, together
from ds_hessian.records import Provenance, Savable
from ds_hessian.records.fields import read_value
from ds_hessian.records.files import Claim, flush_folder, path_of, remove_abandoned, temporaries
from ds_hessian.records.safetensors import Reader, Writer
from ds_hessian.vectors import collected, distribute

R = TypeVar("R", bound=Savable)
P = ParamSpec("P")
T = TypeVar("T")

Function: TypeAlias = Callable[Concatenate[Backend, P], T]


def _collective(
    doing: str, given: Callable[..., Mapping[str, object]] = lambda *args, **kwargs: {}
) -> Callable[[Function[P, T]], Function[P, T]]:
    """Make a failure anywhere in a function, on one rank, end it on all of them.

    Args:
        doing: Its action, for messages.
        given: Returns of its arguments what all ranks must give alike.
    """

    def decorated(function: Function[P, T]) -> Function[P, T]:
        @functools.wraps(function)
        def call(backend: Backend, /, *args: P.args, **kwargs: P.kwargs) -> T:
            mine = functools.partial(given, *args, **kwargs)
            with collective(doing, backend.space.device, given=mine):
                return function(backend, *args, **kwargs)

        return call

    return decorated


_order = itertools.count()
_users = dict[Path, tuple[weakref.ref[nn.Module], int]]()
"""The models of this process to which folders of results belong, and since when, in `_order`."""


class Output:
    """The folder of a job's results. One job at a time may use it, and one model of a process: a
    second one may go on with it that was attached when the first had results in it.

    Args:
        backend: The job.
        folder: The folder, made at the first use.
    """

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self._claim: Claim | None = None
        self._made, self._number = time.time(), next(_order)

    def earlier(self) -> list[str]:
        """Return the names of the steps' folders that were written before this job had its Hessian.

        Not collective.
        """
        with suppress(OSError):
            found = [path for path in self.folder.glob("step_*") if path.is_dir()]
            return sorted(path.name for path in found if path.stat().st_mtime < self._made)
        return []

    def claim(self) -> None:
        """Claim the folder until the process ends.

        Raises:
            ConfigError: on rank 0 another job uses it, or another model of this one; the other
                ranks raise MeasurementError.

        Collective.
        """
        with together(f"claiming {self.folder}", device=self.backend.space.device):
            if self.backend.space.rank == 0:
                self._claim = Claim(self.folder)  # anew, where the folder has been replaced
                self._take()

    def _take(self) -> None:
        """Make this job's model the one of this process to which the folder belongs."""
        model, folder = self.backend.modules[0], self.folder.resolve()
        user, since = _users.get(folder, (None, 0))
        if user is not None and user() is model:
            return
        if user is not None and since > self._number:
            raise ConfigError(
                f"{self.folder} has results of another model of this process, which this one's "
                "would replace: give one of them another output_path"
            )
        _users[folder] = weakref.ref(model), next(_order)

    def of_step(self, step: int, operator: str) -> Path:
        """Claim the folder, and return the `step_folder` in it. Collective."""
        self.claim()
        return step_folder(self.folder, step, operator)


def step_folder(folder: Path, step: int, operator: str) -> Path:
    """Return the folder of the records of an optimizer step in that of a run.

    It has the name of the operator where that is not the Hessian: results of another matrix at the
    same step lie beside each other.
    """
    other = "" if operator == "hessian" else f"_{operator}"
    return folder / f"step_{step:06d}{other}"


@_collective("gathering a vector")
def gather(backend: Backend, v: Tensor) -> dict[str, Tensor] | None:
    """Return `{parameter name: tensor in its unsharded shape}` on rank 0, None elsewhere.

    Raises:
        ConfigError: v is no vector of this rank.
    """
    layout, space = backend.layout, backend.space
    v = space.vector(v)
    full = {name: collected(layout, space, v, name, shape) for name, shape in backend.parameters}
    return full if space.rank == 0 else None


@_collective("scattering a vector")
def scatter(backend: Backend, full: Mapping[str, Tensor] | None) -> Tensor:
    """Return the vector `(n_local,)` of rank 0's tensors; the inverse of `gather`.

    Raises:
        ConfigError: on rank 0 a parameter is missing, or has another shape; the other ranks raise
            MeasurementError.
    """
    layout, space = backend.layout, backend.space
    v = space.zeros()
    for name, shape in backend.parameters:
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=space.device)
        with together(f"scattering parameter {name!r}", device=space.device):
            if space.rank == 0:
                whole.copy_(_expect(full, name, shape).reshape(-1))
        distribute(layout, space, v, name, whole)
    return v


def _expect(full: Mapping[str, Tensor] | None, name: str, shape: torch.Size) -> Tensor:
    if full is None or name not in full:
        raise ConfigError(f"rank 0 must pass a tensor for parameter {name!r}; it is missing")
    if tuple(full[name].shape) != tuple(shape):
        raise ConfigError(
            f"parameter {name!r} has shape {tuple(shape)}, got a tensor of shape "
            f"{tuple(full[name].shape)}"
        )
    return full[name]


@_collective("writing results", lambda record, folder: {"record": record.kind})
def save_record(backend: Backend, record: Savable, folder: Path) -> Path:
    """Write `<kind>.json` and `<kind>.npz` on rank 0, and `<kind>.safetensors` of its vectors.

    The JSON is the commit point of them all: the vectors are first written beside those of the
    record before, under a name of their own by which they are found until they have taken its
    place.

    Raises:
        MeasurementError: rank 0 could not write.
    """
    path, aside = _vector_files(record, folder)
    for name in record.sharded:
        save_vectors(backend, getattr(record, name), aside, _origin(record))
    with together(f"writing results to {folder}", device=backend.space.device):
        if backend.space.rank == 0:
            try:
                record.save(folder)
            except BaseException:
                if record.sharded and not _is_in(folder, record):  # else it has these vectors
                    aside.unlink(missing_ok=True)
                raise
            if record.sharded:
                os.rename(aside, path)
                flush_folder(folder)
                kept = rf"{re.escape(record.kind)}\.[0-9a-f]{{16}}\.safetensors"
                remove_abandoned(folder, f"{kept}|{temporaries(kept)}")
    return folder


def _is_in(folder: Path, record: Savable) -> bool:
    try:
        return bool(type(record).load(folder).provenance == record.provenance)
    except (OSError, ResultError):
        return False


@_collective("reading results", lambda record, folder: {"record": record.kind})
def load_record(backend: Backend, record: type[R], folder: str | Path) -> R:
    """Return the record of a kind that `save_record` wrote, its vectors in this job's layout.

    Raises:
        ResultError: files are missing, damaged, of another schema, another model, or of different
            records; on ranks that do not read them, MeasurementError.
    """
    folder = path_of(folder)
    with together(f"reading results from {folder}", device=backend.space.device):
        found = record.load(folder)
        path, aside = _vector_files(found, folder)
        if found.sharded and backend.space.rank == 0:
            path = aside if aside.exists() else path
            if not _is_of(Reader(path), found):
                raise ResultError(f"{path} belongs to another {record.kind}")
    vectors: dict[str, Any] = {name: load_vectors(backend, path) for name in found.sharded}
    return cast("R", replace(found, **vectors))  # mypy takes `load` of a union's member for both


@_collective("writing vectors", lambda vectors, *args: {"vectors": vectors})
def save_vectors(
    backend: Backend,
    vectors: Tensor,
    path: str | Path,
    metadata: Mapping[str, object] | None = None,
) -> Path:
    """Write vectors `(k, n_local)` as `{parameter name: (k, *unsharded shape)}`, safetensors.

    Args:
        backend: The job.
        vectors: Vectors such as the eigenvectors of `eigenpairs`.
        path: Path of the file.
        metadata: Kept beside them, as JSON.

    Raises:
        MeasurementError: rank 0 could not write.
    """
    layout, space, path = backend.layout, backend.space, path_of(path)
    doing, device = f"writing vectors to {path}", space.device
    shapes = {name: (len(vectors), *shape) for name, shape in backend.parameters}
    kept = {key: json.dumps(value) for key, value in (metadata or {}).items()}
    with ExitStack() as stack:
        writer = None
        with together(doing, device=device):
            if space.rank == 0:
                writer = stack.enter_context(Writer(path, shapes, kept))
        for name, shape in backend.parameters:
            parts = [collected(layout, space, v, name, shape) for v in vectors]
            with together(doing, device=device):
                if writer is not None:
                    for part in parts:
                        writer.append(part)
        with together(doing, device=device):
            stack.close()
    return path


@_collective("reading vectors")
def load_vectors(backend: Backend, path: str | Path) -> Tensor:
    """Return the vectors that `save_vectors` wrote, `(k, n_local)`, in this job's layout.

    Files are of all parameters, also of a job that is restricted to some of them.

    Raises:
        ResultError: on rank 0 the file is missing, damaged, or of another model; the other ranks
            raise MeasurementError.
    """
    if isinstance(backend, Restricted):
        return backend.select(load_vectors(backend.whole, path))
    layout, space, path = backend.layout, backend.space, path_of(path)
    doing, device = f"reading vectors from {path}", space.device
    reader, count = None, 0
    with together(doing, device=device):
        if space.rank == 0:
            reader = Reader(path)
            count = _expect_shapes(reader, {n: tuple(shape) for n, shape in backend.parameters})
    count = int(space.reduce(torch.tensor([float(count)], dtype=torch.float64))[0])
    vectors = torch.zeros(count, space.n_local, device=device)
    for name, shape in backend.parameters:
        parts = torch.zeros((count, *shape), device=device)
        with together(doing, device=device):
            if reader is not None:
                parts.copy_(reader.read(name))
        for v, part in zip(vectors, parts, strict=True):
            distribute(layout, space, v, name, part)
    return vectors


def _origin(record: Savable) -> dict[str, object]:
    """Return what a file of vectors says of the record that they are part of."""
    known = {key: value for key, value in asdict(record.provenance).items() if value is not None}
    return {"record": type(record).__name__, "provenance": known}


def _is_of(file: Reader, record: Savable) -> bool:
    """Return whether a file of vectors says that it is part of this record.

    Facts that it does not know, since an earlier version wrote it, have their defaults, as in the
    record itself.
    """
    try:
        said = {key: json.loads(text) for key, text in file.metadata.items()}
        source = read_value(Provenance, said.get("provenance"), "provenance")
    except (ResultError, ValueError, RecursionError):
        return False
    return bool(said.get("record") == type(record).__name__ and source == record.provenance)


def _vector_files(record: Savable, folder: Path) -> tuple[Path, Path]:
    """Return the file of a record's vectors, and the one in which they are first written."""
    origin = json.dumps(_origin(record), sort_keys=True).encode()
    key = hashlib.blake2b(origin, digest_size=8).hexdigest()
    return folder / f"{record.kind}.safetensors", folder / f"{record.kind}.{key}.safetensors"


def _expect_shapes(reader: Reader, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of vectors in the file, which must be of this model."""
    counts = {found[0] if found else -1 for found in reader.shapes.values()}
    expected = {name: (*counts, *sizes) for name, sizes in shapes.items()}
    if len(counts) != 1 or reader.shapes != expected:
        wrong = sorted(
            name
            for name in reader.shapes.keys() | shapes.keys()
            if reader.shapes.get(name, ())[1:] != shapes.get(name)
        )
        raise ResultError(
            f"{reader.path} is not of this model: other names or shapes for {wrong[:5]} "
            f"({len(wrong)} parameters)"
        )
    return int(counts.pop())
