"""Memory plans of spectra and analyses: from settings and plain figures, refused if too large.

plan = plan_job(HessianConfig(), num_parameters=7_000_000_000, world_size=64, stage=3)
print(plan.table())

The settings of an analysis are its own arguments and config values, by name as its method takes
them; another setting that would fit is so a few keywords, whatever the analysis.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from ds_hessian import krylov
from ds_hessian.backends.zero.memory import ZeroFigures, memory_of_zero
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import LanczosOptions, Storage
from ds_hessian.memory import FP32, PLACES, Item, MemoryPlan, Place, in_stage, shown
from ds_hessian.operators import memory_of_operator, memory_of_sweep
from ds_hessian.products import MAX_MATVECS, PRODUCTS, Settings, keywords_of, vectors_kept

ELSEWHERE: tuple[Settings, ...] = (
    {"device": "host"},
    {"dtype": "bf16"},
    {"dtype": "bf16", "device": "host"},
    {"device": "disk"},
    {"dtype": "bf16", "device": "disk"},
)
"""Settings of a basis that need less of some memory, the least harmful first."""

SELECTIVE: tuple[Settings, ...] = (
    {"mode": "selective", "device": "host"},
    {"mode": "selective", "device": "disk"},
)

DIRECTIONS = ("random", "top", "gradient")
"""Of a sweep."""

TOP_STEPS = 10
"""Lanczos steps for the direction `top`: it is to point there, not to be the eigenvector."""

FEWEST = 10
"""Products below which no spectrum, trace or solve is proposed."""


def lanczos_options(config: HessianConfig) -> LanczosOptions:
    """How Lanczos keeps its basis, as configured."""
    return LanczosOptions(
        config.reorthogonalization.mode, config.reorthogonalization.window, storage_of(config)
    )


def storage_of(config: HessianConfig) -> Storage:
    """Where and how a basis is kept, as configured."""
    basis = config.basis
    dtype = torch.bfloat16 if basis.dtype == "bf16" else torch.float32
    return Storage(dtype, basis.device, basis.folder)


@dataclass(frozen=True)
class Share:
    """One rank's share of a job.

    Attributes:
        n: Parameters of the whole model.
        n_local: Coordinates in this rank's vectors.
        place: Where its vectors are: the accelerator, or the host for a job on the CPU.
        backend: What the backend says that it holds, by the precision of the passes.
    """

    n: int
    n_local: int
    place: Place
    backend: Callable[[Literal["model", "fp32"]], Iterable[Item]]

    def vectors(self, name: str, count: int) -> Item:
        """So many vectors, held throughout."""
        return Item(name, self.place, count * FP32 * self.n_local)


# ---- what each analysis holds, and what it could do with less


def _spectrum(share: Share, config: HessianConfig) -> list[Item]:
    steps = min(config.num_matvecs, share.n)
    ritz = share.vectors("extreme Ritz vectors", 2 * config.sampling)
    return [
        *krylov.memory_of_lanczos(share.n_local, share.place, steps, lanczos_options(config)),
        # Where each micro-batch's gradient takes the place of the trial before.
        replace(ritz, moments=("passes",), stage="sampling"),
    ]


def _eigenpairs(
    share: Share, config: HessianConfig, *, k: int = 1, basis_size: int | None = None
) -> list[Item]:
    where = share.n, share.n_local, share.place, storage_of(config)
    return krylov.memory_of_eigenpairs(*where, k, basis_size)


def _trace(
    share: Share,
    config: HessianConfig,
    *,
    method: Literal["hutchinson", "hutch++", "xtrace"] = "hutchinson",
    num_matvecs: int | None = None,
) -> list[Item]:
    where = share.n, share.n_local, share.place, storage_of(config)
    return krylov.memory_of_trace(*where, method, num_matvecs or config.num_matvecs)


def _solve(
    share: Share,
    config: HessianConfig,
    *,
    dampings: Sequence[float],
    num_matvecs: int | None = None,
    preconditioner: Literal["adam", "diagonal"] | None = None,
) -> list[Item]:
    where = share.n, share.n_local, share.place, storage_of(config)
    products = num_matvecs or config.num_matvecs
    return [
        share.vectors("preconditioner", preconditioner == "adam"),
        *krylov.memory_of_solve(*where, products, len(dampings), preconditioner is not None),
    ]


def _influence(
    share: Share,
    config: HessianConfig,
    *,
    dampings: Sequence[float],
    num_matvecs: int | None = None,
) -> list[Item]:
    solve = _solve(share, config, dampings=dampings, num_matvecs=num_matvecs)
    return [share.vectors("gradient", 1), *solve]


def _sharpness(
    share: Share,
    config: HessianConfig,
    *,
    preconditioned: bool = True,
    max_matvecs: int = 5,
    warm: bool = False,
) -> list[Item]:
    where = share.n, share.n_local, share.place, storage_of(config)
    return [
        share.vectors("Adam's divisor and step", 2 * preconditioned),
        *krylov.memory_of_sharpness(*where, max_matvecs, 1 + preconditioned, warm),
    ]


def _blocks(share: Share, config: HessianConfig) -> list[Item]:
    return krylov.memory_of_blocks(share.n_local, share.place)


def _displacement_sweep(
    share: Share, config: HessianConfig, *, directions: Sequence[str] = DIRECTIONS
) -> list[Item]:
    names = tuple(directions)
    products = [share.vectors("directions", len(names))]
    products += memory_of_sweep(share.n_local, share.place)
    if "top" not in names:
        return products
    before = names.index("top")
    lanczos = krylov.memory_of_lanczos(share.n_local, share.place, min(TOP_STEPS, share.n))
    formed = replace(share.vectors("Ritz vector being formed", 1), moments=("orthogonalization",))
    search = [share.vectors("directions before it", before), *lanczos, formed]
    return [*in_stage("top direction", search), *in_stage("products", products)]


def _halves(name: str, value: int, least: int) -> list[Settings]:
    """Fewer and fewer of something."""
    found = []
    while (value := value // 2) >= least:
        found.append({name: value})
    return found


def _with_less(analysis: str, config: HessianConfig, arguments: Settings) -> list[Settings]:
    """Settings that may fit where these do not, the least harmful first."""
    less = _with_less_memory(analysis, config, arguments)
    if config.resume is None or analysis not in PRODUCTS:
        return less
    most = arguments.get("max_matvecs", MAX_MATVECS) if analysis == "eigenpairs" else 0
    return [*less, *_halves("max_matvecs", most, FEWEST), {"resume": None}]


def _with_less_memory(analysis: str, config: HessianConfig, arguments: Settings) -> list[Settings]:
    products = arguments.get("num_matvecs") or config.num_matvecs
    fewer = _halves("num_matvecs", products, FEWEST)
    if analysis == "spectrum":
        return [*ELSEWHERE, *SELECTIVE, *fewer, {"mode": "none", "device": "accelerator"}]
    if analysis == "eigenpairs":
        k = arguments.get("k", 1)
        size = arguments.get("basis_size") or 2 * k + 20
        return [*ELSEWHERE, *_halves("basis_size", size, k + 2)]
    if analysis == "trace":
        stored = arguments.get("method", "hutchinson") != "hutchinson"
        return [*ELSEWHERE, *fewer, {"method": "hutchinson"}] if stored else []
    if analysis in ("solve", "influence"):
        return [*ELSEWHERE, *fewer]
    if analysis == "sharpness":
        without = {"dtype": "bf16", "preconditioned": False}
        return [*ELSEWHERE, without, {**without, "device": "host", "max_matvecs": 3}]
    if analysis == "displacement_sweep":
        names = arguments.get("directions", DIRECTIONS)
        return [{"directions": [name for name in names if name != "top"]}]
    return []


ANALYSES: dict[str, Callable[..., list[Item]]] = {
    "spectrum": _spectrum,
    "eigenpairs": _eigenpairs,
    "trace": _trace,
    "solve": _solve,
    "influence": _influence,
    "sharpness": _sharpness,
    "block_coupling": _blocks,
    "off_block_share": _blocks,
    "displacement_sweep": _displacement_sweep,
}


def _holds(analysis: str) -> Callable[..., list[Item]]:
    if analysis not in ANALYSES:
        raise ConfigError(f"there is a plan of {', '.join(ANALYSES)}, not of {analysis!r}")
    return ANALYSES[analysis]


def plan_analysis(
    analysis: str, share: Share, config: HessianConfig, arguments: Mapping[str, Any] | None = None
) -> MemoryPlan:
    """The plan of an analysis with these settings, on one rank.

    Args:
        analysis: Name of the method of `HessianEngine`.
        share: The rank's part of the job.
        config: The settings.
        arguments: The method's own, those that its memory depends on: `k` and `basis_size` of
            `eigenpairs`, `method` and `num_matvecs` of `trace`, `dampings`, `num_matvecs` and
            `preconditioner` (one of one's own is `"diagonal"`) of `solve`, `preconditioned`,
            `max_matvecs` and `warm` (there is an earlier one) of `sharpness`, `directions` of
            `displacement_sweep` (none for vectors of one's own). With `resume` also those that the
            number of products depends on: `max_matvecs` of `eigenpairs`, `num_blocks` of
            `block_coupling`, `num_probes` of `off_block_share`.

    Raises:
        ConfigError: there is no such analysis, or an argument is missing or unknown.
    """
    operator = memory_of_operator(share.n_local, share.place, config.finite_difference.scheme)
    holds, given = _holds(analysis), dict(arguments or {})
    counted = keywords_of(PRODUCTS[analysis], given)[0] if analysis in PRODUCTS else {}
    own = {k: v for k, v in given.items() if k not in counted or k in keywords_of(holds, given)[0]}
    try:
        items = holds(share, config, **own)
    except TypeError as error:
        raise ConfigError(f"arguments of {analysis}: {str(error).lstrip('_')}") from error
    if config.resume is not None and analysis in PRODUCTS:
        count = vectors_kept(analysis, config, given)
        items.append(replace(share.vectors(f"state of the run, {count}", count), place="resume"))
    return MemoryPlan.of(share.backend(config.finite_difference.precision), operator, items)


def arguments_of(analysis: str, given: Mapping[str, Any]) -> tuple[Settings, Settings]:
    """Keywords as a method takes them: the `arguments` of `plan_analysis`, and all others."""
    own, others = keywords_of(_holds(analysis), given)
    counted, others = keywords_of(PRODUCTS.get(analysis, _holds(analysis)), others)
    return {**own, **counted}, others


@dataclass(frozen=True)
class Job:
    """A DeepSpeed job that need not exist yet, in plain figures.

    Attributes:
        num_parameters: Trainable parameters of the model.
        world_size: Ranks of the job.
        stage: Of ZeRO.
        dtype: Of the weights in forward and backward.
        offload_optimizer: To the CPU.
        offload_parameters: To the CPU.
        accelerator: False for a job on the CPU.
    """

    num_parameters: int
    world_size: int
    stage: Literal[0, 1, 2, 3] = 3
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    offload_optimizer: bool = False
    offload_parameters: bool = False
    accelerator: bool = True

    @property
    def weight_bytes(self) -> int:
        """Of one weight in the passes."""
        return FP32 if self.dtype == "fp32" else 2

    @property
    def share(self) -> Share:
        """Of each rank."""
        place: Place = "accelerator" if self.accelerator else "host"
        n = self.num_parameters
        n_local = n if self.stage == 0 else math.ceil(n / self.world_size)
        figures = ZeroFigures(
            stage=self.stage,
            n=n,
            n_local=n_local,
            weight_bytes=self.weight_bytes,
            gradient_bytes=self.weight_bytes,
            has_masters=self.stage > 0 or self.dtype != "fp32",
            place=place,
            offloads_optimizer=self.offload_optimizer,
            offloads_parameters=self.offload_parameters,
        )
        return Share(n, n_local, place, lambda precision: memory_of_zero(figures, precision))


def plan_job(
    config: HessianConfig,
    analysis: str = "spectrum",
    arguments: Mapping[str, Any] | None = None,
    **job: Any,
) -> MemoryPlan:
    """The plan of a spectrum, or of an analysis, of a DeepSpeed job, without the job.

    Args:
        config: The settings.
        analysis: See `plan_analysis`.
        arguments: See `plan_analysis`.
        **job: See `Job`.
    """
    return plan_analysis(analysis, Job(**job).share, config, arguments)


# ---- does it fit?


@dataclass(frozen=True)
class Needs:
    """One rank's side of the question whether a plan fits.

    Attributes:
        node: Whose host memory and disk it shares with other ranks.
        free: Bytes that the rank sees free in each place.
        peaks: Of its plan with each of the settings that are tried, in each place.
    """

    node: str
    free: Mapping[Place, int]
    peaks: Sequence[Mapping[Place, int]]


@dataclass(frozen=True)
class Alternative:
    """Other settings of an analysis: in words, and as `plan_analysis` takes them."""

    words: str
    config: HessianConfig
    arguments: Settings


def alternatives(
    config: HessianConfig, analysis: str = "spectrum", arguments: Mapping[str, Any] | None = None
) -> list[Alternative]:
    """Other settings that may fit where these do not, the least harmful first."""
    given, found = dict(arguments or {}), []
    for change in _with_less(analysis, config, given):
        own, overrides = arguments_of(analysis, change)
        device = overrides.get("device", config.basis.device)
        folder = config.basis.folder if device == "disk" else None
        try:
            other = config.with_overrides(**overrides, folder=folder)
        except ConfigError:
            continue  # contradicts something else that was asked for
        if other != config or {**given, **own} != given:
            words = [f"{_PATHS.get(k, k)} = {json.dumps(v)}" for k, v in change.items()]
            found.append(Alternative(" and ".join(words), other, {**given, **own}))
    return found


_PATHS = {"device": "basis.device", "dtype": "basis.dtype", "mode": "reorthogonalization.mode"}


def needs_of(
    config: HessianConfig,
    share: Share,
    free: Mapping[Place, int],
    analysis: str = "spectrum",
    arguments: Mapping[str, Any] | None = None,
) -> Needs:
    """This rank's needs with these settings, and with each of their `alternatives`.

    Args:
        config: The settings.
        share: The rank's part of the job.
        free: Bytes that it sees free; see `free_memory`.
        analysis: See `plan_analysis`.
        arguments: See `plan_analysis`.
    """
    plans = [plan_analysis(analysis, share, config, arguments)]
    for other in alternatives(config, analysis, arguments):
        plans.append(plan_analysis(analysis, share, other.config, other.arguments))
    return Needs(
        socket.gethostname(),
        free,
        [{place: plan.peak(place) for place in PLACES} for plan in plans],
    )


def free_memory(
    folder: str | None, device: torch.device, resume: str | None = None
) -> dict[Place, int]:
    """Bytes that are free now, in the places that there are.

    On an accelerator, what torch has cached for training's passes counts as free.

    Args:
        folder: Of a basis on disk; None for the system's temporary folder.
        device: Of the vectors.
        resume: Folder of the run's state, or where it will be made; None for none.

    Raises:
        OSError: a folder cannot be looked at.
    """
    free: dict[Place, int] = {
        "host": psutil.virtual_memory().available,
        "disk": shutil.disk_usage(folder or tempfile.gettempdir()).free,
    }
    if resume is not None:
        at = Path(resume).absolute()
        there = next(path for path in (at, *at.parents) if path.exists())
        free["resume"] = shutil.disk_usage(there).free
    if device.type != "cpu":
        module = torch.get_device_module(device)
        cached = module.memory_reserved(device) - module.memory_allocated(device)
        free["accelerator"] = module.mem_get_info(device)[0] + cached
    return free


def refuse_too_large(
    config: HessianConfig,
    ranks: Sequence[Needs],
    analysis: str = "spectrum",
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Raise if the analysis does not fit on some rank.

    Args:
        config: Its settings.
        ranks: Every rank's needs, the same list on all of them: so they decide alike.
        analysis: See `plan_analysis`.
        arguments: See `plan_analysis`.

    Raises:
        ConfigError: says what is short, where, and which setting would fit.
    """
    short = shortage(ranks)
    if short is None:
        return
    text = f"not enough memory for {analysis}: it needs {short}"
    other = way_out(config, ranks, analysis, arguments)
    if other is not None:
        raise ConfigError(f"{text}: {other.words} would fit")
    raise ConfigError(f"{text}: no setting of the basis would fit; use more ranks")


def way_out(
    config: HessianConfig,
    ranks: Sequence[Needs],
    analysis: str = "spectrum",
    arguments: Mapping[str, Any] | None = None,
) -> Alternative | None:
    """The least harmful other settings that fit on all ranks; None if there are none."""
    for number, other in enumerate(alternatives(config, analysis, arguments), start=1):
        if shortage(ranks, number) is None:
            return other
    return None


@dataclass(frozen=True)
class Shortage:
    """Where a plan does not fit.

    Attributes:
        place: Where.
        rank: The first rank on which it does not.
        sharing: Ranks that share the place.
        needed: Bytes that they need together.
        free: Bytes that are free for them.
    """

    place: Place
    rank: int
    sharing: int
    needed: int
    free: int

    def __str__(self) -> str:
        shared = f" for {self.sharing} ranks" if self.sharing > 1 else ""
        where = "in the resume folder" if self.place == "resume" else f"on the {self.place}"
        return (
            f"{shown(self.needed)} {where} of rank {self.rank}{shared} "
            f"beyond training's memory, and {shown(self.free)} is free"
        )


def shortage(ranks: Sequence[Needs], number: int = 0) -> Shortage | None:
    """What is short on the first rank where something is, with the settings of that number."""
    for rank, mine in enumerate(ranks):
        for place, free in mine.free.items():
            sharing = [mine]
            if place != "accelerator":
                sharing = [r for r in ranks if r.node == mine.node or place == "resume"]
            needed = sum(r.peaks[number][place] for r in sharing)
            if needed > free:
                return Shortage(place, rank, len(sharing), needed, free)
    return None
