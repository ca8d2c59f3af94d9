"""What several hosts do not support: each has a name, whether it is there, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from ds_hessian.backends.decisions import in_backward
from ds_hessian.ops.checks import WEIGHTS

Finding = tuple[str, bool, str]


def backward_under_way() -> Finding:
    """Return the finding of hosts that collect gradients in the backward of the job itself."""
    return (
        "a call in a backward pass, as from a hook, whose gradients are under way",
        in_backward(),
        "call it after the backward",
    )


def findings(module: nn.Module) -> Iterator[Finding]:
    """Yield what hosts of plain modules do not support in them. Parameters and buffers of
    torch.jit's are no attributes of Python's.
    """
    yield (
        "sparse gradients",
        any(getattr(m, "sparse", False) is True for m in module.modules()),
        "make embeddings with sparse=False",
    )
    yield (
        "parameters on the meta device, which have no values",
        any(p.is_meta for p in module.parameters()),
        "load the weights first",
    )
    scripted = (m for m in module.modules() if isinstance(m, torch.jit.ScriptModule))
    name = next((type(m).__name__ for m in scripted), "")
    yield f"modules of torch.jit ({name})", bool(name), "use what was scripted or traced"


def sharing(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the names of two tensors of which each has memory of the other; "" without any."""
    extents = [(p.untyped_storage().data_ptr(), p.storage_offset(), p.numel(), n) for n, p in named]
    extents.sort()
    for (memory, begin, numel, name), (other, next_begin, _, next_name) in pairwise(extents):
        if memory == other and next_begin < begin + numel:
            return f"{name} and {next_name}"
    return ""


def other_dtypes(parameters: Iterable[nn.Parameter]) -> list[str]:
    """Return the dtypes of trainable parameters that cannot be displaced: fp64 and complex ones."""
    return sorted({str(p.dtype) for p in parameters if p.requires_grad and p.dtype not in WEIGHTS})
