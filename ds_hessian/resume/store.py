"""The state of a run on disk: figures, the same on every rank, and sharded vectors.

    <folder>/state.0.json, state.1.json      two generations of figures, written by rank 0
    <folder>/run-<id>/rank<r>.json           the fragments of a rank's vectors, and its notes
    <folder>/run-<id>/<name>.rank<r>.safetensors    a rank's part of a vector

A vector never changes once it has its name, so each is written once. A generation names its vectors
and is written last, when every rank has written its own, over the older one of the two; every file
is written aside, flushed to the disk and renamed, and holds a checksum. A job may so be killed at
any moment: what is on disk is at worst one `save` old, and what it was about to write is removed
with what is no longer needed. The folder must be seen by all ranks.

Another layout reads the same vectors by parameter name and index in the unsharded parameter, and
continues in a run of its own beside the old one.

Cost of a `save` with one new vector: 4 n_local bytes written by each rank, three small all-reduces.
Resuming reads every vector once: its checksum, and the vector itself when it is asked for, are of
the same pages, which stay in the system's cache of files and in nobody's memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.ranks import checkpoint, together
from ds_hessian.records.fields import Json
from ds_hessian.records.files import remove_abandoned, replacing, temporaries
from ds_hessian.records.safetensors import Reader, Writer
from ds_hessian.vectors import Box, Fragment, Layout, VectorSpace

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
"""Format of the files; raised with every change that an older reader would misread."""

GENERATIONS = 2

ID = 12
"""Hexadecimal digits of a run's id."""

Index = slice | Tensor
Parts = dict[int, list[tuple[Index, Index]]]
Source = Callable[[str], Tensor]
Given = Tensor | Callable[[], Tensor] | None


