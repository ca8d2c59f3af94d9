"""ZeRO-1 and ZeRO-2 (`DeepSpeedZeroOptimizer`) and their bf16 relative (`BF16_Optimizer`).

Every rank holds all weights, as views of one flat buffer for each parameter group; of the buffer it
owns one partition, with masters and reduced gradients. Vectors are partitioned in the same way.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ds_hessian.backends.guard import swap
from ds_hessian.backends.sharded import widen
from ds_hessian.backends.zero.host import Engine, Private, accelerator_synchronize
from ds_hessian.backends.zero.shards import Piece, Shards


class FlatShards(Shards):
    """Shards of `DeepSpeedZeroOptimizer`; the names are those of its private attributes."""

    PARAMETERS = "bit16_groups"
    WEIGHTS = "bit16_groups_flat"
    PARTITIONS = "parallel_partitioned_bit16_groups"
    MASTERS = "single_partition_of_fp32_groups"
    NEEDED: tuple[str, ...] = ("averaged_gradients", "micro_step_id", "cpu_offload", "ipg_buckets")

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        names = (self.PARAMETERS, self.WEIGHTS, self.PARTITIONS, self.MASTERS, *self.NEEDED)
        self.require(*names, "real_dp_process_group")

    def _get(self, name: str, group: int) -> Private:
        return getattr(self.optimizer, name)[group]

    def _rank(self, group: int) -> int:
        return dist.get_rank(self.optimizer.real_dp_process_group[group])

    def stepped_parameters(self) -> Iterator[Private]:
        """Yield the parameters of all groups."""
        return itertools.chain.from_iterable(getattr(self.optimizer, self.PARAMETERS))

    def pieces(self) -> list[Piece]:
        """Return this rank's partition, by the offsets of the weights in the flat buffer.

        The optimizer's own maps leave `round_robin_gradients` out.
        """
        pieces = []
        for group, params in enumerate(getattr(self.optimizer, self.PARAMETERS)):
            flat = self._get(self.WEIGHTS, group)
            partition = self._get(self.PARTITIONS, group)[self._rank(group)]
            low = partition.storage_offset() - flat.storage_offset()
            high = low + partition.numel()
            for p in params:
                begin = p.data.storage_offset() - flat.storage_offset()
                start, stop = max(begin, low), min(begin + p.numel(), high)
                if start < stop:
                    pieces.append(Piece(p, start - begin, stop - start, group, start - low))
        return pieces

    @override
    def detached(self) -> Iterator[Private]:
        for group, params in enumerate(getattr(self.optimizer, self.PARAMETERS)):
            flat = self._get(self.WEIGHTS, group).untyped_storage().data_ptr()
            yield from (p for p in params if p.data.untyped_storage().data_ptr() != flat)

    @override
    def weight(self, piece: Piece) -> Tensor:
        partition: Tensor = self._get(self.PARTITIONS, piece.group)[self._rank(piece.group)]
        return partition.narrow(0, piece.offset, piece.numel)

    @override
    def master(self, piece: Piece) -> Tensor:
        flat: Tensor = self._get(self.MASTERS, piece.group).detach()
        return flat.narrow(0, piece.offset, piece.numel)

    @override
    def stepped(self, piece: Piece) -> tuple[Tensor, int, int]:
        return self._get(self.MASTERS, piece.group), piece.offset, piece.group

    @torch.no_grad()
    def publish(self) -> None:
        """Run the all-gather that ends an optimizer step. Collective."""
        from deepspeed.runtime.utils import all_gather_dp_groups

        optimizer = self.optimizer
        all_gather_dp_groups(
            groups_flat=getattr(optimizer, self.WEIGHTS),
            partitioned_param_groups=getattr(optimizer, self.PARTITIONS),
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )

    @property
    def accumulates(self) -> bool:
        """True for ZeRO-1 in fp32, which accumulates on every rank and reduces the sums."""
        optimizer = self.optimizer
        if optimizer.partition_gradients or optimizer.cpu_offload:
            return False
        return all(p.dtype == torch.float32 for params in optimizer.bit16_groups for p in params)

    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Yield the reduced gradients, at the end of an accumulation window only."""
        optimizer = self.optimizer
        if optimizer.cpu_offload:
            accelerator_synchronize()  # the copies to the host do not block
        parts: dict[int, list[tuple[int, Tensor]]] = {}
        for piece in pieces:
            if piece.group not in parts:
                parts[piece.group] = list(_with_offsets(self._partition(piece.group)))
            yield _cut(parts[piece.group], piece.offset, piece.numel)

    def _partition(self, group: int) -> list[Tensor]:
        """Return tensors that, concatenated, are the reduced gradient of this rank's partition."""
        if self.optimizer.cpu_offload:
            return [self._get(self.MASTERS, group).grad]
        return list(self.optimizer.averaged_gradients[group])

    @override
    def clear_gradients(self) -> None:
        optimizer = self.optimizer
        optimizer.zero_grad()
        for gradients in self._accumulators():
            for group in gradients:
                gradients[group] = None
        optimizer.micro_step_id = -1
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            # A parameter that the next pass does not use would keep the gradient of this one.
            for master in getattr(optimizer, self.MASTERS):
                if master.grad is not None:
                    master.grad.zero_()

    def _accumulators(self) -> list[dict[int, list[Tensor] | None]]:
        optimizer = self.optimizer
        return [optimizer.averaged_gradients, getattr(optimizer, "all_grad_tensors", {})]

    def abandon(self) -> None:
        """Empty the buckets and clear the gradients: no reduction is pending afterwards."""
        accelerator_synchronize()
        optimizer = self.optimizer
        for bucket in optimizer.ipg_buckets.values():
            bucket.params.clear()
            bucket.grads.clear()
            bucket.elements = bucket.index = 0
        optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
        for gradients in optimizer.previous_reduced_grads.values():
            gradients.clear()
        optimizer._release_ipg_buffers()
        self.clear_gradients()

    @override
    def stash(self) -> Callable[[], None]:
        optimizer, restore = self.optimizer, super().stash()
        accumulated = [dict(gradients) for gradients in self._accumulators()]
        micro_step = optimizer.micro_step_id
        # From 0.18.3 on: buckets are set up and the micro-step is counted by the first forward.
        ready = getattr(optimizer, "ready_for_gradients", None)
        for gradients in self._accumulators():
            for group in gradients:
                gradients[group] = None
        offloaded = _stash_offloaded(optimizer) if optimizer.cpu_offload else None
        optimizer.micro_step_id = -1
        if ready is not None:
            optimizer.ready_for_gradients = False

        def unstash() -> None:
            restore()
            for gradients, kept in zip(self._accumulators(), accumulated, strict=True):
                gradients.clear()
                gradients.update(kept)
            if ready is not None:
                optimizer.ready_for_gradients = False
            optimizer.micro_step_id = micro_step - bool(ready)
            if offloaded is not None:
                offloaded()

        return unstash

    def _copy_to_fp32(self, stack: ExitStack) -> None:
        optimizer = self.optimizer
        self._copy_flat_weights(stack)
        for name in ("dtype", "communication_data_type", "gradient_accumulation_dtype"):
            swap(stack, optimizer, name, torch.float32)
        for name in ("use_separate_grad_accum", "use_grad_accum_attribute"):
            if hasattr(optimizer, name):
                swap(stack, optimizer, name, False)
        bucket = type(next(iter(optimizer.ipg_buckets.values())))()
        swap(stack, optimizer, "ipg_buckets", {torch.float32: bucket})

    def _copy_flat_weights(self, stack: ExitStack) -> None:
        """Swap in fp32 weights: 4 bytes for each parameter of the model, on every rank."""
        optimizer, flats, partitions = self.optimizer, [], []
        for group, params in enumerate(getattr(optimizer, self.PARAMETERS)):
            old = self._get(self.WEIGHTS, group)
            master = self._get(self.MASTERS, group).detach()
            flat = old.new_zeros(old.numel(), dtype=torch.float32)
            flats.append(flat)
            partitions.append(list(flat.split(master.numel())))
            mine = self._rank(group)
            widen(partitions[-1][mine], old.split(master.numel())[mine], master)
            for p in params:
                offset = p.data.storage_offset() - old.storage_offset()
                swap(stack, p, "data", flat.narrow(0, offset, p.numel()).view(p.shape))
        for p in self._frozen():
            swap(stack, p, "data", p.data.float())
        swap(stack, optimizer, self.WEIGHTS, flats)
        swap(stack, optimizer, self.PARTITIONS, partitions)
        self.publish()


