"""The Hessian of a Megatron job: for training loops on megatron-core, and for `pretrain`.

from ds_hessian.megatron import hessian_spectrum

spectrum = hessian_spectrum(model, forward_step, batches, seq_length=..., micro_batch_size=...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ds_hessian.backends.megatron.host import Optimizer
from ds_hessian.backends.megatron.objective import ForwardStep
from ds_hessian.config import HessianConfig
from ds_hessian.hessian import Hessian
from ds_hessian.hosts import megatron_hessian
from ds_hessian.integrations.megatron_pretrain import PretrainHook, hessian_arguments, with_hessian
from ds_hessian.records import HessianSpectrum

__all__ = [
    "MegatronHessian",
    "PretrainHook",
    "hessian_arguments",
    "hessian_spectrum",
    "with_hessian",
]

if TYPE_CHECKING:
    from ds_hessian.backends.megatron.host import Chunk

Chunks: TypeAlias = "Chunk | Sequence[Chunk]"
"""The model chunks, each in megatron-core's `DistributedDataParallel`: one, or the list that the
schedule takes."""


def MegatronHessian(
    model: Chunks,
    config: HessianConfig | Mapping[str, object] | None = None,
    optimizer: Optimizer = None,
) -> Hessian:
    """Return the Hessian of a Megatron job.

    Where its methods take `batches` and `loss_fn`, they are the micro-batches and the forward step
    of `use`, which on Megatron takes the sizes too: `use(batches, forward_step, seq_length=...,
    micro_batch_size=...)`. Set its `step` before measuring, for the record.

    All ranks of the job call its methods after an optimizer step and before the next forward.
    Parameters, optimizer and random states are bit for bit the same after it, also when it raises;
    gradient buffers, which training clears there, are zero.

    Args:
        model: The model chunks.
        config: A `HessianConfig` or its settings as a dictionary; None for the defaults.
        optimizer: The job's optimizer, from `get_megatron_optimizer`; needed where Adam's state
            preconditions.

    Raises:
        ConfigError: a setting is unknown or impossible, or the chunks are not those of the job.
        UnsupportedError: the job uses a feature on which products would be wrong.

    Collective.
    """
    return megatron_hessian(model, config, optimizer)


def hessian_spectrum(
    model: Chunks,
    forward_step: ForwardStep,
    batches: Iterable[object],
    *,
    seq_length: int,
    micro_batch_size: int,
    config: HessianConfig | Mapping[str, object] | None = None,
    step: int = 0,
) -> HessianSpectrum:
    """Measure the spectrum of the Hessian of a Megatron job once.

    Args:
        model: The model chunks.
        forward_step: As Megatron's schedules take it: `forward_step(data_iterator, model)` returns
            `(output, loss_func)`.
        batches: The values of `next(data_iterator)` in `forward_step`; all of them count. An empty
            list on ranks whose `forward_step` reads nothing.
        seq_length: Sequence length of a micro-batch, as the schedules take it.
        micro_batch_size: Sequences in a micro-batch.
        config: A `HessianConfig` or its settings as a dictionary; None for the defaults.
        step: The number of optimizer steps made so far, for the record.

    Returns:
        The record, the same on every rank. Nothing is written to disk.

    Collective: every rank of the job calls it, after an optimizer step.
    """
    hessian = MegatronHessian(model, config)
    hessian.step = step
    sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
    return hessian.use(batches, forward_step, **sizes).spectrum()
