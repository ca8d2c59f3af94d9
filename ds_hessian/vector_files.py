"""Records and vectors on disk: what a `HessianEngine` saves, and loads on any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_hessian.errors import ResultError
from ds_hessian.measurement import Host
from ds_hessian.ranks import together
from ds_hessian.records import PICTURE, DisplacementSweep, HessianSpectrum
from ds_hessian.records.analyses import Measured
from ds_hessian.records.safetensors import Reader, Writer
from ds_hessian.records.store import kind_of, load, save, sharded

R = TypeVar("R", bound=Measured)


class Records(Host):
    """The part of a `HessianEngine` that is here; every method is collective."""

    def save(
        self,
        record: HessianSpectrum | DisplacementSweep | Measured,
        folder: str | Path | None = None,
    ) -> Path:
        """Write a record: `<kind>.json` and `<kind>.npz` on rank 0, its vectors, a picture.

        Eigenvectors and solutions go to `<kind>.safetensors`, as `save_vectors` writes them; the
        picture is of a spectrum, unless `plot` is off.

        Args:
            record: What to write.
            folder: Where to; None for `<output_path>/step_<global step>`.

        Raises:
            MeasurementError: rank 0 could not write.
        """
        if folder is None:
            folder = Path(self.config.output_path) / f"step_{record.provenance.step:06d}"
        folder = Path(folder)
        with together(f"writing results to {folder}", device=self.backend.space.device):
            if self.backend.space.rank == 0:
                save(record, folder)
                if self.config.plot and isinstance(record, HessianSpectrum):
                    record.plot(folder / PICTURE)
        for name in sharded(record):
            path = _vector_file(type(record), folder)
            self.save_vectors(getattr(record, name), path, _origin(record))
        return folder

    def load(self, record: type[R], folder: str | Path) -> R:
        """The record of a kind that `save` wrote, its vectors in this job's layout.

        Raises:
            ResultError: files are missing, damaged, of another schema, another model, or of
                different records; on ranks that do not read them, MeasurementError.
        """
        folder, path = Path(folder), _vector_file(record, Path(folder))
        with together(f"reading results from {folder}", device=self.backend.space.device):
            found = load(record, folder)
            if sharded(found) and self.backend.space.rank == 0:
                origin = {key: json.dumps(value) for key, value in _origin(found).items()}
                if Reader(path).metadata != origin:
                    raise ResultError(f"{path} belongs to another {kind_of(record)}")
        vectors: dict[str, Any] = {name: self.load_vectors(path) for name in sharded(found)}
        return replace(found, **vectors)

    def save_vectors(
        self, vectors: Tensor, path: str | Path, metadata: Mapping[str, Any] | None = None
    ) -> Path:
        """Write vectors `(k, n_local)` as `{parameter name: (k, *unsharded shape)}`, safetensors.

        Parameters travel to rank 0 one by one; any layout can load the file.

        Args:
            vectors: Such as the eigenvectors of `eigenpairs`.
            path: Of the file.
            metadata: To keep beside them, as JSON.

        Raises:
            MeasurementError: rank 0 could not write.
        """
        path, first = Path(path), self.backend.space.rank == 0
        doing, device = f"writing vectors to {path}", self.backend.space.device
        named = self._parameters()
        shapes = {name: (len(vectors), *whole) for name, whole in named}
        kept = {key: json.dumps(value) for key, value in (metadata or {}).items()}
        with ExitStack() as stack:
            writer = None
            with together(doing, device=device):
                if first:
                    writer = stack.enter_context(Writer(path, shapes, kept))
            for name, whole in named:
                parts = [self._whole(v, name, whole) for v in vectors]
                with together(doing, device=device):
                    if writer is not None:
                        for part in parts:
                            writer.append(part)
            with together(doing, device=device):
                stack.close()
        return path

    def load_vectors(self, path: str | Path) -> Tensor:
        """The vectors that `save_vectors` wrote, `(k, n_local)`, in this job's layout.

        Raises:
            ResultError: on rank 0 the file is missing, damaged, or of another model; the other
                ranks raise MeasurementError.
        """
        doing, device = f"reading vectors from {path}", self.backend.space.device
        space, named, reader, count = self.backend.space, self._parameters(), None, 0
        with together(doing, device=device):
            if space.rank == 0:
                reader = Reader(Path(path))
                count = _expect_shapes(reader, {name: tuple(whole) for name, whole in named})
        count = int(space.reduce(torch.tensor([float(count)], dtype=torch.float64))[0])
        vectors = torch.zeros(count, space.n_local, device=space.device)
        for name, whole in named:
            parts = torch.zeros((count, *whole), device=device)
            with together(doing, device=device):
                if reader is not None:
                    parts.copy_(reader.read(name))
            for v, part in zip(vectors, parts, strict=True):
                self._deal(v, name, part)
        return vectors


def _origin(record: Any) -> dict[str, Any]:
    """What a file of vectors says of the record that they are of."""
    return {"record": type(record).__name__, "provenance": vars(record.provenance)}


def _vector_file(record: type[Any], folder: Path) -> Path:
    return folder / f"{kind_of(record)}.safetensors"


def _expect_shapes(reader: Reader, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of vectors in the file, which must be of this model."""
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
