"""Every analysis on some of the parameters, against the block of the dense fp64 Hessian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.backends.restricted import chosen
from ds_hessian.errors import ConfigError, NumericsError
from tests.nets import TinyGPT, batch
from tests.operators.nets import Exact, batches, dense, loss_of, mlp, preempted, train

QUIET = {"progress": False, "plot": False}
CHOICE = r"^(0|4)\."
"""Two layers of three, 271 of 607 parameters."""


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return train(mlp(), batches(), 40)


@pytest.fixture(scope="module")
def inside(net: nn.Module) -> Tensor:
    """Whether each coordinate is chosen."""
    named = net.named_parameters()
    return torch.cat([torch.full((p.numel(),), n[0] in "04") for n, p in named])


@pytest.fixture(scope="module")
def block(net: nn.Module, inside: Tensor) -> Tensor:
    """P H P, exactly."""
    exact = Exact(net, batches())
    matrix = dense(exact, len(inside))
    return matrix * inside * inside[:, None]


@pytest.fixture
def hessian(net: nn.Module) -> Any:
    return ds_hessian.attach(net, config=QUIET).use(batches(), loss_of)


@pytest.mark.full
def test_spectra_and_eigenpairs_are_those_of_the_block(
    hessian: Any, block: Tensor, inside: Tensor
) -> None:
    exact = torch.linalg.eigvalsh(block[inside][:, inside]).numpy()
    spectrum = hessian.spectrum(num_matvecs=30, parameters=CHOICE)
    assert spectrum.n == int(inside.sum()) == len(exact)
    top, bottom = spectrum.eigenvalue_max, spectrum.eigenvalue_min
    assert abs(top.value - exact[-1]) <= top.error and top.error < 0.02 * exact[-1]
    assert abs(bottom.value - exact[0]) <= bottom.error
    assert abs(spectrum.trace.value - exact.sum()) <= 4 * spectrum.trace.error
    assert spectrum.provenance.parameters == ("0.weight", "0.bias", "4.weight", "4.bias")
    pairs = hessian.eigenpairs(k=2, which="LA", parameters=CHOICE)
    assert (abs(pairs.values - exact[[-1, -2]]) <= pairs.errors).all()
    assert pairs.vectors.shape == (2, len(inside)) and not pairs.vectors[:, ~inside].any()
    for value, error, v in zip(pairs.values, pairs.errors, pairs.vectors.double(), strict=True):
        assert float((block @ v - value * v).norm()) <= error
    assert set(pairs.concentrations) == set(spectrum.provenance.parameters)


@pytest.mark.full
def test_traces_solves_and_tests_of_blocks_are_those_of_the_block(
    hessian: Any, block: Tensor, inside: Tensor
) -> None:
    trace = hessian.trace("xtrace", num_matvecs=60, parameters=CHOICE)
    assert abs(trace.value - float(block.trace())) <= trace.bound
    b = hessian.random_vector(seed=3)
    found = hessian.solve(b, [2.0], method="minres", num_matvecs=60, parameters=CHOICE)
    damped = block + 2.0 * torch.eye(len(b), dtype=torch.float64)
    exact = torch.linalg.solve(damped, b.double() * inside)
    assert (found.x[0].double() - exact).norm() <= found.errors[0]
    assert found.errors[0] < 0.02 * exact.norm()
    coupling = hessian.block_coupling("layers", parameters=CHOICE)
    assert coupling.names == ("0", "4") and coupling.sizes.sum() == inside.sum()
    share = hessian.off_block_share("layers", num_probes=12, parameters=CHOICE)
    first = torch.arange(len(inside)) < 220
    apart = block * (first != first[:, None])
    wanted = float(apart.square().sum() / block.square().sum())
    assert abs(share.value - wanted) <= 4 * share.error


def test_products_in_a_measurement_are_php(hessian: Any, block: Tensor, inside: Tensor) -> None:
    v = hessian.random_vector(seed=5)
    with hessian.measuring(parameters=CHOICE) as operator:
        product = hessian.matvec(v)
        assert not operator.gradient[~inside].any() and operator.gradient[inside].all()
    exact = block @ v.double()
    assert (product.vector.double() - exact).norm() <= 3 * product.error * exact.norm()
    assert product.norm == pytest.approx(float(exact.norm() / v.norm()), rel=1e-3)
    outside = v * ~inside
    with hessian.measuring(parameters=CHOICE), pytest.raises(NumericsError, match="other than"):
        hessian.matvec(outside)


@pytest.mark.full
def test_gradients_sweeps_and_earlier_spaces_are_restricted_too(
    hessian: Any, block: Tensor, inside: Tensor, tmp_path: Path
) -> None:
    found = hessian.alignment(k=2, update=False, parameters=CHOICE)
    hessian.save(found, tmp_path)
    again = hessian.alignment(k=2, update=False, parameters=CHOICE, earlier=tmp_path)
    assert again.overlap.value == pytest.approx(1, abs=1e-3)
    v = hessian.random_vector(seed=8)
    sweep = hessian.displacement_sweep({"own": v}, [3e-3], parameters=CHOICE)
    x = v.double() * inside
    assert sweep.curvatures[0, 0] == pytest.approx(float(x @ block @ x / (x @ x)), rel=1e-2)
    assert hessian.self_test(parameters=CHOICE).passed
    given = batches(3)
    influence = hessian.influence(given[:1], given, [2.0], num_matvecs=60, parameters=CHOICE)
    assert influence.scores.shape == (1, 3) and influence.scores[0, 0] > 0


@pytest.mark.full
def test_adams_preconditioner_and_the_start_are_those_of_the_choice() -> None:
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    hessian: Any = ds_hessian.attach(net, optimizer, QUIET)
    hessian.use([batch(i, 0) for i in range(2)])
    for i in range(3):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
        hessian.step()
    first = hessian.sharpness(parameters="up")
    whole = hessian.sharpness()
    warm = hessian.sharpness(parameters="up")
    assert not first.warm and not whole.warm and warm.warm
    assert first.preconditioned.value < whole.preconditioned.value
    assert abs(warm.eigenvalue_max.value - first.eigenvalue_max.value) <= (
        warm.eigenvalue_max.error + first.eigenvalue_max.error
    )
    b = hessian.random_vector(seed=1)
    assert hessian.solve(b, [5.0], preconditioner="adam", parameters="up").converged.all()


def test_memory_is_that_of_the_block(hessian: Any) -> None:
    whole = hessian.memory_plan(num_matvecs=100)
    block = hessian.memory_plan(num_matvecs=100, parameters=CHOICE)
    assert block.peak("host") < 0.6 * whole.peak("host")
    pairs = hessian.memory_plan("eigenpairs", k=50, parameters=CHOICE).table()
    assert "results over all parameters, 50" in pairs
    assert "results" not in hessian.memory_plan("eigenpairs", k=50).table()


@pytest.mark.full
def test_a_state_of_other_parameters_is_not_resumed(hessian: Any, tmp_path: Path) -> None:
    settings = {"num_matvecs": 8, "resume": str(tmp_path)}
    interrupted = ds_hessian.attach(hessian.modules[0], config=QUIET).use(batches(), preempted(100))
    with pytest.raises(ds_hessian.MeasurementError, match="preempted"):
        interrupted.spectrum(**settings, parameters=CHOICE)
    with pytest.raises(ConfigError, match="of another measurement; it differs in"):
        hessian.spectrum(**settings, parameters="0.weight")
    resumed = hessian.spectrum(**settings, parameters=CHOICE)
    whole = hessian.spectrum(num_matvecs=8, parameters=CHOICE)
    assert np.array_equal(resumed.alphas, whole.alphas)


NAMES = ["h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "head.weight"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("blocks", r"'blocks' matches none of the 4 trainable parameters; they are h\.0\.attn"),
        ("h.0.atn.weight", r"matches none .*; did you mean h\.0\.attn\.weight, "),
        ("(", r"'\(' is no regular expression"),
        (["h.0.mlp.wieght"], r"no trainable 'h\.0\.mlp\.wieght'; did you mean h\.0\.mlp\.weight"),
        ([], r"an empty list; they are"),
    ],
)
def test_a_choice_of_nothing_is_refused_with_near_misses(choice: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(NAMES, choice)


def test_expressions_and_names_choose_in_the_models_order() -> None:
    assert chosen(NAMES, r"\.0\.") == NAMES[:2]
    assert chosen(NAMES, [NAMES[3], NAMES[0]]) == [NAMES[0], NAMES[3]]


def test_vectors_of_another_length_are_refused(hessian: Any) -> None:
    with pytest.raises(ConfigError, match=r"a vector of this rank, .* \(607,\)"):
        hessian.solve(torch.ones(5), [1.0], parameters=CHOICE)
