"""What runs on the ranks: measurements of Megatron jobs that end in the middle, and go on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.megatron.job import Broken, Job, hessian_of, running


def killed(job: Job, folder: str, **settings: Any) -> str:
    """How a spectrum of two steps ends that fails on all ranks once its state was kept."""
    import ds_hessian
    from ds_hessian.backends.megatron.backend import MegatronSession
    from ds_hessian.resume.store import StateStore

    run, save, kept = MegatronSession._run, StateStore.save, [0]

    def saving(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        kept[0] += 1

    def failing(*args: Any, **kwargs: Any) -> None:
        if kept[0]:
            raise Broken("on purpose")
        run(*args, **kwargs)

    with (
        running(job) as chunks,
        mock.patch.object(StateStore, "save", saving),
        mock.patch.object(MegatronSession, "_run", failing),
    ):
        try:
            hessian_of(chunks, job).spectrum(num_matvecs=2, resume=folder, **settings)
        except (ds_hessian.HessianError, Broken) as error:
            return str(error)
    return "no error"


def resumed(job: Job, folder: str, **settings: Any) -> tuple[Any, Any, bool]:
    """Coefficients of the whole spectrum and of one that goes on, in a process that has drawn from
    Megatron's generators since; and whether it left these as they were.
    """
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with running(job) as chunks:
        whole = hessian_of(chunks, job).spectrum(num_matvecs=2, **settings)
    with running(job) as chunks:
        with get_cuda_rng_tracker().fork():
            torch.rand(7)

        def states() -> list[Tensor]:
            return [state.clone() for state in get_cuda_rng_tracker().get_states().values()]

        before = states()
        found = hessian_of(chunks, job).spectrum(num_matvecs=2, resume=folder, **settings)
        kept = all(map(torch.equal, before, states()))
    return whole.alphas, found.alphas, kept
