"""One guarded measurement: what spectra, sweeps and analyses have in common.

It is taken up where an interrupted one ended, and counted from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ds_hessian.backends import Objective
from ds_hessian.config import HessianConfig
from ds_hessian.operators import Curvature
from ds_hessian.plan import (
    Share,
    arguments_of,
    free_memory,
    needs_of,
    plan_analysis,
    refuse_too_large,
)
from ds_hessian.ranks import gather_objects, together
from ds_hessian.records import Cost, Provenance
from ds_hessian.records.store import kind_of
from ds_hessian.resume import SavedRun

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=SavedRun)


class Host(Protocol):
    """What measurements need of the engine that makes them."""

    engine: Any
    backend: Any
    config: HessianConfig
    _objective: Objective | None
    _operator: Curvature | None  # while it is open

    def measuring(self, **overrides: Any) -> AbstractContextManager[Curvature]:
        """Guard several products at once."""
        ...

    def _parameters(self) -> list[tuple[str, torch.Size]]:
        """Names and unsharded shapes, the same list on every rank."""
        ...

    def _share(self) -> Share:
        """Of this rank, for memory plans."""
        ...

    def _describe(self, config: HessianConfig) -> Provenance:
        """What a measurement made now is made on."""
        ...

    def _identity(self, operator: Curvature, config: HessianConfig) -> dict[str, Any]:
        """What a measurement made now is of, whatever the layout."""
        ...

    def _whole(self, v: Tensor, name: str, whole: torch.Size) -> Tensor:
        """A parameter's coordinates of v in its unsharded shape, on rank 0."""
        ...

    def _deal(self, v: Tensor, name: str, whole: Tensor) -> None:
        """Write rank 0's values of a parameter into every rank's part of v."""
        ...


class Measurement(Generic[S]):
    """A measurement, from when it was first begun to its cost.

    Args:
        host: The engine.
        overrides: Config values for it.
        analysis: Name of the method that makes it, whose memory plan is logged on rank 0; None for
            a part of what is planned already.
        arguments: The method's own.

    Attributes:
        config: Its settings.
        operator: The Hessian; from `open` on.
        saved: Its state on disk; None without `resume`.

    Raises:
        ConfigError: an override is unknown or impossible, or the plan does not fit on some rank.

    Collective: the constructor, `open` and `finished`.
    """

    operator: Curvature

    def __init__(
        self,
        host: Host,
        overrides: Mapping[str, Any],
        analysis: str | None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._host, self._overrides = host, overrides
        self.config = host.config.with_overrides(**overrides)
        if analysis is not None:
            plan_or_refuse(host, self.config, analysis, arguments or {})
        self.saved: S | None = None
        self._began, self._reduced = time.perf_counter(), host.backend.space.all_reduces

    @contextmanager
    def open(
        self,
        record: type[Any],
        kind: type[S] | None = None,
        also: Mapping[str, Any] | None = None,
    ) -> Iterator[Measurement[S]]:
        """Guard the body, which goes on where the same measurement was interrupted.

        Args:
            record: Kind of record that it makes; its state is in a folder of that name.
            kind: What is kept of it; None for what cannot be taken up.
            also: What it is of, beside settings, model and data; JSON values.

        Raises:
            ConfigError: as `measuring`; or `resume` has the state of another measurement, or a
                damaged one.
        """
        host, resume = self._host, self.config.resume
        with ExitStack() as stack:
            if kind is not None and resume is not None:
                self.saved = saved = kind(Path(resume) / kind_of(record), host.backend)
                stack.enter_context(saved.random_states())
                self._began -= saved.seconds
                self._reduced -= saved.all_reduces
            self.operator = stack.enter_context(host.measuring(**self._overrides))
            if self.saved is not None:
                identity = host._identity(self.operator, self.config)
                self.saved.take_up(self.operator, {**identity, **(also or {})})
            yield self

    def cost(self) -> Cost:
        """What it has taken so far, in all processes that worked on it."""
        spent, space = self.operator.cost, self._host.backend.space
        return Cost(
            seconds_total=time.perf_counter() - self._began,
            seconds_per_product=spent.product_seconds / max(spent.products, 1),
            seconds_per_gradient=spent.gradient_seconds,
            products=spent.products,
            gradient_evaluations=spent.gradient_evaluations,
            trials=spent.trials,
            all_reduces=space.all_reduces - self._reduced,
        )

    def finished(self) -> None:
        """Its record is made: the state on disk is removed."""
        if self.saved is not None:
            self.saved.clear()


def plan_or_refuse(
    host: Host, config: HessianConfig, analysis: str, given: Mapping[str, Any]
) -> None:
    """Log the memory plan of an analysis on rank 0; refuse what does not fit.

    Args:
        host: The engine.
        config: The settings.
        analysis: Name of the method.
        given: Its own arguments; those that memory does not depend on are ignored.

    Raises:
        ConfigError: it does not fit on some rank.

    Collective.
    """
    device, share = host.backend.space.device, host._share()
    arguments = arguments_of(analysis, given)[0]
    with together("planning the memory", device=device):
        free = free_memory(config.basis.folder, device, config.resume)
        needs = needs_of(config, share, free, analysis, arguments)
        if host.backend.space.rank == 0:
            table = plan_analysis(analysis, share, config, arguments).table()
            logger.info("Hessian %s: %s", analysis, table)
    refuse_too_large(config, gather_objects(needs), analysis, arguments)
