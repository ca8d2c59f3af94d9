"""One guarded measurement: what all analyses have in common.

A measurement is continued where an interrupted one of the same kind ended, and its cost is counted
from the beginning of the first.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from ds_hessian.backends.choices import PieceError
from ds_hessian.backends.protocol import Backend, Objective, Passes, Precision, Session
from ds_hessian.backends.restricted import names_of
from ds_hessian.config import HessianConfig, OperatorName
from ds_hessian.errors import ConfigError, HessianError, MeasurementError, UnsupportedError
from ds_hessian.operators import Curvature, OperatorCost, Taught, curvature, seen_of
from ds_hessian.operators.sampling import require_several
from ds_hessian.planning import ChosenPrecision, in_precision, precision_of
from ds_hessian.ranks import gather_objects
from ds_hessian.records import Cost, Provenance
from ds_hessian.resume import SavedRun, discard, identity_of, retire, settings_of
from ds_hessian.vectors import VectorSpace, random_vector
from ds_hessian.version import __version__

logger = logging.getLogger(__name__)

Lessons = dict[str, dict[int, dict[str, Any]]]

ALIKE = ("operator", "outputs", "probe", "finite_difference", "dropout", "batch_statistics")
"""Settings that steps of the displacement depend on."""

OF_DATA = ("loud",)
"""What lessons tell of their micro-batches, and of no others."""

S = TypeVar("S", bound=SavedRun)
T = TypeVar("T")


class _OtherTraining(HessianError):
    """The state on disk is of another training that came to this step."""

    def __init__(self, place: Path) -> None:
        super().__init__(f"the state in {place} is of other weights or micro-batches")
        self.place = place


@dataclass(frozen=True)
class Subject:
    """The job, the loss and the settings of a measurement.

    Attributes:
        backend: The job.
        objective: This rank's micro-batches and their loss, whose Hessian is taken.
        config: The settings.
        retires: Whether a state on disk of the same measurement at another optimizer step, or of
            another training that came to this one, is removed, with a line in the log; else it is
            refused.
        choice: How the precision of the passes, which the settings then name, was chosen.
        crossing: Why kinks are crossed although the settings did not say so; else empty.
        reserved: Bytes of the vectors' memory that this rank is planned to need beside the sides of
            kinks.
        lessons: What the run's measurements have taught, by kind, loss and optimizer step; those of
            the latest two steps.
    """

    backend: Backend
    objective: Objective
    config: HessianConfig
    retires: bool = False
    choice: ChosenPrecision = field(default_factory=ChosenPrecision)
    crossing: str = ""
    reserved: int = 0
    lessons: Lessons = field(default_factory=dict)

    @property
    def passes(self) -> Passes:
        """The arithmetic of forward and backward."""
        config = self.config
        kinks = config.finite_difference.kinks
        return Passes(
            config.dropout, precision_of(config), config.batch_statistics, kinks, self.reserved
        )

    def draw(self, number: int) -> Tensor:
        """Draw the random unit vector of this number, `(n_local,)`, as configured."""
        backend, config = self.backend, self.config
        return random_vector(backend.layout, backend.space, config.seed, number, config.probe)

    @contextmanager
    def open(
        self,
        kind: type[S] | None = None,
        folder: str = "",
        identity: Mapping[str, object] | None = None,
    ) -> Iterator[tuple[Measurement, S | None]]:
        """Guard the body, which continues an interrupted measurement of the same kind.

        Args:
            kind: Class of its state in the folder of `resume`; None if it keeps no state.
            folder: Name of its folder there.
            identity: What identifies it, beside settings, model and data; JSON values.

        Yields:
            The open measurement, and its state on disk (None without `resume`).

        Raises:
            ConfigError: `resume` has the state of another measurement, or a damaged one; or
                `sampling` is on with a single micro-batch.

        Collective.
        """
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._open(kind, folder, identity))
            except _OtherTraining as error:
                what = "other weights or micro-batches of this optimizer step"
                discard(error.place, self.backend.space, what, self.backend.step)
                found = stack.enter_context(self._open(kind, folder, identity))
            yield found

    @contextmanager
    def _open(
        self, kind: type[S] | None, folder: str, identity: Mapping[str, object] | None
    ) -> Iterator[tuple[Measurement, S | None]]:
        """Do what `open` says with the state that is there."""
        backend, resume, subject = self.backend, self.config.resume, self
        began, reduced = time.perf_counter(), backend.space.all_reduces
        saved: S | None = None
        with ExitStack() as stack:
            if kind is not None and resume is not None:
                place = Path(resume) / folder
                if self.retires:
                    self._retire(place, identity or {})
                saved = kind(place, backend.layout, backend.space)
                stack.callback(saved.close)
                stack.enter_context(saved.random_states())
                began, reduced = began - saved.seconds, reduced - saved.all_reduces
                subject = self._as_begun(saved.precision, place)
            session = stack.enter_context(backend.measuring(self.objective, subject.passes))
            if self.config.sampling:
                require_several(session)
            operator = self.curvature(session)
            self.choice.evaluated = True
            if session.kinks.holds:  # else the next measurement may hold them again
                self.objective.sides = session.kinks.held
            data = self.objective.fingerprint()
            taught = self._taught(operator, folder, data)
            if saved is not None:
                here = {**subject._identity(session, operator), **(identity or {})}
                if self.retires and saved.is_of_other_training(here, session.unit_roundoff):
                    raise _OtherTraining(place)
                saved.resume(operator, here, session.unit_roundoff)
            yield Measurement(subject, session, operator, saved, began, reduced), saved
            if isinstance(operator, Taught) and (found := operator.lessons()) is not None:
                taught[self.backend.step] = found | {"data": data}
                for step in sorted(taught)[:-2]:
                    del taught[step]

    def _taught(self, operator: Curvature, kind: str, data: str) -> dict[int, dict[str, Any]]:
        """Let an operator begin with what a measurement of its kind and loss taught at the latest
        other step; return what those of all steps did. At the same step figures repeat.

        Collective: one small all-reduce.
        """
        settings, here = settings_of(self.config), self.backend.step
        alike = {key: settings[key] for key in ALIKE}
        like = [kind, alike, names_of(self.backend), self.objective.loss_code]
        taught = self.lessons.setdefault(json.dumps(like), {})
        before = max((step for step in taught if step != here), default=None)
        # A measurement that has failed late may have taught some ranks alone.
        everywhere = self.backend.space.everywhere(before is not None)
        if before is not None and everywhere and isinstance(operator, Taught):
            lessons = taught[before]
            if not self.backend.space.everywhere(lessons["data"] == data):
                lessons = {key: value for key, value in lessons.items() if key not in OF_DATA}
            operator.begin(lessons)
        return taught

    def _retire(self, place: Path, identity: Mapping[str, object]) -> None:
        """Remove a state of this measurement at another step, in whichever precision was chosen."""
        settings = [self.config]
        if self.choice.why:
            settings = [in_precision(self.config, p) for p in get_args(Precision)]
        for config in settings:
            same = {"settings": settings_of(config), **identity}
            retire(place, self.backend.space, same, self.backend.step)

    def _as_begun(self, precision: str | None, place: Path) -> Subject:
        """Return the subject in the precision in which the state on disk was begun, if there is
        one.

        Raises:
            ConfigError: it was begun in fp32, which is not possible any more.
        """
        if not self.choice.why or precision in (None, precision_of(self.config)):
            return self
        if precision == "fp32":
            raise ConfigError(
                f"the state in {place} was begun with passes in fp32, which are not possible now: "
                f"{self.choice.why}; make them possible, or remove the folder to begin anew"
            )
        return self.as_training_runs("the state on disk was begun so")

    def as_training_runs(self, why: str) -> Subject:
        """Return the subject with the passes that training has."""
        return replace(self, config=in_precision(self.config, "model"), choice=ChosenPrecision(why))

    def with_kinks_crossed(self, why: str) -> Subject:
        """Return the subject with kinks that are crossed."""
        config = self.config.with_overrides(finite_difference={"kinks": "crossed"})
        return replace(self, config=config, crossing=why)

    def curvature(self, session: Session, operator: OperatorName | None = None) -> Curvature:
        """Return the curvature of a name in an open session, that of the settings if None.

        A measurement may have several: `subject.curvature(run.session, "ggn")`. Collective.
        """
        config = self.config
        settings, name = config.finite_difference, operator or config.operator
        found = curvature(session, settings, name, config.outputs)
        seen = seen_of(*found.outputs_read, self.objective.batches)
        if seen is not None:
            self.objective.outputs[config.outputs] = seen
        return found

    def _identity(self, session: Session, operator: Curvature) -> dict[str, object]:
        parameters, step = self.backend.parameters, self.backend.step
        return identity_of(session, operator, self.objective, self.config, step, parameters)

    def provenance(self, spent: OperatorCost, outputs: str | None) -> Provenance:
        """Return the model, the data and the settings.

        Args:
            spent: The cost of the measurement's operator, which knows the choices that were held.
            outputs: The outputs that the operator found; None for the Hessian.
        """
        found, config = self.backend.describe(), self.config
        difference = config.finite_difference
        return Provenance(
            step=self.backend.step,
            num_micro_batches=self.objective.num_micro_batches,
            layout=found.layout,
            world_size=self.backend.space.world_size,
            model_dtype=found.model_dtype,
            data_fingerprint=self.objective.fingerprint(),
            versions={
                **found.versions,
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            seed=config.seed,
            probe=config.probe,
            displacement=difference.displacement,
            scheme=difference.scheme,
            tolerance=difference.tolerance,
            precision=precision_of(config),
            precision_reason=self.choice.why,
            dropout=config.dropout,
            operator=config.operator,
            outputs=outputs,
            parameters=names_of(self.backend),
            batch_statistics=config.batch_statistics,
            held_choices=spent.choices,
            flipped_choices=spent.flips / max(spent.products, 1),
            kinks=_kinks(spent),
            kinks_reason=self.crossing or spent.kinks_crossed or "",
            held_sides=spent.sides,
            crossed_sides=spent.crossed / max(spent.products, 1),
            ds_hessian_version=__version__,
            optimizer=found.optimizer,
        )


def _kinks(spent: OperatorCost) -> str:
    """Return what became of kinks, in a word."""
    if spent.kinks_crossed is not None:
        return "crossed"
    return "held" if spent.sides else ""


@dataclass(frozen=True)
class Measurement:
    """An open measurement.

    Attributes:
        subject: What is measured.
        session: The guarded job.
        curvature: The Hessian.
        saved: Its state on disk; None without `resume`.
        began: When it was first begun, on the clock of `time.perf_counter`.
        reduced: All-reduces of the vector space that are not its own.
    """

    subject: Subject
    session: Session
    curvature: Curvature
    saved: SavedRun | None
    began: float
    reduced: int

    def cost(self) -> Cost:
        """Return its cost so far, over all processes that worked on it."""
        return cost_of(self.curvature.cost, self.session.space, self.began, self.reduced)

    def provenance(self) -> Provenance:
        """Return what was measured, with the outputs that the operator found."""
        return self.subject.provenance(self.curvature.cost, self.curvature.outputs)

    def finished(self) -> None:
        """Remove the state on disk: its record is made. Collective."""
        if self.saved is not None:
            self.saved.clear()


def with_fallback(subject: Subject, make: Callable[[Subject], T]) -> T:
    """Return what `make` makes of a subject.

    Where passes in fp32 were chosen, and their first evaluation fails by what another arithmetic
    can cause, it is made once more with the passes that training has: a model can cast to 16 bits
    by itself, have kernels for these alone, or need more memory than was foreseen.

    Where kinks are held, and functions that have them turn out to be called differently often off
    the weights, it is made once more with kinks that are crossed.

    Raises:
        HessianError: what `make` raises.

    Collective.
    """
    try:
        return make(subject)
    except HessianError as error:
        crossing = _failed_by_kinks(subject, error)
        why = None if crossing else _failed_by_precision(subject, error)
        if why is None and crossing is None:
            raise
    if crossing is not None:
        if subject.backend.space.rank == 0:
            logger.warning("kinks cannot be held, they are crossed: %s", crossing)
        return with_fallback(subject.with_kinks_crossed(crossing), make)
    if subject.backend.space.rank == 0:
        logger.warning("passes in fp32 have failed, they are now those of training: %s", why)
    return make(subject.as_training_runs(f"passes in fp32 have failed: {why}"))


BY_PRECISION = (RuntimeError, TypeError, ValueError, AssertionError)
"""What kernels and layers raise on tensors of another type than theirs, and torch without memory;
not what a user's code raises of its own classes, nor what is wrong in any arithmetic."""


