"""What runs on the ranks: spectra with a fault on one of them, and what is left afterwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.errors import HessianError
from ds_hessian.ranks import gather_objects
from tests.backends.jobs import QUIET, make_engine, my_batches, same
from tests.faults.tracer import Site, Tracer
from tests.nets import batch

_engine: Any = None
_expected: Any = None


def begin(zero: dict[str, Any], settings: dict[str, Any], **config: Any) -> dict[Site, int]:
    """Make an engine, train it two steps, and count the calls of a spectrum on this rank."""
    global _engine, _expected
    if _engine is not None:
        _engine.destroy()
    _engine = make_engine(zero=zero, hessian={**QUIET, **settings}, **config)
    for step in range(2):
        _engine.backward(_engine(*batch(step, dist.get_rank())))
        _engine.step()
    _expected = spectrum()
    with Tracer() as tracer:
        spectrum()
    return dict(tracer.sites)


def loss(model: Any, micro_batch: Any) -> Tensor:
    """The user's code."""
    return model(*micro_batch)


def spectrum() -> Any:
    """A short one; what of it must be bitwise the same."""
    found = _engine.hessian_spectrum(my_batches()[:2], loss, num_matvecs=2)
    return found.ritz_values[0].tolist(), found.weights[0].tolist(), found.loss


def state() -> Any:
    """What training goes on with."""
    backend = _engine.hessian.backend
    shards, pieces = backend.shards, backend.pieces
    inner = getattr(_engine.optimizer, "optimizer", _engine.optimizer)
    return [
        [m.clone() for m in map(shards.master, pieces) if m is not None],
        [shards.weight(piece).clone() for piece in pieces],
        [p.data.clone() for p in _engine.module.parameters()],
        [t.clone() for s in inner.state.values() for t in s.values() if torch.is_tensor(t)],
        [b.clone() for b in _engine.module.buffers()],
        (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
        (_engine.global_steps, _engine.micro_steps, _engine.global_samples),
        [m.training for m in _engine.module.modules()],
        [p.grad is None for p in _engine.module.parameters()],
    ]


def train_inside(method: str) -> tuple[str, bool, str]:
    """Call a method of the engine in a measurement on rank 1, as a handler of preemption would.

    Returns the error, whether training's state is as before, and what the method is afterwards.
    """
    before, error, hessian = state(), "", _engine.hessian.use(my_batches()[:1], loss)
    try:
        with hessian.measuring():
            hessian.matvec(hessian.random_vector(seed=0))
            if dist.get_rank() == 1:
                getattr(_engine, method)("nowhere")
            hessian.matvec(hessian.random_vector(seed=1))
    except HessianError as caught:
        error = str(caught)
    return error, same(before, state()), type(getattr(_engine, method)).__name__


def fail(site: Site, number: int, kind: str, rank: int) -> tuple[str, bool, bool, bool]:
    """A spectrum in which a call fails on one rank.

    Returns the error ("" for none), whether it was raised at all on this rank, whether training's
    state is as before on all, and whether the next spectrum, if it is, is the right one.
    """
    before, error = state(), ""
    with Tracer((site, number, kind) if dist.get_rank() == rank else None) as tracer:
        try:
            spectrum()
        except BaseException as caught:
            error = f"{type(caught).__name__}: {caught}"
    kept = all(gather_objects(same(before, state())))
    return error, tracer.raised, kept, not kept or spectrum() == _expected
