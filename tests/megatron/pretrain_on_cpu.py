"""Megatron-LM's own pretrain_gpt.py on CPU; `MODE` is bare (as it is), hook (the recipe that wraps
`pretrain`, examples/megatron_pretrain.py) or evaluation (`PretrainHook.at_evaluation`).

Run by torchrun with Megatron-LM's arguments; prints a hash of the final state as its last line.
Every patch stands for one place where Megatron-LM insists on CUDA or on a package it does not need
here; the training loop itself is untouched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.append(os.environ["MEGATRON_LM"])
# Imported by tokenizers and data tools that are not used here.
for name, stand_in in {"six": types.ModuleType("six"), "regex": re, "yaml": MagicMock()}.items():
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = stand_in
# Needs triton at import (transformer/custom_layers).
sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = MagicMock()

import torch  # noqa: E402

from tests.megatron import shim  # noqa: E402

torch.set_num_threads(1)
shim.install()

import megatron.training.initialize as initialize  # noqa: E402
import megatron.training.training as training  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402

from ds_hessian.megatron import PretrainHook, hessian_arguments  # noqa: E402

cuda: Any = torch.cuda
# Tensor parallelism asks for the architecture (arguments.py).
cuda.get_device_properties = lambda *a, **k: types.SimpleNamespace(major=8, minor=0)
cuda.device_count = lambda: 1  # process groups are made only where there is a device
for name in ("set_device", "reset_peak_memory_stats", "memory_stats"):
    setattr(cuda, name, functools.partial(lambda *a, **k: {}, name))
for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
    setattr(cuda, name, functools.partial(lambda *a, **k: 0, name))
cuda.set_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
# DDP is built on a stream of its own.
cuda.Stream = cuda.Event = MagicMock
cuda.stream = lambda stream: contextlib.nullcontext()
cuda.current_stream = lambda *a, **k: MagicMock()
initialize._compile_dependencies = lambda: None  # fused CUDA kernels
training.set_jit_fusion_options = lambda *a, **k: None  # warms them up on the GPU
training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
models: list[Any] = []
setup = training.setup_model_and_optimizer


def remembering_setup(*args: Any, **kwargs: Any) -> Any:
    result = setup(*args, **kwargs)
    models.extend(result[0])
    if len(models) > 1:
        # On gloo, the interleaved schedule's sends race with its freeing of what it sends.
        training.get_model_config(models[0]).deallocate_pipeline_outputs = False
    return result


training.setup_model_and_optimizer = remembering_setup


def train_with_evaluation_hook() -> None:
    """What `pretrain_gpt.py` does, with the hook in Megatron-LM's own terms."""
    import pretrain_gpt

    hook = PretrainHook()
    pretrain_gpt.train_valid_test_datasets_provider.is_distributed = True
    training.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        functools.partial(pretrain_gpt.model_provider, pretrain_gpt.gpt_builder),
        ModelType.encoder_or_decoder,
        hook.record(pretrain_gpt.forward_step),
        get_embedding_ranks=pretrain_gpt.get_embedding_ranks,
        extra_args_provider=hessian_arguments,
        non_loss_data_func=hook.at_evaluation,
    )


def main() -> None:
    """Train, then hash."""
    if os.environ["MODE"] == "bare":
        runpy.run_path(os.environ["MEGATRON_LM"] + "/pretrain_gpt.py", run_name="__main__")
    elif os.environ["MODE"] == "hook":
        recipe = Path(__file__).parents[2] / "examples" / "megatron_pretrain.py"
        runpy.run_path(str(recipe), run_name="__main__")
    else:
        train_with_evaluation_hook()
    weights = b"".join(p.detach().float().numpy().tobytes() for m in models for p in m.parameters())
    rank = torch.distributed.get_rank()
    print(f"\nFINAL {rank} {hashlib.sha256(weights).hexdigest()}", flush=True)
    # Megatron-LM leaves its groups to the end of the process, where gloo's threads may abort it.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
