"""Where ZeRO-3 (`DeepSpeedZeroOptimizer_Stage3`) keeps weights, masters and gradients.

A parameter of `ds_numel` elements is split over its process group in equal parts, padded at the end
of the last; the padding is uninitialised memory in the weights and is left out of every vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ds_hessian.backends.zero.host import accelerator_synchronize
from ds_hessian.errors import UnsupportedError


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
            "parameter_offload",
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

    def abandon(self) -> None:
        """Forget a forward or backward that ranks have left at different places.

        Afterwards nothing is in flight, no gradient waits for its reduction, and all ranks record
        the order of gathers anew: it would be compared between them at the next forward.
        """
        accelerator_synchronize()
        offload = self.optimizer.parameter_offload
        coordinator, module = offload.param_coordinator, offload.module
        in_flight = type(next(module.parameters()).ds_status).INFLIGHT
        # Not by waiting for the handles: one that failed half-way asserts when waited for again.
        module.ds_inflight_param_registry.clear()
        for p in module.parameters():
            p.grad = None  # zero_grad() expects none outside backward
            p.ds_active_sub_modules.clear()
            if p.ds_status == in_flight:
                p.ds_status = type(p.ds_status).AVAILABLE  # the next publish() frees it
        if hasattr(coordinator, "release_backward_leftovers"):  # from 0.19 on
            coordinator.release_backward_leftovers()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        for bucket in self._buckets():
            bucket.params.clear()
            bucket.elements = 0
            bucket.process_group = None
        for submodule in module.modules():
            if hasattr(submodule._parameters, "_in_forward"):
                submodule._parameters._in_forward = False  # or reading a weight would gather it
            for counter in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
                if counter in vars(submodule):
                    setattr(submodule, counter, 0)

    def _buckets(self) -> list[Any]:
        if hasattr(self.optimizer, "ipg_buckets"):  # one for each type, from 0.17.2 on
            return list(self.optimizer.ipg_buckets.values())
        params = self.optimizer._DeepSpeedZeroOptimizer_Stage3__params_in_ipg_bucket
        return [SimpleNamespace(params=params)]

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
