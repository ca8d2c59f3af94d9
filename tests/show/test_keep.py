"""The page of a run is written by itself, and never ends the run."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.show.page import PageKeeper, keep, page_of
from tests.records.makers import COST, PROVENANCE, semicircle, spectrum_of


def saved(folder: Path, step: int) -> None:
    found = spectrum_of(semicircle(60), m=6)
    provenance = dataclasses.replace(PROVENANCE, step=step)
    found = dataclasses.replace(found, provenance=provenance, cost=COST)
    found.save(folder / f"step_{step:06d}")


def steps_of(page: Path) -> str:
    match = re.search(r"(\d+ steps from [\d,]+ to [\d,]+|step [\d,]+)", page.read_text())
    assert match is not None
    return match[1]


def test_a_page_follows_the_measurements_in_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(keep.time, "monotonic", lambda: now[0])
    real = keep.write_page

    def slow(*given: Any) -> Path:
        now[0] += 2.0
        return real(*given)

    monkeypatch.setattr(keep, "write_page", slow)
    keeper, page = PageKeeper(), page_of(tmp_path)
    saved(tmp_path, 10)
    keeper.update(tmp_path)
    assert steps_of(page) == "step 10"
    saved(tmp_path, 20)
    now[0] += 39.0
    keeper.update(tmp_path)  # two seconds were spent less than forty seconds ago
    assert steps_of(page) == "step 10"
    keeper.finish()  # as when the process ends
    assert steps_of(page) == "2 steps from 10 to 20"
    before = page.stat().st_mtime_ns
    keeper.finish()
    assert page.stat().st_mtime_ns == before  # nothing waits
    saved(tmp_path, 30)
    now[0] += 41.0
    keeper.update(tmp_path)
    assert steps_of(page) == "3 steps from 10 to 30"
    saved(tmp_path, 40)
    keeper.update(tmp_path)
    saved(tmp_path / "other", 1)
    keeper.update(tmp_path / "other")  # the job's results go elsewhere from here on
    assert steps_of(page) == "4 steps from 10 to 40"


def test_a_broken_record_is_logged_and_leaves_the_old_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 10)
    keeper, page = PageKeeper(), page_of(tmp_path)
    keeper.update(tmp_path)
    before = page.read_bytes()
    (tmp_path / "step_000010" / "spectrum.npz").write_bytes(b"")
    with caplog.at_level(logging.ERROR):
        keeper.update(tmp_path)
        keeper.finish()
    assert "no page of" in caplog.text and page.read_bytes() == before


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh().square().mean()


@pytest.mark.parametrize("plot", [True, False])
def test_measurements_of_a_training_leave_a_page(tmp_path: Path, plot: bool) -> None:
    torch.manual_seed(0)
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = tmp_path / "my-run"
    section = {"interval": 2, "num_matvecs": 2, "num_micro_batches": 1, "progress": False}
    settings = {**section, "plot": plot, "output_path": str(run)}
    hessian = ds_hessian.attach(model, optimizer, settings)
    for _ in range(4):
        model(torch.randn(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        hessian.step()
    pages = [path.name for path in run.glob("*.html")]
    assert pages == (["my-run.html"] if plot else [])
    if plot:
        assert steps_of(run / "my-run.html").startswith("step 2") or "2 steps" in steps_of(
            run / "my-run.html"
        )


def test_step_zero_is_measured_when_its_micro_batches_are_given(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    section = {"steps": [0, 2], "num_matvecs": 2, "progress": False, "plot": False}
    settings = {**section, "output_path": str(tmp_path)}
    hessian = ds_hessian.attach(model, optimizer, settings)
    hessian.use([(torch.randn(4, 3),)])
    for _ in range(3):
        model(torch.randn(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        hessian.step()
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000000", "step_000002"]
    spectrum = ds_hessian.HessianSpectrum.load(tmp_path / "step_000000")
    found = spectrum.provenance.optimizer
    assert found is not None and (found.name, found.learning_rate) == ("SGD", 0.1)
    assert found.edge == pytest.approx(2 * 1.9 / 0.1)
