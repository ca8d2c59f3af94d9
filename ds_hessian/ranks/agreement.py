"""Failing together: an exception on one rank becomes an exception on every rank.

A rank that raised alone would leave the others waiting in a collective. Ranks therefore *meet*:
in `agree`, which collects whether any has failed, and in `reduce`, which sums their figures. Code
between collectives that can fail on one rank only (the user's batches and files) runs inside
`together`, which ends in `agree`.

While a `ds_hessian.ranks.lockstep.Lockstep` is entered, a rank may fail anywhere, also between
collectives of the model: it first follows the others to the next meeting, and fails there. In
`reduce` it does so by adding NaN: sums that are not numbers make all ranks call `agree`. A
reduction is so no larger and no more frequent than without failures.

Cost: one all-reduce for a meeting, and a gather of the messages where a rank has failed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.errors import HessianError, MeasurementError
from ds_hessian.ranks.exchange import gather_objects

When = tuple[int, ...]


class LockstepError(RuntimeError):
    """The job cannot continue: a failed rank could not follow the others, which wait for it, or the
    training state could not be restored. Not a `HessianError`, after which training continues.
    """


class RankInterrupt(KeyboardInterrupt):
    """Another rank was interrupted; the message names it."""


class Follower:
    """The state of a thread of this rank between meetings; `Lockstep` also follows other ranks.

    Attributes:
        depth: The number of bodies of `together` that the thread is in.
        met: The number of meetings that have ended.
        follows: Whether a rank that fails joins the meetings of the others.
        over: `(depth, error)` once a rank has left the body of that depth by an error that all
            ranks know. Until this rank has left the body too, it joins no meeting, and raises the
            error.
    """

    follows = False

    def __init__(self) -> None:
        self.depth = self.met = 0
        self.over: tuple[int, BaseException] | None = None

    def arrive(
        self, error: BaseException | None, figures: int = 0
    ) -> tuple[BaseException | None, When]:
        """Prepare for a meeting: `agree` (0 figures), or `reduce` of so many.

        A rank with an error joins the next `agree` of the others. Return the rank's first error
        since the last meeting, and its position, to be compared with other ranks' errors.
        """
        return error, ()

    def depart(self) -> None:
        """End a meeting."""
        self.met += 1

    def told(self, error: BaseException) -> None:
        """Take note that all ranks know of a failure by a meeting; this one raises `error`."""

    def finish(self) -> None:
        """Come to the end of a body that the caller writes.

        Raises:
            MeasurementError: another rank goes on in it.
        """

    def undisturbed(self) -> AbstractContextManager[None]:
        """Return a context for a meeting."""
        return nullcontext()

    def require_open(self, error: BaseException | None = None) -> None:
        """Raise `error`, or the error that all ranks know, if a body is over."""
        if self.over is not None:
            depth, known = self.over
            if self.depth < depth:
                self.over = None
            raise known if error is None else error


class _Active(threading.local):
    def __init__(self) -> None:
        self.follower = Follower()
        self.apart = Follower()


active = _Active()
"""The followers of this thread: among all ranks, and among those of a group."""


def _follower(group: dist.ProcessGroup | None) -> Follower:
    return active.follower if group is None else active.apart


class _Failure(NamedTuple):
    """The report of a rank's error to all ranks; ordered as the errors happened.

    Attributes:
        depth: The depth of the body that the rank leaves by the error.
    """

    when: When
    rank: int
    depth: int
    doing: str
    message: str
    interrupt: bool


def _failure(error: BaseException, when: When, rank: int, depth: int, doing: str) -> _Failure:
    return _Failure(when, rank, depth, doing, text_of(error), interrupts(error))


def text_of(error: BaseException) -> str:
    """Return the class of an error and what it says, if it can say it: the other ranks wait."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException as why:
        return f"{name}, which raises {type(why).__name__} when it is printed"


def report(log: Callable[..., object], *args: object) -> None:
    """Write to the log where the other ranks go on: what a handler of the user's raises must not
    keep this rank from what they wait for.

    Args:
        log: Method of a logger.
        args: Its arguments.
    """
    with suppress(Exception):
        log(*args, stacklevel=2)


def agree(
    error: BaseException | None,
    doing: str,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    as_it_is: bool = False,
    interrupted: bool = False,
) -> bool:
    """Return if no rank has an error; otherwise raise on all of them.

    The message names the lowest of the ranks that failed first; a later failure may be a
    consequence of theirs. A rank raises its own error if that is an interrupt, or if it is a
    `HessianError` and was first. What fails on a rank on its way to the meeting is its error too.

    Args:
        error: This rank's error.
        doing: The action that was tried, for the message: "while <doing>, rank 1: ...".
        group: The ranks that tried; None for the default group.
        device: The device of the tensors of the group's collectives.
        as_it_is: Whether an error that all ranks share is raised unchanged.
        interrupted: Whether this rank was interrupted before.

    Returns:
        Whether any rank was interrupted before.

    Raises:
        MeasurementError: some rank has an error; where it does, that is the cause.
        KeyboardInterrupt: some rank was interrupted: its error is no `Exception`.

    Collective: every rank of the group.
    """
    follower = _follower(group)
    follower.require_open(error)
    met = follower.met
    try:
        if _several():
            return _meet(follower, error, doing, group, device, as_it_is, interrupted)
    except LockstepError:
        raise
    except BaseException as failure:
        if follower.met > met:
            raise
        error = error or failure
        if _several():
            return _meet(follower, error, doing, group, device, as_it_is, interrupted)
    if error is not None:
        _raise_first([_failure(error, (), 0, 1, doing)], error, (), as_it_is)
    return interrupted


