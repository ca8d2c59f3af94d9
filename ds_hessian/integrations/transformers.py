"""Spectra in the Trainer of transformers: under DeepSpeed, or in plain torch (also in DDP).

    trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json", ...), ...)
    trainer.add_callback(HessianCallback(trainer))
    trainer.train()

After every `interval`-th optimizer step a spectrum is taken, written to disk and logged through
`trainer.log`, so that it is in `trainer.state.log_history` and in whatever the Trainer reports to.
The loss is what the Trainer differentiates: `compute_loss`, with label smoothing or an override,
and with its own division by the tokens or micro-batches of an accumulation window, so that
the gradient of the measured loss is the one that training follows. It is taken on copies of the
first micro-batches of training, which stays bit for bit the same.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_hessian.backends.zero import settings_of
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.hosts import attach
from ds_hessian.records import HessianSharpness, HessianSpectrum
from ds_hessian.schedule import Measurements, copied, due, write_monitor
from ds_hessian.show.monitor import figures_of

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine


class _MicroBatch(TypedDict):
    """A captured micro-batch.

    Attributes:
        inputs: The inputs of the model.
        num_items: The number of tokens by which the Trainer divides; None where it does not.
        repeats: The factor from the loss of one micro-batch to the sum over a window.
    """

    inputs: dict[str, object]
    num_items: Tensor | int | None
    repeats: int


class HessianCallback(Measurements, TrainerCallback):  # type: ignore[misc]
    """A callback that takes spectra every `interval` optimizer steps of a Trainer.

    An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
    `failures`. Spectra are kept in `spectra`, by step.

    Args:
        trainer: The Trainer to which the callback is added.
        config: The settings; None for the "hessian" section of the Trainer's DeepSpeed config.
            Needed where the Trainer runs without DeepSpeed.

    Attributes:
        micro_batches: The micro-batches captured so far.
    """

    def __init__(self, trainer: Trainer, config: HessianConfig | None = None) -> None:
        super().__init__()
        self.trainer, self._given = trainer, config
        self.micro_batches: list[_MicroBatch] = []
        self._engine: DeepSpeedEngine | nn.Module | None = None
        self._hessian: Hessian | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Give the Trainer's engine its Hessian, and begin to copy micro-batches.

        Raises:
            UnsupportedError: the Trainer uses a feature that is not supported.
            ConfigError: there is no "hessian" section, it is wrong, or it has no interval.
        """
        engine: Any = self.trainer.model_wrapped
        section = HessianConfig.from_deepspeed(settings_of(engine)) if self._has_engine else None
        config = self._given or section or HessianConfig()
        if not config.scheduled:
            raise ConfigError(
                "hessian.interval, or hessian.sharpness_interval, must be above 0 for "
                "HessianCallback: both are 0"
            )
        self.config = config
        if self._engine is not engine:
            self._engine = engine
            # The callback measures at the end of the Trainer's step, not in the middle of it.
            on_request = config.with_overrides(interval=0, sharpness_interval=0, start_step=0)
            optimizer = None if self._has_engine else _unwrapped(self.trainer.optimizer)
            self._hessian = attach(engine, optimizer, on_request)
        self._stop()  # of a training that did not come to its end
        self._compute_loss = self.trainer.compute_loss
        if len(self.micro_batches) < config.num_micro_batches:
            self._capture()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Leave the Trainer as it was."""
        self._stop()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Make the measurements that are due. Collective."""
        assert self._hessian is not None
        if not self._has_engine:  # which counts its steps itself
            self._hessian.step = state.global_step
        step = self._hessian.step
        should_log = control.should_log  # which trainer.log resets, and the Trainer needs
        for kind in due(self.config, step):
            self.take(kind, step, self._ready, self._write)
        control.should_log = should_log

    @property
    def _has_engine(self) -> bool:
        return bool(self.trainer.is_deepspeed_enabled)

    def _capture(self) -> None:
        """Copy the inputs of the Trainer's next losses, until there are enough."""
        inner = self._compute_loss

        @functools.wraps(inner)
        def capturing(
            model: nn.Module, inputs: dict[str, object], *rest: Any, **named: Any
        ) -> object:
            if model.training:
                num_items = named.get("num_items_in_batch")
                self.micro_batches.append(
                    {
                        "inputs": copied(dict(inputs)),
                        "num_items": copied(num_items),
                        "repeats": self._repeats(num_items),
                    }
                )
                if len(self.micro_batches) == self.config.num_micro_batches:
                    self._stop()
            return inner(model, inputs, *rest, **named)

        self.trainer.__dict__["compute_loss"] = capturing

    def _repeats(self, num_items: Tensor | int | None) -> int:
        """Return how often a loss counts: a share of a window's, once for each micro-batch of it.

        `Trainer.training_step` divides the loss by their number unless it is a share already.
        """
        trainer = self.trainer
        is_share = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_share is None:
            by_token = trainer.model_accepts_loss_kwargs and num_items is not None
            is_share = by_token or trainer.compute_loss_func is not None
        return int(trainer.current_gradient_accumulation_steps) if is_share else 1

    def _stop(self) -> None:
        self.trainer.__dict__.pop("compute_loss", None)

    def _ready(self) -> Hessian:
        assert self._hessian is not None
        if not self._hessian.ready:
            self._stop()
            self._hessian.use(self.micro_batches, self._loss)
        return self._hessian

    def _loss(self, engine: nn.Module, micro_batch: _MicroBatch) -> Tensor:
        with self.trainer.compute_loss_context_manager():
            inputs, num_items = dict(micro_batch["inputs"]), micro_batch["num_items"]
            loss: Any = self._compute_loss(engine, inputs, num_items_in_batch=num_items)
        return loss * micro_batch["repeats"]

    def _write(self, record: HessianSpectrum | HessianSharpness, picture: Path | None) -> None:
        if self._has_engine:
            write_monitor(self.trainer.model_wrapped.monitor, record, picture)
        self.trainer.log({f"hessian/{name}": value for name, value in figures_of(record).items()})


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of Accelerate's."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
