"""The states of random generators: Python's, numpy's, torch's, the hosts' and a model's own."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

GeneratorState = Any
"""The state of a random generator: opaque, and only ever given back to its generator."""

Generator = tuple[Callable[[], GeneratorState], Callable[[GeneratorState], object]]


def generator(value: Any) -> Generator | None:
    """Return `(get, set)` of the state of a random generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return (lambda: value.get_state().clone()), value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return (lambda: bits.state), (lambda state: setattr(bits, "state", state))
    return None


TRACKERS = (
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron.core.tensor_parallel",
)
"""Modules whose `get_cuda_rng_tracker` has the random states of tensor- and expert-parallel
regions, from which Megatron's layers draw, in megatron-core or in Megatron-DeepSpeed."""


def trackers() -> tuple[Generator, ...]:
    """Return `(get, set)` of the states of each tracker that has been imported.

    `set_states` stores the dict itself and `fork` edits it, so it is given a new one every time. A
    tracker without states is left alone: setting them would mark it as initialised.
    """
    return tuple(_tracked(sys.modules[name]) for name in TRACKERS if name in sys.modules)


def _tracked(module: ModuleType) -> Generator:
    def get() -> dict[str, Tensor]:
        return dict(module.get_cuda_rng_tracker().get_states())

    def put(states: dict[str, Tensor]) -> None:
        tracker = module.get_cuda_rng_tracker()
        if states or tracker.get_states():
            tracker.set_states(dict(states))

    return get, put


def has_plain_random_states() -> bool:
    """Return False with the generators of CUDA graphs, which are objects and not states."""
    states = [get() for get, _ in trackers()]
    return all(isinstance(state, Tensor) for each in states for state in each.values())


class RandomState:
    """The generators of python, numpy, torch on the CPU and the current accelerator device.

    Args:
        device: The device whose generator is included, beside the CPU's.
        extra: `(get, set)` pairs for further generators, of a host or a model. The value that `get`
            returns must not change afterwards.
    """

    def __init__(
        self,
        device: torch.device,
        extra: tuple[Generator, ...] = (),
    ) -> None:
        self.device = device
        self.extra = list(extra)
        self._first = [get() for get, _ in extra]
        self._known = {id(torch.default_generator)}
        if device.type == "cuda":
            self._known |= {id(g) for g in torch.cuda.default_generators}

    def add(self, drawn: Any) -> None:
        """Add a generator of torch, numpy or Python, from which nothing has been drawn since the
        measurement began; nothing for what is none.
        """
        pair = generator(drawn)
        if id(drawn) not in self._known and pair is not None:
            self._known.add(id(drawn))
            self.extra.append(pair)
            self._first.append(pair[0]())

    def get(self) -> tuple[GeneratorState, ...]:
        """Return the states of all generators."""
        accelerator = None
        if self.device.type != "cpu":
            accelerator = torch.get_device_module(self.device).get_rng_state(self.device)
        return (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
            accelerator,
            tuple(get() for get, _ in self.extra),
        )

    def set(self, state: tuple[GeneratorState, ...]) -> None:
        """Restore the states that `get` returned."""
        python, numpy, cpu, accelerator, extra = state
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(accelerator, self.device)
        for (_, put), value in zip(self.extra, (*extra, *self._first[len(extra) :]), strict=True):
            put(value)


@contextmanager
def kept_random_states(device: torch.device, *generators: Any) -> Iterator[None]:
    """Run the body, and restore the states of the generators after it.

    Args:
        device: The device whose generator is restored, beside the CPU's.
        generators: Further generators of torch, numpy or Python that the body may draw from; what
            is none is left out.
    """
    random_state = RandomState(device, trackers())
    for each in generators:
        random_state.add(each)
    before = random_state.get()
    try:
        yield
    finally:
        random_state.set(before)
