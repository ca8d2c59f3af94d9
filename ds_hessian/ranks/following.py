"""A rank that has failed makes the collectives that the others still wait for, with zeros.

It reads the logs of its peers (`ds_hessian.ranks.log`) in the order of ranks, up to the first that
finished the segment: all that finish make the same collectives. If none does, it has seen the
longest log. All of the stage have failed then, and ranks of other stages may wait for it in groups
that they share (Megatron sums the gradients of tied embeddings so): it makes what they began there,
in the order in which each of them did.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ds_hessian.ranks.agreement import LockstepError
from ds_hessian.ranks.collectives import (
    EXCHANGES,
    OTHERS,
    ROOTED,
    SHARED_MEMORY,
    TO_ONE,
    Collective,
    Kind,
    exchanged,
    groups_across,
    shared_kind,
    with_root,
)
from ds_hessian.ranks.log import PATIENCE, Log
from ds_hessian.ranks.passes import ABSENT, Elsewhere, Pass, Segment
from ds_hessian.ranks.watch import TICK


class Following:
    """What a failed rank does for the others in a measurement.

    Args:
        log: The log of the measurement.
        peers: The ranks of the same pipeline stage.
        meshed: Whether the groups are a mesh, as `ds_hessian.ranks.collectives.mesh_of` returns it.
        communication: DeepSpeed's communication object; None where there is none.
        device: The device of the tensors of the job's collectives.

    All methods raise `LockstepError` for what cannot be followed.
    """

    def __init__(
        self,
        log: Log,
        peers: Sequence[int],
        meshed: bool,
        communication: object,
        device: torch.device,
    ) -> None:
        self.rank, self._log, self._peers, self._meshed = log.rank, log, peers, meshed
        self._communication, self._device = communication, device

    def to_end(self, current: Pass) -> int | None:
        """Make the collectives of peers in the last segment; return a peer that finished it."""
        number, segment = len(current.segments) - 1, current.segment
        self._log.post(current, (len(segment.log), False), number, "end")
        segment.announced = True
        for collective in segment.log[segment.made :]:  # the one that raised
            self._replay(segment, collective)
        for leader in self._peers:
            if leader != self.rank and self._follow_one(current, number, leader):
                return leader
        return None

    def to_meeting(self, current: Pass) -> int:
        """Take part in the rest of the pass; return the number of figures of its meeting."""
        current.end(finished=False)
        self._log.fail(current)
        self._log.post(current, None, "meeting")
        leader = self.to_end(current)
        while leader is not None and self._has_another(current, leader):
            current.begin()
            current.end(finished=False)
            leader = self.to_end(current)
        lines = sum(len(segment.log) for segment in current.segments)
        self._log.post(current, (lines, len(current.followed)), "followed")
        if leader is None:
            self._follow_stages(current)
        return self._meeting(current)

    def _has_another(self, current: Pass, leader: int) -> bool:
        """Return whether a rank has another segment, or may have: it has not come to the meeting.

        It may have without this one, where it waits for no collective before (`async_op`).
        """
        if self._log.read(current, leader, "meeting") is ABSENT:
            return True
        return self._log.read(current, leader, len(current.segments), "end") is not ABSENT

    def _meeting(self, current: Pass) -> int:
        """Return the number of figures of the meeting of the ranks that have not failed."""
        peers = frozenset(self._peers)
        for rank in sorted(range(dist.get_world_size()), key=lambda rank: rank not in peers):
            if rank != self.rank:
                (found,) = self._log.wait(current, rank, "meeting")
                if found is not None:
                    return int(found)
        return 0

    def _follow_one(self, current: Pass, number: int, leader: int) -> bool:
        """Make the collectives of `leader` in the segment; return whether it finished this."""
        segment = current.segments[number]
        while True:
            collective, finished = self._line(current, leader, number, segment.made)
            if collective is None:
                return finished
            group = collective.own_group(self._meshed)
            ranks = dist.get_process_group_ranks(group)
            collective = collective.of(group)
            if collective.name in ROOTED:
                collective = with_root(collective, ranks.index(self.rank))
            elif collective.name in EXCHANGES:
                each = [
                    None if r == self.rank else self._line(current, r, number, segment.made)[0]
                    for r in ranks
                ]
                collective = exchanged(each, ranks.index(self.rank))
            if not set(ranks) <= set(self._peers):  # ranks of other stages look for it
                self._log.post(current, collective, "also", len(current.followed))
                current.followed.append(collective)
            self._replay(segment, collective)

    def _follow_stages(self, current: Pass) -> None:
        """Make the collectives in which ranks of other stages wait for this one.

        All ranks of its own stage have failed, before they came to these.
        """
        shared = groups_across(self._peers)
        own = [line for segment in current.segments for line in segment.log]
        made = Counter(shared_kind(line, self.rank, shared) for line in [*own, *current.followed])
        others = {
            rank: Elsewhere(functools.partial(self._log.read, current, rank))
            for rank in sorted({rank for ranks in shared.values() for rank in ranks})
            if rank not in self._peers
        }
        for rank in others:
            self._log.ask(current, rank)
        deadline = time.monotonic() + PATIENCE
        waiting = dict[tuple[Kind, int], Collective]()
        while (others or waiting) and time.monotonic() < deadline:
            for rank, other in list(others.items()):
                for line in other.news():
                    deadline = time.monotonic() + PATIENCE
                    kind = shared_kind(line, rank, shared)
                    other.counts[kind] += 1
                    if kind is not None and self.rank in kind.ranks:
                        if other.counts[kind] > made[kind]:
                            waiting.setdefault((kind, other.counts[kind]), line)
                if other.over:
                    del others[rank]
            for (kind, number), line in list(waiting.items()):
                # Not before all have come to it: one may wait for this rank in another group.
                there = all(others[r].counts[kind] >= number for r in kind.ranks if r in others)
                if there and number == made[kind] + 1:
                    made[kind] = number
                    del waiting[kind, number]
                    if line.name in ROOTED:
                        line = with_root(line, kind.ranks.index(self.rank))
                    self._replay(current.segment, line, named=True)
            time.sleep(TICK / 20)
        if others:
            named = ", ".join(map(str, others))
            raise LockstepError(f"no news of the ranks {named} for {PATIENCE:.0f} s")

    def _line(
        self, current: Pass, rank: int, number: int, k: int
    ) -> tuple[Collective | None, bool]:
        """Return the k-th collective of a rank in a segment, once the rank has begun it.

        Once the rank has left the segment with fewer, return None, and whether it has finished the
        segment.
        """
        while True:
            found = self._log.wait(current, rank, f"{number}/{k}", f"{number}/end", "meeting")
            collective, end, meeting = found
            if collective is not ABSENT:
                return collective, False
            if end is not ABSENT and k >= end[0]:
                return None, bool(end[1])
            if end is ABSENT and meeting is not ABSENT:  # the pass has ended before
                return None, meeting is not None
            if end is not ABSENT:  # of a rank that has failed: its log comes when it is asked for
                self._log.wait(current, rank, f"{number}/{k}")

    def _replay(self, segment: Segment, collective: Collective, named: bool = False) -> None:
        """Take part in a collective with zeros; the result is dropped.

        Args:
            segment: The segment.
            collective: The collective, as another rank has recorded it.
            named: Whether it is of the very group of that rank.
        """
        name = collective.name
        try:
            if name in TO_ONE and named:
                raise LockstepError("another stage waits for what this rank was to send or receive")
            if name in OTHERS or (named and name in EXCHANGES):
                raise LockstepError("its sizes are known to each rank alone")
            group = collective.own_group(self._meshed, named)
            args, kwargs = collective.arguments(self._device)
            if name == SHARED_MEMORY:
                getattr(self._communication, name)(*args, group=group)
            else:
                work = getattr(group, name)(*args, **kwargs)
                if work is not None:
                    work.wait()
        except Exception as error:
            raise LockstepError(f"{name}, number {segment.made} of the step: {error}") from error
        segment.made += 1
