"""Spectra on one axis: nothing is lost, tracks are the eigenvalues, and edges are closed forms."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ds_hessian.optimizer import settings_of
from ds_hessian.records import Comparison, HessianSpectrum, Optimizer
from ds_hessian.show.monitor import figures_of, histogram_of, stability
from ds_hessian.show.page.style import Series, over_steps
from ds_hessian.show.training_view import Axis, crossings, ranked, spread, step_scale, tracks
from tests.records.makers import PROVENANCE, language_model_like, semicircle, spectrum_of


@pytest.fixture(scope="module")
def spectra() -> list[HessianSpectrum]:
    return [
        spectrum_of(scale * language_model_like(1000), m=24, probes=1 + (scale > 1), noise=1e-3)
        for scale in (1.0, 1.5)
    ]


def test_every_eigenvalue_is_in_a_cell(spectra: list[HessianSpectrum]) -> None:
    edges = Axis.of(spectra).edges()
    for s in spectra:
        assert spread(s, edges).sum() == pytest.approx(s.n, rel=1e-9)
        counts, own = histogram_of(s)
        assert counts.sum() == pytest.approx(s.n, rel=1e-9) and len(own) == len(counts) + 1


def test_cells_of_a_known_density_hold_their_share_of_it() -> None:
    """Lanczos on the semicircle: ten wide cells, each within a Ritz value's weight of the truth."""
    values = semicircle(4000)
    s = spectrum_of(values, m=40, probes=2)
    edges = np.linspace(-1.05, 1.05, 11)
    exact = np.histogram(values, edges)[0]
    assert abs(spread(s, edges) - exact).max() < 0.02 * len(values)


def test_the_axis_has_no_kink_and_its_ticks_do_not_crowd(spectra: list[HessianSpectrum]) -> None:
    axis = Axis.of(spectra)
    x = np.linspace(-3 * axis.scale, 3 * axis.scale, 2001)
    slope = np.diff(axis.at(x))
    assert abs(np.diff(slope)).max() < 2e-3 * slope.max()
    ticks = [value for value, _ in axis.ticks()]
    ends = axis.at([axis.low, axis.high])
    assert 0.0 in ticks and min(np.diff(axis.at(ticks))) >= 0.06 * (ends[1] - ends[0]) - 1e-12
    tiny = Axis.of([spectrum_of(1e-9 * semicircle(100), m=5)]).ticks()
    assert any("e-" in text for _, text in tiny)
    for values in (np.zeros(50), np.ones(50)):
        flat = Axis.of([spectrum_of(values, m=5)])
        assert flat.low < flat.high and np.isfinite(flat.edges()).all()


@pytest.mark.parametrize(
    ("steps", "scale"),
    [
        ([0, 500, 1000, 1500], None),
        ([0, 100, 250], None),
        ([7], None),
        ([0, 1, 2, 3, 6, 10, 18, 32, 56, 100, 178, 316, 562, 1000], 1.0),
        ([20, 40, 60, 100, 200, 1000, 5000], 20.0),
    ],
)
def test_steps_at_logarithmic_spacing_do_not_crowd(steps: list[int], scale: float | None) -> None:
    """Every step has its share of the axis, and says its own number; the spacing is asinh's."""
    assert step_scale(steps) == scale
    drawn = over_steps("loss", "loss", [Series("loss", "#222222", steps, steps)])
    (trace,), layout = drawn["data"], drawn["layout"]
    assert layout["meta"] == {"steps": scale}
    if scale is None:
        assert trace["x"] == steps and "%{x:,}" in trace["hovertemplate"]
        return
    places = np.array(trace["x"])
    assert np.allclose(places, np.arcsinh(np.array(steps) / scale))
    assert np.diff(places).min() > 0.03 * np.ptp(places)
    assert trace["customdata"] == steps and "%{customdata:,}" in trace["hovertemplate"]
    for place, text in zip(layout["xaxis"]["tickvals"], layout["xaxis"]["ticktext"], strict=True):
        assert np.sinh(place) * scale == pytest.approx(float(text.replace(",", "")))


