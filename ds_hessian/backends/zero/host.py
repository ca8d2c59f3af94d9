"""What ds_hessian touches inside DeepSpeed beyond its public API, each behind a name.

Read and tried against DeepSpeed 0.19.8; the oldest version accepted is `OLDEST`. Everything private
is probed with `hasattr` where versions differ, and a version without it is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.guard import Attributes
from ds_hessian.errors import UnsupportedError

OLDEST = (0, 16, 7)
T = TypeVar("T")

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


def communication() -> tuple[Any, str]:
    """`(owner, name)` of DeepSpeed's communication object."""
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


def settings_of(engine: Any) -> dict[str, Any]:
    """The engine's whole configuration as the user gave it."""
    settings: dict[str, Any] = engine._config._param_dict
    return settings


def accelerator_synchronize() -> None:
    """Wait for the device. ZeRO-3's all-gather stream does not wait for the stream that wrote the
    shards (partitioned_param_coordinator.py), so writes must have ended before the next gather.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()


def quiet(engine: Any, attributes: Attributes) -> None:
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
    for owner in (optimizer, *engine.module.parameters()):
        if getattr(owner, "use_muon", False):  # ZeRO would give Muon's update for the gradient
            attributes.set(owner, "use_muon", False)
    if engine._config.flops_profiler_config.enabled:
        attributes.set(engine._config.flops_profiler_config, "enabled", False)
    timers = engine.engine_timers
    if timers.micro_timers or timers.global_timers:  # wall_clock_breakdown
        off = type(timers)(enable_micro_timers=False, enable_global_timers=False)
        attributes.set(engine, "engine_timers", off)


@contextmanager
def forward_stack() -> Iterator[None]:
    """ZeRO-3 pushes modules to a global list in forward; an exception leaves them there."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    depth = len(FWD_MODULE_STACK)
    try:
        yield
    finally:
        del FWD_MODULE_STACK[depth:]


def backward(engine: Any, loss: Tensor, last: bool) -> float:
    """Backward of one micro-batch; with the last one of a window the gradient is reduced.

    Returns:
        d(what was differentiated) / d(loss): the loss scale, 1/GAS or whatever this version of
        DeepSpeed puts between them; its arguments do not tell.
    """
    seen: list[float] = []
    handle = loss.register_hook(lambda gradient: seen.append(float(gradient)))
    engine._is_gradient_accumulation_boundary = last
    try:
        engine.backward(loss, scale_wrt_gas=False)
    finally:
        handle.remove()
    return seen[0]


def shape(p: Any) -> torch.Size:
    """Shape of the unsharded parameter."""
    whole: torch.Size = getattr(p, "ds_shape", p.shape)
    return whole


def offloads(section: Any) -> bool:
    """Whether `offload_optimizer` or `offload_param` moves something to the host."""
    device = getattr(section, "device", None)
    return str(getattr(device, "value", device)) == "cpu"


def compute_dtype(engine: Any) -> torch.dtype:
    """The dtype in which forward and backward compute."""
    config = engine._config
    if getattr(config, "torch_autocast_enabled", False):
        autocast: torch.dtype = config.torch_autocast_dtype
        return autocast
    return (
        torch.bfloat16
        if engine.bfloat16_enabled()
        else (torch.float16 if engine.fp16_enabled() else torch.float32)
    )


def averaging_factor(engine: Any) -> float:
    """What makes a reduced gradient the average over data-parallel ranks."""
    averaged = getattr(engine, "gradient_average", True)  # False: "gradient_allreduce_op": "sum"
    return 1.0 if averaged else 1.0 / data_parallel(engine)[1]


def data_parallel(engine: Any) -> tuple[int, int]:
    """`(rank, size)` among the ranks that have the same part of the model."""
    mpu = getattr(engine, "mpu", None)
    if mpu is None:
        return dist.get_rank(), dist.get_world_size()
    return int(mpu.get_data_parallel_rank()), int(mpu.get_data_parallel_world_size())


def tensor_parallel(engine: Any) -> tuple[int, int]:
    """`(rank, size)` among the ranks that share a copy of the model, by the engine's mpu."""
    from deepspeed.utils import bwc

    mpu = getattr(engine, "mpu", None)
    rank = bwc.bwc_tensor_model_parallel_rank(mpu)
    return int(rank), int(bwc.bwc_tensor_model_parallel_world_size(mpu))


def of_first_tensor_rank(engine: Any, value: T) -> T:
    """What the first of the ranks that share a copy of the model has. Collective."""
    from deepspeed.utils import bwc

    if tensor_parallel(engine)[1] == 1:
        return value
    group, box = bwc.bwc_tensor_model_parallel_group(engine.mpu), [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def other_parallel_size(engine: Any) -> int:
    """Ranks for each pair of a data-parallel and a tensor-parallel one: pipelines and contexts."""
    return int(dist.get_world_size() // (data_parallel(engine)[1] * tensor_parallel(engine)[1]))


def has_auto_tp(engine: Any) -> bool:
    """Whether DeepSpeed itself has split the layers, in its own way."""
    from deepspeed.utils import groups

    return getattr(engine, "mpu", None) is groups


def sequence_parallel_size(engine: Any) -> int:
    """Ranks that share a sequence (Ulysses)."""
    from deepspeed.utils import groups

    return int(groups._get_sequence_parallel_world_size())
