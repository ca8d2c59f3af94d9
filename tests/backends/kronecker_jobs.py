"""What runs on the ranks: Kronecker factors of TinyGPT on real engines."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ds_hessian.errors import HessianError
from ds_hessian.operators.kronecker import Settings, estimate, find_layers
from tests.backends import jobs
from tests.nets import forward_hooks


def factors(zero: dict[str, Any], **config: Any) -> Any:
    """{layer: {kind: (values, left, right)}} of this rank's layers, and the samples of all."""
    engine = jobs.make_engine(zero=zero, hessian=jobs.QUIET, **config)
    hessian = engine.hessian.use(jobs.my_batches())
    backend = hessian.backend
    layers, _ = find_layers(backend, None)
    kinds = ("kfac", "ekfac", "shampoo", "klshampoo")
    with backend.measuring(hessian._objective) as session:
        found = estimate(session, backend, layers, Settings(kinds))
    engine.destroy()
    forms = {
        f.layer.name: {k: (v.values, v.left, v.right) for k, v in f.forms.items()} for f in found
    }
    return forms, [(f.layer.name, dict(f.samples), f.mismatch) for f in found]


def compared(zero: dict[str, Any], **config: Any) -> Any:
    """The record of all kinds after three steps of Adam, and the bits of training around it."""
    engine = jobs.make_engine(zero=zero, hessian=jobs.QUIET, **config)
    jobs._train(engine, range(3))
    hessian = engine.hessian.use(jobs.my_batches())
    kinds = ["kfac", "ekfac", "shampoo", "klshampoo", "adam"]
    record = hessian.kronecker(kinds, basis=6, probes=4, extremes=3)
    weights = jobs.full_weights(engine)
    engine.destroy()
    return weights, record


def failing(where: str) -> Any:
    """The error on this rank where a hook or a decomposition of rank 1 fails, then a success."""
    engine = jobs.make_engine(hessian=jobs.QUIET)
    hessian = engine.hessian.use(jobs.my_batches())
    weights, before = jobs.full_weights(engine), forward_hooks(engine.module)
    from ds_hessian.operators.kronecker import sums as module

    owner, name = {"hook": (module.KFAC, "note"), "eigh": (torch.linalg, "eigh")}[where]
    failing = mock.patch.object(owner, name, side_effect=OSError("on purpose"))
    error = ""
    try:
        with failing if dist.get_rank() == 1 else nullcontext():
            hessian.kronecker(["kfac"], basis=2, probes=2, extremes=0)
    except HessianError as found:
        error = str(found)
    again = hessian.kronecker(["kfac"], basis=2, probes=2, extremes=0)
    after = jobs.full_weights(engine)
    same = weights is None or all(torch.equal(weights[n], after[n]) for n in weights)
    hooks = forward_hooks(engine.module)
    engine.destroy()
    return error, same, again.cosines.tolist(), hooks == before
