"""GPTs with ReLU and ReLU squared in every layout: kinks are held, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.megatron import job
from tests.megatron.job import Job
from tests.megatron.test_layouts import error, whole
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ReLU": (1, {"activation": "relu"}),
    "ReLU, DP distributed optimizer": (2, {"activation": "relu", "distributed": True}),
    "ReLU, TP sequence parallel": (2, {"activation": "relu", "tp": 2, "sequence_parallel": True}),
    "ReLU squared, PP": (2, {"activation": "squared relu", "pp": 2}),
    "ReLU squared, PP interleaved, recomputed": (
        2,
        {"activation": "squared relu", "pp": 2, "vpp": 2, "layers": 4, "recompute": True},
    ),
    "ReLU squared, TP x PP, recomputed": (
        4,
        {"activation": "squared relu", "tp": 2, "pp": 2, "recompute": True},
    ),
    "ReLU, experts": (2, {"activation": "relu", "ep": 2, **job.MOE}),
}


@pytest.mark.parametrize("name", cells(LAYOUTS, []))
def test_products_of_the_automatic_step_are_those_of_a_double_backward(
    megatron_ranks: Ranks, name: str
) -> None:
    size, layout = LAYOUTS[name]
    here = Job(**layout)
    runs = megatron_ranks(size).run(job.chain, here, 2, num_matvecs=1)
    alone = replace(here.alone, dtype="float64")
    for number in range(2):
        v, found = (whole([run[0][number][part] for run in runs]) for part in (0, 1))
        ((_, exact),) = megatron_ranks(1).run(job.reference, alone, v)
        true, told = error(found, exact), runs[0][0][number][2]
        print(f"{name}: error {true:.1e}, estimate {told:.1e}")
        assert true < 3e-4 and true / 3 < told < 3e-3
    (source, *others) = [run[1].provenance for run in runs]
    assert source.kinks == "held" and source.held_sides > 0
    assert all(other.held_sides == source.held_sides for other in others)
    tokens = job.TOTAL * job.SIZE * job.SEQUENCE
    if not here.experts:  # the width of a layer's activations, whole in each layout
        assert source.held_sides == tokens * 20 * here.layers


@pytest.mark.full
def test_bf16_passes_of_a_relu_net_hold_kinks(megatron_ranks: Ranks) -> None:
    here = Job(activation="relu", tp=2, dtype="bfloat16")
    runs = megatron_ranks(2).run(job.measured, here)
    v, found = (whole([run[part] for run in runs]) for part in (0, 1))
    alone = replace(here.alone, dtype="float64")
    ((_, exact),) = megatron_ranks(1).run(job.reference, alone, v)
    assert runs[0][2].provenance.kinks == "held"
    assert error(found, exact) < 0.3
    assert all(run[3] and run[4] for run in runs)
    assert torch.isfinite(torch.tensor(runs[0][2].ritz_values)).all()