class StateStore:
    """A folder with the state of at most one run.

    Args:
        folder: Made if it is not there.
        layout: Layout of this rank's vectors.
        space: Space of the vectors.
        notes: Small JSON values of this rank alone, kept with a new run.

    Attributes:
        figures: Figures of the newest intact generation; None if there is no state.
        notes: This rank's, of the run that is resumed; None if it has another layout.

    Raises:
        ConfigError: there is a state, but none of its generations can be read.

    Collective: the constructor and all methods.
    """

    def __init__(
        self, folder: Path, layout: Layout, space: VectorSpace, notes: Mapping[str, object]
    ) -> None:
        self.folder, self.layout, self.space = folder, layout, space
        self.figures: Json | None = None
        self.notes: Json | None = None
        self._doing = f"keeping the state of the run in {folder}"
        self._source: Source | None = None
        self._whole: dict[Path, Tensor] = {}  # mapped, with the right checksum, not asked for yet
        self._kept: list[tuple[str, frozenset[str]]] = []  # (run, vectors) of both generations
        self._written: frozenset[str] = frozenset()
        self._generation = 0
        self._run = _from_rank_0(space, f"run-{uuid.uuid4().hex[:ID]}")
        self._take_up()
        if self.notes is None:
            with together(self._doing, device=space.device):
                content = {"fragments": [_plain(f) for f in layout.fragments], "notes": dict(notes)}
                (folder / self._run).mkdir(parents=True, exist_ok=True)
                _write_json(self._rank_file(self._run, space.rank), content)

    def vector(self, name: str) -> Tensor:
        """Return a vector of the state that was found, `(n_local,)` fp32, on the CPU.

        It is available only before the first `save`.
        """
        with together(self._doing, device=self.space.device):
            v = self._read(name)
        return v

    def save(self, figures: Mapping[str, object], vectors: Mapping[str, Given]) -> None:
        """Save these figures and vectors as the state, durably.

        Args:
            figures: JSON values, the same on every rank.
            vectors: {name: `(n_local,)`, or a function that gives it}: all of the state's vectors.
                Vectors that the state before had already are not written again, nor evaluated,
                and may be None.

        Raises:
            MeasurementError: some rank could not write (the state before is still there), or could
                not remove what is no longer needed.
        """
        names, generation = frozenset(vectors), self._generation + 1
        with together(self._doing, device=self.space.device):
            for name in sorted(names - self._written):
                v = vectors[name]
                v = v() if callable(v) else v
                self._write_vector(name, self._read(name) if v is None else v)
            checkpoint(self._doing, device=self.space.device)
            if self.space.rank == 0:
                content = {
                    "format": FORMAT,
                    "generation": generation,
                    "run": self._run,
                    "world_size": self.space.world_size,
                    "vectors": sorted(names),
                    "figures": dict(figures),
                }
                _write_json(self._state_file(generation), content)
        self._generation, self._written, self._source = generation, names, None
        self._whole.clear()
        self._kept = [*self._kept, (self._run, names)][-GENERATIONS:]
        with together(self._doing, device=self.space.device):
            self._remove_unused()

    def clear(self) -> None:
        """Remove the state: the run has ended."""
        self._source, self._written, self._kept = None, frozenset(), []
        self._whole.clear()
        with together(self._doing, device=self.space.device):
            if self.space.rank == 0:
                _remove_all(self.folder)

    # ---- reading

    def _take_up(self) -> None:
        problems = []
        for content in generations(self.folder, self.space):
            if isinstance(content, str):
                problems.append(content)
                continue
            found = self._find(content)
            if isinstance(found, str):
                problems.append(found)
                continue
            self._source, notes = found
            self.figures, self._generation = content["figures"], content["generation"]
            names = frozenset(content["vectors"])
            self._kept = [(content["run"], names)]
            if notes is not None:
                self._run, self.notes, self._written = content["run"], notes, names
            return
        if problems:
            raise ConfigError(
                f"the state in {self.folder} cannot be resumed: {'; '.join(problems)}: remove the "
                "folder, or name another, to begin anew"
            )

    def _read(self, name: str) -> Tensor:
        assert self._source is not None
        return self._source(name)

    def _find(self, content: Json) -> tuple[Source, Json | None] | str:
        """Return a function that reads a generation's vectors, and this rank's notes if this layout
        wrote them; or what is wrong with them, on any rank.
        """
        if content["format"] != FORMAT:
            return f"it has format {content['format']}, this ds_hessian reads {FORMAT}"
        run, ranks, problem = content["run"], range(content["world_size"]), None
        own: Json = {}
        try:
            if self.space.world_size == len(ranks):
                own = _read_json(self._rank_file(run, self.space.rank))
        except ResultError as error:
            problem = str(error)
        # The same layout on every rank, or another one for all: they write as one run.
        differs = own.get("fragments") != [_plain(f) for f in self.layout.fragments]
        count = self.space.reduce(torch.tensor([float(differs)], dtype=torch.float64))
        same = float(count[0]) == 0
        source: Source = partial(self._read_vector, run, self.space.rank)
        needed = [self.space.rank]
        self._whole.clear()
        try:
            if not same:
                parts = self._parts(run, ranks)
                source = partial(self._assemble, run, parts)
                needed = [rank for rank, pairs in parts.items() if pairs]
            for name in content["vectors"]:  # the checksums, now, while refusing is still possible
                for rank in needed:
                    path = self._vector_file(run, name, rank)
                    self._whole[path] = _checked(path)
        except ResultError as error:
            problem = problem or str(error)
        problem = self._everywhere(problem)
        return problem or (source, own["notes"] if same else None)

    def _parts(self, run: str, ranks: range) -> Parts:
        """Find which coordinates of this rank are stored in the files of another layout's ranks."""
        parts, missing = {}, torch.ones(self.layout.n_local, dtype=torch.bool)
        for rank in ranks:
            entries = _read_json(self._rank_file(run, rank))["fragments"]
            parts[rank] = overlaps(self.layout, Layout([_fragment(entry) for entry in entries]))
            for here, _ in parts[rank]:
                missing[here] = False
        if bool(missing.any()):
            raise ResultError(
                f"{int(missing.sum())} coordinates of this model are not in it: it is the state of "
                "another model"
            )
        return parts

    def _assemble(self, run: str, parts: Parts, name: str) -> Tensor:
        v = torch.zeros(self.layout.n_local)
        for rank, pairs in parts.items():
            theirs = self._read_vector(run, rank, name) if pairs else v
            for here, there in pairs:
                v[here] = theirs[there]
        return v

    def _read_vector(self, run: str, rank: int, name: str) -> Tensor:
        path = self._vector_file(run, name, rank)
        v = self._whole.pop(path, None)
        return _checked(path) if v is None else v

    # ---- writing

    def _write_vector(self, name: str, v: Tensor) -> None:
        wide = v.detach().to("cpu", torch.float32).contiguous()
        path = self._vector_file(self._run, name, self.space.rank)
        with Writer(path, {"vector": tuple(wide.shape)}, {"blake2b": _digest(wide)}) as writer:
            writer.append(wide)

    def _remove_unused(self) -> None:
        """Remove files of this rank (of rank 0, whole runs) that no generation names any more."""
        needed = {name for run, names in self._kept if run == self._run for name in names}
        used = {self._vector_file(self._run, name, self.space.rank) for name in needed}
        for path in (self.folder / self._run).glob(f"*.rank{self.space.rank}.safetensors*"):
            if path not in used:
                path.unlink()
        if self.space.rank == 0:
            for run in self._runs():
                if run.name not in {name for name, _ in self._kept}:
                    shutil.rmtree(run)

    # ---- files, and agreement

    def _state_file(self, generation: int) -> Path:
        return _state_file(self.folder, generation)

    def _rank_file(self, run: str, rank: int) -> Path:
        return self.folder / run / f"rank{rank}.json"

    def _vector_file(self, run: str, name: str, rank: int) -> Path:
        return self.folder / run / f"{name}.rank{rank}.safetensors"

    def _runs(self) -> list[Path]:
        return _runs(self.folder)

    def _everywhere(self, problem: str | None) -> str | None:
        """Return the problem of the lowest rank that has one, on every rank."""
        if not self.space.distributed:
            return problem
        found: list[str | None] = [None] * self.space.world_size
        dist.all_gather_object(found, problem)
        return next((f"rank {r}: {text}" for r, text in enumerate(found) if text), None)


