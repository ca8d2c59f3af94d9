"""Spectra in the Trainer of transformers: under DeepSpeed, or in plain torch (also in DDP).

    trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json", ...), ...)
    trainer.add_callback(HessianCallback(trainer))
    trainer.train()

After every `interval`-th optimizer step a spectrum is taken, written to disk and logged through
`Trainer.log`, so that it is in `trainer.state.log_history` and in whatever the Trainer reports to.
The loss is what the Trainer differentiates: `compute_loss`, with label smoothing or an override,
and with its own division by the tokens or micro-batches of an accumulation window, so that
the gradient of the measured loss is the one that training follows. It is taken on copies of the
first micro-batches of training, which stays bit for bit the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import CometCallback, TensorBoardCallback, WandbCallback

from ds_hessian.backends.containers import copied
from ds_hessian.backends.guard import Attributes
from ds_hessian.backends.objective import reading
from ds_hessian.backends.zero import settings_of
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.hessian import Hessian
from ds_hessian.hosts import attach, device_of
from ds_hessian.ranks import collective
from ds_hessian.schedule import Measurements, Scheduled, due, write_monitor
from ds_hessian.show.monitor import figures_of, write_comet, write_tensorboard, write_wandb
from ds_hessian.slices import use_settled
from ds_hessian.vectors import VectorSpace

if TYPE_CHECKING:
    from ds_hessian.backends.zero.host import DeepSpeedEngine


class _MicroBatch(TypedDict):
    """A captured micro-batch.

    Attributes:
        inputs: The inputs of the model.
        num_items: The number of tokens by which the Trainer divides; None where it does not.
        window: The number of micro-batches of its accumulation window.
        repeats: The factor from the loss of one micro-batch to the sum over a window.
    """

    inputs: dict[str, object]
    num_items: Tensor | int | None
    window: int
    repeats: int


class HessianCallback(Measurements, TrainerCallback):  # type: ignore[misc]
    """A callback that takes spectra every `interval` optimizer steps of a Trainer.

    An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
    `failures`. Spectra are kept in `spectra`, by step.

    Args:
        trainer: The Trainer to which the callback is added.
        config: The settings, or a dictionary of them; None for the "hessian" section of the
            Trainer's DeepSpeed config. Needed where the Trainer runs without DeepSpeed.
        batches: This rank's micro-batches: what the Trainer gives its model, each a mapping; None
            for the first ones of training, which a job that is resumed measures again.
        dataset: Instead of `batches`, a dataset whose first samples are measured, by the Trainer's
            collator and batch size; micro-batch number i of rank r is number i x ranks + r.

    Attributes:
        micro_batches: The micro-batches that are measured, or captured so far.

    Raises:
        ConfigError: both `batches` and `dataset` are given, or a setting is wrong.
    """

    before_start = "give HessianCallback its batches or a dataset"

    def __init__(
        self,
        trainer: Trainer,
        config: HessianConfig | Mapping[str, object] | None = None,
        batches: Iterable[Mapping[str, object]] | None = None,
        dataset: Sequence[object] | None = None,
    ) -> None:
        super().__init__()
        if batches is not None and dataset is not None:
            raise ConfigError("HessianCallback takes batches or a dataset, not both")
        self.trainer = trainer
        self._given = HessianConfig.parse(config) if isinstance(config, Mapping) else config
        self._batches, self._dataset = batches, dataset
        self.micro_batches: list[_MicroBatch] = []
        self._resumed = False
        self._error: Exception | None = None
        self._capturing: Any = None
        self._before: Any = None
        self._engine: DeepSpeedEngine | nn.Module | None = None
        self._hessian: Hessian | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        """Give the Trainer's engine its Hessian, and begin to copy micro-batches; where they are
        given, measure step 0 if it is due. Collective.

        Raises:
            UnsupportedError: the Trainer uses a feature that is not supported.
            ConfigError: there is no "hessian" section, it is wrong, or it has no interval.
        """
        engine: Any = self.trainer.model_wrapped
        # The intervals too must be the same on all ranks.
        entered = collective(
            "attaching", device_of(engine), given=lambda: self._settings(engine).given()
        )
        with entered:
            self.config = config = self._settings(engine)
            if self._engine is not engine:
                self._engine = engine
                # The callback measures at the end of the Trainer's step, not in the middle of it.
                on_request = config.with_overrides(
                    **dict.fromkeys(config.intervals, 0) | {"steps": [], "start_step": 0}
                )
                optimizer = None if self._has_engine else _unwrapped(self.trainer.optimizer)
                self._hessian = attach(engine, optimizer, on_request)
        self._stop()  # of a training that did not come to its end
        self._compute_loss = self.trainer.compute_loss
        if self._batches is None and self._dataset is None:
            assert self._hessian is not None
            if self._hessian.batches is None:  # not those of a training that has begun anew since,
                self.micro_batches, self._resumed = [], False  # with smaller ones
            if len(self.micro_batches) < config.num_micro_batches:
                self._capture()
        elif state.global_step == 0 and not {0} & {*self.spectra, *self.failures}:
            self._take_due(state, control)

    def _settings(self, engine: Any) -> HessianConfig:
        """Return the settings for what the Trainer trains.

        Raises:
            ConfigError: they are wrong, or measure nothing by themselves.
        """
        section = HessianConfig.from_deepspeed(settings_of(engine)) if self._has_engine else None
        config = self._given or section or HessianConfig()
        config.require_scheduled("HessianCallback")
        return config

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
        self.warn_of_start(self.config, state.global_step - 1)
        self._take_due(state, control)

    def _take_due(self, state: TrainerState, control: TrainerControl) -> None:
        assert self._hessian is not None
        if not self._has_engine:  # which counts its steps itself
            self._hessian.step = state.global_step
        step, device = int(self._hessian.step), self._hessian.backend.space.device
        should_log = control.should_log  # which Trainer.log resets, and the Trainer needs
        for kind in due(self.config, step):
            self.take(kind, step, device, self.config, self._ready, self._write)
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
            if model.training and self._capturing is capturing:
                self._copy(inputs, named.get("num_items_in_batch"))
            return inner(model, inputs, *rest, **named)

        self._before = self.trainer.__dict__.get("compute_loss")  # one that the user has set
        self.trainer.__dict__["compute_loss"] = self._capturing = capturing

    def _copy(self, inputs: dict[str, object], num_items: Tensor | int | None) -> None:
        assert self._hessian is not None
        self._resumed |= not self.micro_batches and self.trainer.state.global_step > 0
        window, repeats = self._window(num_items)
        try:
            copies = copied(dict(inputs)), copied(num_items)
        except Exception as error:  # raised when a measurement is due; training continues
            self._error = error
        else:
            self.micro_batches.append(_micro_batch(*copies, window, repeats))
        if self._error or len(self.micro_batches) == self.config.num_micro_batches:
            self._stop()

    def _window(self, num_items: Tensor | int | None) -> tuple[int, int]:
        """Return the micro-batches of the window, and how often a loss counts: a share of a
        window's, once for each micro-batch of it.

        `Trainer.training_step` divides the loss by their number unless it is a share already.
        """
        trainer = self.trainer
        is_share = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_share is None:
            by_token = trainer.model_accepts_loss_kwargs and num_items is not None
            is_share = by_token or trainer.compute_loss_func is not None
        window = int(trainer.current_gradient_accumulation_steps)
        return window, window if is_share else 1

    def _stop(self) -> None:
        own = self.trainer.__dict__
        if self._capturing is not None and own.get("compute_loss") is self._capturing:
            del own["compute_loss"]
            if self._before is not None:
                own["compute_loss"] = self._before
        self._capturing = self._before = None

    def _ready(self) -> Hessian:
        hessian = self._hessian
        assert hessian is not None
        if hessian.batches is None:
            self._stop()
            chosen = self._chosen(hessian.backend.space)
            given = chosen is not None
            captured = list(self.micro_batches) if chosen is None else chosen
            self.micro_batches = use_settled(
                hessian, self._use, captured, self._resumed, self._error, given
            )
        return hessian

    def _use(self, micro_batches: list[_MicroBatch]) -> None:
        assert self._hessian is not None
        self._hessian.use(micro_batches, self._loss)

    def _chosen(self, space: VectorSpace) -> list[_MicroBatch] | None:
        """Return the micro-batches that the user has chosen, read with the random states kept."""
        if self._batches is None and self._dataset is None:
            return None
        batches = () if self._batches is None else self._batches
        if isinstance(batches, Iterator):  # where reading fails, its rest must not be measured
            self._batches = ()
        with reading(batches, space.device):
            if self._dataset is not None:
                inputs = self._collated(self._dataset, space)
            else:
                inputs = [dict(batch) for batch in batches]
                self._batches = inputs
        return [_micro_batch(each) for each in inputs]

    def _collated(self, dataset: Sequence[object], space: VectorSpace) -> list[dict[str, object]]:
        trainer, count = self.trainer, self.config.num_micro_batches
        size = trainer.args.per_device_train_batch_size
        needed = count * space.world_size * size
        if len(dataset) < needed:
            raise ConfigError(
                f"the dataset of HessianCallback has {len(dataset)} samples, needed are {needed}: "
                f"{count} micro-batches of {size} on each of {space.world_size} ranks"
            )
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
        starts = [(i * space.world_size + space.rank) * size for i in range(count)]
        return [dict(collate([dataset[start + k] for k in range(size)])) for start in starts]

    def _loss(self, engine: nn.Module, micro_batch: _MicroBatch) -> Tensor:
        inputs, num_items = dict(micro_batch["inputs"]), micro_batch["num_items"]
        now = Attributes()  # an override may divide by it; the last window of an epoch is shorter
        now.set(self.trainer, "current_gradient_accumulation_steps", micro_batch["window"])
        try:
            with self.trainer.compute_loss_context_manager():
                loss: Any = self._compute_loss(engine, inputs, num_items_in_batch=num_items)
        finally:
            now.restore()
        return loss * micro_batch["repeats"]

    def _write(self, record: Scheduled, picture: Path | None) -> None:
        if self._has_engine:
            write_monitor(self.trainer.model_wrapped.monitor, record, picture)
        # Overrides, as those of trl, add what they have noted since the last entry and forget it:
        # that is for an entry of training.
        figures = {f"hessian/{name}": value for name, value in figures_of(record).items()}
        Trainer.log(self.trainer, figures)
        if self.trainer.is_world_process_zero():
            for callback in self.trainer.callback_handler.callbacks:
                _write_media(callback, record, picture)


def _micro_batch(
    inputs: dict[str, object],
    num_items: Tensor | int | None = None,
    window: int = 1,
    repeats: int = 1,
) -> _MicroBatch:
    return {"inputs": inputs, "num_items": num_items, "window": window, "repeats": repeats}


def _write_media(callback: TrainerCallback, record: Scheduled, picture: Path | None) -> None:
    """Write histogram and picture to a tool that the Trainer reports to; it logs the figures."""
    if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
        write_tensorboard(callback.tb_writer, record, picture, figures=False)
    elif isinstance(callback, WandbCallback) and getattr(callback, "_wandb", None) is not None:
        write_wandb(callback._wandb, record, picture, figures=False)
    elif isinstance(callback, CometCallback):
        import comet_ml

        experiment = comet_ml.get_running_experiment()
        if experiment is not None:
            write_comet(experiment, record, picture, figures=False)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of Accelerate's."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
