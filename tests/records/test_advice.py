"""Warnings fire for what makes figures poor, and only then."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from tests.records.makers import language_model_like, spectrum_of


def test_good_products_bring_no_warning() -> None:
    spectrum = spectrum_of(language_model_like(1000), m=10, noise=1e-3)
    assert spectrum.warnings == ()
    assert "warning" not in spectrum.table()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("fidelities", 0.63, r"1 of 10 products moved .* \(fidelity down to 0.63\)"),
        ("nonlinearities", 0.8, r"1 of 10 products reach beyond .* up to 0.80"),
        ("product_errors", 1e3, r"1 of 10 products have an estimated error above 10%"),
    ],
)
def test_one_poor_product_is_warned_of(name: str, value: float, text: str) -> None:
    spectrum = spectrum_of(language_model_like(1000), m=10, noise=1e-3)
    array = np.array(getattr(spectrum, name))
    array[0, 3] = value
    spectrum = dataclasses.replace(spectrum, **{name: array})
    (warning,) = spectrum.warnings
    assert re.search(text, warning)
    assert warning in spectrum.table()


def test_products_beyond_a_tolerance_are_counted() -> None:
    spectrum = spectrum_of(language_model_like(1000), m=10, noise=1e-3)
    norms = np.hypot(spectrum.alphas, spectrum.betas)
    poor = np.full_like(spectrum.product_errors, 1e-4 * norms.max())
    poor[0, 3:5] = 0.02 * norms.max()
    loose = dataclasses.replace(spectrum.provenance, tolerance=1e-2, scheme="auto")
    spectrum = dataclasses.replace(spectrum, product_errors=poor, provenance=loose)
    (warning,) = spectrum.warnings
    assert re.search(
        r"2 of 10 products do not reach the tolerance of 0\.01 by one-sided or", warning
    )
    assert "0 one-sided and" in spectrum.table()


def test_errors_are_relative_to_the_norms_of_the_products() -> None:
    """Column j of T has the betas on both sides of alpha j."""
    spectrum = spectrum_of(language_model_like(1000), m=4, probes=2, noise=1e-3)
    norms = [
        [np.linalg.norm([*before, alpha, beta]) for before, alpha, beta in columns]
        for columns in (
            zip([[], *([b] for b in betas[:-1])], alphas, betas, strict=True)
            for alphas, betas in zip(spectrum.alphas, spectrum.betas, strict=True)
        )
    ]
    assert np.allclose(spectrum.relative_errors * norms, spectrum.product_errors, rtol=1e-12)


def test_an_asymmetry_beyond_the_errors_is_warned_of() -> None:
    spectrum = spectrum_of(language_model_like(1000), m=10, noise=1e-6)
    spectrum = dataclasses.replace(spectrum, asymmetries=np.array([1.0]))
    assert "error bars are too small" in spectrum.warnings[0]


def test_advice_names_the_cause_and_the_setting_that_cures_it() -> None:
    spectrum = spectrum_of(language_model_like(1000), m=10, noise=1e-3)
    poor = np.array(spectrum.product_errors)
    poor[0, 3] = 1e3
    spectrum = dataclasses.replace(spectrum, product_errors=poor)
    assert "more micro-batches" in spectrum.warnings[0]  # fp32 already
    asymmetric = dataclasses.replace(spectrum, asymmetries=np.array([1e3]))
    assert "not smooth" in asymmetric.warnings[0]
    for changes, text in (
        ({"model_dtype": "bfloat16"}, '"precision": "fp32"'),
        ({"model_dtype": "bfloat16", "precision": "fp32"}, "more micro-batches"),
        ({"precision_reason": "no room"}, "passes or weights in fp32 (no room)"),
        ({"displacement": 0.1}, '"displacement": "auto"'),
    ):
        provenance = dataclasses.replace(spectrum.provenance, **changes)
        (warning,) = dataclasses.replace(spectrum, provenance=provenance).warnings
        assert text in warning
