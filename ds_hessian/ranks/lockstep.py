"""Keeping ranks together when one of them fails between the collectives of a measurement.

ZeRO gathers parameters and reduces gradients inside the model's forward and backward, tensor and
expert parallelism reduce and exchange activations there, displaced weights are published. A rank
that leaves them with an exception would keep the others waiting in the next collective.

A measurement is a sequence of passes, each from one meeting of all ranks (`ds_hessian.ranks.agree`
and `reduce`) to the next. Ranks that are peers make the same sequence of collectives in a pass,
each in its own groups, of sizes that do not depend on data, or that an exchange names. So a rank
that fails takes part in those that it has not made yet, with zeros, until the others come to the
meeting, where all of them raise. In a pipeline, which sends activations between stages, each
forward and each backward of a micro-batch is a segment of its own (`Lockstep.segment`): a rank that
fails there follows its peers to the end of the segment, does the same in all segments to come, and
continues to send; it raises at the meeting.

The failed rank learns which collectives to make from a rank that is ahead of it. While measuring,
the methods of `torch.distributed.ProcessGroup`, which all collectives made in Python call, are
replaced by ones that record every collective of the thread that measures, and of the threads in
which autograd runs its backward, and then make it. `ds_hessian.ranks.log` publishes the record
where another rank requests it; `ds_hessian.ranks.following` makes the collectives.

Cost while nothing fails: one all-reduce of 40 bytes, a few microseconds per collective, and what
`ds_hessian.ranks.watch` says: a client of the store on each node, not on each rank.
After a failure: a millisecond or two per collective, and O(ranks) requests from each failed rank.

Not followed, but refused with a message, are groups that form no mesh (see `collectives`), and
operations other than `COLLECTIVES`.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ds_hessian.errors import ConfigError, MeasurementError
from ds_hessian.ranks.agreement import (
    Follower,
    LockstepError,
    RankInterrupt,
    active,
    agree,
    interrupts,
    report,
    text_of,
    together,
)
from ds_hessian.ranks.between import Between
from ds_hessian.ranks.collectives import (
    COLLECTIVES,
    OTHERS,
    SHARED_MEMORY,
    Collective,
    mesh_of,
    written_down,
)
from ds_hessian.ranks.entrance import Call, CallsDiffer, Given, call_of
from ds_hessian.ranks.exchange import first_of
from ds_hessian.ranks.following import Following
from ds_hessian.ranks.interrupts import Interrupts, Signalled
from ds_hessian.ranks.leaving import LeftAlone
from ds_hessian.ranks.log import Log
from ds_hessian.ranks.passes import Pass
from ds_hessian.ranks.watch import Watch, node_of

logger = logging.getLogger(__name__)
T = TypeVar("T")


_measuring: list[int] = []
"""The thread that measures, once for each lockstep that it has entered."""
_entering = threading.Lock()


class Lockstep(Follower):
    """A measurement in which ranks may fail alone: a context manager around it.

    Args:
        device: The device of the tensors of the job's collectives.
        host: `(owner, name)` of the attribute that holds DeepSpeed's communication object; None
            where there is none.
        peers: The ranks of the same pipeline stage; None for all ranks.
        doing: What the ranks enter.
        given: Returns what they must give it alike; what it raises is this rank's failure.

    Attributes:
        restoring: Whether the measurement has ended, and the training state is being restored.
        outer: What the thread follows around it.

    Raises:
        ConfigError: another thread of this process measures; or ranks differ in what they do, or in
            what they give.

    Collective: to enter it and to leave it.
    """

    def __init__(
        self,
        device: torch.device,
        host: tuple[ModuleType, str] | None = None,
        peers: Sequence[int] | None = None,
        doing: str = "measuring",
        given: Given = dict,
    ) -> None:
        super().__init__()
        self.device = device
        distributed = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size() if distributed else 1
        self.restoring, self.outer = False, active.follower
        self._doing, self._given = doing, given
        self._interrupts = Interrupts()
        self._pass = Pass(0)
        self._raised: BaseException | None = None  # to all ranks, by the latest meeting
        self._told: BaseException | None = None  # of which all ranks know by the latest meeting
        self._stack, self._thread, self._inside = ExitStack(), 0, False
        self._interrupted = False  # some rank, at the end
        self._paused = False  # while another lockstep in its body is entered
        self._ended: BaseException | None = None  # by which all ranks have left that one
        self._last = 0  # number of the last pass before the end
        self._between: Between | None = None  # in `again`, outside of its segments
        # Why this rank cannot go on with the others, who wait until it has left the job.
        self._lost: LockstepError | None = None
        self._broken: str | None = None  # why a collective under way has failed: a rank is gone
        if self.world_size == 1:
            return
        self.rank = dist.get_rank()
        self._communication = getattr(*host) if host is not None else None
        self._peers: Sequence[int] = range(self.world_size) if peers is None else peers
        self._log: Log | None = None

    def __enter__(self) -> Lockstep:
        self._thread = threading.get_ident()
        with _entering:
            if any(other != self._thread for other in _measuring):
                raise ConfigError(
                    "another thread of this process is measuring: measure in one thread at a time"
                )
            _measuring.append(self._thread)
        self._stack.callback(_measuring.pop)
        try:
            self._join()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _join(self) -> None:
        if self.world_size == 1:
            self._interrupts.hold()
            self._interrupts.__enter__()
            return
        self.outer = active.follower
        around = self.outer._interrupts if isinstance(self.outer, Lockstep) else Interrupts()
        with around.entering(self._interrupts):
            self._interrupts.hold()  # until `whole`, in whose body they end it on all ranks
            self._meet()
            self._stack.callback(self._close)
            self._stack.callback(setattr, active, "follower", self.outer)
            active.follower = self
            if isinstance(self.outer, Lockstep):
                self._stack.callback(setattr, self.outer, "_paused", False)
                self.outer._paused = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._interrupted = error is not None and interrupts(error)
        self._last = self._pass.number
        alone: BaseException | None = None
        with self._stack:
            if not isinstance(error, LockstepError):
                alone = self._require_restored(error)
        try:
            ended = self._ending(error)
        finally:
            self._interrupts.__exit__()
        ended = self._interrupts.handled() or ended  # what came while that was agreed on
        if isinstance(self.outer, Lockstep):
            self.outer._ended = None if error is None else ended
        if ended is not error and ended is not None:
            raise ended from error
        if error is None and alone is not None:
            raise alone

    def _meet(self) -> None:
        """Meet all ranks, of which one that has failed before ends the call around it on all.

        What fails on this rank once they have met is raised at the next meeting: the others have
        entered, and do not look for it in the call around it any more.
        """
        before, failed = self.outer.met, None
        try:
            call = call_of(self._doing, self._given())
        except BaseException as error:
            call, failed = Call(self._doing, None), error
        try:
            self._meshed, name = mesh_of(self._peers, self.device, call)
            self._interrupts.__enter__()
            self._stack.enter_context(self._recording())
            watch = Watch(node_of(name), name)
            self._log = Log(self.rank, watch, self._peers[0], lambda: self._pass)
            self._log.start()
        except BaseException as error:
            known = isinstance(error, (MeasurementError, RankInterrupt, CallsDiffer))
            if known or self.outer.met == before:
                raise
            failed = failed or error
        if failed is not None:
            self._pass.error = failed, (0,)

    def _close(self) -> None:
        if self._log is not None:  # this rank has not failed in `_meet`
            self._log.close(met=self._pass.number != self._last)
        self._log = None  # which refers to this lockstep: no cycle is left to Python's collector

    def _ending(self, error: BaseException | None) -> BaseException | None:
        """Run the handlers of the signals that have come, now that the state is restored; return
        what is to be raised.

        Where a signal has ended the measurement, all ranks raise what suits its handlers: an
        interrupt if one of them has raised anything, and otherwise a `MeasurementError`, after
        which the job continues.
        """
        own = self._interrupts.handled()
        if error is not None and self._interrupted:  # on some rank, and all have an error
            if interrupts(error) and not isinstance(error, (Signalled, RankInterrupt)):
                own = error
            if first_of(own is not None, self.device) is None and interrupts(error):
                return MeasurementError(f"ended by a signal: {error}")
        return error if own is None else own

    # ---- bodies that all ranks leave alike

    @contextmanager
    def together(self, doing: str, as_it_is: bool = False) -> Iterator[None]:
        """Run the body; if it, or one of its segments, failed on any rank, raise on all of them.

        Args:
            doing: The action of the body, for the message.
            as_it_is: Whether an error that all ranks share is raised unchanged.

        Raises:
            MeasurementError: it failed on some rank; see `agree`.
            KeyboardInterrupt: some rank was interrupted.
            LockstepError: it failed here, and the collectives of other ranks cannot be followed.

        Collective: every rank must enter and leave; one small all-reduce.
        """
        with self._noting(), together(doing, device=self.device, as_it_is=as_it_is):
            yield

    @contextmanager
    def whole(self, doing: str, as_it_is: bool = False) -> Iterator[None]:
        """Run the body, which is all of the lockstep, as `together` does. Signals that come before
        the body end it; those that come after its end are handled after that of the lockstep: the
        others go on then.

        Collective: every rank must enter and leave; one small all-reduce.
        """
        with self._noting(), together(doing, device=self.device, as_it_is=as_it_is):
            with self._interrupts.let():  # they are held around it: from entry, and to `_ending`
                yield

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the body between saving the training state and restoring it.

        A host enters the lockstep first, saves the state `together`, runs this, and restores
        the state as it leaves, by the same collectives on all ranks.

        Raises:
            Exception: the body failed on some rank: as in `together`, or the error of all ranks.

        Collective: every rank must enter and leave; one small all-reduce.
        """
        try:
            with self.whole("measuring", as_it_is=True):
                yield
        finally:
            self.restoring = True

    def finish(self) -> None:
        """Wait until all ranks have come to the end of a body that the caller writes."""
        self.require_open()
        if self.world_size > 1 and self._log is not None:
            self._log.leave_together(self._pass, self.world_size)

    def _require_restored(self, error: BaseException | None) -> BaseException | None:
        """Agree that nothing was raised but the error that all ranks have raised in the bodies.

        Returns:
            What failed on this rank alone once all had agreed: the training state is back, and the
            others have gone on to what comes after the measurement, where they learn of it.
        """
        lost, own = None if error is self._raised else error, self._interrupted
        doing = "putting back the training state"
        try:
            self._interrupted = agree(lost, doing, device=self.device, interrupted=own)
        except BaseException as failure:
            if lost is None and failure is not self._told and self._pass.number > self._last:
                return failure
            lost = failure
        if lost is not None:
            raise LockstepError(f"{lost}; the training state is lost, end the job") from error
        return None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Save the error that all ranks raise."""
        try:
            yield
        except BaseException as error:
            self._raised = error
            raise

    @contextmanager
    def segment(self, *where: int) -> Iterator[None]:
        """Run a part of the pass that may raise on some ranks; on several ranks it ends without
        an exception, and a rank that is alone raises it.

        Args:
            where: The key by which failures are ordered: the failure with the smallest tuple is
                reported. The number of collectives before the failure is added to it.

        Raises:
            LockstepError: see `together`.
        """
        if self.world_size == 1:
            with self._interrupts.let():
                yield
            return
        current = self._pass
        current.end(finished=True)
        current.begin()
        error: BaseException | None = None
        around, self._between = self._between, None
        try:
            with self._interrupts.let():
                yield
        except BaseException as caught:
            error = caught  # raised at the next meeting
        finally:
            self._between = around
        current.end(finished=error is None)
        self._progress(current)
        if error is not None:
            current.error = current.error or (error, (*where, current.segment.made))
            with self._following(error) as others:
                others.to_end(current)
        current.begin()

    @contextmanager
    def between_segments(self) -> Iterator[None]:
        """Hold signals back until the next segment: between segments, stages exchange what a rank
        that leaves would keep from others. What this one exchanges is noted, for `again`.
        """
        self._between = Between() if self.world_size > 1 else None
        try:
            with self._interrupts.held():
                yield
        finally:
            self._between = None

    def again(self, make: Callable[[], T], where: Callable[[], tuple[int, ...]]) -> T:
        """Make a call that has segments, and once more if it fails between them.

        What the first attempt has sent and received there is passed over in the second one, which
        has to pass over the segments of the first one. Its error is raised at the next meeting.

        Args:
            make: The call, in `between_segments`; it sends and receives the same in each attempt.
            where: Returns the key by which failures are ordered, as in `segment`.

        Raises:
            BaseException: the second attempt has failed too, or the first one in a collective.
        """
        between = self._between
        try:
            return make()
        except LockstepError:
            raise
        except BaseException as error:
            if between is None or not between.known:
                raise
            between.rewind()
            traceback.clear_frames(error.__traceback__)
            self._pass.error = self._pass.error or (error, where())
        return make()

    def raise_if_failed(self) -> None:
        """Leave a segment at its beginning if this rank has failed in an earlier one.

        Raises:
            BaseException: the error of that segment.
        """
        if self._pass.error is not None:
            raise self._pass.error[0]

    # ---- meetings: a `Follower`

    follows = True

    def told(self, error: BaseException) -> None:
        """Take note of the error that all ranks know."""
        self._told = error

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context that holds interrupts back until the meeting is over."""
        return self._interrupts.held()

    def arrive(
        self, error: BaseException | None, figures: int = 0
    ) -> tuple[BaseException | None, tuple[int, ...]]:
        """Prepare for a meeting; a rank with a new error follows the others to their `agree`."""
        current = self._pass
        if error is not None and error is self._ended:  # as of all ranks, which need no following
            current.error = current.error or (error, (current.segment.made,))
        known = current.error is not None and error is current.error[0]
        if error is not None and not known:
            late = isinstance(error, LeftAlone) and error.follows
            position = sys.maxsize if late else current.segment.made
            current.error = current.error or (error, (position,))
            with self._following(error) as others:
                figures = others.to_meeting(current)
                if figures:
                    self._take_part(current, figures)
        else:
            current.meeting = figures
            current.end(finished=True)
            self._progress(current)
        return self._pass.error or (None, ())

    def depart(self) -> None:
        """End a meeting, and begin the next pass."""
        super().depart()
        self._pass = Pass(self.met)

    # ---- a rank that failed

    @contextmanager
    def _following(self, error: BaseException) -> Iterator[Following]:
        """Follow the others in the body, or end the job."""
        # The frames hold activations and the graph, which others' collectives may need room of.
        traceback.clear_frames(error.__traceback__)
        try:
            assert self._log is not None
            if self._broken is not None:
                raise LockstepError(f"a collective has failed under way ({self._broken})")
            yield Following(self._log, self._peers, self._meshed, self._communication, self.device)
        except Exception as why:
            message = (
                f"rank {self.rank} failed ({text_of(error)}) and cannot take part "
                f"in what the other ranks wait for: {why}; end the job"
            )
            report(logger.error, message)
            self._lost = LockstepError(message)
            raise self._lost from error

    def _take_part(self, current: Pass, figures: int) -> None:
        """Take part in the reduction at which the others meet, and begin the next pass."""
        dist.all_reduce(torch.full((figures,), math.nan, dtype=torch.float64, device=self.device))
        self.depart()
        self._pass.error = current.error
        self._pass.meeting = 0
        self._pass.end(finished=True)

    # ---- the record

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record each collective of a segment before it is made."""
        with ExitStack() as stack:
            for name in (*COLLECTIVES, *OTHERS):
                if name in vars(dist.ProcessGroup):
                    # As it is stored: what `getattr` gives would not be bound to a group again.
                    stack.callback(setattr, dist.ProcessGroup, name, vars(dist.ProcessGroup)[name])
                    recorded = self._recorded(name, getattr(dist.ProcessGroup, name))
                    setattr(dist.ProcessGroup, name, recorded)
            work: Any = dist.Work
            stack.callback(setattr, work, "wait", work.wait)
            work.wait = self._awaited(work.wait)
            if hasattr(self._communication, SHARED_MEMORY):
                own = vars(self._communication)  # of a measurement around this one
                if SHARED_MEMORY in own:
                    stack.callback(own.__setitem__, SHARED_MEMORY, own[SHARED_MEMORY])
                else:
                    stack.callback(delattr, self._communication, SHARED_MEMORY)
                setattr(self._communication, SHARED_MEMORY, self._shared_memory())
            yield

    def _recorded(self, name: str, method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(group: dist.ProcessGroup, *args: object, **kwargs: object) -> T:
            if self._lost is not None and threading.get_ident() == self._thread:
                raise self._lost
            if not self._records():
                return method(group, *args, **kwargs)
            line = written_down(name, group, args, kwargs)

            def make() -> T:
                return self._made(line, lambda: method(group, *args, **kwargs))

            return make() if self._between is None else self._between.make(line, args, make)

        return call

    def _awaited(self, method: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(method)
        def wait(work: dist.Work, *args: object, **kwargs: object) -> bool:
            try:
                return method(work, *args, **kwargs)
            except Exception as error:
                if threading.get_ident() == self._thread or _by_autograd():
                    self._broken = self._broken or text_of(error)
                raise

        return wait

    def _shared_memory(self) -> Callable[..., object]:
        method: Callable[..., object] = getattr(self._communication, SHARED_MEMORY)

        @functools.wraps(method)
        def call(
            tensor: torch.Tensor, op: object, group: dist.ProcessGroup | None = None
        ) -> object:
            if not self._records():
                return method(tensor, op, group=group)
            every = group or dist.group.WORLD
            assert every is not None
            line = written_down(SHARED_MEMORY, every, (tensor, op), {})
            return self._made(line, lambda: method(tensor, op, group=group))

        return call

    def _records(self) -> bool:
        """Return whether a collective of this thread belongs to the job's part of a measurement."""
        mine = threading.get_ident() == self._thread or _by_autograd()
        idle = self._pass.segment.ended or self._inside or self._paused
        return mine and not idle

    def _made(self, line: Collective, make: Callable[[], T]) -> T:
        current = self._pass
        segment = current.segment
        self.require_open()
        with self._interrupts.held():
            segment.log.append(line)
            self._progress(current)
            self._inside = True
            try:
                result = make()
            finally:
                self._inside = False
            segment.made += 1
        return result

    def _progress(self, current: Pass) -> None:
        if self._log is not None:
            self._log.progress(current)


def _by_autograd() -> bool:
    """Return whether autograd runs this thread, which no Python code has started."""
    return isinstance(threading.current_thread(), threading._DummyThread)
