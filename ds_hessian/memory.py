"""Memory that a measurement needs beyond training's: named items in bytes per rank, and their sum.

Each part that holds memory (backend, operator, Krylov basis) says what, where and when, as `Item`s;
a `MemoryPlan` is all of them together. What is held in one stage of an analysis only, or in one
moment of a product or of a Lanczos step, shares its memory with what is held in another: the need
is the worst moment's.

Forward and backward themselves (activations, gathered parameters, gradients on their way) need what
they need in training, at most twice that in fp32 of a model in 16 bits, and are no item.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import psutil
import torch

from ds_hessian.table import Table

Tier = Literal["accelerator", "host", "disk", "resume"]
Moment = Literal["passes", "trials", "orthogonalization", "storing", "figures"]

TIERS: tuple[Tier, ...] = ("accelerator", "host", "disk", "resume")
"""`disk`: a basis' folder, of each node; `resume`: that of runs' states, which all ranks see."""
MOMENTS: tuple[Moment, ...] = ("passes", "trials", "orthogonalization", "storing", "figures")
"""Moments of a Lanczos step, in order: forward and backward passes, the comparison of two trials of
the displacement, Gram-Schmidt, and the writing of the next basis vector; and the working out of
figures, when no product is being made."""

FP32 = 4
"""Bytes of one coordinate of a vector."""

FP64 = 8
"""Bytes of a number in what is worked out in fp64."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which models compute, by the names that settings give them."""
NARROW = (torch.bfloat16, torch.float16)
"""Those in 16 bits."""


@dataclass(frozen=True)
class Item:
    """One entry of a plan.

    Attributes:
        name: Purpose of the memory.
        tier: Kind of memory or disk. Vectors of a job on the CPU are on the host.
        size: Bytes on this rank.
        moments: Moments in which it is held; empty for all of them.
        stage: Part of the analysis that holds it, such as `residuals`; none for all of it.
    """

    name: str
    tier: Tier
    size: int
    moments: tuple[Moment, ...] = ()
    stage: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a measurement needs on one rank beyond training's.

    Attributes:
        items: The entries of the plan.
        passes: The precision of the passes, and why it was chosen, in words; empty where the
            settings name it.
    """

    items: tuple[Item, ...]
    passes: str = ""

    @classmethod
    def of(cls, *parts: Iterable[Item], passes: str = "") -> MemoryPlan:
        """Return the plan of some parts' items; empty ones are left out."""
        return cls(tuple(item for part in parts for item in part if item.size), passes)

    def peak(self, tier: Tier) -> int:
        """Return the bytes in one tier, in the worst moment of the worst stage."""
        here = [item for item in self.items if item.tier == tier]
        return max(
            sum(
                item.size
                for item in here
                if item.stage in ("", stage) and (not item.moments or moment in item.moments)
            )
            for stage in {item.stage for item in here} | {""}
            for moment in MOMENTS
        )

    def table(self) -> Table:
        """Return items and sums as text."""
        peaks = [Item(f"peak on the {tier}", tier, self.peak(tier)) for tier in TIERS]
        rows = [
            (item.name, f"{shown(item.size):>10}", f"{item.tier:<11}", when(item))
            for item in [*self.items, *(item for item in peaks if item.size)]
        ]
        head = "memory per rank beyond training's, whose recomputation of activations is repeated:"
        return Table("\n".join([*filter(None, [self.passes]), head]), rows)


def in_stage(stage: str, items: Iterable[Item]) -> list[Item]:
    """Return the items, marked as held in one stage only."""
    return [replace(item, stage=stage) for item in items]


def when(item: Item) -> str:
    """Return an item's stage and moments, in words."""
    moments = ", ".join(item.moments)
    return f"{item.stage}: {moments}" if item.stage and moments else item.stage or moments


def free_on(device: torch.device) -> int:
    """Return the bytes that are free on a device, or on the host for the CPU; what torch has cached
    on an accelerator counts as free.
    """
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    module = torch.get_device_module(device)
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


def passes_memory(device: torch.device) -> int:
    """Return the bytes of activations, gathered weights and gradients on their way that passes have
    needed so far at most: the job's highest peak over what is held now. 0 on the CPU, where it is
    not known.
    """
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device) - module.memory_allocated(device))


def tier_of(device: torch.device) -> Tier:
    """Return where tensors on a device are stored."""
    return "host" if device.type == "cpu" else "accelerator"


def shown(size: int) -> str:
    """Return a number of bytes as short text."""
    for unit, bytes_ in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size / 2**10:.3g} KiB"
