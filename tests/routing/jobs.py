"""Hessians of models that route, in one process and on the ranks of an engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hessian
from tests.routing import models

QUIET = {"progress": False, "plot": False}
EXPERTS = ("eager", "batched_mm", "grouped_mm")
RECOMPUTE = ("", "reentrant", "not reentrant")


def recomputing(model: Any, recompute: str) -> Any:
    """The model with gradient checkpointing, of the kind that is named."""
    inner = getattr(model, "_orig_mod", model)
    if recompute:
        inner.gradient_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        inner.enable_input_require_grads()
    return model


def hessian_of(model: nn.Module, recompute: str = "") -> Any:
    """The Hessian of a plain model on the micro-batches."""
    hessian = ds_hessian.attach(recomputing(model, recompute), config=QUIET)
    return hessian.use(models.batches())


def mixtral_under_zero(zero: dict[str, Any], recompute: str = "") -> tuple[Tensor, Tensor, float]:
    """v, its product and the estimated error, in the order of the module's parameters."""
    from tests.backends.jobs import make_engine

    model: nn.Module = models.mixtral()
    names = [name for name, _ in model.named_parameters()]
    engine = make_engine(recomputing(model, recompute), zero=zero, hessian=QUIET)
    mine = models.batches()[dist.get_rank() :: dist.get_world_size()]
    hessian = engine.hessian.use(mine)
    v = hessian.random_vector(seed=1)
    product = hessian.matvec(v)
    flat = []
    for vector in (v, product.vector):
        full = hessian.gather(vector)
        parts = [full[name].reshape(-1) for name in names] if full is not None else []
        flat.append(torch.cat(parts) if parts else torch.zeros(0))
    engine.destroy()
    return flat[0], flat[1], float(product.error)


def engine_in_contexts(stage: int) -> list[tuple[Tensor, Tensor]]:
    """v and its product of an engine: plain, in `no_grad`, in `engine.no_sync()`, of a compiled
    model.
    """
    from tests.backends.jobs import make_engine, my_batches
    from tests.nets import TinyGPT

    out = []
    for name in ("", "no_grad", "no_sync", "compiled"):
        torch.manual_seed(0)
        module: Any = TinyGPT()
        if name == "compiled":
            module = torch.compile(module)
        engine = make_engine(module, zero={"stage": stage}, hessian=QUIET)
        contexts = {"no_grad": torch.no_grad, "no_sync": engine.no_sync}
        hessian = engine.hessian.use(my_batches())
        v = hessian.random_vector(seed=5)
        with contexts.get(name, torch.enable_grad)(), hessian.measuring(displacement=0.1):
            out.append((v, hessian.matvec(v).vector))
        engine.destroy()
    return out
