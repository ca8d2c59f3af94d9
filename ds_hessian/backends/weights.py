"""Weights of two dims with the modules that have them, for hooks on their layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.names import checkpoint_name

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
        sequence: The ranks that have other tokens of the same micro-batches; None where each has
            micro-batches of its own.
        apart: Why it is no weight of a layer that sees tokens of its own; nothing if it is.
    """

    name: str
    module: nn.Module
    rows: Tensor | None = None
    columns: Tensor | None = None
    group: dist.ProcessGroup | None = None
    counts: bool = True
    master: Tensor | None = None
    sequence: dist.ProcessGroup | None = None
    apart: str = ""


def module_weights(
    root: nn.Module, parameters: Sequence[tuple[str, torch.Size]]
) -> Iterator[Weight]:
    """Yield the weights of the modules in one that is whole on this rank, or that is gathered."""
    known = {name for name, shape in parameters if len(shape) == 2}
    for path, module in root.named_modules():
        name = checkpoint_name(f"{path}.weight" if path else "weight")
        if name in known and "weight" in module._parameters:
            yield Weight(name, module)
