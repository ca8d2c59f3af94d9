"""What a rank sends for a micro-batch, and for a run over some of them: messages and bytes.

Collectives are rings: a gather or a scatter over d ranks sends (d - 1) / d of the whole, an
all-reduce twice that.

Of a micro-batch:

    ZeRO          stage 3 gathers the weights for forward and backward and scatters the sums of the
                  gradients, block by block; hpZ gathers for the backward within its ranks; stage 2
                  reduces the gradients
    tensor        two all-reduces of activations in a layer's forward, two in its backward, as many
                  bytes with sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053,
                  section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2)
    context       keys and values once around the ring in forward, and they and their gradients in
                  backward
    expert        two all-to-alls of the routed tokens in forward, two in backward
    pipeline      activations to the next stage and gradients to the one before, for each virtual
                  stage
    recomputation of all layers repeats what their forward sends

Of a run: the reduction of the gradients (stage 2 and 3 of ZeRO have made it), and the gather of
displaced weights where ranks share them out (stages 1 and 2, the distributed optimizer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_hessian.backends.zero.memory import ZERO_BUCKET
from ds_hessian.memory import FP32
from ds_hessian.planning.job import Job
from ds_hessian.planning.machine import Machine
from ds_hessian.planning.mesh import Mesh
from ds_hessian.planning.shape import Shape

MEGATRON_BUCKET = 40_000_000
"""Gradients that Megatron reduces at a time, at least; a million for each data-parallel rank
(distributed/distributed_data_parallel.py)."""

SMALL = 3
"""Reductions of a number for each token in the parallel cross entropy: the maximum, the logit of
the label, the sum of exponentials (tensor_parallel/cross_entropy.py)."""


@dataclass(frozen=True)
class Traffic:
    """What one rank sends.

    Attributes:
        messages: Collectives and messages, each with its latency.
        far: Bytes over the network between nodes.
        near: Bytes over that inside a node, where tensor- and context-parallel ranks are.
        host: Bytes between a rank's accelerator and its host.
    """

    messages: float = 0.0
    far: float = 0.0
    near: float = 0.0
    host: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.messages + other.messages,
            self.far + other.far,
            self.near + other.near,
            self.host + other.host,
        )

    def seconds(self, machine: Machine) -> float:
        """Return the time of all of it, one after the other."""
        networks = self.far / machine.network + self.near / machine.node_network
        return self.messages * machine.latency + networks + self.host / machine.bandwidth["host"]


def ring(ranks: int) -> float:
    """Return the share of the whole that a rank sends in a gather or a scatter."""
    return (ranks - 1) / ranks


def of_micro_batch(job: Job, tokens: int, stage: int = 0) -> Traffic:
    """Return what a rank of a pipeline stage sends for a micro-batch of so many tokens."""
    if job.mesh is None:
        return _of_zero(job)
    if job.shape is None:  # nothing is known of activations
        return Traffic()
    return _of_layers(job, job.mesh, job.shape, tokens, stage)


def _of_zero(job: Job) -> Traffic:
    size, share = job.num_parameters * job.weight_bytes, ring(job.world_size)
    local = size / job.world_size
    moved = 2.0 * local if job.offload_parameters else 0.0
    if job.offload_optimizer and job.stage > 0:
        moved += local  # gradients
    if job.stage == 2:
        number = math.ceil(job.num_parameters / ZERO_BUCKET)
        return Traffic(number if share else 0.0, share * size, 0.0, moved)
    if job.stage < 3 or not share:
        return Traffic(host=moved)
    blocks = 0 if job.shape is None else job.shape.layers + 2  # and embedding and output
    near = ring(job.secondary) * size
    far = (2 if job.secondary > 1 else 3) * share * size
    return Traffic(3.0 * blocks, far, near, moved)


def _of_layers(job: Job, mesh: Mesh, shape: Shape, tokens: int, stage: int) -> Traffic:
    mine = tokens / mesh.context
    activation = mine * shape.hidden * job.weight_bytes
    layers = mesh.layers(shape, stage)
    first, last = stage == 0, stage == mesh.pipeline - 1
    forwards = 2 if job.recompute == "full" else 1
    split = mesh.tensor if mesh.sequence_parallel else 1
    found = Traffic()
    if mesh.tensor > 1:
        number = len(layers) * (2 * forwards + 2) + first + last
        messages = number * (2 if mesh.sequence_parallel else 1) + SMALL * last
        found += Traffic(messages, near=number * 2 * ring(mesh.tensor) * activation)
    if mesh.context > 1:
        number = len(layers) * (mesh.context - 1) * (forwards + 2)
        found += Traffic(
            number, near=number * 2 * shape.keys / mesh.tensor * mine * job.weight_bytes
        )
    routed = sum(shape.has_experts(layer) for layer in layers)
    if mesh.expert > 1 and routed:
        number = routed * (2 * forwards + 2)
        each = shape.active * activation / split * ring(mesh.expert)
        found += Traffic(number, far=number * each)
    if mesh.pipeline > 1:
        # The last chunk sends nothing on, the first nothing back.
        number = 2 * mesh.virtual - first - last
        found += Traffic(number, far=number * activation / split)
    return found


def of_run(job: Job, stage: int = 0) -> Traffic:
    """Return what a rank of a pipeline stage sends for a run, whatever its micro-batches."""
    if job.mesh is None:
        return _of_zero_run(job)
    mesh, found = job.mesh, Traffic()
    ranks = mesh.copies(job.world_size), mesh.sharers(job.world_size)
    for number, copies, sharers in zip(job.on_rank(mesh, stage), *ranks, strict=True):
        if copies > 1 and number:
            buckets = math.ceil(number / max(MEGATRON_BUCKET, 1_000_000 * copies))
            if sharers > 1:  # a scatter of gradients, and the gather of the weights
                found += Traffic(2 * buckets, ring(sharers) * number * (FP32 + job.weight_bytes))
            others = copies // sharers  # have the same share: an all-reduce
            if others > 1:
                found += Traffic(buckets, ring(others) * number / sharers * 2 * FP32)
    ends = stage in (0, mesh.pipeline - 1)
    if mesh.pipeline > 1 and ends and job.shape is not None and job.shape.tied:
        embedding = job.shape.vocabulary * job.shape.hidden / mesh.tensor
        found += Traffic(1, embedding * FP32)
    if mesh.sequence_parallel:
        found += Traffic(1)  # the gradients of norms, which are small
    return found


def _of_zero_run(job: Job) -> Traffic:
    size, share = job.num_parameters * job.weight_bytes, ring(job.world_size)
    direction = FP32 * job.num_parameters / job.world_size if job.offload_parameters else 0.0
    if not share:
        return Traffic(host=direction)
    buckets = math.ceil(job.num_parameters / ZERO_BUCKET)
    sent = {
        0: Traffic(buckets, 2 * share * size),
        1: Traffic(2 * buckets, 3 * share * size),
        2: Traffic(buckets, share * size),
        3: Traffic(),
    }[job.stage]
    return sent + Traffic(host=direction)
