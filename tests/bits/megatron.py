"""Measurements of GPTs on megatron-core: tensor, pipeline and data parallelism."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from .figures import Figures, figures

VOCABULARY, SEQUENCE, SIZE = 12, 6, 2
CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """What Megatron does on CUDA devices, on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces the device; optimizers sort parameters by "torch.cuda.FloatTensor"."""
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or CPU).type == "cuda":
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def run_on_cpu() -> None:
    """Make this process' megatron-core run on the CPU, for good."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *a, **k: None
    cuda.empty_cache = lambda *a, **k: None
    cuda.Stream = type("Stream", (), {"__init__": lambda self, device: None})
    cuda.get_rng_state = lambda *a, **k: torch.get_rng_state()
    cuda.manual_seed = lambda seed: torch.random.default_generator.manual_seed(int(seed))
    import megatron.core.tensor_parallel.random as tracker

    tracker._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    tracker._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )
    logging.getLogger(tracker.__name__).setLevel(logging.ERROR)  # that the CPU's state changes
    OnCpu().__enter__()


@contextmanager
def trained(
    tp: int = 1, pp: int = 1, distributed: bool = False, bf16: bool = False
) -> Iterator[Any]:
    """The chunks of a job after two optimizer steps."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(1234)
    try:
        chunk = _chunk(tp, pp, distributed, bf16)
        _train(chunk, distributed, bf16)
        yield [chunk]
    finally:
        parallel_state.destroy_model_parallel()
        dist.barrier()
        for group in list(distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def _chunk(tp: int, pp: int, distributed: bool, bf16: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        deallocate_pipeline_outputs=pp > 1,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    ).to(dtype)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32=bf16
    )
    chunk = DistributedDataParallel(config, ddp, Float16Module(config, model) if bf16 else model)
    config.finalize_model_grads_func = finalize_model_grads
    return chunk


def batches() -> list[dict[str, Tensor]]:
    """This data-parallel rank's of four."""
    from megatron.core import parallel_state

    generator, found = torch.Generator().manual_seed(7), []
    for _ in range(4):
        tokens, labels = torch.randint(0, VOCABULARY, (2, SIZE, SEQUENCE), generator=generator)
        found.append({"tokens": tokens, "labels": labels})
    size = parallel_state.get_data_parallel_world_size()
    return found[parallel_state.get_data_parallel_rank() :: size]


def forward_step(iterator: Iterator[Any], model: Any) -> Any:
    """As Megatron's schedules take it."""
    batch = next(iterator)
    positions = torch.arange(SEQUENCE)[None].expand(SIZE, -1)
    causal = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    losses = model(batch["tokens"], positions, causal, labels=batch["labels"])
    return losses, lambda found: (found.float().mean(), {})


SIZES = {"seq_length": SEQUENCE, "micro_batch_size": SIZE}


def _train(chunk: Any, distributed: bool, bf16: bool) -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        use_distributed_optimizer=distributed,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    optimizer = get_megatron_optimizer(settings, [chunk], use_gloo_process_groups=False)
    for _ in range(2):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches()),
            model=chunk,
            num_microbatches=len(batches()),
            forward_only=False,
            **SIZES,
        )
        optimizer.step()


LAYOUTS: dict[str, dict[str, Any]] = {
    "Megatron, TP 2": {"tp": 2},
    "Megatron, PP 2": {"pp": 2},
    "Megatron, DP 2": {},
    "Megatron, DP 2, distributed optimizer": {"distributed": True},
    "Megatron, DP 2, distributed optimizer, bf16": {"distributed": True, "bf16": True},
}


def measure() -> dict[str, Figures]:
    """All of them, by name; on every rank of the job."""
    from ds_hessian.megatron import MegatronHessian, hessian_spectrum

    run_on_cpu()
    found: dict[str, Figures] = {}
    settings = {"progress": False, "plot": False, "num_matvecs": 5, "num_probes": 2}
    for name, layout in LAYOUTS.items():
        with trained(**layout) as chunks:
            hessian = MegatronHessian(chunks, settings)
            hessian.step = 2
            hessian.use(batches(), forward_step, **SIZES)
            v = hessian.random_vector(seed=5)
            measured = {"v": v, "product": hessian.matvec(v), "spectrum": hessian.spectrum()}
            if layout == {"tp": 2}:
                measured["eigenpairs"] = hessian.eigenpairs(1, max_matvecs=8)
                measured["dropout"] = hessian.spectrum(dropout=True, num_probes=1)
                measured["once"] = hessian_spectrum(
                    chunks, forward_step, batches(), **SIZES, config=settings, step=2
                )
            found[name] = figures(measured, hessian)
    return found
