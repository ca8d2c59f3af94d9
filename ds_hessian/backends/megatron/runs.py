"""Which coordinates of which parameter a rank stores, by checkpoint name and unsharded index.

Read off the model's sharded state dict, which knows every layout that can be saved: tensor, expert
and pipeline parallelism, tied embeddings, gated layers. A coordinate counts on the rank whose
replica id is zero. What Megatron's gradient clipping counts is not the same: it skips biases of
experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hessian.backends.megatron import host
from ds_hessian.errors import UnsupportedError
from ds_hessian.vectors import Box, Fragment


@dataclass(frozen=True)
class ParameterRun:
    """A contiguous run of a parameter that this rank displaces and whose gradient it has.

    Attributes:
        parameter: The parameter, as this rank's layers have it.
        offset: Where the run begins in the flattened parameter.
        shard: Where this rank's part of the flattened parameter begins: the masters' first element.
        fragment: What the run is in the unsharded model.
    """

    parameter: Any
    offset: int
    shard: int
    fragment: Fragment

    def _view(self, flat: Tensor, offset: int) -> Tensor:
        return flat.detach().view(-1).narrow(0, offset, self.fragment.numel)

    @property
    def weight(self) -> Tensor:
        """View of the weights."""
        return self._view(self.parameter.data, self.offset)

    @property
    def gradient(self) -> Tensor:
        """View of the gradient buffer; reduced on this rank after `host.reduce_gradients`."""
        return self._view(self.parameter.main_grad, self.offset)

    @property
    def master(self) -> Tensor | None:
        """View of the optimizer's fp32 master weights; None where the weights are their own."""
        master = getattr(self.parameter, "main_param", None)
        return None if master is None else self._view(master, self.offset - self.shard)


def runs_of(chunks: Sequence[Any]) -> list[ParameterRun]:
    """This rank's runs, in the order of its buffers.

    Raises:
        UnsupportedError: a trainable parameter is not in the sharded state dict.
    """
    return [run for chunk in chunks for run in _runs(chunk)]


def _runs(chunk: Any) -> list[ParameterRun]:
    tensors: dict[int, list[tuple[int, Any]]] = {}
    for parameter, offset, tensor in host.sharded_tensors(chunk):
        tensors.setdefault(id(parameter), []).append((offset, tensor))
    names = {id(p): name for name, p in host.unwrap(chunk).named_parameters()}
    sharded = chunk.ddp_config.use_distributed_optimizer
    first_instance = not sharded or host.first_optimizer_instance(chunk)
    runs = []
    for parameter, first, last in host.shards(chunk):
        missing = last - first
        for offset, tensor in tensors.get(id(parameter), []):
            low, high = max(first, offset), min(last, offset + tensor.data.numel())
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


def _is_main_replica(replica_id: Any, sharded: bool) -> bool:
    """Whether this copy counts. Its last number is the data-parallel rank, which is no replica
    where the distributed optimizer has cut the parameter over these ranks.
    """
    numbers = (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)
    return not any(numbers[:-1] if sharded else numbers)


def fragment_of(tensor: Any, start: int, numel: int, owned: bool) -> Fragment:
    """A run of a sharded tensor, as what it is in the unsharded model."""
    block = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)
    box, whole = Box(tuple(tensor.global_offset), block), torch.Size(tensor.global_shape)
    return Fragment.in_block(tensor.key, start, numel, whole, box, owned)
