"""Does a measurement fit? Memory plans of analyses, and the settings that would fit where not.

An analysis says what it holds and what it could do with less (`Planned`); this module adds backend
and operator, compares the sum with what is free on every rank, and refuses what is too large.
"""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import psutil
import torch

from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import PLACES, Item, MemoryPlan, Place, shown
from ds_hessian.operators import memory_of_operator
from ds_hessian.planning.share import Share

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


def plan(analysis: Planned, share: Share, config: HessianConfig) -> MemoryPlan:
    """Return the memory plan of an analysis on one rank.

    Raises:
        ConfigError: `resume` keeps a number of vectors that depends on the model.
    """
    share, scheme = analysis.share(share), config.finite_difference.scheme
    operator = memory_of_operator(share.n_local, share.place, scheme, config.operator)
    items = analysis.memory(share, config)
    if config.resume is not None and analysis.resumes:
        count = analysis.vectors_kept(config)
        size = share.vectors("", count).size
        items.append(Item(f"state of the run, {count}", "resume", size))
    return MemoryPlan.of(share.backend(config.finite_difference.precision), operator, items)


@dataclass(frozen=True)
class Needs:
    """The bytes that one rank needs and has free.

    Attributes:
        node: Name of the node, whose host memory and disk are shared by its ranks.
        free: Bytes that the rank sees free in each place.
        peaks: Peak bytes in each place of the plan with each of the settings that are tried.
    """

    node: str
    free: Mapping[Place, int]
    peaks: Sequence[Mapping[Place, int]]


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
    for change in less:
        other, overrides = analysis.changed(change)
        device = overrides.get("device", config.basis.device)
        folder = config.basis.folder if device == "disk" else None
        try:
            settings = config.with_overrides(**overrides, folder=folder)
        except ConfigError:
            continue  # contradicts something else that was asked for
        if settings != config or other.settings() != analysis.settings():
            words = [f"{_PATHS.get(k, k)} = {json.dumps(v)}" for k, v in change.items()]
            found.append(Alternative(" and ".join(words), settings, other))
    return found


_PATHS = {"device": "basis.device", "dtype": "basis.dtype", "mode": "reorthogonalization.mode"}


def needs_of(
    analysis: Planned, share: Share, config: HessianConfig, free: Mapping[Place, int]
) -> Needs:
    """Return this rank's needs with these settings, and with each of their `alternatives`.

    Args:
        analysis: The analysis.
        share: The rank's part of the job.
        config: The settings.
        free: Bytes that the rank sees free (`free_memory`).
    """
    plans = [plan(analysis, share, config)]
    plans += [plan(o.analysis, share, o.config) for o in alternatives(analysis, config)]
    peaks = [{place: each.peak(place) for place in PLACES} for each in plans]
    return Needs(socket.gethostname(), free, peaks)


def free_memory(
    folder: str | None, device: torch.device, resume: str | None = None
) -> dict[Place, int]:
    """Return the bytes that are free now, by the kind of memory or disk.

    On an accelerator, what torch has cached for training's passes counts as free.

    Args:
        folder: Folder of a basis on disk; None for the system's temporary folder.
        device: Device of the vectors.
        resume: Folder of the run's state, or where it will be made; None for none.

    Raises:
        OSError: a folder cannot be looked at.
    """
    free: dict[Place, int] = {
        "host": psutil.virtual_memory().available,
        "disk": shutil.disk_usage(folder or tempfile.gettempdir()).free,
    }
    if resume is not None:
        wanted = Path(resume).absolute()
        there = next(path for path in (wanted, *wanted.parents) if path.exists())
        free["resume"] = shutil.disk_usage(there).free
    if device.type != "cpu":
        module = torch.get_device_module(device)
        cached = module.memory_reserved(device) - module.memory_allocated(device)
        free["accelerator"] = module.mem_get_info(device)[0] + cached
    return free


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
        place: The place that is short.
        rank: The first rank on which it is.
        sharing: Number of ranks that share the place.
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
    """Return what is short on the first rank where something is, with settings of that number."""
    for rank, mine in enumerate(ranks):
        for place, free in mine.free.items():
            sharing = [mine]
            if place != "accelerator":
                sharing = [r for r in ranks if r.node == mine.node or place == "resume"]
            needed = sum(r.peaks[number][place] for r in sharing)
            if needed > free:
                return Shortage(place, rank, len(sharing), needed, free)
    return None
