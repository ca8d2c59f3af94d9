"""Engines whose layers DeepSpeed itself has split: the Hessian of the whole model, on its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import ds_hessian
from tests.backends import auto_tp_jobs as jobs
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
BF16 = {"bf16": {"enabled": True}}
STEPS = 5


@pytest.fixture(scope="module")
def split_ranks() -> Iterator[Ranks]:
    """Pools of their own: DeepSpeed keeps the groups of AutoTP for the process."""
    pools: dict[int, RankPool] = {}

    def of(size: int) -> RankPool:
        if size not in pools:
            while pools:
                pools.popitem()[1].close()
            pools[size] = RankPool(size)
        return pools[size]

    yield of
    while pools:
        pools.popitem()[1].close()


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of a vector in the norm of the space."""
    assert found.keys() == exact.keys()
    off = sum(float((found[name] - exact[name]).square().sum()) for name in exact)
    return float((off / sum(float(t.square().sum()) for t in exact.values())) ** 0.5)


@pytest.fixture(scope="module")
def one() -> Any:
    """Lanczos coefficients of the whole model on plain torch, in one process."""
    hessian = ds_hessian.attach(jobs.llama(), config=ds_hessian.HessianConfig.parse(jobs.QUIET))
    spectrum = hessian.spectrum(jobs.micro_batches(), jobs.loss_of, num_matvecs=STEPS)
    return spectrum.alphas[0], spectrum.betas[0], spectrum.loss


@pytest.mark.parametrize("size, stage", cells([(2, 0), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)], []))
def test_products_are_those_of_the_dense_hessian_and_coefficients_those_of_one_process(
    split_ranks: Ranks, one: Any, size: int, stage: int
) -> None:
    v, product, spectrum, repeats = split_ranks(size).run(jobs.measured, stage, 2)[0]
    assert repeats and error(product, jobs.reference(v)) < 2e-4
    alphas, betas, loss = one
    # Products are right to some 1e-4 of the largest eigenvalue, which betas of it divide.
    assert np.allclose(spectrum.alphas[0], alphas, rtol=0, atol=2e-3 * abs(alphas).max())
    assert np.allclose(spectrum.betas[0], betas, rtol=0, atol=2e-3 * abs(alphas).max())
    assert spectrum.loss == pytest.approx(loss, rel=1e-5)
    assert spectrum.provenance.layout == f"ZeRO-{stage}, {size} ranks, TP 2"


@pytest.mark.parametrize("stage", cells([1, 2, 3], []))
def test_fp32_passes_of_bf16_engines(split_ranks: Ranks, stage: int) -> None:
    v, product, _, _ = split_ranks(2).run(jobs.measured, stage, 2, "fp32", **BF16)[0]
    assert error(product, jobs.reference(v, rounded=True)) < 2e-4


@pytest.mark.parametrize(
    "size, stage, config", cells([(2, 0, {}), (2, 1, {}), (2, 2, BF16), (4, 3, {})], [])
)
def test_training_is_bitwise_the_same_with_spectra_and_with_those_that_fail_on_one_rank(
    split_ranks: Ranks, size: int, stage: int, config: dict[str, Any]
) -> None:
    """With dropout, whose masks are measured too."""
    for found, errors in split_ranks(size).run(jobs.compare_training, stage, 2, **config):
        assert found == [True, True]
        assert len(errors) == 2
        assert all(f"rank {size - 1}: Broken: on purpose" in text for text in errors)


@pytest.mark.full
@pytest.mark.parametrize("family", jobs.FAMILIES)
def test_other_families(split_ranks: Ranks, family: str) -> None:
    v, product = split_ranks(2).run(jobs.of_family, family)[0]
    assert error(product, jobs.reference(v, family=family)) < 2e-4
