"""DeepSpeed engines in jobs of Megatron, as Megatron-DeepSpeed makes them: with an mpu."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.megatron import deepspeed_jobs as jobs
from tests.megatron.job import Job
from tests.megatron.test_layouts import (
    assert_replicas_agree,
    assert_spectra_are_those_of_one,
    error,
    whole,
)
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
BF16 = {"bf16": {"enabled": True}}

MESSAGES = {
    "pipeline": "pipeline or context parallelism of an mpu",
    "sequence": "sequence parallelism of an mpu (parameters with sequence_parallel)",
    "experts": "experts in an mpu with tensor-parallel ranks",
    "unmarked": "an mpu with tensor-parallel ranks where no parameter is split over them",
    "gate": "gated layers whose partition_stride does not tell their halves apart",
    "strange": "decoder.layers.0.mlp.linear_fc2.weight' of shape (16, 10) with partition_dim 1 and "
    "partition_stride 2",
    "batches": "those of data-parallel rank 0 differ; pass the same list to all of them",
    "partial": "decoder.final_layernorm.weight', whose gradient differs between tensor-parallel",
}


@pytest.mark.parametrize("stage", cells([1, 3], []))
def test_a_mesh_of_data_parallel_ranks_alone_changes_nothing(
    megatron_ranks: Ranks, stage: int
) -> None:
    """Bit for bit the spectrum without an mpu, and that of Megatron's own data parallelism, whose
    probes are others (by names), within the error bars.
    """
    for without, with_mesh, megatron in megatron_ranks(2).run(jobs.spectra, stage):
        assert (with_mesh.alphas == without.alphas).all()
        assert (with_mesh.betas == without.betas).all()
        assert with_mesh.n == megatron.n
        assert with_mesh.loss == pytest.approx(megatron.loss, rel=1e-6)
        assert with_mesh.gradient_norm == pytest.approx(megatron.gradient_norm, rel=1e-5)
        for of in ("eigenvalue_max", "eigenvalue_min"):
            found, expected = getattr(with_mesh, of), getattr(megatron, of)
            assert abs(found.value - expected.value) < found.error + expected.error


def test_attributes_of_layers_say_what_their_sharded_state_dict_says(
    megatron_ranks: Ranks,
) -> None:
    """Of split, gated, grouped and replicated parameters: what ZeRO's shards go by, also where
    there is no sharded state dict, and what Megatron's checkpoints go by.
    """
    for compared, differing in megatron_ranks(2).run(jobs.places_by_checkpoint):
        assert compared == 28 and differing == []


@pytest.fixture(scope="module")
def one(megatron_ranks: Ranks) -> Any:
    """Of one process: v, the exact product, and what it measures."""
    ranks = megatron_ranks(1)
    (run,) = ranks.run(jobs.measured, Job(), 1)
    v = whole([run[0]])
    (product,) = ranks.run(jobs.reference, v)
    return v, product, run


@pytest.mark.parametrize(
    "size, stage",
    cells([(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)], []),
)
def test_tensor_parallel_engines_have_the_spectra_of_one_process(
    megatron_ranks: Ranks, one: Any, size: int, stage: int
) -> None:
    """On 2 ranks that share a model, and on 2 x 2: with the same probe, bit for bit."""
    v, product, single = one
    runs = megatron_ranks(size).run(jobs.measured, Job(tp=2), stage)
    assert error(whole([r[0] for r in runs]), v) == 0.0
    assert_spectra_are_those_of_one(runs, product, single)
    assert_replicas_agree([r[1] for r in runs], 0.0)
    assert runs[0][2].provenance.layout == f"ZeRO-{stage}, {size} ranks, TP 2"


@pytest.mark.parametrize("stage", cells([0, 1, 2, 3], []))
def test_bf16_products_of_tensor_parallel_engines(
    megatron_ranks: Ranks, one: Any, stage: int
) -> None:
    """To the rounding of bf16 gradients, as in Megatron's own layouts."""
    v, product, _ = one
    runs = megatron_ranks(2).run(jobs.measured, Job(tp=2), stage, 2, **BF16)
    assert error(whole([r[0] for r in runs]), v) == 0.0
    assert error(whole([r[1] for r in runs]), product) < 0.15
    assert all(r[3] and r[4] for r in runs)


@pytest.mark.parametrize("stage", cells([1, 3], []))
def test_fp32_passes_of_bf16_tensor_parallel_engines(
    megatron_ranks: Ranks, one: Any, stage: int
) -> None:
    """As exact as in fp32, at the masters, which are rounded to bf16 before the first step."""
    (product,) = megatron_ranks(1).run(jobs.reference, one[0], rounded=True)
    runs = megatron_ranks(2).run(jobs.measured, Job(tp=2), stage, 2, "fp32", **BF16)
    assert error(whole([r[1] for r in runs]), product) < 2e-4
    assert all(r[3] and r[4] for r in runs)


@pytest.mark.parametrize(
    "size, stage, config",
    cells(
        [(2, 0, {}), (2, 1, {}), (2, 2, BF16), (2, 3, BF16), (4, 1, BF16), (4, 3, {})],
        [(2, 2, BF16)],
    ),
)
def test_training_of_tensor_parallel_engines_is_bitwise_the_same_with_spectra(
    megatron_ranks: Ranks, size: int, stage: int, config: dict[str, Any]
) -> None:
    """Weights, masters, moments, random states of both trackers, losses; with dropout."""
    layout = Job(tp=2, dropout=0.1)
    for run in megatron_ranks(size).run(
        jobs.compare_training, layout, stage, ["spectrum"], **config
    ):
        assert run == [([], [])]


@pytest.mark.parametrize("size, stage, config", cells([(2, 1, {}), (4, 1, BF16), (4, 3, {})], []))
def test_a_failure_on_one_tensor_parallel_rank_ends_on_all_and_leaves_training_alone(
    megatron_ranks: Ranks, size: int, stage: int, config: dict[str, Any]
) -> None:
    """Also where others wait for it in reductions of activations, by torch.distributed itself."""
    measures, layout = ["batch", "forward", "loss", "backward"], Job(tp=2, dropout=0.1)
    for run in megatron_ranks(size).run(jobs.compare_training, layout, stage, measures, **config):
        for where, (differing, errors) in zip(measures, run, strict=True):
            assert differing == [], where
            assert f"rank {size - 1}: Broken: on purpose" in errors[0], where


@pytest.mark.parametrize("name, message", MESSAGES.items())
def test_what_is_not_known_to_be_right_is_refused_by_name(
    megatron_ranks: Ranks, name: str, message: str
) -> None:
    for found in megatron_ranks(2).run(jobs.refusal, name):
        assert message in found
