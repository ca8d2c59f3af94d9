"""A job that is resumed measures the data that it measured before, or says that it does not."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import ds_hessian
from ds_hessian.backends.containers import Call, leaves
from ds_hessian.errors import ConfigError
from ds_hessian.records import HessianSpectrum
from ds_hessian.records.files import Claim
from ds_hessian.schedule import Schedule
from ds_hessian.slices import settled
from ds_hessian.vectors import VectorSpace
from tests.backends.test_batches import KINDS, Encoding, Given, Named
from tests.ranks import context


class Square(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: Tensor, power: int = 2) -> Tensor:
        """A loss with a Hessian that depends on the data."""
        return (x @ self.w).pow(power).mean()


def process(
    folder: Path, first: int, last: int, given: Any = None, **settings: Any
) -> tuple[dict[int, HessianSpectrum], Any]:
    """A process of a training, which has made steps up to `first` before; its spectra."""
    module = Square()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    section = {
        **{"interval": 2, "num_matvecs": 2, "num_micro_batches": 2, "output_path": str(folder)},
        **{"plot": False, "progress": False},
        **settings,
    }
    hessian = ds_hessian.attach(module, optimizer, section)
    hessian.step = first
    if given is not None:
        hessian.use(given)
    schedule = hessian.backend.after_step.__self__  # type: ignore[attr-defined]
    assert isinstance(schedule, Schedule)
    for step in range(first, last):
        optimizer.zero_grad()
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        module(x, power=2).backward()
        optimizer.step()
        hessian.step()  # type: ignore[operator]
    assert not schedule.failures
    return schedule.spectra, hessian


def fingerprints(spectra: dict[int, HessianSpectrum]) -> set[str]:
    return {spectrum.provenance.data_fingerprint for spectrum in spectra.values()}


def test_a_resumed_job_measures_the_slice_of_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = process(tmp_path / "whole", 0, 6)[0]
    before = process(tmp_path / "job", 0, 2)[0]
    after, hessian = process(tmp_path / "job", 2, 6)
    assert list(after) == [4, 6]
    assert fingerprints(whole) == fingerprints(before) == fingerprints(after)
    assert hessian.batches[0].kwargs == {"power": 2}  # calls as they were
    assert "are not those" not in caplog.text


def test_a_new_training_in_an_old_folder_measures_its_own_slice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process(tmp_path, 0, 6, num_micro_batches=1)
    assert "an earlier run" not in caplog.text
    (found,) = fingerprints(process(tmp_path, 0, 2)[0])
    assert caplog.text.count("of an earlier run (step_000002, step_000004, step_000006)") == 1
    assert {found} == fingerprints(process(tmp_path, 2, 4)[0])
    assert caplog.text.count("an earlier run") == 1  # a run that goes on is the same one


@pytest.mark.parametrize("kind", ["lost", "damaged", "of other ranks", "given"])
def test_another_slice_is_said_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    before = process(tmp_path, 0, 2)[0]
    (path,) = tmp_path.glob("micro_batches/rank0/batches.pt")
    if kind == "lost":
        path.unlink()
    elif kind == "damaged":
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "of other ranks":
        torch.save({**torch.load(path, weights_only=True), "world_size": 8}, path)
    given = [(torch.ones(4, 3),)] if kind == "given" else None
    with caplog.at_level(logging.WARNING):
        after = process(tmp_path, 2, 4, given)[0]
    assert caplog.text.count("are not those of before the job was resumed") == 1
    assert list(after) == [4] and fingerprints(after) != fingerprints(before)
    caplog.clear()
    process(tmp_path, 4, 6, given)  # from here on it is this slice
    assert "are not those" not in caplog.text


@pytest.mark.parametrize("name", [*KINDS, "call", "packed"])
def test_micro_batches_of_any_kind_are_measured_again_as_what_they_were(
    tmp_path: Path, name: str
) -> None:
    """The file names no class: they are those of what the resumed job itself reads."""

    def made(start: float) -> Any:
        x, y = torch.full((3, 2), start), torch.arange(3)
        if name == "call":
            return Call((Named(x, y),), {"of": Encoding(x=x)})
        return pack_sequence([x, x[:1]]) if name == "packed" else KINDS[name](x, y)

    space, (before, now) = VectorSpace(1), ([made(0.0), made(1.0)], [made(2.0)])
    settled(space, tmp_path, before, resumed=False)
    found = settled(space, tmp_path, now, resumed=True)
    assert len(found) == 2
    for old, new in zip(before, found, strict=True):
        assert kinds(old) == kinds(new) == kinds(now[0])
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(leaves(old), leaves(new), strict=True)
        )


def kinds(value: Any) -> Any:
    """The classes in nested containers."""
    if isinstance(value, Call):
        return Call, kinds(value.args), kinds(value.kwargs)
    if isinstance(value, Mapping):
        return type(value), {k: kinds(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [kinds(v) for v in value]
    return type(value), kinds(vars(value)) if isinstance(value, Given) else None


def test_what_cannot_be_kept_is_said_and_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    space = VectorSpace(1)
    batches = [{"x": torch.ones(2), "of": object()}]
    assert settled(space, tmp_path, batches, resumed=False) is batches
    assert "they hold a object" in caplog.text or "they hold an object" in caplog.text


@pytest.mark.full
def test_a_damaged_slice_is_another_one_whatever_is_damaged(tmp_path: Path) -> None:
    """It is read as it was written, or not at all."""
    draw, space = random.Random(0), VectorSpace(1)
    batches = [{"x": torch.arange(6.0), "of": [1, "y", None]}]
    settled(space, tmp_path, batches, resumed=False)
    (path,) = tmp_path.glob("micro_batches/rank0/batches.pt")
    whole, mine = path.read_bytes(), [torch.ones(2)]
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 3])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([None, None, None, draw.randrange(len(data))])])
        found = settled(space, tmp_path, mine, resumed=True)
        assert found is mine or torch.equal(found[0]["x"], batches[0]["x"])


def test_no_code_in_a_kept_slice_is_executed(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "micro_batches" / "rank0" / "batches.pt"
    path.parent.mkdir(parents=True)
    torch.save({"fingerprint": "x", "world_size": 1, "batches": [Code()]}, path)
    mine = [torch.ones(2)]
    assert settled(VectorSpace(1), tmp_path, mine, resumed=True) is mine
    assert not (tmp_path / "executed").exists()


def claim(folder: str, go_on: Any) -> None:
    """A job that has claimed a folder, until it may go on."""
    claimed = Claim(Path(folder))
    go_on.send("claimed")
    go_on.recv()
    del claimed


def test_two_jobs_on_one_output_folder_are_kept_apart(tmp_path: Path) -> None:
    """The second is refused before it measures or keeps micro-batches, naming the first; training
    goes on.
    """
    mine, theirs = context().Pipe()
    other = context().Process(target=claim, args=(str(tmp_path), theirs), daemon=True)
    other.start()
    assert mine.recv() == "claimed"
    _, hessian = process(tmp_path, 0, 1)
    schedule = hessian.backend.after_step.__self__
    schedule.measure()
    with pytest.raises(ConfigError, match=rf"in use by process {other.pid} on .*, since"):
        raise schedule.failures[1]
    assert not list(tmp_path.glob("micro_batches/*"))
    mine.send("end")
    other.join(60)
    schedule.measure()
    assert (tmp_path / ".in_use").exists() and 1 in schedule.spectra
    shutil.rmtree(tmp_path)
    schedule.measure()
    assert (tmp_path / ".in_use").exists()  # in a folder that has been made anew too


def test_two_models_of_a_process_on_one_output_folder_are_kept_apart(tmp_path: Path) -> None:
    """The one that would replace the other's results is refused; one that is attached later, as
    where a run begins anew, is not.
    """
    settings = {"num_matvecs": 1, "output_path": str(tmp_path), "plot": False, "progress": False}
    models = [Square() for _ in range(3)]

    def attached(model: nn.Module) -> ds_hessian.Hessian:
        return ds_hessian.attach(model, settings).use([(torch.eye(3),)])

    first, second, again = map(attached, [*models[:2], models[0]])
    record = first.spectrum()
    for hessian in (first, again):
        hessian.save(record)
    with pytest.raises(ConfigError, match="has results of another model of this process"):
        second.save(record)
    third = attached(models[2])
    third.save(record)
    with pytest.raises(ConfigError, match="give one of them another output_path"):
        first.save(record)
