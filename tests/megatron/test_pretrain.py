"""The hook in Megatron-LM's own `pretrain()`: its tree (core_v0.16.1) is named by MEGATRON_LM."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.integrations.megatron_pretrain import sizes_of
from ds_hessian.records import HessianSharpness, HessianSpectrum
from ds_hessian.show.monitor import figures_of
from tests.backends.test_monitor import wandb_rows
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-style constant
--mock-data --vocab-size 120 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8
--distributed-backend gloo --use-cpu-initialization --transformer-impl local
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --no-persist-layer-norm --num-workers 0 --log-interval 1
--eval-interval 2 --eval-iters 1 --split 90,5,5 --seed 1234 --attention-dropout 0.1
--hidden-dropout 0.1 --attention-backend unfused --no-ckpt-fully-parallel-save
"""
HESSIAN_ARGUMENTS = """
--hessian-interval 2 --hessian-num-matvecs 3 --hessian-num-micro-batches 2
--hessian-progress false --hessian-plot false
"""
LAYOUTS = {
    "DP": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "TP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP": "--pipeline-model-parallel-size 2 --calculate-per-token-loss",
    "PP interleaved": (
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
    ),
}
NEEDS_MEGATRON_LM = pytest.mark.skipif(
    "MEGATRON_LM" not in os.environ,
    reason="set MEGATRON_LM to a tree of Megatron-LM core_v0.16.1 to train with its pretrain()",
)


def torchrun(script: Path, *arguments: str, **environment: str) -> str:
    """What it prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(free_port()), str(script), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    full = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    run = subprocess.run(command, env=full, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


def final_states(printed: str) -> list[str]:
    """Hashes by rank. Another process may print in the same line, right behind one."""
    return [state for _, state in sorted(re.findall(r"FINAL (\d) ([0-9a-f]{64})", printed))]


def pretrain(mode: str, layout: str, folder: Path, *more: str) -> list[str]:
    """Hash of the final weights by rank."""
    arguments = [*ARGUMENTS.split(), *LAYOUTS[layout].split()]
    arguments += ["--data-cache-path", str(folder / "cache")]
    if mode != "bare":
        arguments += [*HESSIAN_ARGUMENTS.split(), "--hessian-output-path", str(folder / mode)]
    script = Path(__file__).with_name("pretrain_on_cpu.py")
    environment = {"MODE": mode, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "WANDB_MODE": "offline"}
    return final_states(torchrun(script, *arguments, *more, **environment))


@NEEDS_MEGATRON_LM
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pretrain_ends_with_the_same_bits_with_and_without_spectra(
    layout: str, tmp_path: Path
) -> None:
    bare = pretrain("bare", layout, tmp_path)
    assert len(bare) == 2
    for mode in ("hook", "evaluation"):
        assert pretrain(mode, layout, tmp_path) == bare
    for step in ("step_000002", "step_000004"):
        hook, evaluation = (
            HessianSpectrum.load(tmp_path / mode / step) for mode in ("hook", "evaluation")
        )
        assert (hook.alphas == evaluation.alphas).all() and hook.loss == evaluation.loss


@NEEDS_MEGATRON_LM
@pytest.mark.parametrize("mode", ["hook", "evaluation"])
def test_spectra_and_sharpness_go_to_megatrons_own_writers(tmp_path: Path, mode: str) -> None:
    """TensorBoard's, and W&B's where it is installed; Megatron-LM's own figures stay whole."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board, steps = tmp_path / "tensorboard", (2, 4)
    more = ["--tensorboard-dir", str(board), "--tensorboard-log-interval", "1"]
    more += ["--hessian-sharpness-interval", "2", "--hessian-plot", "true"]
    has_wandb = importlib.util.find_spec("wandb") is not None
    if has_wandb:
        more += ["--wandb-project", "hessians", "--wandb-exp-name", "job"]
        more += ["--wandb-save-dir", str(tmp_path)]
    assert pretrain(mode, "TP", tmp_path, *more) == pretrain("bare", "TP", tmp_path)
    expected = {
        step: {
            f"Train/Hessian/{name}": value
            for kind in (HessianSpectrum, HessianSharpness)
            for name, value in figures_of(kind.load(tmp_path / mode / f"step_{step:06d}")).items()
            if not name.endswith("seconds")  # by the clock of the rank that writes
        }
        for step in steps
    }
    events = EventAccumulator(str(board)).Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [1, 2, 3, 4]
    for name in expected[2]:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx({step: expected[step][name] for step in steps}, rel=1e-6)
    assert [picture.step for picture in events.Images("Train/Hessian/spectrum")] == list(steps)
    if has_wandb:
        rows = wandb_rows(tmp_path / "wandb")
        assert [row["_step"] for row in rows if "lm loss" in row] == [1, 2, 3, 4]
        measured = {row["Train/Hessian/step"]: row for row in rows if "Train/Hessian/step" in row}
        assert list(measured) == list(steps)
        for step in steps:
            assert {name: measured[step][name] for name in expected[step]} == expected[step]


