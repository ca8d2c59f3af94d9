"""Descriptions of one rank's collectives, by which another takes part in its own groups.

A group of a part of the ranks can be followed where the job's groups are a mesh: the same on all
ranks of a pipeline's stage but for who is in them, as those of data-parallel and tensor-parallel
ranks. The k-th group that a rank is in, in the order of their creation, is then the k-th of all its
ranks, and does there what the k-th group of another rank does.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ds_hessian.ranks.agreement import LockstepError
from ds_hessian.ranks.entrance import Call, enter
from ds_hessian.ranks.exchange import Shared, balanced, imbalance

EXCHANGES = ("all_to_all_single", "alltoall_base")
"""Methods of `ProcessGroup` in which every rank says how much it sends to each of the others."""

ROOTED = ("gather", "scatter")
"""Methods of `ProcessGroup` in which one rank, the root, has a tensor for each of the others."""

COLLECTIVES = (
    *EXCHANGES,
    *ROOTED,
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Methods of `ProcessGroup`, by their names in all versions of torch, that all ranks of the group
call with tensors of the same shapes."""

TO_ONE = ("recv", "send")
"""Methods of `ProcessGroup` of two ranks, whose second argument is the number of the other."""

OTHERS = ("alltoall", "monitored_barrier", "recv_anysource", *TO_ONE)
"""Methods of `ProcessGroup` that are point-to-point, or of sizes that each rank alone knows."""

SHARED_MEMORY = "inference_all_reduce"
"""The collective of DeepSpeed's communication object that may go past the process groups."""


class _Blank(NamedTuple):
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool


class _Options(NamedTuple):
    """Options of a collective."""

    kind: str
    values: dict[str, object]


class _Group(NamedTuple):
    """A process group: its name, the same on all ranks, and its position among a rank's groups."""

    name: str
    position: int
    size: int


class Collective(NamedTuple):
    """One line of a log: a method, the process group that it was called on, and its arguments."""

    name: str
    group: _Group
    args: list[Any]
    kwargs: dict[str, object]

    def arguments(self, device: torch.device) -> tuple[list[object], dict[str, object]]:
        """Return arguments with which to take part in it, with zeros for tensors.

        Args:
            device: The device of the tensors that are not on the CPU.
        """
        return (
            [_made_up(a, device) for a in self.args],
            {k: _made_up(v, device) for k, v in self.kwargs.items()},
        )

    def own_group(self, meshed: bool, named: bool = False) -> dist.ProcessGroup:
        """Return this rank's group that corresponds to the collective's.

        Args:
            meshed: Whether the groups are a mesh, as `mesh_of` returns it.
            named: Whether it is the group of the same name, in which this rank is.

        Raises:
            LockstepError: there is none.
        """
        if named or self.group.size == dist.get_world_size():
            return next(g for g in _groups() if g.group_name == self.group.name)
        if not meshed:
            raise LockstepError(
                f"it is of a group of {self.group.size} ranks, and the job's groups are no mesh"
            )
        return _groups()[self.group.position]

    def of(self, group: dist.ProcessGroup) -> Collective:
        """Return the same collective of another group of the size."""
        return self._replace(group=self.group._replace(name=group.group_name))


class Kind(NamedTuple):
    """Collectives of which two ranks make equally many: a group, and who of it takes part."""

    group: str
    ranks: tuple[int, ...]


