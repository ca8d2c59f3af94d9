"""The memory of the guard of a ZeRO job, from plain figures: no engine, no ranks.

The weights need no copy where they are the rounded masters, from which they are written back. Only
after a user's edit of either, which is detected when the measurement begins, they are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hessian.backends.protocol import Precision
from ds_hessian.memory import FP32, Item, Tier

ZERO_BUCKET = 500_000_000
"""Gradients that ZeRO reduces at a time (`reduce_bucket_size` of DeepSpeed's zero/config.py)."""


@dataclass(frozen=True)
class ZeroFigures:
    """Figures of one rank of a ZeRO job.

    Attributes:
        stage: 0 to 3.
        n: Trainable parameters of the model, or of its part under tensor parallelism.
        n_local: Coordinates in this rank's vectors.
        weight_bytes: Size of one weight in the dtype of the passes.
        narrow: Whether training's passes compute in 16 bits.
        gradient_bytes: Size of one gradient in the partition that accumulates them.
        has_masters: Whether the optimizer keeps fp32 masters (not at stage 0 in fp32).
        tier: The memory that holds vectors and runs the passes.
        offloads_optimizer: True with `offload_optimizer` to the CPU.
        offloads_parameters: True with `offload_param` to the CPU.
        whole_gradients: True for `BF16_Optimizer`, with whole fp32 gradients on every rank.
        bucket: Elements of the buffer in which stage 3 reduces gradients.
    """

    stage: int
    n: int
    n_local: int
    weight_bytes: int
    narrow: bool
    gradient_bytes: int
    has_masters: bool
    tier: Tier
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    whole_gradients: bool = False
    bucket: int = 0


def memory_of_zero(job: ZeroFigures, precision: Precision = "model") -> list[Item]:
    """Return the items of a session of a `ZeroBackend`.

    What passes hold beyond their end is training's; of a model in 16 bits they hold twice as much
    in fp32 (weights that are gathered, activations), which is not among the items.

    Args:
        job: Its figures.
        precision: The precision of the passes; see `finite_difference.precision`.
    """
    near, vector = job.tier, FP32 * job.n_local
    masters: Tier = "host" if job.offloads_optimizer else near
    weights: Tier = "host" if job.offloads_parameters else near
    items = []
    if not job.has_masters:
        items.append(Item("weights as they were", weights, job.weight_bytes * job.n_local))
    elif masters != weights:
        items.append(Item("masters beside the weights", weights, vector))
    if weights != near:
        items.append(Item("direction beside the weights", weights, vector, ("passes",)))
    pending = job.gradient_bytes * job.n_local if job.stage == 3 else 0
    if job.whole_gradients:
        pending = FP32 * job.n
    items.append(Item("training's gradients, saved", masters, pending))
    if job.offloads_optimizer:
        items.append(Item("training's offloaded gradients, saved", "host", vector))
    if precision == "fp32" and job.narrow:
        copied = job.n_local if job.stage == 3 else job.n
        items.append(Item("weights in fp32", weights, FP32 * copied))
        if job.stage == 3:
            items.append(Item("gradients in fp32", masters, vector))
            # The system gives memory as it is written, an accelerator as it is asked for.
            bucket = min(job.bucket, job.n) if near == "host" else job.bucket
            items.append(Item("gradients being reduced, in fp32", near, FP32 * bucket))
    return items
