"""What other tools are given is what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh

import ds_hessian
from ds_hessian.errors import ResultError
from ds_hessian.interop import data_frames, linear_operator, perturbed, state_dicts
from ds_hessian.records import HessianSpectrum
from tests.records.makers import language_model_like, spectrum_of

QUIET = {"progress": False, "plot": False}


def measured() -> tuple[torch.nn.Module, ds_hessian.Hessian, torch.Tensor, list[torch.Tensor]]:
    """A least-squares model, its Hessian, and the same by its closed form, 2 x x' / (2 n)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2, bias=False)
    x = torch.randn(40, 6)
    y = torch.randn(40, 2)
    hessian = ds_hessian.attach(model, None, QUIET)
    hessian.use([(x, y)], lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1]))
    block = (x.T @ x).double() / 40
    return model, hessian, torch.block_diag(block, block), [x, y]


def test_scipy_finds_the_eigenvalues_of_the_closed_form() -> None:
    _, hessian, exact, _ = measured()
    with linear_operator(hessian) as operator:
        values = eigsh(operator, k=2, which="LA", tol=1e-4, return_eigenvectors=False)
        assert not np.any(operator @ np.zeros(12))
    assert values.max() == pytest.approx(float(torch.linalg.eigvalsh(exact)[-1]), rel=1e-3)


def test_weights_moved_along_an_eigenvector_raise_the_loss_by_its_eigenvalue() -> None:
    model, hessian, _, (x, y) = measured()
    with torch.no_grad():  # the minimum: the loss is the quadratic form alone
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    pairs = hessian.eigenpairs(k=1)
    found = state_dicts(hessian, pairs.vectors)
    assert found is not None and list(found[0]) == ["weight"]
    loss = torch.nn.functional.mse_loss
    before = loss(model(x), y).item()
    model.load_state_dict(perturbed(model.state_dict(), found[0], 0.3))
    raised = loss(model(x), y).item() - before
    assert raised == pytest.approx(0.5 * 0.3**2 * float(pairs.values[0]), rel=1e-3)
    with pytest.raises(ResultError, match="not of this model"):
        perturbed(model.state_dict(), {"other": x}, 1.0)


def test_frames_have_every_figure_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed (extra: frames)")
    spectra = {}
    for step in (200, 30):
        found = spectrum_of(language_model_like(300) * step, m=8, probes=2, noise=1e-3)
        object.__setattr__(found.provenance, "step", step)
        found.save(tmp_path / f"step_{step:06d}")
        spectra[step] = found
    object.__setattr__(found, "provenance", replace(found.provenance, operator="ggn"))
    found.save(tmp_path / "step_000030_ggn")
    whole = data_frames(tmp_path)
    assert sorted(whole["spectrum"]["operator"]) == ["ggn", "hessian", "hessian"]
    frames = {name: frame[frame.operator == "hessian"] for name, frame in whole.items()}
    steps, ritz = frames["spectrum"], frames["spectrum P m"]
    assert list(steps["step"]) == [30, 200] and len(ritz) == 2 * 2 * 8
    for row in steps.itertuples():
        record = HessianSpectrum.load(tmp_path / f"step_{row.step:06d}")
        assert (row.eigenvalue_max, row.eigenvalue_max_error) == (
            record.eigenvalue_max.value,
            record.eigenvalue_max.error,
        )
        assert (row.trace, row.trace_error) == (record.trace.value, record.trace.error)
        mine = ritz[(ritz.step == row.step) & (ritz.P == 1)]
        assert np.array_equal(mine.ritz_values, record.ritz_values[1])
        assert np.array_equal(mine.weights, record.weights[1])
    with pytest.raises(ResultError, match="no such folder"):
        data_frames(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultError, match="no record"):
        data_frames(tmp_path / "empty")
