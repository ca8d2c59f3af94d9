"""Densities against quadrature and closed forms; outliers of matrices with known ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from ds_hessian.records.density import (
    automatic_widths,
    bulk_interval,
    merge_probes,
    reduced_weights,
    smooth,
)
from tests.krylov.matrices import SPECTRA
from tests.records.makers import language_model_like, semicircle, spectrum_of
from tests.tiers import cells

finite = st.floats(-1e3, 1e3, allow_subnormal=False)


@st.composite
def ritz_sets(draw):
    m = draw(st.integers(1, 8))
    values = np.sort(np.array(draw(st.lists(finite, min_size=m, max_size=m))))
    weights = np.array(draw(st.lists(st.floats(1e-6, 1), min_size=m, max_size=m)))
    errors = np.array(draw(st.lists(st.floats(0, 10), min_size=m, max_size=m)))
    return values[None], weights[None] / weights.sum(), errors[None]


@given(ritz_sets())
@settings(max_examples=60, deadline=None)
def test_the_density_integrates_to_one_and_the_default_grid_resolves_it(ritz):
    density = smooth(*ritz, None, None)
    # A Gaussian is sampled 8 times per width, unevenly where grids of several meet.
    assert np.trapezoid(density.values, density.grid) == pytest.approx(1.0, abs=1e-3)
    assert density.mass == pytest.approx(1.0, abs=1e-9)
    assert (density.values >= 0).all() and (density.width > 0).all()


@given(ritz_sets(), finite, st.floats(0.1, 100), st.integers(-20, 20))
@settings(max_examples=60, deadline=None)
def test_widths_scale_and_shift_with_the_matrix(ritz, shift, width, power):
    values, weights, errors = ritz
    scale = 2.0**power
    scaled = automatic_widths(values * scale, errors * scale)
    if np.abs(values).max() > 1e-6:
        np.testing.assert_allclose(scaled, automatic_widths(values, errors) * scale, rtol=1e-12)
    fixed = smooth(values, weights, errors, np.linspace(-1e3, 1e3, 401), width)
    moved = smooth(values + shift, weights, errors, fixed.grid + shift, width)
    # Rounding of value + shift (2e3 eps), seen through the steepest slope of a kernel.
    np.testing.assert_allclose(moved.values, fixed.values, atol=1e-11 / width**2)


def test_a_fixed_width_is_the_convolution_of_the_point_masses_with_a_gaussian():
    spectrum = spectrum_of(semicircle(300), m=12, probes=2)
    grid = np.linspace(-2, 2, 41)
    density = spectrum.density(grid, width=0.3)
    kernels = norm.pdf(grid, spectrum.ritz_values[..., None], 0.3)
    expected = (spectrum.weights[..., None] * kernels).sum(axis=(0, 1)) / 2
    np.testing.assert_allclose(density.values, expected, rtol=1e-12)
    assert (density.width == 0.3).all()


def test_mass_that_the_grid_leaves_out_is_reported_and_not_scaled_back():
    spectrum = spectrum_of(semicircle(300), m=12)
    half = spectrum.density(np.linspace(0, 3, 2001), width=0.1)

    def exact(x: float) -> float:
        return float((spectrum.weights * norm.pdf(x, spectrum.ritz_values, 0.1)).sum())

    inside, _ = quad(exact, 0, 3, points=[0.5, 1.0, 1.5])
    assert half.mass == pytest.approx(inside, abs=1e-8)
    assert 0.3 < half.mass < 0.7


def test_the_density_of_a_semicircle_is_a_semicircle():
    density = spectrum_of(semicircle(20000), m=30, probes=5).density(np.linspace(-0.7, 0.7, 29))
    expected = 2 / np.pi * np.sqrt(1 - density.grid**2)
    # Width pi/m: bias width^2 |rho''| / 2 rho <= 2.1 %; probes: sqrt(2 / 4400 / 5) = 1 %, 3 sigma.
    np.testing.assert_allclose(density.values, expected, rtol=0.05)


def test_far_outliers_do_not_widen_the_bulk():
    bulk = semicircle(5000)
    alone = spectrum_of(bulk, m=20).density([-0.5, 0.0, 0.5])
    with_outliers = spectrum_of(np.append(bulk, [300.0, 200.0]), m=22).density([-0.5, 0.0, 0.5])
    # Same bulk, same number of steps left for it; probes differ by sqrt(2/4400 * 4) = 5 %, twice.
    np.testing.assert_allclose(with_outliers.values, alone.values, rtol=0.2)


def test_the_cumulative_distribution_counts_eigenvalues():
    eigenvalues = np.repeat([-1.0, 0.0, 2.0], [1000, 2000, 1000])
    spectrum = spectrum_of(eigenvalues, m=3, probes=8)
    share = spectrum.cumulative([-1.5, -0.5, 1.0, 3.0])
    # A weight of share p has standard deviation sqrt(2 p (1 - p) / n / probes) <= 0.4 %.
    np.testing.assert_allclose(share, [0.0, 0.25, 0.75, 1.0], atol=0.015)
    assert spectrum.cumulative(0.0).shape == ()


@pytest.mark.parametrize("width", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_width_is_refused(width):
    with pytest.raises(ValueError, match="width must be a finite number above 0"):
        spectrum_of(semicircle(50), m=5).density(width=width)


@pytest.mark.parametrize("grid", [[0.0], [1.0, 0.0], [[0.0, 1.0]], [0.0, 0.0]])
def test_an_impossible_grid_is_refused(grid):
    with pytest.raises(ValueError, match="grid must be 1-D, ascending"):
        spectrum_of(semicircle(50), m=5).density(grid)


def test_the_zero_matrix_has_a_density_of_mass_one_at_zero():
    density = spectrum_of(np.zeros(100), m=4).density()
    assert density.mass == pytest.approx(1.0)
    assert density.grid[density.values.argmax()] == pytest.approx(0.0, abs=1e-12)


def test_spikes_outside_of_a_semicircle_are_the_outliers():
    spikes = [8.0, 3.0, 2.5, -1.8]
    spectrum = spectrum_of(np.append(semicircle(20000), spikes), m=30, probes=3)
    found = spectrum.outlier_eigenvalues()
    np.testing.assert_allclose([float(e) for e in found], spikes, rtol=1e-6)
    mask = spectrum.outliers()
    assert mask.shape == spectrum.ritz_values.shape
    assert mask.sum(axis=1).tolist() == [4, 4, 4]


def test_a_bulk_without_spikes_has_no_outliers_also_where_its_edge_has_converged():
    for eigenvalues, m in ((semicircle(20000), 30), (semicircle(300), 120)):
        assert not spectrum_of(eigenvalues, m=m).outliers().any()


def test_repeated_eigenvalues_are_no_outliers_of_themselves():
    assert not spectrum_of(np.ones(200), m=8, probes=2).outliers().any()


def test_a_low_rank_matrix_has_its_rank_in_outliers_even_if_the_space_is_exhausted():
    spectrum = spectrum_of(np.append(np.zeros(1000), np.arange(1.0, 8.0)), m=20)
    values = [float(e) for e in spectrum.outlier_eigenvalues()]
    np.testing.assert_allclose(values, np.arange(7.0, 0.0, -1.0), rtol=1e-5)


def test_outliers_of_one_probe_stay_apart_and_those_of_several_become_one():
    values = np.array([[1.0, 5.00, 5.01], [1.0, 4.0, 5.005]])
    errors = np.array([[0.1, 0.02, 0.01], [0.1, 0.1, 0.005]])
    mask = np.array([[False, True, True], [False, False, True]])
    # The middle one is within the errors of both, and goes to the one that is seen before it.
    assert merge_probes(values, errors, mask) == [(5.005, 0.005), (5.0, 0.02)]
    mask[1] = False
    assert merge_probes(values, errors, mask) == [(5.01, 0.01), (5.0, 0.02)]


def test_an_outlier_that_has_not_converged_is_not_reported():
    eigenvalues = language_model_like(20000)
    early = spectrum_of(eigenvalues, m=5)
    later = spectrum_of(eigenvalues, m=30)
    assert len(early.outlier_eigenvalues()) < len(later.outlier_eigenvalues())
    for outlier in later.outlier_eigenvalues()[:5]:
        assert np.abs(eigenvalues - outlier.value).min() < outlier.error + 1e-5 * 84.5


def test_the_bulk_holds_the_central_weight_and_grows_over_small_gaps():
    values = np.array([-5.0, 0.0, 1.0, 1.2, 1.4, 9.0])
    weights = np.array([0.02, 0.5, 0.4, 0.03, 0.03, 0.02])
    assert bulk_interval(values, weights) == (0.0, 1.4)


# ---- bands over probes

DENSITIES = {
    "semicircle": semicircle(400),
    "marchenko-pastur": SPECTRA["marchenko-pastur"],
    "spiked": np.append(semicircle(400), [5.0, 3.0, -2.0]),
}


def test_one_probe_has_no_band_and_equal_probes_have_none_of_width():
    one = spectrum_of(semicircle(300), m=12).density()
    assert one.errors is None and one.band() is None
    values, weights, errors = np.array([[0.0, 1.0]] * 2), np.full((2, 2), 0.5), np.zeros((2, 2))
    twice = smooth(values, weights, errors, None, 0.3)
    assert twice.errors is not None and not twice.errors.any()


@pytest.mark.parametrize("name", cells(DENSITIES, []))
def test_bands_hold_the_smoothed_density_in_95_of_100_cases(name):
    eigenvalues = DENSITIES[name]
    grid = np.linspace(*np.quantile(eigenvalues, [0.05, 0.95]), 9)
    # Kernels this wide are nearly polynomials of degree 2 m: what is left is the probes' chance.
    width = 0.15 * (eigenvalues.max() - eigenvalues.min()) / (5 if name == "spiked" else 1)
    truth = norm.pdf(grid[:, None], eigenvalues, width).mean(1)
    held = []
    for seed in range(100):
        density = spectrum_of(eigenvalues, m=24, probes=4, seed=seed).density(grid, width)
        low, high = density.band()
        held.append((low <= truth) & (truth <= high))
    # 9 points of a grid depend on each other: not more than the deviation of 100 cases, 2.2 %.
    assert np.mean(held) >= 0.95 - 0.022


# ---- weights of outliers


@pytest.mark.full
def test_reduced_weights_make_outliers_exact_and_less_noisy():
    eigenvalues = DENSITIES["spiked"]
    n = len(eigenvalues)
    plain, reduced = [], []
    for seed in range(50):
        spectrum = spectrum_of(eigenvalues, m=40, seed=seed)
        mask = spectrum.outliers()
        np.testing.assert_allclose(spectrum.reduced_weights[mask], 1 / n, rtol=1e-12)
        np.testing.assert_allclose(spectrum.reduced_weights.sum(1), 1.0, rtol=1e-12)
        plain.append(spectrum.weights[0] @ spectrum.ritz_values[0] ** 2)
        reduced.append(spectrum.reduced_weights[0] @ spectrum.ritz_values[0] ** 2)
    truth = (eigenvalues**2).mean()
    spread = np.std(reduced)
    assert abs(np.mean(reduced) - truth) <= 4 * spread / np.sqrt(50)
    assert spread < 0.4 * np.std(plain)  # the bulk's share: sqrt(2 var x^2 / n) of both


def test_the_weight_of_many_equal_eigenvalues_stays():
    eigenvalues = np.append(semicircle(950), np.full(50, 4.0))
    spectrum = spectrum_of(eigenvalues, m=30, probes=4)
    assert spectrum.outliers().any(1).all()
    share = 1 - spectrum.cumulative(3.0)
    # Standard deviation sqrt(2 p (1 - p) / n / probes) = 0.5 %; one eigenvalue would be 0.1 %.
    assert abs(share - 0.05) < 4 * 0.005


def test_a_spectrum_of_outliers_alone_shares_the_mass_between_them():
    mask = np.array([[True, True]])
    weights = reduced_weights(np.array([[0.3, 0.7]]), mask, 2)
    np.testing.assert_allclose(weights, [[0.5, 0.5]])
    short = reduced_weights(np.array([[0.3, 0.7]]), mask, 3)
    assert short.sum() == pytest.approx(1.0)


# ---- the cumulative distribution


@pytest.mark.parametrize("name", cells(DENSITIES, ["spiked"]))
@pytest.mark.parametrize(("m", "probes"), cells([(4, 1), (30, 1), (30, 3)], [(4, 1)]))
def test_cumulative_bounds_hold_in_95_of_100_cases(name, m, probes):
    eigenvalues = DENSITIES[name]
    x = np.append(np.quantile(eigenvalues, np.linspace(0.01, 0.99, 9)) + 1e-4, [-1.5, 2.5, 4.0])
    truth = (eigenvalues <= x[:, None]).mean(1)
    held = []
    for seed in range(100):
        spectrum = spectrum_of(eigenvalues, m=m, probes=probes, seed=seed)
        lower, upper = spectrum.cumulative_bounds(x)
        assert (lower <= spectrum.cumulative(x) + 1e-6).all()
        assert (spectrum.cumulative(x) <= upper + 1e-6).all()
        held.append((lower - 1e-12 <= truth) & (truth <= upper + 1e-12))
    assert np.mean(held) >= 0.95
    assert (np.mean(held, axis=0) >= 0.95 - 3 * 0.022).all()


@pytest.mark.full
def test_where_quadrature_is_exact_the_bounds_are_as_wide_as_the_probes_chance():
    eigenvalues = semicircle(60)
    x = np.linspace(-0.8, 0.8, 9)
    truth = (eigenvalues <= x[:, None]).mean(1)
    held, widths = [], []
    for seed in range(100):
        lower, upper = spectrum_of(eigenvalues, m=60, seed=seed).cumulative_bounds(x)
        held.append((lower <= truth) & (truth <= upper))
        widths.append(upper - lower)
    assert 0.95 - 0.022 <= np.mean(held) < 0.995
    normal = 2 * 1.96 * np.sqrt(2 * truth * (1 - truth) / 62)
    np.testing.assert_allclose(np.mean(widths, axis=0), normal, rtol=0.25)


def test_counted_outliers_leave_no_doubt_but_that_of_the_rest():
    n = 20003
    spectrum = spectrum_of(np.append(semicircle(n - 3), [5.0, 3.0, -2.0]), m=30, probes=2)
    lower, upper = spectrum.cumulative_bounds([-1.5, 4.0])
    assert lower[0] == pytest.approx(1 / n) and upper[1] == pytest.approx(1 - 1 / n)
    # Both ends: what is left of an unseen rest, z^2 / trials, with 2 n / 2 trials.
    assert (upper - lower < 1.01 * 1.96**2 / n).all()


@pytest.mark.full
def test_cumulative_bounds_hold_below_an_eigenvalue_that_one_probe_has_much_of():
    """That probe takes it for several, which others count as one."""
    eigenvalues = np.r_[np.linspace(-0.3, 0.3, 24), 0.45, 0.65, 1.35]
    held = 0
    for seed in range(200):
        spectrum = spectrum_of(eigenvalues, m=12, probes=3, seed=seed)
        lower, upper = spectrum.cumulative_bounds(1.0)
        held += bool(lower - 1e-12 <= 26 / 27 <= upper + 1e-12)
    assert held >= 0.95 * 200 - 2 * np.sqrt(0.95 * 0.05 * 200)


def test_an_impossible_confidence_is_refused():
    with pytest.raises(ValueError, match="confidence must be between 0 and 1, got 95"):
        spectrum_of(semicircle(50), m=5).cumulative_bounds(0.0, 95)
