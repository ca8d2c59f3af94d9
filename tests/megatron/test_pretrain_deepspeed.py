"""The hook in Megatron-DeepSpeed's own `pretrain()`: its tree is named by MEGATRON_DEEPSPEED."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hessian.records import HessianSpectrum
from ds_hessian.show.monitor import figures_of
from tests.megatron.test_pretrain import HESSIAN_ARGUMENTS, ROOT, final_states, torchrun

# A micro-batch of one sequence: without flash attention its attention views queries of several as
# if they lay side by side, which they do not, on any device.
ARGUMENTS = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-2 --lr-decay-style constant
--data-impl mmap --vocab-size 100 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8
--distributed-backend gloo --num-workers 0 --log-interval 1 --eval-interval 100 --eval-iters 0
--split 100,0,0 --seed 1234 --attention-dropout 0.1 --hidden-dropout 0.1
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--no-gradient-accumulation-fusion --deepspeed --no-pipeline-parallel
"""
SCRIPT = Path(__file__).with_name("pretrain_deepspeed_on_cpu.py")
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = str(tmp_path_factory.mktemp("data") / "tiny")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), "write-data", prefix]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return prefix


def pretrain(mode: str, stage: int, tensor: int, data: str, folder: Path) -> list[str]:
    """Hash of the final state by rank."""
    ranks = 2
    config = folder / "ds_config.json"
    section = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 8,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }
    config.write_text(json.dumps(section))
    arguments = [*ARGUMENTS.split(), "--data-path", data, "--deepspeed_config", str(config)]
    arguments += ["--zero-stage", str(stage), "--tensor-model-parallel-size", str(tensor)]
    if mode != "bare":
        arguments += [*HESSIAN_ARGUMENTS.split(), "--hessian-output-path", str(folder / mode)]
        arguments += ["--hessian-dropout", "true", "--tensorboard-dir", str(folder / "board")]
    tree = os.environ["MEGATRON_DEEPSPEED"]
    found = final_states(torchrun(SCRIPT, *arguments, MODE=mode, MEGATRON_LM=tree, **ENVIRONMENT))
    assert len(found) == ranks
    return found


@pytest.mark.skipif(
    "MEGATRON_DEEPSPEED" not in os.environ,
    reason="set MEGATRON_DEEPSPEED to a tree of Megatron-DeepSpeed to train with its pretrain()",
)
@pytest.mark.parametrize("stage, tensor", [(1, 1), (1, 2), (3, 1)])
def test_megatron_deepspeed_ends_with_the_same_bits_with_and_without_spectra(
    stage: int, tensor: int, data: str, tmp_path: Path
) -> None:
    """With dropout; the figures are read back from its TensorBoard writer."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    bare = pretrain("bare", stage, tensor, data, tmp_path)
    assert pretrain("hook", stage, tensor, data, tmp_path) == bare
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for step in (2, 4):
        spectrum = HessianSpectrum.load(tmp_path / "hook" / f"step_{step:06d}")
        assert spectrum.num_matvecs == 3 and 4.0 < spectrum.loss < 5.5  # log 104 untrained
        assert ("TP 2" in spectrum.provenance.layout) == (tensor == 2)
        for name, value in figures_of(spectrum).items():
            if not name.endswith("seconds"):  # by the clock of the rank that writes
                events = board.Scalars(f"Train/Hessian/{name}")
                assert {e.step: e.value for e in events}[step] == pytest.approx(value, rel=1e-6)
