"""What a rank sends and receives between the segments of a call that it may make once more.

Between two steps of a pipeline's schedule a rank sends and receives what other stages wait for, so
one that fails there cannot leave. It runs its schedule again from the beginning: what the first
attempt has begun is passed over, since the others have it, and what comes after it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from ds_hessian.ranks.agreement import LockstepError
from ds_hessian.ranks.collectives import TO_ONE, Collective

T = TypeVar("T")


class Between:
    """The operations of two ranks that one call makes between segments, in their order."""

    def __init__(self) -> None:
        self._begun: list[_Exchange] = []
        self._next = 0
        self._others = False

    @property
    def known(self) -> bool:
        """Whether all that the call has made can be passed over: nothing but what one rank sends
        another, and nothing that has raised, of which it is not known whether it was sent.
        """
        return not self._others and all(each.made for each in self._begun)

    def rewind(self) -> None:
        """Begin the next attempt."""
        self._next = 0

    def make(self, line: Collective, args: Sequence[Any], method: Callable[[], T]) -> T:
        """Make an operation, or pass over one that an earlier attempt has made.

        Args:
            line: Its description.
            args: Its arguments: for `TO_ONE`, a list of tensors first.
            method: Makes it.

        Raises:
            LockstepError: an earlier attempt has made another one here.
        """
        self._next += 1
        if self._next <= len(self._begun):
            return cast(T, self._begun[self._next - 1].passed(line, args[0]))
        if line.name not in TO_ONE:
            self._others = True
            return method()
        for each in self._begun:
            each.forget()
        self._begun.append(_Exchange(line))
        work = method()
        self._begun[-1].note(work, args[0])
        return work


class _Exchange:
    """One operation.

    Attributes:
        made: Whether it has begun.
    """

    def __init__(self, line: Collective) -> None:
        self._line, self.made = line, False
        self._work: dist.Work | None = None
        self._integers: list[Tensor | None] = []

    def note(self, work: Any, tensors: Sequence[Tensor]) -> None:
        """Take note of it. Of what it sends and receives, integers are kept, which are shapes:
        what a schedule computes of activations in a second attempt is dropped.
        """
        self._work, self.made = work, True
        self._integers = [None if t.is_floating_point() else t for t in tensors]

    def forget(self) -> None:
        """Let go of what has come, as the schedule does."""
        if self._work is not None and self._work.is_completed():
            self._work = None

    def passed(self, line: Collective, tensors: Sequence[Tensor]) -> _Passed:
        """Return what the attempt waits for, and give it the integers that were received."""
        before, now = ((each.name, each.group, each.args[1]) for each in (self._line, line))
        if before != now:
            raise LockstepError(f"{before} is {now} in the second attempt")
        self.forget()
        return _Passed(self._work, tensors, self._integers)


class _Passed:
    """What an attempt waits for in place of an operation that an earlier one has made."""

    def __init__(
        self, work: dist.Work | None, tensors: Sequence[Tensor], integers: Sequence[Tensor | None]
    ) -> None:
        self._work, self._pairs = work, list(zip(tensors, integers, strict=True))

    def wait(self) -> bool:
        """Wait for the operation, and copy what it has received."""
        if self._work is not None:
            self._work.wait()
        for tensor, integers in self._pairs:
            if integers is not None:
                tensor.copy_(integers)
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._work is None or self._work.is_completed()
