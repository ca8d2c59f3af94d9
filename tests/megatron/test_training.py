"""Training with measurements in between is bitwise training without, also where they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron import job
from tests.megatron.job import MOE, Job
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
SHARDED = {"distributed": True, "overlap": True}

JOBS: dict[str, dict[str, Any]] = {
    "DP": {},
    "DP distributed optimizer": {"distributed": True},
    "DP distributed optimizer overlap": SHARDED,
    "DP distributed optimizer overlap bf16": {**SHARDED, "dtype": "bfloat16"},
    "TP sequence parallel recompute": {"tp": 2, "sequence_parallel": True, "recompute": True},
    "TP bf16": {"tp": 2, "dtype": "bfloat16"},
    "TP bf16, passes in fp32": {"tp": 2, "dtype": "bfloat16", "precision": "auto"},
    "PP bf16, passes in fp32": {"pp": 2, "dtype": "bfloat16", "precision": "auto"},
    "DP distributed optimizer overlap bf16, passes in fp32": {
        **SHARDED,
        "dtype": "bfloat16",
        "precision": "auto",
    },
    "PP": {"pp": 2},
    "PP interleaved": {"pp": 2, "vpp": 2, "layers": 4},
}


FP32_SHARDED = ("DP distributed optimizer", "DP distributed optimizer overlap")
QUICK = (  # a failure in an interleaved pipeline is below
    "DP distributed optimizer overlap",
    "TP sequence parallel recompute",
    "PP bf16, passes in fp32",
)


@pytest.fixture(scope="module")
def gradient_norms() -> dict[str, list[float]]:
    return {}


@pytest.mark.parametrize("name", cells(JOBS, QUICK))
def test_training_with_spectra_in_between_is_bitwise_the_same(
    megatron_ranks: Ranks, gradient_norms: dict[str, list[float]], name: str
) -> None:
    layout = Job(**JOBS[name], dropout=0.1)
    # Of DP, gradients without dropout are compared below.
    config = {"dropout": not name.startswith("DP")}
    runs = megatron_ranks(2).run(job.compare_training, layout, ["spectrum"], config)
    for ((differing, measured, _),) in runs:
        assert differing == []
        gradient_norms[name] = [m[1] for m in measured]


OPERATORS: dict[str, tuple[int, dict[str, Any], str]] = {
    "DP distributed optimizer overlap bf16, ggn": (
        2,
        JOBS["DP distributed optimizer overlap bf16"],
        "ggn",
    ),
    "TP sequence parallel recompute, ggn": (2, JOBS["TP sequence parallel recompute"], "ggn"),
    "TP bf16, passes in fp32, residual": (2, JOBS["TP bf16, passes in fp32"], "residual"),
    "PP bf16, passes in fp32, fisher": (2, JOBS["PP bf16, passes in fp32"], "fisher"),
    "PP interleaved, ggn": (2, JOBS["PP interleaved"], "ggn"),
    "TP sequence parallel, norms recomputed, hessian": (
        2,
        {"tp": 2, "sequence_parallel": True, "selective": ("layernorm", "core_attn")},
        "hessian",
    ),
    "EP, experts recomputed, ggn": (
        2,
        {**MOE, "ep": 2, "aux_loss": 0.1, "selective": ("moe",)},
        "ggn",
    ),
    "EP auxiliary loss, residual": (2, {**MOE, "ep": 2, "aux_loss": 0.1}, "residual"),
}


@pytest.mark.parametrize("name", cells(OPERATORS, ["PP interleaved, ggn"]))
def test_training_with_other_operators_in_between_is_bitwise_the_same(
    megatron_ranks: Ranks, name: str
) -> None:
    """Their taps are hooks of the output layer, of which none is left."""
    size, layout, operator = OPERATORS[name]
    config = {"dropout": True, "operator": operator}
    runs = megatron_ranks(size).run(
        job.compare_training, Job(**layout, dropout=0.1), ["spectrum"], config
    )
    for ((differing, measured, _),) in runs:
        assert differing == [] and len(measured) == 2


@pytest.mark.full
@pytest.mark.parametrize("name", JOBS)
def test_training_with_kronecker_factors_in_between_is_bitwise_the_same(
    megatron_ranks: Ranks, name: str
) -> None:
    """Their passes leave weights without gradients."""
    layout = Job(**JOBS[name], dropout=0.1)
    runs = megatron_ranks(2).run(job.compare_training, layout, ["kronecker"], {"dropout": False})
    for ((differing, measured, _),) in runs:
        assert differing == [] and len(measured) == 2
        assert all(mismatch < 0.02 and count == 8 for mismatch, count in measured)


@pytest.mark.full  # of cells that wait for --all
def test_gradients_right_after_a_step_are_the_same_with_and_without_sharded_optimizer(
    gradient_norms: dict[str, list[float]],
) -> None:
    """`param.grad` is the gradient buffer after a step of the fp32 optimizers: a backward that
    accumulates into it counts the first micro-batch twice.
    """
    plain = gradient_norms["DP"]
    sharded = [gradient_norms[name] for name in FP32_SHARDED if name in gradient_norms]
    assert sharded and all(norms == pytest.approx(plain, rel=1e-5) for norms in sharded)


PLACES = ["receive", "received", "exchange"]  # between the steps of a schedule
INSIDE, AROUND = ["layer", "layer backward"], ["iterator", "finalize"]
BETWEEN = [f"{place}{rank}" for place in PLACES for rank in ("", " on 0")]
ACROSS = [  # stages, which wait for each other
    *("finalize", "finalize on 0", "embedding", "embedding on 0"),
    *("after embedding", "after embedding on 0"),
]
FAILURES: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "one rank": (1, {}, ["batch", "forward", "loss", "backward", *INSIDE, *AROUND]),
    "DP": (2, SHARDED, ["batch", "forward", "loss", "backward", *INSIDE, *AROUND]),
    "TP": (2, {"tp": 2}, ["batch on 0", "batch", "forward", "loss", "backward", *INSIDE]),
    "TP sequence parallel": (
        2,
        {"tp": 2, "sequence_parallel": True, "recompute": True},
        ["layer on 0", *INSIDE],
    ),
    "PP": (
        2,
        {"pp": 2},
        [
            "batch",
            "batch on 0",
            "forward",
            "loss",
            "backward",
            *INSIDE,
            "iterator",
            "layer backward on 0",
            "displace on 0",
            *BETWEEN,
        ],
    ),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}, ["layer on 0", *INSIDE]),
    "PP interleaved, between steps": (2, {"pp": 2, "vpp": 2, "layers": 4}, BETWEEN),
    "PP, across stages": (2, {"pp": 2}, ACROSS),
    "TP x PP": (4, {"tp": 2, "pp": 2}, ["batch on 0", "layer on 2", *INSIDE, *BETWEEN]),
    "PP, shapes that stages tell": (
        2,
        {"pp": 2, "varies": True, "dispatcher": "alltoall"},  # which it needs
        ["layer on 0", *BETWEEN],
    ),
    "TP x DP": (4, {"tp": 2, "distributed": True}, ["layer on 0", *INSIDE]),
    "PP x DP, overlap": (
        4,
        {"pp": 2, **SHARDED},
        ["iterator", "layer on 2", "layer backward", "layer backward on 0", "finalize on 0"],
    ),
    "EP": (2, {"ep": 2, **MOE}, ["layer on 0", "experts", "experts backward"]),
    "EP, all-to-all": (  # whose sizes are arrays of numpy
        2,
        {"ep": 2, "dispatcher": "alltoall", **MOE},
        ["layer on 0", "experts", "experts backward"],
    ),
    "TP x EP": (
        4,
        {"tp": 2, "ep": 2, "sequence_parallel": True, **MOE},
        ["experts on 1", "experts backward"],
    ),
}


@pytest.mark.parametrize("name", cells(FAILURES, ["PP interleaved"]))
def test_a_failure_on_one_rank_ends_on_all_and_leaves_training_alone(
    megatron_ranks: Ranks, name: str
) -> None:
    """Wherever it is, also between collectives that others wait in."""
    size, layout, stages = FAILURES[name]
    runs = megatron_ranks(size).run(job.compare_training, Job(**layout, dropout=0.1), stages, {})
    for run in runs:
        for stage, (differing, _, errors) in zip(stages, run, strict=True):
            assert differing == [], stage
            rank = stage.partition(" on ")[2] or size - 1
            named = "" if (size, stage) == (1, "finalize") else f"rank {rank}: "
            assert f"{named}Broken: on purpose" in errors[0], (stage, errors)
