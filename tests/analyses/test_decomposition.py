"""H = G + R, and curvatures along directions, against dense matrices in fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ds_hessian
from ds_hessian.errors import ConfigError, ResultError
from ds_hessian.records import HessianCurvatures, HessianDecomposition
from tests.nets import merged
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import Exact, batches, dense, loss_of, mlp, train
from tests.records.makers import spectrum_of
from tests.tiers import cells

QUIET = {"progress": False, "plot": False}
DATA = batches(4)


@pytest.fixture(scope="module")
def net() -> Any:
    """A trained net, the optimizer that has trained it, and its Hessian's settings."""
    found = train(mlp(), DATA, 30)
    optimizer = torch.optim.Adam(found.parameters(), lr=1e-3)
    loss_of(found, DATA[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return found, optimizer


@pytest.fixture(scope="module")
def matrices(net: Any) -> dict[str, Tensor]:
    h = Exact(net[0], DATA).matrix()
    g = dense(ExactGaussNewton(net[0], "4", loss_of, merged(DATA)), len(h))
    return {"hessian": h, "ggn": g, "residual": h - g}


def test_parts_are_those_of_dense_matrices(
    net: Any, matrices: dict[str, Tensor], tmp_path: Path
) -> None:
    hessian = ds_hessian.attach(*net, {**QUIET, "output_path": str(tmp_path)}).use(DATA, loss_of)
    parts = hessian.decomposition(num_matvecs=16, num_probes=3)
    values = {name: torch.linalg.eigvalsh(m) for name, m in matrices.items()}
    for name, spectrum in parts.spectra.items():
        assert spectrum.provenance.operator == name
        largest, smallest = spectrum.eigenvalue_max, spectrum.eigenvalue_min
        assert abs(largest.value - values[name][-1]) < 3 * largest.error
        if name != "ggn":  # whose smallest are zero by the hundred
            assert abs(smallest.value - values[name][0]) < 3 * smallest.error
        assert abs(spectrum.trace.value - values[name].sum()) < 4 * spectrum.trace.error
        negative = values[name].clamp(max=0).sum()
        assert abs(parts.negative(name).value - negative) < 4 * parts.negative(name).error
    assert abs(parts.closure.value) < 3 * parts.closure.error
    norms = [torch.linalg.norm(matrices[name]) for name in ("residual", "hessian")]
    # Squares of 600 eigenvalues, of which few are large, from 3 probes.
    assert parts.share_of_residual == pytest.approx(float(norms[0] / norms[1]), rel=0.5)
    share = float(values["hessian"].clamp(max=0).sum() / values["residual"].clamp(max=0).sum())
    assert abs(parts.surviving.value - share) < 4 * parts.surviving.error
    assert "H = G + R" in parts.table()
    folder = hessian.save(parts)
    assert HessianDecomposition.load(folder) == parts
    assert folder.name == "step_000000"


@pytest.mark.parametrize(("m", "probes"), [(6, 4), (12, 1), (24, 2)])
def test_the_error_of_the_negative_sum_has_probes_and_quadrature(m: int, probes: int) -> None:
    """Two thirds of these eigenvalues are next to zero, where one Ritz value stands for all of
    them, and one probe had no standard error: sums were off by 10 errors.
    """
    generator = np.random.default_rng(0)
    near, below = 1e-3 * generator.standard_normal(190), -0.09 * np.linspace(0, 1, 46) ** 2
    values = np.r_[near, below, generator.exponential(0.15, 50), 1.0, 2.0]
    exact, off = np.minimum(values, 0.0).sum(), []
    for seed in range(30):
        spectrum = spectrum_of(values, m, probes, seed=seed)
        parts = HessianDecomposition(
            spectra=dict.fromkeys(("hessian", "ggn", "residual"), spectrum)
        )
        found = parts.negative("hessian")
        off.append((found.value - exact) / found.error)
    assert np.sqrt(np.mean(np.square(off))) < 1.3
    assert np.abs(off).max() < 3.5


def test_the_parts_of_a_zero_hessian_are_shown_and_saved(tmp_path: Path) -> None:
    settings = {**QUIET, "plot": True, "output_path": str(tmp_path)}

    def constant(model: Any, batch: Any) -> Tensor:
        return (model(batch) * 0).mean()

    hessian = ds_hessian.attach(torch.nn.Linear(3, 2), settings).use([torch.ones(2, 3)], constant)
    parts = hessian.decomposition(num_matvecs=2, num_probes=1)
    assert np.isnan(parts.share_of_residual) and "nan" in parts.table()
    assert HessianDecomposition.load(hessian.save(parts)).hessian == parts.hessian


def test_an_operator_of_its_own_is_refused(net: Any) -> None:
    hessian = ds_hessian.attach(*net, QUIET).use(DATA, loss_of)
    with pytest.raises(ConfigError, match="a decomposition measures all of hessian, ggn"):
        hessian.decomposition(operator="ggn")


def test_the_operator_of_a_jobs_own_measurements_is_none_of_a_decompositions(net: Any) -> None:
    found = []
    for operator in ("hessian", "ggn"):
        config = {"progress": False, "operator": operator}
        hessian: Any = ds_hessian.attach(*net, config).use(DATA, loss_of)
        found.append(hessian.decomposition(num_matvecs=1))
    assert found[0].spectra.keys() == found[1].spectra.keys()
    assert all(
        np.array_equal(s.alphas, found[1].spectra[k].alphas) for k, s in found[0].spectra.items()
    )


def test_a_decomposition_has_the_three_parts(net: Any) -> None:
    hessian = ds_hessian.attach(*net, QUIET).use(DATA, loss_of)
    spectrum = hessian.spectrum(num_matvecs=2)
    with pytest.raises(ResultError, match="a decomposition has hessian, ggn, residual"):
        HessianDecomposition({"hessian": spectrum, "ggn": spectrum})


@pytest.mark.parametrize("operator", cells(["ggn", "hessian", "residual"], ["ggn"]))
def test_curvatures_are_quadratic_forms(
    net: Any, matrices: dict[str, Tensor], operator: str, tmp_path: Path
) -> None:
    hessian = ds_hessian.attach(*net, {**QUIET, "output_path": str(tmp_path)}).use(DATA, loss_of)
    vectors = {"random": 3 * hessian.random_vector(seed=1)}
    found = hessian.curvatures(vectors=vectors, operator=operator)
    assert found.directions == ("gradient", "update", "random")
    with hessian.measuring() as opened:
        vectors["gradient"] = opened.gradient
    vectors["update"] = hessian.backend.adam().last_step
    for name, v in vectors.items():
        wide = v.double()
        exact = float(wide @ matrices[operator] @ wide / (wide @ wide))
        estimate = found.along(name)
        scale = float(torch.linalg.matrix_norm(matrices[operator], 2))
        assert abs(estimate.value - exact) < 3 * estimate.error + 1e-6 * scale, name
    folder = hessian.save(found)
    assert HessianCurvatures.load(folder) == found
    assert folder.name == ("step_000000" if operator == "hessian" else f"step_000000_{operator}")


def test_forms_cost_two_forwards_each(net: Any) -> None:
    hessian = ds_hessian.attach(*net, QUIET).use(DATA * 4, loss_of)
    vectors = {str(i): hessian.random_vector(seed=i) for i in range(9)}
    costs = [
        hessian.curvatures((), dict(list(vectors.items())[:count]), operator="ggn").cost
        for count in (1, 9)
    ]
    each = (costs[1].gradient_evaluations - costs[0].gradient_evaluations) / 8
    assert each < 0.76  # 2/3, and two forwards at two displacements of one of 16 micro-batches


def test_vectors_of_a_file_are_directions(net: Any, tmp_path: Path) -> None:
    hessian = ds_hessian.attach(*net, {**QUIET, "output_path": str(tmp_path)}).use(DATA, loss_of)
    pairs = hessian.eigenpairs(k=2, which="LA", operator="ggn")
    folder = hessian.save(pairs)
    found = hessian.curvatures((), folder / "eigenpairs.safetensors", operator="ggn")
    assert found.directions == ("vector 1", "vector 2")
    assert np.all(abs(found.values - pairs.values) < 3 * (found.errors + pairs.errors))


@pytest.mark.parametrize("directions", [("uphill",), ("gradient", "random")])
def test_unknown_directions_are_refused(net: Any, directions: tuple[str, ...]) -> None:
    hessian = ds_hessian.attach(*net, QUIET).use(DATA, loss_of)
    with pytest.raises(ConfigError, match="no direction"):
        hessian.curvatures(directions)


def test_curvatures_are_measured_on_an_interval(net: Any, tmp_path: Path) -> None:
    section = {**QUIET, "curvature_interval": 2, "output_path": str(tmp_path)}
    hessian = ds_hessian.attach(*net, section).use(DATA, loss_of)
    for _ in range(4):
        hessian.step()
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_000002_ggn", "step_000004_ggn"]
    found = HessianCurvatures.load(tmp_path / "step_000004_ggn")
    assert found.directions == ("gradient", "update")
