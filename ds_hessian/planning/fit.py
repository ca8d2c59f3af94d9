"""Does a measurement fit? Memory plans of analyses, and the settings that would fit where not.

An analysis says what it holds and what it could do with less (`Planned`); this module adds backend
and operator, compares the sum with what is free on every rank, and refuses what is too large.
"""

from __future__ import annotations

import json
import math
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch

from ds_hessian.backends.protocol import Precision
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import TIERS, Item, MemoryPlan, Tier, free_on, in_stage, shown
from ds_hessian.operators import memory_of_operator
from ds_hessian.planning.share import Share
from ds_hessian.ranks import count_on_nodes, largest, most_on_a_node

Settings = Mapping[str, object]
"""Some settings by name: an analysis's own arguments, or values of the configuration."""

ELSEWHERE: tuple[Settings, ...] = (
    {"device": "host"},
    {"dtype": "bf16"},
    {"dtype": "bf16", "device": "host"},
    {"device": "disk"},
    {"dtype": "bf16", "device": "disk"},
)
"""Settings of a basis that need less of some memory, the least harmful first."""

SIDES = "sides of kinks"
"""The item that a plan has once they are known, from the first measurement on."""

FEWEST = 10
"""Number of products below which no spectrum, trace or solve is proposed."""


class Planned(Protocol):
    """The interface of an analysis that planning needs."""

    @property
    def title(self) -> str:
        """The name of the method of `Hessian` that makes it."""
        ...

    @property
    def resumes(self) -> bool:
        """True if `resume` keeps its state."""
        ...

    @property
    def operator_stage(self) -> str:
        """The stage that has its operator; none if all have it."""
        ...

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return what it holds on one rank beside the operator and the backend."""
        ...

    def vectors_kept(self, config: HessianConfig) -> int:
        """Return how many vectors `resume` has on disk, at most."""
        ...

    def share(self, share: Share) -> Share:
        """Return the part of the share on which its operator works."""
        ...

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return settings that may fit where these do not, the least harmful first."""
        ...

    def changed(self, settings: Settings) -> tuple[Self, Settings]:
        """Return the same analysis with the settings that are its own arguments, and the others."""
        ...

    def settings(self) -> Settings:
        """Return its own arguments."""
        ...


A = TypeVar("A", bound=Planned)


