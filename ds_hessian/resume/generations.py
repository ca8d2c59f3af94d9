"""Generations of figures on disk: which there are, which are still whole, and their removal."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_hessian.errors import ResultError
from ds_hessian.ranks import from_rank, together
from ds_hessian.records.fields import Json
from ds_hessian.records.files import Claim, remove_abandoned, temporaries
from ds_hessian.resume.files import read_json
from ds_hessian.vectors import VectorSpace

logger = logging.getLogger(__name__)

ID = 12
"""Hexadecimal digits of a run's id."""


@dataclass(frozen=True)
class Generation:
    """A generation on disk: its number, its run, and the names of its vectors."""

    number: int
    run: str
    vectors: frozenset[str]

    @classmethod
    def of(cls, content: Json) -> Generation:
        """Return the generation that a file of figures describes."""
        return cls(content["generation"], content["run"], frozenset(content["vectors"]))

    @property
    def needs(self) -> frozenset[tuple[str, str]]:
        """The (run, vector) that it names."""
        return frozenset((self.run, name) for name in self.vectors)


def still_whole(kept: list[Generation]) -> list[Generation]:
    """Return the generations, in order, whose vectors the newest two name too."""
    newest = frozenset(need for g in kept[-2:] for need in g.needs)
    return [g for g in kept if g.needs <= newest]


def generations(folder: Path, space: VectorSpace) -> Iterator[Json | str]:
    """Yield what rank 0 finds in a folder, the newest first: contents, or what is wrong with a
    file.

    Collective: all ranks take equally many.
    """
    for path in from_rank(state_files(folder) if space.rank == 0 else [], 0, space.device):
        found: Json | str = ""
        if space.rank == 0:
            try:
                found = read_json(path)
                if path != state_file(folder, found["generation"]):
                    found = f"{path} is generation {found['generation']}: files have been exchanged"
            except ResultError as error:
                found = str(error)
        yield from_rank(found, 0, space.device)


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
            what = f"optimizer step {there['optimizer steps']}"
            discard(folder, space, f"{what}, which was not finished", step)
        return


def discard(folder: Path, space: VectorSpace, what: str, step: int) -> None:
    """Remove a state, with a line in the log.

    Args:
        folder: Folder of the state.
        space: Space of the vectors.
        what: What it is of.
        step: The optimizer step that is measured now.

    Raises:
        MeasurementError: rank 0 could not remove it.

    Collective.
    """
    with together(f"removing the state in {folder}", device=space.device):
        if space.rank == 0:
            logger.warning(
                "the state in %s is of %s; it is removed, and step %d is measured",
                *(folder, what, step),
            )
            claim = Claim(folder)
            remove_all(folder)
            claim.release()


def state_file(folder: Path, generation: int) -> Path:
    """Return the file of a generation's figures."""
    return folder / f"state.{generation}.json"


def state_files(folder: Path) -> list[Path]:
    """Return the files of figures, the newest first."""
    found = {}
    for path in folder.glob("state.*.json"):
        number = re.fullmatch(r"state\.([0-9]{1,9})\.json", path.name)
        if number:
            found[int(number[1])] = path
    return [found[number] for number in sorted(found, reverse=True)]


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs."""
    found = folder.glob("run-" + "[0-9a-f]" * ID)
    return [path for path in found if path.is_dir() and not path.is_symlink()]


def remove_all(folder: Path) -> None:
    """Remove a state."""
    for path in state_files(folder):  # first what names the others
        path.unlink(missing_ok=True)
    remove_abandoned(folder, temporaries(r"state\.[0-9]+\.json"))
    for run in runs_in(folder):
        shutil.rmtree(run)
