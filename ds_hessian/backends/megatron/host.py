"""The parts of Megatron beyond its documented API that ds_hessian uses, each behind a name.

Read and tried against megatron-core 0.16.1; the oldest version accepted is `OLDEST`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.megatron.buffers import bucket_groups, held_by
from ds_hessian.backends.megatron.steps import Steps
from ds_hessian.backends.protocol import Head
from ds_hessian.optimizer import last_settings
from ds_hessian.ranks import device_of_collectives
from ds_hessian.ranks.lockstep import Lockstep

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as Chunk
    from megatron.core.transformer.module import MegatronModule

OLDEST = (0, 14)


VARYING = ("variable_seq_lengths", "mtp_standalone")
"""Flags of a configuration with which stages tell each other the shapes of what they send."""

Optimizer = Any
"""An optimizer of megatron-core's, around those of torch or Transformer Engine."""

MegatronParameter = Any
"""A parameter to which megatron-core has added `main_grad` and, maybe, `main_param`."""


class ModelConfig(Protocol):
    """The part of a `TransformerConfig` that ds_hessian reads."""

    calculate_per_token_loss: bool
    sequence_parallel: bool
    add_bias_linear: bool
    hidden_size: int
    params_dtype: torch.dtype
    pipeline_dtype: torch.dtype | None
    microbatch_group_size_per_vp_stage: int
    finalize_model_grads_func: Callable[..., None] | None
    grad_scale_func: Callable[[Tensor], Tensor] | None


class ShardedTensor(Protocol):
    """The part of megatron-core's `ShardedTensor` that ds_hessian reads.

    Attributes:
        key: The name in a checkpoint.
        data: The part that this rank stores.
        local_shape: The shape of the part, without the prepended axes.
        global_shape: The shape of the whole tensor.
        global_offset: The offset of the part in the whole tensor.
        prepend_axis_num: The number of axes that only the whole tensor has.
        replica_id: The number of this copy; all zero for the copy that is saved.
    """

    key: str
    data: Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    replica_id: int | tuple[int, ...]


def unwrap(chunk: Chunk) -> MegatronModule:
    """Return the model inside DDP and Float16Module, which have nothing beside it; one's own module
    may have another as `module`, and parameters of its own.
    """
    while set(chunk._modules) == {"module"} and not chunk._parameters and not chunk._buffers:
        chunk = chunk.module
    return chunk


def version() -> str:
    """Return the version of megatron-core."""
    import megatron.core

    return str(megatron.core.__version__)


def model_config(chunk: Chunk) -> ModelConfig:
    """Return the `TransformerConfig`, which the schedules read too."""
    from megatron.core.utils import get_model_config

    config: ModelConfig = get_model_config(chunk)
    return config


def device(chunks: Sequence[Chunk]) -> torch.device:
    """Return the device of a rank's chunks, which may be empty stages of a pipeline."""
    found = (p.device for chunk in chunks for p in chunk.parameters())
    return next(found, device_of_collectives())


def mesh() -> dict[str, int]:
    """Return the sizes of the parallel axes that are not 1, and of the data-parallel one."""
    from megatron.core import parallel_state

    sizes = {
        "TP": parallel_state.get_tensor_model_parallel_world_size(),
        "PP": parallel_state.get_pipeline_model_parallel_world_size(),
        "VPP": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "CP": parallel_state.get_context_parallel_world_size(),
        "EP": parallel_state.get_expert_model_parallel_world_size(),
    }
    sizes = {axis: size for axis, size in sizes.items() if size > 1}
    return {**sizes, "DP": parallel_state.get_data_parallel_world_size()}


def has_mesh() -> bool:
    """Return whether Megatron's parallel state is initialised."""
    from megatron.core import parallel_state

    return bool(parallel_state.model_parallel_is_initialized())


def has_other_groups(chunk: Chunk) -> bool:
    """Return whether the chunk was given process groups (`pg_collection`) of other ranks than those
    of the parallel state, which schedules and reductions take unless they are given some.
    """
    from megatron.core import parallel_state

    groups = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "pp_group": parallel_state.get_pipeline_model_parallel_group(),
        "ep_group": parallel_state.get_expert_model_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    given = ((getattr(chunk, name, None), group) for name, group in groups.items())
    return any(
        dist.get_process_group_ranks(own) != dist.get_process_group_ranks(group)
        for own, group in given
        if own is not None
    )


