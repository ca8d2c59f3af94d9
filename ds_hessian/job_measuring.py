"""Measuring a job: its function, its settings, and the measurements that are open."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Self, TypeVar, cast

from torch import Tensor, nn

from ds_hessian.analyses import (
    Analysis,
    Followed,
    Lessons,
    Subject,
    analysis_of,
    decided,
    measure,
    plan_here,
    with_fallback,
)
from ds_hessian.backends.protocol import Backend, Objective
from ds_hessian.backends.restricted import Restricted, restricted
from ds_hessian.config import HessianConfig
from ds_hessian.config.messages import shown
from ds_hessian.defaults import defaults_of_job, own_defaults
from ds_hessian.errors import ConfigError
from ds_hessian.job_vectors import JobVectors
from ds_hessian.memory import MemoryPlan
from ds_hessian.operators import Curvature, Embedded, Product
from ds_hessian.ranks import collective, left_together

R = TypeVar("R")

Batches = Iterable[object]
"""Micro-batches of this rank, in the form that the host's model takes."""
Loss = Any
"""`loss_fn(model, batch)`; on Megatron the `forward_step` of its schedules."""


def as_exact_as(tolerance: float, overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Return overrides in which `scheme="auto"` by itself has an analysis's own tolerance."""
    given = {"finite_difference", "tolerance"} & set(overrides)
    if overrides.get("scheme") != "auto" or given:
        return overrides
    return {**overrides, "tolerance": tolerance}


def _product(subject: Subject, v: Tensor) -> Product:
    """Measure one product with a vector over all parameters."""
    with subject.open() as (run, _):
        return _over_all(run.curvature, subject.backend).matvec(v)


def _over_all(curvature: Curvature, backend: Backend) -> Curvature:
    """Return the curvature with vectors over all parameters."""
    return Embedded(curvature, backend) if isinstance(backend, Restricted) else curvature


class JobMeasuring(JobVectors):
    """What a `Hessian` measures, and how a measurement is opened; no analysis yet.

    Every method but `memory_plan` is collective.

    Args:
        backend: The job.
        config: The settings; None for the defaults.

    Attributes:
        used: Called after each `use`; a schedule sets it to measure before the first step.
    """

    def __init__(self, backend: Backend, config: HessianConfig | None = None) -> None:
        super().__init__(backend, config or HessianConfig())
        self._retires = False
        self._objective: Objective | None = None
        self._open: Curvature | None = None
        self._lessons: Lessons = {}
        self._followed: dict[str, Followed] = {}  # by operator, parameters and loss
        self.used: Callable[[], None] = lambda: None

    # ---- what H is

    def use(self, batches: Batches, loss_fn: Loss = None, **sizes: int | None) -> Self:
        """Fix the micro-batches (this rank's own) and the loss that define H; returns self.

        Args:
            batches: Micro-batches; all of them count, whatever `num_micro_batches` says.
            loss_fn: `loss_fn(model, batch)` returning the mean loss of a micro-batch, or a pair
                (summed loss, count) for token-weighted averaging; None for that of the last `use`
                or, if there was none, where the model returns its loss as a scalar, first in a
                tuple, or as `.loss`. On Megatron the forward step as its schedules take it.
            **sizes: `seq_length` and `micro_batch_size`, on Megatron only; None for those of the
                last `use`.

        Raises:
            ConfigError: no batches, different numbers of them on different ranks, an argument that
                cannot be, or a measurement is open.
            MeasurementError: the iterable raised on some rank.
        """
        device = self.backend.space.device
        with collective("choosing the micro-batches", device, given=lambda: sizes):
            self._require_closed()
            before = self._objective
            self._objective = self.backend.objective(
                batches, loss_fn, like=before, apart=False, **sizes
            )
        if before is not None:  # until it is known of these micro-batches
            share = self._objective.num_micro_batches / before.num_micro_batches
            self._objective.sides = int(before.sides * share)
            self._objective.outputs = before.outputs
        self.used()
        return self

    def _use_if(self, batches: Batches | None, loss_fn: Loss) -> None:
        if batches is not None:
            self.use(batches, loss_fn)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that hold this rank's weights."""
        return self.backend.modules

    @property
    def step(self) -> int:
        """Optimizer steps made so far, for the record; to be set before measuring on Megatron."""
        return self.backend.step

    @step.setter
    def step(self, step: int) -> None:
        with suppress(Exception):  # of what is no number of numpy or torch
            step = cast("Any", step).item()
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"step must be an integer, at least 0, got {shown(step)}")
        try:
            setattr(self.backend, "step", step)  # noqa: B010, settable where nothing counts steps
        except AttributeError:
            raise ConfigError("this job counts its optimizer steps itself: set no step") from None

    @property
    def batches(self) -> list[Any] | None:
        """This rank's micro-batches; None before `use`."""
        return None if self._objective is None else self._objective.batches

    @contextmanager
    def measuring(self, **overrides: object) -> Iterator[Curvature]:
        """Guard several products at once: the gradient at the weights is evaluated only once.

        Inside, training must not continue; `matvec` uses the open operator, which is also yielded.
        All ranks make the same products there, and leave it together.

        Args:
            overrides: Values of the configuration for this measurement, such as
                `displacement=1e-3`.

        Raises:
            ConfigError: `use` was not called, an override is unknown, or `sampling` is on with a
                single micro-batch.
            MeasurementError: it was left on some ranks, while others make further products.
        """
        entered = collective(
            "measuring", self.backend.space.device, given=lambda: self._given(overrides)
        )
        with entered, ExitStack() as stack:
            subject = decided(None, self._subject(overrides))
            run, _ = with_fallback(subject, lambda each: stack.enter_context(each.open()))
            self._open = _over_all(run.curvature, run.subject.backend)
            try:
                with left_together(), defaults_of_job():
                    yield self._open
            finally:
                self._open = None

    def _subject(self, overrides: Mapping[str, object]) -> Subject:
        if self._objective is None:
            raise ConfigError("no micro-batches yet: call hessian.use(batches) first")
        self._require_closed()
        config = self.config.with_overrides(**overrides)
        self.backend.require_measurable()
        backend = restricted(self.backend, config.parameters)
        return Subject(backend, self._objective, config, self._retires, lessons=self._lessons)

    def _require_closed(self) -> None:
        if self._open is not None:
            raise ConfigError("a measurement is open already: leave `measuring()` first")

    @contextmanager
    def retiring(self) -> Iterator[None]:
        """Let measurements in the body remove a `resume` state of another optimizer step, or of
        another training that came to this one.

        Only one of the same measurement, with a line in the log; a state of other settings is
        still refused. For schedules: one kill would else end all later measurements of its kind.
        """
        self._retires = True
        try:
            yield
        finally:
            self._retires = False

    def matvec(self, v: Tensor) -> Product:
        """Return `H v` and its diagnostics.

        Alone it costs some five gradients, with a single micro-batch eight: one at the weights, two
        of the product, the others to find h and the error. Each further one inside `measuring()`
        takes a little more than two.

        Args:
            v: `(n_local,)` fp32.

        Raises:
            ConfigError: v is no such vector.
            NumericsError: v is zero, or something is not finite.
            MeasurementError: the model or the loss raised on some rank.
        """
        if self._open is not None:
            with own_defaults():
                return self._open.matvec(self.backend.space.vector(v))
        with collective("measuring a product", self.backend.space.device):
            v = self.backend.space.vector(v)
            subject = decided(None, self._subject({}))
            return with_fallback(subject, lambda each: _product(each, v))

    # ---- plans

    def memory_plan(self, analysis: str = "spectrum", **settings: object) -> MemoryPlan:
        """Return what an analysis would need on this rank beyond training's memory. Not collective.

        Of passes whose precision is `auto`, those that this rank alone would choose.

        Args:
            analysis: Name of the method: `spectrum`, `eigenpairs`, `trace`, `solve`, ...
            settings: As the method takes them: its own arguments, and values of the configuration.

        Raises:
            ConfigError: there is no such analysis, or a setting is unknown or impossible.
            UnsupportedError: the job is one that cannot be measured any more.
        """
        self.backend.require_measurable()
        found, overrides = analysis_of(analysis, settings)
        config = self.config.with_overrides(**overrides)
        backend = restricted(self.backend, config.parameters)
        return plan_here(found, backend, config, self._objective)

    def _measure(
        self,
        kind: type[Analysis[R]],
        make: Callable[[], Analysis[R]],
        overrides: Mapping[str, object],
    ) -> R:
        """Measure.

        Args:
            kind: The class of the analysis.
            make: Makes it; its failure on one rank is one of the call.
            overrides: Values of the configuration.

        Collective.
        """
        made = functools.cache(make)
        with self._calling(kind, made, overrides):
            return measure(made(), self._subject(overrides))

    def _calling(
        self,
        kind: type[Analysis[R]],
        made: Callable[[], Analysis[R]],
        overrides: Mapping[str, object],
    ) -> AbstractContextManager[None]:
        """Enter the method of an analysis, which all ranks must call alike. Collective."""

        def given() -> Mapping[str, object]:
            return {**made().given(), **self._given(overrides)}

        return collective(f"measuring the {kind.title}", self.backend.space.device, given=given)

    def _given(self, overrides: Mapping[str, object]) -> Mapping[str, object]:
        """Return the settings of a call that all ranks must give alike."""
        return {**self.config.with_overrides(**overrides).given(), "step": int(self.step)}
