"""`ds-hessian plan`: memory, time and price of a measurement of a job that need not exist yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hessian.analyses import Analysis, analysis_of
from ds_hessian.config import SECTION, HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import MemoryPlan, Tier, shown
from ds_hessian.planning import (
    ACCELERATOR,
    CPU,
    Job,
    Machine,
    Needs,
    activations,
    chosen,
    in_words,
    needs_of,
    plan,
    precision_of,
    shortage,
    times,
    way_out,
)

GIB = 2**30

UNMEASURED = "note: Megatron jobs with context parallelism are planned, but not measured yet"


def described(job: Job) -> str:
    """Return a job in one line."""
    ranks = f"{job.world_size} rank{'s' if job.world_size > 1 else ''}"
    kind = "" if job.accelerator else " of the CPU"
    also = [
        name
        for name, there in (
            ("optimizer offloaded", job.offload_optimizer),
            ("parameters offloaded", job.offload_parameters),
            (f"secondary copies on {job.secondary} ranks", job.secondary > 1),
            (f"recomputation {job.recompute}", job.recompute != "none"),
        )
        if there
    ]
    host = f"ZeRO-{job.stage}" if job.mesh is None else f"Megatron ({job.mesh})"
    words = [f"{job.num_parameters:,} parameters, {host} in {job.dtype} on {ranks}{kind}", *also]
    return ", ".join(words)


@dataclass(frozen=True)
class Passes:
    """Figures of a micro-batch's forward and backward; None where one is not known.

    Attributes:
        seconds: Measured: of one micro-batch, on the slowest stage of a pipeline.
        tokens: Tokens in a micro-batch of a data-parallel rank.
        tflops: 1e12 floating-point operations that a rank reaches in a second.
        overlap: Share of the communication of a micro-batch that operations hide.
    """

    seconds: float | None = None
    tokens: int | None = None
    tflops: float | None = None
    overlap: float = 0.0

    def of(self, job: Job, machine: Machine) -> times.MicroBatch | None:
        """Return the time of a micro-batch; None if nothing is known.

        Raises:
            ConfigError: `tokens` without `tflops`, or the reverse.
        """
        if self.seconds is not None:
            return times.MicroBatch(self.seconds, 0.0)
        if self.tokens is None and self.tflops is None:
            return None
        if self.tokens is None or self.tflops is None:
            raise ConfigError("--tokens and --tflops estimate the time together: give both")
        return times.micro_batch(job, self.tokens, 1e12 * self.tflops, machine, self.overlap)


@dataclass(frozen=True)
class Forecast:
    """The memory, time and price of a measurement.

    Attributes:
        job: The job.
        analysis: Name of the method of `Hessian`.
        memory: On the rank that needs the most, beyond training's.
        held: Bytes of the activations of training's passes; None where they are not known.
        each: Time of a micro-batch; None where nothing is known of the passes.
        time: None where nothing is known of the passes.
        price: Price of all ranks; None without time or a price of an hour.
        missing: Settings that would fit where the plan does not; None where it fits.
    """

    job: Job
    analysis: str
    memory: MemoryPlan
    held: int | None
    each: times.MicroBatch | None
    time: times.TimePlan | None
    price: float | None
    missing: str | None

    def tables(self) -> list[str]:
        """Return all of it, part by part."""
        unknown = "time: give --seconds-per-micro-batch, or --tokens and --tflops, to have it here"
        parts = [f"{self.analysis} of {described(self.job)}", self.memory.table()]
        if self.held is not None:
            parts.append(
                f"activations of training's passes: {shown(self.held)}; twice that in fp32 of a "
                "model in 16 bits"
            )
        if self.each is not None and self.each.sending:
            of = times.spelled(self.each.seconds), times.spelled(self.each.sending)
            parts.append("a micro-batch: {}, of which {} of communication".format(*of))
        parts.append(unknown if self.time is None else self.time.table())
        if self.job.mesh is not None and self.job.mesh.context > 1:
            parts.append(UNMEASURED)
        if self.price is not None:
            parts.append(f"price: {self.price:.2f}")
        return parts if self.missing is None else [*parts, self.missing]


def forecast(
    job: Job,
    config: HessianConfig,
    analysis: Analysis[Any],
    passes: Passes,
    machine: Machine,
    *,
    products: int | None = None,
    price_per_hour: float | None = None,
    free: Mapping[Tier, float] | None = None,
) -> Forecast:
    """Plan a measurement.

    Args:
        job: The job.
        config: The settings.
        analysis: What is measured.
        passes: What is known of forward and backward.
        machine: Machine of one rank.
        products: Their number; None for that of the analysis.
        price_per_hour: Price of one rank.
        free: GiB that a rank has free beside training, where known.

    Raises:
        ConfigError: the number of products depends on the model, the micro-batches are no whole
            groups of an interleaved pipeline, or the passes are as in `Passes.of`.
    """
    held = None if passes.tokens is None or job.shape is None else passes.tokens
    if held is not None:
        held = activations(job, held, config.num_micro_batches)
    config, choice = chosen(
        job.share, config, lambda wide: _needs(job, wide, analysis, free or {}, held or 0)
    )
    memory = plan(analysis, job.share, config, in_words(config, choice))
    each, time, price = passes.of(job, machine), None, None
    if each is not None:
        count = analysis.products(config) if products is None else products
        run = times.run_of(job, machine)
        gradient = run.over(config.num_micro_batches, each.seconds)
        time = times.plan_time(gradient, job.share, machine, config, count, run)
        if price_per_hour is not None:
            price = price_per_hour * job.world_size * time.total / 3600
    elif price_per_hour is not None:
        raise ConfigError(
            "a price needs the time: give --seconds-per-micro-batch, or --tokens and --tflops"
        )
    wide = precision_of(config) == "fp32" and job.dtype != "fp32"
    missing = _missing(job, config, analysis, free or {}, (held or 0) if wide else 0)
    return Forecast(job, analysis.title, memory, held, each, time, price, missing)


def _needs(
    job: Job,
    config: HessianConfig,
    analysis: Analysis[Any],
    free: Mapping[Tier, float],
    activations: int,
) -> list[Needs]:
    """Return what a rank needs, where activations take so much more than training's."""
    sizes = {tier: int(GIB * size) for tier, size in free.items()}
    if job.tier in sizes:
        sizes[job.tier] -= activations
    return [needs_of(analysis, job.share, config, sizes)]


