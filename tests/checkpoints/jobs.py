"""Checkpoints to measure: small models, their data, and engines that save themselves."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.zero import ZeroBackend
from ds_hessian.checkpoints import Loading, Sequences
from tests.backends import jobs
from tests.nets import TinyGPT, batch

WORDS = "the cat sat on a mat and saw two red birds fly over our old green house today".split()
QUIET = {"progress": False, "plot": False}


class Net(nn.Module):
    """Two layers with a buffer; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error."""
        return functional.mse_loss(self.down(torch.tanh(self.up(x)) * self.scale), y)


def net() -> Net:
    """The module of the state dicts, with other weights than theirs."""
    return Net()


def no_net() -> str:
    """What is no module."""
    return "net"


def rows(count: int = 8) -> list[dict[str, list[float]]]:
    """Rows of numbers for `Net`."""
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(5, generator=generator).tolist() for _ in range(count)]
    return [{"x": row[:3], "y": row[3:]} for row in drawn]


def write_lines(path: Path, found: list[Any]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return path


def sentences(count: int = 6) -> list[str]:
    """Texts of different lengths."""
    return [" ".join(WORDS[i : 2 * i + 4]) for i in range(count)]


def save_gpt2(folder: Path, seed: int = 0) -> Any:
    """A folder of transformers with a tiny GPT-2 and a tokenizer; returns the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 6, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i + 1 for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return model


def gpt() -> TinyGPT:
    """The module of the engines' checkpoints, with other weights than theirs."""
    return TinyGPT(dropout=0.0)


def all_batches() -> list[Any]:
    """The micro-batches of all ranks, of `tests.backends.jobs.my_batches`."""
    return [batch(500 + i, 0) for i in range(jobs.TOTAL)]


def save_engine(folder: str, stage: int, dtype: str = "fp32") -> Any:
    """Train an engine for two steps and save it; returns its own spectrum, and its masters."""
    torch.manual_seed(0)
    config: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    engine = jobs.make_engine(gpt(), zero={"stage": stage}, hessian=QUIET, **config)
    for i in range(2):
        engine.backward(engine(*batch(i, dist.get_rank())))
        engine.step()
    engine.save_checkpoint(folder)
    spectrum = engine.hessian_spectrum(jobs.my_batches(), num_matvecs=6)
    assert isinstance(engine.hessian.backend, ZeroBackend)
    masters = jobs.full_weights(engine)
    engine.destroy()
    return spectrum, masters


def measured(folder: str, data: str, stage: int = 0) -> Any:
    """The spectrum of a checkpoint, on all ranks of a pool."""
    made = Loading(stage=3 if stage else 0)
    spectrum = ds_hessian.measure(folder, data, loading=made, config=QUIET_CONFIG, num_matvecs=5)
    return spectrum


QUIET_CONFIG = ds_hessian.HessianConfig(progress=False, plot=False)


def failing_measurement(checkpoint: str, data: str) -> tuple[int, str]:
    """Measure with a loss that raises; returns how many engines were freed, and the error."""
    from deepspeed import DeepSpeedEngine

    gc.collect()  # an engine that is collected is freed once more
    freed, destroy = set[int](), DeepSpeedEngine.destroy

    def counted(engine: DeepSpeedEngine) -> None:
        freed.add(id(engine))
        destroy(engine)

    def loss(module: nn.Module, batch: Any) -> Tensor:
        raise ValueError("not today")

    DeepSpeedEngine.destroy = counted
    loading = Loading(factory=net, stage=3)
    sequences = Sequences(micro_batch_size=2)
    try:
        ds_hessian.measure(checkpoint, data, loss, loading=loading, sequences=sequences)
    except ds_hessian.HessianError as error:
        return len(freed), str(error)
    finally:
        DeepSpeedEngine.destroy = destroy
    return len(freed), ""
