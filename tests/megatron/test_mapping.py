"""The coordinates and names that ranks find by themselves, against all of them put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron import mapping_jobs
from tests.megatron.job import MOE, Job
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP interleaved, distributed optimizer": (
        4,
        {"pp": 2, "vpp": 2, "layers": 4, "distributed": True},
    ),
    "TP x PP": (4, {"tp": 2, "pp": 2}),
    "TP x EP": (4, {**MOE, "tp": 2, "ep": 2, "sequence_parallel": True}),
    "one rank": (1, {}),
    "latent attention": (1, {"latent": True}),
}


@pytest.mark.parametrize("name", cells(LAYOUTS, ("PP interleaved, distributed optimizer",)))
def test_mapping_numbers_no_elements_and_knows_the_parameters_of_all_ranks(
    megatron_ranks: Ranks, name: str
) -> None:
    size, layout = LAYOUTS[name]
    for offsets, names, largest in megatron_ranks(size).run(mapping_jobs.mapped, Job(**layout)):
        assert offsets and names
        # Nothing but figures of reductions: the smallest weight of two dims has 1280 bytes.
        assert largest < 1280


def test_a_stage_that_trains_nothing_knows_what_the_other_trains(megatron_ranks: Ranks) -> None:
    all_of = megatron_ranks(2).run(mapping_jobs.differing, Job(pp=2), "nothing")
    frozen = megatron_ranks(2).run(mapping_jobs.differing, Job(pp=2), "a stage frozen")
    assert all_of[0] == all_of[1] and frozen[0][1] == frozen[1][1]
    assert len(frozen[0][1]) > 0 and set(frozen[0][1]) < set(all_of[0][1])
    # The tied embedding is trained on one stage alone.
    assert all("pipeline stage trains its copy" in error for error, _ in frozen)


DIFFERENT = {
    "a name": "of whose 16 coordinates 0 count",
    "a shape": "whose whole shape is (16,) on some ranks and (99,) on others",
    "a layer frozen on one rank": "coordinates",
}


@pytest.mark.parametrize("change", cells(DIFFERENT, ("a shape", "a name")))
def test_models_that_differ_are_named_by_their_parameter_on_every_rank(
    megatron_ranks: Ranks, change: str
) -> None:
    job = Job(tp=2, bias=False)
    (first, _), (second, _) = megatron_ranks(2).run(mapping_jobs.differing, job, change)
    assert first == second
    assert first.startswith("UnsupportedError: ds_hessian does not support the parameter 'decoder.")
    assert DIFFERENT[change] in first
