"""Failing together: an exception on one rank becomes an exception on every rank.

A rank that raised alone would leave the others waiting in a collective. Code between collectives
that can fail on one rank only (the user's batches, model and loss, memory) therefore runs inside
`together`, which asks all ranks how it went before anyone goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ds_hessian.errors import HessianError, MeasurementError


def first_failure(
    error: BaseException | None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> str | None:
    """The lowest failing rank's error as text, the same on every rank; None if no rank failed.

    Collective: one all-reduce of a flag, and a gather of the messages if it is set.
    """
    message = None if error is None else f"{type(error).__name__}: {error}"
    if not (dist.is_available() and dist.is_initialized()):
        return message
    flag = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if not flag.item():
        return None
    messages: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    return next(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None)


class _Agreed(MeasurementError):
    """A failure of another rank that all ranks know of already."""


def checkpoint(
    doing: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> None:
    """Inside the body of `together`: go on only if no rank has failed so far.

    For bodies that themselves contain collectives: placed before the first of them, it keeps a rank
    that failed earlier from leaving the others waiting there.

    Raises:
        MeasurementError: some rank left the body with an exception before it came here.

    Collective: matches the end of `together` on the ranks that failed.
    """
    failure = first_failure(None, group, device)
    if failure is not None:
        raise _Agreed(f"while {doing}, {failure}")


@contextmanager
def together(
    doing: str, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Iterator[None]:
    """Run the body; if it raised on any rank, raise on all of them.

    A rank whose own error is a `HessianError` raises that.

    Args:
        doing: What the body does, for the message: "while <doing>, rank 1: ...".
        group: The ranks that run the body; None for the default group.
        device: Where the group's collectives take their tensors.

    Raises:
        MeasurementError: the body raised on some rank; there, the original is the cause.

    Collective: every rank of the group must enter and leave.
    """
    error: Exception | None = None
    try:
        yield
    except _Agreed:
        raise
    except Exception as caught:  # re-raised below, after the other ranks have been told
        error = caught
    failure = first_failure(error, group, device)
    if failure is None:
        return
    if isinstance(error, HessianError):
        raise error
    raise MeasurementError(f"while {doing}, {failure}") from error
