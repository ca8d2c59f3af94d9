"""Weights of two dims with the modules that have them, for hooks on their layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.names import checkpoint_name
from ds_hessian.ops.checks import WEIGHTS

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights with which layers compute as they are; others are stored forms."""


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype with the largest unit roundoff among those with which layers compute."""
    found = {dtype for dtype in dtypes if dtype in COMPUTED}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


@dataclass(frozen=True)
class Weight:
    """A weight of two dims, as this rank has it.

    Attributes:
        name: Its checkpoint name.
        module: The module that has it.
        rows: Rows of the unsharded weight that this rank has, in the order of its own; None for
            all.
        columns: The same for columns.
        group: The tensor-parallel ranks that have the others; None where every rank has all.
        counts: False on all but one of the ranks that see the same tokens.
        master: What the optimizer steps in its place, of its shape; None where that is the weight,
            or flat parts of many.
    """

    name: str
    module: nn.Module
    rows: Tensor | None = None
    columns: Tensor | None = None
    group: dist.ProcessGroup | None = None
    counts: bool = True
    master: Tensor | None = None


def module_weights(
    root: nn.Module, parameters: Sequence[tuple[str, torch.Size]]
) -> Iterator[Weight]:
    """Yield the weights of the modules in one that is whole on this rank, or that is gathered."""
    known = {name for name, shape in parameters if len(shape) == 2}
    for path, module in root.named_modules():
        name = checkpoint_name(f"{path}.weight" if path else "weight")
        if name in known and "weight" in module._parameters:
            yield Weight(name, module)


def findings(module: nn.Module) -> Iterator[tuple[str, bool, str]]:
    """Yield what hosts of plain modules do not support in them: its name, whether it is there, and
    what to do. Parameters and buffers of torch.jit's are no attributes of Python's.
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
