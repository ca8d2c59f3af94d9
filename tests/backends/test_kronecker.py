"""Kronecker factors on sharded engines: those of one process; failures end on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends import jobs, kronecker_jobs
from tests.backends.test_stages import ENGINES as EVERY
from tests.nets import DenseHessian, TinyGPT, batch, merged
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

ENGINES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-0": (2, {"stage": 0}, {}),
    "ZeRO-1": (2, {"stage": 1}, {}),
    "ZeRO-2": (2, {"stage": 2}, {}),
    "ZeRO-3": (2, {"stage": 3}, {}),
    "ZeRO-3 on 3": (3, {"stage": 3}, {}),
    "ZeRO-1 offload": (2, {"stage": 1, "offload_optimizer": {"device": "cpu"}}, {}),
    "ZeRO-3 offload": (
        2,
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {},
    ),
}


def together(ranks: list[Any]) -> dict[str, Any]:
    """All layers' factors, each from its owner."""
    return {layer: forms for rank in ranks for layer, forms in rank[0].items() if "kfac" in forms}


@pytest.fixture(scope="module")
def one(ranks: Ranks) -> Any:
    found = ranks(1).run(kronecker_jobs.factors, {"stage": 0})
    return together(found), found[0][1]


@pytest.mark.parametrize("name", cells(ENGINES, ("ZeRO-3",)))
def test_factors_are_those_of_one_process(ranks: Ranks, one: Any, name: str) -> None:
    size, zero, config = ENGINES[name]
    found = ranks(size).run(kronecker_jobs.factors, zero, **config)
    forms, (exact, samples) = together(found), one
    assert all([(n, s) for n, s, _ in rank[1]] == [(n, s) for n, s, _ in samples] for rank in found)
    assert all(mismatch < 1e-4 for rank in found for _, _, mismatch in rank[1])
    assert forms.keys() == exact.keys() and len(forms) == 4
    for layer, kinds in exact.items():
        for kind, whole in kinds.items():
            a, b = applied(*forms[layer][kind]), applied(*whole)
            # Roots of inverses of singular factors magnify rounding by 1 over their ridge's, 1e2,
            # in each round.
            limit = 1e-3 if kind == "klshampoo" else 1e-4
            assert (a - b).norm() < limit * b.norm(), (layer, kind)


@pytest.mark.parametrize("name", cells(("ZeRO-0", "ZeRO-3"), ("ZeRO-3",)))
def test_samples_of_masked_prompts_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    size, zero, config = ENGINES[name]
    exact = ranks(1).run(kronecker_jobs.factors, {"stage": 0}, masked=4)
    found = ranks(size).run(kronecker_jobs.factors, zero, masked=4, **config)
    counts = {n: s["kfac"] for n, s, _ in exact[0][1]}
    labels = 2 * 2 * jobs.TOTAL  # of two tokens in each of two sequences
    assert counts.pop("qkv.weight") == 3 * labels and set(counts.values()) == {labels}
    assert all(
        [(n, s) for n, s, _ in rank[1]] == [(n, s) for n, s, _ in exact[0][1]] for rank in found
    )
    compare(together(found), together(exact), {"kfac": 1e-4, "ekfac": 1e-4, "shampoo": 1e-4})


def compare(found: dict[str, Any], exact: dict[str, Any], limits: dict[str, float]) -> None:
    """Assert that factors are within limits, a kind each, of exact ones."""
    assert found.keys() == exact.keys() and len(found) == 4
    for layer, kinds in exact.items():
        for kind, limit in limits.items():
            a, b = applied(*found[layer][kind]), applied(*kinds[kind])
            assert (a - b).norm() < limit * b.norm(), (layer, kind)


@pytest.fixture(scope="module")
def drawn(ranks: Ranks) -> dict[str, Any]:
    return together(ranks(1).run(kronecker_jobs.factors, {"stage": 0}, draws=2))


@pytest.mark.parametrize("name", cells(ENGINES, ()))
def test_drawn_labels_are_those_of_one_process(
    ranks: Ranks, drawn: dict[str, Any], name: str
) -> None:
    size, zero, config = ENGINES[name]
    found = ranks(size).run(kronecker_jobs.factors, zero, draws=2, **config)
    compare(together(found), drawn, {"kfac": 1e-4, "ekfac": 1e-4, "shampoo": 1e-4})


FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}


@pytest.mark.full
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_drawn_labels_in_fp16_are_those_of_fp32(
    ranks: Ranks, drawn: dict[str, Any], stage: int, size: int
) -> None:
    """But for some labels between which rounding decides."""
    found = ranks(size).run(kronecker_jobs.factors, {"stage": stage}, draws=2, fp16=FP16)
    compare(together(found), drawn, {"kfac": 0.05, "ekfac": 0.05, "shampoo": 0.05})


@pytest.mark.full
def test_factors_that_an_optimizer_keeps_are_read_where_it_steps_whole_weights(
    ranks: Ranks,
) -> None:
    pytest.importorskip("pytorch_optimizer", reason="pytorch-optimizer is not installed")
    for more in ({}, {"bf16": {"enabled": True}}):  # which has masters
        for found in ranks(2).run(kronecker_jobs.kept, 0, "soap", **more):
            assert isinstance(found, dict), found
            assert len(found) >= 4 and max(found.values()) < 1e-4
    for stage in (1, 3):
        for found in ranks(2).run(kronecker_jobs.kept, stage, "soap"):
            assert "has no state of this weight" in found and "ZeRO 1 - 3" in found


@pytest.mark.parametrize("stage", cells([1, 2], [1]))
def test_a_layer_that_alone_is_trained_has_factors(ranks: Ranks, stage: int) -> None:
    """DeepSpeed reduced a buffer that the first gradient makes, where a backward has none."""
    (layers, cosine), *_ = ranks(2).run(kronecker_jobs.probing, stage)
    (_, expected), *_ = ranks(2).run(kronecker_jobs.probing, 0)
    assert list(layers) == ["down.weight"] and cosine == pytest.approx(expected, rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_deepspeeds_muon_is_refused_by_name(ranks: Ranks, stage: int) -> None:
    for found in ranks(2).run(kronecker_jobs.kept, stage, "muon"):
        assert "MuonWithAuxAdam has no" in found


def applied(values: torch.Tensor, left: Any, right: Any) -> torch.Tensor:
    """K on some matrices, which do not depend on the signs of eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *values.shape, generator=generator, dtype=torch.float64)
    inside = left.T @ x @ right
    found = left @ (values * inside) @ right.T
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.full
def test_records_agree_with_the_dense_hessian_on_every_rank(ranks: Ranks) -> None:
    (weights, record), (_, other) = ranks(2).run(kronecker_jobs.compared, {"stage": 3})
    assert np.array_equal(record.cosines, other.cosines)
    dense = DenseHessian(TinyGPT(), weights, merged([batch(500 + i, 0) for i in range(jobs.TOTAL)]))
    matrix = dense.matrix()
    for i, name in enumerate(record.layers):
        inside = dense.flat({n: torch.full_like(w, float(n == name)) for n, w in weights.items()})
        where = inside.nonzero()[:, 0]
        block = matrix[where][:, where]
        assert abs(record.norms[i] - float(block.norm())) <= 4 * record.norm_errors[i]
        plain = float(block.diag().square().sum() / block.square().sum())
        assert abs(record.plain_shares[i] - plain) <= 4 * record.plain_share_errors[i]
    assert record.kinds[-1] == "adam" and (record.samples[:, -1] == 3).all()
    assert np.allclose(record.shares[:, -1], record.plain_shares)


@pytest.mark.parametrize("name", cells(EVERY, []))
def test_training_is_bitwise_the_same_with_factors_in_between(ranks: Ranks, name: str) -> None:
    """Their passes leave weights without gradients, which engines are not used to."""
    common = {"steps": 5, "gradient_accumulation_steps": 2, **EVERY[name]}
    modes = [{"mode": "bare", **common}, {"mode": "kronecker", **common}]
    for differing, _ in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]]


@pytest.mark.parametrize("where", cells(("hook", "eigh"), ()))
def test_a_failure_of_one_rank_ends_on_all(ranks: Ranks, where: str) -> None:
    for error, same, cosines, gone in ranks(2).run(kronecker_jobs.failing, where):
        assert "rank 1: OSError: on purpose" in error
        assert same and gone and np.isfinite(cosines).all()
