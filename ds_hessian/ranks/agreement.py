"""Failing together: an exception on one rank becomes an exception on every rank.

A rank that raised alone would leave the others waiting in a collective. Ranks therefore *meet*:
in `agree`, which asks all of them how it went, and in `reduce`, which sums their figures. Code
between collectives that can fail on one rank only (the user's batches and files) runs inside
`together`, which ends in `agree`.

While a `ds_hessian.ranks.lockstep.Lockstep` is entered, a rank may fail anywhere, also between
collectives of the model: it first follows the others to the next meeting, and fails there. In
`reduce` it does so by adding NaN: sums that are not numbers make all ranks ask each other. A
reduction is so no larger and no more frequent than without failures.

Cost: one all-reduce for a meeting, and a gather of the messages where a rank has failed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.errors import HessianError, MeasurementError

T = TypeVar("T")
When = tuple[int, ...]


class Follower(Protocol):
    """What brings a rank that has failed to the next meeting of the others."""

    def arrive(
        self, error: BaseException | None, figures: int = 0
    ) -> tuple[BaseException | None, When]:
        """Before a meeting: `agree` (0 figures), or `reduce` of so many.

        A rank with an error follows the others to their next `agree`. Returns the rank's first
        error since the last meeting, and where it was, to be compared with other ranks' errors.
        """

    def depart(self) -> None:
        """After a meeting."""


class _Active(threading.local):
    follower: Follower | None = None


active = _Active()
"""The follower of this thread, while a measurement runs."""


def _follower(group: dist.ProcessGroup | None) -> Follower | None:
    return active.follower if group is None else None


class _Failure(NamedTuple):
    """What all ranks hear of a rank's error; ordered as the errors happened."""

    when: When
    rank: int
    doing: str
    message: str
    interrupt: bool


def agree(
    error: BaseException | None,
    doing: str,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    as_it_is: bool = False,
) -> None:
    """Return if no rank has an error; otherwise raise on all of them.

    The message names the lowest of the ranks that failed first; a later failure may be a
    consequence of theirs. A rank raises its own error if that is an interrupt, or if it is a
    `HessianError` and was first.

    Args:
        error: This rank's error.
        doing: What was tried, for the message: "while <doing>, rank 1: ...".
        group: The ranks that tried; None for the default group.
        device: Where the group's collectives take their tensors.
        as_it_is: Whether an error that all ranks have alike is raised as it is.

    Raises:
        MeasurementError: some rank has an error; where it does, that is the cause.
        KeyboardInterrupt: some rank was interrupted: its error is no `Exception`.

    Collective: every rank of the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if error is None:
            return
        if _interrupts(error) or as_it_is or isinstance(error, HessianError):
            raise error
        raise MeasurementError(f"while {doing}, {_said(error)}") from error
    follower, when = _follower(group), tuple[int, ...]()
    if follower is not None:
        error, when = follower.arrive(error)
    flag = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    found: list[_Failure | None] = []
    if flag.item():
        rank, interrupt = dist.get_rank(group), _interrupts(error)
        mine = None if error is None else _Failure(when, rank, doing, _said(error), interrupt)
        found = gather_objects(mine, group)
    if follower is not None:
        follower.depart()
    if found:
        _raise_first(found, error, when, as_it_is)


def _raise_first(
    found: Sequence[_Failure | None], error: BaseException | None, when: When, as_it_is: bool
) -> NoReturn:
    failed = [failure for failure in found if failure is not None]
    first = min(failed)
    if error is not None:
        alike = len(failed) == len(found) and len({failure.message for failure in failed}) == 1
        first_too = isinstance(error, HessianError) and when == first.when
        if _interrupts(error) or first_too or (alike and as_it_is):
            raise error
    text = f"while {first.doing}, rank {first.rank}: {first.message}"
    if any(failure.interrupt for failure in failed):
        raise KeyboardInterrupt(text) from error
    raise MeasurementError(text) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _interrupts(error: BaseException | None) -> bool:
    """Whether it is to end more than the measurement."""
    return error is not None and not isinstance(error, Exception)


def reduce(figures: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum fp64 `figures` `(k,)`, k > 0, over all ranks in one all-reduce; returned on the CPU.

    Args:
        figures: This rank's, where the group's collectives take their tensors; written to.
        group: The ranks that sum; None for the default group.

    Raises:
        MeasurementError: some rank has failed in the measurement that is under way; see `agree`.

    Collective: every rank of the group.
    """
    follower, error = _follower(group), None
    if follower is not None:
        error, _ = follower.arrive(None, figures.numel())
        if error is not None:
            figures.fill_(math.nan)
    dist.all_reduce(figures, group=group)
    if follower is not None:
        follower.depart()
    total = figures.cpu()
    if follower is not None and bool(total.isnan().any()):
        agree(error, "reducing figures", device=figures.device)
    return total


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's (small) value, by rank, the same list on all of them.

    Collective: every rank of the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found = [value] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class _Agreed(MeasurementError):
    """A failure of another rank that all ranks know of already."""


def checkpoint(
    doing: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> None:
    """Inside the body of `together`: go on only if no rank has failed so far.

    For bodies that contain collectives, or write what must not be written where a rank has failed.

    Raises:
        MeasurementError: some rank left the body with an exception before it came here.

    Collective: matches the end of `together` on the ranks that failed.
    """
    try:
        agree(None, doing, group, device)
    except MeasurementError as failure:
        raise _Agreed(str(failure)) from None


@contextmanager
def together(
    doing: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Run the body; if it raised on any rank, raise on all of them, as `agree` does.

    Args:
        doing: What the body does, for the message.
        group: The ranks that run the body; None for the default group.
        device: Where the group's collectives take their tensors.

    Raises:
        MeasurementError: the body raised on some rank; there, the original is the cause.
        KeyboardInterrupt: some rank was interrupted in it.

    Collective: every rank of the group must enter and leave. A body that contains collectives must
    not fail between them, unless a measurement is under way, and calls `checkpoint` before the
    first.
    """
    error: BaseException | None = None
    try:
        yield
    except _Agreed:
        raise
    except BaseException as caught:  # raised by agree, after the other ranks have been told
        error = caught
    agree(error, doing, group, device)
