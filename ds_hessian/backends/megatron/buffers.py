"""The buffers of Megatron's DDP: gradients are reduced and weights gathered by their buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel as Chunk


def shards(chunk: Chunk) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Yield `(parameter, first, last)`: this rank's part of each flattened trainable parameter.

    It is all of it, or with the distributed optimizer the content of the rank's buckets. A
    parameter that was frozen after the wrapping has a place there, but no gradient.
    `bucket.param_to_index` ignores padding up to 0.16; `param_index_map` is right in all versions.
    """
    for buffer, bucket in buckets(chunk):
        first, last = 0, bucket.grad_data.numel()
        if chunk.ddp_config.use_distributed_optimizer:
            size = last // buffer.data_parallel_world_size
            first = buffer.data_parallel_group.rank() * size
            last = first + size
        for parameter, start, stop in places(buffer, bucket):
            low, high = max(start, first), min(stop, last)
            if parameter.requires_grad and low < high:
                yield parameter, low - start, high - start


def buckets(chunk: Chunk) -> Iterator[tuple[Any, Any]]:
    """Yield `(buffer, bucket)` of a chunk's gradients, Megatron's own, those of experts last."""
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        for bucket in buffer.buckets:
            yield buffer, bucket


def bucket_groups(chunk: Chunk) -> list[Any]:
    """Return Megatron's groups of buckets, each of one collective, those of experts last."""
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


def places(buffer: Any, bucket: Any) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Yield `(parameter, first, last)`: the place of each parameter in a bucket."""
    for parameter in bucket.params_list:
        start, stop = buffer.param_index_map[parameter][:2]
        yield parameter, start - bucket.offset, stop - bucket.offset


def buffered(chunk: Chunk) -> Iterator[nn.Parameter]:
    """Yield the parameters that the chunk trains, on whichever ranks its shards of them are."""
    for _, bucket in buckets(chunk):
        yield from (p for p in bucket.params_list if p.requires_grad)


def offloaded(chunk: Chunk) -> bool:
    """Return whether memory of the buffers was freed (`offload_grad_buffers` of 0.16), to which
    their tensors still point.
    """
    held = [whole for b in chunk.buffers + chunk.expert_parallel_buffers for whole in _wholes(b)]
    return any(whole.numel() and not whole.untyped_storage().nbytes() for whole in held)


def _wholes(buffer: Any) -> list[Tensor]:
    return [whole for whole in (buffer.grad_data, buffer.param_data) if whole is not None]


def held_by(chunk: Chunk) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients and weights are where the buffers have them."""
    for buffer, bucket in buckets(chunk):
        for parameter, start, _ in places(buffer, bucket):
            known: Any = parameter
            pairs = [(known.main_grad, bucket.grad_data), (known.data, bucket.param_data)]
            if all(_begins_at(view, whole, start) for view, whole in pairs):
                yield parameter


def _begins_at(view: Tensor, whole: Tensor | None, start: int) -> bool:
    """Return whether a tensor begins at an element of another; True for another that is None."""
    return whole is None or view.data_ptr() == whole.data_ptr() + start * whole.element_size()