def _several() -> bool:
    return dist.is_available() and dist.is_initialized()


def _all_reduce(
    figures: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Reduce figures over the ranks; a rank alone, as in a job of one process, has no others to
    wait for.
    """
    if dist.get_world_size(group) > 1:
        dist.all_reduce(figures, op=op, group=group)


def _meet(
    follower: Follower,
    error: BaseException | None,
    doing: str,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    as_it_is: bool,
    interrupted: bool,
) -> bool:
    """Meet the others in `agree`."""
    failed: list[_Failure] = []
    with follower.undisturbed():
        error, when = follower.arrive(error)
        said = [int(error is not None), int(interrupted)]
        flags = torch.tensor(said, dtype=torch.int32, device=device)
        _all_reduce(flags, dist.ReduceOp.MAX, group)
        try:
            some_failed, some_interrupted = map(bool, flags.tolist())
            if some_failed:
                mine = None
                if error is not None:
                    mine = _failure(error, when, dist.get_rank(group), follower.depth + 1, doing)
                found = gather_objects(mine, group)
                failed = [failure for failure in found if failure is not None]
        finally:  # the others have left the meeting: a failure from here on is of the next pass
            follower.depart()
        if failed:  # noted before a signal that has been held back is raised: the body is over
            alike = len(failed) == len(found) and len({failure.message for failure in failed}) == 1
            try:
                _raise_first(failed, error, when, alike and as_it_is)
            except BaseException as known:
                follower.told(known)
                depth = min(failure.depth for failure in failed)
                if follower.depth >= depth:
                    follower.over = depth, known
                raise
    return some_interrupted


def _raise_first(
    failed: Sequence[_Failure], error: BaseException | None, when: When, as_it_is: bool
) -> NoReturn:
    first = min(failed)
    interrupted = any(failure.interrupt for failure in failed)
    if error is not None:
        first_too = isinstance(error, HessianError) and when == first.when
        if interrupts(error) or ((first_too or as_it_is) and not interrupted):
            raise error
    text = f"while {first.doing}, rank {first.rank}: {first.message}"
    if interrupted:
        raise RankInterrupt(text) from error
    if isinstance(error, StopIteration):
        # Else `contextlib` takes a RuntimeError that it has caused for Python's own (PEP 479), and
        # this rank alone would raise the StopIteration instead.
        cause = Exception(text_of(error))
        cause.__cause__ = error
        raise MeasurementError(text) from cause
    raise MeasurementError(text) from error


def interrupts(error: BaseException) -> bool:
    """Return whether an error ends more than the measurement."""
    return not isinstance(error, Exception)


def reduce(figures: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum fp64 `figures` `(k,)`, k > 0, over all ranks in one all-reduce; returned on the CPU.

    Args:
        figures: This rank's figures, on the device of the group's collectives; overwritten.
        group: The ranks that sum; None for the default group.

    Raises:
        MeasurementError: some rank has failed in the current measurement; see `agree`.

    Collective: every rank of the group.
    """
    follower = _follower(group)
    follower.require_open()
    with follower.undisturbed():
        error, _ = follower.arrive(None, figures.numel())
        if error is not None:
            figures.fill_(math.nan)
        _all_reduce(figures, dist.ReduceOp.SUM, group)
        follower.depart()
    total = figures.cpu()
    if follower.follows and bool(total.isnan().any()):
        agree(error, "reducing figures", group, figures.device)
    return total


def checkpoint(
    doing: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> None:
    """Continue in the body of `together` only if no rank has failed so far.

    For bodies that contain collectives, or write what must not be written where a rank has failed.

    Raises:
        MeasurementError: some rank left the body with an exception before this call.

    Collective: matches the end of `together` on the ranks that failed.
    """
    agree(None, doing, group, device)


@contextmanager
def together(
    doing: str,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    as_it_is: bool = False,
) -> Iterator[None]:
    """Run the body; if it raised on any rank, raise on all of them, as `agree` does.

    Args:
        doing: The action of the body, for the message.
        group: The ranks that run the body; None for the default group.
        device: The device of the tensors of the group's collectives.
        as_it_is: Whether an error that all ranks share is raised unchanged.

    Raises:
        MeasurementError: the body raised on some rank; there, the original is the cause.
        KeyboardInterrupt: some rank was interrupted in it.

    Collective: every rank of the group must enter and leave. A body that contains collectives must
    not fail between them, unless a measurement is under way, and calls `checkpoint` before the
    first.
    """
    follower = _follower(group)
    follower.depth += 1
    error: BaseException | None = None
    try:
        yield
    except LockstepError:
        raise
    except BaseException as caught:  # raised by agree, after the other ranks know of it
        error = caught
    finally:
        follower.depth -= 1
    agree(error, doing, group, device, as_it_is)
