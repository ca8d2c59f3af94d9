"""What the benchmarks of live engines share: a plain gradient, and the peak of memory.

Once it is imported, so can be the scripts of `examples/`, and the nets of the tests.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]


def plain_gradient(engine: Any, batches: list[Any]) -> float:
    """Seconds of one gradient as training makes it, forward and backward, without a step."""
    started = time.perf_counter()
    for batch in batches:
        engine.set_gradient_accumulation_boundary(batch is batches[-1])
        engine.backward(engine(*batch))
    engine.optimizer.zero_grad()
    engine.set_gradient_accumulation_boundary(None)
    return time.perf_counter() - started


def peak_bytes() -> int:
    """The most that this process has had resident (`ru_maxrss` begins with its parent's)."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])
