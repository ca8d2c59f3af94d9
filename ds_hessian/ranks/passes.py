"""What a rank records of its collectives: segments, and passes of segments between two meetings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from ds_hessian.ranks.collectives import Collective, Kind

ABSENT = object()
"""What is not on the store."""


class Segment:
    """The collectives of one rank in one segment.

    Attributes:
        log: The collectives that the rank began.
        made: The number of them that did not raise.
        published: The number of them that are on the store.
        ended: Whether the rank has left the segment.
        finished: Whether it left without an exception.
        announced: Whether its end is on the store.
    """

    def __init__(self) -> None:
        self.log: list[Collective] = []
        self.made = self.published = 0
        self.ended = self.finished = self.announced = False


class Pass:
    """The segments of one rank in one pass.

    Attributes:
        progress: A counter of collectives and segments.
        wanted: Whether another rank follows this one.
        meeting: The number of figures of the meeting at its end; None before it.
        announced: Whether the meeting is on the store.
        error: The error by which the rank failed in a segment, and its position.
        followed: The collectives of several stages that the rank has made for its peers.
        left: Whether the rank has come to the end of a body that the caller writes.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments = [Segment()]
        self.progress, self.wanted = 0, False
        self.meeting: int | None = None
        self.announced = False
        self.error: tuple[BaseException, tuple[int, ...]] | None = None
        self.followed: list[Collective] = []
        self.left = False

    @property
    def lines(self) -> list[Collective]:
        """The collectives that the rank began in all segments."""
        return [line for segment in list(self.segments) for line in list(segment.log)]

    @property
    def segment(self) -> Segment:
        """The last segment."""
        return self.segments[-1]

    def end(self, finished: bool) -> None:
        """Leave the last segment."""
        self.segment.finished, self.segment.ended = finished, True

    def begin(self) -> None:
        """Enter another segment."""
        self.segments.append(Segment())
        self.progress += 1

    def key(self, rank: int, *names: str | int) -> str:
        """Return a key of the store; the module's docstring lists them."""
        return "/".join(map(str, (self.number, rank, *names)))


class Elsewhere:
    """The pass of a rank of another stage, as far as the store has it.

    Args:
        read: Returns the value of a key of the rank's pass, or `ABSENT`.

    Attributes:
        counts: How many of its collectives of each kind have been read.
        over: Whether there are no more.
    """

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._segment = self._number = self._lines = self._also = 0
        self.counts: Counter[Kind | None] = Counter()
        self.over = False

    def news(self) -> list[Collective]:
        """Return the collectives that have come since."""
        meeting, followed = self._read("meeting"), self._read("followed")  # which come last
        found = []
        while True:
            line = self._read(self._segment, self._number)
            if line is not ABSENT:
                found.append(line)
                self._number, self._lines = self._number + 1, self._lines + 1
                continue
            end = self._read(self._segment, "end")
            if end is ABSENT or self._number < end[0]:
                break
            self._segment, self._number = self._segment + 1, 0
        while (line := self._read("also", self._also)) is not ABSENT:
            found.append(line)
            self._also += 1
        if meeting is not ABSENT:
            self.over = meeting is not None or followed == (self._lines, self._also)
        return found
