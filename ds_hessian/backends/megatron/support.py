"""Refusal of jobs that cannot be measured, by name, before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ds_hessian.backends.findings import Finding, backward_under_way
from ds_hessian.backends.megatron import buffers, host
from ds_hessian.backends.random_states import has_plain_random_states
from ds_hessian.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


def refuse_unsupported(chunks: Sequence[Chunk]) -> None:
    """Raise for a job on which products would be wrong or untested.

    Stages of a pipeline may decide differently: callers meet afterwards.

    Raises:
        UnsupportedError: names the option, and what to do.
        ConfigError: there are more or fewer chunks than the job has on a rank.
    """
    number = tuple(int(part) for part in host.version().split(".")[:2])
    if number < host.OLDEST:
        raise UnsupportedError(
            f"megatron-core {'.'.join(map(str, host.OLDEST))} or newer is needed, found "
            f"{host.version()}; upgrade megatron-core"
        )
    if not host.has_mesh():
        raise UnsupportedError(
            "ds_hessian does not support process groups of a job's own without Megatron's parallel "
            "state; call megatron.core.parallel_state.initialize_model_parallel with the sizes of "
            "the job"
        )
    for chunk in chunks:
        kinds = [kind.__name__ for kind in type(chunk).__mro__]  # NeMo has a class of its own
        if "DistributedDataParallel" not in kinds or not hasattr(chunk, "expert_parallel_buffers"):
            raise UnsupportedError(
                f"ds_hessian does not support a model wrapped in {kinds[0]}; wrap each chunk in "
                "megatron.core.distributed.DistributedDataParallel (no Megatron-FSDP, no FSDP2)"
            )
        for name, present, remedy in _findings(chunk):
            if present:
                raise UnsupportedError(f"ds_hessian does not support {name}; {remedy}")
        for name in host.detached(chunk):
            raise UnsupportedError(
                f"ds_hessian does not support the parameter {name!r}, which requires gradients but "
                "has no place in the buffers of its DistributedDataParallel, with which Megatron "
                "trains: it was added, replaced, unfrozen or given other memory since; wrap the "
                "model after such changes"
            )
    expected = host.mesh().get("VPP", 1)
    if len(chunks) != expected:
        raise ConfigError(
            f"this job has {expected} model chunk{'s' * (expected > 1)} on a rank, got "
            f"{len(chunks)}; pass what get_forward_backward_func() takes as model"
        )


def _findings(chunk: Chunk) -> list[Finding]:
    config, ddp, mesh = host.model_config(chunk), chunk.ddp_config, host.mesh()
    experts = bool(getattr(config, "num_moe_experts", None))
    tensor, expert = mesh.get("TP", 1), mesh.get("EP", 1)
    half = any(p.dtype == torch.float16 for p in chunk.parameters())
    farther = bool(getattr(config, "mtp_num_layers", None)) and mesh.get("PP", 1) > 1

    def on(owner: object, *names: str) -> bool:
        return any(getattr(owner, name, None) not in (None, False, "none") for name in names)

    return [
        backward_under_way(),
        (
            "process groups (pg_collection) of other ranks than those of the parallel state",
            host.has_other_groups(chunk),
            "schedules and reductions of a measurement take these: build the model with the groups "
            "of initialize_model_parallel",
        ),
        ("Megatron-FSDP", on(ddp, "use_megatron_fsdp", "use_custom_fsdp"), "use plain DDP"),
        ("fp8 or fp4 layers", on(config, "fp8", "fp4"), "measure a bf16 or fp32 job"),
        (
            "parameters that share memory with gradients (reuse_grad_buf_for_mxfp8_param_ag)",
            on(ddp, "reuse_grad_buf_for_mxfp8_param_ag"),
            "switch it off",
        ),
        (
            "gradient or weight buffers that are offloaded",
            buffers.offloaded(chunk),
            "call restore_grad_buffers(), or what else moved them away, before",
        ),
        ("fp16 with loss scaling", on(config, "fp16") or half, "measure a bf16 or fp32 job"),
        (
            "CUDA graphs",
            on(config, "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"),
            "switch them off",
        ),
        (
            "the random states of CUDA graphs",
            not has_plain_random_states(),
            "initialise the tracker without use_cudagraphable_rng",
        ),
        ("context parallelism", mesh.get("CP", 1) > 1, "use context_parallel_size 1"),
        (
            "reduce_scatter_with_fp32_accumulation",
            on(ddp, "reduce_scatter_with_fp32_accumulation"),
            "switch it off",
        ),
        (
            "the loss of the indexers of sparse attention (dsa_indexer_loss_coeff)",
            on(config, "dsa_indexer_loss_coeff"),
            "Megatron does not divide it by the number of micro-batches, on which its weight then "
            "depends: set it to 0",
        ),
        (
            "routers whose choices are drawn (moe_router_force_load_balancing)",
            on(config, "moe_router_force_load_balancing"),
            "the gradient that Megatron gives them is not that of the loss: set it to False",
        ),
        (
            "overlap_moe_expert_parallel_comm and delay_wgrad_compute",
            on(config, "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
            "switch them off",
        ),
        (
            "multi-token prediction with tied embeddings in a pipeline",
            farther and host.ties_embeddings(chunk),
            "megatron-core cannot describe its copies of the embedding: use "
            "untie_embeddings_and_output_weights, or no pipeline",
        ),
        (
            "multi-token prediction with learned position embeddings in a pipeline",
            farther and host.learns_positions(chunk),
            "megatron-core trains a copy of them on each of two stages, which become different: "
            'use position_embedding_type "rope", or no pipeline',
        ),
        (
            "multi-latent attention whose down-projections are split over tensor-parallel ranks",
            tensor > 1 and host.splits_latent_keys(chunk),
            "Megatron does not sum the gradient of their positional keys over the ranks, and "
            "trains with another one than the loss has: use no tensor parallelism, or Transformer "
            "Engine's layers, which every rank has whole",
        ),
        (
            "biases of layers whose weights are frozen",
            host.loses_biases(chunk),
            "Megatron gives them no gradient: freeze them too, or train the weights",
        ),
        (
            "experts of another tensor-parallel size than that of the other layers without expert "
            "parallelism",
            experts and expert == 1 and tensor != host.expert_tensor_parallel_size(),
            "Megatron sums their gradients over the data-parallel ranks of the other layers: use "
            "expert_tensor_parallel_size = tensor_model_parallel_size, or expert parallelism",
        ),
        (
            "global_aux_loss in layers that are recomputed",
            experts and host.recomputes_counts(chunk),
            "routers count their tokens again in the recomputation, which may come after the next "
            "forward: do not recompute layers of experts",
        ),
        (
            "biases of experts under sequence and expert parallelism",
            experts and expert > 1 and config.sequence_parallel and config.add_bias_linear,
            "Megatron sums those of different experts: use add_bias_linear=False",
        ),
    ]