def pipeline_rank() -> int:
    """Return the pipeline stage of this rank."""
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def ranks_of_stage() -> list[int]:
    """Return the ranks of this rank's pipeline stage."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return dist.get_process_group_ranks(group)


def expert_tensor_parallel_size() -> int:
    """Return the tensor-parallel size of expert layers."""
    from megatron.core import parallel_state

    return int(parallel_state.get_expert_tensor_parallel_world_size())


def tensor_parallel_rank() -> int:
    """Return the rank of this process in its tensor-parallel group."""
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_rank())


def ties_embeddings(chunk: Chunk) -> bool:
    """Return whether the output layer's weight is the embedding's."""
    return bool(getattr(unwrap(chunk), "share_embeddings_and_output_weights", False))


def learns_positions(chunk: Chunk) -> bool:
    """Return whether the embedding of positions is a parameter."""
    return getattr(unwrap(chunk), "position_embedding_type", None) == "learned_absolute"


def splits_latent_keys(chunk: Chunk) -> bool:
    """Return whether tensor-parallel ranks have parts of the down-projection of latent keys.

    `gather_from_tensor_model_parallel_region` (multi_latent_attention.py of 0.16.1) then returns
    positional keys whose gradient, from the heads of each rank, nothing sums.
    """
    found = (getattr(m, "linear_kv_down_proj", None) for m in unwrap(chunk).modules())
    weights = (getattr(layer, "weight", None) for layer in found)
    return any(getattr(weight, "tensor_model_parallel", False) for weight in weights)


def loses_biases(chunk: Chunk) -> bool:
    """Return whether a layer adds a trained bias to the product with a frozen weight in one step.

    `LinearWithFrozenWeight` (tensor_parallel/layers.py of 0.16.1) gives neither a gradient. A layer
    without a weight of its own is given that of an embedding in each call.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

    modules = list(unwrap(chunk).modules())
    embeddings = [m.weight for m in modules if isinstance(m, VocabParallelEmbedding)]
    layers = [m for m in modules if isinstance(m, ColumnParallelLinear)]
    for layer in (m for m in layers if m.bias is not None and not m.skip_bias_add):
        weights = embeddings if layer.weight is None else [layer.weight]
        if layer.bias.requires_grad and weights and not any(w.requires_grad for w in weights):
            return True
    return False


def is_tied_over_stages(parameter: nn.Parameter) -> bool:
    """Return whether another pipeline stage has a copy of the parameter."""
    return bool(getattr(parameter, "shared_embedding", False))


