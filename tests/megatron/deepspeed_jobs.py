"""What runs on the ranks: DeepSpeed engines that are given megatron-core's mesh as their mpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.megatron.job import (
    QUIET,
    Job,
    build,
    fill,
    gpt,
    groups_of,
    hessian_of,
    model_config,
    my_batches,
    token_losses,
)

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}


class Mesh:
    """`parallel_state` as DeepSpeed asks for it, by names that megatron-core has since given up and
    Megatron-DeepSpeed's own copy of it still has.
    """

    def __getattr__(self, name: str) -> Any:
        from megatron.core import parallel_state

        return getattr(parallel_state, name.replace("get_model_", "get_tensor_model_"))

    def get_model_parallel_group(self) -> Any:
        """Tensor and pipeline ranks together."""
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group()


def make_engine(job: Job, stage: int, mpu: Any) -> Any:
    """An engine with a GPT of megatron-core."""
    import deepspeed

    model = gpt(job, model_config(job))
    fill([model])
    torch.manual_seed(1234)
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**CONFIG, "zero_optimization": {"stage": stage}},
        mpu=mpu,
    )[0]


@contextmanager
def groups_for_engines(job: Job) -> Iterator[None]:
    """Megatron's process groups, and none left of DeepSpeed's, which keeps them for the process."""
    from deepspeed.utils import groups

    with groups_of(job):
        try:
            yield
        finally:
            groups.mpu = groups._WORLD_GROUP = None


def spectra(stage: int) -> list[Any]:
    """Of one GPT: under ZeRO without an mpu and with megatron-core's mesh, and in Megatron's own
    data parallelism.
    """
    import ds_hessian

    job, found = Job(), []
    with groups_for_engines(job):

        def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
            return token_losses(model, batch, job).mean()

        for mpu in (None, Mesh()):
            engine = make_engine(job, stage, mpu)
            hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
            found.append(hessian.spectrum(my_batches(), loss_fn, num_matvecs=16))
            engine.destroy()
        return [*found, hessian_of(build(job), job).spectrum(num_matvecs=16)]


def refused() -> str:
    """The message for an engine whose mpu has a tensor-parallel group of two."""
    import ds_hessian

    job = Job(tp=2)
    with groups_for_engines(job):
        engine = make_engine(job, 1, Mesh())
        try:
            ds_hessian.attach(engine)
        except ds_hessian.UnsupportedError as error:
            return str(error)
        finally:
            engine.destroy()
    return "accepted"
