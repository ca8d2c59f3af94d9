"""The parts of DeepSpeed beyond its public API that ds_hessian uses, each behind a name.

Read and tried against DeepSpeed 0.19.8; the oldest version accepted is `OLDEST`. Everything private
is probed with `hasattr` where versions differ, and a version without it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.weights import coarsest
from ds_hessian.errors import UnsupportedError

if TYPE_CHECKING:  # for modules in which an engine is a module too, not only an `Engine`
    from deepspeed import DeepSpeedEngine as DeepSpeedEngine

OLDEST = (0, 19, 8)
T = TypeVar("T")

Private = Any
"""An object of DeepSpeed's that is read by attributes which no type declares: its optimizers,
sections of its configuration, and parameters to which ZeRO-3 has added `ds_tensor`, `ds_numel` and
others. `Shards.require` and `hasattr` probe those that differ between versions."""


class Engine(Protocol):
    """The part of a `DeepSpeedEngine` that ds_hessian reads and calls.

    Attributes:
        module: The model.
        device: The device of the forward and backward passes.
        optimizer: One of the optimizers in `support.KINDS`, around the user's own.
        monitor: The writers of TensorBoard, W&B and others.
        global_steps: The number of optimizer steps made so far.
        tput_timer: The timer of the throughput.
        engine_timers: The timers of `wall_clock_breakdown`.
        mpu: The model-parallel groups; None without model parallelism.
    """

    module: nn.Module
    device: torch.device
    optimizer: Private
    monitor: Private
    global_steps: int
    tput_timer: object
    engine_timers: Private
    mpu: Private
    _config: Private
    _is_gradient_accumulation_boundary: bool | None

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the forward pass."""
        ...

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = True) -> object:
        """Run the backward pass of one micro-batch."""
        ...

    def step(self, *args: object, **kwargs: object) -> object:
        """Make an optimizer step where an accumulation window ends."""
        ...

    def zero_grad(self) -> None:
        """Clear the gradients."""
        ...

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        ...

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are sent."""
        ...

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes of the model and of accumulated gradients."""
        ...


WRITES_WEIGHTS = (
    *("step", "save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"),
    *("_zero3_consolidated_16bit_state_dict", "_consolidated_16bit_state_dict"),
)
"""Methods of an engine that read or write weights for good, on the disk or in the masters."""
OF_HOOKS = frozenset(
    (
        *("ds_grads_remaining", "ds_inflight_param_registry", "ds_recompute_parameters", "ds_id"),
        *("applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn", "_external_params"),
        *("_original_parameters", "wall_clock_breakdown"),
    )
)
"""Attributes of modules in which ZeRO-3's hooks keep what they have under way."""

# State that forward and backward without step() may change, by owner.
_ENGINE_STATE = (
    "micro_steps",
    "global_steps",
    "global_samples",
    "skipped_steps",
    "losses",
    "_step_applied",
    "_global_grad_norm",
    "_is_gradient_accumulation_boundary",
    "_unmanaged_backward_count",
    "warn_unscaled_loss",
    "summary_events",
    "_manual_backward_expected",
)
_OPTIMIZER_STATE = (
    "_is_gradient_accumulation_boundary",
    "is_gradient_accumulation_boundary",  # a plain attribute up to 0.19.4
    "overflow",
    "_global_grad_norm",
    "custom_loss_scaler",
)


def communication() -> tuple[ModuleType, str]:
    """Return the module that holds DeepSpeed's communication object, and the name it has there."""
    from deepspeed.comm import comm

    return comm, "cdb"


def check_version(version: str) -> None:
    """Refuse a DeepSpeed that is older than what this module was written against.

    Raises:
        UnsupportedError: too old.
    """
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        raise UnsupportedError(
            f"DeepSpeed {'.'.join(map(str, OLDEST))} or newer is needed, found {version}; upgrade "
            "deepspeed"
        )


def settings_of(engine: Engine) -> dict[str, object]:
    """Return the engine's whole configuration as the user gave it."""
    settings: dict[str, object] = engine._config._param_dict
    return settings


