"""The base of all analyses: arguments, products, memory, run and record.

An analysis is a frozen dataclass. Its fields are the arguments of the method of `Hessian` that
makes it, with their defaults, which are defined there and nowhere else; a field made by `transient`
is passed with the call (a vector, batches) or depends on the state of the job, and is not part of
the identity of the measurement. Plans, what `resume` keeps and the command line's `--analysis` are
derived from these classes (`ds_hessian.analyses.registry`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from ds_hessian.analyses.arguments import refuse_impossible
from ds_hessian.analyses.measurement import Measurement, Subject, with_fallback
from ds_hessian.backends.protocol import Backend, Objective
from ds_hessian.backends.restricted import Restricted
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import Item, MemoryPlan, passes_memory, tier_of
from ds_hessian.operators import LinearOperator, outputs_of
from ds_hessian.planning import (
    Needs,
    Settings,
    Share,
    chosen,
    free_memory,
    in_words,
    needs_of,
    plan,
    refuse_too_large,
    surely_fits,
)
from ds_hessian.ranks import collective, gather_objects, together
from ds_hessian.records import Record
from ds_hessian.resume import Journal
from ds_hessian.vectors import Partition, by_layer, by_pattern

logger = logging.getLogger(__name__)

R = TypeVar("R")
Draw = Callable[[int], Tensor]
"""The random unit vector of a number, `(n_local,)`."""

Blocks = Literal["layers", "parameters"] | Mapping[str, str]
"""Blocks of parameters: by layer, each its own, or {block: regular expression of names}."""


def transient(default: object) -> Any:
    """Return a field that is not part of what is measured; see the module."""
    return field(default=default, metadata={"transient": True}, repr=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class Analysis(ABC, Generic[R]):
    """One analysis with its arguments; `R` is its record."""

    title: ClassVar[str]
    """Name of the method of `Hessian` that makes it."""
    summary: ClassVar[str]
    """What it measures, in a line, for people."""
    resumes: ClassVar[bool] = True
    """Whether `resume` keeps its state."""
    operator_stage: ClassVar[str] = ""
    """The stage that has its operator; none if all have it."""

    def __post_init__(self) -> None:
        refuse_impossible(self, self.title)

    # ---- what it takes, from settings alone

    @abstractmethod
    def products(self, config: HessianConfig) -> int:
        """Return the largest number of products that it makes.

        Raises:
            ConfigError: the number depends on the model.
        """

    @abstractmethod
    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return what it holds on one rank beside what the operator and the backend hold."""

    def vectors_kept(self, config: HessianConfig) -> int:
        """Return how many vectors `resume` has on disk at most: those of all products.

        Raises:
            ConfigError: the number depends on the model.
        """
        return self.products(config)

    def share(self, share: Share) -> Share:
        """Return the part of a rank's share of the job on which its operator works."""
        return share

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return other settings that need less memory, the least harmful first."""
        return []

    # ---- its arguments

    @classmethod
    def from_settings(cls, given: Settings) -> tuple[Self, Settings]:
        """Return the analysis with the settings that are its own arguments, and the other settings.

        Raises:
            ConfigError: an argument is missing.
        """
        names = {f.name for f in fields(cls)}
        own = {name: value for name, value in given.items() if name in names}
        needed = [f.name for f in fields(cls) if f.default is f.default_factory is MISSING]
        missing = [name for name in needed if name not in own]
        if missing:
            raise ConfigError(f"{cls.title} needs {' and '.join(missing)}, which must be given")
        return cls(**own), {name: value for name, value in given.items() if name not in names}

    def changed(self, settings: Settings) -> tuple[Self, Settings]:
        """Return the same analysis with the settings that are its own arguments, and the others."""
        names = {f.name for f in fields(self)}
        own: dict[str, Any] = {k: v for k, v in settings.items() if k in names}
        return replace(self, **own), {k: v for k, v in settings.items() if k not in names}

    def settings(self) -> dict[str, object]:
        """Return its arguments as JSON values, without the transient ones: they identify the
        measurement.
        """
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata}

    def given(self) -> dict[str, object]:
        """Return its arguments as all ranks must give them alike, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    # ---- its run

    def within(self, backend: Restricted) -> Self:
        """Return the same analysis with its vectors in the coordinates of a restriction."""
        own: dict[str, Any] = {}
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if isinstance(value, Tensor):
                own[name] = backend.select(value)
            elif isinstance(value, Mapping) and all(isinstance(v, Tensor) for v in value.values()):
                own[name] = {key: backend.select(v) for key, v in value.items()}
        return replace(self, **own)

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Return the same analysis with everything filled in that only a job can say.

        Raises:
            ConfigError: it is not possible on this job.

        Collective.
        """
        return self

    def foreseen(self, backend: Backend) -> Self:
        """Return the same analysis with what this rank alone knows of the job, for a plan. Not
        collective.
        """
        return self

    @abstractmethod
    def run(self, subject: Subject) -> R:
        """Measure. Collective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Journaled(Analysis[R]):
    """An analysis that is a function of products, which `resume` keeps in a journal."""

    record: ClassVar[type[Any]]
    """Class of its record."""

    @abstractmethod
    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Return the record's fields, without cost and provenance.

        Args:
            run: The open measurement.
            operator: The Hessian, whose products are kept where `resume` is on.

        Collective.
        """

    def run(self, subject: Subject) -> R:
        """Measure, from where the same measurement was interrupted. Collective."""
        identity = {"call": self.settings()}
        with subject.open(Journal, self.record.kind, identity) as (run, journal):
            figures = self.figures(run, journal or run.curvature)
        record: R = self.record(**figures, cost=run.cost(), provenance=run.provenance())
        run.finished()
        return record


def measure(analysis: Analysis[R], subject: Subject) -> R:
    """Plan an analysis, refuse what does not fit, and run it.

    Raises:
        ConfigError: it is not possible on this job, or does not fit on some rank.

    Collective.
    """
    backend = subject.backend
    with collective(f"measuring the {analysis.title}", backend.space.device):
        if isinstance(backend, Restricted):
            analysis = analysis.within(backend)
        analysis = analysis.prepared(backend, subject.config)
        subject = decided(analysis, subject)
        reserved = plan_or_refuse(analysis, subject)
        subject = replace(subject, reserved=reserved)
        record = with_fallback(subject, analysis.run)
        return _everywhere(record, backend) if isinstance(backend, Restricted) else record


def _everywhere(record: R, backend: Restricted) -> R:
    """Return the record with its vectors over all parameters, zero outside of the chosen ones."""
    if not isinstance(record, Record):
        return record
    vectors: dict[str, Any] = {n: backend.embed(getattr(record, n)) for n in record.sharded}
    return replace(record, **vectors) if vectors else record


def decided(analysis: Analysis[Any] | None, subject: Subject) -> Subject:
    """Return the subject with the precision of its passes, on which all ranks agree.

    Args:
        analysis: What is measured; None for products alone.
        subject: The subject, with the settings as given.

    Collective.
    """
    share, space = _share(subject), subject.backend.space

    def needs(config: HessianConfig) -> list[Needs]:
        with together("planning the memory", device=space.device):
            mine = _wide_needs(analysis, share, config, space.device)
        if surely_fits(mine, space.world_size, space.device):
            return [mine]  # every rank's are like it
        return gather_objects(mine)

    config, choice = chosen(share, subject.config, needs)
    return replace(subject, config=config, choice=choice)


def plan_here(
    analysis: Analysis[Any],
    backend: Backend,
    config: HessianConfig,
    objective: Objective | None = None,
) -> MemoryPlan:
    """Return the memory plan of an analysis on this rank.

    Of passes whose precision is `auto`, those that this rank alone would choose. Not collective.
    """
    analysis = analysis.foreseen(backend)
    share, device = share_of(backend, objective, config.outputs), backend.space.device
    config, choice = chosen(share, config, lambda c: [_wide_needs(analysis, share, c, device)])
    return plan(analysis, share, config, in_words(config, choice))


def _wide_needs(
    analysis: Analysis[Any] | None, share: Share, config: HessianConfig, device: torch.device
) -> Needs:
    """Return this rank's needs with passes in fp32.

    What they need themselves is at most twice that of training's, and is not free for what is
    planned.
    """
    free = free_memory(config.basis.folder, device, config.resume)
    free[share.tier] -= 2 * passes_memory(device)
    return needs_of(analysis, share, config, free)


def plan_or_refuse(analysis: Analysis[R], subject: Subject) -> int:
    """Log the memory plan of an analysis on rank 0; refuse what does not fit on some rank.

    Returns:
        The bytes of the vectors' memory that this rank needs beside the sides of kinks.

    Raises:
        ConfigError: it does not fit on some rank.

    Collective.
    """
    share, space, config = _share(subject), subject.backend.space, subject.config
    with together("planning the memory", device=space.device):
        free = free_memory(config.basis.folder, space.device, config.resume)
        needs = needs_of(analysis, share, config, free)
        if space.rank == 0:
            table = plan(analysis, share, config, in_words(config, subject.choice)).table()
            logger.info("Hessian %s: %s", analysis.title, table)
    if not surely_fits(needs, space.world_size, space.device):
        refuse_too_large(analysis, config, gather_objects(needs))
    return needs.peaks[0][share.tier]


def _share(subject: Subject) -> Share:
    return share_of(subject.backend, subject.objective, subject.config.outputs)


def share_of(
    backend: Backend, objective: Objective | None = None, outputs: str | None = None
) -> Share:
    """Return this rank's share of the job, for memory plans.

    Args:
        backend: The job.
        objective: Its micro-batches; None where they are not known.
        outputs: The name of the module that returns the model's outputs; None if it is to be found.
    """
    space = backend.space
    batches, seen = (objective.batches, objective.outputs) if objective else ((), {})
    foreseen = outputs_of(backend.modules, batches, outputs, seen.get(outputs))
    whole = backend.whole.space.n_local if isinstance(backend, Restricted) else 0
    return Share(
        space.n,
        space.n_local,
        tier_of(space.device),
        backend.memory,
        backend.precisions,
        backend.compute_dtype,
        whole,
        foreseen,
        objective.sides if objective else 0,
    )


def partition(backend: Backend, blocks: Blocks) -> Partition:
    """Return the coordinates of this rank by block; raises what `groups_of` raises."""
    return Partition(backend.layout, backend.space, groups_of(backend, blocks))


def groups_of(backend: Backend, blocks: Blocks) -> dict[str, str]:
    """Return {parameter name: block} of all parameters that have elements.

    Raises:
        ConfigError: `blocks` is none of the three things that it may be.
    """
    names = [name for name, shape in backend.parameters if shape.numel()]
    if isinstance(blocks, Mapping):
        return by_pattern(names, blocks)
    if blocks not in ("layers", "parameters"):
        raise ConfigError(
            f'blocks must be "layers", "parameters" or a mapping of patterns, got {blocks!r}'
        )
    return by_layer(names) if blocks == "layers" else {name: name for name in names}
