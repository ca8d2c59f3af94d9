"""The record: its figures, what it refuses, text and events made from it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ds_hessian.errors import NumericsError, ResultError
from ds_hessian.krylov import ritz
from ds_hessian.records import Estimate, HessianSpectrum
from ds_hessian.show.monitor import monitor_events
from tests.results.makers import (
    COST,
    PROVENANCE,
    language_model_like,
    runs_of,
    semicircle,
    spectrum_of,
)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (84.534, 0.12, "84.53 ± 0.12"),
        (-2.664, 0.08, "-2.664 ± 0.080"),
        (12345.6, 678.9, "12346 ± 679"),
        (0.0, 0.5, "0.00 ± 0.50"),
        (1.2e-8, 3.4e-9, "(1.20 ± 0.34)e-08"),
        (-7.5e9, 2e7, "(-7.500 ± 0.020)e+09"),
        (3.0, 0.0, "3 ± 0"),
        (84.5341234, 1e-9, "84.53412 ± 1e-09"),
        (1.0, float("inf"), "1 ± inf"),
    ],
)
def test_an_estimate_reads_well(value, error, text):
    assert str(Estimate(value, error)) == text
    assert float(Estimate(value, error)) == value


def test_extremes_lie_within_their_error_of_eigenvalues():
    eigenvalues = language_model_like(5000)
    spectrum = spectrum_of(eigenvalues, m=30, probes=2)
    scale = 84.5
    for estimate, truth in (
        (spectrum.eigenvalue_max, eigenvalues.max()),
        (spectrum.eigenvalue_min, eigenvalues.min()),
    ):
        # The matrix is fp32: entries are rounded by 2^-24, products by a few times that.
        assert abs(estimate.value - truth) <= estimate.error + 8 * 2.0**-24 * scale


def test_the_extreme_is_the_most_extreme_of_all_probes():
    spectrum = spectrum_of(semicircle(2000), m=8, probes=4)
    assert spectrum.eigenvalue_max.value == spectrum.ritz_values.max()
    assert spectrum.eigenvalue_min.value == spectrum.ritz_values.min()
    row, column = np.unravel_index(spectrum.ritz_values.argmax(), spectrum.ritz_values.shape)
    assert spectrum.eigenvalue_max.error == spectrum.ritz_errors[row, column]


def test_the_trace_lies_within_four_standard_errors():
    eigenvalues = np.random.default_rng(1).gamma(1.0, 1.0, 4000)
    spectrum = spectrum_of(eigenvalues, m=10, probes=4)
    assert abs(spectrum.trace.value - eigenvalues.sum()) < 4 * spectrum.trace.error
    assert spectrum.trace.error < 0.05 * eigenvalues.sum()
    assert spectrum.mean_eigenvalue.value * 4000 == pytest.approx(spectrum.trace.value)
    assert spectrum.mean_eigenvalue.error * 4000 == pytest.approx(spectrum.trace.error)


def test_rows_are_the_decompositions_of_their_runs():
    runs = runs_of(semicircle(400), m=6, probes=3)
    spectrum = HessianSpectrum.from_runs(runs, 400, COST, PROVENANCE)
    assert (spectrum.num_probes, spectrum.num_matvecs) == (3, 6)
    assert spectrum.loss is None and spectrum.gradient_norm is None
    for row, run in enumerate(runs):
        pairs = ritz(run)
        assert (spectrum.alphas[row] == run.alphas).all()
        assert (spectrum.ritz_values[row] == pairs.values).all()
        assert (spectrum.weights[row] == pairs.weights).all()
        assert spectrum.asymmetries[row] == run.asymmetry
    np.testing.assert_allclose(spectrum.weights.sum(axis=1), 1.0, rtol=1e-12)


def test_a_record_cannot_be_changed():
    spectrum = spectrum_of(semicircle(50), m=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spectrum.n = 3
    with pytest.raises(ValueError, match="read-only"):
        spectrum.alphas[0, 0] = 1.0


def test_equality_sees_one_bit_and_takes_nan_as_itself():
    spectrum = spectrum_of(semicircle(50), m=4)
    assert np.isnan(spectrum.nonlinearities).all()
    assert spectrum == dataclasses.replace(spectrum)
    alphas = spectrum.alphas.copy()
    alphas[0, 0] = np.nextafter(alphas[0, 0], np.inf)
    assert spectrum != dataclasses.replace(spectrum, alphas=alphas)
    assert spectrum != dataclasses.replace(spectrum, loss=None)
    assert spectrum != "spectrum"


def test_a_result_holds_no_nan_where_there_is_a_number_to_be():
    spectrum = spectrum_of(semicircle(50), m=4)
    bad = np.full((1, 4), np.nan)
    with pytest.raises(NumericsError, match="alphas must be finite"):
        dataclasses.replace(spectrum, alphas=bad)
    with pytest.raises(NumericsError, match="trace, loss and gradient norm must be finite"):
        dataclasses.replace(spectrum, loss=float("nan"))


def test_shapes_that_contradict_each_other_are_refused():
    spectrum = spectrum_of(semicircle(50), m=4)
    with pytest.raises(ResultError, match=r"betas must be \(1, 4\).*got \(1, 3\)"):
        dataclasses.replace(spectrum, betas=np.zeros((1, 3)))
    with pytest.raises(ResultError, match="at least one; got"):
        HessianSpectrum.from_runs([], 50, COST, PROVENANCE)
    uneven = runs_of(semicircle(50), m=3) + runs_of(semicircle(50), m=4)
    with pytest.raises(ResultError, match=r"runs of equal length, at least one; got \[3, 4\]"):
        HessianSpectrum.from_runs(uneven, 50, COST, PROVENANCE)


def test_cost_figures_follow_from_what_was_spent():
    # 65 s in all = 30 products of 2 s + one gradient of 1 s + 4 s of Lanczos.
    assert COST.gradients_per_product == pytest.approx(63 / 30)
    assert COST.product_time_in_gradients == pytest.approx(2.0)
    assert COST.lanczos_overhead == pytest.approx(4 / 60)
    nothing = dataclasses.replace(COST, products=0, seconds_per_gradient=0.0)
    assert nothing.lanczos_overhead is None and nothing.product_time_in_gradients is None


def test_the_creation_time_is_utc_and_iso():
    from datetime import datetime

    created = datetime.fromisoformat(PROVENANCE.created)
    assert created.utcoffset() is not None and created.utcoffset().total_seconds() == 0


def test_the_table_names_every_headline_figure():
    spectrum = spectrum_of(language_model_like(3000), m=30, noise=1e-3)
    text = spectrum.table()
    for part in (
        str(spectrum.eigenvalue_max),
        str(spectrum.eigenvalue_min),
        str(spectrum.trace),
        "step 500",
        "3,000 parameters",
        "84.5, 66.7, 29.1",
        "= 2.00 gradients each",
        "6.7 %",
        "ZeRO-3, 2 ranks",
    ):
        assert part in text
    assert len(text.splitlines()) < 16 and max(map(len, text.splitlines())) <= 100


def test_the_table_says_what_is_not_known():
    text = spectrum_of(np.zeros(20), m=2).table()
    assert "product error       unknown" in text
    assert "nonlinearity        not measured" in text
    assert "none converged" in text


def test_monitor_events_are_finite_tagged_and_at_the_optimizer_step():
    spectrum = spectrum_of(language_model_like(2000), m=20)
    events = monitor_events(spectrum)
    tags = {tag: value for tag, value, _ in events}
    assert tags["Train/Hessian/eigenvalue_max"] == spectrum.eigenvalue_max.value
    assert tags["Train/Hessian/eigenvalue_max_error"] == spectrum.eigenvalue_max.error
    assert tags["Train/Hessian/trace"] == spectrum.trace.value
    assert {step for _, _, step in events} == {500}
    assert all(type(value) is float and np.isfinite(value) for value in tags.values())
    without = dataclasses.replace(spectrum, loss=None)
    assert "Train/Hessian/loss" not in {tag for tag, _, _ in monitor_events(without)}


def test_one_product_gives_a_trace_with_an_error():
    spectrum = spectrum_of(semicircle(2000), m=1)
    assert spectrum.trace.error > 0
