"""Automatic measurements, every so many optimizer steps, on micro-batches fixed for the run.

Spectra every `interval` steps (or at logarithmic spacing) and at `steps`, sharpness every
`sharpness_interval`, curvatures along gradient and update every `curvature_interval`; all that are
due. Step 0, where it is one of `steps`, is measured when `hessian.use(batches, loss_fn)` gives the
micro-batches before the first optimizer step: training itself has read none by then.

The micro-batches are the first `num_micro_batches` with which training calls the engine, copied;
nothing is drawn from the user's iterator. They are kept with the results, and a job that is resumed
measures the same ones (`ds_hessian.slices`). `hessian.use(batches, loss_fn)` before the first
measurement replaces them, and is needed where the model does not return its loss.

An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
`engine.hessian_schedule.failures`; the training state is restored as after any failure.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from ds_hessian.backends.containers import Call, copied
from ds_hessian.backends.function import FixedFunction
from ds_hessian.config import HessianConfig
from ds_hessian.errors import HessianError
from ds_hessian.hessian import Hessian
from ds_hessian.ranks import collective, report
from ds_hessian.records import PICTURE, HessianCurvatures, HessianSharpness, HessianSpectrum
from ds_hessian.show.monitor import (
    monitor_events,
    stability,
    write_comet,
    write_tensorboard,
    write_wandb,
)
from ds_hessian.slices import use_settled

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine, Private

logger = logging.getLogger(__name__)


class Capture:
    """Copies of the first calls of an engine's forward in training.

    Args:
        engine: The module that training calls.
        model: The module whose mode distinguishes training from evaluation.
        count: The number of calls to copy.
        step: A function that returns the number of optimizer steps made so far.

    Attributes:
        calls: The calls copied so far.
        resumed: Whether training had made steps before the first of them.
        error: Why a call could not be copied; training continues, and the measurement raises it.
    """

    def __init__(
        self,
        engine: nn.Module,
        model: nn.Module,
        count: int,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.model, self.count, self.calls = model, count, list[Call]()
        self.step, self.resumed = step, False
        self.error: Exception | None = None
        self._handle = engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @property
    def full(self) -> bool:
        """True if there are as many calls as were requested."""
        return len(self.calls) == self.count

    def stop(self) -> None:
        """Stop capturing."""
        self._handle.remove()

    def fix(self, hessian: Hessian) -> None:
        """Stop capturing, and make the calls the micro-batches of a Hessian that has none yet; or
        those of before the job was resumed (`ds_hessian.slices`).

        Raises:
            MeasurementError: some rank could not copy its micro-batches.

        Collective.
        """
        self.stop()
        use_settled(hessian, hessian.use, self.calls, self.resumed, self.error)

    def _on_forward(
        self, engine: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self.model.training and not FixedFunction.is_evaluated():
            # The Trainer of transformers has its models divide by the tokens of a whole step, over
            # all ranks; without the argument they return the mean loss of the micro-batch.
            kwargs = {k: v for k, v in kwargs.items() if k != "num_items_in_batch"}
            self.resumed = self.resumed or (not self.calls and self.step() > 0)
            try:
                self.calls.append(Call(copied(args), copied(kwargs)))
            except Exception as error:  # raised by `fix`
                self.error = error
            if self.full or self.error is not None:
                self.stop()


Kind = Literal["spectrum", "sharpness", "curvatures"]
Scheduled = HessianSpectrum | HessianSharpness | HessianCurvatures
"""The records of automatic measurements."""
PER_DECADE = 4
"""Measurements in each decade of steps at logarithmic spacing."""


def due(config: HessianConfig, step: int, default: int = 0) -> list[Kind]:
    """Return the kinds of measurement due after this optimizer step.

    Args:
        config: The settings, with the intervals.
        step: The number of optimizer steps made so far.
        default: The interval of spectra where the configuration has neither `interval` nor `steps`.
    """
    started = step >= config.start_step
    intervals: dict[Kind, int | Literal["log"]] = {
        "spectrum": config.interval or (0 if config.steps else default),
        "sharpness": config.sharpness_interval,
        "curvatures": config.curvature_interval,
    }
    asked: dict[Kind, bool] = {"spectrum": step in config.steps}
    return [
        kind
        for kind, interval in intervals.items()
        if asked.get(kind) or (started and _on(interval, step))
    ]


def _on(interval: int | Literal["log"], step: int) -> bool:
    """Return whether a step above 0 is one of the interval's."""
    if step < 1 or not interval:
        return False
    if interval == "log":
        return step == round(10 ** (round(PER_DECADE * math.log10(step)) / PER_DECADE))
    return step % interval == 0


