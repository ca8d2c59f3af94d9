"""The coordinates of parameters that a rank stores, by checkpoint name and unsharded index.

They are read from the model's sharded state dict, which describes every layout that can be saved:
tensor, expert and pipeline parallelism, tied embeddings, gated layers. A coordinate counts on the
rank whose replica id is zero. Megatron's gradient clipping counts other ones: it skips biases of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_hessian.backends.megatron import buffers, host
from ds_hessian.backends.names import checkpoint_name
from ds_hessian.backends.weights import Weight
from ds_hessian.errors import UnsupportedError
from ds_hessian.ranks import union
from ds_hessian.vectors import Box, Fragment

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk


@dataclass(frozen=True)
class ParameterRun:
    """A contiguous run of a parameter that this rank displaces and whose gradient it has.

    Attributes:
        parameter: The parameter, as this rank's layers have it.
        offset: Index at which the run begins in the flattened parameter.
        shard: Index at which this rank's part, and so its master, begins there.
        fragment: The coordinates of the run in the unsharded model.
    """

    parameter: host.MegatronParameter
    offset: int
    shard: int
    fragment: Fragment

    def _view(self, flat: Tensor, offset: int) -> Tensor:
        return flat.detach().view(-1).narrow(0, offset, self.fragment.numel)

    @property
    def weight(self) -> Tensor:
        """A view of the weights."""
        return self._view(self.parameter.data, self.offset)

    @property
    def gradient(self) -> Tensor:
        """A view of the gradient buffer; reduced on this rank after `Reductions.make`."""
        return self._view(self.parameter.main_grad, self.offset)

    @property
    def master(self) -> Tensor | None:
        """A view of the optimizer's fp32 master weights; None where the weights are their own."""
        master = getattr(self.parameter, "main_param", None)
        return None if master is None else self.in_master(master)

    def in_master(self, master: Tensor) -> Tensor:
        """Return a view of the run in the master of this rank's part."""
        return self._view(master, self.offset - self.shard)


def runs_of(chunks: Sequence[Chunk]) -> list[ParameterRun]:
    """Return this rank's runs, in the order of its buffers.

    Raises:
        UnsupportedError: a trainable parameter is not in the sharded state dict.
    """
    return [run for chunk in chunks for run in _runs(chunk)]


def parameters_of(chunks: Sequence[Chunk], device: torch.device) -> list[tuple[str, torch.Size]]:
    """Return names and unsharded shapes of all parameters of the job, sorted.

    Collective: `ds_hessian.ranks.union`, to which each pipeline stage adds its own.

    Raises:
        UnsupportedError: ranks describe a parameter by different shapes.
    """
    mine: set[tuple[str, tuple[int, ...]]] = set()
    for chunk in chunks:
        tensors = _tensors(chunk)
        for parameter in buffers.buffered(chunk):
            for tensor in tensors.get(id(parameter), {}).values():
                mine.add((checkpoint_name(tensor.key), tuple(tensor.global_shape)))
    found = sorted(union(mine, device))
    for (name, shape), (other, another) in pairwise(found):
        if name == other:
            raise UnsupportedError(
                f"ds_hessian does not support the parameter {name!r}, whose whole shape is {shape} "
                f"on some ranks and {another} on others, by their model's sharded_state_dict; all "
                "ranks need the same model"
            )
    return [(name, torch.Size(shape)) for name, shape in found]


def _tensors(chunk: Chunk) -> dict[int, dict[int, host.ShardedTensor]]:
    """Return {id of a parameter: {offset in it: sharded tensor}}."""
    tensors: dict[int, dict[int, host.ShardedTensor]] = {}
    for parameter, offset, tensor in host.sharded_tensors(chunk):
        # A module that the model has under two names (T5's head) is in a checkpoint twice.
        tensors.setdefault(id(parameter), {}).setdefault(offset, tensor)
    return tensors


