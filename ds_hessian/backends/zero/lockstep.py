"""Keeping ranks together when one of them fails between the collectives of a model.

ZeRO gathers parameters and reduces gradients inside the model's forward and backward, and tensor
parallelism reduces activations there. A rank that leaves them with an exception would keep the
others waiting in the next collective. All ranks make the same sequence of collectives in a pass,
each in its own groups, whose sizes do not depend on data; so a rank that fails takes part in those
that it has not made yet, with zeros, until the others have ended the pass. Then all ranks meet in
`agree`, where all of them raise.

What the failed rank has to make it learns from a rank that has got farther. In a pass DeepSpeed's
communication object (`deepspeed.comm.comm.cdb`) is replaced by one that writes down every
collective and hands it on; functions of `torch.distributed` are replaced likewise. A thread on
each rank looks, when the pass makes no progress, whether somebody asks for this log; if so, it
publishes the log on the job's TCP store and keeps it up to date. Keys, below a prefix for the
measurement:

    <pass>/<rank>/wanted    somebody needs this rank's log
    <pass>/<rank>/<k>       the k-th collective of the rank's log
    <pass>/<rank>/end       (length of the log, whether the rank finished the pass)

A failed rank reads the logs of the others in the order of ranks, up to the first that finished the
pass: all that finish make the same collectives. If none does, it has seen the longest log.

Cost while nothing fails: a few microseconds per collective, and on a rank that waits or computes
longer than `TICK` one request to the store per `TICK`, at most `REQUESTS` per second in the job.
After a failure: a millisecond or two per collective, and O(ranks) requests from each failed rank.

Not seen, and therefore not followed, are functions of `torch.distributed` that a module has taken
under a name of its own before (`from torch.distributed import all_reduce`). Not followed, but
refused with a message, are groups that form no mesh (see `collectives`), and operations other than
`COLLECTIVES`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hessian.backends.state import swap
from ds_hessian.backends.zero.collectives import (
    COLLECTIVES,
    OTHERS,
    Collective,
    LockstepError,
    is_mesh,
    written_down,
)
from ds_hessian.vectors import agree, together

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between looks at the store on a rank that makes no progress."""

REQUESTS = 1000.0
"""Of these looks, as many per second from all ranks together; larger jobs look less often."""

PATIENCE = 600.0
"""Seconds that a failed rank waits for news of another: NCCL's own timeout."""


class _Pass:
    """The collectives of one rank in one pass.

    Attributes:
        log: Those that it began.
        made: How many of them did not raise.
        ended: Whether it has left the pass.
        finished: Whether it left without an exception.
        wanted: Whether another rank follows this log.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.log: list[Collective] = []
        self.made, self.published = 0, 0
        self.ended = self.finished = self.wanted = False

    def key(self, rank: int, name: str | int) -> str:
        """See the module's list of keys."""
        return f"{self.number}/{rank}/{name}"


