"""Engines whose ranks share sequences (Ulysses): the Hessian of whole sequences, on their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ds_hessian
from ds_hessian.backends.zero.sequence import factor_of_gradients
from ds_hessian.errors import UnsupportedError
from tests.backends import auto_tp_jobs
from tests.backends import sequence_jobs as jobs
from tests.backends.test_auto_tp import Ranks, error, split_ranks
from tests.backends.test_kronecker import applied
from tests.tiers import cells

__all__ = ["split_ranks"]  # pools of their own: attention stays replaced, for the process


@pytest.fixture(scope="module")
def one() -> Iterator[Any]:
    """Lanczos coefficients of each operator on whole sequences, on plain torch in one process."""

    def of(operator: str) -> tuple[Any, Any, float]:
        settings = {**auto_tp_jobs.QUIET, "operator": operator}
        model = auto_tp_jobs.llama(num_key_value_heads=4)
        hessian = ds_hessian.attach(model, config=ds_hessian.HessianConfig.parse(settings))
        spectrum = hessian.spectrum(
            auto_tp_jobs.micro_batches(), auto_tp_jobs.loss_of, num_matvecs=4
        )
        return spectrum.alphas[0], spectrum.betas[0], spectrum.loss

    yield of


@pytest.mark.parametrize(
    "size, stage, loss, config",
    cells(
        [
            (2, 0, "replicated", {}),
            (2, 1, "pair", {}),
            (2, 2, "gathered", {}),
            (2, 3, "replicated", {}),
            (2, 2, "pair", {"gradient_allreduce_op": "sum"}),
            (4, 1, "replicated", {}),
            (4, 3, "replicated", {}),
        ],
        [],
    ),
)
def test_products_are_those_of_whole_sequences(
    split_ranks: Ranks, one: Any, size: int, stage: int, loss: str, config: dict[str, Any]
) -> None:
    """In fp64, and with the coefficients of one process, however the loss adds its parts up."""
    v, product, spectrum = split_ranks(size).run(jobs.measured, stage, loss, **config)[0]
    assert error(product, auto_tp_jobs.reference(v, num_key_value_heads=4)) < 2e-4
    alphas, betas, value = one("hessian")
    scale = 2e-3 * abs(alphas).max()  # products are right to some 1e-4
    assert np.allclose(spectrum.alphas[0], alphas, rtol=0, atol=scale)
    assert np.allclose(spectrum.betas[0], betas, rtol=0, atol=scale)
    assert spectrum.loss == pytest.approx(value, rel=1e-5)
    assert spectrum.provenance.layout == f"ZeRO-{stage}, {size} ranks, SP 2"


@pytest.mark.full
@pytest.mark.parametrize(
    ("loss", "operator"),
    [("pair", "ggn"), ("replicated", "ggn"), ("pair", "residual"), ("replicated", "fisher")],
)
def test_other_matrices_are_those_of_whole_sequences(
    split_ranks: Ranks, one: Any, loss: str, operator: str
) -> None:
    _, _, spectrum = split_ranks(2).run(jobs.measured, 1, loss, operator)[0]
    alphas, betas, _ = one(operator)
    assert np.allclose(spectrum.alphas[0], alphas, rtol=0, atol=1e-3 * abs(alphas).max())
    assert np.allclose(spectrum.betas[0], betas, rtol=0, atol=1e-3 * abs(alphas).max())


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "stage", "loss", "config"),
    [
        (2, 1, "pair", {}),
        (2, 0, "replicated", {}),
        (2, 2, "pair", {"gradient_allreduce_op": "sum"}),
        (4, 2, "pair", {}),
        (4, 3, "replicated", {}),
    ],
)
def test_forms_are_those_of_whole_sequences(
    split_ranks: Ranks, size: int, stage: int, loss: str, config: dict[str, Any]
) -> None:
    """v'Gv was half of what it is, to 1e-4, since stages 0 to 2 divide by data-parallel ranks."""
    model = auto_tp_jobs.llama(num_key_value_heads=4)
    hessian = ds_hessian.attach(model, config=ds_hessian.HessianConfig.parse(auto_tp_jobs.QUIET))
    hessian.use(auto_tp_jobs.micro_batches(), auto_tp_jobs.loss_of)
    value, bar, product_error, trace = jobs.forms_of(hessian)
    found = split_ranks(size).run(jobs.forms, stage, loss, **config)
    for form, its_bar, of_product, drawn in found:
        assert abs(form - value) < 3 * (its_bar + bar) < 1e-3 * value
        assert of_product < 3 * product_error
        assert 0.8 * trace < drawn < 1.25 * trace  # other ranks draw other labels


