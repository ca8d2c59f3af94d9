"""No reader waits for a pipe, a socket or a device, or follows links in a circle."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ds_hessian.checkpoints.sources import Checkpoint
from ds_hessian.checkpoints.weights import weights_of
from ds_hessian.cli.finished import _sources
from ds_hessian.errors import HessianError
from ds_hessian.records import HessianSpectrum
from ds_hessian.records.files import Claim, remove_abandoned, replacing
from ds_hessian.records.safetensors import Reader
from ds_hessian.records.store import _holds
from ds_hessian.resume.files import read_json
from ds_hessian.resume.generations import remove_all
from ds_hessian.slices import _read
from ds_hessian.vectors import VectorSpace
from tests.ranks import run_alone


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        os.chdir(path.parent)  # the length of its address is limited
        found.bind(path.name)


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "circle of links": lambda path: path.symlink_to(path),
    "folder": Path.mkdir,
}
"""What may be where a file should be."""


def checkpoint(path: Path) -> object:
    """The weights of a checkpoint of DeepSpeed with such a file."""
    return weights_of(Checkpoint(path.parent, "zero", path.parent, None))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "the JSON of a record": ("spectrum.json", lambda path: HessianSpectrum.load(path.parent)),
    "vectors": ("vectors.safetensors", Reader),
    "figures of a state": ("state.1.json", read_json),
    "a checkpoint": ("mp_rank_00_model_states.pt", checkpoint),
}
"""The name of a file, and what reads it: an error, at once."""

OTHERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "micro-batches": ("batches.pt", lambda path: _read(path, VectorSpace(1), []).batches is None),
    "a note of the command line": (
        "spectrum.source.json",
        lambda path: list(_sources(path.parent)) == [],
    ),
    "a record that may be written": ("spectrum.json", lambda path: not _holds(path, b"")),
    "what a killed writer left": (
        f".a.json.{'0' * 16}.tmp",
        lambda path: remove_abandoned(path.parent, r"\..*\.tmp") is None,
    ),
}
"""The name of a file, and whether all is well with what may be there or not."""


def readers(kind: str) -> None:
    """Try all of them."""
    here = Path.cwd()
    for what, (name, read) in READERS.items():
        path = here / what / name
        path.parent.mkdir()
        KINDS[kind](path)
        try:
            found: object = read(path)
        except (HessianError, OSError) as error:
            found = error
        assert isinstance(found, HessianError), (what, found)
        assert len(str(found).splitlines()) == 1
    for what, (name, read) in OTHERS.items():
        path = here / what / name
        path.parent.mkdir()
        KINDS[kind](path)
        assert read(path), what


def folders(kind: str) -> None:
    """Folders of results and states with such a file in them are claimed, written and cleared."""
    for name in (".in_use", "run-0123456789ab", "state.3.json"):
        folder = Path.cwd() / f"of {name}"
        folder.mkdir()
        KINDS[kind](folder / name)
        for do in (Claim, remove_all):
            try:
                do(folder)
            except (HessianError, OSError) as error:
                assert str(error)
        try:
            with replacing(folder / name) as file:
                file.write(b"whole")
            assert (folder / name).read_bytes() == b"whole"
        except IsADirectoryError:
            assert kind == "folder"


@pytest.mark.parametrize("kind", KINDS)
def test_no_reader_waits_for_what_is_no_file(tmp_path: Path, kind: str) -> None:
    run_alone(readers, kind, folder=tmp_path, environment={}, timeout=60)


@pytest.mark.parametrize("kind", KINDS)
def test_no_writer_waits_for_what_is_no_file(tmp_path: Path, kind: str) -> None:
    run_alone(folders, kind, folder=tmp_path, environment={}, timeout=60)
