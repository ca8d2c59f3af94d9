"""The Megatron jobs of benchmarks/plan.py: a GPT of megatron-core on two CPU ranks, by layout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import measuring  # noqa: F401  (so that the tests can be imported)
import torch
from torch import Tensor

from ds_hessian.planning import Job, Mesh, Shape
from tests.megatron import job as tested
from tests.megatron import shim

SHAPE = Shape(layers=4, hidden=256, heads=4, vocabulary=256, sequence=32, positions=32, bias=True)
EXPERTS = replace(SHAPE, experts=4, active=2, expert_ffn=256, bias=False)
SIZE = 4
SIZES = {"seq_length": SHAPE.sequence, "micro_batch_size": SIZE}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    mesh: Mesh
    micro_batches: int
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    recompute: Any = "none"
    shape: Shape = SHAPE

    def __str__(self) -> str:
        words = [f"Megatron {self.mesh} {self.dtype}", f"{self.micro_batches} mb"]
        words += ["sequence parallel"] * self.mesh.sequence_parallel
        words += [f"recomputation {self.recompute}"] * (self.recompute != "none")
        return ", ".join([*words, *(f"{k}={v}" for k, v in self.settings.items())])

    @property
    def job(self) -> Job:
        """The job on two ranks, for a plan."""
        return Job(
            num_parameters=self.shape.parameters,
            world_size=2,
            dtype=self.dtype,  # type: ignore[arg-type]
            accelerator=False,
            mesh=self.mesh,
            shape=self.shape,
            recompute=self.recompute,
        )

    @property
    def tested(self) -> tested.Job:
        """The same, for the groups and the optimizer of the tests."""
        mesh = self.mesh
        return tested.Job(
            tp=mesh.tensor,
            pp=mesh.pipeline,
            vpp=mesh.virtual,
            ep=mesh.expert,
            etp=mesh.expert_tensor or 1,
            experts=self.shape.experts,
            distributed=mesh.distributed_optimizer,
            dtype="bfloat16" if self.dtype == "bf16" else "float32",
        )


SIX = {"num_matvecs": 6}
CASES = [
    Case(Mesh(pipeline=2, distributed_optimizer=False), 8, SIX),
    Case(Mesh(tensor=2, distributed_optimizer=False), 8, SIX),
    Case(Mesh(pipeline=2, virtual=2, distributed_optimizer=False), 8, SIX),
    Case(Mesh(expert=2), 8, SIX, shape=EXPERTS),
    Case(Mesh(tensor=2, sequence_parallel=True), 4, SIX, recompute="full"),
    Case(Mesh(), 8, SIX),
    Case(Mesh(), 4, {**SIX, "dtype": "bf16"}, dtype="bf16"),
    Case(Mesh(pipeline=2), 8, {**SIX, "dtype": "bf16"}, dtype="bf16", recompute="full"),
    Case(Mesh(distributed_optimizer=False), 8, SIX),
]


@contextmanager
def chunks_of(case: Case) -> Iterator[list[Any]]:
    """The DDP chunks of a case on this rank."""
    with tested.groups_of(case.tested):
        yield build(case)


def config_of(case: Case) -> Any:
    """megatron-core's configuration of the model."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    mesh, shape = case.mesh, case.shape
    dtype, virtual = case.tested.torch_dtype, mesh.virtual > 1
    more: dict[str, Any] = {}
    if case.recompute == "full":
        more = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if shape.experts:
        more |= {
            "num_moe_experts": shape.experts,
            "moe_router_topk": shape.active,
            "moe_ffn_hidden_size": shape.expert_width,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": mesh.expert,
        }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.width,
        num_attention_heads=shape.heads,
        add_bias_linear=shape.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.dtype == "bf16",
        tensor_model_parallel_size=mesh.tensor,
        pipeline_model_parallel_size=mesh.pipeline,
        virtual_pipeline_model_parallel_size=mesh.virtual if virtual else None,
        sequence_parallel=mesh.sequence_parallel,
        # As in tests/megatron/job.py: gloo matches batched sends in posting order.
        overlap_p2p_comm=virtual,
        batch_p2p_comm=not virtual,
        deallocate_pipeline_outputs=mesh.pipeline > 1 and not virtual,
        **more,
    )


def build(case: Case) -> list[Any]:
    """The chunks of `chunks_of`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config, virtual = config_of(case), case.mesh.virtual > 1
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=case.mesh.distributed_optimizer,
        grad_reduce_in_fp32=case.dtype == "bf16",
    )
    spec = get_gpt_layer_local_spec(num_experts=case.shape.experts or None, moe_grouped_gemm=False)
    chunks = []
    for stage in range(case.mesh.virtual):
        where = {"ignore_virtual": not virtual, "vp_stage": stage if virtual else None}
        model = GPTModel(
            config,
            spec,
            vocab_size=case.shape.vocabulary,
            max_sequence_length=case.shape.positions,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=True,
            vp_stage=where["vp_stage"],
        ).to(case.tested.torch_dtype)
        wrapped = Float16Module(config, model) if case.dtype == "bf16" else model
        chunks.append(DistributedDataParallel(config, ddp, wrapped, disable_bucketing=stage > 0))
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


CAUSAL = torch.triu(torch.ones(SHAPE.sequence, SHAPE.sequence, dtype=torch.bool), 1)[None, None]


def forward_step(data: Any, model: Any) -> Any:
    """The mean loss of a micro-batch, as Megatron's schedules take it."""
    tokens, labels = next(data)
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    losses = model(tokens, positions, CAUSAL, labels=labels)

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return losses, mean


def plain_gradient(chunks: list[Any], batches: list[Any]) -> float:
    """Seconds of one gradient as training makes it, from the gather that follows a step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from ds_hessian.backends.megatron import host

    started = time.perf_counter()
    host.gather_parameters(chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    interleaved = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if interleaved else iter(batches),
        model=chunks if interleaved else chunks[0],
        num_microbatches=len(batches),
        forward_only=False,
        **SIZES,
    )
    return time.perf_counter() - started


def prepare() -> None:
    """Make megatron-core run on this process' CPU; nothing else does afterwards."""
    shim.install()