class _Recorder:
    """DeepSpeed's communication object, writing down each collective before it is made; so do,
    inside `recording`, the functions of `torch.distributed` that it does not call itself.
    """

    def __init__(self, backend: Any, current: _Pass, grown: Callable[[], None]) -> None:
        self._backend, self._pass, self._grown = backend, current, grown
        self._inside = threading.local()
        for name in (*COLLECTIVES, *OTHERS):
            if hasattr(backend, name):
                setattr(self, name, self._recorded(name, getattr(backend, name), by_torch=False))

    def _recorded(
        self, name: str, function: Callable[..., Any], by_torch: bool
    ) -> Callable[..., Any]:
        current, inside = self._pass, self._inside

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "one", False):  # that DeepSpeed makes of others
                return function(*args, **kwargs)
            current.log.append(written_down(name, args, kwargs, by_torch))
            if current.wanted:
                self._grown()
            inside.one = True
            try:
                result = function(*args, **kwargs)
            finally:
                inside.one = False
            current.made += 1
            return result

        return call

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take the place of DeepSpeed's object, and of the functions of `torch.distributed`."""
        from deepspeed.comm import comm

        names = [n for n in (*COLLECTIVES, *OTHERS) if n != "new_group" and hasattr(dist, n)]
        with ExitStack() as stack:
            swap(stack, comm, "cdb", self)
            for name in names:
                swap(stack, dist, name, self._recorded(name, getattr(dist, name), by_torch=True))
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class Lockstep:
    """Passes of one measurement in which ranks may fail alone: a context manager around them.

    Args:
        device: Where the job's collectives take their tensors.

    Collective: the constructor.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if distributed else 1
        self._pass: _Pass | None = None
        self._passes = 0
        if self.world_size == 1:
            return
        self.rank = dist.get_rank()
        self._meshed = is_mesh()
        # A client of its own for each thread: a request waits while another is under way.
        store = distributed_c10d._get_default_store()
        number = store.add(f"ds_hessian/measurements of rank {self.rank}", 1)
        stores = [_clone(store) for _ in range(2)]
        prefix = f"ds_hessian/measurement {number}"
        self._store, self._publisher_store = (dist.PrefixStore(prefix, s) for s in stores)
        self._posted: set[str] = set()
        self._wake, self._closing = threading.Event(), False
        self._publisher = threading.Thread(target=self._publish, name="ds_hessian", daemon=True)

    def __enter__(self) -> Lockstep:
        if self.world_size > 1:
            self._publisher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.world_size > 1:
            self._closing = True
            self._wake.set()
            self._publisher.join()
            for key in self._posted:  # all ranks have met since, nobody reads them any more
                self._store.delete_key(key)

    def _post(self, store: dist.Store, key: str, value: Any) -> None:
        self._posted.add(key)
        store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # the stub says str

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a body that contains collectives; if it raised on any rank, raise on all of them.

        Args:
            doing: What the body does, for the message.

        Raises:
            MeasurementError: the body raised on some rank; see `agree`.
            LockstepError: it raised here, and the collectives of other ranks cannot be followed.

        Collective: every rank must enter and leave; one small all-reduce.
        """
        if self.world_size == 1:
            with together(doing, device=self.device):
                yield
            return
        from deepspeed.comm import comm

        self._passes += 1
        self._pass = current = _Pass(self._passes)
        backend, error = comm.cdb, None
        try:
            with _Recorder(backend, current, self._wake.set).recording():
                yield
            current.finished = True
        except Exception as caught:  # re-raised by agree, after the other ranks have been told
            error = caught
        finally:
            current.ended = True
        when = current.made
        if error is not None:
            # The frames hold activations and the graph, which others' collectives may need room of.
            traceback.clear_frames(error.__traceback__)
            self._follow(current, backend, error)
        agree(error, doing, device=self.device, when=when)
        self._pass = None

    # ---- a rank that failed

    def _follow(self, current: _Pass, backend: Any, error: Exception) -> None:
        """Take part in what the others still make.

        Raises:
            LockstepError: it is not possible.
        """
        try:
            self._post(self._store, current.key(self.rank, "end"), (len(current.log), False))
            for collective in current.log[current.made :]:  # the one that raised
                self._replay(current, backend, collective)
            for leader in range(self.world_size):
                if leader != self.rank and self._follow_one(current, backend, leader):
                    return
        except Exception as why:
            message = (
                f"rank {self.rank} failed ({type(error).__name__}: {error}) and cannot take part "
                f"in what the other ranks wait for: {why}; end the job"
            )
            logger.error(message)
            raise LockstepError(message) from error

    def _follow_one(self, current: _Pass, backend: Any, leader: int) -> bool:
        """Make what `leader` makes until it leaves the pass; returns whether it finished it."""
        deadline, pause, asked = time.monotonic() + PATIENCE, 0.0, False
        while time.monotonic() < deadline:
            key = current.key(leader, current.made)
            if self._store.check([key]):
                self._replay(current, backend, pickle.loads(self._store.get(key)))
                deadline, pause = time.monotonic() + PATIENCE, 0.0
                continue
            if self._store.check([current.key(leader, "end")]):
                length, finished = pickle.loads(self._store.get(current.key(leader, "end")))
                if current.made >= length:
                    return bool(finished)
            if not asked:
                self._post(self._store, current.key(leader, "wanted"), self.rank)
                asked = True
            time.sleep(pause)
            pause = min(pause + 5e-4, TICK / 4)
        raise LockstepError(f"no news of rank {leader} for {PATIENCE:.0f} s")

    def _replay(self, current: _Pass, backend: Any, collective: Collective) -> None:
        """Take part in a collective with zeros; what comes out is dropped."""
        name = collective.name
        try:
            if name not in COLLECTIVES:
                raise LockstepError("its sizes are known to each rank alone")
            args, kwargs = collective.arguments(self.device, self._meshed)
            work = getattr(dist if collective.by_torch else backend, name)(*args, **kwargs)
            if hasattr(work, "wait"):  # async_op was a positional argument
                work.wait()
        except Exception as error:
            raise LockstepError(f"{name}, number {current.made} of the pass: {error}") from error
        current.made += 1

    # ---- the thread

    def _publish(self) -> None:
        """Publish the log where another rank follows it."""
        before: tuple[int, int] = (0, 0)
        tick = max(TICK, self.world_size / REQUESTS)
        try:
            while not self._closing:
                self._wake.wait(tick)
                self._wake.clear()
                current = self._pass
                if current is None:
                    continue
                progress = (current.number, len(current.log))
                if not current.wanted and progress == before:
                    wanted = current.key(self.rank, "wanted")
                    current.wanted = self._publisher_store.check([wanted])
                before = progress
                if current.wanted:
                    self._publish_new(current)
        except Exception as error:
            logger.error("the log of collectives cannot be published any more: %s", error)

    def _publish_new(self, current: _Pass) -> None:
        ended = current.ended  # before the log's length: it does not grow any more
        while current.published < len(current.log):
            line = current.log[current.published]
            self._post(self._publisher_store, current.key(self.rank, current.published), line)
            current.published += 1
        if ended:
            end = (current.published, current.finished)
            self._post(self._publisher_store, current.key(self.rank, "end"), end)


def _clone(store: dist.Store) -> dist.Store:
    """A client of its own, where the store has such (torch 2.6)."""
    return store.clone() if hasattr(store, "clone") else store
