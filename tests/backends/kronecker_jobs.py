"""What runs on the ranks: Kronecker factors of TinyGPT on real engines."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ds_hessian.errors import HessianError
from ds_hessian.operators.kronecker import KeptFactors, Settings, estimate, find_layers
from tests.backends import jobs
from tests.nets import TinyGPT, batch, forward_hooks


def factors(zero: dict[str, Any], draws: int = 0, masked: int = 0, **config: Any) -> Any:
    """{layer: {kind: (values, left, right)}} of this rank's layers, and the samples of all; the
    first tokens of each sequence may have no label.
    """
    engine = jobs.make_engine(zero=zero, hessian=jobs.QUIET, **config)
    batches = [(x, y.index_fill(1, torch.arange(masked), -100)) for x, y in jobs.my_batches()]
    hessian = engine.hessian.use(batches)
    backend = hessian.backend
    layers, _ = find_layers(backend, None)
    kinds = ("kfac", "ekfac", "shampoo", "klshampoo")
    with backend.measuring(hessian._objective) as session:
        found = estimate(session, backend, layers, Settings(kinds, draws=draws))
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


def probing(stage: int) -> Any:
    """The cosine of K-FAC of a layer that alone is trained: passes for its factors have no gradient
    that the engine reduces."""
    torch.manual_seed(0)
    module = TinyGPT()
    for name, p in module.named_parameters():
        p.requires_grad_(name == "down.weight")
    engine = jobs.make_engine(module, {"stage": stage}, hessian=jobs.QUIET)
    record = engine.hessian.use(jobs.my_batches()).kronecker(
        ["kfac"], basis=2, probes=2, extremes=0
    )
    engine.destroy()
    return record.layers, float(record.cosines[0, 0])


def kept(stage: int, kind: str, steps: int = 3, **more: Any) -> Any:
    """The distance of the factors that an optimizer keeps from those of the gradients, or why they
    cannot be read."""
    module = TinyGPT()
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    config |= more
    if kind == "muon":
        config["optimizer"] = {"type": "muon", "params": {"lr": 1e-3}}
        zero = {"stage": stage, "reduce_scatter": False}
        engine = jobs.make_engine(module, zero, hessian=jobs.QUIET, **config)
    else:
        import pytorch_optimizer

        soap = pytorch_optimizer.SOAP(list(module.parameters()), lr=1e-3, shampoo_beta=0.9)
        engine = jobs.make_engine(module, {"stage": stage}, soap, hessian=jobs.QUIET, **config)
    seen: dict[str, list[Any]] = {}
    for i in range(steps):
        engine.backward(engine(*batch(100 + i, dist.get_rank())))
        for name, p in engine.module.named_parameters():
            if stage == 0 and p.ndim == 2 and p.grad is not None:
                seen.setdefault(name, []).append(p.grad.double())
        engine.step()
    hessian = engine.hessian.use(jobs.my_batches())
    read = KeptFactors(engine.optimizer, hessian.backend.weights())
    found = dict[str, float]()
    try:
        hessian.kronecker(["optimizer"], adapter=engine.optimizer, basis=2, probes=2, extremes=0)
        for name, gradients in seen.items():
            pair = read(name)
            if pair is None:  # of no module's weight
                continue
            sides = [sum(0.9 ** (steps - 1 - i) * 0.1 * g @ g.T for i, g in enumerate(gradients))]
            sides += [sum(0.9 ** (steps - 1 - i) * 0.1 * g.T @ g for i, g in enumerate(gradients))]
            sides[1] = sides[1] / sides[0].trace()
            for side, factor in zip(sides, pair, strict=True):
                assert factor is not None
                off = float((factor.double() - side).norm() / side.norm())
                found[name] = max(found.get(name, 0.0), off)
    except HessianError as error:
        return str(error)
    finally:
        engine.destroy()
    return found


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
