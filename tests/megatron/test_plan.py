"""The forecast of a Megatron job is what the live job is: counts, shards, items of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron import plan_jobs
from tests.megatron.job import MOE, Job
from tests.ranks import RankPool
from tests.tiers import cells

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP": (2, {}),
    "TP": (2, {"tp": 2}),
    "TP sequence parallel bf16": (2, {"tp": 2, "sequence_parallel": True, "dtype": "bfloat16"}),
    "TP bf16 in fp32": (2, {"tp": 2, "dtype": "bfloat16", "precision": "fp32"}),
    "TP distributed optimizer": (2, {"tp": 2, "distributed": True}),
    "PP": (2, {"pp": 2}),
    "PP bf16 in fp32": (2, {"pp": 2, "dtype": "bfloat16", "precision": "fp32"}),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "TP x PP": (4, {"tp": 2, "pp": 2}),
    "experts": (1, {**MOE}),
    "EP": (2, {**MOE, "ep": 2}),
    "expert TP": (2, {**MOE, "tp": 2, "etp": 2}),
    "EP x TP, shared": (4, {**MOE, "tp": 2, "ep": 2, "shared": 12, "sequence_parallel": True}),
}
QUICK = ("PP bf16 in fp32", "EP")


@pytest.mark.parametrize("name", cells(LAYOUTS, QUICK))
def test_counts_shards_and_items_are_those_of_the_live_job(
    megatron_ranks: Callable[[int], RankPool], name: str
) -> None:
    size, layout = LAYOUTS[name]
    for live, foreseen in megatron_ranks(size).run(plan_jobs.live_and_planned, Job(**layout)):
        assert foreseen == live


SHARED_OUT: dict[str, tuple[int, dict[str, Any]]] = {
    "DP distributed optimizer": (2, {"distributed": True}),
    "DP distributed optimizer bf16": (2, {"distributed": True, "dtype": "bfloat16"}),
    "TP x DP distributed optimizer": (4, {"tp": 2, "distributed": True}),
    "PP x DP distributed optimizer": (4, {"pp": 2, "distributed": True}),
    "two optimizer instances": (4, {"distributed": True, "instances": 2}),
}


@pytest.mark.parametrize("name", cells(SHARED_OUT, ("DP distributed optimizer bf16",)))
def test_the_distributed_optimizer_shares_out_what_the_forecast_says(
    megatron_ranks: Callable[[int], RankPool], name: str
) -> None:
    """A rank's buckets are padded, so ranks have a little more or less; together they have all."""
    size, layout = SHARED_OUT[name]
    runs = megatron_ranks(size).run(plan_jobs.live_and_planned, Job(**layout))
    for live, foreseen in runs:
        assert foreseen["n"] == live["n"] and foreseen["layers"] == live["layers"]
        names = [[item[:2] for item in found["items"]] for found in (live, foreseen)]
        assert names[0] == names[1]
    total = sum(live["n_local"] for live, _ in runs)
    assert 0 <= sum(foreseen["n_local"] for _, foreseen in runs) - total < size
