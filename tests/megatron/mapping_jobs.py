"""What runs on the ranks of test_mapping.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hessian.backends.megatron import MegatronBackend, host
from ds_hessian.backends.megatron.replicas import refuse_uneven_copies
from ds_hessian.errors import HessianError
from ds_hessian.ranks import gather_objects
from tests.megatron import job
from tests.megatron.job import Job


def positions(chunk: Any) -> list[tuple[int, int, tuple[int, ...]]]:
    """(place in the model, offset, shape) of sharded tensors, found by numbering the elements."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model, found = host.unwrap(chunk), []
    place = {id(p): i for i, p in enumerate(model.parameters())}
    metadata = {"non_homogeneous_layers": True, "dp_cp_group": group}
    for entry in model.sharded_state_dict(metadata=metadata).values():
        number = place.get(id(getattr(entry, "data", None)))
        if number is None:
            continue
        parts = [entry]
        if isinstance(entry, ShardedTensorFactory):
            entry.data = torch.arange(entry.data.numel()).view(entry.data.shape)
            parts = entry.build()
        for part in parts:
            where = part.data.reshape(-1)
            if part is entry:
                found.append((number, 0, tuple(part.local_shape)))
            elif torch.equal(where, where[0] + torch.arange(len(where))):
                found.append((number, int(where[0]), tuple(part.local_shape)))
    return found


class Largest(TorchDispatchMode):
    """The largest tensor with memory that the body makes, in bytes, beside pickled messages."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made in found if isinstance(found, (list, tuple)) else [found]:
            if (
                isinstance(made, torch.Tensor)
                and made.device.type != "meta"
                and made.dtype != torch.uint8
            ):
                self.size = max(self.size, made.nbytes)
        return found


def mapped(layout: Job) -> tuple[bool, bool, int]:
    """Whether offsets are those of numbered elements, and parameters those of all fragments; and
    the largest tensor that mapping has made."""
    with job.running(layout) as chunks:
        same = True
        for chunk in chunks:
            place = {id(p): i for i, p in enumerate(host.unwrap(chunk).parameters())}
            found = [
                (place[id(p)], offset, tuple(tensor.local_shape))
                for p, offset, tensor in host.sharded_tensors(chunk)
            ]
            same &= found == positions(chunk) and len(found) > 0
        with Largest() as largest:
            backend = MegatronBackend(chunks)
        mine = {(f.name, tuple(f.shape)) for f in backend.layout.fragments}
        every = sorted(set().union(*gather_objects(mine)))
        whole = [(name, tuple(shape)) for name, shape in backend.parameters] == every
    return same, whole, largest.size


CHANGES: dict[str, Callable[[int, Any], None]] = {
    "nothing": lambda rank, model: None,
    "a stage frozen": lambda rank, model: _freeze(model) if rank == 1 else None,
    "a layer frozen on one rank": lambda rank, model: (
        _freeze(model.decoder.layers[0]) if rank == 1 else None
    ),
    "a name": lambda rank, model: _rename(model) if rank == 1 else None,
    "a shape": lambda rank, model: _reshape(model) if rank == 1 else None,
}


def _freeze(module: Any) -> None:
    module.requires_grad_(False)


def _rename(model: Any) -> None:
    inner = model.sharded_state_dict

    def renamed(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        for entry in found.values():
            if str(getattr(entry, "key", "")).endswith("final_layernorm.weight"):
                entry.key = "decoder.other.weight"
        return found

    model.sharded_state_dict = renamed


def _reshape(model: Any) -> None:
    inner = model.sharded_state_dict

    def reshaped(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        for entry in found.values():
            if str(getattr(entry, "key", "")).endswith("final_layernorm.weight"):
                entry.global_shape = (99,)
        return found

    model.sharded_state_dict = reshaped


def differing(layout: Job, change: str) -> tuple[str, list[str]]:
    """The error of mapping and comparing models that differ on rank 1, and all names."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with job.groups_of(layout):
        config = job.model_config(layout)
        model = job.gpt(layout, config)
        CHANGES[change](dist.get_rank(), model)
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=layout.distributed)
        chunks = [DistributedDataParallel(config, ddp, model)]
        names: list[str] = []
        try:
            backend = MegatronBackend(chunks)
            names = [name for name, _ in backend.parameters]
            refuse_uneven_copies(chunks, backend.runs, backend.parameters, backend.space)
        except HessianError as error:
            return f"{type(error).__name__}: {error}", names
        return "no error", names
