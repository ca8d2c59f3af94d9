"""The end of a body that the caller writes: ranks leave it together, or learn of who has not.

In `with hessian.measuring():` one rank may `break` out of a loop of products that the others go on
with. It would meet them in another collective than theirs. So before ranks meet at the end of such
a body, they wait for each other on the job's store, where nothing is taken for anything else.

Keys, below those of `ds_hessian.ranks.log`:

    <pass>/left         how many ranks have come to the end
    <pass>/all left     all have
    <pass>/leaving      one that waits: its stage, and how many collectives and segments it has made
    <pass>/goes on      (a rank that has made more, or has failed; whether it has failed)

Cost while all leave: one request of each rank, and some until the last one has come.
"""

from __future__ import annotations

import pickle
import time

import torch.distributed as dist

from ds_hessian.errors import MeasurementError
from ds_hessian.ranks.passes import Pass
from ds_hessian.ranks.watch import ASKED, REQUESTS, TICK

PATIENCE = 600.0
"""Seconds after which a rank goes to the meeting nevertheless, which has a timeout of its own."""


class LeftAlone(MeasurementError):
    """This rank has come to the end of a body that another one does not come to.

    Attributes:
        follows: Whether that is because the other one has failed, whose error it then is.
    """

    def __init__(self, other: int, follows: bool) -> None:
        why = "has failed in it" if follows else "goes on in it"
        super().__init__(
            f"this rank has left measuring(), rank {other} {why}: all ranks must make the same "
            "products, and leave it together"
        )
        self.follows = follows


def leave_together(
    store: dist.Store, current: Pass, stage: int, ranks: int, posted: set[str]
) -> None:
    """Wait until all ranks have come to the end of the body.

    Args:
        store: The measurement's part of the store.
        current: The pass.
        stage: The first rank of this rank's pipeline stage.
        ranks: The number of ranks.
        posted: The keys that this rank removes in the end; those that it is to remove are added.

    Raises:
        LeftAlone: another rank goes on, or has failed.
    """
    keys = {name: f"{current.number}/{name}" for name in ("left", "all left", "leaving", "goes on")}
    current.left = True
    began, asked = time.monotonic(), False
    pause, longest = min(TICK, ranks / REQUESTS), max(TICK, ranks / REQUESTS)
    if store.add(keys["left"], 1) == ranks:
        posted.update(keys.values())
        store.set(keys["all left"], "")
        return
    while not store.check([keys["all left"]]) and time.monotonic() < began + PATIENCE:
        if asked and store.check([keys["goes on"]]):
            raise LeftAlone(*pickle.loads(store.get(keys["goes on"])))
        if not asked and time.monotonic() > began + TICK:
            mine = stage, len(current.lines), len(current.segments)
            store.set(keys["leaving"], pickle.dumps(mine))  # type: ignore[arg-type]  # says str
            store.set(ASKED, pickle.dumps(None))  # type: ignore[arg-type]
            asked = True
            posted.update([*keys.values(), ASKED])
        time.sleep(pause)
        pause = min(2 * pause, longest)


def tell_who_waits(store: dist.Store, current: Pass, stage: int, rank: int) -> None:
    """Say that this rank goes on, if one waits at the end of a body for it.

    Args:
        store: The measurement's part of the store.
        current: The pass of this rank.
        stage: The first rank of its pipeline stage.
        rank: This rank.
    """
    key = f"{current.number}/leaving"
    if current.left or not store.check([key]):
        return
    other, lines, segments = pickle.loads(store.get(key))
    more = len(current.segments) > segments or current.meeting is not None
    if more or (stage == other and len(current.lines) > lines):
        go_on(store, current, rank)


def go_on(store: dist.Store, current: Pass, rank: int, failed: bool = False) -> None:
    """Say that this rank does not come to the end of the body."""
    value = pickle.dumps((rank, failed))
    store.set(f"{current.number}/goes on", value)  # type: ignore[arg-type]  # the stub says str
