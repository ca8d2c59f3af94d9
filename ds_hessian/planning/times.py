"""Predicted time of a measurement, from the time of one gradient and plain figures.

The model is the paper's (section 5 and appendix C), with the figures of this implementation. With
g the time of one gradient over the slice's micro-batches, n_local the coordinates of a rank and B
the bandwidth of its memory,

    product       e g + r (bubble + reductions) + PRODUCT_BYTES n_local / B + PRODUCT_REDUCTIONS L
    Lanczos step  (STEP_BYTES + s (2 b + 2)) n_local / B + STEP_REDUCTIONS L
    measurement   g + products (product + Lanczos step)

where e are the gradients evaluated for a product (2 and what its trials cost; see
`ds_hessian.operators.expected_evaluations`) without what each run takes (`Run`), r the runs of the
host in which they are evaluated, L is the latency of a small all-reduce, s the bytes of a stored
coordinate and b the stored vectors to which a step is made orthogonal on average, which it reads
twice, and those of the recurrence once. Vectors that are stored elsewhere are read at
the bandwidth of the connection.

The paper counts two gradients for a product, in one run each, and no latency but those of small
all-reduces: that of the collectives of each block, in each micro-batch, is here in
`micro_batch` (`ds_hessian.planning.traffic`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_hessian.config import EXTRAPOLATED, HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.operators import expected_evaluations
from ds_hessian.planning import traffic
from ds_hessian.planning.job import Job
from ds_hessian.planning.machine import Machine
from ds_hessian.planning.mesh import Mesh
from ds_hessian.planning.share import Share
from ds_hessian.table import Table

PRODUCT_BYTES = 100
"""Read and written for a coordinate of a central difference: two displacements (28), sums of two
gradients (36), the difference (20), and its share of trials (16)."""

STEP_BYTES = 40
"""Bytes for the recurrence, the norm and the copy into the basis."""

PRODUCT_REDUCTIONS, STEP_REDUCTIONS = 11, 3
"""Small all-reduces: of a product with the trial that becomes part of it ten, and two more with a
third difference, which every second one has."""


@dataclass(frozen=True)
class Run:
    """A run of the host over some micro-batches: `seconds + (micro-batches + bubble) each`.

    Attributes:
        seconds: What it takes however many they are: gathering displaced weights, reducing
            gradients.
        bubble: Micro-batches in whose time it waits for the stages of a pipeline.
        group: Micro-batches that can only run together.
        costly: Whether products make few runs, as `Session.costly_runs` tells them.
    """

    seconds: float = 0.0
    bubble: float = 0.0
    group: int = 1
    costly: bool = False

    def over(self, micro_batches: float, each: float) -> float:
        """Return the seconds of a run over micro-batches of `each` seconds."""
        return self.seconds + (micro_batches + self.bubble) * each

    def each(self, micro_batches: int, seconds: float) -> float:
        """Return the seconds of a micro-batch, of a run that has taken `seconds`."""
        return max(seconds - self.seconds, 0.0) / (micro_batches + self.bubble)


@dataclass(frozen=True)
class TimePlan:
    """The predicted times of a measurement, in seconds on every rank.

    Attributes:
        gradient: One gradient over all micro-batches.
        evaluations: Gradients evaluated for a product, trials included.
        product: One product.
        lanczos: What is done with a product: a Lanczos step.
        products: Their number; at most, where an analysis may converge before.
        waiting: What a product waits for stages of a pipeline.
        running: What the runs of a product take for reductions and gathers of their own.
    """

    gradient: float
    evaluations: float
    product: float
    lanczos: float
    products: int
    waiting: float = 0.0
    running: float = 0.0

    @property
    def total(self) -> float:
        """The seconds of the whole measurement, with the gradient at the weights."""
        return self.gradient + self.products * (self.product + self.lanczos)

    def table(self) -> Table:
        """Return the times as text."""
        ratio = self.product / self.gradient
        parts = (
            ("of it, waiting for stages", self.waiting),
            ("of it, reductions and gathers of its runs", self.running),
        )
        rows = [
            ("gradient", spelled(self.gradient)),
            ("product", f"{spelled(self.product)} = {ratio:.3g} gradients"),
            *((f"  {what}", spelled(seconds)) for what, seconds in parts if seconds),
            ("Lanczos step beside it", spelled(self.lanczos)),
            (f"measurement, {self.products} products", spelled(self.total)),
        ]
        return Table("time:", rows)


def spelled(seconds: float) -> str:
    """Return seconds as readable text."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def plan_time(
    gradient: float,
    share: Share,
    machine: Machine,
    config: HessianConfig,
    products: int,
    run: Run = Run(),
) -> TimePlan:
    """Predict the times of a measurement whose products each become a Lanczos step.

    Args:
        gradient: Seconds of one gradient over the slice's micro-batches, in one run: forward and
            backward of the job on each of them, with the collectives that they make.
        share: The rank's part of the job.
        machine: This rank's.
        config: The settings.
        products: Their number.
        run: What a run takes beside its micro-batches. A product makes more runs than a gradient:
            one at each point, and where they are not costly the pilot and the rest are two.

    Raises:
        ConfigError: the micro-batches are no whole groups.
    """
    difference, count = config.finite_difference, config.num_micro_batches
    if count % run.group:
        raise ConfigError(
            f"the interleaved pipeline runs groups of {run.group} micro-batches, got {count}: "
            "set num_micro_batches to a multiple"
        )
    evaluations = expected_evaluations(
        products,
        count // run.group,
        difference.formula,
        difference.displacement,
        config.operator,
        one_sided=difference.tolerance is not None and difference.tolerance > EXTRAPOLATED,
        narrow=difference.precision == "model" and share.compute_dtype != torch.float32,
        costly_runs=run.costly and difference.tolerance is None,
    )
    each = run.each(count, gradient)
    waiting, running = evaluations.runs * run.bubble * each, evaluations.runs * run.seconds
    stored = 2 if config.basis.dtype == "bf16" else 4
    device = config.basis.device
    there = machine.bandwidth[share.tier if device == "accelerator" else device]
    basis = stored * _rows_read(config, products) * share.n_local / there
    second = machine.bandwidth[share.tier] / share.n_local  # bytes of a coordinate
    return TimePlan(
        gradient=gradient,
        evaluations=evaluations.gradients,
        product=evaluations.gradients * count * each
        + waiting
        + running
        + PRODUCT_BYTES / second
        + PRODUCT_REDUCTIONS * machine.latency,
        lanczos=basis + STEP_BYTES / second + STEP_REDUCTIONS * machine.latency,
        products=products,
        waiting=waiting,
        running=running,
    )


