"""ZeRO-3 (`DeepSpeedZeroOptimizer_Stage3`): weights, masters and gradients are sharded.

A parameter of `ds_numel` elements is split over its process group in equal parts, padded at the end
of the last; the padding is uninitialised memory in the weights and is left out of every vector.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ds_hessian.backends.guard import swap
from ds_hessian.backends.sharded import widen
from ds_hessian.backends.zero import host
from ds_hessian.backends.zero.host import Engine, Private, accelerator_synchronize
from ds_hessian.backends.zero.shards import Piece, Shards
from ds_hessian.optimizer import follow_steps

_TRACE = "_PartitionedParameterCoordinator__"
_TRACED = (
    *("step_id", "trace_mode", "submodule_order", "param_order", "param_queue"),
    *("most_recent_step_id_param_fetched_for", "step_id_module_fetched_for"),
    "n_available_params",
)
_GRADIENTS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Stage3Shards(Shards):
    """Shards of `DeepSpeedZeroOptimizer_Stage3`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.require(
            "fp16_groups",
            "fp32_partitioned_groups_flat",
            "sub_group_to_group_id",
            "grad_partitions_flat_buffer",
            "empty_partition_cache",
            "invalidate_secondary_tensor",
            "ipg_buckets",
            "parameter_offload",
            "persistent_parameters",
            _GRADIENTS,
        )
        # It steps the sub-groups that an offload with a `ratio` below 1 leaves on the accelerator.
        self._beside: Private = getattr(self.optimizer, "backup_optimizer", None)
        follow_steps(self._beside)

    def stepped_parameters(self) -> Iterator[Private]:
        """Yield the parameters of all sub-groups."""
        return (p for p, _, _ in self._parameters())

    def pieces(self) -> list[Piece]:
        """Return one piece for each parameter, with the padding at its end."""
        pieces = []
        for p, group, offset in self._parameters():
            pieces.append(Piece(p, self._first(p), p.ds_tensor.ds_numel, group, offset))
        return pieces

    def _first(self, p: Private) -> int:
        """Return the index at which this rank's shard begins in the flattened parameter."""
        return int(p.ds_tensor.ds_numel) * dist.get_rank(p.ds_process_group)

    def _parameters(self) -> Iterator[tuple[Private, int, int]]:
        """Yield (parameter, sub-group, offset of its shard there) in the optimizer's order."""
        for group, params in enumerate(self.optimizer.fp16_groups):
            offset = 0
            for p in params:
                yield p, group, offset
                offset += p.ds_tensor.ds_numel

    @override
    def weight(self, piece: Piece) -> Tensor:
        shard: Tensor = piece.parameter.ds_tensor.data
        return self._run(piece, shard)

    def _run(self, piece: Piece, shard: Tensor) -> Tensor:
        return shard.view(-1).narrow(0, piece.start - self._first(piece.parameter), piece.numel)

    @override
    def master(self, piece: Piece) -> Tensor:
        flat: Tensor = self.optimizer.fp32_partitioned_groups_flat[piece.group].detach()
        return flat.narrow(0, piece.offset, piece.numel)

    @override
    def stepped(self, piece: Piece) -> tuple[Tensor, int, int]:
        flat: Tensor = self.optimizer.fp32_partitioned_groups_flat[piece.group]
        return flat, piece.offset, self.optimizer.sub_group_to_group_id[piece.group]

    @override
    def inner(self, tensor: Tensor) -> Private:
        stepped = self._beside is not None and tensor in self._beside.state
        return self._beside if stepped else super().inner(tensor)

    def publish(self) -> None:
        """Release gathered parameters, so that the next forward gathers the written shards.

        The persistent, small ones stay gathered after a backward. The secondary shards of hpZ are
        dropped. `engine.empty_partition_cache()` does the same and flushes the allocator, at 0.4 s
        a call.
        """
        self.optimizer.empty_partition_cache()
        self.optimizer.invalidate_secondary_tensor()
        accelerator_synchronize()

    def prepare(self) -> None:
        """Gather the persistent, small parameters in one collective.

        The forward would gather them one by one, and so would DeepSpeed's own `all_gather`; the
        bits are those that a training step gathers.
        """
        released = [
            p for p in self.optimizer.persistent_parameters if p.ds_status.name == "NOT_AVAILABLE"
        ]
        together: dict[tuple[dist.ProcessGroup, torch.dtype], list[Private]] = {}
        for p in released:
            together.setdefault((p.ds_process_group, p.ds_tensor.dtype), []).append(p)
        for (group, _), params in together.items():
            _gather(params, group, self.engine.device)

    @override
    @contextmanager
    def unquantized(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, off in host.quantizers(self.engine):
                swap(stack, owner, name, off)
            yield

    @property
    def accumulates(self) -> bool:
        """True if gradients are fp32 and not offloaded, which sums them in a buffer on the host."""
        optimizer = self.optimizer
        fp32 = optimizer.grad_partitions_flat_buffer.dtype == torch.float32
        return bool(fp32 and not optimizer.offload_optimizer)

    @property
    def bucket(self) -> int:
        """The elements of the buffer in which gradients are reduced."""
        buffer = next(iter(self.optimizer.ipg_buckets.values())).buffer
        return 0 if buffer is None else int(buffer.numel())

    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Yield the gradient of any micro-batch of a window, offloaded or not."""
        stream = self.optimizer.reduce_and_partition_stream
        if stream is not None:
            stream.synchronize()
        shards = getattr(self.optimizer, _GRADIENTS)
        for piece in pieces:
            yield self._run(piece, shards[piece.parameter.ds_id].detach())

    @override
    def clear_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer.grad_partitions_flat_buffer.zero_()

    def abandon(self) -> None:
        """Reset the engine after a forward or backward that ranks have left.

        Afterwards nothing is in flight, no gradient waits for its reduction, and all ranks record
        the order of gathers anew: it would be compared between them at the next forward.
        """
        from deepspeed.runtime.zero.partition_parameters import free_param

        accelerator_synchronize()
        offload = self.optimizer.parameter_offload
        coordinator, module = offload.param_coordinator, offload.module
        in_flight = type(next(module.parameters()).ds_status).INFLIGHT
        # Not by waiting for the handles: one that failed half-way asserts when waited for again.
        module.ds_inflight_param_registry.clear()
        for p in module.parameters():
            p.grad = None  # zero_grad() expects none outside backward
            p.ds_active_sub_modules.clear()
            if p.ds_status == in_flight:  # its data may be empty still, so not by a partition
                free_param(p)
        if hasattr(coordinator, "release_backward_leftovers"):  # from 0.19 on
            coordinator.release_backward_leftovers()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()
        for bucket in self.optimizer.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
            bucket.process_group = None
        for submodule in module.modules():
            if hasattr(submodule._parameters, "_in_forward"):
                submodule._parameters._in_forward = False  # or reading a weight would gather it
            for counter in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
                if counter in vars(submodule):
                    setattr(submodule, counter, 0)

    @override
    def stash(self) -> Callable[[], None]:
        optimizer, restore = self.optimizer, super().stash()
        gathered = self._gathered()
        buffer = optimizer.grad_partitions_flat_buffer.clone()
        micro_step, averaged = optimizer.micro_step_id, dict(optimizer.averaged_gradients)
        trace = _stash_trace(optimizer.parameter_offload.get_param_coordinator())
        optimizer.grad_partitions_flat_buffer.zero_()
        optimizer.micro_step_id = 0
        offloaded = _stash_offloaded(optimizer) if optimizer.offload_optimizer else None

        def unstash() -> None:
            restore()
            trace()
            for p, whole in gathered:
                p.data, p.ds_status = whole, type(p.ds_status).AVAILABLE
            optimizer.grad_partitions_flat_buffer.copy_(buffer)
            optimizer.micro_step_id, optimizer.averaged_gradients = micro_step, averaged
            if offloaded is not None:
                offloaded()

        return unstash

    def _gathered(self) -> list[tuple[Private, Tensor]]:
        """Return the persistent parameters that training holds gathered, which must stay so.

        A step gathers them in full precision, a forward in the communication dtype, so gathering
        them anew can change their bits (tied embeddings under torch_autocast).
        """
        parameters: Iterable[Private] = self.engine.module.parameters()
        return [(p, p.data) for p in parameters if p.ds_persist and p.ds_status.name == "AVAILABLE"]

    def _copy_to_fp32(self, stack: ExitStack) -> None:
        self.publish()
        optimizer = self.optimizer
        for p, group, offset in self._parameters():
            master = optimizer.fp32_partitioned_groups_flat[group].detach()
            shard = p.ds_tensor.data
            _replace_shard(stack, p)
            widen(p.ds_tensor.data, shard, master.narrow(0, offset, p.ds_tensor.ds_numel))
        for p in self._frozen():
            _replace_shard(stack, p)
        for name in ("dtype", "communication_data_type", "gradient_accumulation_dtype"):
            swap(stack, optimizer, name, torch.float32)
        old = next(iter(optimizer.ipg_buckets.values()))
        bucket = type(old)()
        if old.buffer is not None:
            bucket.buffer = old.buffer.new_empty(old.buffer.numel(), dtype=torch.float32)
        swap(stack, optimizer, "ipg_buckets", {torch.float32: bucket})
        shards = getattr(optimizer, _GRADIENTS)
        flat = torch.zeros_like(optimizer.grad_partitions_flat_buffer, dtype=torch.float32)
        parts = flat.split([shard.numel() for shard in shards.values()])
        swap(stack, optimizer, _GRADIENTS, dict(zip(shards, parts, strict=True)))
        swap(stack, optimizer, "grad_partitions_flat_buffer", flat)
        stack.callback(self.publish)  # first of all, release what was gathered from the copies


def _gather(params: Sequence[Private], group: dist.ProcessGroup, device: torch.device) -> None:
    from deepspeed import comm

    mine = torch.cat([p.ds_tensor.data.to(device).view(-1) for p in params])
    ranks = comm.get_world_size(group)
    every = mine.new_empty(ranks * mine.numel())
    comm.allgather_fn(every, mine, group=group)
    shards = every.view(ranks, -1).split([p.ds_tensor.ds_numel for p in params], dim=1)
    for p, parts in zip(params, shards, strict=True):
        whole = parts.reshape(-1).narrow(0, 0, p.ds_numel)
        p.data = whole.view(p.ds_shape)
        p.ds_status = type(p.ds_status).AVAILABLE


def _replace_shard(stack: ExitStack, p: Private) -> None:
    shard = p.ds_tensor
    copy: Private = shard.data.to(torch.float32, copy=True)
    for name in ("ds_numel", "status", "final_location"):
        setattr(copy, name, getattr(shard, name))
    swap(stack, p, "ds_tensor", copy)
    swap(stack, p, "data", torch.empty(0, dtype=torch.float32, device=p.device))


def _stash_trace(coordinator: Private) -> Callable[[], None]:
    """Save the order of gathers that training has recorded, by which it gathers several at once.

    Weights that are quantized together (qwZ) share their scales, so that another order has other
    bits.
    """
    found = {f"{_TRACE}{name}" for name in _TRACED} & set(vars(coordinator))
    kept = {name: _copied(getattr(coordinator, name)) for name in found}
    return lambda: coordinator.__dict__.update(kept)


def _copied(value: Any) -> Any:
    made = copy.copy(value)
    if isinstance(made, dict):
        made.update({key: copy.copy(each) for key, each in made.items()})
    return made


def _stash_offloaded(optimizer: Private) -> Callable[[], None]:
    """Save the gradients and norms that optimizer offload has pending on the host."""
    masters = optimizer.fp32_partitioned_groups_flat
    gradients = [None if m.grad is None else m.grad.clone() for m in masters]
    norms = dict(optimizer.norm_for_param_grads)
    names = [n for n in ("_offload_boundary_param_ids",) if hasattr(optimizer, n)]
    ids = [set(getattr(optimizer, name)) for name in names]

    def unstash() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            if gradient is not None:
                master.grad.copy_(gradient)
        optimizer.norm_for_param_grads = norms
        for name, value in zip(names, ids, strict=True):
            setattr(optimizer, name, value)

    return unstash
