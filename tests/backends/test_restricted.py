"""Blocks of the Hessian on sharded engines: the same on every stage, and those of the dense one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends import jobs, restricted_jobs
from tests.nets import DenseHessian, TinyGPT, batch, merged
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

CHOICES: list[Any] = ["up|norm1", ["norm2.weight"]]
"""Over all ranks, and in nine coordinates that one rank of ZeRO has."""
STAGES = (0, 1, 2, 3)


@pytest.mark.full
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_of_engines_are_those_of_the_dense_hessian(
    ranks: Ranks, stage: int, choice: Any
) -> None:
    found = ranks(2).run(restricted_jobs.block, choice, {"stage": stage})
    weights, (value, bar), (y, v, product), error, spectrum = found[0]
    names = [n for n in weights if n in choice or n.startswith(("up.", "norm1."))]
    if isinstance(choice, list):
        names = choice
    assert spectrum.provenance.parameters == tuple(names)
    dense = DenseHessian(TinyGPT(), weights, merged([batch(500 + i, 0) for i in range(jobs.TOTAL)]))
    inside = dense.flat({n: torch.full_like(w, float(n in names)) for n, w in weights.items()})
    assert spectrum.n == int(inside.sum())

    def php(x: Any) -> torch.Tensor:
        return inside * dense.matvec(inside * dense.flat(x))

    flat = dense.flat(y)
    assert not flat[inside == 0].any() and abs(float(flat.norm()) - 1) < 1e-5
    assert float((php(y) - value * flat).norm()) <= bar
    exact = php(v)
    assert float((dense.flat(product) - exact).norm()) <= 3 * error * float(exact.norm())
    assert np.array_equal(found[1][4].alphas, spectrum.alphas)


@pytest.mark.full
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_block_of_one_rank_is_that_of_three(ranks: Ranks, choice: Any) -> None:
    one, *_ = ranks(1).run(restricted_jobs.block, choice, {})
    three, *_ = ranks(3).run(restricted_jobs.block, choice, {})
    scale = abs(one[4].alphas).max()
    assert np.allclose(three[4].alphas, one[4].alphas, atol=1e-3 * scale)