def test_tracks_follow_the_eigenvalues_by_rank(spectra: list[HessianSpectrum]) -> None:
    found = tracks(spectra)
    for rank, exact in enumerate((84.5, 66.7, 29.1, 24.9, 18.5)):
        for estimate, scale in zip(found[rank], (1.0, 1.5), strict=True):
            assert estimate is not None and abs(estimate.value - scale * exact) <= estimate.error
    smallest = found[len(found) - 1] if len(found) == 6 else found[5]
    assert [e.value for e in smallest if e] == [s.eigenvalue_min.value for s in spectra]
    assert ranked(spectra[0], 1)[0] == spectra[0].eigenvalue_max


OPTIMIZERS = [
    (Optimizer(name="SGD", learning_rate=0.1, momentum=0.0), 20.0, None),
    (Optimizer(name="SGD", learning_rate=0.1, momentum=0.9), 38.0, None),
    (Optimizer(name="SGD", learning_rate=0.1, momentum=0.9, nesterov=True), 38 / 2.8, None),
    (Optimizer(name="AdamW", learning_rate=0.01, beta1=0.9), None, 3800.0),
    (Optimizer(name="SGD", learning_rate=0.0, momentum=0.9), None, None),
    (Optimizer(name="Lion", learning_rate=0.1), None, None),
]


@pytest.mark.parametrize(("optimizer", "edge", "preconditioned"), OPTIMIZERS)
def test_edges_of_stability_are_those_of_the_literature(
    optimizer: Optimizer, edge: float | None, preconditioned: float | None
) -> None:
    assert (optimizer.edge, optimizer.preconditioned_edge) == (
        None if edge is None else pytest.approx(edge),
        None if preconditioned is None else pytest.approx(preconditioned),
    )


@pytest.mark.parametrize(
    ("momentum", "nesterov", "dampening"),
    [(0.0, False, 0.0), (0.9, False, 0.0), (0.9, True, 0.0), (0.9, False, 0.7)],
)
def test_torchs_own_steps_diverge_just_above_the_edge_and_not_below(
    momentum: float, nesterov: bool, dampening: float
) -> None:
    import torch

    for share, diverges in ((0.9, False), (1.1, True)):
        w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        how: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
        sgd = torch.optim.SGD([w], lr=0.1, **how)
        described = settings_of(sgd)
        assert described is not None
        edge = described.edge
        assert edge is not None
        for _ in range(300):
            w.grad = share * edge * w.detach()
            sgd.step()
        assert bool(abs(w) > 1) == diverges


def test_a_crossing_is_the_first_step_above_the_edge() -> None:
    assert crossings([1, 2, 3, 4, 5], [1, 3, 3, 1, 3], [2, 2, 2, 2, None]) == [2]
    assert crossings([1, 2, 3], [3, 1, 3], [2.0, 2.0, 2.0]) == [1, 3]


def test_monitors_get_the_edge_and_whether_it_is_crossed() -> None:
    s = spectrum_of(np.append(semicircle(500), [9.0, 8.0]), m=20)
    assert stability(s) is None and "above_edge" not in figures_of(s)
    for rate, above in ((0.2, 0.0), (0.25, 1.0)):
        optimizer = Optimizer(name="SGD", learning_rate=rate, momentum=0.0)
        changed = dataclasses.replace(PROVENANCE, optimizer=optimizer)
        figures = figures_of(dataclasses.replace(s, provenance=changed))
        assert figures["edge_of_stability"] == pytest.approx(2 / rate)
        assert figures["above_edge"] == above
        assert figures["largest_2"] == pytest.approx(8.0, abs=1e-3)


def test_a_comparison_of_many_spectra_has_a_ridge_for_each(tmp_path, monkeypatch) -> None:
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **kw: drawn.append(self))
    s = spectrum_of(language_model_like(300), m=12)
    for count, ridges in ((2, 2), (40, 24)):
        Comparison({f"run{i}": s for i in range(count)}).plot(tmp_path / "c.png")
        axes = drawn[-1].axes[0]
        assert len(axes.collections) == ridges == len(axes.get_yticks())
        low, high = axes.get_ylim()
        tops = [path.get_extents().y1 for c in axes.collections for path in c.get_paths()]
        assert low < 0 and max(tops) <= high  # nothing is cut off