def _runs(chunk: Chunk) -> list[ParameterRun]:
    tensors = _tensors(chunk)
    names = {id(p): name for name, p in host.unwrap(chunk).named_parameters()}
    sharded = chunk.ddp_config.use_distributed_optimizer
    first_instance = not sharded or host.first_optimizer_instance(chunk)
    parts = _parts_by_their_layers(chunk)
    runs = []
    for parameter, first, last in buffers.shards(chunk):
        missing = last - first
        for offset, tensor in tensors.get(id(parameter), {}).items():
            low, high = max(first, offset), min(last, offset + tensor.data.numel())
            copied = host.is_replicated_over_tensor_ranks(parameter, tensor)
            split = id(parameter) in parts and copied
            if split or _are_other_experts(parameter, tensor):
                raise UnsupportedError(
                    f"ds_hessian does not support the parameter {names[id(parameter)]!r}, of which "
                    "other ranks have other parts, or other experts, while the model's "
                    "sharded_state_dict says that each has the whole, as of Megatron's layers "
                    "inside of a module without one: give that module one"
                )
            if low < high:
                owned = first_instance and _is_main_replica(tensor.replica_id, sharded)
                fragment = fragment_of(tensor, low - offset, high - low, owned)
                runs.append(ParameterRun(parameter, low, first, fragment))
                missing -= high - low
        if missing:
            raise UnsupportedError(
                f"ds_hessian does not support parameter {names[id(parameter)]!r}, of which "
                f"{missing} elements are not in the model's sharded_state_dict as plain blocks; "
                "give its module a sharded_state_dict that describes them"
            )
    return runs


def weights_of(chunk: Chunk) -> list[Weight]:
    """Return a chunk's weights of two dims, with the unsharded rows and columns of this rank; not
    those that a checkpoint has as several parameters (the projections of Mamba and of gated delta
    nets).
    """
    modules: dict[int, Any] = {
        id(m._parameters.get("weight")): m for m in host.unwrap(chunk).modules()
    }
    found: dict[int, tuple[str, Tensor, Tensor]] = {}
    for key, parts in _tensors(chunk).items():
        names = {tensor.key for tensor in parts.values()}
        stacked = any(tensor.prepend_axis_num for tensor in parts.values())
        if key not in modules or modules[key].weight.dim() != 2 or stacked or len(names) > 1:
            continue
        height, width = modules[key].weight.shape
        down, across = (torch.zeros(size, dtype=torch.int64) for size in (height, width))
        for offset, tensor in parts.items():
            (rows, columns), (top, left) = tensor.local_shape, tensor.global_offset
            first = offset // width
            down[first : first + rows] = torch.arange(top, top + rows)
            across[:columns] = torch.arange(left, left + columns)
        found[key] = names.pop(), down, across
    group, counts = host.tensor_group()
    return [
        Weight(name, modules[key], down, across, group, counts, _whole_master(modules[key].weight))
        for key, (name, down, across) in found.items()
    ]


def _whole_master(parameter: host.MegatronParameter) -> Tensor | None:
    """Return the fp32 master of a weight; None where the distributed optimizer has parts of it."""
    master = getattr(parameter, "main_param", None)
    return master if master is not None and master.shape == parameter.shape else None


def _parts_by_their_layers(chunk: Chunk) -> set[int]:
    """Return ids of the parameters of which their own layer says that tensor-parallel ranks have
    parts, whatever the modules around it say.
    """
    if host.mesh().get("TP", 1) == 1:
        return set()
    layers = [m for m in host.unwrap(chunk).modules() if hasattr(m, "sharded_state_dict")]
    return {
        id(parameter)
        for layer in layers
        if not layer._modules
        for parameter, _, tensor in host.sharded_tensors(layer)
        if not host.is_replicated_over_tensor_ranks(parameter, tensor)
    }


def _are_other_experts(parameter: host.MegatronParameter, tensor: host.ShardedTensor) -> bool:
    """Return whether a checkpoint has an expert's parameter as one of more copies than there are
    ranks with the same experts.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_data_parallel_world_size()
    number = tensor.replica_id if isinstance(tensor.replica_id, int) else tensor.replica_id[-1]
    return not getattr(parameter, "allreduce", True) and number >= ranks


def _is_main_replica(replica_id: int | tuple[int, ...], sharded: bool) -> bool:
    """Return whether this copy counts. The last number is the data-parallel rank, which numbers
    no replica where the distributed optimizer has split the parameter over these ranks.
    """
    numbers = (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)
    return not any(numbers[:-1] if sharded else numbers)


def fragment_of(tensor: host.ShardedTensor, start: int, numel: int, owned: bool) -> Fragment:
    """Return the fragment of the unsharded model that a run of a sharded tensor is."""
    block = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    box, whole = Box(tuple(tensor.global_offset), block), torch.Size(tensor.global_shape)
    return Fragment.in_block(checkpoint_name(tensor.key), start, numel, whole, box, owned)
