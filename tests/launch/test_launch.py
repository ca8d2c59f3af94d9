"""An unmodified script gets its spectra from its configuration alone, and trains as without."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hessian.errors import ConfigError
from ds_hessian.launch import attach_scheduled
from ds_hessian.launch import run_script as run_unmodified
from ds_hessian.records import HessianSharpness, HessianSpectrum
from ds_hessian.schedule import Capture
from tests.ranks import RankPool, free_port

pytestmark = pytest.mark.usefixtures("built")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 1000000,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "hessian": {"interval": 3, "num_matvecs": 5, "num_micro_batches": 4, "plot": False},
}


def deepspeed(folder: Path, *command: str, config: dict[str, Any] = CONFIG) -> str:
    """Run the real launcher on two ranks in a folder with a configuration; returns what it says."""
    folder.mkdir(exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(config))
    launcher = [
        str(Path(sys.executable).with_name("deepspeed")),
        *("--num_accelerators", "2", "--master_port", str(free_port())),
    ]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*launcher, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


SCRIPT = (str(HERE / "plain_script.py"), "--steps", "7", "--result", "result.json")
ARGUMENTS = ("--deepspeed", "--deepspeed_config", "ds_config.json")


def run_script(folder: Path) -> None:
    """Run the plain script in a rank that runs already; it ends the rank's process group."""
    os.chdir(folder)
    sys.argv = [*SCRIPT, *ARGUMENTS]
    sys.path.insert(0, str(HERE))
    runpy.run_path(SCRIPT[0], run_name="__main__")


def test_an_unmodified_script_gets_its_spectra_and_trains_bitwise_the_same(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "ds_config.json").write_text(json.dumps(CONFIG))
    without = RankPool(2)
    without.run(run_script, tmp_path / "plain")
    without.close()
    said = deepspeed(tmp_path / "launched", "--module", "ds_hessian.launch", *SCRIPT, *ARGUMENTS)
    assert [said.count(f"Hessian spectrum at step {step}:") for step in (3, 6)] == [1, 1]
    plain, launched = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "launched")
    )
    assert launched == plain  # losses, weights and the random state after them
    assert len(plain["losses"]) == 14 and plain["losses"][0] != plain["losses"][-1]
    assert not (tmp_path / "plain" / "hessian_out").exists()
    folders = sorted((tmp_path / "launched" / "hessian_out").glob("step_*"))
    assert [folder.name for folder in folders] == ["step_000003", "step_000006"]
    for folder, step in zip(folders, (3, 6), strict=True):
        spectrum = HessianSpectrum.load(folder)
        assert spectrum.n == 7 * 13 + 13 + 13 * 5 + 5
        assert spectrum.alphas.shape == (1, 5)
        assert spectrum.provenance.step == step and spectrum.provenance.num_micro_batches == 4


@pytest.mark.full
def test_an_unmodified_script_gets_its_sharpness_alone(tmp_path: Path) -> None:
    section = {"sharpness_interval": 2, "num_micro_batches": 2}
    script = ("--module", "ds_hessian.launch", str(HERE / "plain_script.py"), "--steps", "2")
    arguments = ("--result", "result.json", "--deepspeed", "--deepspeed_config", "ds_config.json")
    deepspeed(tmp_path, *script, *arguments, config={**CONFIG, "hessian": section})
    sharpness = HessianSharpness.load(tmp_path / "hessian_out" / "step_000002")
    assert sharpness.provenance.step == 2 and sharpness.eigenvalue_max.value > 0


@pytest.mark.full
def test_an_unmodified_trainer_script_is_measured_on_the_mean_loss(tmp_path: Path) -> None:
    """Not on a micro-batch's share of a step's loss, which its model returns in training."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
    from tests.launch.trainer_script import model, row

    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    config["hessian"] = {"interval": 2, "num_matvecs": 2, "num_micro_batches": 2, "plot": False}
    script = ("--module", "ds_hessian.launch", str(HERE / "trainer_script.py"))
    deepspeed(tmp_path, *script, config=config)
    spectrum = HessianSpectrum.load(tmp_path / "hessian_out" / "step_000002")
    inputs = {name: tensor[None] for name, tensor in row.items()}
    assert spectrum.loss == pytest.approx(model.eval()(**inputs).loss.item(), rel=1e-5)


def engine_with(section: dict[str, Any] | None) -> Any:
    config = {} if section is None else {"hessian": section}
    return SimpleNamespace(_config=SimpleNamespace(_param_dict=config))


def test_a_section_that_asks_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="interval, .* must be above 0 for a script"):
        attach_scheduled(engine_with({"num_matvecs": 5}))


@pytest.mark.parametrize("section", [None, {"enabled": False}], ids=["absent", "off"])
def test_without_a_section_a_script_runs_as_without(
    section: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_with(section)
    attach_scheduled(engine)
    assert not hasattr(engine, "hessian")
    assert 'no "hessian" section that is enabled' in caplog.text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(1)", True),
        ("raise SystemExit(0)", True),
        ("raise OSError('no such corpus')", False),  # nothing beside what it says itself
        ("import deepspeed; deepspeed.initialize()", False),
    ],
)
def test_a_script_that_makes_no_engine_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    said: bool,
) -> None:
    """One on torch alone, as `accelerate launch` without DeepSpeed runs it, is not measured."""
    import deepspeed

    monkeypatch.setattr(deepspeed, "initialize", lambda: [engine_with(None)])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(script)
    with suppress(OSError, SystemExit):
        run_unmodified("ds_hessian.launch", [str(tmp_path / "train.py")], lambda engine: None)
    assert ("has made no engine with deepspeed.initialize" in caplog.text) is said


@pytest.mark.full
@pytest.mark.parametrize("module", ["launch", "self_test"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "usage: deepspeed --module"), (["gone.py"], "no such script")],
)
def test_a_wrong_call_ends_with_a_line(module: str, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"ds_hessian.{module}", "--local_rank=0", *arguments],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]


class Summed(nn.Module):
    """A model with the loss of transformers: divided by the tokens of a step where they are given.

    It stands for an engine: `module` is itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x: Tensor, num_items_in_batch: int | None = None) -> Tensor:
        losses = (x * self.w).square().sum(1)
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch


def test_a_captured_micro_batch_has_its_own_mean_loss() -> None:
    engine = Summed()
    captured, x = Capture(engine, engine.module, 1), torch.randn(4, 3)
    engine(x, num_items_in_batch=1000)
    (call,) = captured.calls
    assert torch.equal(engine(*call.args, **call.kwargs), (x * engine.w).square().sum(1).mean())
