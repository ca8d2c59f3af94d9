"""Calls that all ranks make: a failure on one of them, wherever it is, ends the call on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ds_hessian.defaults import own_defaults
from ds_hessian.ranks.agreement import active
from ds_hessian.ranks.entrance import Given
from ds_hessian.ranks.lockstep import Lockstep


@contextmanager
def left_together() -> Iterator[None]:
    """Run a body that the caller writes in an open measurement, and leave it on all ranks or none.

    Raises:
        MeasurementError: other ranks go on in it where this one has left it without an error.

    Collective, where it ends without an error.
    """
    yield
    active.follower.finish()


@contextmanager
def collective(
    doing: str, device: torch.device | str, as_it_is: bool = True, given: Given = dict
) -> Iterator[None]:
    """Run the body, which may contain collectives, in a lockstep of all ranks.

    Inside of another such call, or of a measurement, it adds nothing. A measurement in it has a
    lockstep of its own, which knows its host.

    Args:
        doing: The action of the body, for the message.
        device: The device of the tensors of the job's collectives.
        as_it_is: Whether an error that all ranks share is raised unchanged.
        given: Returns what all ranks must give alike, by name.

    Raises:
        ConfigError: ranks make different calls, or differ in what they give.
        MeasurementError: the body raised on some rank. A `HessianError` is raised as it is on the
            rank that was first.
        KeyboardInterrupt: some rank was interrupted in it.

    Collective.
    """
    with own_defaults():
        if active.follower.follows:
            yield
            return
        entered = Lockstep(torch.device(device), doing=doing, given=given)
        with entered as lockstep, lockstep.whole(doing, as_it_is):
            yield
