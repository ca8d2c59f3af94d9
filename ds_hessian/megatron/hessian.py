"""The Hessian of model chunks on megatron-core, for any training loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_hessian.backends.megatron import ForwardStep, MegatronBackend, host, refuse_unsupported
from ds_hessian.config import HessianConfig
from ds_hessian.engine import HessianEngine
from ds_hessian.errors import ConfigError
from ds_hessian.records import HessianSpectrum


class MegatronHessian(HessianEngine):
    """The Hessian of a Megatron job, with all methods of `HessianEngine`.

    Where those take `batches` and `loss_fn`, they are the micro-batches and the forward step of
    `use`, after a first `use` has given the sizes: `hessian.spectrum(other_batches)`.

    Every method is collective: all ranks of the job call it, in the same order, after an optimizer
    step and before the next forward. Parameters, optimizer and random states are bit for bit the
    same after it, also when it raises; gradient buffers, which training clears there, are zero.

    Args:
        model: The model chunks, each in megatron-core's `DistributedDataParallel`: one, or the list
            that the schedule takes.
        config: A `HessianConfig` or its settings as a dictionary; None for the defaults.

    Attributes:
        step: Optimizer steps made so far, for the record; set it before measuring.

    Raises:
        ConfigError: a setting is unknown or impossible, or there are other chunks than the job's.
        UnsupportedError: the job uses a feature on which products would be wrong.
    """

    def __init__(self, model: Any, config: HessianConfig | Mapping[str, Any] | None = None) -> None:
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        self.config = (
            config
            if isinstance(config, HessianConfig)
            else HessianConfig.parse({} if config is None else config)
        )
        refuse_unsupported(chunks)
        expected = host.mesh().get("VPP", 1)
        if len(chunks) != expected:
            raise ConfigError(
                f"this job has {expected} model chunk{'s' * (expected > 1)} on a rank, got "
                f"{len(chunks)}; pass what get_forward_backward_func() takes as model"
            )
        self.backend = self._job = MegatronBackend(chunks)
        self._operator = None
        self._objective = None

    @property
    def step(self) -> int:
        """Optimizer steps made so far, for the record."""
        return self._job.step

    @step.setter
    def step(self, value: int) -> None:
        self._job.step = value

    def use(  # type: ignore[override]
        self,
        batches: Iterable[Any],
        forward_step: ForwardStep | None = None,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> MegatronHessian:
        """Fix the micro-batches (this rank's own) and the loss that define H; returns self.

        What is None is as in the last `use`, which must have given it.

        Args:
            batches: What `next(data_iterator)` gives in `forward_step`; all of them count. An
                empty list on ranks whose `forward_step` reads nothing.
            forward_step: As Megatron's schedules take it: `forward_step(data_iterator, model)`
                returns `(output, loss_func)`.
            seq_length: Sequence length of a micro-batch, as the schedules take it.
            micro_batch_size: Sequences in a micro-batch.

        Raises:
            ConfigError: no batches, different numbers of them on ranks that have some, or an
                argument that cannot be.
            MeasurementError: the iterable raised on some rank.
        """
        sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        self._objective = self.backend.objective(
            batches, forward_step, like=self._objective, **sizes
        )
        return self


def hessian_spectrum(
    model: Any,
    forward_step: ForwardStep,
    batches: Iterable[Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    config: HessianConfig | Mapping[str, Any] | None = None,
    step: int = 0,
) -> HessianSpectrum:
    """Spectrum of the Hessian of a Megatron job, once; see `MegatronHessian` and its `use`.

    Args:
        model: See `MegatronHessian`.
        forward_step: See `MegatronHessian.use`.
        batches: See `MegatronHessian.use`.
        seq_length: See `MegatronHessian.use`.
        micro_batch_size: See `MegatronHessian.use`.
        config: See `MegatronHessian`.
        step: Optimizer steps made so far, for the record.

    Returns:
        The record, the same on every rank. Nothing is written to disk.

    Collective: every rank of the job calls it, after an optimizer step.
    """
    hessian = MegatronHessian(model, config)
    hessian.step = step
    sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
    return hessian.use(batches, forward_step, **sizes).spectrum()
