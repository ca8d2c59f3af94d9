"""The collectives of each rank on the job's TCP store, for ranks that have failed.

A thread on each rank checks, when the pass makes no progress, whether another rank requests the
record of its collectives (`ds_hessian.ranks.lockstep`); if so, it publishes that, and keeps it up
to date. Keys, below a prefix for the measurement:

    asked                           some rank needs the logs of others
    <pass>/<rank>/wanted            another rank needs this rank's log
    <pass>/<rank>/<segment>/<k>     the k-th collective of the rank in a segment
    <pass>/<rank>/<segment>/end     (how many there are, whether the rank finished the segment)
    <pass>/<rank>/meeting           how many figures the meeting has; None on a rank that has failed
    <pass>/<rank>/also/<k>          the k-th collective of several stages that it made for its peers
    <pass>/<rank>/followed          (all lines of its log, all of `also`), once it has followed
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ds_hessian.ranks.agreement import LockstepError, report
from ds_hessian.ranks.leaving import go_on, leave_together, tell_who_waits
from ds_hessian.ranks.passes import ABSENT, Pass
from ds_hessian.ranks.watch import ASKED, TICK, Watch

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds that a failed rank waits for news of another: NCCL's own timeout."""


class Log:
    """What the ranks of one measurement tell each other of their collectives.

    Args:
        rank: This rank.
        watch: The watch of the measurement.
        stage: The first rank of this rank's pipeline stage.
        current: Returns the pass that this rank is in.
    """

    def __init__(self, rank: int, watch: Watch, stage: int, current: Callable[[], Pass]) -> None:
        self.rank, self._watch, self._stage, self._current = rank, watch, stage, current
        self._posted: set[str] = set()
        self._wake, self._closing = threading.Event(), False
        self._publisher = threading.Thread(target=self._publish, name="ds_hessian", daemon=True)

    def start(self) -> None:
        """Begin to watch for requests."""
        self._publisher.start()

    def close(self, met: bool) -> None:
        """End the log.

        Args:
            met: Whether all ranks have met at the end, so that none reads it any more.
        """
        if self._publisher.ident is None:
            return
        self._closing = True
        self._wake.set()
        self._publisher.join()
        if not met:
            self._watch.lost()
            return
        for key in self._posted:
            self._watch.shared_store().delete_key(key)
        self._watch.close()

    def progress(self, current: Pass) -> None:
        """Take note that the pass has another collective or has ended a segment."""
        current.progress += 1
        if current.wanted:
            self._wake.set()

    def leave_together(self, current: Pass, ranks: int) -> None:
        """Wait until all ranks have come to the end of a body that the caller writes.

        Raises:
            LeftAlone: another rank goes on, or has failed.
        """
        leave_together(self._watch.shared_store(), current, self._stage, ranks, self._posted)

    # ---- of a rank that has failed

    def fail(self, current: Pass) -> None:
        """Say that this rank has failed, to those that wait for it at the end of a body."""
        go_on(self._store, current, self.rank, failed=True)
        self._posted.add(f"{current.number}/goes on")

    def post(self, current: Pass, value: object, *names: str | int) -> None:
        """Publish a value of this rank."""
        self._post(self._store, current.key(self.rank, *names), value)

    def ask(self, current: Pass, rank: int) -> None:
        """Request the log of a rank."""
        self._post(self._store, current.key(rank, "wanted"), None)
        self._post(self._store, ASKED, None)

    def read(self, current: Pass, rank: int, *names: str | int) -> Any:
        """Return a value of a rank, `ABSENT` if there is none yet."""
        key = current.key(rank, *names)
        return pickle.loads(self._store.get(key)) if self._store.check([key]) else ABSENT

    def wait(self, current: Pass, rank: int, *names: str) -> list[Any]:
        """Return values of a rank, or `ABSENT`, once there is one of them.

        The last one is read first.

        Raises:
            LockstepError: there is none for `PATIENCE` seconds.
        """
        deadline, pause, asked = time.monotonic() + PATIENCE, 0.0, False
        while time.monotonic() < deadline:
            found = [self.read(current, rank, name) for name in reversed(names)]
            if any(value is not ABSENT for value in found):
                return found[::-1]
            if not asked:
                self.ask(current, rank)
                asked = True
            time.sleep(pause)
            pause = min(pause + 5e-4, TICK / 4)
        raise LockstepError(f"no news of rank {rank} for {PATIENCE:.0f} s")

    @functools.cached_property
    def _store(self) -> dist.Store:
        """The store of the thread that measures, which needs one only where a rank has failed."""
        return self._watch.store("measuring")

    def _post(self, store: dist.Store, key: str, value: object) -> None:
        self._posted.add(key)
        store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # the stub says str

    # ---- the thread that publishes

    def _publish(self) -> None:
        """Publish the log if another rank follows it."""
        before: tuple[int, int] = (0, 0)
        try:
            while not self._closing:
                self._wake.wait(self._watch.pause)
                self._wake.clear()
                current = self._current()
                progress = (current.number, current.progress)
                if progress == before and self._watch.asked():
                    store, wanted = self._watch.store(), current.key(self.rank, "wanted")
                    current.wanted = current.wanted or store.check([wanted])
                    tell_who_waits(store, current, self._stage, self.rank)
                before = progress
                if current.wanted:
                    self._publish_new(current)
        except Exception as error:
            self._watch.lost()
            text = "the log of collectives cannot be published any more: %s"
            report(logger.error, text, error)

    def _publish_new(self, current: Pass) -> None:
        meeting, store = current.meeting, self._watch.store()  # before the segments: it is last
        for number, segment in enumerate(list(current.segments)):
            ended = segment.ended  # before the log's length: it does not grow any more
            while segment.published < len(segment.log):
                key = current.key(self.rank, number, segment.published)
                self._post(store, key, segment.log[segment.published])
                segment.published += 1
            if ended and not segment.announced:
                end = segment.published, segment.finished
                self._post(store, current.key(self.rank, number, "end"), end)
                segment.announced = True
        if meeting is not None and not current.announced:
            self._post(store, current.key(self.rank, "meeting"), meeting)
            current.announced = True
