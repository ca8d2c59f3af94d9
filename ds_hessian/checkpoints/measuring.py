"""`measure`: any analysis of a module or a checkpoint, without a training job.

In one process, and where every rank has the model whole, on the plain torch host, which needs no
optimizer. With `stage=3` the weights are sharded by ZeRO-3, whose engine needs an optimizer: an SGD
without momentum, which has no state and makes no step.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from ds_hessian.analyses import ANALYSES
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.checkpoints.models import CAUSAL, Factory, language_of, module_of
from ds_hessian.checkpoints.sources import Checkpoint, checkpoint_of
from ds_hessian.checkpoints.text import (
    Sequences,
    read_micro_batches,
    require_known_tokens,
    token_mean,
)
from ds_hessian.checkpoints.weights import require_finite
from ds_hessian.config import SECTION, HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Batches, Hessian, Loss
from ds_hessian.hosts import Settings, hessian_of
from ds_hessian.memory import DTYPES
from ds_hessian.planning import in_precision
from ds_hessian.ranks import together
from ds_hessian.records import Record, Savable
from ds_hessian.vector_files import step_folder

DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a checkpoint is brought into memory.

    Attributes:
        factory: Makes its module; None for that of the `config.json` beside the weights.
        dtype: Dtype of the passes. Displacements are written from the weights of the checkpoint.
        stage: 0: every rank has the whole model. 3: it is sharded by ZeRO-3.
    """

    factory: Factory | None = None
    dtype: DType = "fp32"
    stage: Literal[0, 3] = 0


def offered() -> list[str]:
    """Return the names of the analyses that need nothing beside settings: no vector, no query."""
    return [title for title in ANALYSES if not _required(title)]


def _required(title: str) -> list[str]:
    parameters = inspect.signature(getattr(Hessian, title)).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    empty = inspect.Parameter.empty
    return [
        p.name
        for p in parameters
        if p.default is empty and p.kind not in kinds and p.name != "self"
    ]


def require_offered(analysis: str) -> None:
    """Refuse an analysis that needs more than settings, or that there is not.

    Raises:
        ConfigError: it is none of `offered`.
    """
    if analysis not in offered():
        raise ConfigError(f"there is no measurement {analysis!r}; there are {', '.join(offered())}")


def run(hessian: Hessian, analysis: str, **settings: object) -> Record:
    """Make an analysis of this name, on the micro-batches of the last `use`. Collective.

    Raises:
        ConfigError: there is none, it needs more than settings, or a setting is unknown.
    """
    require_offered(analysis)
    found: Record = getattr(hessian, analysis)(**settings)
    return found


def measure(
    model: nn.Module | str | Path,
    batches: Batches | str | Path,
    loss_fn: Loss = None,
    *,
    analysis: str = "spectrum",
    loading: Loading | None = None,
    sequences: Sequences | None = None,
    config: Settings = None,
    step: int | None = None,
    output_path: str | Path | None = None,
    **settings: object,
) -> Record:
    """Measure a module or a checkpoint, which needs no optimizer and no training loop.

    On several ranks (torchrun, deepspeed), whose process group has been initialised, each has its
    own micro-batches of the same number.

    Args:
        model: A module; or a checkpoint: a folder of transformers, a checkpoint of DeepSpeed, or
            a file with a state dict (then `loading` has the factory).
        batches: This rank's micro-batches; or a file of text, tokens or numbers.
        loss_fn: As for `Hessian.use`; None where the model returns its loss. From a file, a causal
            language model of transformers has the mean over all tokens.
        analysis: Name of a method of `Hessian` that needs no vectors.
        loading: How a checkpoint is brought into memory.
        sequences: Which part of a file is measured.
        config: The settings, as for `attach`.
        step: Optimizer steps made, for the record; None for those that the checkpoint says.
        output_path: Folder of the run, in which the record is saved, in a folder of its step and
            operator, and the page of the run; None saves nothing.
        **settings: Arguments of the analysis, and values of the configuration for this call.

    Returns:
        The record of the analysis, the same on every rank.

    Raises:
        ConfigError: a setting is wrong, or the data cannot be used.
        ResultError: the checkpoint is missing, damaged, or of another model.

    Collective.
    """
    require_offered(analysis)
    with ExitStack() as stack:
        checkpoint = None
        if isinstance(model, (str, Path)):
            with together(f"looking at {model}", device=this_device(), as_it_is=True):
                checkpoint = checkpoint_of(model)
            if step is not None:
                checkpoint = replace(checkpoint, step=step)
            hessian = opened(checkpoint, loading or Loading(), config)
            stack.callback(close, hessian)
        else:
            hessian = hessian_of(model, config)
            if step is not None:
                hessian.step = step
        if isinstance(batches, (str, Path)):
            use_file(hessian, batches, checkpoint, sequences, loss_fn)
        else:
            hessian.use(batches, loss_fn)
        record = run(hessian, analysis, **settings)
        if output_path is not None and isinstance(record, Savable):
            keep(hessian, record, Path(output_path))
    return record


