"""Automatic measurements, every so many optimizer steps, on micro-batches fixed for the run.

Spectra every `interval` steps, sharpness every `sharpness_interval`, curvatures along gradient and
update every `curvature_interval`; all that are due.

The micro-batches are the first `num_micro_batches` with which training calls the engine, copied;
nothing is drawn from the user's iterator. `hessian.use(batches, loss_fn)` before the first
measurement replaces them, and is needed where the model does not return its loss.

An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
`engine.hessian_schedule.failures`; the training state is restored as after any failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from ds_hessian.backends.objective import Call
from ds_hessian.config import HessianConfig
from ds_hessian.errors import HessianError
from ds_hessian.hessian import Hessian
from ds_hessian.records import PICTURE, HessianCurvatures, HessianSharpness, HessianSpectrum
from ds_hessian.show.monitor import monitor_events, write_tensorboard, write_wandb

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine, Private

logger = logging.getLogger(__name__)


class Capture:
    """Copies of the first calls of an engine's forward in training.

    Args:
        engine: The module that training calls.
        model: The module whose mode distinguishes training from evaluation.
        count: The number of calls to copy.

    Attributes:
        calls: The calls copied so far.
    """

    def __init__(self, engine: nn.Module, model: nn.Module, count: int) -> None:
        self.model, self.count, self.calls = model, count, list[Call]()
        self._handle = engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @property
    def full(self) -> bool:
        """True if there are as many calls as were requested."""
        return len(self.calls) == self.count

    def stop(self) -> None:
        """Stop capturing."""
        self._handle.remove()

    def _on_forward(
        self, engine: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        if self.model.training:
            # The Trainer of transformers has its models divide by the tokens of a whole step, over
            # all ranks; without the argument they return the mean loss of the micro-batch.
            kwargs = {k: v for k, v in kwargs.items() if k != "num_items_in_batch"}
            self.calls.append(Call(copied(args), copied(kwargs)))
            if self.full:
                self.stop()


Kind = Literal["spectrum", "sharpness", "curvatures"]
Scheduled = HessianSpectrum | HessianSharpness | HessianCurvatures
"""The records of automatic measurements."""


def due(config: HessianConfig, step: int, default: int = 0) -> list[Kind]:
    """Return the kinds of measurement due after this optimizer step.

    Args:
        config: The settings, with the intervals.
        step: The number of optimizer steps made so far.
        default: The interval of spectra where the configuration has none.
    """
    intervals: dict[Kind, int] = {
        "spectrum": config.interval or default,
        "sharpness": config.sharpness_interval,
        "curvatures": config.curvature_interval,
    }
    if step < config.start_step:
        return []
    return [kind for kind, interval in intervals.items() if interval and step % interval == 0]


class Measurements:
    """The results of automatic measurements.

    Attributes:
        spectra: `{step: record}` of the spectra.
        sharpness: `{step: record}` of the sharpness.
        curvatures: `{step: record}` of the curvatures along directions.
        failures: `{step: error}` of failed measurements; of several at a step, the last.
    """

    def __init__(self) -> None:
        self.spectra: dict[int, HessianSpectrum] = {}
        self.sharpness: dict[int, HessianSharpness] = {}
        self.curvatures: dict[int, HessianCurvatures] = {}
        self.failures: dict[int, HessianError] = {}

    def take(
        self,
        kind: Kind,
        step: int,
        ready: Callable[[], Hessian],
        write: Callable[[Scheduled, Path | None], None],
    ) -> None:
        """Measure now, save the record, and write it to the host's monitor. Collective.

        Args:
            kind: The measurement to make.
            step: The number of optimizer steps made so far.
            ready: A function that returns the Hessian, its micro-batches fixed.
            write: A function that writes record and picture (None if none was drawn) to the
                monitor; called on every rank.
        """
        first = not dist.is_initialized() or dist.get_rank() == 0
        record: Scheduled
        try:
            hessian = ready()
            with hessian.retiring():  # a killed run's state must not end later measurements
                record = _measured(kind, hessian)
            folder = hessian.save(record)
        except HessianError as error:  # every rank has it: training must not end by a measurement
            self.failures[step] = error
            if first:
                logger.exception("no Hessian %s at step %d; training continues", kind, step)
            return
        if isinstance(record, HessianSpectrum):
            self.spectra[step] = record
        elif isinstance(record, HessianSharpness):
            self.sharpness[step] = record
        else:
            self.curvatures[step] = record
        if first:
            logger.info("Hessian %s at step %d\n%s", kind, step, record.table())
        drawn = kind == "spectrum" and hessian.config.plot
        write(record, folder / PICTURE if drawn else None)


def _measured(kind: Kind, hessian: Hessian) -> Scheduled:
    if kind == "spectrum":
        return hessian.spectrum()
    if kind == "sharpness":
        return hessian.sharpness(preconditioned=None)
    named = hessian.config.operator
    operator = "ggn" if named == "hessian" else named
    return hessian.curvatures(vectors=hessian.config.curvature_vectors, operator=operator)


class Schedule(Measurements):
    """Captures micro-batches from training and measures on the intervals."""

    def __init__(self, engine: DeepSpeedEngine, hessian: Hessian) -> None:
        super().__init__()
        self.engine, self.hessian, self.config = engine, hessian, hessian.config
        self.captured: Capture | None = None

    def install(self) -> None:
        """Hook the engine's forward (until enough is captured) and its step."""
        engine = self.engine
        engine.hessian_schedule = self
        self.captured = Capture(engine, engine.module, self.config.num_micro_batches)
        inner = engine.step

        def step(*args: object, **kwargs: object) -> object:
            before = engine.global_steps
            result = inner(*args, **kwargs)
            if engine.global_steps != before:
                for kind in self.due(engine.global_steps):
                    self.measure(kind)
            return result

        engine.step = step

    def due(self, step: int) -> list[Kind]:
        """Return the kinds of measurement due after this optimizer step."""
        return due(self.config, step)

    def measure(self, kind: Kind = "spectrum") -> None:
        """Measure now, save the record, and write it to the monitor."""
        self.take(kind, self.engine.global_steps, self._ready, self._write)

    def _ready(self) -> Hessian:
        if self.captured is not None:
            self.captured.stop()
            if not self.hessian.ready:
                self.hessian.use(self.captured.calls)
            self.captured = None
        return self.hessian

    def _write(self, record: Scheduled, picture: Path | None) -> None:
        write_monitor(self.engine.monitor, record, picture)


