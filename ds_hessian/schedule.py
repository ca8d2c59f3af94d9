"""Spectra by themselves: every `interval` optimizer steps, on micro-batches fixed for the run.

The micro-batches are the first `num_micro_batches` with which training calls the engine, copied;
nothing is drawn from the user's iterator. `hessian.use(batches, loss_fn)` before the first spectrum
replaces them, and is needed where the model does not return its loss.

An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
`engine.hessian_schedule.failures`; the training state is restored as after any failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.objective import Call
from ds_hessian.errors import HessianError
from ds_hessian.results import HessianSpectrum, monitor_events

if TYPE_CHECKING:
    from ds_hessian.engine import HessianEngine

logger = logging.getLogger(__name__)


class Capture:
    """Copies of the first calls of an engine's forward in training.

    Args:
        engine: The engine.
        count: Of calls.

    Attributes:
        calls: Those seen so far.
    """

    def __init__(self, engine: Any, count: int) -> None:
        self.count, self.calls = count, list[Call]()
        self._handle = engine.register_forward_pre_hook(self._on_forward, with_kwargs=True)

    @property
    def full(self) -> bool:
        """Whether there are as many as were asked for."""
        return len(self.calls) == self.count

    def stop(self) -> None:
        """Capture no more."""
        self._handle.remove()

    def _on_forward(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if engine.module.training:
            self.calls.append(Call(_copy(args), _copy(kwargs)))
            if self.full:
                self.stop()


class Measurements:
    """What automatic measurements found.

    Attributes:
        spectra: `{step: record}` of what was measured.
        failures: `{step: error}` of what was not.
    """

    def __init__(self) -> None:
        self.spectra: dict[int, HessianSpectrum] = {}
        self.failures: dict[int, HessianError] = {}

    def take(
        self,
        step: int,
        ready: Callable[[], HessianEngine],
        write: Callable[[HessianSpectrum], None],
    ) -> None:
        """Take a spectrum now, save it, and tell the host's monitor. Collective.

        Args:
            step: Optimizer steps made so far.
            ready: Gives the Hessian, its micro-batches fixed.
            write: To the monitor; called on every rank.
        """
        first = dist.get_rank() == 0
        try:
            hessian = ready()
            spectrum = hessian.spectrum()
            hessian.save(spectrum)
        except HessianError as error:  # every rank has it: training must not end by a measurement
            self.failures[step] = error
            if first:
                logger.exception("no Hessian spectrum at step %d; training goes on", step)
            return
        self.spectra[step] = spectrum
        if first:
            logger.info("Hessian spectrum at step %d\n%s", step, spectrum.table())
        write(spectrum)


class Schedule(Measurements):
    """Captures micro-batches from training and takes a spectrum every `interval` steps."""

    def __init__(self, hessian: HessianEngine) -> None:
        super().__init__()
        self.hessian, self.config = hessian, hessian.config
        self.captured: Capture | None = None

    def install(self) -> None:
        """Hook the engine's forward (until enough is captured) and its step."""
        engine = self.hessian.engine
        engine.hessian_schedule = self
        self.captured = Capture(engine, self.config.num_micro_batches)
        inner = engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            before = engine.global_steps
            result = inner(*args, **kwargs)
            if engine.global_steps != before and self.is_due(engine.global_steps):
                self.measure()
            return result

        engine.step = step

    def is_due(self, step: int) -> bool:
        """Whether a spectrum belongs after this optimizer step."""
        return step >= self.config.start_step and step % self.config.interval == 0

    def measure(self) -> None:
        """Take a spectrum now, save it, and tell the monitor."""
        self.take(self.hessian.engine.global_steps, self._ready, self._write)

    def _ready(self) -> HessianEngine:
        if self.captured is not None:
            self.captured.stop()
            if not self.hessian.ready:
                self.hessian.use(self.captured.calls)
            self.captured = None
        return self.hessian

    def _write(self, spectrum: HessianSpectrum) -> None:
        if self.hessian.rank == 0:
            self.hessian.engine.monitor.write_events(monitor_events(spectrum))


def _copy(value: Any) -> Any:
    """Tensors copied (the user may write the next batch into them), containers rebuilt."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_copy(v) for v in value)
    return value