def groups_across(peers: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks of this rank's groups in which ranks of other stages are, by name.

    Args:
        peers: The ranks of its stage.
    """
    of = {group.group_name: dist.get_process_group_ranks(group) for group in _groups()}
    return {name: ranks for name, ranks in of.items() if not set(ranks) <= set(peers)}


def shared_kind(line: Collective, rank: int, shared: dict[str, list[int]]) -> Kind | None:
    """Return the kind of a collective that a rank has recorded; None where it is of another group.

    Args:
        line: The collective.
        rank: The rank that has recorded it.
        shared: `groups_across` of the rank that asks.
    """
    ranks = shared.get(line.group.name)
    if ranks is None:
        return None
    if line.name in TO_ONE:
        ranks = sorted([rank, ranks[line.args[1]]])
    return Kind(line.group.name, tuple(ranks))


def written_down(
    name: str, group: dist.ProcessGroup, args: Sequence[object], kwargs: dict[str, object]
) -> Collective:
    """Describe a call of a method of a process group for other ranks."""
    own = _Group(group.group_name, _groups().index(group), group.size())
    described = {k: _described(v) for k, v in kwargs.items()}
    return Collective(name, own, [_described(value) for value in args], described)


def exchanged(each: Sequence[Collective | None], number: int) -> Collective:
    """Return this rank's part in an exchange that the other ranks of the group have recorded.

    Args:
        each: The exchange as each rank of the group has recorded it; None for this rank, and for
            others that have failed: they and this one exchange nothing.
        number: The number of this rank in the group.
    """
    given = {j: line.args for j, line in enumerate(each) if line is not None}
    received, sent = (
        [_rows(given[j], of, len(each))[number] if j in given else 0 for j in range(len(each))]
        for of in (_INPUT, _OUTPUT)
    )
    leader = next(line for line in each if line is not None)
    blank, options = leader.args[_INPUT], leader.args[4:]
    tensors = [blank._replace(shape=(sum(n), *blank.shape[1:])) for n in (received, sent)]
    return leader._replace(args=[*tensors, received, sent, *options])


def with_root(line: Collective, number: int) -> Collective:
    """Return this rank's part in a gather or scatter that another rank of the group has recorded.

    Args:
        line: The collective as the other rank has recorded it.
        number: The number of this rank in the group.
    """
    one, each = (_INPUT, _OUTPUT) if line.name == "gather" else (_OUTPUT, _INPUT)
    args, options = list(line.args), [*line.args[_OPTIONS:], *line.kwargs.values()]
    (root,) = (o.values["rootRank"] for o in options if isinstance(o, _Options))
    args[each] = [args[one] * line.group.size] if number == root else []
    return line._replace(args=args)


_OUTPUT, _INPUT, _SPLITS = 0, 1, 2
_OPTIONS = 2


def _rows(args: list[Any], of: int, ranks: int) -> list[int]:
    """Return the number of rows that one rank exchanges with each."""
    return args[_SPLITS + of] or [args[of].shape[0] // ranks] * ranks


def mesh_of(peers: Sequence[int], device: torch.device, call: Call) -> tuple[bool, str]:
    """Return whether the groups of the ranks of each stage are a mesh, and a new name, the same on
    all ranks, which enter a call.

    In a mesh the k-th group of this rank is the k-th of all of its peers that are in it, and each
    of them is in a k-th group of the same size.

    Args:
        peers: The ranks of the same stage.
        device: The device of the tensors of the job's collectives.
        call: The call.

    Raises:
        CallsDiffer: other ranks make another call.
        MeasurementError: some rank has failed in the call around it.

    Collective: one all-reduce of 40 bytes, at which ranks meet.
    """
    groups = [dist.get_process_group_ranks(group) for group in _groups()]
    terms = imbalance(shared_of_mesh(dist.get_rank(), groups, peers))
    name = secrets.randbits(48) if dist.get_rank() == 0 else 0
    said = enter(call, terms, name, device)
    return balanced(said[:2]), f"{int(said[2]):012x}"


def shared_of_mesh(
    rank: int, groups: Sequence[Sequence[int]], peers: Sequence[int]
) -> list[Shared]:
    """Return what a rank shares with its peers if their groups are a mesh.

    Args:
        rank: The rank.
        groups: The ranks of each of its groups, in the order of creation.
        peers: The ranks of its stage.
    """
    stage, known = _digest(peers), frozenset(peers)
    sizes = tuple(len(group) for group in groups)
    shared = [Shared(("sizes", stage, sizes), len(peers), rank == peers[0])]
    for k, group in enumerate(groups):
        members = [r for r in group if r in known]
        shared.append(Shared((k, stage, _digest(group)), len(members), rank == members[0]))
    return shared


def _digest(ranks: Sequence[int]) -> str:
    numbers = np.asarray(ranks, dtype=np.int64).tobytes()
    return hashlib.blake2b(numbers, digest_size=16).hexdigest()


def _groups() -> list[dist.ProcessGroup]:
    """Return this rank's groups in the order of creation; torch has no public list."""
    return list(distributed_c10d._world.pg_map)


def _described(value: object) -> object:
    if isinstance(value, Tensor):
        return _Blank(value.shape, value.dtype, value.is_cpu)
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, np.ndarray):  # the sizes of what Megatron's experts exchange
        return value.tolist()
    if type(value).__name__.endswith("Options"):
        names = [name for name in dir(value) if not name.startswith("_")]
        values = {name: getattr(value, name) for name in names}
        return _Options(type(value).__name__, {k: v for k, v in values.items() if v is not None})
    return value


def _made_up(value: object, device: torch.device) -> object:
    """Return an argument with zeros for tensors."""
    if isinstance(value, _Blank):
        home = "cpu" if value.on_cpu else device
        return torch.zeros(value.shape, dtype=value.dtype, device=home)
    if isinstance(value, _Options):
        options = getattr(distributed_c10d, value.kind)()
        for name, setting in value.values.items():
            setattr(options, name, setting)
        return options
    if isinstance(value, list):
        return [_made_up(item, device) for item in value]
    return value
