"""The precision of passes that the settings leave open: what is chosen, and kept over a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, MeasurementError
from ds_hessian.hessian import Hessian
from ds_hessian.planning import Job, Needs, chosen, free_memory
from ds_hessian.records import HessianSpectrum
from tests.operators.nets import backend_of, batches, loss_of, mlp, preempted


@pytest.mark.parametrize(
    ("dtype", "asked", "free", "found", "why"),
    [
        ("fp32", "auto", 10, "model", ""),
        ("bf16", "auto", 10, "fp32", "training computes in bfloat16, and fp32 copies fit"),
        ("fp16", "auto", 10, "fp32", "training computes in float16, and fp32 copies fit"),
        ("bf16", "auto", 1, "model", "fp32 passes would need .* on the accelerator of rank 0 .*"),
        ("bf16", "model", 10, "model", ""),
        ("bf16", "fp32", 1, "fp32", ""),
    ],
)
def test_what_is_chosen(dtype: Any, asked: str, free: int, found: str, why: str) -> None:
    share = Job(num_parameters=1000, world_size=1, dtype=dtype).share
    config = HessianConfig().with_overrides(precision=asked)
    needs = [Needs("node", {"accelerator": free}, [{"accelerator": 5}])]
    config, choice = chosen(share, config, lambda _: needs)
    assert config.finite_difference.precision == found
    assert re.fullmatch(why, choice.why)


def hessian_of(folder: Path, call: int = 0) -> Hessian:
    """Of a net in bf16 with masters, whose loss fails at a call; its state is in the folder."""
    quiet = {"progress": False, "plot": False, "num_matvecs": 6, "resume": str(folder)}
    loss = preempted(call) if call else loss_of
    return Hessian(backend_of(mlp(), bf16=True), HessianConfig.parse(quiet)).use(batches(4), loss)


def spectrum(folder: Path, call: int = 0, room: bool = True) -> HessianSpectrum:
    """Its spectrum, with and without room for passes in fp32."""

    def free(*given: Any) -> Any:
        peak = hessian.memory_plan(precision="model", resume=None).peak("host")
        return {**free_memory(*given), **({} if room else {"host": peak})}

    hessian = hessian_of(folder, call)
    with mock.patch("ds_hessian.analyses.base.free_memory", free):
        return hessian.spectrum()


@pytest.mark.parametrize("room", [True, False], ids=["in fp32", "as training runs them"])
def test_a_run_is_continued_in_the_precision_in_which_it_was_begun(
    tmp_path: Path, room: bool
) -> None:
    whole = spectrum(tmp_path / "whole", room=room)
    assert whole.provenance.precision == ("fp32" if room else "model")
    with pytest.raises(MeasurementError, match="preempted"):
        spectrum(tmp_path, call=50, room=room)
    if room:
        with pytest.raises(ConfigError, match="begun with passes in fp32, which are not possible"):
            spectrum(tmp_path, room=False)
    again = spectrum(tmp_path)
    assert again.provenance.precision == whole.provenance.precision
    assert ("the state on disk was begun so" in again.provenance.precision_reason) == (not room)
    assert np.array_equal(again.alphas, whole.alphas) and np.array_equal(again.betas, whole.betas)


def test_the_plan_says_what_this_process_would_choose(tmp_path: Path) -> None:
    hessian = hessian_of(tmp_path)
    table = hessian.memory_plan().table()
    assert table.startswith("passes in fp32: training computes in bfloat16, and fp32 copies fit\n")
    with mock.patch("ds_hessian.analyses.base.free_memory", lambda *_: {"host": 1000}):
        table = hessian.memory_plan().table()
    assert table.startswith("passes as training runs them: fp32 passes would need")
    assert "passes" not in hessian.memory_plan(precision="fp32").table().splitlines()[0]


def test_an_explicit_precision_does_not_continue_another(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="preempted"):
        spectrum(tmp_path, call=50)
    with pytest.raises(ConfigError, match=r"precision \(fp32 there, model here\)"):
        hessian_of(tmp_path).spectrum(precision="model")


def test_a_schedule_removes_the_state_of_another_step_in_whichever_precision(
    tmp_path: Path,
) -> None:
    with pytest.raises(MeasurementError, match="preempted"):
        spectrum(tmp_path, call=50, room=False)
    hessian = hessian_of(tmp_path)
    hessian.step = 7
    with hessian.retiring():
        found = hessian.spectrum()
    assert (found.provenance.step, found.provenance.precision) == (7, "fp32")
