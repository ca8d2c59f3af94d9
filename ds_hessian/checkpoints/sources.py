"""What a path holds: a folder of transformers, a checkpoint of DeepSpeed, a torch state dict.

Only names are looked at here; nothing is unpickled.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from ds_hessian.errors import HessianError, ResultError

Kind = Literal["transformers", "zero", "universal", "state dict"]

STATE_DICTS = (".safetensors", ".pt", ".pth", ".bin")
WHOLE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TAGS = ("latest_universal", "latest")
"""Files in which DeepSpeed names the folder of the last checkpoint."""

POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of what Git LFS leaves in the place of a file that has not been fetched."""

PICKLE, ZIP = b"\x80", b"PK\x03\x04"
"""Starts of files of torch.save, before torch 1.6 and since."""


@contextmanager
def reading(what: object, kind: type[HessianError] = ResultError) -> Iterator[None]:
    """Raise what a reader of files raises as an error of this kind, in one line.

    torch, DeepSpeed, transformers, tokenizers, pyarrow and datasets raise whatever their parts do:
    their errors have no base. A package that is missing, and memory that is short, stay as they
    are.
    """
    try:
        yield
    except (HessianError, ImportError, MemoryError):
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:300]
        raise kind(f"cannot read {what}: {type(error).__name__}: {first}") from error


def require_whole(paths: Iterable[Path]) -> None:
    """Refuse files of weights that hold none, or not all that was saved, as copies often do.

    Readers tell this as what they happen to miss. Only the ends of the files are looked at.

    Raises:
        ResultError: one is empty, truncated, a pointer of Git LFS, or of another form.
    """
    again = "copy it again, or measure another checkpoint"
    for path in paths:
        if not path.is_file():  # reading a pipe might never end
            raise ResultError(f"{path} is not a regular file")
        with path.open("rb") as file:
            start = file.read(len(POINTER))
        if not start:
            raise ResultError(f"{path} is empty: {again}")
        if start == POINTER:
            raise ResultError(f"{path} is a pointer of Git LFS: fetch the file by git lfs pull")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt"):
                    continue
            except SafetensorError as error:
                raise ResultError(f"{path} is truncated or damaged, {again}: {error}") from error
        if start.startswith(ZIP) and not zipfile.is_zipfile(path):
            raise ResultError(f"{path} is truncated or damaged: {again}")
        if not start.startswith((ZIP, PICKLE)):
            raise ResultError(f"{path} is no file of torch.save: {again}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: As it was given.
        kind: What it is.
        folder: Folder of its files; of a state dict the file.
        step: Optimizer steps made, as far as names say; None where they do not.
    """

    path: Path
    kind: Kind
    folder: Path
    step: int | None

    @property
    def config(self) -> Path | None:
        """The folder of a `config.json` of transformers beside the weights; None without one."""
        for folder in (self.folder, self.path):
            if (folder / "config.json").is_file():
                return folder
        return None


def checkpoint_of(path: str | Path) -> Checkpoint:
    """Return what a path holds.

    Raises:
        ResultError: nothing that can be measured; the message says what was expected.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix not in STATE_DICTS:
            raise ResultError(
                f"{path} is no checkpoint: a state dict ends in {', '.join(STATE_DICTS)}"
            )
        return Checkpoint(path, "state dict", path, _number(path.stem))
    if not path.is_dir():
        raise ResultError(f"no such checkpoint: {path}")
    if (path / "config.json").is_file() and any((path / f).is_file() for f in WHOLE + PICKLED):
        return Checkpoint(path, "transformers", path, _trainer_step(path))
    folder = _deepspeed_folder(path)
    if folder is not None:
        kind: Kind = "universal" if (folder / "zero").is_dir() else "zero"
        return Checkpoint(path, kind, folder, _number(folder.resolve().name))
    if (path / "adapter_config.json").is_file():
        raise ResultError(
            f"{path} has adapters alone: merge them into their model (merge_and_unload of peft), "
            "save that and measure it"
        )
    raise ResultError(
        f"{path} is no checkpoint: it has neither config.json with {' or '.join(WHOLE[:1])}, nor "
        "a checkpoint of DeepSpeed (latest, or *_model_states.pt)"
    )


def series_of(paths: Sequence[str | Path]) -> list[Checkpoint]:
    """Return checkpoints with the step of each, in the order of their steps.

    Where a name says no step, or two say the same one, all get their place in the series.

    Raises:
        ResultError: one is no checkpoint.
    """
    found = [checkpoint_of(path) for path in paths]
    steps = [each.step for each in found]
    if len(found) > 1 and (None in steps or len(set(steps)) < len(steps)):
        return [replace(each, step=place) for place, each in enumerate(found)]
    return sorted(found, key=lambda each: each.step or 0)


def _deepspeed_folder(path: Path) -> Path | None:
    """Return the folder of a checkpoint of DeepSpeed: the path, or what its `latest` names."""
    if (path / "zero").is_dir() or any(path.glob("*mp_rank_*_model_states.pt")):
        return path
    for tag in TAGS:
        if not (path / tag).is_file():
            continue
        name = (path / tag).read_text(encoding="utf-8", errors="replace").strip()
        folder = path / name
        if not name or Path(name).name != name or not folder.is_dir():
            raise ResultError(f"{path / tag} names {name[:60]!r}, which is no folder beside it")
        return folder
    return None


def _trainer_step(folder: Path) -> int | None:
    state = folder / "trainer_state.json"
    if not state.is_file():
        return _number(folder.resolve().name)
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultError(f"{state} is damaged: {error!r}") from error
    return step if isinstance(step, int) and step >= 0 else None


def _number(name: str) -> int | None:
    """Return the number at the end of a name: `checkpoint-500`, `global_step500`, `step_000500`."""
    found = re.search(r"(?:^|[^\d.])(\d{1,12})$", name.removesuffix("_universal"))
    return int(found[1]) if found else None
