"""The random states of Megatron's tensor-parallel regions: whoever runs Megatron's layers, those of
megatron-core or of its copy in Megatron-DeepSpeed, they draw from these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


def tracker_states() -> tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...]:
    """`(get, set)` of the tensor- and expert-parallel random states, for `RandomState`.

    `set_states` stores the dict itself and `fork` edits it, so it is given a new one every time.
    None where nothing has imported Megatron.
    """
    if "megatron.core.tensor_parallel" not in sys.modules:
        return ()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def get() -> dict[str, Tensor]:
        return dict(get_cuda_rng_tracker().get_states())

    def put(states: dict[str, Tensor]) -> None:
        if states:
            get_cuda_rng_tracker().set_states(dict(states))

    return ((get, put),)


def has_plain_random_states() -> bool:
    """False with the generators of CUDA graphs, which are objects and not states."""
    states = [get() for get, _ in tracker_states()]
    return all(isinstance(state, Tensor) for each in states for state in each.values())
