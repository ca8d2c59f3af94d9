"""What a picture of a spectrum shows, against the eigenvalues that the matrix has."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ds_hessian.records import HessianSpectrum
from ds_hessian.show.spectrum_view import IN_A_BIN, SpectrumView, labelled
from tests.records.makers import language_model_like, semicircle, spectrum_of

SPIKED = np.append(semicircle(2000), [-3.0, 5.0, 8.0, 9.0])


@pytest.fixture(scope="module")
def spiked() -> HessianSpectrum:
    return spectrum_of(SPIKED, m=40, probes=2, noise=1e-4)


def test_stems_are_the_eigenvalues_away_from_the_bulk_and_as_high_as_their_rank(
    spiked: HessianSpectrum,
) -> None:
    view = SpectrumView.of(spiked)
    assert not view.located
    for stem, exact, rank in zip(view.singles, (9.0, 8.0, 5.0, -3.0), (1, 2, 3, 1), strict=True):
        assert abs(stem.estimate.value - exact) <= stem.estimate.error + 1e-5
        assert stem.beyond == pytest.approx(rank, rel=1e-9)


def test_the_counts_of_the_matrix_lie_within_the_bounds_drawn() -> None:
    """At the points where they are computed, of which 1 in 20 may miss (all of a probe at once)."""
    values, found = language_model_like(2000), list[float]()
    for seed in range(6):
        view = SpectrumView.of(spectrum_of(values, m=16, probes=1, noise=1e-4, seed=seed))
        x, low, high = view.below_bounds.x, view.below_bounds.y, view.below_bounds.upper
        at = (x[0::2] + x[1::2]) / 2  # as steps, they hold between two points too
        share = np.searchsorted(np.sort(values), at, side="right") / len(values)
        assert high is not None
        found.append(float(((low[0::2] <= share) & (share <= high[0::2])).mean()))
    assert np.mean(found) >= 0.9


def test_bins_hold_several_ritz_values_and_all_of_the_rest() -> None:
    spectrum = spectrum_of(semicircle(1000), m=30, probes=2)
    view = SpectrumView.of(spectrum)
    inside = np.searchsorted(view.edges, view.ritz_values, side="right").clip(1, len(view.density))
    assert len(view.density) == 60 // (2 * IN_A_BIN)
    assert np.bincount(inside)[1:].min() >= 2 * IN_A_BIN
    assert (view.density * np.diff(view.edges)).sum() == pytest.approx(1, abs=1e-12)


def test_too_few_ritz_values_give_no_density() -> None:
    for values, m in ((np.ones(50), 5), (np.zeros(50), 5), (semicircle(100), 2)):
        view = SpectrumView.of(spectrum_of(values, m))
        assert not len(view.density) and "no density" in view.bin_widths
        assert view.whole[0] < view.whole[1] and view.bulk[0] < view.bulk[1]


def test_an_unconverged_extreme_is_no_stem(spiked: HessianSpectrum) -> None:
    """Its bar reaches its neighbour: nothing says where the eigenvalue is."""
    errors = np.where(spiked.ritz_values > 7, 2.0, spiked.ritz_errors)
    view = SpectrumView.of(dataclasses.replace(spiked, ritz_errors=errors))
    assert [round(stem.estimate.value) for stem in view.singles] == [5, -3]
    assert not view.located and view.ritz_values.max() > 8.5


def test_the_caption_says_what_was_found(spiked: HessianSpectrum) -> None:
    caption = SpectrumView.of(spiked).caption
    assert caption.startswith("Of 2,004 eigenvalues 4 stand alone; the largest is 9.0")
    assert "the most negative -3.0" in caption and caption.endswith(".")
    positive = SpectrumView.of(spectrum_of(semicircle(300) + 3, m=20)).caption
    assert "none stands alone" in positive and "none is seen below 0" in positive


def test_labels_go_to_the_most_important_where_they_do_not_overlap() -> None:
    assert labelled([0.1, 0.12, 0.5], [1.0, 2.0, 0.5]) == (1, 2)
    assert labelled([], []) == ()