def is_summed_over_stages() -> bool:
    """Return whether Megatron sums the gradient of this rank's copy of an embedding with those of
    others: `_allreduce_embedding_grad` (distributed/finalize_model_grads.py) does so in one group.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_embedding_group(check_initialized=False)
    ranks = [] if group is None else dist.get_process_group_ranks(group)
    return len(ranks) > 1 and dist.get_rank() in ranks


def is_replicated_over_tensor_ranks(parameter: nn.Parameter, tensor: ShardedTensor) -> bool:
    """Return whether all tensor-parallel ranks have the whole parameter, as a checkpoint has it.

    Layers do not always know: offsets of learnable softmaxes, one for each head, are split and not
    marked, and layers that every rank has whole are marked (Transformer Engine's).
    """
    whole = tuple(tensor.global_shape[tensor.prepend_axis_num :]) == tuple(tensor.local_shape)
    return whole and getattr(parameter, "allreduce", True)


def tensor_group() -> tuple[dist.ProcessGroup, bool]:
    """Return the tensor-parallel group of this rank, and whether this rank is its first."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group(), tensor_parallel_rank() == 0


def first_optimizer_instance(chunk: Chunk) -> bool:
    """Return whether this rank's shards are those of the first distributed-optimizer instance."""
    from megatron.core import parallel_state

    if chunk.ddp_config.num_distributed_optimizer_instances == 1:
        return True
    return bool(parallel_state.get_inter_distributed_optimizer_instance_group().rank() == 0)


def head(chunks: Sequence[Chunk], per_unit: int) -> Head:
    """Return where the logits are: the output layer, on the last stage of a pipeline.

    A model of another kind, whose output layer has another name, is searched if it is whole.
    """
    from megatron.core import parallel_state

    models: list[nn.Module] = [unwrap(chunk) for chunk in chunks]
    layers = [layer for layer in map(_output_layer, models) if layer]
    name, layer = layers[-1] if layers else ("", None)
    if layer is None and parallel_state.get_pipeline_model_parallel_world_size() == 1:
        whole = parallel_state.get_tensor_model_parallel_world_size() == 1
        return Head(models if whole else ())
    parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    group = parallel_state.get_tensor_model_parallel_group() if parallel else None
    classes = getattr(layer, "output_size", 0)
    further = name not in ("", "output_layer", "language_model.output_layer")
    further |= any(getattr(model, "binary_head", None) is not None for model in models)  # BERT's
    return Head(list(chunks), "output_layer", layer, classes, group, per_unit, further)


def _output_layer(model: nn.Module) -> tuple[str, Any] | None:
    """Return the output layer with its name, in a multimodal model that of its language model."""
    own = getattr(model, "output_layer", None)
    if own is not None:
        return "output_layer", own
    inside = [(name, m) for name, m in model.named_modules() if name.endswith(".output_layer")]
    return inside[0] if len(inside) == 1 else None


def share_of_rank(per_token: bool, head: Head) -> float:
    """Return the part of a rank's cotangents in a term of the gradient.

    Data parallelism averages over its ranks, or sums with `calculate_per_token_loss`; whole logits
    are on every tensor-parallel rank.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    layer: Any = head.module
    copies = 1
    if head.group is not None and getattr(layer, "gather_output", False):
        copies = head.group.size()
    return 1.0 / (copies if per_token else copies * ranks)


def micro_batch_group(chunks: Sequence[Chunk]) -> int:
    """Return the smallest number of micro-batches that the schedule takes: the interleaved one
    needs a whole group of them.
    """
    if len(chunks) == 1:
        return 1
    return int(model_config(chunks[0]).microbatch_group_size_per_vp_stage)


def quiet(chunks: Sequence[Chunk], attributes: Attributes) -> None:
    """Limit the schedule to forward and backward, until `attributes.restore()`.

    Reductions are left to `Reductions`. The output layer's weight gradients are not deferred: the
    schedule makes them with the reductions, and only of two micro-batches or more
    (`drain_embedding_wgrad_compute` of 0.16.1).
    """
    for config in {id(c): c for c in map(model_config, chunks)}.values():
        for name in ("timers", "grad_scale_func", "param_sync_func", "grad_sync_func"):
            attributes.set(config, name, None)
        attributes.set(config, "finalize_model_grads_func", None)
        if getattr(config, "moe_router_fusion", False):  # whose choices are in one kernel
            attributes.set(config, "moe_router_fusion", False)
        attributes.set(config, "defer_embedding_wgrad_compute", False)
    _disable_reruns(attributes)


@contextmanager
def scaled(chunks: Sequence[Chunk], factor: float) -> Iterator[None]:
    """Multiply losses by a factor before their backward, and auxiliary ones with them."""
    if factor == 1:
        yield
        return
    config = model_config(chunks[0])
    config.grad_scale_func = lambda loss: loss * factor
    try:
        yield
    finally:
        config.grad_scale_func = None  # as `quiet` has left it


def _disable_reruns(attributes: Attributes) -> None:
    """Disable the rerun machine, which otherwise refuses results outside Megatron-LM's own loop."""
    from megatron.core import rerun_state_machine

    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        attributes.set(machine, "mode", rerun_state_machine.RerunMode.DISABLED)


def recomputes_counts(chunk: Chunk) -> bool:
    """Return whether routers that count for `global_aux_loss` are in what is recomputed."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    config: Any = model_config(chunk)
    inside: list[nn.Module] = [unwrap(chunk)]
    if config.recompute_granularity == "full" and config.recompute_method == "block":
        blocks = [m for m in inside[0].modules() if isinstance(m, TransformerBlock)]
        inside = [layer for b in blocks for layer in b.layers[: config.recompute_num_layers]]
    elif config.recompute_granularity != "full" and "moe" not in (config.recompute_modules or ()):
        return False
    return config.recompute_granularity is not None and any(map(running_counts, inside))


def running_counts(module: nn.Module) -> list[Tensor]:
    """Return what routers count over the micro-batches of a step, for `global_aux_loss`."""
    names = ("global_tokens_per_expert", "ga_steps")
    found = (getattr(m, name, None) for m in module.modules() for name in names)
    return [count for count in found if count is not None]


def keep_logs() -> Callable[[], None]:
    """Save what forward passes add to logged losses; return a function to restore it."""
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    trackers: list[dict[str, object]] = [multi_token_prediction.MTPLossLoggingHelper.tracker]
    if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker"):
        trackers.append(moe_utils.get_moe_layer_wise_logging_tracker())
    kept = [(tracker, _copy(tracker)) for tracker in trackers]

    def restore() -> None:
        for tracker, entries in kept:
            tracker.clear()
            tracker.update(entries)

    return restore


def keep_attributes(chunks: Sequence[Chunk]) -> Callable[[], None]:
    """Save the attributes of the models' modules; return a function to restore them.

    Routers make the noise of their inputs in the first forward, in the type of these, which may be
    that of fp32 passes (`apply_input_jitter` of moe/router.py). `current_max_attn_logits`
    (Transformer Engine, qk-clip), which is written in place, is read by the next optimizer step.
    """
    kept = []
    for module in (m for chunk in chunks for m in unwrap(chunk).modules()):
        before, maxima = dict(vars(module)), "current_max_attn_logits"
        if maxima in before:
            before[maxima] = _copy(before[maxima])
        kept.append((vars(module), before))

    def restore() -> None:
        for attributes, before in kept:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)

    return restore


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copy(entry) for key, entry in value.items()}
    return value


def gather_parameters(chunks: Sequence[Chunk]) -> None:
    """Gather the shards of the distributed optimizer over each data-parallel group.

    Gathers that training has left in flight, which do not include what was written since, are
    waited for first: so all ranks make the same collectives, also where one of them has failed to
    wait before. Collective.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            for group in bucket_groups(chunk):
                if group.param_gather_handle is not None:
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
            chunk.start_param_sync(force_sync=True)


def overlaps_gathers(chunks: Sequence[Chunk]) -> bool:
    """Return whether training's gathers overlap with the forward."""
    return any(map(_gather_hooks, chunks))


def keep_gather_hooks(chunks: Sequence[Chunk]) -> Callable[[], None]:
    """Return what restores the hooks that overlap gathers with the forward."""
    hooked = [(c, len(hooks)) for c in chunks if (hooks := _gather_hooks(c))]

    def enable() -> None:
        for chunk, count in hooked:
            if len(_gather_hooks(chunk)) < count:
                for hook in _gather_hooks(chunk).values():  # where not all were removed
                    hook.remove()
                _gather_hooks(chunk).clear()
                chunk.enable_forward_pre_hook()

    return enable


def finish_gathers(chunks: Sequence[Chunk]) -> None:
    """Remove the hooks that overlap gathers with the forward, and finish these. Collective."""
    for chunk in chunks:
        if _gather_hooks(chunk):
            chunk.disable_forward_pre_hook(param_sync=False)
    gather_parameters(chunks)


def _gather_hooks(chunk: Chunk) -> dict[nn.Module, Any]:
    hooks: dict[nn.Module, Any] = getattr(chunk, "remove_forward_pre_hook_handles", {})
    return hooks


def run_schedule(
    chunks: Sequence[Chunk],
    forward_step: Callable[..., tuple[object, Callable[..., object]]],
    data: Sequence[Iterator[object] | None],
    lockstep: Lockstep,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    meet: Callable[[], object],
    begin: Callable[[], object],
    forward_only: bool = False,
) -> None:
    """Run forward, and backward unless `forward_only`, of `num_microbatches` micro-batches, in a
    pass of the lockstep; `meet` is called before it, and `begin` before the backward of each.

    Collective.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    config = model_config(chunks[0])
    length = seq_length // (mesh().get("TP", 1) if config.sequence_parallel else 1)
    stage, stages = pipeline_rank(), mesh().get("PP", 1)
    steps = Steps(
        schedules,
        lockstep,
        stage=stage,
        shape=(length, micro_batch_size, config.hidden_size),
        varies=any(getattr(config, name, False) for name in VARYING),
        dtype=config.pipeline_dtype or config.params_dtype,
        device=device(chunks),
        last=chunks[-1] if stage == stages - 1 else None,
        meet=meet,
        begin=begin,
    )
    interleaved = len(chunks) > 1
    steps.run(
        lambda: get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(data) if interleaved else data[0],
            model=list(chunks) if interleaved else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
        )
    )


def adam_state(
    optimizer: Optimizer, parameter: nn.Parameter
) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return Adam's state of this rank's part of a parameter, and its settings; None without.

    The distributed optimizer steps shards of its own, which it finds by the index of the parameter;
    the others step the parameter or its fp32 master (optimizer/distrib_optimizer.py, optimizer.py).
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", part)
        groups = inner.param_groups
        stepped: Any = getattr(parameter, "main_param", None)
        places = getattr(part, "model_param_group_index_map", {})
        if parameter in places:
            group, order = places[parameter]
            stepped = groups[group]["params"][order]
        for found in (stepped, parameter):
            settings = next((g for g in groups if any(p is found for p in g["params"])), None)
            if found is not None and settings is not None:
                return _unscaled(inner, found), last_settings(inner, settings)
    return None


def _unscaled(optimizer: Any, stepped: Tensor) -> Mapping[str, Any]:
    """Return the state of a tensor, without the scales of moments that are stored in 8 or 16 bits
    (Transformer Engine's `FusedAdam`, for the precision-aware optimizer).
    """
    state: Mapping[str, Any] = optimizer.state.get(stepped, {})
    if not hasattr(optimizer, "get_unscaled_state"):
        return state
    scaled = [name for name in ("exp_avg", "exp_avg_sq") if name in state]
    return {**state, **{name: optimizer.get_unscaled_state(stepped, name) for name in scaled}}


def detached(chunk: Chunk) -> Iterator[str]:
    """Yield the names of parameters that require gradients, but have no place in the chunk's
    buffers, from which Megatron reduces gradients and gathers weights: they were added, replaced,
    unfrozen, moved or wrapped once more since the chunk was made.
    """
    held = set(held_by(chunk))
    for name, parameter in unwrap(chunk).named_parameters():
        if parameter.requires_grad and parameter not in held:
            yield name


def sharded_tensors(chunk: Chunk) -> Iterator[tuple[nn.Parameter, int, ShardedTensor]]:
    """Yield `(parameter, offset, sharded tensor)` from the model's checkpoint description.

    A parameter that a checkpoint stores as several tensors (the halves of a gated layer) comes
    several times; `offset` is the index at which the tensor begins in the flattened parameter. The
    data of these is a view of no values.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": group}
    known = {id(p): p for p in unwrap(chunk).parameters()}
    for entry in unwrap(chunk).sharded_state_dict(metadata=metadata).values():
        parameter = known.get(id(getattr(entry, "data", None)))
        if parameter is None:  # a buffer, or state of a layer
            continue
        if not isinstance(entry, ShardedTensorFactory):
            yield parameter, 0, entry
            continue
        # The factory splits whatever it holds: let it split a tensor without values, of which
        # parts that are runs are views.
        entry.data = whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for part in entry.build():
            if _is_run(part.data, whole):
                yield parameter, part.data.storage_offset(), part


def _is_run(part: Tensor, whole: Tensor) -> bool:
    """Return whether a tensor is a view of elements of another that follow each other."""
    same = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return same and part.is_contiguous()
