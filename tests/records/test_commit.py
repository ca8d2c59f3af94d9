"""A writer that is killed, or that fails, leaves the old file or the new one, whole."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_hessian.errors import ResultError
from ds_hessian.records import HessianSpectrum, Record, SamplingErrors
from ds_hessian.records.files import one_writer, replacing
from ds_hessian.records.safetensors import Reader, Writer
from ds_hessian.show.canvas import new_figure, save_figure
from tests.records.makers import semicircle, spectrum_of

KILLED = 9
FILES = ["spectrum.json", "spectrum.npz"]
OLD = spectrum_of(semicircle(60), m=4)
ONE_ARRAY = dataclasses.replace(OLD, alphas=OLD.alphas + 1)
NO_ARRAY = dataclasses.replace(OLD, sampling=SamplingErrors(0.1, 0.2, 0.3, 4))
LARGER = spectrum_of(semicircle(200), m=9, probes=3)


def _of_the_system(function: Any) -> bool:
    """Whether a C function is one of the operating system's, or of a file."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or type(owner).__module__
    return module in ("posix", "_io", "fcntl")


def killed(step: int, act: Callable[[], object]) -> bool:
    """Act in a process that is killed before a call of the system; False if it ended before."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, KILLED)
        return status == KILLED
    calls = 0

    def count(frame: object, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and _of_the_system(function):
            calls += 1
            if calls == step:
                os._exit(KILLED)  # without flushing what Python holds

    try:
        sys.setprofile(count)
        act()
        sys.setprofile(None)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("new", "every"),
    [
        pytest.param(ONE_ARRAY, 8, id="arrays, one call of 8"),
        pytest.param(ONE_ARRAY, 1, id="arrays"),
        pytest.param(NO_ARRAY, 3, id="json, one call of 3"),
        pytest.param(LARGER, 5, id="all, one call of 5"),
    ],
)
def test_a_record_is_the_old_or_the_new_one_wherever_its_writer_is_killed(
    tmp_path: Path, new: HessianSpectrum, every: int
) -> None:
    found = list[str]()
    while True:
        folder = tmp_path / str(len(found))
        OLD.save(folder)
        if not killed(every * len(found) + 1, lambda folder=folder: new.save(folder)):
            break
        record = HessianSpectrum.load(folder)
        assert record in (OLD, new)
        found.append("old" if record == OLD else "new")
        ONE_ARRAY.save(folder)  # the next writer takes away what was left behind
        assert HessianSpectrum.load(folder) == ONE_ARRAY
        assert sorted(os.listdir(folder)) == FILES
        shutil.rmtree(folder)
    assert found == sorted(found, reverse=True) and {"old", "new"} == set(found)
    assert len(found) > 20 / every


@pytest.mark.full
def test_a_first_record_is_there_or_not(tmp_path: Path) -> None:
    for step in range(1, 1000):
        folder = tmp_path / str(step)
        if not killed(step, lambda folder=folder: OLD.save(folder)):
            return
        try:
            assert HessianSpectrum.load(folder) == OLD
        except ResultError as error:
            assert "no spectrum in" in str(error)


def _picture(path: Path) -> None:
    save_figure(new_figure(1, 1), path)


def _vectors(path: Path) -> None:
    with Writer(path, {"w": (1, 3)}, {}) as writer:
        writer.append(torch.ones(1, 3))


@pytest.mark.full
@pytest.mark.parametrize("write", [_picture, _vectors])
def test_other_files_are_the_old_or_the_new_ones(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    whole = tmp_path / "whole.png"
    write(whole)
    found, path = set[bytes](), tmp_path / "run" / "file.png"
    for step in (*range(1, 40), 10**9):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"old")
        killed(step, lambda: write(path))
        found.add(path.read_bytes())
        write(path)
        assert os.listdir(path.parent) == ["file.png"]
    assert found == {b"old", whole.read_bytes()}


@pytest.mark.parametrize("call", ["fsync", "rename", "open", "fdopen"])
def test_a_failure_at_any_call_is_raised_and_leaves_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    original = getattr(os, call)
    for step in range(1, 30):
        OLD.save(tmp_path)
        calls = 0

        def failing(*args: Any, original: Any = original, step: int = step, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step:
                raise OSError(28, "no space left on device")
            return original(*args, **kwargs)

        monkeypatch.setattr(os, call, failing)
        try:
            LARGER.save(tmp_path)
        except OSError as error:
            assert error.errno == 28
        monkeypatch.setattr(os, call, original)
        assert HessianSpectrum.load(tmp_path) in (OLD, LARGER)
        if calls < step:
            break
    assert step > 2
    OLD.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == FILES


def test_a_link_in_place_of_the_file_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "run").mkdir()
    for name in FILES:
        (tmp_path / "run" / name).symlink_to(victim)
    OLD.save(tmp_path / "run")
    assert victim.read_text() == "precious" and HessianSpectrum.load(tmp_path / "run") == OLD


def test_what_a_living_writer_is_writing_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path) as slow:
        slow.write(b"slow")
        with replacing(path) as fast:
            fast.write(b"fast")
        assert path.read_bytes() == b"fast"
    assert path.read_bytes() == b"slow" and os.listdir(tmp_path) == ["file"]


def test_a_file_like_a_temporary_one_that_is_a_link_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    link = tmp_path / f".file.{'0' * 16}.tmp"
    link.symlink_to(victim)
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
    assert victim.read_text() == "precious" and link.is_symlink()


def test_a_reader_that_meets_a_writer_reads_one_record_or_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer commits between the reader's two files."""
    from ds_hessian.records import store

    OLD.save(tmp_path)
    inner, records = store._read_npz, iter((LARGER, OLD, LARGER))

    def meanwhile(*args: Any) -> bytes:
        record: Record | None = next(records, None)
        if record is not None:
            record.save(tmp_path)
        return inner(*args)

    monkeypatch.setattr(store, "_read_npz", meanwhile)
    assert HessianSpectrum.load(tmp_path) == LARGER


def test_vectors_of_a_killed_writer_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "v", {"w": (1, 3)}, {}) as writer:
        writer.append(torch.ones(1, 3))
        raise ZeroDivisionError
    with pytest.raises(ResultError, match="cannot read"):
        Reader(tmp_path / "v")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_closed_stays_unlocked(tmp_path: Path) -> None:
    """Its file is open for as long as the process runs, which may write there again."""
    with (
        pytest.raises(OSError, match="full"),
        patch("ds_hessian.records.files.os.close", side_effect=OSError("full")),
        one_writer(tmp_path),
    ):
        pass
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
