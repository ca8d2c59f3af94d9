"""ZeRO++ engines that quantize weights (qwZ) or gradients (qgZ): the Hessian without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends import quantized_jobs as jobs
from tests.backends.test_zero3 import relative
from tests.nets import DenseHessian, TinyGPT, batch
from tests.ranks import RankPool
from tests.tiers import cells

BF16 = {"bf16": {"enabled": True}}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
ENGINES: dict[str, dict[str, Any]] = {
    "qwZ": {"zero": WEIGHTS},
    "qgZ": {"zero": GRADIENTS},
    "both": {"zero": {**WEIGHTS, **GRADIENTS, "stage3_param_persistence_threshold": 0}},
    "both, bf16": {"zero": {**WEIGHTS, **GRADIENTS}, **BF16},
    "qwZ, hpZ, bf16": {"zero": {**WEIGHTS, "zero_hpz_partition_size": 2}, **BF16},
    "both, window": {"zero": {**WEIGHTS, **GRADIENTS}, "gradient_accumulation_steps": 2},
}


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own, which count as two nodes for the rest of their lives."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", cells(ENGINES, ["both"]))
def test_products_are_those_of_the_hessian_without_quantization(pair: RankPool, name: str) -> None:
    precision = "fp32" if "bf16" in name else "model"
    found = pair.run(jobs.product, ENGINES[name], precision)[0]
    weights, v, product, layout, (in_training, in_measurements) = found
    micro_batches = [batch(500 + i, 0) for i in range(jobs.FEW)]
    dense = DenseHessian(TinyGPT(jobs.WIDTH), weights, micro_batches)
    exact = dense.matvec(dense.flat(v))
    assert relative(dense.flat(product), exact) < 2e-4
    assert in_training > 0 and in_measurements == 0
    off = {"qwZ": "qwZ", "qgZ": "qgZ", "both": "qwZ and qgZ"}[name.split(",")[0]]
    assert layout == f"ZeRO-3, 2 ranks, unquantized ({off} off)"


@pytest.mark.full
@pytest.mark.parametrize("name, number", [*((name, 3) for name in ENGINES), ("qwZ", 1)])
def test_training_is_bitwise_the_same_with_spectra_and_with_those_that_fail_on_one_rank(
    pair: RankPool, name: str, number: int
) -> None:
    """Weights that are gathered together are quantized together: the order of gathers is restored,
    also where training has not recorded it yet.
    """
    for found, errors in pair.run(jobs.compare_training, ENGINES[name], number):
        assert found == [True, True]
        assert len(errors) == 2
        assert all("rank 1: Broken: on purpose" in text for text in errors)
