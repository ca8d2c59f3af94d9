"""Predicted time of a measurement, from the time of one gradient and plain figures.

The model is the paper's (section 5 and appendix C), with the figures of this implementation. With
g the time of one gradient over the slice's micro-batches, n_local the coordinates of a rank and B
the bandwidth of its memory,

    product       e g + PRODUCT_BYTES n_local / B + PRODUCT_REDUCTIONS L
    Lanczos step  (STEP_BYTES + 3 s r) n_local / B + STEP_REDUCTIONS L
    measurement   g + products (product + Lanczos step)

where e are the gradients evaluated for a product (2 and what its trials cost; see
`ds_hessian.operators.expected_evaluations`), L is the latency of a small all-reduce, s the bytes of
a stored coordinate and r the mean number of stored vectors. Vectors that are stored elsewhere are
read at the bandwidth of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ds_hessian.config import EXTRAPOLATED, HessianConfig
from ds_hessian.memory import Tier
from ds_hessian.operators import expected_evaluations
from ds_hessian.planning.share import Share
from ds_hessian.table import Table

PRODUCT_BYTES = 100
"""Read and written for a coordinate of a central difference: two displacements (28), sums of two
gradients (36), the difference (20), and its share of trials (16)."""

STEP_BYTES = 40
"""Bytes for the recurrence, the norm and the copy into the basis."""

PRODUCT_REDUCTIONS, STEP_REDUCTIONS = 4, 3


@dataclass(frozen=True)
class Machine:
    """Bandwidths and latency of one rank's machine.

    Attributes:
        bandwidth: Bytes a second from each tier to where the rank computes.
        latency: Seconds of a small all-reduce over all ranks.
    """

    bandwidth: Mapping[Tier, float]
    latency: float


ACCELERATOR = Machine({"accelerator": 2e12, "host": 20e9, "disk": 2e9}, latency=50e-6)
"""An A100 or better, its PCIe and a local NVMe drive."""

CPU = Machine({"accelerator": 8e9, "host": 8e9, "disk": 1e9}, latency=300e-6)
"""A rank that has one core, and gloo."""


@dataclass(frozen=True)
class TimePlan:
    """The predicted times of a measurement, in seconds on every rank.

    Attributes:
        gradient: One gradient over all micro-batches.
        evaluations: Gradients evaluated for a product, trials included.
        product: One product.
        lanczos: What is done with a product: a Lanczos step.
        products: Their number; at most, where an analysis may converge before.
    """

    gradient: float
    evaluations: float
    product: float
    lanczos: float
    products: int

    @property
    def total(self) -> float:
        """The seconds of the whole measurement, with the gradient at the weights."""
        return self.gradient + self.products * (self.product + self.lanczos)

    def table(self) -> Table:
        """Return the times as text."""
        ratio = self.product / self.gradient
        rows = [
            ("gradient", spelled(self.gradient)),
            ("product", f"{spelled(self.product)} = {ratio:.3g} gradients"),
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
) -> TimePlan:
    """Predict the times of a measurement whose products each become a Lanczos step.

    Args:
        gradient: Seconds of one gradient over the slice's micro-batches: forward and backward of
            the job on each of them, with the collectives that they make.
        share: The rank's part of the job.
        machine: This rank's.
        config: The settings.
        products: Their number.
    """
    difference = config.finite_difference
    evaluations = expected_evaluations(
        products,
        config.num_micro_batches,
        difference.formula,
        difference.displacement,
        config.operator,
        one_sided=difference.tolerance is not None and difference.tolerance > EXTRAPOLATED,
    )
    stored = 2 if config.basis.dtype == "bf16" else 4
    device = config.basis.device
    there = machine.bandwidth[share.tier if device == "accelerator" else device]
    basis = 3 * stored * _mean_rows(config, products) * share.n_local / there
    second = machine.bandwidth[share.tier] / share.n_local  # bytes of a coordinate
    return TimePlan(
        gradient=gradient,
        evaluations=evaluations,
        product=evaluations * gradient
        + PRODUCT_BYTES / second
        + PRODUCT_REDUCTIONS * machine.latency,
        lanczos=basis + STEP_BYTES / second + STEP_REDUCTIONS * machine.latency,
        products=products,
    )


def _mean_rows(config: HessianConfig, products: int) -> float:
    """Return the number of stored vectors that a step reads, on average."""
    mode, steps = config.reorthogonalization.mode, min(config.num_matvecs, products)
    if mode == "full":
        return (steps + 1) / 2
    return min(steps, config.reorthogonalization.window if mode != "none" else 2)


def gradient_seconds(
    num_parameters: int,
    tokens: int,
    flops: float,
    *,
    traffic: float = 0.0,
    network: float | None = None,
) -> float:
    """Predict the time of forward and backward on one micro-batch, where it has not been measured.

    6 floating-point operations for each parameter and token, and the collectives after them: no
    overlap, so an upper bound where there is some.

    Args:
        num_parameters: Parameters that a token meets (of a mixture of experts the active ones).
        tokens: Tokens in a rank's micro-batch.
        flops: Operations that a rank reaches in a second, not its peak.
        traffic: Bytes that a rank sends for a micro-batch.
        network: Bytes a second; None where it does not matter.
    """
    return 6.0 * num_parameters * tokens / flops + (traffic / network if network else 0.0)


def traffic_of(stage: int, num_parameters: int, world_size: int, weight_bytes: int) -> float:
    """Return the bytes that a rank sends for a micro-batch, by rings.

    ZeRO-3 gathers the weights for the forward and again for the backward, and scatters the sums of
    the gradients; stages 1 and 2 and plain data parallelism reduce them.
    """
    times = {0: 2.0, 1: 2.0, 2: 1.0, 3: 3.0}[stage]
    return times * num_parameters * weight_bytes * (world_size - 1) / world_size
