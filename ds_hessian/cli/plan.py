"""`ds-hessian plan`: memory, time and price of a measurement of a job that need not exist yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_hessian.analyses import Analysis, analysis_of
from ds_hessian.config import SECTION, HessianConfig, read_deepspeed
from ds_hessian.errors import ConfigError
from ds_hessian.memory import MemoryPlan, Tier, shown
from ds_hessian.planning import (
    Job,
    Needs,
    chosen,
    in_words,
    needs_of,
    plan,
    shortage,
    times,
    way_out,
)

GIB = 2**30


def described(job: Job) -> str:
    """Return a job in one line."""
    offloaded = [
        name
        for name, there in (
            ("optimizer", job.offload_optimizer),
            ("parameters", job.offload_parameters),
        )
        if there
    ]
    also = f", {' and '.join(offloaded)} offloaded" if offloaded else ""
    ranks = f"{job.world_size} rank{'s' if job.world_size > 1 else ''}"
    kind = "" if job.accelerator else " of the CPU"
    return (
        f"{job.num_parameters:,} parameters, ZeRO-{job.stage} in {job.dtype} on {ranks}{kind}{also}"
    )


@dataclass(frozen=True)
class Passes:
    """Figures of a micro-batch's forward and backward; None where one is not known.

    Attributes:
        seconds: Measured: of one micro-batch.
        tokens: Tokens in a rank's micro-batch.
        tflops: 1e12 floating-point operations that a rank reaches in a second.
        network: GB/s that a rank sends.
    """

    seconds: float | None = None
    tokens: int | None = None
    tflops: float | None = None
    network: float | None = None

    def gradient(self, job: Job, num_micro_batches: int) -> float | None:
        """Return the seconds of one gradient over so many micro-batches; None if nothing is known.

        Raises:
            ConfigError: `tokens` without `tflops`, or the reverse.
        """
        if self.seconds is not None:
            return self.seconds * num_micro_batches
        if self.tokens is None and self.tflops is None:
            return None
        if self.tokens is None or self.tflops is None:
            raise ConfigError("--tokens and --tflops estimate the time together: give both")
        traffic = times.traffic_of(job.stage, job.num_parameters, job.world_size, job.weight_bytes)
        return num_micro_batches * times.gradient_seconds(
            job.num_parameters,
            self.tokens,
            1e12 * self.tflops,
            traffic=traffic,
            network=None if self.network is None else 1e9 * self.network,
        )


@dataclass(frozen=True)
class Forecast:
    """The memory, time and price of a measurement.

    Attributes:
        job: The job.
        analysis: Name of the method of `Hessian`.
        memory: On each rank, beyond training's.
        time: None where nothing is known of the passes.
        price: Price of all ranks; None without time or a price of an hour.
        missing: Settings that would fit where the plan does not; None where it fits.
    """

    job: Job
    analysis: str
    memory: MemoryPlan
    time: times.TimePlan | None
    price: float | None
    missing: str | None

    def tables(self) -> list[str]:
        """Return all of it, part by part."""
        unknown = "time: give --seconds-per-micro-batch, or --tokens and --tflops, to have it here"
        parts = [f"{self.analysis} of {described(self.job)}", self.memory.table()]
        parts.append(unknown if self.time is None else self.time.table())
        if self.price is not None:
            parts.append(f"price: {self.price:.2f}")
        return parts if self.missing is None else [*parts, self.missing]


def forecast(
    job: Job,
    config: HessianConfig,
    analysis: Analysis[Any],
    passes: Passes,
    machine: times.Machine,
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
        ConfigError: the number of products depends on the model, or is as in `Passes.gradient`.
    """
    config, choice = chosen(job.share, config, lambda wide: _needs(job, wide, analysis, free or {}))
    memory = plan(analysis, job.share, config, in_words(config, choice))
    gradient = passes.gradient(job, config.num_micro_batches)
    time = price = None
    if gradient is not None:
        count = analysis.products(config) if products is None else products
        time = times.plan_time(gradient, job.share, machine, config, count)
        if price_per_hour is not None:
            price = price_per_hour * job.world_size * time.total / 3600
    elif price_per_hour is not None:
        raise ConfigError("a price needs the time: give --seconds-per-micro-batch")
    missing = _missing(job, config, analysis, free or {})
    return Forecast(job, analysis.title, memory, time, price, missing)


def _needs(
    job: Job, config: HessianConfig, analysis: Analysis[Any], free: Mapping[Tier, float]
) -> list[Needs]:
    sizes = {tier: int(GIB * size) for tier, size in free.items()}
    return [needs_of(analysis, job.share, config, sizes)]


def _missing(
    job: Job,
    config: HessianConfig,
    analysis: Analysis[Any],
    free: Mapping[Tier, float],
) -> str | None:
    ranks = _needs(job, config, analysis, free)
    short = shortage(ranks)
    if short is None:
        return None
    text = (
        f"does not fit: {shown(short.needed)} on the {short.tier}, "
        f"where {free[short.tier]:g} GiB are free"
    )
    other = way_out(analysis, config, ranks)
    if other is not None:
        return f"{text}; {other.words} would"
    return f"{text}, nor does any setting of the basis: use more ranks"


# ---- from a configuration and options


def job_of(config: Path | None, **given: Any) -> Job:
    """Return the job of a DeepSpeed configuration; what is `given` replaces what the file says.

    Raises:
        ConfigError: the configuration cannot be read, or has another stage or device than there is.
    """
    found: dict[str, Any] = {}
    if config is not None:
        settings = read_deepspeed(config)
        zero = settings.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        if stage not in (0, 1, 2, 3):
            raise ConfigError(f"{config}: zero_optimization.stage must be 0, 1, 2 or 3: {stage!r}")
        dtypes = [d for d in ("bf16", "fp16") if settings.get(d, {}).get("enabled") is True]
        found = {
            "stage": stage,
            "dtype": dtypes[0] if dtypes else "fp32",
            "offload_optimizer": _offloads(zero.get("offload_optimizer")),
            "offload_parameters": _offloads(zero.get("offload_param")),
        }
    return Job(**{**found, **{name: v for name, v in given.items() if v is not None}})


def _offloads(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("device", "none") != "none"


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


def machine_of(job: Job, bandwidth: Mapping[Tier, float]) -> times.Machine:
    """Return a rank's machine: the given bandwidths in GB/s, usual ones otherwise."""
    usual = times.ACCELERATOR if job.accelerator else times.CPU
    given = {tier: 1e9 * value for tier, value in bandwidth.items()}
    return replace(usual, bandwidth={**usual.bandwidth, **given})
