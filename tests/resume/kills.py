"""Jobs that are killed again and again, and started again, until they end."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import torch

from tests.ranks import context
from tests.resume import jobs


def start(folder: Path, number: int, kind: str) -> list[Any]:
    """Two ranks of a job of their own."""
    arguments = (str(folder / f"meeting{number}"), str(folder / "state"), str(folder / "out"), kind)
    processes = [
        context().Process(target=jobs.rank, args=(r, 2, *arguments), daemon=True) for r in range(2)
    ]
    for process in processes:
        process.start()
    return processes


def while_writing(folder: Path, number: int) -> None:
    """Kill a job of one rank between writing and renaming its file `number`."""
    process = context().Process(target=jobs.killed_while_writing, args=(str(folder), number))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def until_the_end(folder: Path, kind: str, times: int) -> tuple[list[int], Any]:
    """Kill a job so many times (kill -9), anywhere in a product or in writing its state.

    Returns the generations of its state at each kill, and what it found in the end.
    """
    draw, state, reached = random.Random(0), folder / "state", list[int]()
    for number in range(times):
        processes, before = start(folder, number, kind), jobs.newest(state)[0]
        wanted, limit = before + draw.randrange(3), time.monotonic() + 60
        while jobs.newest(state)[0] < wanted and time.monotonic() < limit:
            assert all(p.exitcode in (None, 0) for p in processes)
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        reached.append(jobs.newest(state)[0])
        assert reached[-1] >= before  # nothing that was kept is lost
    for process in start(folder, times, kind):
        process.join(120)
        assert process.exitcode == 0
    return reached, torch.load(folder / "out", weights_only=False)
