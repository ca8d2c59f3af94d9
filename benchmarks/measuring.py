"""What the benchmarks share: a plain gradient, a product by double backward, the peak of memory.

Once it is imported, so can be the scripts of `examples/`, and the nets of the tests.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]


Vectors = dict[str, Tensor]


def loss_of(model: Any, batch: Any) -> Tensor:
    """The loss that a model returns, or has as `.loss` of its output, for a mapping."""
    loss: Tensor = model(**batch).loss if isinstance(batch, dict) else model(*batch)
    return loss


def plain_gradient(engine: Any, batches: list[Any], step: bool = False) -> float:
    """Seconds of one gradient as training makes it, forward and backward, and perhaps a step."""
    started = time.perf_counter()
    for batch in batches:
        engine.set_gradient_accumulation_boundary(batch is batches[-1])
        engine.backward(loss_of(engine, batch))
        if step:
            engine.step()
    engine.optimizer.zero_grad()
    engine.set_gradient_accumulation_boundary(None)
    return time.perf_counter() - started


def exact_product(net: nn.Module, batches: list[Any], v: Vectors, loss: Any = loss_of) -> Vectors:
    """H v of the mean loss of the micro-batches, by double backward."""
    names, parameters = zip(*net.named_parameters(), strict=True)
    total = [torch.zeros_like(p) for p in parameters]
    for batch in batches:
        with sdpa_kernel(SDPBackend.MATH):
            gradient = torch.autograd.grad(loss(net, batch), parameters, create_graph=True)
        inner = sum((g * v[n].to(g.dtype)).sum() for n, g in zip(names, gradient, strict=True))
        for out, part in zip(total, torch.autograd.grad(inner, parameters), strict=True):
            out += part / len(batches)
    return dict(zip(names, total, strict=True))


def norm(v: Vectors) -> float:
    """Euclidean, in fp64."""
    return float(torch.stack([part.double().square().sum() for part in v.values()]).sum().sqrt())


def relative_error(found: Vectors, exact: Vectors) -> float:
    """The norm of the difference over that of the exact one."""
    return norm({n: found[n].double() - e for n, e in exact.items()}) / norm(exact)


def give_back_freed_memory() -> None:
    """Let the allocator give freed memory back at once, so that what is resident is in use."""
    mmap_threshold = -3  # malloc.h
    assert ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 18) == 1


def peak_since_here() -> int:
    """The peak so far; it begins anew at what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """The most that this process has had resident (`ru_maxrss` begins with its parent's)."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])
