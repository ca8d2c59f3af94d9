"""What ds_hessian touches inside DeepSpeed beyond its public API, each behind a name.

Read and tried against DeepSpeed 0.19.8; the oldest version accepted is `OLDEST`. Everything private
is probed with `hasattr` where versions differ, and a version without it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.state import Attributes
from ds_hessian.errors import UnsupportedError

OLDEST = (0, 16, 7)

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


def accelerator_synchronize() -> None:
    """Wait for the device. ZeRO-3's all-gather stream does not wait for the stream that wrote the
    shards (partitioned_param_coordinator.py), so writes must have ended before the next gather.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()


def tracker_states() -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    """Get and set the states of DeepSpeed's activation-checkpointing RNG tracker.

    `set_states` keeps the dict that it is given and `fork` replaces entries in it, hence a copy.
    """
    from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

    def put(states: dict[str, Tensor]) -> None:
        get_cuda_rng_tracker().set_states(dict(states))

    return ((lambda: dict(get_cuda_rng_tracker().get_states()), put),)


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


def backward(engine: Any, loss: Tensor) -> float:
    """Backward of one micro-batch as a whole accumulation window, so that the gradient is reduced.

    Returns:
        d(what was differentiated) / d(loss): the loss scale, 1/GAS or whatever this version of
        DeepSpeed puts between them; its arguments do not tell.
    """
    seen: list[float] = []
    handle = loss.register_hook(lambda gradient: seen.append(float(gradient)))
    engine._is_gradient_accumulation_boundary = True
    try:
        engine.backward(loss, scale_wrt_gas=False)
    finally:
        handle.remove()
    return seen[0]


class Stage3Shards:
    """Private layout of `DeepSpeedZeroOptimizer_Stage3`."""

    _GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        needed = (
            "fp16_groups",
            "fp32_partitioned_groups_flat",
            "grad_partitions_flat_buffer",
            "empty_partition_cache",
            "invalidate_secondary_tensor",
            self._GRADIENTS,
        )
        missing = [name for name in needed if not hasattr(optimizer, name)]
        if missing:
            raise UnsupportedError(
                f"this DeepSpeed's ZeRO-3 optimizer has no {', '.join(missing)}; use a version "
                "that ds_hessian was tried with (see docs/support.md)"
            )

    def parameters(self) -> Iterator[tuple[Any, int, int, int]]:
        """(parameter, sub-group, its offset there, its shard's length) in the optimizer's order."""
        for group, params in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for p in params:
                length = p.ds_tensor.ds_numel
                yield p, group, offset, length
                offset += length

    def master(self, group: int, offset: int, numel: int) -> Tensor:
        """View of the fp32 master weights."""
        flat: Tensor = self.optimizer.fp32_partitioned_groups_flat[group].detach()
        return flat.narrow(0, offset, numel)

    def gradient(self, p: Any, numel: int) -> Tensor:
        """View of the reduced gradient shard; right after every backward in every mode."""
        shard: Tensor = getattr(self.optimizer, self._GRADIENTS)[p.ds_id].detach()
        return shard.view(-1).narrow(0, 0, numel)

    def synchronize_reduction(self) -> None:
        """Wait for the reduction stream."""
        stream = self.optimizer.reduce_and_partition_stream
        if stream is not None:
            stream.synchronize()

    def publish(self) -> None:
        """Make every rank's next forward read the written shards.

        Gathered parameters (the persistent, small ones stay gathered after a backward) are
        released, and hpZ's secondary shards dropped. `engine.empty_partition_cache()` does the
        same and flushes the allocator, at 0.4 s a call.
        """
        self.optimizer.empty_partition_cache()
        self.optimizer.invalidate_secondary_tensor()
        accelerator_synchronize()

    def clear_gradients(self) -> None:
        """Forget the pass just made; a parameter that a later pass does not use has gradient 0."""
        self.optimizer.zero_grad()
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def stash(self) -> dict[str, Any]:
        """The gradients that training has pending; leaves none."""
        optimizer = self.optimizer
        saved = {
            "buffer": optimizer.grad_partitions_flat_buffer.clone(),
            "micro_step_id": optimizer.micro_step_id,
            "averaged": dict(optimizer.averaged_gradients),
        }
        optimizer.grad_partitions_flat_buffer.zero_()
        optimizer.micro_step_id = 0
        return saved

    def unstash(self, saved: dict[str, Any]) -> None:
        """Put pending gradients back."""
        optimizer = self.optimizer
        optimizer.grad_partitions_flat_buffer.copy_(saved["buffer"])
        optimizer.micro_step_id = saved["micro_step_id"]
        optimizer.averaged_gradients = saved["averaged"]


def is_data_parallel_only(engine: Any) -> bool:
    """No tensor, pipeline, expert or sequence axis: every rank holds different ZeRO shards."""
    from deepspeed.utils import groups

    return (
        getattr(engine, "mpu", None) is None
        and not getattr(engine, "has_moe_layers", False)
        and groups._get_sequence_parallel_world_size() == 1
        and not type(engine).__name__.startswith(("Pipeline", "DualPipe"))
    )


def world_size(group: Any) -> int:
    """Ranks in a DeepSpeed process group."""
    return torch.distributed.get_world_size(group)
