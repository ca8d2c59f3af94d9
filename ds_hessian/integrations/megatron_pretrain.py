"""Spectra in Megatron-LM's `pretrain()`, without an edit of Megatron-LM.

    from ds_hessian.megatron import with_hessian

    with_hessian(pretrain)(train_valid_test_datasets_provider, model_provider, ..., forward_step)

and `--hessian-interval 500` on the command line. The micro-batches are the first
`--hessian-num-micro-batches` that training reads, copied; nothing is drawn from its iterator. From
Megatron-LM 0.18 on, whose scripts parse their arguments themselves, `hessian_arguments` goes into
`parse_and_validate_args(extra_args_provider=...)`.

An automatic measurement never ends the training: what it raises is logged on rank 0 and kept in
`failures`. It takes long beside a step: fault-tolerance and NCCL timeouts must allow for it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ds_hessian.backends.megatron.objective import ForwardStep
from ds_hessian.backends.zero import of_first_tensor_rank
from ds_hessian.config import HessianConfig, leaves
from ds_hessian.errors import UnsupportedError
from ds_hessian.hessian import Hessian
from ds_hessian.hosts import hessian_of, megatron_hessian
from ds_hessian.records import HessianSharpness, HessianSpectrum
from ds_hessian.schedule import Kind, Measurements, due
from ds_hessian.show.monitor import write_tensorboard, write_wandb


def hessian_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--hessian-<key>` for every key of the "hessian" section; an `extra_args_provider`."""
    group = parser.add_argument_group(title="hessian")
    for path, field in leaves().items():
        if path != "enabled":
            flag = "--hessian-" + path.split(".")[-1].replace("_", "-")
            text = (field.description or "").replace("%", "%%")
            group.add_argument(flag, type=_value, default=None, help=text)
    return parser


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def config_from(args: Any) -> HessianConfig:
    """The settings given on the command line, over the defaults.

    Raises:
        ConfigError: a value is impossible.
    """
    names = [path.split(".")[-1] for path in leaves() if path != "enabled"]
    values = {name: getattr(args, f"hessian_{name}", None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return HessianConfig().with_overrides(**given)


class PretrainHook(Measurements):
    """Records micro-batches of training and takes spectra of it.

    `with_hessian` does everything at once. Where Megatron-LM must not be patched at all, in its own
    terms, with a spectrum at every evaluation::

        hook = PretrainHook()
        pretrain(..., hook.record(forward_step), extra_args_provider=hessian_arguments,
                 non_loss_data_func=hook.at_evaluation)
    """

    def __init__(self) -> None:
        super().__init__()
        self._config: HessianConfig | None = None
        self._hessian: Hessian | None = None
        self._recorded: dict[int, list[Any]] = {}

    @property
    def config(self) -> HessianConfig:
        """From Megatron-LM's arguments, read at the first use."""
        if self._config is None:
            from megatron.training import get_args

            self._config = config_from(get_args())
        return self._config

    def record(self, forward_step: ForwardStep) -> ForwardStep:
        """The forward step for `pretrain`: the same, but micro-batches of training are copied."""
        self._forward_step = forward_step

        @functools.wraps(forward_step)
        def recording(data_iterator: Any, model: Any, *rest: Any) -> Any:
            kept = self._recorded.setdefault(id(model), [])
            if model.training and data_iterator is not None and len(kept) < self._wanted():
                data_iterator = _Recorder(data_iterator, kept)
            return forward_step(data_iterator, model, *rest)

        return recording

    def _wanted(self) -> int:
        return self.config.num_micro_batches if self._hessian is None else 0

    def at_evaluation(self, model: Any) -> None:
        """A `non_loss_data_func`: measures at each evaluation, or those on the interval."""
        from megatron.training import get_args

        iteration = int(get_args().curr_iteration) + 1
        if iteration not in {*self.spectra, *self.sharpness, *self.failures}:
            for kind in due(self.config, iteration, default=1):
                self.measure(model, iteration, kind)

    def measure(self, model: Any, iteration: int, kind: Kind = "spectrum") -> None:
        """Measure now, save the record, and tell Megatron's writers. Collective."""
        self.take(kind, iteration, functools.partial(self._ready, model, iteration), _write)

    def _ready(self, model: Any, iteration: int) -> Hessian:
        if self._hessian is None:
            self._hessian = self._first(model)
        self._at(self._hessian, iteration)
        return self._hessian

    def _at(self, hessian: Hessian, iteration: int) -> None:
        """Tell the Hessian the iteration, which nothing in megatron-core counts."""
        hessian.step = iteration

    def _batches(self) -> list[Any]:
        # A rank's chunks read the same data where more than one reads any.
        return next((kept for kept in self._recorded.values() if kept), [])

    def _first(self, model: Any) -> Hessian:
        from megatron.training import get_args

        args = get_args()
        return megatron_hessian(model, self.config).use(
            self._batches(),
            self._forward_step,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
        )

    @contextlib.contextmanager
    def installed(self, training: Any) -> Iterator[None]:
        """Measure on the interval, after `post_training_step_callbacks` of the module `training`.

        Raises:
            UnsupportedError: this Megatron-LM has no such function.
        """
        name = "post_training_step_callbacks"
        inner = getattr(training, name, None)
        if inner is None:
            raise UnsupportedError(
                f"this Megatron-LM has no {name}; use non_loss_data_func=hook.at_evaluation of a "
                "PretrainHook"
            )
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def callbacks(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            for kind in due(self.config, given["iteration"]):
                with _interval_timer_stopped():
                    self.measure(given["model"], given["iteration"], kind)
            return inner(*args, **kwargs)

        setattr(training, name, callbacks)
        try:
            yield
        finally:
            setattr(training, name, inner)


class EnginePretrainHook(PretrainHook):
    """The same in Megatron-DeepSpeed, whose model is a DeepSpeed engine with an mpu.

    It measures where that calls back after a step (`megatron.profiler.on_step_end`).
    """

    _engine: Any = None

    def record(self, forward_step: ForwardStep) -> ForwardStep:
        """See `PretrainHook.record`."""
        recording = super().record(forward_step)

        @functools.wraps(forward_step)
        def remembering(data_iterator: Any, model: Any, *rest: Any) -> Any:
            self._engine = model
            return recording(data_iterator, model, *rest)

        return remembering

    def _first(self, model: Any) -> Hessian:
        if not hasattr(model, "zero_optimization_stage"):
            raise UnsupportedError(
                "ds_hessian needs a DeepSpeed engine in Megatron-DeepSpeed, by --deepspeed and "
                "--no-pipeline-parallel"
            )
        # Only the first tensor-parallel rank reads data.
        batches = of_first_tensor_rank(model, self._batches())
        return hessian_of(model, self.config).use(batches, self._loss)

    def _at(self, hessian: Hessian, iteration: int) -> None:
        """Do nothing: the engine counts its steps."""

    def _loss(self, model: Any, batch: Any) -> Any:
        output, loss_func = self._forward_step(iter([batch]), model)
        return loss_func(output)[0]

    @contextlib.contextmanager
    def installed(self, training: Any) -> Iterator[None]:
        """Measure on the interval, after the steps of `training`, the module of `pretrain`."""

        def after_step() -> None:
            iteration = int(training.get_args().iteration)
            for kind in due(self.config, iteration):
                with _interval_timer_stopped():
                    self.measure(self._engine, iteration, kind)

        training.on_step_end.append(after_step)
        try:
            yield
        finally:
            training.on_step_end.remove(after_step)


def with_hessian(pretrain: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's `pretrain` with spectra every `--hessian-interval` iterations, and that of
    Megatron-DeepSpeed.

    Takes and returns what `pretrain` does, in every version since 0.12: the arguments that matter
    are found by name.
    """
    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def measured(*args: Any, **kwargs: Any) -> Any:
        training = sys.modules[pretrain.__module__]
        hook = EnginePretrainHook() if hasattr(training, "on_step_end") else PretrainHook()
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        given["forward_step_func"] = hook.record(given["forward_step_func"])
        if "extra_args_provider" in signature.parameters:
            given["extra_args_provider"] = _both(given.get("extra_args_provider"))
        with hook.installed(training):
            return pretrain(*bound.args, **bound.kwargs)

    return measured


def _both(provider: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def add(parser: Any) -> Any:
        return hessian_arguments(parser if provider is None else provider(parser))

    return add


class _Recorder:
    """An iterator that keeps copies of what it gives."""

    def __init__(self, inner: Any, kept: list[Any]) -> None:
        self.inner, self.kept = inner, kept

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> Any:
        batch = next(self.inner)
        self.kept.append(copy.deepcopy(batch))
        return batch


@contextlib.contextmanager
def _interval_timer_stopped() -> Iterator[None]:
    """Megatron-LM's throughput is of training alone, as around its evaluation."""
    from megatron.training import get_timers

    timers = get_timers()
    timers("interval-time").stop()
    try:
        yield
    finally:
        timers("interval-time", log_level=0).start(barrier=True)


def _write(record: HessianSpectrum | HessianSharpness, picture: Path | None) -> None:
    """To TensorBoard and W&B, on the rank where Megatron-LM has them."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if picture is not None and not picture.exists():
        picture = None  # drawn by the first rank on its own disk; the writers are on the last one
    if board is not None:
        write_tensorboard(board, record, picture)
    if wandb is not None:
        write_wandb(wandb, record, picture, record.provenance.step)
