"""Whether a rank has failed and asks for the logs of others: one watch of the store on each node.

While nothing fails, one rank of each node looks for `ASKED` on the job's TCP store, now and then:
the one that has bound a name of the job among the node's abstract Unix sockets. The name is free
again when its process ends, and then another rank binds it. When a rank has asked, or the one that
looks cannot do so any more, it binds a name of the measurement, which the others of its node see,
and from then on each of them looks on the store itself. Nothing is sent, so nothing can be lost,
and a rank that comes late sees it too. Ranks that do not see each other's names (containers,
systems without them, no descriptor left) each look for themselves.

Clients of the store are made when they are needed: none in calls shorter than `TICK`, one on each
node in a measurement, and up to two on each rank once a rank has failed. They are kept as long as
the job: torch looks up the name of the other end of each connection, and where no name server
answers, that takes seconds.
"""

from __future__ import annotations

import errno
import socket
import time
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ds_hessian.ranks.exchange import ranks_of_node

TICK = 0.1
"""Seconds between looks at what may ask, on a rank that makes no progress."""

REQUESTS = 1000.0
"""The most checks of the store per second by all ranks together; larger jobs check less often."""

ASKED = "asked"
"""The key of the measurement that a rank which needs logs sets."""

FIRST = "first"
"""The name that the rank which looks for its node has bound."""

WATCHING = "watching"
"""The client of the threads that watch."""


class Node:
    """This rank among the ranks of its node, as long as the job.

    Args:
        job: A name of the job, the same on all ranks and secret.
        store: The job's store.
        ranks: The number of ranks of the job.
    """

    def __init__(self, job: str, store: dist.Store, ranks: int) -> None:
        self._job, self._store, self.ranks = job, store, ranks
        self._names: dict[str, socket.socket] = {}
        self._clients: dict[str, dist.Store] = {}

    def __del__(self) -> None:
        for name in list(self._names):
            self.leave(name)

    @property
    def own(self) -> dist.Store:
        """The job's own client of the store."""
        return self._store

    @property
    def looking(self) -> float:
        """The number of ranks that look on the store while none has asked."""
        each = ranks_of_node() if FIRST in self._names else 1
        return self.ranks / (each or 1)

    def client(self, thread: str) -> dist.Store:
        """Return the client of a thread: of its own, if the store supports it (torch 2.6), since a
        request waits while another of the same client is under way.

        Raises:
            DistNetworkError: the store is gone, as its process has ended.
        """
        if thread not in self._clients:
            self._store.check([FIRST])  # a new client would try to connect until the job's timeout
            self._clients[thread] = getattr(self._store, "clone", lambda: self._store)()
        return self._clients[thread]

    def drop(self, thread: str) -> None:
        """Forget the client of a thread, whose connection is lost: the next one is made anew."""
        self._clients.pop(thread, None)

    def take(self, name: str) -> bool:
        """Bind a name; return whether no other rank of the node has it, as far as is known."""
        if name not in self._names:
            try:
                self._names[name] = _bound(self._address(name))
            except OSError as error:
                return error.errno != errno.EADDRINUSE
        return True

    def taken(self, name: str) -> bool:
        """Return whether some rank of the node has bound a name; also where that is not known."""
        try:
            with _socket() as looking:
                looking.connect(self._address(name))
        except OSError as error:
            return error.errno != errno.ECONNREFUSED
        return True

    def leave(self, name: str) -> None:
        """Give a name back, if this rank has bound it."""
        if name in self._names:
            self._names.pop(name).close()

    def _address(self, name: str) -> str:
        return f"\0ds_hessian/{self._job}/{name}"


_nodes: WeakKeyDictionary[dist.ProcessGroup, Node] = WeakKeyDictionary()


def node_of(name: str) -> Node:
    """Return this rank's node.

    Args:
        name: The name of the measurement; the first of a job names the job.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _nodes:
        _nodes[world] = Node(name, world.get_group_store(), world.size())
    return _nodes[world]


class Watch:
    """A watch for ranks that ask in one measurement.

    Args:
        node: This rank's node.
        name: The name of the measurement.
    """

    def __init__(self, node: Node, name: str) -> None:
        self._node, self._name = node, name
        self._asked, self._next = False, time.monotonic()

    def store(self, thread: str = WATCHING) -> dist.Store:
        """Return the measurement's part of the store, for one thread."""
        return dist.PrefixStore(f"ds_hessian/measurement {self._name}", self._node.client(thread))

    def shared_store(self) -> dist.Store:
        """Return the measurement's part of the store by the job's own client, for few requests."""
        return dist.PrefixStore(f"ds_hessian/measurement {self._name}", self._node.own)

    @property
    def pause(self) -> float:
        """Seconds to wait before the next `asked()`."""
        return max(TICK, self._node.ranks / REQUESTS) if self._asked else TICK

    def asked(self) -> bool:
        """Return whether some rank needs the logs of others."""
        if not self._asked:
            looks = self._node.take(FIRST)
            self._asked = self._look() if looks else self._node.taken(self._name)
            if self._asked:
                self._node.take(self._name)
        return self._asked

    def lost(self) -> None:
        """Let each rank of the node look for itself: this one cannot, or has left alone."""
        self._node.drop(WATCHING)
        self._node.take(self._name)

    def close(self) -> None:
        """End the watch, once no rank asks any more."""
        self._node.leave(self._name)

    def _look(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + max(TICK / 2, self._node.looking / REQUESTS)
        return self.store().check([ASKED])


def _socket() -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise OSError(errno.EAFNOSUPPORT, "no Unix sockets")
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _bound(address: str) -> socket.socket:
    found = _socket()
    try:
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found