class Measurements:
    """The results of automatic measurements.

    Attributes:
        spectra: `{step: record}` of the spectra.
        sharpness: `{step: record}` of the sharpness.
        curvatures: `{step: record}` of the curvatures along directions.
        failures: `{step: error}` of failed measurements; of several at a step, the last.
        before_start: What to do for a measurement at step 0, for a message.
    """

    before_start = "give the micro-batches before training, by hessian.use(batches)"

    def __init__(self) -> None:
        self.spectra: dict[int, HessianSpectrum] = {}
        self.sharpness: dict[int, HessianSharpness] = {}
        self.curvatures: dict[int, HessianCurvatures] = {}
        self.failures: dict[int, HessianError] = {}
        self._above: dict[Kind, bool] = {}

    def _warn_of_edge(self, kind: Kind, record: Scheduled) -> None:
        """Warn where the optimizer's edge of stability was crossed since the last measurement."""
        found = None if isinstance(record, HessianCurvatures) else stability(record)
        above = found is not None and found[0] > found[1]
        if found is not None and above and not self._above.get(kind):
            logger.warning(
                "Hessian %s at step %d: its largest eigenvalue %.4g is above the edge of stability "
                "%.4g of %s",
                *(kind, record.provenance.step, *found, record.provenance.optimizer),
            )
        self._above[kind] = above

    def warn_of_start(self, config: HessianConfig, before: int) -> None:
        """Warn, at the first optimizer step, that step 0 was due and could not be measured.

        Args:
            config: The settings.
            before: The number of optimizer steps made before this one.
        """
        if before == 0 and 0 in config.steps and not {0} & {*self.spectra, *self.failures}:
            text = "no Hessian spectrum at step 0, which hessian.steps asks for: %s"
            report(logger.warning, text, self.before_start)

    def take(
        self,
        kind: Kind,
        step: int,
        device: torch.device,
        config: HessianConfig,
        ready: Callable[[], Hessian],
        write: Callable[[Scheduled, Path | None], None],
    ) -> None:
        """Measure now, save the record, and write it to the host's monitor. Collective.

        Args:
            kind: The measurement to make.
            step: The number of optimizer steps made so far.
            device: The device of the tensors of the job's collectives.
            config: The settings.
            ready: A function that returns the Hessian, its micro-batches fixed.
            write: A function that writes record and picture (None if none was drawn) to the
                monitor; called on every rank.
        """
        first = not dist.is_initialized() or dist.get_rank() == 0
        try:
            with collective(f"taking a Hessian {kind} at step {step}", device, False, config.given):
                record, picture = self._record(kind, ready())
                if isinstance(record, HessianSpectrum):
                    self.spectra[step] = record
                elif isinstance(record, HessianSharpness):
                    self.sharpness[step] = record
                else:
                    self.curvatures[step] = record
                write(record, picture)
                if first:
                    logger.info("Hessian %s at step %d\n%s", kind, step, record.table())
                    self._warn_of_edge(kind, record)
        except HessianError as error:  # every rank has it: training must not end by a measurement
            self.failures[step] = error
            if first:
                text = "no Hessian %s at step %d; training continues"
                report(logger.exception, text, kind, step)

    def _record(self, kind: Kind, hessian: Hessian) -> tuple[Scheduled, Path | None]:
        """Measure and save; return the record and its picture."""
        hessian.output.claim()  # before the time of a measurement is spent
        with hessian.retiring():  # a killed run's state must not end later measurements
            record = _measured(kind, hessian)
        folder = hessian.save(record)
        drawn = kind == "spectrum" and hessian.config.plot
        return record, folder / PICTURE if drawn else None


def _measured(kind: Kind, hessian: Hessian) -> Scheduled:
    if kind == "spectrum":
        return hessian.spectrum()
    if kind == "sharpness":
        return hessian.sharpness(preconditioned=None)
    named = hessian.config.operator
    operator = "ggn" if named == "hessian" else named
    return hessian.curvatures(vectors=hessian.config.curvature_vectors, operator=operator)


class Schedule(Measurements):
    """Measures a job on the intervals, on the micro-batches with which training calls it first.

    Args:
        module: The module that training calls: an engine, a model or its wrapper.
        hessian: Its Hessian.
        write: Writes a record and its picture (None if none was drawn) to the host's monitor.
    """

    def __init__(
        self,
        module: nn.Module,
        hessian: Hessian,
        write: Callable[[Scheduled, Path | None], None] = lambda record, picture: None,
    ) -> None:
        super().__init__()
        self.hessian, self._write = hessian, write
        hessian.used = self._used
        self._captured: Capture | None = Capture(
            module, hessian.modules[0], hessian.config.num_micro_batches, lambda: hessian.step
        )

    def after_step(self) -> None:
        """Make the measurements that are due after an optimizer step. Collective."""
        self.warn_of_start(self.hessian.config, int(self.hessian.step) - 1)
        self._measure_due()

    def measure(self, kind: Kind = "spectrum") -> None:
        """Measure now, save the record, and write it to the monitor. Collective."""
        step, device = int(self.hessian.step), self.hessian.backend.space.device
        self.take(kind, step, device, self.hessian.config, self._ready, self._write)

    def _measure_due(self) -> None:
        for kind in due(self.hessian.config, int(self.hessian.step)):
            self.measure(kind)

    def _used(self) -> None:
        if int(self.hessian.step) == 0 and 0 not in self.spectra:
            self._measure_due()

    def _ready(self) -> Hessian:
        if self._captured is not None:
            self._captured.fix(self.hessian)
            self._captured = None
        return self.hessian


def follow(engine: DeepSpeedEngine, hessian: Hessian) -> None:
    """Measure an engine after its steps; the schedule is `engine.hessian_schedule`."""

    def write(record: Scheduled, picture: Path | None) -> None:
        write_monitor(engine.monitor, record, picture)

    schedule = engine.hessian_schedule = Schedule(engine, hessian, write)
    inner = engine.step

    def step(*args: object, **kwargs: object) -> object:
        before = engine.global_steps
        result = inner(*args, **kwargs)
        if engine.global_steps != before:
            schedule.after_step()
        return result

    engine.step = step


def write_monitor(monitor: Private, record: Scheduled, picture: Path | None) -> None:
    """Write a record to every tool of DeepSpeed's monitor (they are on rank 0).

    All get the figures; TensorBoard, W&B and Comet a histogram and the picture too.
    """
    if monitor.tb_monitor is not None:
        write_tensorboard(monitor.tb_monitor.summary_writer, record, picture)
    if monitor.wandb_monitor is not None:
        import wandb

        write_wandb(wandb, record, picture)
    if monitor.csv_monitor is not None:
        monitor.csv_monitor.write_events(monitor_events(record))
    experiment = getattr(monitor.comet_monitor, "experiment", None)
    if experiment is not None:
        write_comet(experiment, record, picture)
