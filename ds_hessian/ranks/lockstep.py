"""Keeping ranks together when one of them fails between the collectives of a model.

ZeRO gathers parameters and reduces gradients inside the model's forward and backward, tensor and
expert parallelism reduce and exchange activations there. A rank that leaves them with an exception
would keep the others waiting in the next collective.

A pass (`Lockstep.run`) is made of segments (`Lockstep.segment`): all of it, or in a pipeline each
forward and each backward of a micro-batch. Ranks that are peers make the same sequence of
collectives in a segment, each in its own groups, of sizes that do not depend on data, or that an
all-to-all names. So a rank that fails takes part in those that it has not made yet, with zeros,
until the others have ended the segment, and does the same in all segments to come; what a pipeline
sends between stages it goes on sending. At the end of the pass all ranks meet in `agree`, where all
of them raise.

What the failed rank has to make it learns from a rank that has got farther. In a segment the host's
communication object and the functions of `torch.distributed` are replaced by ones that write down
every collective and hand it on. A thread on each rank looks, when the pass makes no progress,
whether somebody asks for this log; if so, it publishes the log on the job's TCP store and keeps it
up to date. Keys, below a prefix for the measurement:

    <pass>/<rank>/wanted            somebody needs this rank's log
    <pass>/<rank>/<segment>/<k>     the k-th collective of the rank in a segment
    <pass>/<rank>/<segment>/end     (how many there are, whether the rank finished the segment)

A failed rank reads the logs of its peers in the order of ranks, up to the first that finished the
segment: all that finish make the same collectives. If none does, it has seen the longest log.

Cost while nothing fails: a few microseconds per collective, and on a rank that waits or computes
longer than `TICK` one request to the store per `TICK`, at most `REQUESTS` per second in the job.
After a failure: a millisecond or two per collective, and O(ranks) requests from each failed rank.

Not followed, but refused with a message, are groups that form no mesh (see `collectives`), and
operations other than `COLLECTIVES`.
"""

from __future__ import annotations

import functools
import logging
import pickle
import sys
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

from ds_hessian.backends.guard import swap
from ds_hessian.ranks import agree
from ds_hessian.ranks.collectives import (
    COLLECTIVES,
    EXCHANGE,
    OTHERS,
    Collective,
    LockstepError,
    exchanged,
    peers_of,
    written_down,
)

logger = logging.getLogger(__name__)

TICK = 0.1
"""Seconds between looks at the store on a rank that makes no progress."""

REQUESTS = 1000.0
"""Of these looks, as many per second from all ranks together; larger jobs look less often."""

PATIENCE = 600.0
"""Seconds that a failed rank waits for news of another: NCCL's own timeout."""


class _Segment:
    """The collectives of one rank in one segment.

    Attributes:
        log: Those that it began.
        made: How many of them did not raise.
        published: How many of them are on the store.
        ended: Whether the rank has left the segment.
        finished: Whether it left without an exception.
        told: Whether its end is on the store.
    """

    def __init__(self) -> None:
        self.log: list[Collective] = []
        self.made = self.published = 0
        self.ended = self.finished = self.told = False


class _Pass:
    """The segments of one rank in one pass.

    Attributes:
        wanted: Whether another rank follows this one.
        progress: Grows with every collective and segment.
        error: What the rank failed with, and where; see `Lockstep.segment`.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments: list[_Segment] = []
        self.progress, self.wanted = 0, False
        self.error: tuple[Exception, tuple[int, ...]] | None = None

    def key(self, rank: int, *names: str | int) -> str:
        """See the module's list of keys."""
        return "/".join(map(str, (self.number, rank, *names)))