class ModuleSchedule(Measurements):
    """Measures a plain module on the intervals, when `hessian.step()` counts a step.

    Args:
        module: The module that training calls: the model, or its wrapper.
        hessian: Its Hessian.
    """

    def __init__(self, module: nn.Module, hessian: Hessian) -> None:
        super().__init__()
        self.hessian = hessian
        self._captured = Capture(module, hessian.modules[0], hessian.config.num_micro_batches)

    def after_step(self) -> None:
        """Make the measurements that are due. Collective."""
        step = int(self.hessian.step)
        for kind in due(self.hessian.config, step):
            self.take(kind, step, self._ready, lambda record, picture: None)

    def _ready(self) -> Hessian:
        self._captured.stop()
        if not self.hessian.ready:
            self.hessian.use(self._captured.calls)
        return self.hessian


def write_monitor(monitor: Private, record: Scheduled, picture: Path | None) -> None:
    """Write a record to every tool of DeepSpeed's monitor (they are on rank 0).

    TensorBoard and W&B get the picture too.
    """
    if monitor.tb_monitor is not None:
        write_tensorboard(monitor.tb_monitor.summary_writer, record, picture)
    if monitor.wandb_monitor is not None:
        import wandb

        write_wandb(wandb, record, picture)
    for tool in (monitor.csv_monitor, monitor.comet_monitor):
        if tool is not None:
            tool.write_events(monitor_events(record))


def copied(value: Any) -> Any:
    """Copy tensors, into which the user may write the next batch, and rebuild containers."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copied(v) for v in value)
    return value
