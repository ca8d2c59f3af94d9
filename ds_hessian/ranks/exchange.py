"""What ranks tell each other beside sums, at a cost that does not grow with their number.

A job has thousands of ranks and few distinct facts: the parameters of each pipeline stage, the
message of the one rank that failed. So a fact is told by the lowest rank that has it (`first_of`,
`from_rank`, `union`), and what all ranks should have alike is compared by hashes (`imbalance`).

Cost: an all-reduce of 8 or 16 bytes for each question, and a broadcast for each fact that is told.
The two functions that gather are linear in the number of ranks, and say so.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

MODULUS = 2**32 - 5
"""The largest prime below 2^32: so sums of fewer than 2^21 ranks' remainders are exact in fp64."""


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def first_of(flag: bool, device: torch.device | str = "cpu") -> int | None:
    """Return the lowest rank whose flag is set, the same on every rank; None if there is none.

    Args:
        flag: This rank's flag.
        device: The device of the tensors of the job's collectives.

    Collective: one all-reduce of 8 bytes.
    """
    if _alone():
        return 0 if flag else None
    # The largest, so that zeros of a rank that follows after a failure are no answer.
    ranks = dist.get_world_size()
    place = torch.tensor([(ranks - dist.get_rank()) * flag], dtype=torch.int64, device=device)
    dist.all_reduce(place, op=dist.ReduceOp.MAX)
    return ranks - int(place) if int(place) else None


def from_rank(value: T, rank: int = 0, device: torch.device | str = "cpu") -> T:
    """Return that rank's (small) value on every rank.

    Collective: two broadcasts.
    """
    if _alone():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=rank, device=torch.device(device))
    return values[0]


def union(mine: AbstractSet[T], device: torch.device | str = "cpu") -> set[T]:
    """Return the union of every rank's set, the same on all of them; each element is sent once.

    Collective: one all-reduce and two broadcasts for each rank that adds to what lower ranks have
    (a pipeline stage, say), and one all-reduce more.
    """
    known: set[T] = set()
    while (speaker := first_of(not mine <= known, device)) is not None:
        known |= from_rank(mine - known, speaker, device)
    return known


class Shared(NamedTuple):
    """A thing that several ranks should have alike.

    Attributes:
        thing: The thing; its `repr` is compared.
        ranks: The number of ranks that should have it.
        first: Whether this rank is the first of them.
    """

    thing: object
    ranks: int
    first: bool


def imbalance(mine: Iterable[Shared]) -> Tensor:
    """Return this rank's terms, `(2,)` fp64, of sums that are 0 modulo `MODULUS` where every thing
    that some rank has is had by all the ranks that should have it.

    The first of the ranks adds the hash of the thing once for each, and each subtracts it once.
    Otherwise the sums are 0 with probability 2^-64.
    """
    total = [0, 0]
    for thing, ranks, first in mine:
        digest = hashlib.blake2b(repr(thing).encode(), digest_size=16).digest()
        for i in range(2):
            number = int.from_bytes(digest[8 * i : 8 * i + 8], "little")
            total[i] += (ranks * first - 1) * number
    return torch.tensor([t % MODULUS for t in total], dtype=torch.float64)


def balanced(sums: Tensor) -> bool:
    """Return whether the sums of all ranks' `imbalance` are 0 modulo `MODULUS`."""
    return not bool((sums.to(torch.int64) % MODULUS).any())


def largest(figures: Tensor) -> Tensor:
    """Return the largest of every rank's fp64 figures `(k,)`, on the CPU.

    Args:
        figures: This rank's, on the device of the job's collectives; overwritten.

    Collective: one all-reduce.
    """
    if not _alone():
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return figures.cpu()


def ranks_of_node() -> int | None:
    """Return how many ranks this node has, as torchrun or DeepSpeed's launcher say; None where
    neither says a number.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    return int(said) if said.isdecimal() else None


_most_on_a_node: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def most_on_a_node() -> int | None:
    """Return how many ranks the node with the most has; None before `count_on_nodes`."""
    return 1 if _alone() else _most_on_a_node.get(_world())


def count_on_nodes(device: torch.device | str = "cpu") -> int:
    """Count the ranks with the same host name, once for a job, and return the largest number.

    Launchers say it too, in the environment, where it can be left from another job.

    Args:
        device: The device of the tensors of the job's collectives.

    Collective: one all-gather of 8 bytes from each rank.
    """
    name = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    hosts = gather_integers([int.from_bytes(name, "little", signed=True)], device)
    most = int(hosts.unique(return_counts=True)[1].max())
    if not _alone():
        _most_on_a_node[_world()] = most
    return most


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the list of every rank's (small) value, by rank, the same on all of them.

    Its cost is linear in the number of ranks, with some 30 microseconds for each: it is for reports
    of failures.

    Collective: every rank of the group.
    """
    if _alone():
        return [value]
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def gather_integers(mine: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return every rank's 64-bit integers, `(ranks, len(mine))` int64, on the CPU.

    Its cost is linear in the number of ranks: 8 bytes for each integer of each.

    Collective: one all-gather.
    """
    own = torch.tensor(mine, dtype=torch.int64, device=device)
    if _alone():
        return own.cpu().view(1, -1)
    found = own.new_empty(dist.get_world_size(), len(own))
    dist.all_gather(list(found), own)  # into its rows
    return found.cpu()


def device_of_collectives() -> torch.device:
    """Return the device of the tensors of collectives that torch.distributed is set up for."""
    on_host = not dist.is_initialized() or dist.get_backend() == "gloo"
    if on_host or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