class _Recorder:
    """Takes the place of a host's communication object and of `torch.distributed`'s functions, and
    writes down each collective of a segment before it is made.

    Args:
        host: See `Lockstep`.
        segment: The one that the rank is in, or None.
        begun: Called when a collective begins in it.
    """

    def __init__(
        self,
        host: tuple[Any, str] | None,
        segment: Callable[[], _Segment | None],
        begun: Callable[[], None],
    ) -> None:
        self._segment, self._begun, self._inside = segment, begun, threading.local()
        originals = {n: getattr(dist, n) for n in (*COLLECTIVES, *OTHERS) if hasattr(dist, n)}
        for name in ("new_group", "isend", "irecv"):  # torch asks whether an operation is these two
            originals.pop(name)
        recorded = {n: self._recorded(n, f, by_torch=True) for n, f in originals.items()}
        ways = {id(function): recorded[name] for name, function in originals.items()}
        self._places: list[tuple[Any, str, Any]] = [
            (module, name, ways[id(value)])
            for module in list(sys.modules.values())
            if _may_call(getattr(module, "__name__", ""))
            for name, value in list(getattr(module, "__dict__", {}).items())
            if id(value) in ways
        ]
        if host is not None:
            self._places.append((*host, _Stand(getattr(*host), self._recorded)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Take their places."""
        with ExitStack() as stack:
            for owner, name, recorded in self._places:
                swap(stack, owner, name, recorded)
            yield

    def _recorded(
        self, name: str, function: Callable[..., Any], by_torch: bool
    ) -> Callable[..., Any]:
        inside = self._inside

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            segment = None if getattr(inside, "one", False) else self._segment()
            if segment is None:  # one that another is made of, or a pipeline's own
                return function(*args, **kwargs)
            segment.log.append(written_down(name, args, kwargs, by_torch))
            self._begun()
            inside.one = True
            try:
                result = function(*args, **kwargs)
            finally:
                inside.one = False
            segment.made += 1
            return result

        return call


def _may_call(module: str) -> bool:
    """Whether its functions are taken as the model's: not torch's own, which call each other."""
    return module == "torch.distributed" or not module.startswith(("torch.", "ds_hessian."))


class _Stand:
    """A host's communication object, of which collectives are recorded."""

    def __init__(self, original: Any, recorded: Callable[..., Callable[..., Any]]) -> None:
        self._original = original
        for name in (*COLLECTIVES, *OTHERS):
            if hasattr(original, name):
                setattr(self, name, recorded(name, getattr(original, name), by_torch=False))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class Lockstep:
    """Passes of one measurement in which ranks may fail alone: a context manager around them.

    Args:
        device: Where the job's collectives take their tensors.
        host: `(owner, name)` of the attribute that holds the host's communication object, with
            methods named as the functions of `torch.distributed`; None where it has none.
        stage: Ranks of the same number are peers: those of a pipeline's stage.

    Collective: the constructor.
    """

    def __init__(
        self, device: torch.device, host: tuple[Any, str] | None = None, stage: int = 0
    ) -> None:
        self.device = device
        distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if distributed else 1
        self._pass: _Pass | None = None
        self._passes = 0
        if self.world_size == 1:
            return
        self.rank = dist.get_rank()
        self._host = host
        self._peers, self._meshed = peers_of(stage)
        self._recorder = _Recorder(host, self._open_segment, self._progress)
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

    # ---- passes

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A pass of one segment; see `run`."""
        with self.run(doing), self.segment():
            yield

    @contextmanager
    def run(self, doing: str) -> Iterator[None]:
        """A pass: if a segment of the body failed on any rank, raise on all of them.

        Args:
            doing: What the body does, for the message.

        Raises:
            MeasurementError: a segment failed on some rank; see `agree`.
            LockstepError: one failed here, and the collectives of other ranks cannot be followed.

        Collective: every rank must enter and leave; one small all-reduce.
        """
        self._passes += 1
        self._pass = current = _Pass(self._passes)
        with ExitStack() as stack:
            if self.world_size > 1:
                stack.enter_context(self._recorder.recording())
            try:
                yield
            except LockstepError:
                raise
            except Exception as error:  # between segments
                current.error = current.error or (error, ())
        failure, where = current.error or (None, ())
        agree(failure, doing, device=self.device, when=where)
        self._pass = None

    @contextmanager
    def segment(self, *where: int) -> Iterator[None]:
        """A part of the pass that may raise on some ranks, and then ends without an exception.

        Args:
            where: Orders failures: the smallest tuple of all ranks' is the one that is named. The
                number of collectives before the failure is added to it.

        Raises:
            LockstepError: see `run`.
        """
        current, segment = self._pass, _Segment()
        assert current is not None, "a segment is a part of a pass"
        current.segments.append(segment)
        current.progress += 1
        error = None
        try:
            yield
            segment.finished = True
        except Exception as caught:  # of this rank, raised by `run`
            error = caught
        finally:
            segment.ended = True
            if current.wanted:
                self._wake.set()
        if error is None:
            return
        current.error = current.error or (error, (*where, segment.made))
        # The frames hold activations and the graph, which others' collectives may need room of.
        traceback.clear_frames(error.__traceback__)
        if self.world_size > 1:
            self._follow(current, segment, error)

    def go_on(self) -> None:
        """At the beginning of a segment: leave it where this rank has failed in an earlier one.

        Raises:
            Exception: what it failed with.
        """
        if self._pass is not None and self._pass.error is not None:
            raise self._pass.error[0]

    def _open_segment(self) -> _Segment | None:
        segments = self._pass.segments if self._pass is not None else []
        return segments[-1] if segments and not segments[-1].ended else None

    def _progress(self) -> None:
        current = self._pass
        if current is not None:
            current.progress += 1
            if current.wanted:
                self._wake.set()

    # ---- a rank that failed

    def _follow(self, current: _Pass, segment: _Segment, error: Exception) -> None:
        """Take part in what peers still make in a segment.

        Raises:
            LockstepError: it is not possible.
        """
        try:
            number = len(current.segments) - 1
            self._post(
                self._store, current.key(self.rank, number, "end"), (len(segment.log), False)
            )
            segment.told = True
            for collective in segment.log[segment.made :]:  # the one that raised
                self._replay(segment, collective)
            for leader in self._peers:
                if leader != self.rank and self._follow_one(current, segment, leader):
                    return
        except Exception as why:
            message = (
                f"rank {self.rank} failed ({type(error).__name__}: {error}) and cannot take part "
                f"in what the other ranks wait for: {why}; end the job"
            )
            logger.error(message)
            raise LockstepError(message) from error

    def _follow_one(self, current: _Pass, segment: _Segment, leader: int) -> bool:
        """Make what `leader` makes until it leaves the segment; returns whether it finished it."""
        while True:
            collective, finished = self._line(current, leader, segment.made)
            if collective is None:
                return finished
            if collective.name == EXCHANGE:
                ranks = collective.ranks(self._meshed)
                each = [
                    None if r == self.rank else self._line(current, r, segment.made)[0]
                    for r in ranks
                ]
                collective = exchanged(each, ranks.index(self.rank))
            self._replay(segment, collective)

    def _line(self, current: _Pass, rank: int, k: int) -> tuple[Collective | None, bool]:
        """The k-th collective of a rank in the segment, once it has begun it; or None, and whether
        it has finished the segment, once it has left with fewer.
        """
        number = len(current.segments) - 1
        deadline, pause, asked = time.monotonic() + PATIENCE, 0.0, False
        while time.monotonic() < deadline:
            key = current.key(rank, number, k)
            if self._store.check([key]):
                return pickle.loads(self._store.get(key)), False
            end = current.key(rank, number, "end")
            if self._store.check([end]):
                length, finished = pickle.loads(self._store.get(end))
                if k >= length:
                    return None, bool(finished)
            if not asked:
                self._post(self._store, current.key(rank, "wanted"), self.rank)
                asked = True
            time.sleep(pause)
            pause = min(pause + 5e-4, TICK / 4)
        raise LockstepError(f"no news of rank {rank} for {PATIENCE:.0f} s")

    def _replay(self, segment: _Segment, collective: Collective) -> None:
        """Take part in a collective with zeros; what comes out is dropped."""
        name = collective.name
        try:
            if name not in COLLECTIVES:
                raise LockstepError("its sizes are known to each rank alone")
            args, kwargs = collective.arguments(self.device, self._meshed)
            work = getattr(self._owner(collective), name)(*args, **kwargs)
            if hasattr(work, "wait"):  # async_op was a positional argument
                work.wait()
        except Exception as error:
            raise LockstepError(f"{name}, number {segment.made} of the step: {error}") from error
        segment.made += 1

    def _owner(self, collective: Collective) -> Any:
        if collective.by_torch or self._host is None:
            return dist
        return getattr(*self._host)

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
                progress = (current.number, current.progress)
                if not current.wanted and progress == before:
                    wanted = current.key(self.rank, "wanted")
                    current.wanted = self._publisher_store.check([wanted])
                before = progress
                if current.wanted:
                    for number, segment in enumerate(list(current.segments)):
                        self._publish_new(current, number, segment)
        except Exception as error:
            logger.error("the log of collectives cannot be published any more: %s", error)

    def _publish_new(self, current: _Pass, number: int, segment: _Segment) -> None:
        ended = segment.ended  # before the log's length: it does not grow any more
        while segment.published < len(segment.log):
            line = segment.log[segment.published]
            key = current.key(self.rank, number, segment.published)
            self._post(self._publisher_store, key, line)
            segment.published += 1
        if ended and not segment.told:
            end = (segment.published, segment.finished)
            self._post(self._publisher_store, current.key(self.rank, number, "end"), end)
            segment.told = True


def _clone(store: dist.Store) -> dist.Store:
    """A client of its own, where the store has such (torch 2.6)."""
    return store.clone() if hasattr(store, "clone") else store