def _failed_by_precision(subject: Subject, error: HessianError) -> str | None:
    """Return the first rank's message if passes in fp32, which were chosen, may be the cause.

    Collective, where passes in fp32 were chosen.
    """
    choice = subject.choice
    if not choice.why or choice.evaluated or precision_of(subject.config) != "fp32":
        return None
    own: BaseException | None = error
    while isinstance(own, MeasurementError):  # of what another rank raised it has no cause
        own = own.__cause__
    blamed = isinstance(own, UnsupportedError)
    blamed |= isinstance(own, BY_PRECISION) and not isinstance(own, HessianError)
    found = gather_objects((own is None, blamed, " ".join(str(error).split())))
    if not all(elsewhere or here for elsewhere, here, _ in found):
        return None
    return next((text for _, here, text in found if here), None)


def _failed_by_kinks(subject: Subject, error: HessianError) -> str | None:
    """Return the first rank's message if kinks were to be held, and cannot be.

    Collective, where they were to be held.
    """
    if subject.config.finite_difference.kinks == "crossed":
        return None
    own: BaseException | None = error
    while own is not None and not isinstance(own, PieceError):
        own = own.__cause__
    found = gather_objects(None if own is None else " ".join(str(own).split()))
    return next((text for text in found if text is not None), None)


def cost_of(spent: OperatorCost, space: VectorSpace, began: float, reduced: int) -> Cost:
    """Return the cost of a measurement so far; for `began` and `reduced` see `Measurement`."""
    return Cost(
        seconds_total=time.perf_counter() - began,
        seconds_per_product=spent.product_seconds / max(spent.products, 1),
        seconds_per_gradient=spent.gradient_seconds,
        products=spent.products,
        gradient_evaluations=spent.gradient_evaluations,
        trials=spent.trials,
        all_reduces=space.all_reduces - reduced,
        one_sided=spent.one_sided,
        extrapolated=spent.extrapolated,
        beyond_tolerance=spent.beyond_tolerance,
    )