def generations(folder: Path, space: VectorSpace) -> list[Json | str]:
    """Return what rank 0 finds in a folder, the newest first: contents, or what is wrong with a
    file.

    Collective.
    """
    found: list[Json | str] = []
    if space.rank == 0:
        for slot in range(GENERATIONS):
            path = _state_file(folder, slot)
            try:
                if path.exists():
                    found.append(_read_json(path))
            except ResultError as error:
                found.append(str(error))
        found.sort(key=lambda c: -1 if isinstance(c, str) else c["generation"], reverse=True)
    return _from_rank_0(space, found)


def retire(folder: Path, space: VectorSpace, wanted: Mapping[str, object], step: int) -> None:
    """Remove the state of the same measurement at another optimizer step.

    Args:
        folder: Folder of the state.
        space: Space of the vectors.
        wanted: Entries of `identity_of` that must be the same; another state is left alone.
        step: The optimizer step that is measured now.

    Raises:
        MeasurementError: rank 0 could not remove it.

    Collective.
    """
    here = json.loads(json.dumps(dict(wanted)))
    for content in generations(folder, space):
        if isinstance(content, str):
            continue
        there = content["figures"]["identity"]
        same = all(there.get(name) == value for name, value in here.items())
        if same and there["optimizer steps"] != step:
            with together(f"removing the state in {folder}", device=space.device):
                if space.rank == 0:
                    logger.warning(
                        "the state in %s is of optimizer step %d, which was not finished; it is "
                        "removed, and step %d is measured",
                        folder,
                        there["optimizer steps"],
                        step,
                    )
                    _remove_all(folder)
        return


def overlaps(mine: Layout, theirs: Layout) -> list[tuple[Index, Index]]:
    """Return pairs of indices, into a vector of either layout, of the same coordinates."""
    by_name = defaultdict(list)
    for fragment, span in theirs:
        by_name[fragment.name].append((fragment, span.start))
    pairs: list[tuple[Index, Index]] = []
    for fragment, part in mine:
        for other, offset in by_name[fragment.name]:
            if fragment.box is None and other.box is None:
                start = max(fragment.start, other.start)
                stop = min(fragment.start + fragment.numel, other.start + other.numel)
                if start < stop:
                    a, b = part.start - fragment.start, offset - other.start
                    pairs.append((slice(a + start, a + stop), slice(b + start, b + stop)))
                continue
            _, i, j = np.intersect1d(
                fragment.index().numpy(), other.index().numpy(), True, return_indices=True
            )
            if len(i):
                pairs.append((torch.from_numpy(i + part.start), torch.from_numpy(j + offset)))
    return pairs


def _from_rank_0(space: VectorSpace, value: T) -> T:
    if not space.distributed:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, device=space.device)
    return values[0]


def _state_file(folder: Path, generation: int) -> Path:
    return folder / f"state.{generation % GENERATIONS}.json"


def _runs(folder: Path) -> list[Path]:
    return list(folder.glob("run-" + "[0-9a-f]" * ID))


def _remove_all(folder: Path) -> None:
    for slot in range(GENERATIONS):  # first what names the others
        path = _state_file(folder, slot)
        path.unlink(missing_ok=True)
        remove_abandoned(folder, temporaries(path.name))
    for run in _runs(folder):
        shutil.rmtree(run)


def _plain(fragment: Fragment) -> Json:
    """Return a fragment as JSON values."""
    return dict(json.loads(json.dumps(dataclasses.asdict(fragment))))


def _fragment(entry: Json) -> Fragment:
    box = entry["box"] and Box(tuple(entry["box"]["offset"]), tuple(entry["box"]["shape"]))
    return Fragment(**{**entry, "shape": torch.Size(entry["shape"]), "box": box})


def _checked(path: Path) -> Tensor:
    """Return the vector in a file, mapped."""
    reader = Reader(path)
    v = reader.read("vector")
    if _digest(v) != reader.metadata.get("blake2b"):
        raise ResultError(f"{path} is damaged: its checksum differs")
    return v


def _digest(v: Tensor) -> str:
    return hashlib.blake2b(v.numpy().data, digest_size=16).hexdigest()


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object with its checksum; the file appears whole, or not at all."""
    text = json.dumps(content)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    with replacing(path) as file:
        file.write(f'{{"blake2b": "{digest}", "content": {text}}}'.encode())


def _read_json(path: Path) -> Json:
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        content, digest = dict(whole["content"]), whole["blake2b"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{path} is missing or damaged: {error}") from error
    if hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest() != digest:
        raise ResultError(f"{path} is damaged: its checksum differs")
    return content
