"""One rank of a node looks on the store, whichever ranks of the node are left, and all learn of it.

The nodes here are ranks of one machine in one process: each has a store of its own, so that what
one of them sees is on its own store, or told by another.
"""

from __future__ import annotations

import os
import resource
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from ds_hessian.ranks.watch import ASKED, TICK, Node, Watch

NAME = "measurement"


@pytest.fixture
def job() -> str:
    """A name that no other process of this machine has."""
    return secrets.token_hex(6)


def rank_of(job: str, *asked: str) -> Node:
    """A rank whose store says that these measurements are asked for."""
    store = dist.HashStore()
    for name in asked:
        dist.PrefixStore(f"ds_hessian/measurement {name}", store).set(ASKED, "")
    return Node(job, store, 2)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """A process that can open nothing more."""
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)


def test_the_ranks_of_a_node_learn_from_the_one_that_looks(job: str) -> None:
    first, second = rank_of(job, NAME), rank_of(job)
    assert not Watch(first, "another").asked()  # it looks, from now on
    assert not Watch(second, NAME).asked()
    assert Watch(first, NAME).asked()
    assert (
        Watch(second, NAME).asked() and Watch(rank_of(job), NAME).asked()
    )  # also one that is late
    assert not Watch(second, "another").asked() and not Watch(rank_of(job + "2"), NAME).asked()


class Counted(dist.HashStore):
    """A store that counts its clients."""

    clients = 0

    def clone(self) -> dist.Store:
        """Itself, once more."""
        self.clients += 1
        return self


def test_one_rank_of_a_node_has_a_client_while_nothing_is_asked(job: str) -> None:
    stores = [Counted() for _ in range(3)]
    nodes = [Node(job, store, 3) for store in stores]
    for number in range(3):
        assert not any(Watch(node, f"number {number}").asked() for node in nodes)
    assert [store.clients for store in stores] == [1, 0, 0]
    del nodes[0]
    assert not any(Watch(node, NAME).asked() for node in nodes)
    assert [store.clients for store in stores] == [1, 1, 0]


def test_a_rank_takes_over_from_one_that_has_ended(job: str) -> None:
    first, second = rank_of(job), rank_of(job, NAME)
    watch = Watch(second, NAME)
    assert not Watch(first, NAME).asked() and not watch.asked()
    del first  # with its sockets, as a process that ends
    assert watch.asked()


def test_a_rank_that_cannot_look_any_more_lets_the_others_look(job: str) -> None:
    first, second = rank_of(job), rank_of(job)
    lost, watch = Watch(first, NAME), Watch(second, NAME)
    assert not lost.asked() and not watch.asked()
    lost.lost()
    assert watch.asked()


def test_a_measurement_that_has_ended_leaves_no_name(job: str) -> None:
    first, second = rank_of(job, NAME), rank_of(job)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(4):
        watch = Watch(first, NAME)
        assert watch.asked() and Watch(second, NAME).asked()
        watch.close()
        assert not Watch(second, NAME).asked(), number
        assert len(os.listdir("/proc/self/fd")) == before + 1  # the name of the one that looks
    del first, watch
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_that_can_open_nothing_look_for_themselves(job: str) -> None:
    first, second = rank_of(job), rank_of(job, NAME)
    assert not Watch(first, NAME).asked()
    assert not Watch(second, NAME).asked()  # the first one looks
    with no_descriptors():
        assert not Watch(second, "another").asked()
        assert Watch(second, NAME).asked()


def test_looks_are_apart(job: str) -> None:
    """On 4000 nodes of a rank each, every rank looks once in 4 s: 1000 times a second together."""
    store = dist.HashStore()
    watch = Watch(Node(job, store, 4000), NAME)
    assert not watch.asked()
    dist.PrefixStore(f"ds_hessian/measurement {NAME}", store).set(ASKED, "")
    time.sleep(TICK)
    assert not watch.asked() and watch.pause == TICK


def test_a_store_that_is_gone_is_not_waited_for(job: str) -> None:
    """A new client tried to connect to it until the job's timeout, in vain."""
    timeout = timedelta(seconds=15)
    server = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
    own = dist.TCPStore("127.0.0.1", server.port, 2, False, timeout, wait_for_workers=False)
    node = Node(job, own, 2)
    assert node.client("one") is not None
    del server
    begun = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        node.client("another")
    assert time.monotonic() - begun < 5
