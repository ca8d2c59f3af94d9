"""What runs on the ranks of test_exchange.py."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import nn

from ds_hessian.backends.objective import common_number
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import HessianError
from ds_hessian.planning import Needs, surely_fits
from ds_hessian.ranks import collective, gather_integers, union
from ds_hessian.ranks.collectives import COLLECTIVES
from ds_hessian.vectors import VectorSpace


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of collectives in the body."""
    calls: Counter[str] = Counter()
    kept = {
        name: vars(dist.ProcessGroup)[name]
        for name in COLLECTIVES
        if name in vars(dist.ProcessGroup)
    }

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in kept:
        setattr(dist.ProcessGroup, name, counting(name, getattr(dist.ProcessGroup, name)))
    try:
        yield calls
    finally:
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)


def united(sets: list[set[str]]) -> tuple[set[str], dict[str, int]]:
    """The union of one set of each rank, and the collectives that it took."""
    with counted() as calls:
        found = union(sets[dist.get_rank()])
    return found, dict(calls)


def integers(rows: list[list[int]]) -> list[list[int]]:
    """Every rank's integers."""
    found: list[list[int]] = gather_integers(rows[dist.get_rank()]).tolist()
    return found


class Named(nn.Module):
    """Parameters of these names and sizes, some of them frozen."""

    def __init__(self, sizes: dict[str, int], frozen: tuple[str, ...]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size), name not in frozen))


def attached(sizes: list[dict[str, int]], frozen: list[tuple[str, ...]]) -> str:
    """The error of a backend of a module of other parameters on each rank."""
    rank = dist.get_rank()
    try:
        with collective("attaching", "cpu"):
            ModuleBackend(Named(sizes[rank], frozen[rank]))
    except HessianError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def numbered(numbers: list[int]) -> str:
    """The number of micro-batches on which the ranks agree, or the error."""
    try:
        with collective("counting", "cpu"):
            return str(common_number(numbers[dist.get_rank()], VectorSpace(1)))
    except HessianError as error:
        return f"{type(error).__name__}: {error}"


class Sealed:
    """A thing that cannot be sent."""

    def __reduce__(self) -> Any:
        raise MemoryError("full")


def unsent(speaker: int) -> str:
    """The error of a union to which one rank cannot add what it has."""
    mine: set[object] = {"a", Sealed()} if dist.get_rank() == speaker else {"b"}
    try:
        with collective("asking", "cpu"):
            union(mine)
    except HessianError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fits(needs: list[list[Needs]]) -> list[bool]:
    """Whether the needs of this rank surely fit, in each of these cases; another job has left its
    number of ranks in the environment.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        return [surely_fits(each[rank], world, torch.device("cpu")) for each in needs]


def _clients() -> set[int]:
    """The descriptors of connections to the job's store."""
    port = int(os.environ["MASTER_PORT"])
    found = psutil.Process().net_connections("tcp")
    return {c.fd for c in found if c.raddr and c.raddr.port == port}


def _connections() -> int:
    return len(_clients())


def broken() -> tuple[int, int, str]:
    """New connections of this rank to the store in a measurement, and after that of the rank which
    watches has broken; and the error of a later measurement, in which rank 1 fails."""
    before = _clients()
    with suppress(HessianError), collective("trying", "cpu"):
        time.sleep(0.3)
        mine = _clients() - before
        for descriptor in mine:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
    after = _clients() - before - mine
    try:
        with collective("trying", "cpu"):
            time.sleep(0.3)
            if dist.get_rank() == 1:
                raise MemoryError("full")
            dist.all_reduce(torch.ones(1))
    except HessianError as error:
        return len(mine), len(after), str(error)
    return len(mine), len(after), "no error"


def clients(fails: bool) -> tuple[int, int, int]:
    """New connections of this rank to the store in a short call, and in and after long ones."""
    before, within = _connections(), 0
    with collective("trying", "cpu"):
        short = _connections() - before
    for _ in range(3):
        with collective("trying", "cpu"):
            time.sleep(0.3)
    try:
        with collective("trying", "cpu"):
            time.sleep(0.5)
            if fails and dist.get_rank() == 1:
                raise MemoryError("full")
            within = _connections() - before
            dist.all_reduce(torch.ones(1))
    except HessianError:
        pass
    dist.barrier()
    return short, within, _connections() - before
