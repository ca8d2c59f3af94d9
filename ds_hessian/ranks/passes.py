"""What a rank records of its collectives: segments, and passes of segments between two meetings."""

from __future__ import annotations

from ds_hessian.ranks.collectives import Collective


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
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.segments = [Segment()]
        self.progress, self.wanted = 0, False
        self.meeting: int | None = None
        self.announced = False
        self.error: tuple[BaseException, tuple[int, ...]] | None = None

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