def accelerator_synchronize() -> None:
    """Wait for the device. ZeRO-3's all-gather stream does not wait for the stream that wrote the
    shards (partitioned_param_coordinator.py), so writes must have ended before the next gather.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()


def quiet(engine: Engine, attributes: Attributes) -> None:
    """Remember the counters of engine and optimizer, and switch off what reports or reshapes."""
    optimizer = engine.optimizer
    attributes.keep(engine, *_ENGINE_STATE)
    attributes.keep(optimizer, *_OPTIMIZER_STATE)
    attributes.keep(engine.tput_timer, *vars(engine.tput_timer))
    hook_state = getattr(optimizer, "_backward_hook_state", None)  # from 0.18.5 on
    if hook_state is not None:
        names = [name for name in vars(hook_state) if name != "_grad_acc_post_hooks"]
        attributes.keep(hook_state, *names)
    attributes.set(engine.monitor, "enabled", False)
    if getattr(engine, "inside_no_sync_ctxt", False):  # of the caller; gradients are to be reduced
        attributes.set(engine, "inside_no_sync_ctxt", False)
    for _, layer in expert_layers(engine):
        attributes.keep(layer, "l_aux", "exp_counts")  # of training's last forward
        for timed in (layer, layer.gate):
            attributes.set(timed, "wall_clock_breakdown", False)
    dropping = getattr(engine, "random_ltd_scheduler", None)
    if dropping is not None:  # it counts tokens in the first forward of a step
        attributes.set(dropping, "state", dict(dropping.state))
    for owner in (optimizer, *engine.module.parameters()):
        if getattr(owner, "use_muon", False):  # ZeRO would give Muon's update for the gradient
            attributes.set(owner, "use_muon", False)
    if engine._config.flops_profiler_config.enabled:
        attributes.set(engine._config.flops_profiler_config, "enabled", False)
    timers = engine.engine_timers
    if timers.micro_timers or timers.global_timers:  # wall_clock_breakdown
        off = type(timers)(enable_micro_timers=False, enable_global_timers=False)
        attributes.set(engine, "engine_timers", off)


def transport(engine: Engine) -> list[tuple[object, str]]:
    """Return `(owner, name)` of the functions by which hooks gather weights and reduce gradients:
    most calls of torch in a pass are theirs.
    """
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    optimizer = engine.optimizer
    offload = getattr(optimizer, "parameter_offload", None)
    sub_module = [
        f"{when}_sub_module_{which}_function"
        for when in ("pre", "post")
        for which in ("forward", "backward")
    ]
    owners: list[tuple[object, Sequence[str]]] = [
        *((module, ["count_used_parameters_in_backward"]) for module in (stage3, stage_1_and_2)),
        (optimizer, ["reduce_ready_partitions_and_remove_grads"]),
        (optimizer, ["overlapping_partition_gradients_reduce_epilogue"]),
        (offload, sub_module),
    ]
    return [(owner, name) for owner, names in owners for name in names if hasattr(owner, name)]


@contextmanager
def forward_stack() -> Iterator[None]:
    """Restore ZeRO-3's global list of modules in forward, on which an exception leaves some."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    depth = len(FWD_MODULE_STACK)
    try:
        yield
    finally:
        del FWD_MODULE_STACK[depth:]


def backward(engine: Engine, loss: Tensor, last: bool) -> float:
    """Backward of one micro-batch; with the last one of a window the gradient is reduced.

    Returns:
        The derivative of what was differentiated by the loss: the loss scale, 1/GAS or whatever
        this version of DeepSpeed puts between them; its arguments do not say.
    """
    seen: list[float] = []
    handle = loss.register_hook(lambda gradient: seen.append(float(gradient)))
    engine._is_gradient_accumulation_boundary = last
    if hasattr(engine.optimizer, "setup_buckets"):  # by the first gradient, if there is one at all
        engine.optimizer.setup_buckets()
    try:
        engine.backward(loss, scale_wrt_gas=False)
    finally:
        handle.remove()
    return seen[0]


def empty_checkpoints() -> None:
    """Empty the contiguous memory of DeepSpeed's activation checkpoints, which a backward empties:
    a forward without one leaves it so full that training's next forward has no place.
    """
    from deepspeed import checkpointing

    checkpointing.reset()


def shape(p: Tensor) -> torch.Size:
    """Return the shape of the unsharded parameter."""
    whole: torch.Size = getattr(p, "ds_shape", p.shape)
    return whole


def offloads(section: object) -> bool:
    """Return whether `offload_optimizer` or `offload_param` moves something to the host."""
    device = getattr(section, "device", None)
    return str(getattr(device, "value", device)) == "cpu"


def compute_dtype(engine: Engine) -> torch.dtype:
    """Return the coarsest dtype of the passes, and in which gradients are sent and added up."""
    config = engine._config
    dtypes = {engine.communication_data_type, *engine.get_data_types()}
    dtypes |= {p.dtype for p in engine.module.parameters()}
    if isinstance(getattr(engine.optimizer, "dtype", None), torch.dtype):
        dtypes.add(engine.optimizer.dtype)  # of the buckets in which ZeRO-1 and -2 reduce
    if getattr(config, "torch_autocast_enabled", False):
        dtypes.add(config.torch_autocast_dtype)
    return coarsest(dtypes)


def averaging_factor(engine: Engine) -> float:
    """Return the factor from a reduced gradient to the average over data-parallel ranks."""
    averaged = getattr(engine, "gradient_average", True)  # False: "gradient_allreduce_op": "sum"
    return 1.0 if averaged else 1.0 / data_parallel(engine)[1]


