"""Refusal of modules that cannot be measured, by name, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ds_hessian.backends.findings import Finding, findings, other_dtypes
from ds_hessian.errors import UnsupportedError


def wrappers(module: nn.Module) -> list[nn.Module]:
    """Return `DistributedDataParallel` and `torch.compile` around a model, outermost first."""
    found = list[nn.Module]()
    while True:
        inner = vars(module)["_modules"].get("_orig_mod")
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return found
        found.append(module)
        module = inner


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside its wrappers."""
    for wrapper in wrappers(module):
        inner = vars(wrapper)["_modules"]
        module = inner["module"] if "module" in inner else inner["_orig_mod"]
    return module


def refuse_unsupported(module: nn.Module) -> None:
    """Raise for a module on which products would be wrong or untested.

    The decision uses the modules' kinds alone, so every rank reaches the same one.

    Raises:
        UnsupportedError: names the feature, and what to do.
    """
    for name, present, remedy in _findings(module):
        if present:
            raise UnsupportedError(f"ds_hessian does not support {name}; {remedy}")


def _findings(module: nn.Module) -> Iterator[Finding]:
    kinds = {type(m).__name__ for m in module.modules()}
    parameters = list(module.parameters())
    yield (
        "parameters that ZeRO-3 has partitioned",
        any(hasattr(p, "ds_id") for p in parameters),
        "attach the engine",
    )
    yield (
        "an engine of deepspeed.init_inference",
        "InferenceEngine" in kinds,
        "attach the model before, or an engine of deepspeed.initialize",
    )
    instead = "use DistributedDataParallel, or DeepSpeed's ZeRO for a sharded model"
    yield "DataParallel", any(isinstance(m, DataParallel) for m in module.modules()), instead
    yield "FullyShardedDataParallel", "FullyShardedDataParallel" in kinds, instead
    yield (
        "parameters that are DTensors (FSDP2, tensor parallelism)",
        any(type(p.data).__name__ == "DTensor" for p in parameters),
        instead,
    )
    yield (
        "lazy modules that have seen no data",
        any(is_lazy(p) for p in parameters),
        "run a forward first",
    )
    yield from findings(module)
    others = other_dtypes(parameters)
    yield (
        f"trainable parameters in {' and '.join(others)}",
        bool(others),
        "measure a copy in fp32, copy.deepcopy(model).float(), on micro-batches in fp32",
    )
    yield (
        "a module without trainable parameters",
        not any(p.requires_grad for p in parameters),
        "set requires_grad",
    )
    inner = {id(m) for m in wrappers(module)}
    for m in module.modules():
        if not isinstance(m, DistributedDataParallel):
            continue
        yield (
            "DistributedDataParallel inside of a model",
            id(m) not in inner,
            "wrap the whole model",
        )
        yield (
            "mixed_precision of DistributedDataParallel",
            getattr(m, "mixed_precision", None) is not None,
            "use torch.autocast in loss_fn",
        )
        yield (
            "DistributedDataParallel over a part of the ranks",
            dist.get_world_size(m.process_group) != dist.get_world_size(),
            "start one job for each group",
        )