class BF16Shards(FlatShards):
    """`BF16_Optimizer`, which accumulates whole gradients in fp32 on every rank."""

    PARAMETERS = "bf16_groups"
    WEIGHTS = "bf16_groups_flat"
    PARTITIONS = "bf16_partitioned_groups"
    MASTERS = "fp32_groups_flat_partition"
    NEEDED = (
        "fp32_groups_gradients_flat",
        "fp32_groups_gradient_flat_partition",
        "fp32_groups_has_gradients",
        "clear_hp_grads",
    )

    @property
    @override
    def accumulates(self) -> bool:
        return True

    @override
    def gradients(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        for piece in pieces:
            partition = self._get("fp32_groups_gradient_flat_partition", piece.group)
            yield partition.narrow(0, piece.offset, piece.numel)

    @override
    def clear_gradients(self) -> None:
        self.optimizer.clear_hp_grads()
        for params in self.optimizer.bf16_groups:
            for p in params:
                p.grad = None

    @override
    def abandon(self) -> None:
        self.clear_gradients()

    @override
    def stash(self) -> Callable[[], None]:
        optimizer, restore = self.optimizer, Shards.stash(self)
        flats = [flat.clone() for flat in optimizer.fp32_groups_gradients_flat]
        flags = [list(flags) for flags in optimizer.fp32_groups_has_gradients]
        parameters = [p for params in optimizer.bf16_groups for p in params]
        attached = [p.__dict__.get("_hp_grad") for p in parameters]
        optimizer.clear_hp_grads()

        def unstash() -> None:
            restore()
            for flat, kept in zip(optimizer.fp32_groups_gradients_flat, flats, strict=True):
                flat.copy_(kept)
            optimizer.fp32_groups_has_gradients[:] = flags
            for p, gradient in zip(parameters, attached, strict=True):
                if gradient is None:
                    p.__dict__.pop("_hp_grad", None)
                else:
                    p._hp_grad = gradient

        return unstash

    def _copy_to_fp32(self, stack: ExitStack) -> None:
        self._copy_flat_weights(stack)


def _with_offsets(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    offset = 0
    for tensor in tensors:
        yield offset, tensor.detach().reshape(-1)
        offset += tensor.numel()


def _cut(parts: Sequence[tuple[int, Tensor]], start: int, numel: int) -> Tensor:
    """Return `numel` elements from `start` on of the concatenated tensors; one holds them all."""
    for offset, tensor in parts:
        if offset <= start and start + numel <= offset + tensor.numel():
            return tensor.narrow(0, start - offset, numel)
    raise AssertionError(f"no gradient tensor holds elements {start} to {start + numel}")


def _stash_offloaded(optimizer: Private) -> Callable[[], None]:
    """Save the gradients and norms that optimizer offload has pending on the host."""
    masters = optimizer.single_partition_of_fp32_groups
    gradients = [None if m.grad is None else m.grad.clone() for m in masters]
    accumulated = {k: v.clone() for k, v in optimizer.accumulated_grads_in_cpu.items()}
    names = ("norm_for_param_grads", "local_overflow", "_offload_accumulated_param_ids")
    kept = [(n, copy.copy(getattr(optimizer, n))) for n in names if hasattr(optimizer, n)]

    def unstash() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            if gradient is not None:
                master.grad.copy_(gradient)
        for key, value in accumulated.items():
            optimizer.accumulated_grads_in_cpu[key].copy_(value)
        for name, value in kept:
            setattr(optimizer, name, value)

    return unstash