def data_parallel(engine: Engine) -> tuple[int, int]:
    """Return `(rank, size)` among the ranks that have the same part of the model, those that share
    a sequence included.
    """
    from deepspeed.utils import groups

    if sequence_parallel_size(engine) > 1:
        rank, ranks = groups._get_sequence_data_parallel_rank, dist.get_world_size
        return int(rank()), int(ranks(groups._get_sequence_data_parallel_group()))
    mpu = getattr(engine, "mpu", None)
    if mpu is None:
        return dist.get_rank(), dist.get_world_size()
    return int(mpu.get_data_parallel_rank()), int(mpu.get_data_parallel_world_size())


def tensor_parallel(engine: Engine) -> tuple[int, int]:
    """Return `(rank, size)` among the ranks that share a copy of the model, by the engine's mpu."""
    from deepspeed.utils import bwc

    mpu = getattr(engine, "mpu", None)
    if hasattr(mpu, "initialize_sequence_parallel"):  # its "model-parallel" ranks share sequences
        return 0, 1
    rank = bwc.bwc_tensor_model_parallel_rank(mpu)
    return int(rank), int(bwc.bwc_tensor_model_parallel_world_size(mpu))


def quantized(engine: Engine) -> list[str]:
    """Return what of training's communication is quantized: "qwZ" weights, "qgZ" gradients."""
    zero = engine._config.zero_config
    if int(zero.stage) != 3:
        return []
    named = {"qwZ": zero.zero_quantized_weights, "qgZ": zero.zero_quantized_gradients}
    return [name for name, present in named.items() if present]


def quantizers(engine: Engine) -> list[tuple[Private, str, object]]:
    """Return `(owner, attribute, value)` that switch the quantization of communication off."""
    optimizer = engine.optimizer
    coordinator = optimizer.parameter_offload.get_param_coordinator()
    found: list[tuple[Private, str, object]] = []
    if "qwZ" in quantized(engine):
        found.append((coordinator, "zero_quantized_weights", False))
    if "qgZ" in quantized(engine):
        found.append((optimizer, "all2all_process_group", None))
    return found


def is_destroyed(engine: Engine) -> bool:
    """Return whether `engine.destroy()` has removed the hooks by which ZeRO gets its gradients."""
    handles = getattr(engine.optimizer, "_grad_acc_hooks", [])
    return any(handle.id not in (handle.hooks_dict_ref() or ()) for handle in handles)


def has_experts(engine: Engine) -> bool:
    """Return whether the model has layers of `deepspeed.moe`, or of AutoEP."""
    return bool(getattr(engine, "has_moe_layers", False))


def expert_layers(engine: Engine) -> list[tuple[str, Private]]:
    """Return paths and layers of the model's `deepspeed.moe`."""
    if not has_experts(engine):
        return []
    from deepspeed.moe.sharded_moe import MOELayer

    return [(path, m) for path, m in engine.module.named_modules() if isinstance(m, MOELayer)]


def expert_rank(layer: Private) -> int:
    """Return the rank of this process among those that share the layer's experts."""
    from deepspeed.utils import groups

    return int(groups._get_expert_parallel_rank(layer.ep_group_name))


def is_expert(p: Tensor) -> bool:
    """Return whether the parameter is marked as one of an expert (`deepspeed.moe`, Megatron)."""
    return getattr(p, "allreduce", True) is False


def copies(engine: Engine, p: Tensor) -> tuple[int, int]:
    """Return `(rank, size)` among the ranks that have the same part of this parameter."""
    if not is_expert(p):
        return data_parallel(engine)
    from deepspeed.utils import groups

    name: str = p.group_name  # type: ignore[attr-defined]  # set by deepspeed.moe
    group = groups._get_expert_data_parallel_group(name)
    return dist.get_rank(group), dist.get_world_size(group)


def of_first_tensor_rank(engine: Engine, value: T) -> T:
    """Return the value of the first of the ranks that share a copy of the model. Collective."""
    from deepspeed.utils import bwc

    if tensor_parallel(engine)[1] == 1:
        return value
    group, box = bwc.bwc_tensor_model_parallel_group(engine.mpu), [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def other_parallel_size(engine: Engine) -> int:
    """Return the product of the other parallel sizes: of pipelines and contexts."""
    return int(dist.get_world_size() // (data_parallel(engine)[1] * tensor_parallel(engine)[1]))


def sequence_parallel_size(engine: Engine) -> int:
    """Return the number of ranks that share a sequence (Ulysses)."""
    from deepspeed.utils import groups

    return int(groups._get_sequence_parallel_world_size())


def sequence_parallel_group() -> dist.ProcessGroup:
    """Return the ranks that share a sequence with this one (Ulysses)."""
    from deepspeed.utils import groups

    found: dist.ProcessGroup = groups._get_sequence_parallel_group()
    return found