def _rows_read(config: HessianConfig, products: int) -> float:
    """Return how many stored vectors a step reads, on average."""
    settings, steps = config.reorthogonalization, min(config.num_matvecs, products)
    mean = (steps + 1) / 2
    if settings.mode != "full":
        mean = min(steps, settings.window if settings.mode != "none" else 2)
    return 2 * mean + min(2, mean)


def run_of(job: Job, machine: Machine) -> Run:
    """Return a run of a job: of the pipeline stage whose rank sends the most.

    Reductions wait for all micro-batches, and nothing of a run overlaps.
    """
    if job.mesh is None:
        return Run(traffic.of_run(job).seconds(machine))
    stages = range(job.mesh.pipeline)
    seconds = max(traffic.of_run(job, stage).seconds(machine) for stage in stages)
    costly = job.mesh.pipeline > 1 or job.mesh.data(job.world_size) > 1
    return Run(seconds, job.mesh.bubble, job.mesh.group, costly)


def operations(job: Job, tokens: int, stage: int = 0) -> float:
    """Return the floating-point operations of a rank for a micro-batch: forward, backward, and
    what is computed anew.

    Of a job whose model is known by its parameters alone: 6 for each of them and token, 8 where all
    layers are computed anew.

    Args:
        job: The job.
        tokens: Tokens of the micro-batch, those of all context-parallel ranks.
        stage: The pipeline stage.
    """
    mesh, shape = job.mesh or Mesh(), job.shape
    ranks = mesh.tensor * mesh.context
    if shape is None:
        times = 8.0 if job.recompute == "full" else 6.0
        return times * job.num_parameters * tokens / (ranks * mesh.pipeline)
    layers = mesh.layers(shape, stage)
    over_sequence = len(layers) * shape.of_attention
    forward = sum(map(shape.of_forward, layers)) + over_sequence
    anew = {"none": 0.0, "selective": over_sequence, "full": forward}[job.recompute]
    logits = shape.of_logits if stage == mesh.pipeline - 1 else 0.0
    return (3 * (forward + logits) + anew) * tokens / ranks


@dataclass(frozen=True)
class MicroBatch:
    """The seconds of a micro-batch's forward and backward, on the slowest pipeline stage.

    Attributes:
        computing: In operations.
        sending: In communication that no operations hide.
    """

    computing: float
    sending: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.sending


def micro_batch(
    job: Job, tokens: int, flops: float, machine: Machine, overlap: float = 0.0
) -> MicroBatch:
    """Predict the time of forward and backward of a micro-batch, where it has not been measured.

    Args:
        job: The job.
        tokens: Tokens of the micro-batch: of a rank, or of a rank's stages, tensor- and
            context-parallel ranks together.
        flops: Operations that a rank reaches in a second, not its peak.
        machine: This rank's.
        overlap: Share of the communication that operations hide; 0 is an upper bound.
    """
    found = [
        MicroBatch(
            operations(job, tokens, stage) / flops,
            (1 - overlap) * traffic.of_micro_batch(job, tokens, stage).seconds(machine),
        )
        for stage in range(1 if job.mesh is None else job.mesh.pipeline)
    ]
    return max(found, key=lambda stage: stage.seconds)
