"""The count of optimizer steps, where the training loop is the user's own."""

from __future__ import annotations

from collections.abc import Callable


class StepCount(int):
    """The number of optimizer steps made so far. Calling it counts one more.

        optimizer.step()
        hessian.step()          # counts, and takes the measurements that are due
        hessian.step            # how many steps there were

    It is pickled as a plain integer.
    """

    _made: Callable[[], None]

    @classmethod
    def of(cls, count: int, made: Callable[[], None]) -> StepCount:
        """Return a count whose call runs `made`."""
        found = cls(count)
        found._made = made
        return found

    def __call__(self) -> None:
        """Count one optimizer step. Collective where measurements are scheduled."""
        self._made()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)