@pytest.mark.full
def test_the_example_leaves_records_and_pictures(tmp_path: Path, built: None) -> None:
    small = "--steps 2 --interval 1 --num-matvecs 3 --layers 1 --width 16 --context 16".split()
    torchrun(ROOT / "examples" / "megatron_gpt.py", *small, "--output", str(tmp_path))
    for step in ("step_000001", "step_000002"):
        assert HessianSpectrum.load(tmp_path / step).num_matvecs == 3
        assert (tmp_path / step / "spectrum.png").stat().st_size > 10_000


def test_every_setting_is_an_argument() -> None:
    from ds_hessian.integrations.megatron_pretrain import config_from
    from ds_hessian.megatron import hessian_arguments

    parser = hessian_arguments(ArgumentParser())
    assert config_from(parser.parse_args([])) == HessianConfig()
    given = ["--hessian-interval", "5", "--hessian-displacement", "1e-3", "--hessian-dropout"]
    config = config_from(parser.parse_args([*given, "true"]))
    assert (config.interval, config.finite_difference.displacement) == (5, 1e-3)
    assert config.dropout
    with pytest.raises(ConfigError, match="num_matvecs"):
        config_from(parser.parse_args(["--hessian-num-matvecs", "0"]))


@pytest.mark.parametrize("decoder, expected", [(None, 32), (48, 48)])
def test_pipelines_send_what_the_decoder_makes(decoder: int | None, expected: int) -> None:
    """As in pretrain_vlm.py, which trained in a pipeline and was told to pass other sizes."""
    args = Namespace(seq_length=32, decoder_seq_length=decoder, micro_batch_size=2)
    assert sizes_of(args) == {"seq_length": expected, "micro_batch_size": 2}


def test_pretrain_is_wrapped_by_the_names_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures differ between versions of Megatron-LM: 0.16, and 0.19, which parses before."""
    import ds_hessian.megatron as face

    seen = {}

    def pretrain_0_16(datasets, provider, model_type, forward_step_func, extra_args_provider=None):
        seen["0.16"] = (forward_step_func, extra_args_provider)

    def pretrain_0_19(cfg_container, datasets, model_type, forward_step_func, model_provider=None):
        seen["0.19"] = (forward_step_func, None)

    def forward_step(data_iterator, model):
        return "output", "loss"

    module = sys.modules[__name__]

    def inner(model, optimizer, scheduler, iteration):
        return False

    monkeypatch.setattr(module, "checkpoint_and_decide_exit", inner, raising=False)
    face.with_hessian(pretrain_0_16)("d", "p", "t", forward_step)
    face.with_hessian(pretrain_0_19)("c", "d", "t", forward_step, model_provider="p")
    assert all(wrapped.__wrapped__ is forward_step for wrapped, _ in seen.values())
    parsed = seen["0.16"][1](ArgumentParser()).parse_args(["--hessian-interval", "7"])
    assert parsed.hessian_interval == 7
    assert module.checkpoint_and_decide_exit is inner  # type: ignore[attr-defined]


def test_a_measurement_follows_the_checkpoint_of_its_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A failure, or a time limit, in the measurement cannot lose it; a job that exits measures
    nothing more."""
    from ds_hessian.integrations import megatron_pretrain

    did, hook = list[str](), megatron_pretrain.PretrainHook()
    hook._config = HessianConfig(interval=2)
    monkeypatch.setattr(hook, "measure", lambda model, step, kind: did.append(f"{kind} {step}"))
    monkeypatch.setattr(megatron_pretrain, "_interval_timer_stopped", nullcontext)

    def checkpoint_and_decide_exit(model, optimizer, scheduler, iteration, *rest):
        did.append(f"checkpoint {iteration}")
        return iteration == 6

    training = ModuleType("training")
    training.checkpoint_and_decide_exit = checkpoint_and_decide_exit  # type: ignore[attr-defined]
    with hook.installed(training):
        exits = [training.checkpoint_and_decide_exit("m", "o", "s", i, 0, {}) for i in range(1, 7)]
    assert exits == [False] * 5 + [True]
    assert did == [
        *("checkpoint 1", "checkpoint 2", "spectrum 2", "checkpoint 3", "checkpoint 4"),
        *("spectrum 4", "checkpoint 5", "checkpoint 6"),
    ]
