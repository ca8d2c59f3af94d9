"""Kronecker factors in Megatron's layouts: those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.megatron import kronecker_jobs
from tests.megatron.job import Job
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP": (2, {"tp": 2}),
    "TP sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "PP": (2, {"pp": 2}),
    "DP distributed optimizer": (2, {"distributed": True}),
    "TP x PP": (4, {"tp": 2, "pp": 2}),
    "TP x DP": (4, {"tp": 2, "distributed": True}),
    "TP 4": (4, {"tp": 4, "query_groups": 4, "sequence_parallel": True}),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "PP interleaved, recomputed": (2, {"pp": 2, "vpp": 2, "layers": 4, "recompute": True}),
}


@pytest.fixture(scope="module")
def one(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """Factors of one process, and what is known of them."""
    return functools.cache(lambda job: megatron_ranks(1).run(kronecker_jobs.factors, job)[0])


@pytest.mark.parametrize("name", cells(LAYOUTS, ("TP sequence parallel",)))
def test_factors_are_those_of_one_process(
    megatron_ranks: Ranks, one: Callable[[Job], Any], name: str
) -> None:
    size, layout = LAYOUTS[name]
    exact, about = one(Job(**layout).alone)
    assert len(about) == 8  # four weights in each of two layers
    runs = megatron_ranks(size).run(kronecker_jobs.factors, Job(**layout))
    for _, found in runs:
        assert [x[:3] for x in found] == [x[:3] for x in about]
        assert all(mismatch < 1e-4 for *_, mismatch in found)
    forms = {layer: kinds for own, _ in runs for layer, kinds in own.items()}
    assert forms.keys() == exact.keys()
    for layer, kinds in exact.items():
        for kind, whole in kinds.items():
            assert (forms[layer][kind] - whole).norm() < 1e-4 * whole.norm(), (layer, kind)


def test_passes_whose_gradients_nobody_needs_do_not_reduce_them(megatron_ranks: Ranks) -> None:
    ((count, micro_batches),) = megatron_ranks(1).run(kronecker_jobs.reductions, Job())
    assert count == micro_batches > 0


DRAWN: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    "PP x DP": (4, {"pp": 2, "distributed": True}),
    "recomputed": (2, {"tp": 2, "recompute": True}),
    "a token average": (2, {"per_token": True}),
    "bf16": (2, {"tp": 2, "dtype": "bfloat16"}),
    "experts": (2, {"ep": 2, "experts": 4, "bias": False}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_labels_are_those_of_one_process(megatron_ranks: Ranks, name: str) -> None:
    """In bf16 but for some between which rounding decides: there are more draws then."""
    size, layout = DRAWN[name]
    job = Job(**layout)
    draws, limit = (2, 1e-3) if job.dtype == "float32" else (32, 0.1)
    kinds = ("kfac", "ekfac", "shampoo")
    wide = replace(job, dtype="float32")
    ((exact, about),) = megatron_ranks(1).run(kronecker_jobs.factors, wide.alone, kinds, draws)
    runs = megatron_ranks(size).run(kronecker_jobs.factors, job, kinds, draws)
    for _, found in runs:
        assert [x[:3] for x in found] == [x[:3] for x in about]
    forms = {layer: each for own, _ in runs for layer, each in own.items()}
    assert forms.keys() == exact.keys()
    for layer, each in exact.items():
        for kind, whole in each.items():
            assert (forms[layer][kind] - whole).norm() < limit * whole.norm(), (layer, kind)


@pytest.mark.full
def test_drawn_labels_of_logits_that_every_rank_has_are_those_of_one_process(
    megatron_ranks: Ranks,
) -> None:
    """The Fisher matrix was as many times too large as there are tensor-parallel ranks."""
    ((exact, _),) = megatron_ranks(1).run(kronecker_jobs.gathered, Job(), 2)
    runs = megatron_ranks(2).run(kronecker_jobs.gathered, Job(tp=2), 2)
    forms = {layer: each for own, _ in runs for layer, each in own.items()}
    assert forms.keys() == exact.keys()
    for layer, each in exact.items():
        for kind, whole in each.items():
            assert (forms[layer][kind] - whole).norm() < 1e-3 * whole.norm(), (layer, kind)


def test_the_diagonal_of_a_preconditioner_has_biases(megatron_ranks: Ranks) -> None:
    """Megatron gives those of queries and keys no gradient where their weight needs none."""
    (off,) = megatron_ranks(1).run(kronecker_jobs.diagonal, Job())
    assert sum("qkv.bias" in name for name in off) == 2
    assert max(off.values()) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"dtype": "bfloat16"}, {"pp": 2, "dtype": "bfloat16"}])
def test_factors_that_an_optimizer_of_masters_keeps_are_read(
    megatron_ranks: Ranks, layout: dict[str, Any]
) -> None:
    """It was said that it has made no step."""
    pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
    job = Job(**layout)
    assert max(megatron_ranks(job.pp).run(kronecker_jobs.kept, job)) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("of", [{}, {"dtype": "bfloat16", "precision": "fp32"}])
def test_records_are_those_of_one_process(megatron_ranks: Ranks, of: dict[str, Any]) -> None:
    """In fp32 passes too, in which biases of layers whose weights are spared have no gradient."""
    ((one, _),) = megatron_ranks(1).run(kronecker_jobs.record, Job(**of))
    for found, hooks in megatron_ranks(2).run(kronecker_jobs.record, Job(tp=2, **of)):
        assert not hooks and found.layers == one.layers
        for name in ("cosines", "shares", "plain_shares", "tops", "norms"):
            assert np.allclose(getattr(found, name), getattr(one, name), rtol=1e-2, atol=1e-3), name


@pytest.mark.full
def test_a_size_that_the_ranks_do_not_divide_is_refused_with_its_numbers(
    megatron_ranks: Ranks,
) -> None:
    for error in megatron_ranks(2).run(kronecker_jobs.uneven, Job(tp=2)):
        assert "fc1.weight has 16 inputs, which its 2 tensor-parallel ranks must" in error
        assert "divide evenly; this rank sees 15" in error


def test_a_weight_that_checkpoints_have_in_parts_is_left_out(megatron_ranks: Ranks) -> None:
    """As projections of Mamba are: all layers were refused, with a message about ranks."""
    (layers,) = megatron_ranks(1).run(kronecker_jobs.in_parts)
    assert [name.split(".", 2)[2] for name in layers] == ["0.mlp.linear_fc2.weight"]