@pytest.mark.full
@pytest.mark.parametrize(("size", "stage", "loss"), [(2, 1, "pair"), (4, 3, "replicated")])
def test_kronecker_factors_are_those_of_whole_sequences(
    split_ranks: Ranks, size: int, stage: int, loss: str
) -> None:
    """Those of Shampoo took each rank's part of a sequence for a micro-batch, and all of them the
    first micro-batch's cotangents for those of another loss.
    """
    model = auto_tp_jobs.llama(num_key_value_heads=4)
    hessian = ds_hessian.attach(model, config=ds_hessian.HessianConfig.parse(auto_tp_jobs.QUIET))
    hessian.use(auto_tp_jobs.micro_batches(), auto_tp_jobs.loss_of)
    exact, samples, solved = jobs.factors_of(hessian)
    found = split_ranks(size).run(jobs.factors, stage, loss)
    assert all(each == samples for _, each, _ in found)
    if size == 2:  # more ranks have other groups of micro-batches, by which biases are scaled
        assert np.allclose([each for *_, each in found], solved, rtol=1e-3)
    forms = {n: kinds for own, *_ in found for n, kinds in own.items() if "shampoo" in kinds}
    assert forms.keys() == exact.keys()
    for layer, kinds in exact.items():
        for kind, whole in kinds.items():
            a, b = applied(*forms[layer][kind]), applied(*whole)
            limit = 1e-3 if kind == "klshampoo" else 1e-4
            assert (a - b).norm() < limit * b.norm(), (layer, kind)


def test_a_loss_that_is_not_the_integral_of_its_gradient_is_refused(split_ranks: Ranks) -> None:
    for text in split_ranks(2).run(jobs.measured, 1, "wrong"):
        assert text.startswith("ds_hessian cannot measure this loss under sequence parallelism")


@pytest.mark.parametrize(
    "size, stage, loss, config",
    cells(
        [
            (2, 1, "gathered", {}),
            (2, 2, "gathered", {"bf16": {"enabled": True}}),
            (4, 3, "replicated", {}),
        ],
        [],
    ),
)
def test_training_is_bitwise_the_same_with_spectra_and_with_those_that_fail_on_one_rank(
    split_ranks: Ranks, size: int, stage: int, loss: str, config: dict[str, Any]
) -> None:
    for found, errors in split_ranks(size).run(jobs.compare_training, stage, loss, **config):
        assert found == [True, True]
        assert len(errors) == 2
        assert all(f"rank {size - 1}: Broken: on purpose" in text for text in errors)


def test_the_factor_is_found_where_rounding_allows_it() -> None:
    assert factor_of_gradients(1.1, 1.0, 0.01, 4) == 1.0
    assert factor_of_gradients(3.8, 1.0, 0.01, 4) == 4.0
    assert factor_of_gradients(0.24, 1.0, 0.01, 4) == 0.25
    for slope, noise in ((2.0, 0.01), (-1.0, 0.01), (1.0, 0.2), (0.0, 0.0), (float("nan"), 0.0)):
        with pytest.raises(UnsupportedError, match="under sequence parallelism"):
            factor_of_gradients(slope, 1.0, noise, 4)
