"""Sharded vectors and records: gathered, scattered, on disk, and loaded on any layout.

All functions are collective. Parameters travel between the shards and rank 0 one by one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_hessian.backends.protocol import Backend
from ds_hessian.backends.restricted import Restricted
from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.ranks import together
from ds_hessian.records import HessianDecomposition, Measured
from ds_hessian.records.safetensors import Reader, Writer
from ds_hessian.vectors import collected, distribute

R = TypeVar("R", bound=Measured)


def gather(backend: Backend, v: Tensor) -> dict[str, Tensor] | None:
    """Return `{parameter name: tensor in its unsharded shape}` on rank 0, None elsewhere."""
    layout, space = backend.layout, backend.space
    full = {name: collected(layout, space, v, name, shape) for name, shape in backend.parameters}
    return full if space.rank == 0 else None


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


def save_record(backend: Backend, record: Measured | HessianDecomposition, folder: Path) -> Path:
    """Write `<kind>.json` and `<kind>.npz` on rank 0, and `<kind>.safetensors` of its vectors.

    Raises:
        MeasurementError: rank 0 could not write.
    """
    with together(f"writing results to {folder}", device=backend.space.device):
        if backend.space.rank == 0:
            record.save(folder)
    for name in record.sharded:
        path = _vector_file(type(record), folder)
        save_vectors(backend, getattr(record, name), path, _origin(record))
    return folder


def load_record(backend: Backend, record: type[R], folder: Path) -> R:
    """Return the record of a kind that `save_record` wrote, its vectors in this job's layout.

    Raises:
        ResultError: files are missing, damaged, of another schema, another model, or of different
            records; on ranks that do not read them, MeasurementError.
    """
    path = _vector_file(record, folder)
    with together(f"reading results from {folder}", device=backend.space.device):
        found = record.load(folder)
        if found.sharded and backend.space.rank == 0:
            origin = {key: json.dumps(value) for key, value in _origin(found).items()}
            if Reader(path).metadata != origin:
                raise ResultError(f"{path} belongs to another {record.kind}")
    vectors: dict[str, Any] = {name: load_vectors(backend, path) for name in found.sharded}
    return replace(found, **vectors)


def save_vectors(
    backend: Backend, vectors: Tensor, path: Path, metadata: Mapping[str, object] | None = None
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
    layout, space = backend.layout, backend.space
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


def load_vectors(backend: Backend, path: Path) -> Tensor:
    """Return the vectors that `save_vectors` wrote, `(k, n_local)`, in this job's layout.

    Files are of all parameters, also of a job that is restricted to some of them.

    Raises:
        ResultError: on rank 0 the file is missing, damaged, or of another model; the other ranks
            raise MeasurementError.
    """
    if isinstance(backend, Restricted):
        return backend.select(load_vectors(backend.whole, path))
    layout, space = backend.layout, backend.space
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


def _origin(record: Measured | HessianDecomposition) -> dict[str, object]:
    """Return what a file of vectors says of the record that they are part of."""
    return {"record": type(record).__name__, "provenance": vars(record.provenance)}


def _vector_file(record: type[Any], folder: Path) -> Path:
    return folder / f"{record.kind}.safetensors"


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