def keep(hessian: Hessian, record: Savable, output_path: Path) -> Path:
    """Save a record in the folder of a run, with the run's page; returns the record's folder.

    The run's folder is not claimed: several processes may measure checkpoints of one run.

    Collective.
    """
    source = record.provenance
    hessian.config = hessian.config.with_overrides(output_path=str(output_path))
    return hessian.save(record, step_folder(output_path, source.step, source.operator))


def opened(checkpoint: Checkpoint, loading: Loading, config: Settings = None) -> Hessian:
    """Return the Hessian of a checkpoint, brought into memory.

    Raises:
        ConfigError: nothing says which model it is of.
        ResultError: it is damaged, or of another model; on other ranks MeasurementError.

    Collective.
    """
    if isinstance(config, Mapping) and SECTION not in config:
        config = HessianConfig.parse(config)
    device = this_device()
    with together(f"loading {checkpoint.path}", device=device):
        module = module_of(checkpoint, loading.factory)
        require_finite(module, checkpoint.path)
    if loading.stage == 3:
        engine = _engine(module, loading.dtype)
        engine.global_steps = checkpoint.step or 0
        try:
            return _in_dtype(hessian_of(engine, config), loading.dtype)
        except BaseException:
            engine.destroy()
            raise
    module.to(device)
    masters = None
    if loading.dtype != "fp32":
        masters = [p.detach().clone() for p in module.parameters() if p.requires_grad]
        module.to(DTYPES[loading.dtype])
    hessian = _in_dtype(hessian_of(module, config), loading.dtype)
    assert isinstance(hessian.backend, ModuleBackend)
    hessian.backend.masters = masters
    hessian.step = checkpoint.step or 0
    return hessian


def _in_dtype(hessian: Hessian, dtype: DType) -> Hessian:
    """Make a dtype of 16 bits that was asked for that of the passes, unless settings say more."""
    if dtype != "fp32" and hessian.config.finite_difference.precision == "auto":
        hessian.config = in_precision(hessian.config, "model")
    return hessian


def close(hessian: Hessian) -> None:
    """Free what `opened` has brought into memory. Collective."""
    engine = getattr(hessian.backend, "engine", None)
    if engine is not None:
        engine.destroy()
    gc.collect()


def use_file(
    hessian: Hessian,
    data: str | Path,
    checkpoint: Checkpoint | None = None,
    sequences: Sequences | None = None,
    loss_fn: Loss = None,
    tokenizer: Path | None = None,
) -> None:
    """Make a file the micro-batches of a Hessian, dealt out to its ranks.

    Args:
        hessian: The Hessian.
        data: The file.
        checkpoint: The checkpoint that it is of, which may have a tokenizer.
        sequences: Which part of the file.
        loss_fn: As for `measure`.
        tokenizer: Folder of another tokenizer.

    Raises:
        ConfigError: the file cannot be used; on other ranks MeasurementError.

    Collective.
    """
    space, (model,) = hessian.backend.space, hessian.modules
    with together(f"reading {data}", device=space.device):
        language = language_of(checkpoint.config if checkpoint else None, tokenizer)
        batches = read_micro_batches(
            data, sequences, language.tokenize, language.context, space.rank, space.world_size
        )
        of_tokens = "input_ids" in batches[0] and _is_causal(model)
        if of_tokens:
            causal: Any = model
            require_known_tokens(batches, causal.get_input_embeddings().num_embeddings, data)
    if loss_fn is None and of_tokens:
        loss_fn = token_mean
    hessian.use(batches, loss_fn)


def _is_causal(model: nn.Module) -> bool:
    """Return whether it is a causal language model of transformers, or inherits from one."""
    return any(kind.__name__.endswith(CAUSAL) for kind in type(model).__mro__)


def this_device() -> torch.device:
    """Return this rank's device: an accelerator of CUDA where there is one."""
    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR", "cuda") == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _engine(module: nn.Module, dtype: DType) -> Any:
    """Return an engine of ZeRO-3 whose optimizer has no state and makes no step."""
    if not dist.is_initialized():
        raise ConfigError("ZeRO-3 shards over ranks: start several (--ranks, torchrun, deepspeed)")
    import deepspeed

    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=settings)[0]
