"""What runs on the ranks: users' own code that fails on one of them, in every analysis."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ds_hessian.ranks import gather_objects
from tests.backends.jobs import my_batches, same
from tests.faults import jobs

ANALYSES: dict[str, Callable[[Any], Any]] = {
    "spectrum": lambda h: h.spectrum(num_matvecs=2),
    "eigenpairs": lambda h: h.eigenpairs(1, tol=0.5),
    "trace": lambda h: h.trace(num_probes=2),
    "solve": lambda h: h.solve(h.random_vector(), damping=10.0, tol=0.5),
    "sharpness": lambda h: h.sharpness(tol=0.5),
    "block_spectra": lambda h: h.block_spectra(num_matvecs=2),
    "block_coupling": lambda h: h.block_coupling(num_matvecs=2),
    "kronecker": lambda h: h.kronecker(),
    "alignment": lambda h: h.alignment(num_matvecs=2),
    "curvatures": lambda h: h.curvatures(num_matvecs=2),
    "decomposition": lambda h: h.decomposition(num_matvecs=2),
    "displacement_sweep": lambda h: h.displacement_sweep(),
}


def _raise(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind("injected")

    return fail


PLACES = ("loss", "hook", "gradient", "batches")
"""Where user code runs."""

ACTS: dict[str, Callable[[], None]] = {
    **{kind.__name__: _raise(kind) for kind in (MemoryError, KeyboardInterrupt, StopIteration)},
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
"""What user code does: raises, or its process gets a signal."""


def _handler(number: int, frame: Any) -> None:
    """As of a script that saves at the next step."""


def run(name: str, place: str, call: int, act: str) -> tuple[str, int, bool]:
    """Do something on rank 1 in the `call`-th call of the loss, or of a hook of the model; returns
    the error, how often it was called, and whether training's state is as before.
    """
    host, calls, error = jobs.here(), 0, ""
    hessian, before = host.attach(), host.state()

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == call and dist.get_rank() == 1:
            ACTS[act]()

    def loss(model: Any, micro_batch: Any) -> Any:
        if place == "loss":
            count()
        found = model(*micro_batch)
        if place == "gradient":
            found.register_hook(lambda _: count())
        return found

    def batches() -> Iterator[Any]:
        for each in my_batches()[:2]:
            if place == "batches":
                count()
            yield each

    hook = next(m for m in host.module.modules() if isinstance(m, torch.nn.Linear))
    handle = hook.register_forward_hook(lambda *_: count() if place == "hook" else None)
    old = signal.signal(signal.SIGTERM, _handler)
    try:
        hessian.use(batches(), loss)
        ANALYSES[name](hessian)
    except BaseException as caught:
        error = f"{jobs.name_of(caught)}: {caught}"
    finally:
        signal.signal(signal.SIGTERM, old)
        handle.remove()
    return error, calls, all(gather_objects(same(before, host.state())))
