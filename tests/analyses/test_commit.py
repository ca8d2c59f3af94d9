"""A record with vectors is the old one or the new one, whatever its writer meets."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import HessianError
from ds_hessian.hessian import Hessian
from ds_hessian.records import HessianEigenpairs, files
from tests.operators.nets import batches, loss_of, mlp
from tests.records.test_commit import killed


def hessian_of(module: nn.Module, **settings: Any) -> Hessian:
    quiet = {"progress": False, "plot": False}
    config = HessianConfig.parse({**quiet, **settings})
    return Hessian(ModuleBackend(module), config).use(batches(2), loss_of)


def whole(hessian: Hessian, folder: Path) -> float | None:
    """The step of the record in a folder, whose vectors are its own; None if there is none."""
    if not (folder / "eigenpairs.json").exists():
        return None
    found = hessian.load(HessianEigenpairs, folder)
    step = found.provenance.step
    assert torch.equal(found.vectors, torch.full_like(found.vectors, float(step)))
    return step


@pytest.fixture(scope="module")
def records() -> tuple[Hessian, list[HessianEigenpairs]]:
    """Two records whose vectors say of which step they are."""
    import dataclasses

    hessian, found = hessian_of(mlp()), []
    for step in (1, 2):
        hessian.step = step
        record = hessian.eigenpairs(2, max_matvecs=4)
        marked = torch.full_like(record.vectors, float(step))
        found.append(dataclasses.replace(record, vectors=marked))
    return hessian, found


@pytest.mark.full
def test_a_writer_that_is_killed_leaves_vectors_with_their_record(
    tmp_path: Path, records: tuple[Hessian, list[HessianEigenpairs]]
) -> None:
    hessian, (old, new) = records
    steps = []
    for step in range(1, 1000):
        folder = tmp_path / str(step)
        hessian.save(old, folder)
        if not killed(step, partial(hessian.save, new, folder)):
            break
        steps.append(whole(hessian, folder))
        hessian.save(new, folder)  # the next writer removes what is left
        names = [f"eigenpairs.{kind}" for kind in ("json", "npz", "safetensors")]
        assert sorted(os.listdir(folder)) == names
    assert steps == sorted(steps) and {*steps} == {1, 2} and len(steps) > 20


class Full:
    """A disk that is full from one of the calls on."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def require(self) -> None:
        self.calls += 1
        if self.calls >= self.at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def replacing(self, inner: Any, path: Path) -> Iterator[IO[bytes]]:
        """A file on it."""
        self.require()
        with inner(path) as file:
            yield _File(file, self)  # type: ignore[misc]
            self.require()  # the flush


class _File:
    def __init__(self, file: IO[bytes], disk: Full) -> None:
        self.file, self.disk = file, disk

    def write(self, data: Any) -> int:
        """Write, if there is room."""
        self.disk.require()
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.full
def test_a_disk_that_is_full_at_any_write_ends_the_measurement_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the state, of the record and of its vectors; and when there is room, it goes on."""
    from ds_hessian.records import safetensors, store
    from ds_hessian.resume import files as resume

    module = mlp()
    hessian = hessian_of(module, resume=str(tmp_path / "state"))
    before = [p.detach().clone() for p in module.parameters()]
    inner = files.replacing
    expected = hessian.eigenpairs(1, max_matvecs=3)
    for at in range(1, 100):
        disk = Full(at)
        with monkeypatch.context() as patch:
            for module_of in (store, safetensors, resume):
                patch.setattr(module_of, "replacing", partial(disk.replacing, inner))
            try:
                hessian.save(hessian.eigenpairs(1, max_matvecs=3), tmp_path / "out")
                break
            except HessianError as error:
                assert "No space left on device" in str(error)
        assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))
        assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob("out/eigenpairs.*.*"))
        found = hessian.eigenpairs(1, max_matvecs=3)  # from where it was interrupted
        assert (found.values == expected.values).all()
    assert at > 10
