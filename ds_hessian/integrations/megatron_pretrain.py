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
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from ds_hessian.backends.megatron.objective import ForwardStep
from ds_hessian.backends.zero import of_first_tensor_rank
from ds_hessian.config import HessianConfig, leaves, value_of
from ds_hessian.errors import UnsupportedError
from ds_hessian.hessian import Hessian
from ds_hessian.hosts import device_of, hessian_of, megatron_hessian
from ds_hessian.schedule import Kind, Measurements, Scheduled, due
from ds_hessian.show.monitor import write_tensorboard, write_wandb
from ds_hessian.slices import use_settled

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk
    from ds_hessian.backends.zero.host import DeepSpeedEngine

    Model: TypeAlias = DeepSpeedEngine | Chunk | Sequence[Chunk]

P = ParamSpec("P")
T = TypeVar("T")
ArgumentsProvider = Callable[[ArgumentParser], ArgumentParser]


def hessian_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add `--hessian-<key>` for every key of the "hessian" section; an `extra_args_provider`."""
    group = parser.add_argument_group(title="hessian")
    for path, field in leaves().items():
        if path != "enabled":
            flag = "--hessian-" + path.split(".")[-1].replace("_", "-")
            text = (field.description or "").replace("%", "%%")
            group.add_argument(flag, type=value_of, default=None, help=text)
    return parser


def config_from(args: Namespace) -> HessianConfig:
    """Return the settings given on the command line, over the defaults.

    Raises:
        ConfigError: a value is impossible.
    """
    names = [path.split(".")[-1] for path in leaves() if path != "enabled"]
    values = {name: getattr(args, f"hessian_{name}", None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return HessianConfig().with_overrides(**given)


def sizes_of(args: Namespace) -> dict[str, int]:
    """Return the sizes of what pipeline stages send. With a `decoder_seq_length`, as that of a
    language model which reads images too, it is that (`get_tensor_shapes` of schedules.py).
    """
    decoder = getattr(args, "decoder_seq_length", None)
    length = args.seq_length if decoder is None else decoder
    return {"seq_length": length, "micro_batch_size": args.micro_batch_size}


class PretrainHook(Measurements):
    """Records micro-batches of training and takes spectra of it.

    `with_hessian` does everything at once. Where Megatron-LM must not be patched at all, in its own
    terms, with a spectrum at every evaluation::

        hook = PretrainHook()
        pretrain(..., hook.record(forward_step), extra_args_provider=hessian_arguments,
                 non_loss_data_func=hook.at_evaluation)
    """

    before_start = "Megatron-LM has read no micro-batch by then; leave 0 out of --hessian-steps"

    def __init__(self) -> None:
        super().__init__()
        self._config: HessianConfig | None = None
        self._hessian: Hessian | None = None
        self._optimizer: object = None
        self._recorded: dict[int, list[object]] = {}
        self._errors: list[Exception] = []
        self._resumed: bool | None = None

    @property
    def config(self) -> HessianConfig:
        """The settings in Megatron-LM's arguments, read at the first use."""
        if self._config is None:
            from megatron.training import get_args

            self._config = config_from(get_args())
        return self._config

    def record(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the forward step for `pretrain`, which also copies micro-batches of training."""
        self._forward_step = forward_step

        @functools.wraps(forward_step)
        def recording(
            data_iterator: Iterator[object] | None, model: nn.Module, *rest: object
        ) -> tuple[object, Callable[..., object]]:
            kept = self._recorded.setdefault(id(model), [])
            if self._resumed is None and model.training:
                self._resumed = self._iterations() > 0
            if model.training and data_iterator is not None and len(kept) < self._wanted():
                data_iterator = _Recorder(data_iterator, kept, self._errors)
            return forward_step(data_iterator, model, *rest)

        return recording

    def _iterations(self) -> int:
        """Return the number of iterations made so far."""
        from megatron.training import get_args

        return int(getattr(get_args(), "curr_iteration", None) or get_args().iteration)

    def _wanted(self) -> int:
        return self.config.num_micro_batches if self._hessian is None else 0

    def at_evaluation(self, model: Model) -> None:
        """Measure at each evaluation, or at those on the interval; a `non_loss_data_func`."""
        from megatron.training import get_args

        iteration = int(get_args().curr_iteration) + 1
        if iteration not in {*self.spectra, *self.sharpness, *self.curvatures, *self.failures}:
            for kind in due(self.config, iteration, default=1):
                self.measure(model, iteration, kind)

    def measure(self, model: Model, iteration: int, kind: Kind = "spectrum") -> None:
        """Measure now, save the record, and pass it to Megatron's writers. Collective."""
        ready = functools.partial(self._ready, model, iteration)
        self.take(kind, iteration, device_of(model), self.config, ready, _write)

    def _ready(self, model: Model, iteration: int) -> Hessian:
        if self._hessian is None:
            self._hessian = self._first(model)
        self._at(self._hessian, iteration)
        return self._hessian

    def _at(self, hessian: Hessian, iteration: int) -> None:
        """Set the Hessian's step to the iteration, which nothing in megatron-core counts."""
        hessian.step = iteration

    def _batches(self) -> list[object]:
        # A rank's chunks read the same data where more than one reads any.
        return next((kept for kept in self._recorded.values() if kept), [])

    def _first(self, model: Model) -> Hessian:
        from megatron.training import get_args

        args = get_args()
        hessian = megatron_hessian(model, self.config, self._optimizer)
        return self._with_slice(
            hessian,
            lambda batches: hessian.use(batches, self._forward_step, **sizes_of(args)),
        )

    def _with_slice(self, hessian: Hessian, use: Callable[[list[object]], Hessian]) -> Hessian:
        """Give a Hessian its micro-batches: those recorded, or of before the job was resumed."""
        error = next(iter(self._errors), None)
        use_settled(hessian, use, self._batches(), bool(self._resumed), error)
        return hessian

    @contextlib.contextmanager
    def installed(self, training: ModuleType) -> Iterator[None]:
        """Measure on the interval, after `checkpoint_and_decide_exit` of the module `training`.

        The iteration's checkpoint is saved before, and where the job exits nothing is measured.

        Raises:
            UnsupportedError: this Megatron-LM has no such function.
        """
        name = "checkpoint_and_decide_exit"
        inner = getattr(training, name, None)
        if inner is None:
            raise UnsupportedError(
                f"this Megatron-LM has no {name}; use non_loss_data_func=hook.at_evaluation of a "
                "PretrainHook"
            )
        signature = inspect.signature(inner)

        @functools.wraps(inner)
        def measuring(*args: object, **kwargs: object) -> object:
            exits = inner(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            self._optimizer = given.get("optimizer")
            self.warn_of_start(self.config, given["iteration"] - 1)
            for kind in [] if exits else due(self.config, given["iteration"]):
                with _interval_timer_stopped():
                    self.measure(given["model"], given["iteration"], kind)
            return exits

        setattr(training, name, measuring)
        try:
            yield
        finally:
            setattr(training, name, inner)


class EnginePretrainHook(PretrainHook):
    """A hook for Megatron-DeepSpeed, whose model is a DeepSpeed engine with an mpu.

    It measures in the callbacks after a step (`megatron.profiler.on_step_end`).
    """

    _engine: DeepSpeedEngine | None = None

    @override
    def record(self, forward_step: ForwardStep) -> ForwardStep:
        recording = super().record(forward_step)

        @functools.wraps(forward_step)
        def remembering(
            data_iterator: Iterator[object] | None, model: DeepSpeedEngine, *rest: object
        ) -> tuple[object, Callable[..., object]]:
            self._engine = model
            return recording(data_iterator, model, *rest)

        return remembering

    def _first(self, model: Model) -> Hessian:
        if not hasattr(model, "zero_optimization_stage"):
            raise UnsupportedError(
                "ds_hessian needs a DeepSpeed engine in Megatron-DeepSpeed, by --deepspeed and "
                "--no-pipeline-parallel"
            )
        # Only the first tensor-parallel rank reads data.
        engine: DeepSpeedEngine = model
        hessian = hessian_of(engine, self.config)
        return self._with_slice(
            hessian, lambda kept: hessian.use(of_first_tensor_rank(engine, kept), self._loss)
        )

    def _iterations(self) -> int:
        assert self._engine is not None
        return int(self._engine.global_steps)

    def _at(self, hessian: Hessian, iteration: int) -> None:
        """Do nothing: the engine counts its steps."""

    def _loss(self, model: DeepSpeedEngine, batch: object) -> Tensor:
        output, loss_func = self._forward_step(iter([batch]), model)
        loss: Tensor = loss_func(output)[0]
        return loss

    @contextlib.contextmanager
    def installed(self, training: ModuleType) -> Iterator[None]:
        """Measure on the interval, after the steps of `training`, the module of `pretrain`."""

        def after_step() -> None:
            iteration = int(training.get_args().iteration)
            self.warn_of_start(self.config, iteration - 1)
            for kind in due(self.config, iteration):
                with _interval_timer_stopped():
                    assert self._engine is not None
                    self.measure(self._engine, iteration, kind)

        training.on_step_end.append(after_step)
        try:
            yield
        finally:
            training.on_step_end.remove(after_step)


def with_hessian(pretrain: Callable[P, T]) -> Callable[P, T]:
    """Wrap `pretrain` of Megatron-LM or Megatron-DeepSpeed with scheduled measurements.

    Spectra are taken every `--hessian-interval` iterations. The wrapper takes and returns what
    `pretrain` does, in every version since 0.12: the arguments that matter are found by name.
    """
    signature = inspect.signature(pretrain)

    @functools.wraps(pretrain)
    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
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


def _both(provider: ArgumentsProvider | None) -> ArgumentsProvider:
    def add(parser: ArgumentParser) -> ArgumentParser:
        return hessian_arguments(parser if provider is None else provider(parser))

    return add


class _Recorder:
    """An iterator that copies each item into a list before it returns it.

    Why it could not is added to `errors`; training continues.
    """

    def __init__(
        self, inner: Iterator[object], kept: list[object], errors: list[Exception]
    ) -> None:
        self.inner, self.kept, self.errors = inner, kept, errors

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> object:
        batch = next(self.inner)
        try:
            self.kept.append(copy.deepcopy(batch))
        except Exception as error:  # raised when a measurement is due
            self.errors.append(error)
        return batch


@contextlib.contextmanager
def _interval_timer_stopped() -> Iterator[None]:
    """Stop the timer of Megatron-LM's throughput in the body, as Megatron-LM does in evaluation."""
    from megatron.training import get_timers

    timers = get_timers()
    timers("interval-time").stop()
    try:
        yield
    finally:
        timers("interval-time", log_level=0).start(barrier=True)


def _write(record: Scheduled, picture: Path | None) -> None:
    """Write a record to TensorBoard and W&B, on the rank where Megatron-LM has them."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    board, wandb = get_tensorboard_writer(), get_wandb_writer()
    if picture is not None and not picture.exists():
        picture = None  # drawn by the first rank on its own disk; the writers are on the last one
    if board is not None:
        write_tensorboard(board, record, picture)
    if wandb is not None:
        write_wandb(wandb, record, picture, record.provenance.step)