def halves(name: str, value: int, least: int) -> list[Settings]:
    """Return smaller and smaller values of one setting, down to `least`."""
    found = list[Settings]()
    while (value := value // 2) >= least:
        found.append({name: value})
    return found


def precision_of(config: HessianConfig) -> Precision:
    """Return the precision of the passes, which has been chosen (`ds_hessian.planning.chosen`)."""
    precision = config.finite_difference.precision
    assert precision != "auto", "the precision of the passes has not been chosen yet"
    return precision


def plan(
    analysis: Planned | None, share: Share, config: HessianConfig, passes: str = ""
) -> MemoryPlan:
    """Return the memory plan of an analysis on one rank.

    Args:
        analysis: The analysis; None for products alone.
        share: The rank's part of the job.
        config: The settings, with the precision of the passes.
        passes: How the passes run, and why, in words.

    Raises:
        ConfigError: `resume` keeps a number of vectors that depends on the model.
    """
    kinks, items = list[Item](), [share.vectors("vector", 1)]
    if config.finite_difference.kinks == "held":
        kinks.append(Item(SIDES, share.tier, share.sides))
    if analysis is not None:
        share = analysis.share(share)
        items = analysis.memory(share, config)
        if config.resume is not None and analysis.resumes:
            count = analysis.vectors_kept(config)
            size = share.vectors("", count).size
            items.append(Item(f"state of the run, {count}", "resume", size))
    scheme = config.finite_difference.largest_formula
    operator = memory_of_operator(share.n_local, share.tier, scheme, config.operator, share.outputs)
    if analysis is not None:
        operator = in_stage(analysis.operator_stage, operator)
    backend = share.backend(precision_of(config))
    return MemoryPlan.of(backend, kinks, operator, items, passes=passes)


@dataclass(frozen=True)
class Needs:
    """The bytes that one rank needs and has free.

    Attributes:
        node: Name of the node, whose host memory and disk are shared by its ranks.
        free: Bytes that the rank sees free in each tier.
        peaks: Peak bytes in each tier of the plan with each of the settings that are tried.
    """

    node: str
    free: Mapping[Tier, int]
    peaks: Sequence[Mapping[Tier, int]]


@dataclass(frozen=True)
class Alternative(Generic[A]):
    """Other settings of an analysis, and the same in words."""

    words: str
    config: HessianConfig
    analysis: A


def alternatives(analysis: A, config: HessianConfig) -> list[Alternative[A]]:
    """Return other settings that may fit where these do not, the least harmful first."""
    less, found = analysis.with_less(config), list[Alternative[A]]()
    if config.resume is not None and analysis.resumes:
        less = [*less, {"resume": None}]
    if config.finite_difference.precision == "fp32":
        less = [*less, {"precision": "model"}]
    for change in less:
        other, overrides = analysis.changed(change)
        try:
            settings = config.with_overrides(**overrides)
        except ConfigError:
            continue  # contradicts something else that was asked for
        if settings != config or other.settings() != analysis.settings():
            words = [f"{_PATHS.get(k, k)} = {json.dumps(v)}" for k, v in change.items()]
            found.append(Alternative(" and ".join(words), settings, other))
    return found


_PATHS = {
    "device": "basis.device",
    "dtype": "basis.dtype",
    "mode": "reorthogonalization.mode",
    "precision": "finite_difference.precision",
}


def needs_of(
    analysis: Planned | None, share: Share, config: HessianConfig, free: Mapping[Tier, int]
) -> Needs:
    """Return this rank's needs with these settings, and with each of their `alternatives`.

    Args:
        analysis: The analysis; None for products alone.
        share: The rank's part of the job.
        config: The settings.
        free: Bytes that the rank sees free (`free_memory`).
    """
    share = replace(share, sides=0)  # they are held in what is left, or not at all
    plans = [plan(analysis, share, config)]
    if analysis is not None:
        plans += [plan(o.analysis, share, o.config) for o in alternatives(analysis, config)]
    peaks = [{tier: each.peak(tier) for tier in TIERS} for each in plans]
    return Needs(socket.gethostname(), free, peaks)


def free_memory(
    folder: str | None, device: torch.device, resume: str | None = None
) -> dict[Tier, int]:
    """Return the bytes that are free now, by the kind of memory or disk.

    On an accelerator, what torch has cached for training's passes counts as free.

    Args:
        folder: Folder of a basis on disk; None for the system's temporary folder.
        device: Device of the vectors.
        resume: Folder of the run's state, or where it will be made; None for none.

    Raises:
        OSError: a folder cannot be looked at.
    """
    free: dict[Tier, int] = {
        "host": free_on(torch.device("cpu")),
        "disk": shutil.disk_usage(folder or tempfile.gettempdir()).free,
    }
    if resume is not None:
        wanted = Path(resume).absolute()
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        free["resume"] = shutil.disk_usage(there).free
    if device.type != "cpu":
        free["accelerator"] = free_on(device)
    return free


def surely_fits(mine: Needs, ranks: int, device: torch.device) -> bool:
    """Return whether the plan fits even if every rank needed the most that any does, and saw the
    least free that any does.

    Args:
        mine: This rank's needs.
        ranks: The number of ranks.
        device: The device of the job's collectives.

    Collective: one all-reduce of nine figures; at first, the ranks of each node are counted too.
    """
    needed = [float(mine.peaks[0][tier]) for tier in TIERS]
    free = [-float(mine.free[tier]) if tier in mine.free else -math.inf for tier in TIERS]
    figures = [*needed, *free, most_on_a_node() or math.inf]
    *found, neighbours = largest(torch.tensor(figures, dtype=torch.float64, device=device)).tolist()
    if math.isinf(neighbours):  # not known on some rank, and so counted on all
        neighbours = count_on_nodes(device)
    sharing = {"accelerator": 1, "host": neighbours, "disk": neighbours, "resume": ranks}
    return all(
        most * sharing[tier] <= -least
        for tier, most, least in zip(TIERS, found[: len(TIERS)], found[len(TIERS) :], strict=True)
    )


def refuse_too_large(analysis: Planned, config: HessianConfig, ranks: Sequence[Needs]) -> None:
    """Raise if the analysis does not fit on some rank.

    Args:
        analysis: The analysis.
        config: Its settings.
        ranks: Every rank's needs, the same list on all of them: so they decide alike.

    Raises:
        ConfigError: says what is short, where, and which setting would fit.
    """
    short = shortage(ranks)
    if short is None:
        return
    text = f"not enough memory for {analysis.title}: it needs {short}"
    other = way_out(analysis, config, ranks)
    if other is not None:
        raise ConfigError(f"{text}: {other.words} would fit")
    raise ConfigError(f"{text}: no setting of the basis would fit; use more ranks")


def way_out(analysis: A, config: HessianConfig, ranks: Sequence[Needs]) -> Alternative[A] | None:
    """Return the least harmful other settings that fit on all ranks; None if there are none."""
    for number, other in enumerate(alternatives(analysis, config), start=1):
        if shortage(ranks, number) is None:
            return other
    return None


@dataclass(frozen=True)
class Shortage:
    """The kind of memory in which a plan does not fit, and by how much.

    Attributes:
        tier: The tier that is short.
        rank: The first rank on which it is.
        sharing: Number of ranks that share the tier.
        needed: Bytes that they need together.
        free: Bytes that are free for them.
    """

    tier: Tier
    rank: int
    sharing: int
    needed: int
    free: int

    def __str__(self) -> str:
        shared = f" for {self.sharing} ranks" if self.sharing > 1 else ""
        where = "in the resume folder" if self.tier == "resume" else f"on the {self.tier}"
        return (
            f"{shown(self.needed)} {where} of rank {self.rank}{shared} "
            f"beyond training's memory, and {shown(self.free)} is free"
        )


def shortage(ranks: Sequence[Needs], number: int = 0) -> Shortage | None:
    """Return what is short on the first rank where something is, with settings of that number."""
    for rank, mine in enumerate(ranks):
        for tier, free in mine.free.items():
            sharing = [mine]
            if tier != "accelerator":
                sharing = [r for r in ranks if r.node == mine.node or tier == "resume"]
            needed = sum(r.peaks[number][tier] for r in sharing)
            if needed > free:
                return Shortage(tier, rank, len(sharing), needed, free)
    return None
