"""Experts, and the places where Megatron's own state would spoil a product or be spoiled by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.megatron import job, routes_jobs
from tests.megatron.job import MOE, Job
from tests.megatron.test_layouts import assert_replicas_agree, error, whole
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP": (2, {"ep": 2}),
    "EP distributed optimizer": (2, {"ep": 2, "distributed": True}),
    "TP x EP": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "TP x expert TP": (2, {"tp": 2, "etp": 2, "sequence_parallel": True}),
    "TP x EP x DP distributed optimizer": (
        4,
        {"tp": 2, "ep": 2, "sequence_parallel": True, "distributed": True},
    ),
}


@pytest.mark.parametrize("name", cells(EXPERT_LAYOUTS, ["TP x EP"]))
def test_products_of_experts_are_those_of_a_double_backward(
    megatron_ranks: Ranks, experts: Any, name: str
) -> None:
    v, gradient, product = experts
    size, layout = EXPERT_LAYOUTS[name]
    runs = megatron_ranks(size).run(job.product_in_fp64, Job(**layout, **MOE, dtype="float64"))
    assert error(whole([r[0] for r in runs]), v) == 0.0
    assert error(whole([r[1] for r in runs]), gradient) < 1e-14
    assert error(whole([r[2] for r in runs]), product) < 1e-7
    for vector in range(3):
        assert_replicas_agree([r[vector] for r in runs], 1e-10)


@pytest.fixture(scope="module")
def experts(megatron_ranks: Ranks) -> Any:
    """v, exact gradient and product of the model with experts."""
    exact = Job(**MOE, dtype="float64")
    ((v, *_),) = megatron_ranks(1).run(job.product_in_fp64, exact)
    full = whole([v])
    ((gradient, product),) = megatron_ranks(1).run(job.reference, exact, full)
    return full, gradient, product


@pytest.mark.full
def test_expert_bias_and_logged_losses_are_as_they_were(megatron_ranks: Ranks) -> None:
    """Every gradient moves the router's expert bias and adds to the logged auxiliary losses; the
    passes of a product must not see each other's, and training none of them.
    """
    layout = Job(ep=2, **MOE, expert_bias=True, aux_loss=0.1)
    runs = megatron_ranks(2).run(job.compare_training, layout, ["spectrum"], {"dropout": True})
    for ((differing, _, _),) in runs:
        assert differing == []
    for run in megatron_ranks(2).run(job.measured, layout, 3, dropout=True):
        assert run[3] and run[4]


def test_a_gather_in_flight_is_finished_before_weights_are_written(megatron_ranks: Ranks) -> None:
    """`start_param_sync(force_sync=True)` only waits for a gather that training has started."""
    for (clean, _), *others in megatron_ranks(2).run(job.gather_in_flight):
        for displaced, (before, inside, after) in others:
            assert all(map(torch.equal, clean, displaced))
            assert inside == 0 <= before == after  # else every forward would gather once more


def test_deferred_weight_gradients_of_the_output_layer_are_made_in_each_pass(
    megatron_ranks: Ranks,
) -> None:
    # The weight is tied: its gradient is on both stages, and its own part made on the last.
    for plain, deferred in megatron_ranks(2).run(job.deferred_weight_gradients):
        for expected, found in zip(plain[:2], deferred[:2], strict=True):
            # Other sums of fp32 products; over 2 h of 6e-2 in the product.
            assert (found - expected).norm() < 1e-4 * expected.norm()
        assert deferred[2] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "signalled, said",
    [(True, "received SIGUSR2"), (False, "on purpose")],
)
def test_what_ends_a_rank_as_a_schedule_begins_ends_the_call_on_all(
    megatron_ranks: Ranks, signalled: bool, said: str
) -> None:
    """It ended between the meeting of the stages and the schedule, in which others wait for it."""
    for message, again in megatron_ranks(2).run(job.late, Job(pp=2), signalled, timeout=60.0):
        assert said in message and "end the job" not in message
        assert again


@pytest.mark.full
def test_what_training_sets_and_logs_neither_changes_a_product_nor_is_changed(
    megatron_ranks: Ranks,
) -> None:
    for bare, amid, touched in megatron_ranks(2).run(job.amid_training):
        assert (bare == amid).all()
        assert touched == []


@pytest.mark.full
def test_training_finds_its_gradients_cleared(megatron_ranks: Ranks) -> None:
    """The buffers, which passes fill, and `param.grad`, which is one after a step in fp32."""
    for runs in megatron_ranks(2).run(job.gradients_after_a_spectrum):
        assert runs == [(True, True)] * 2


@pytest.mark.full
def test_dropout_is_off_unless_it_is_asked_for(megatron_ranks: Ranks) -> None:
    ranks = megatron_ranks(1)
    plain, off, on = (
        ranks.run(job.measured, Job(dropout=rate), 1, dropout=kept)[0]
        for rate, kept in ((0.0, False), (0.3, False), (0.3, True))
    )
    assert (off[2].alphas == plain[2].alphas).all()
    assert (on[2].alphas != plain[2].alphas).all()
    assert on[4], "products repeat bit for bit"


def test_the_rerun_machine_does_not_refuse_losses(megatron_ranks: Ranks) -> None:
    assert megatron_ranks(1).run(job.with_rerun_machine) == ["validate_results"]


@pytest.mark.parametrize(
    "layout, name",
    [
        ({"etp": 1, "bias": False}, "experts of another tensor-parallel size"),
        (
            {"tp": 1, "etp": 2, "sequence_parallel": False, "bias": False},
            "experts of another tensor-parallel size",
        ),
        ({"ep": 2, "bias": True}, "biases of experts under sequence and expert parallelism"),
    ],
)
def test_experts_whose_gradients_megatron_does_not_sum_right_are_refused(
    megatron_ranks: Ranks, layout: dict[str, Any], name: str
) -> None:
    whole_job = Job(**{"tp": 2, "sequence_parallel": True, "experts": 4, **layout})
    for message in megatron_ranks(2).run(job.refused, whole_job):
        assert f"does not support {name}" in message


@pytest.mark.parametrize(
    "where, option, value, name",
    [
        ("config", "fp8", "e4m3", "fp8 or fp4 layers"),
        ("config", "cuda_graph_impl", "local", "CUDA graphs"),
        ("config", "fp16", True, "fp16 with loss scaling"),
        ("config", "dsa_indexer_loss_coeff", 0.1, "the loss of the indexers of sparse attention"),
        ("config", "moe_router_force_load_balancing", True, "routers whose choices are drawn"),
        ("ddp", "use_megatron_fsdp", True, "Megatron-FSDP"),
        ("ddp", "reuse_grad_buf_for_mxfp8_param_ag", True, "share memory with gradients"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    megatron_ranks: Ranks, where: str, option: str, value: Any, name: str
) -> None:
    (message,) = megatron_ranks(1).run(job.refused, Job(), where, option, value)
    assert message.startswith("ds_hessian does not support ") and name in message


def test_weights_in_fp16_are_refused_whatever_the_configuration_says(
    megatron_ranks: Ranks,
) -> None:
    (message,) = megatron_ranks(1).run(job.refused, Job(dtype="float16"))
    assert "does not support fp16 with loss scaling" in message


def test_a_model_that_is_not_in_megatrons_ddp_is_refused(megatron_ranks: Ranks) -> None:
    (message,) = megatron_ranks(1).run(job.refused, Job(), "unwrapped")
    assert "a model wrapped in GPTModel" in message


def test_process_groups_of_a_jobs_own_are_refused(megatron_ranks: Ranks) -> None:
    """Megatron's schedules are told of them in each call, and those of a measurement are not."""
    for other, none in megatron_ranks(2).run(routes_jobs.other_groups):
        assert "process groups (pg_collection) of other ranks than those of the parallel" in other
        assert "without Megatron's parallel state; call" in none


def test_interleaved_pipelines_need_whole_groups_and_all_chunks(megatron_ranks: Ranks) -> None:
    for batches, chunks in megatron_ranks(2).run(job.interleaved_mistakes):
        assert "groups of 2 micro-batches, got 3; pass a multiple" in batches
        assert "this job has 2 model chunks on a rank, got 1" in chunks


def test_a_loss_that_is_not_finite_is_an_error_on_every_rank(megatron_ranks: Ranks) -> None:
    for message in megatron_ranks(2).run(job.infinite_loss):
        assert "the loss of micro-batch 0 is nan" in message
