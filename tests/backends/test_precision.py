"""Engines in 16 bits at the defaults: passes in fp32 where possible, and a record that says so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.backends import precision_jobs as jobs
from tests.backends.jobs import FEW, TOTAL
from tests.backends.test_stages import LOW_ENGINES
from tests.backends.test_zero3 import oracle
from tests.nets import DenseHessian
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
ROUNDING = 1e-4
"""Relative error of products in fp32, of which a bar is an estimate."""


PLACES = (  # of masters and of their fp32 copies; products of all engines are in test_stages
    *("0 bf16", "1 bf16 immediate", "2 bf16", "3 bf16", "3 bf16 masters", "3 bf16 offload"),
    *("3 bf16 hpZ", "2 fp16", "3 fp16", "2 autocast"),
)


@pytest.mark.parametrize("name", cells(PLACES, []))
def test_the_spectrum_is_that_of_the_masters_without_a_warning(ranks: Ranks, name: str) -> None:
    results = ranks(2).run(jobs.spectrum, LOW_ENGINES[name])
    weights, spectrum = results[0]
    exact = torch.linalg.eigvalsh(oracle(weights, FEW).matrix()).numpy()
    print(spectrum.table())
    assert spectrum.warnings == ()
    scale = ROUNDING * exact[-1]
    assert np.allclose(np.sort(spectrum.ritz_values[0])[-3:], exact[-3:], rtol=1e-3)
    for found, truth in ((spectrum.eigenvalue_max, exact[-1]), (spectrum.eigenvalue_min, exact[0])):
        assert abs(found.value - truth) <= found.error + scale
    assert spectrum.relative_errors.max() < 1e-2
    source = spectrum.provenance
    assert source.precision == "fp32" and "fp32 copies fit" in source.precision_reason
    assert f"in fp32: {source.precision_reason}" in spectrum.table()
    assert [s.provenance.precision for _, s in results] == ["fp32", "fp32"]


@pytest.mark.parametrize("name", cells(["0 bf16", "2 bf16", "3 bf16"], []))
def test_the_spectrum_is_that_of_weights_edited_without_their_masters(
    ranks: Ranks, name: str
) -> None:
    """It was that of the masters, as if nobody had touched the weights."""
    weights, spectrum = ranks(2).run(jobs.edited, LOW_ENGINES[name])[0]
    exact = torch.linalg.eigvalsh(oracle(weights, FEW).matrix()).numpy()
    assert np.allclose(np.sort(spectrum.ritz_values[0])[-3:], exact[-3:], rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "other", "size"),
    cells([("2 bf16", "3 bf16", 1), ("2 fp16", "3 fp16", 3)], []),
)
def test_the_spectrum_does_not_depend_on_the_layout(
    ranks: Ranks, name: str, other: str, size: int
) -> None:
    """At the initial weights, which are the same everywhere."""
    (_, one), (_, two) = (
        ranks(ranked).run(jobs.spectrum, LOW_ENGINES[engine], 0, 8, TOTAL)[0]
        for engine, ranked in ((name, 2), (other, size))
    )
    scale = abs(one.alphas).max()
    assert abs(one.alphas - two.alphas).max() < 1e-3 * scale
    assert abs(one.betas - two.betas).max() < 1e-3 * scale


@pytest.mark.full
@pytest.mark.parametrize("name", ["3 bf16", "2 bf16"])
def test_passes_in_fp32_for_which_a_rank_has_no_memory_are_those_of_training(
    ranks: Ranks, name: str
) -> None:
    results = ranks(2).run(jobs.with_little_memory, LOW_ENGINES[name])
    for spectrum, trace, told in results:
        source = spectrum.provenance
        assert (source.precision, trace) == ("model", "fp32")
        assert "fp32 passes would need" in source.precision_reason
        assert "of rank 1 for 2 ranks beyond training's memory, and" in source.precision_reason
        assert f"as training runs them: {source.precision_reason}" in spectrum.table()
        assert told.startswith("not enough memory for spectrum: it needs ")
    assert results[0][0].provenance.precision_reason == results[1][0].provenance.precision_reason


@pytest.mark.parametrize("name", cells(["2 bf16", "3 bf16", "0 bf16"], []))
def test_passes_that_cannot_run_in_fp32_are_those_of_training(ranks: Ranks, name: str) -> None:
    for (kernel, error, rounded), same in ranks(2).run(jobs.impossible, LOW_ENGINES[name]):
        assert same
        assert kernel.precision == rounded.precision == "model"
        assert "rank 1: RuntimeError: this attention only supports" in kernel.precision_reason
        assert "that uses torch.autocast" in rounded.precision_reason
        assert error is not None and error > 1e-3


def test_gradients_that_deepspeed_reduces_in_the_dtype_of_its_first_weight(ranks: Ranks) -> None:
    """Which is no dtype of the model any more: ZeRO-2 has made its weights fp32."""
    results = ranks(2).run(jobs.two_dtypes)
    weights, v, product, error, _ = results[0]
    entries = [(x.double(), y) for result in results for x, y in result[4]]
    dense = DenseHessian(jobs.TwoDtypes(), weights, entries)
    exact, found = dense.matvec(dense.flat(v)), dense.flat(product)
    assert float((found - exact).norm() / exact.norm()) < min(5 * error, 1e-3)


def test_what_any_precision_would_raise_is_raised(ranks: Ranks) -> None:
    for message in ranks(2).run(jobs.broken, LOW_ENGINES["2 bf16"]):
        assert "rank 0: Broken: on purpose" in message
