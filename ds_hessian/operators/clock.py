"""The time of a gradient."""

from __future__ import annotations

import time

from torch import Tensor

from ds_hessian.backends.protocol import Session


def add_gradient(session: Session, out: Tensor, micro_batches: range) -> float:
    """Add the gradient terms of these units to `out` `(n_local,)`; return the seconds until they
    are there. Collective.
    """
    started = time.perf_counter()
    session.add_gradient(out, micro_batches)
    out[:1].cpu()  # an accelerator computes on after the call: a copy to the host waits for it
    return time.perf_counter() - started
