"""The memory of the guard of a Megatron job, from plain figures: no chunks, no ranks.

Weights are restored from the optimizer's fp32 masters, and need no copy where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hessian.backends.protocol import Precision
from ds_hessian.memory import FP32, Item, Tier


@dataclass(frozen=True)
class MegatronFigures:
    """Figures of one rank of a Megatron job.

    Attributes:
        whole: Parameters of the rank's layers, which it gathers for its passes.
        alone: Bytes of the weights in the rank's vectors that have no fp32 master.
        narrow: Whether training's passes compute in bf16.
        tier: The memory that holds vectors and runs the passes.
        received: Whether other ranks keep masters of those weights, of which there are copies then.
    """

    whole: int
    alone: int
    narrow: bool
    tier: Tier
    received: bool = False


def memory_of_megatron(job: MegatronFigures, precision: Precision = "model") -> list[Item]:
    """Return the items of a session of a `MegatronBackend`.

    Args:
        job: Its figures.
        precision: The precision of the passes; see `finite_difference.precision`.
    """
    if not (precision == "fp32" and job.narrow):
        wide = 2 if job.received else 1  # in fp32 of weights in bf16
        return [Item("weights as they were", job.tier, wide * job.alone)]
    return [
        Item("weights in fp32", job.tier, FP32 * job.whole),
        Item("weights as they were", job.tier, 2 * job.alone),  # those in fp32
    ]
