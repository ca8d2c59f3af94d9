"""Collectives as one rank describes them to another, which takes part in its own groups.

A group of a part of the ranks can be followed where the job's groups are a mesh: the same on all
ranks of a pipeline's stage but for who is in them, as those of data-parallel and tensor-parallel
ranks. The k-th group that a rank is in, in the order of their making, is then the k-th of all its
ranks, and does there what the k-th group of another rank does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ds_hessian.ranks import gather_objects

EXCHANGE = "all_to_all_single"
"""The collective in which every rank says how much it sends to each of the others."""

COLLECTIVES = (
    EXCHANGE,
    "_all_gather_base",
    "_reduce_scatter_base",
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "barrier",
    "broadcast",
    "inference_all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
# Point-to-point, or of sizes that are not the same on all ranks.
OTHERS = (
    "all_gather_object",
    "all_to_all",
    "batch_isend_irecv",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "recv",
    "scatter",
    "send",
)


class LockstepError(RuntimeError):
    """A failed rank could not follow the others, which wait for it. Raised on this rank alone, and
    so not a `HessianError`: the job cannot go on.
    """


class _Blank(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


class _Group(NamedTuple):
    """A process group: its name, which all its ranks have, and its place among those of a rank."""

    name: distributed_c10d.GroupName
    position: int
    size: int


class _Root(NamedTuple):
    """The root of a collective, by its number in the group."""

    number: int


class _Opaque(NamedTuple):
    """An argument that cannot be made up on another rank."""

    kind: str


class Collective(NamedTuple):
    """One line of a log."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    by_torch: bool  # by a function of torch.distributed, not by DeepSpeed's object

    def arguments(self, device: torch.device, meshed: bool) -> tuple[list[Any], dict[str, Any]]:
        """To take part in it in this rank's groups, with zeros for tensors.

        Args:
            device: Of the tensors that are not on the CPU.
            meshed: See `peers_of`.

        Raises:
            LockstepError: they cannot be made up.
        """
        self._require_mesh(meshed)
        args = [_make_up(a, device) for a in self.args]
        kwargs = {k: _make_up(v, device) for k, v in self.kwargs.items()}
        if "async_op" in kwargs:
            kwargs["async_op"] = False
        group = _group_of(args, kwargs)
        args = [dist.get_global_rank(group, a.number) if isinstance(a, _Root) else a for a in args]
        for key, value in kwargs.items():
            if isinstance(value, _Root):
                kwargs[key] = dist.get_global_rank(group, value.number)
        return args, kwargs

    def _require_mesh(self, meshed: bool) -> None:
        for part in (*self.args, *self.kwargs.values()):
            if isinstance(part, _Group) and part.size != dist.get_world_size() and not meshed:
                raise LockstepError(
                    f"it is of a group of {part.size} ranks, and the job's groups are no mesh"
                )

    def ranks(self, meshed: bool) -> list[int]:
        """Of this rank's group that corresponds to the collective's.

        Raises:
            LockstepError: there is none.
        """
        self._require_mesh(meshed)
        every = [_make_up(p, torch.device("meta")) for p in (*self.args, *self.kwargs.values())]
        return dist.get_process_group_ranks(_group_of(every, {}))


def exchanged(each: Sequence[Collective | None], number: int) -> Collective:
    """This rank's part in an exchange that the other ranks of the group have written down.

    Args:
        each: Of the ranks of the group; None for this one, and for those that take no part of
            their own either: they and this one exchange nothing.
        number: Of this rank in the group.
    """
    given = {
        j: _EXCHANGE.bind(*line.args, **line.kwargs).arguments
        for j, line in enumerate(each)
        if line is not None
    }
    received, sent = (
        [_rows(given[j], of, len(each))[number] if j in given else 0 for j in range(len(each))]
        for of in ("input", "output")
    )
    written, leader = next((line, given[j]) for j, line in enumerate(each) if line is not None)
    blank, group = leader["input"], leader.get("group")
    tensors = [blank._replace(shape=(sum(n), *blank.shape[1:])) for n in (received, sent)]
    sizes = {"output_split_sizes": received, "input_split_sizes": sent}
    return written._replace(args=tensors, kwargs={**sizes, "group": group})


_EXCHANGE = inspect.signature(dist.all_to_all_single)


def _rows(given: dict[str, Any], of: str, ranks: int) -> list[int]:
    """What one rank exchanges with each."""
    rows = given.get(f"{of}_split_sizes")
    return rows if rows else [given[of].shape[0] // ranks] * ranks


_ROOTS = {"broadcast": "src", "reduce": "dst"}
_PLAIN = (bool, int, str, Enum, dist.ReduceOp.RedOpType)


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Blank(value.shape, value.dtype, value.is_cpu)
    if isinstance(value, dist.ProcessGroup):
        return _Group(value.group_name, _groups().index(value), value.size())
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    return _Opaque(type(value).__name__)


def _groups() -> list[dist.ProcessGroup]:
    """Those that this rank is in, in the order in which they were made."""
    return list(distributed_c10d._world.pg_map)


def _group_of(args: Iterable[Any], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    every = [*args, *kwargs.values()]
    world = distributed_c10d._get_default_group()
    return next((value for value in every if isinstance(value, dist.ProcessGroup)), world)


def written_down(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], by_torch: bool
) -> Collective:
    """A call of a collective, for other ranks."""
    listed, named = [_describe(a) for a in args], {k: _describe(v) for k, v in kwargs.items()}
    root, group = _ROOTS.get(name, ""), _group_of(args, kwargs)
    if isinstance(named.get(root), int):
        named[root] = _Root(dist.get_group_rank(group, named[root]))
    elif root and len(listed) > 1:
        listed[1] = _Root(dist.get_group_rank(group, listed[1]))
    return Collective(name, listed, named, by_torch)


def peers_of(stage: int) -> tuple[list[int], bool]:
    """The ranks of the same stage, and whether their groups are a mesh: the k-th group of this rank
    is the k-th of all of them that are in it, and each of them is in a k-th group of the same size.

    Collective.
    """
    mine = [tuple(dist.get_process_group_ranks(group)) for group in _groups()]
    every = gather_objects((stage, [(len(ranks), hash(ranks)) for ranks in mine]))
    peers = [rank for rank, (other, _) in enumerate(every) if other == stage]
    groups = {rank: every[rank][1] for rank in peers}
    good = len({tuple(size for size, _ in each) for each in groups.values()}) == 1 and all(
        groups[rank][k] == (len(ranks), hash(ranks))
        for k, ranks in enumerate(mine)
        for rank in ranks
        if rank in groups
    )
    return peers, all(gather_objects(good))


def _make_up(value: Any, device: torch.device) -> Any:
    """An argument with zeros for tensors.

    Raises:
        LockstepError: it is of a kind, or of a group, that cannot be followed.
    """
    if isinstance(value, _Blank):
        place = "cpu" if value.on_cpu else device
        return torch.zeros(value.shape, dtype=value.dtype, device=place)
    if isinstance(value, _Group):
        if value.size == dist.get_world_size():
            return distributed_c10d._resolve_process_group(value.name)
        return _groups()[value.position]
    if isinstance(value, list):
        return [_make_up(item, device) for item in value]
    if isinstance(value, _Opaque):
        raise LockstepError(f"one of its arguments is a {value.kind}")
    return value
