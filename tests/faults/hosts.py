"""Jobs to be measured, one of each host, after two steps of training."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.backends.jobs import QUIET, make_engine, my_batches
from tests.nets import TinyGPT, batch


@dataclass
class Host:
    """A job on this rank.

    Attributes:
        attach: Gives it a Hessian with its micro-batches; nothing of the job is changed.
        state: What training goes on with.
        close: Ends it.
        module: What training calls.
        optimizer: What training steps.
    """

    attach: Callable[[], Any]
    state: Callable[[], Any]
    close: Callable[[], object]
    module: Any
    optimizer: Any


def loss(model: Any, micro_batch: Any) -> Tensor:
    """The user's code."""
    return model(*micro_batch)


def _common(modules: list[Any]) -> list[Any]:
    return [
        [p.data.clone() for module in modules for p in module.parameters()],
        # Megatron's wrapper has a list of that name.
        [b.clone() for module in modules for b in nn.Module.buffers(module)],
        (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
        [m.training for module in modules for m in module.modules()],
        [p.grad is None for module in modules for p in module.parameters()],
    ]


def _moments(optimizer: Any) -> list[Tensor]:
    return [t.clone() for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]


def zero(stage: int) -> Host:
    """An engine."""
    from ds_hessian.hosts import hessian_of

    engine = make_engine(zero={"stage": stage}, hessian=QUIET)
    for step in range(2):
        engine.backward(engine(*batch(step, dist.get_rank())))
        engine.step()

    def state() -> Any:
        backend = engine.hessian.backend
        shards, pieces = backend.shards, backend.pieces
        return [
            *_common([engine.module]),
            [m.clone() for m in map(shards.master, pieces) if m is not None],
            [shards.weight(piece).clone() for piece in pieces],
            _moments(getattr(engine.optimizer, "optimizer", engine.optimizer)),
            (engine.global_steps, engine.micro_steps, engine.global_samples),
        ]

    def attach() -> Any:
        return hessian_of(engine).use(my_batches()[:2], loss)

    return Host(attach, state, engine.destroy, engine, engine)


def plain() -> Host:
    """A module in DistributedDataParallel."""
    from ds_hessian.hosts import hessian_of

    torch.manual_seed(0)
    module = DistributedDataParallel(TinyGPT())
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        module(*batch(step, dist.get_rank())).backward()
        optimizer.step()

    def attach() -> Any:
        return hessian_of(module, QUIET, optimizer).use(my_batches()[:2], loss)

    def state() -> Any:
        return [*_common([module]), _moments(optimizer)]

    return Host(attach, state, lambda: None, module, optimizer)


def megatron(**layout: Any) -> Host:
    """Chunks on megatron-core."""
    from tests.megatron import job

    here, stack = job.Job(**layout), ExitStack()
    chunks = stack.enter_context(job.running(here))
    optimizer, batches = job.make_optimizer(here, chunks), job.my_batches()
    for _ in range(2):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        job.run_schedule(here, chunks, batches)
        optimizer.step()

    def attach() -> Any:
        return job.hessian_of(chunks, here)

    def state() -> Any:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        moments = [_moments(each.optimizer) for each in optimizer.chained_optimizers]
        return [*_common(chunks), moments, list(get_cuda_rng_tracker().get_states().values())]

    # Megatron's own step makes collectives before it reaches torch's.
    inner = optimizer.chained_optimizers[0].optimizer
    return Host(attach, state, stack.close, chunks[0], inner)


HOSTS: dict[str, Callable[[], Host]] = {
    **{f"ZeRO-{stage}": lambda stage=stage: zero(stage) for stage in range(4)},  # type: ignore[misc]
    "torch DDP": plain,
    "Megatron DP": lambda: megatron(distributed=True, overlap=True),
    "Megatron TP": lambda: megatron(tp=2),
    "Megatron PP": lambda: megatron(pp=2),
}
"""What the sweep knows. Ranks of Megatron's are a pool of their own."""
