"""What runs on the ranks for the memory plan: the peak of real spectra beside the planned one."""

from __future__ import annotations

from typing import Any

import torch

from ds_hessian.memory import Item, MemoryPlan
from tests.backends.memory_jobs import Tower, batches
from tests.backends.peaks import peaks
from tests.megatron.job import QUIET, Job, groups_of, make_optimizer, wrap


def forward_step(iterator: Any, model: Any) -> Any:
    """The tower's loss."""
    return model(*next(iterator)), lambda loss: (loss.float(), {})


def measured_and_planned(
    job: Job, cases: list[dict[str, Any]]
) -> list[tuple[list[int], list[int], float]]:
    """As `tests.backends.memory_jobs.measured_and_planned`, of a data-parallel job."""
    with groups_of(job):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from ds_hessian.backends.megatron import host
        from ds_hessian.megatron import MegatronHessian

        torch.manual_seed(0)
        model = wrap(Tower(), job)
        optimizer = make_optimizer(job, [model])
        data, sizes = batches(job.torch_dtype), {"seq_length": 1, "micro_batch_size": 2}

        def train() -> None:
            """A pass of training, from the gather that follows a step to the reduction."""
            host.gather_parameters([model])
            model.zero_grad_buffer()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(data),
                model=model,
                num_microbatches=len(data),
                forward_only=False,
                **sizes,
            )

        train()
        optimizer.step()
        hessian = MegatronHessian(model, QUIET).use(data, forward_step, **sizes)
        hessian.spectrum(num_matvecs=3, mode="selective")  # modules are imported, kernels loaded
        with peaks() as training:
            train()
        optimizer.step()
        passes = Item("a training pass", "host", training[0], ("passes",))
        found = []
        for settings in cases:
            plan = MemoryPlan.of(hessian.memory_plan(**settings).items, [passes])
            with peaks() as measured:
                hessian.spectrum(**settings)
            planned = [plan.peak("host"), plan.peak("disk")]
            found.append((list(measured), planned, 4.0 * hessian.backend.space.n_local))
        return found
