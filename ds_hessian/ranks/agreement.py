"""Failing together: an exception on one rank becomes an exception on every rank.

A rank that raised alone would leave the others waiting in a collective. Code between collectives
that can fail on one rank only (the user's batches and files) therefore runs inside `together`,
which asks all ranks how it went before anyone goes on. Code that itself contains collectives needs
more: see `ds_hessian.ranks.lockstep`.

Cost: one all-reduce of an integer, and a gather of the messages where a rank has failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from ds_hessian.errors import HessianError, MeasurementError

T = TypeVar("T")


def agree(
    error: Exception | None,
    doing: str,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    when: tuple[int, ...] = (),
) -> None:
    """Return if no rank has an error; otherwise raise on all of them.

    The message names the lowest of the ranks that failed first; a later failure may be a
    consequence of theirs. A rank whose own error is a `HessianError` raises that, if it was first.

    Args:
        error: This rank's error.
        doing: What was tried, for the message: "while <doing>, rank 1: ...".
        group: The ranks that tried; None for the default group.
        device: Where the group's collectives take their tensors.
        when: Orders this rank's error among those of the others.

    Raises:
        MeasurementError: some rank has an error; where it does, that is the cause.

    Collective: every rank of the group.
    """
    message = None if error is None else f"{type(error).__name__}: {error}"
    first = when
    if dist.is_available() and dist.is_initialized():
        flag = torch.tensor([int(error is not None)], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if not flag.item():
            return
        found = gather_objects((when, message), group)
        failed = [(*each, rank) for rank, each in enumerate(found) if each[1] is not None]
        first, message, rank = min(failed, key=lambda each: (each[0], each[2]))
        message = f"rank {rank}: {message}"
    if message is None:
        return
    if isinstance(error, HessianError) and when == first:
        raise error
    raise MeasurementError(f"while {doing}, {message}") from error


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

    For bodies that contain collectives: placed before the first of them, it keeps a rank that
    failed earlier from leaving the others waiting there.

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

    Collective: every rank of the group must enter and leave. A body that contains collectives must
    not fail between them, and calls `checkpoint` before the first.
    """
    error: Exception | None = None
    try:
        yield
    except _Agreed:
        raise
    except Exception as caught:  # re-raised by agree, after the other ranks have been told
        error = caught
    agree(error, doing, group, device)
