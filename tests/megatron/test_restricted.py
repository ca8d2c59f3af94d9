"""Blocks of the Hessian in Megatron's layouts: those of one process, also where a stage has none of
the block's coordinates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.megatron import restricted_jobs
from tests.megatron.job import Job
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "PP": (2, {"pp": 2}),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "DP distributed optimizer": (2, {"distributed": True}),
    "TP x PP": (4, {"tp": 2, "pp": 2}),
}
CHOICES = ("linear_fc1.weight", "word_embeddings", "final_layernorm.weight")


@pytest.fixture(scope="module")
def one(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """The blocks of one process."""
    return functools.cache(lambda job: megatron_ranks(1).run(restricted_jobs.blocks, job, CHOICES))


@pytest.mark.parametrize("name", cells(LAYOUTS, ()))
def test_blocks_are_those_of_one_process(
    megatron_ranks: Ranks, one: Callable[[Job], Any], name: str
) -> None:
    size, layout = LAYOUTS[name]
    (alone,) = one(Job(**layout).alone)
    runs = megatron_ranks(size).run(restricted_jobs.blocks, Job(**layout), CHOICES)
    for rank in runs:
        for (n, names, found), (whole_n, whole_names, exact) in zip(rank, alone, strict=True):
            assert n == whole_n and names == whole_names
            # Of |H|, as errors of products are: the alphas of an indefinite block may cancel.
            assert np.allclose(found, exact, rtol=0, atol=3e-4 * abs(exact).max())