def _missing(
    job: Job,
    config: HessianConfig,
    analysis: Analysis[Any],
    free: Mapping[Tier, float],
    activations: int,
) -> str | None:
    ranks = _needs(job, config, analysis, free, activations)
    short = shortage(ranks)
    if short is None:
        return None
    more = f", {shown(activations)} more for activations" if activations else ""
    text = (
        f"does not fit: {shown(short.needed)} on the {short.tier}{more}, "
        f"where {free[short.tier]:g} GiB are free"
    )
    other = way_out(analysis, config, ranks)
    if other is not None:
        return f"{text}; {other.words} would"
    return f"{text}, nor does any setting of the basis: use more ranks"


# ---- from a configuration and options


def settings_of(
    config: Path | None, title: str, given: Mapping[str, object]
) -> tuple[HessianConfig, Analysis[Any]]:
    """Return the settings, and the analysis of this name.

    Args:
        config: A DeepSpeed configuration, for its "hessian" section; None for the defaults.
        title: Name of the analysis.
        given: Its arguments, and values of the configuration.

    Raises:
        ConfigError: one is unknown, or wrong.
    """
    base = HessianConfig() if config is None else HessianConfig.from_deepspeed(config)
    analysis, overrides = analysis_of(title, given)
    try:
        return (base or HessianConfig()).with_overrides(**overrides), analysis
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{SECTION}.", "")) from None


def machine_of(
    job: Job,
    bandwidth: Mapping[Tier, float],
    *,
    network: float | None = None,
    node_network: float | None = None,
    latency: float | None = None,
) -> Machine:
    """Return a rank's machine: what is given, in GB/s and microseconds, usual figures otherwise."""
    usual = ACCELERATOR if job.accelerator else CPU
    given = {tier: 1e9 * value for tier, value in bandwidth.items()}
    speeds = {"network": network, "node_network": node_network}
    return replace(
        usual,
        bandwidth={**usual.bandwidth, **given},
        latency=usual.latency if latency is None else 1e-6 * latency,
        **{name: 1e9 * value for name, value in speeds.items() if value is not None},
    )
