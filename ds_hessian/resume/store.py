"""The state of a run on disk: figures, the same on every rank, and sharded vectors.

    <folder>/state.<g>.json                  generations of figures, written by rank 0
    <folder>/run-<id>/rank<r>/layout.json    the fragments of a rank's vectors, and its notes
    <folder>/run-<id>/rank<r>/<name>.safetensors    a rank's part of a vector

A vector never changes once it has its name, so each is written once. A generation names its vectors
and is written last, when every rank has written its own. It is kept as long as the newest two
generations name all of its vectors: a vector that is damaged costs the products since it was
written, whichever it is. Every file is written aside, flushed to the disk and renamed, and holds a
checksum. A job may so be killed at any moment: what is on disk is at worst one `save` old, and what
it was about to write is removed with what is no longer needed.

The folder must be seen by all ranks, and one job at a time may use it. A rank lists only its own
folder. Another layout reads the same vectors by parameter name and index in the unsharded
parameter, and continues in a run of its own beside the old one.

Cost of a `save` with one new vector: 4 n_local bytes written by each rank, three small all-reduces.
Resuming reads every vector once: its checksum, and the vector itself when it is asked for, are of
the same pages, which stay in the system's cache of files and in nobody's memory. On another layout
each rank also reads the layouts of a share of the old ranks, which are then exchanged.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.ranks import checkpoint, first_of, from_rank, gather_objects, together, union
from ds_hessian.records.fields import Json
from ds_hessian.records.files import Claim
from ds_hessian.resume.files import (
    Origin,
    read_json,
    read_vector,
    text_digest,
    write_json,
    write_vector,
)
from ds_hessian.resume.generations import (
    ID,
    Generation,
    generations,
    remove_all,
    runs_in,
    state_file,
    state_files,
    still_whole,
)
from ds_hessian.resume.parts import Index, from_json, overlaps, to_json
from ds_hessian.vectors import Layout, VectorSpace

logger = logging.getLogger(__name__)

FORMAT = 2
"""Format of the files; raised with every change that an older reader would misread."""

Source = Callable[[str], Tensor]
Given = Tensor | Callable[[], Tensor] | None


@dataclass(frozen=True)
class _Rank:
    """The files of one rank of a run.

    Attributes:
        digest: The digest of its layout.
        n_local: The size of its vectors.
        pairs: Which coordinates of this rank are in them, and where.
    """

    run: str
    rank: int
    digest: str
    n_local: int
    pairs: list[tuple[Index, Index]]


@dataclass(frozen=True)
class _Unusable:
    """Why a generation cannot be used, and its damaged (run, vector), of all ranks."""

    text: str
    vectors: frozenset[tuple[str, str]] = frozenset()


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
        ConfigError: another job uses the folder, or there is a state, but none of its generations
            can be read.

    Collective: the constructor and all methods but `close`.
    """

    def __init__(
        self, folder: Path, layout: Layout, space: VectorSpace, notes: Mapping[str, object]
    ) -> None:
        self.folder, self.layout, self.space = folder, layout, space
        self.figures: Json | None = None
        self.notes: Json | None = None
        self._doing = f"keeping the state of the run in {folder}"
        self._source: Source | None = None
        self._mapped: dict[Path, Tensor] = {}  # with the right checksum, not asked for yet
        self._kept: list[Generation] = []
        self._written: frozenset[str] = frozenset()
        self._listed = False
        self._claim: Claim | None = None
        with together(self._doing, device=space.device):
            if space.rank == 0:
                self._claim = Claim(folder)
        self._run = from_rank(f"run-{uuid.uuid4().hex[:ID]}", 0, space.device)
        fragments = to_json(layout)
        self._digest = text_digest(json.dumps(fragments))
        self._resume()
        if self.notes is None:
            with together(self._doing, device=space.device):
                content = {
                    **{"run": self._run, "rank": space.rank},
                    **{"fragments": fragments, "notes": dict(notes)},
                }
                self._place(self._run, space.rank).mkdir(parents=True, exist_ok=True)
                write_json(self._layout_file(self._run, space.rank), content)

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
        number = self._kept[-1].number + 1 if self._kept else 1
        new = Generation(number, self._run, frozenset(vectors))
        with together(self._doing, device=self.space.device):
            for name in sorted(new.vectors - self._written):
                v = vectors[name]
                v = v() if callable(v) else v
                self._write_vector(name, self._read(name) if v is None else v)
            checkpoint(self._doing, device=self.space.device)
            if self.space.rank == 0:
                content = {
                    "format": FORMAT,
                    "generation": new.number,
                    "run": self._run,
                    "world_size": self.space.world_size,
                    "vectors": sorted(new.vectors),
                    "figures": dict(figures),
                }
                write_json(state_file(self.folder, new.number), content)
        self._written, self._source = new.vectors, None
        self._mapped.clear()
        before, self._kept = self._kept, still_whole([*self._kept, new])
        with together(self._doing, device=self.space.device):
            self._remove_unused([g for g in before if g not in self._kept])

    def clear(self) -> None:
        """Remove the state: the run has ended."""
        self._source, self._written, self._kept = None, frozenset(), []
        self._mapped.clear()
        with together(self._doing, device=self.space.device):
            try:
                if self.space.rank == 0:
                    remove_all(self.folder)
                self.close()
            except OSError as error:  # the run has its record: a state that stays gives it again
                text = "the state in %s cannot be removed (%s): remove the folder"
                logger.warning(text, self.folder, error)

    def close(self) -> None:
        """Let other jobs use the folder. Not collective."""
        if self._claim is not None:
            self._claim.release()

    # ---- reading

    def _resume(self) -> None:
        problems, bad = [], frozenset[tuple[str, str]]()
        for content in generations(self.folder, self.space):
            if self._kept:  # older than the one that is resumed
                if not isinstance(content, str):
                    self._kept.insert(0, Generation.of(content))
                continue
            try:
                problem = self._require_usable(content, bad)
            except ResultError as error:  # of the figures, the same on every rank
                problem = _Unusable(str(error))
            if isinstance(problem, _Unusable):
                problems.append(problem.text)
                bad |= problem.vectors
        if problems and not self._kept:
            raise ConfigError(
                f"the state in {self.folder} cannot be resumed: {'; '.join(problems)}: remove the "
                "folder, or name another, to begin anew"
            )
        if problems and self.space.rank == 0:
            text = "an older generation of the state in %s is used, generation %d: %s"
            logger.warning(text, self.folder, self._kept[-1].number, "; ".join(problems))

    def _require_usable(
        self, content: Json | str, bad: frozenset[tuple[str, str]]
    ) -> _Unusable | None:
        """Resume from a generation, or return why not."""
        if isinstance(content, str):
            return _Unusable(content)
        if content["format"] != FORMAT:
            found = content["format"]
            return _Unusable(f"it has format {found}, this ds_hessian reads {FORMAT}")
        generation = Generation.of(content)
        if generation.needs & bad:
            return _Unusable(f"generation {generation.number} names them too")
        state = self._find(content)
        if isinstance(state, _Unusable):
            return state
        self._source, notes = state
        self.figures, self._kept = content["figures"], [generation]
        if notes is not None:
            self._run, self.notes, self._written = generation.run, notes, generation.vectors
        return None

    def _read(self, name: str) -> Tensor:
        assert self._source is not None
        return self._source(name)

    def _find(self, content: Json) -> tuple[Source, Json | None] | _Unusable:
        """Return a function that reads a generation's vectors, and this rank's notes if this layout
        wrote them.
        """
        run, world_size, own = content["run"], content["world_size"], Json()
        problem: str | None = None
        try:
            if self.space.world_size == world_size:
                own = self._read_layout(run, self.space.rank)
        except ResultError as error:
            problem = str(error)
        # The same layout on every rank, or another one for all: they write as one run.
        differs = own.get("fragments") != to_json(self.layout)
        count = self.space.reduce(torch.tensor([float(differs)], dtype=torch.float64))
        same = float(count[0]) == 0
        ranks, damaged = list[_Rank](), list[str]()
        try:
            if same:
                ranks = [_Rank(run, self.space.rank, self._digest, self.layout.n_local, [])]
            else:
                ranks = self._overlapping(run, world_size)
        except ResultError as error:
            problem = problem or str(error)
        for name in content["vectors"]:  # the checksums, now, while refusing is still possible
            try:
                for rank in ranks:
                    path = self._vector_file(run, name, rank.rank)
                    if path not in self._mapped:
                        self._mapped[path] = self._checked(rank, name)
            except ResultError as error:
                damaged.append(name)
                problem = problem or str(error)
        number = first_of(problem is not None, self.space.device)
        if number is not None:
            text = from_rank(problem, number, self.space.device)
            names = union(set(damaged), self.space.device)
            return _Unusable(f"rank {number}: {text}", frozenset((run, name) for name in names))
        if same:
            return partial(self._whole, ranks[0]), own["notes"]
        return partial(self._assemble, ranks), None

    def _overlapping(self, run: str, world_size: int) -> list[_Rank]:
        """Find which coordinates of this rank are in the files of another layout's ranks.

        Collective: each layout is read by one rank.
        """
        mine: dict[int, Json | str] = {}
        for number in range(self.space.rank, world_size, self.space.world_size):
            try:
                mine[number] = self._read_layout(run, number)
            except ResultError as error:
                mine[number] = str(error)
        found, missing = list[_Rank](), torch.ones(self.layout.n_local, dtype=torch.bool)
        for number, entry in (item for each in gather_objects(mine) for item in each.items()):
            if isinstance(entry, str):
                raise ResultError(entry)
            there = from_json(entry["fragments"])
            pairs = overlaps(self.layout, there)
            if pairs:
                digest = text_digest(json.dumps(entry["fragments"]))
                found.append(_Rank(run, number, digest, there.n_local, pairs))
            for here, _ in pairs:
                missing[here] = False
        if bool(missing.any()):
            raise ResultError(
                f"{int(missing.sum())} coordinates of this model are not in it: it is the state of "
                "another model"
            )
        return found

    def _whole(self, rank: _Rank, name: str) -> Tensor:
        v = self._mapped.pop(self._vector_file(rank.run, name, rank.rank), None)
        return self._checked(rank, name) if v is None else v

    def _assemble(self, ranks: list[_Rank], name: str) -> Tensor:
        v = torch.zeros(self.layout.n_local)
        for rank in ranks:
            theirs = self._whole(rank, name)
            for here, there in rank.pairs:
                v[here] = theirs[there]
        return v

    def _checked(self, rank: _Rank, name: str) -> Tensor:
        origin = Origin(rank.run, rank.rank, name, rank.digest)
        return read_vector(self._vector_file(rank.run, name, rank.rank), origin, rank.n_local)

    def _read_layout(self, run: str, rank: int) -> Json:
        path = self._layout_file(run, rank)
        content = read_json(path)
        if (content["run"], content["rank"]) != (run, rank):
            raise ResultError(
                f"{path} is of rank {content['rank']} in {content['run']}, not of rank {rank} in "
                f"{run}: files have been exchanged"
            )
        return content

    # ---- writing

    def _write_vector(self, name: str, v: Tensor) -> None:
        rank = self.space.rank
        origin = Origin(self._run, rank, name, self._digest)
        write_vector(self._vector_file(self._run, name, rank), v, origin)

    def _remove_unused(self, dropped: list[Generation]) -> None:
        """Remove files of this rank (of rank 0, whole runs) that no generation names any more.

        The first time, what jobs before this one have left is looked for.
        """
        used = frozenset(need for g in self._kept for need in g.needs)
        gone = self._own_files({need for g in dropped for need in g.needs} - used)
        runs, states = {g.run for g in dropped}, {g.number for g in dropped}
        if not self._listed:
            place = self._place(self._run, self.space.rank)
            found = {*place.glob("*.safetensors"), *place.glob(".*.tmp")}
            gone |= found - self._own_files(used)
            runs |= {path.name for path in runs_in(self.folder)}
            states |= {int(path.name.split(".")[1]) for path in state_files(self.folder)}
        for path in gone:
            path.unlink(missing_ok=True)
        if self.space.rank == 0:
            for number in states - {g.number for g in self._kept}:
                state_file(self.folder, number).unlink(missing_ok=True)
            for run in runs - {g.run for g in self._kept}:
                shutil.rmtree(self.folder / run)
        self._listed = True

    def _own_files(self, needs: Iterable[tuple[str, str]]) -> set[Path]:
        rank = self.space.rank
        return {self._vector_file(run, n, rank) for run, n in needs if run == self._run}

    # ---- files

    def _place(self, run: str, rank: int) -> Path:
        return self.folder / run / f"rank{rank}"

    def _layout_file(self, run: str, rank: int) -> Path:
        return self._place(run, rank) / "layout.json"

    def _vector_file(self, run: str, name: str, rank: int) -> Path:
        return self._place(run, rank) / f"{name}.safetensors"
