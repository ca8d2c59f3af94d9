"""Linear systems with matrices of a chosen spectrum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.errors import NumericsError
from ds_hessian.krylov import solve
from tests.krylov.matrices import SPECTRA, Matrix, rotation
from tests.ranks import RankPool
from tests.tiers import cells

POSITIVE = np.r_[np.linspace(0.0, 1.0, 150), 5.0, 40.0]


def answers(values: Any, dampings: list[float], method: Any, **options: Any) -> tuple[Any, Any]:
    """The solution, and the true error of each x in fp64."""
    operator = Matrix.of(values)
    b = operator.fresh(7)(0)
    found = solve(operator, b, dampings, operator.fresh(), method, **options)
    whole, identity = operator.full(b), torch.eye(len(values), dtype=torch.float64)
    errors = []
    for x, damping in zip(found.x, dampings, strict=True):
        exact = torch.linalg.solve(operator.matrix + damping * identity, whole)
        errors.append(float((operator.full(x) - exact).norm()))
    return found, np.array(errors)


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_several_dampings_from_one_krylov_space(method: Any) -> None:
    found, errors = answers(POSITIVE, [1.0, 0.1, 10.0], method, num_matvecs=80)
    assert found.converged.all() and not found.negative_curvature.any()
    assert (found.residuals <= 1e-4).all()
    assert (errors <= found.errors).all()
    assert found.num_matvecs <= 80 + 3


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_solutions_do_not_depend_on_the_number_of_ranks(
    method: Any, ranks: Callable[[int], RankPool]
) -> None:
    found, errors = ranks(2).run(answers, POSITIVE, [1.0], method, num_matvecs=80)[0]
    assert found.converged.all() and (errors <= found.errors).all()


def test_negative_curvature_is_a_finding_and_minres_solves_all_the_same() -> None:
    values = np.r_[np.linspace(0.5, 1.0, 60), -2.0]
    found, _ = answers(values, [0.1, 5.0], "cg", num_matvecs=40)
    assert found.negative_curvature.tolist() == [True, False]
    assert found.converged.tolist() == [False, True]
    assert np.isfinite(found.residuals).all()
    found, errors = answers(values, [0.1, 5.0], "minres", num_matvecs=40)
    assert found.negative_curvature.tolist() == [True, False]
    assert found.converged.all() and (errors <= found.errors).all()
    assert abs(found.curvature[0] + 2.0) <= found.curvature[1] + 1e-6


def test_the_error_of_a_solution_knows_how_near_its_shift_is_to_an_eigenvalue() -> None:
    """Along the eigenvector of -5 the inverse of H + 5.4 is 25 times that of the others."""
    values = np.r_[np.linspace(20.0, 30.0, 60), -5.0]
    for steps in (8, 16):
        found, errors = answers(values, [5.4], "minres", num_matvecs=steps, tolerance=1e-9)
        assert (errors <= found.errors).all() and (found.errors < 10 * errors + 1e-5).all()


def test_a_system_that_is_singular_to_the_errors_of_products_has_no_finite_bar() -> None:
    """The Ritz value at -1 is off by some 1e-5: its distance from the shift says nothing."""
    values = np.r_[np.linspace(1.0, 3.0, 40), -1.0]
    for seed in range(10):
        operator = Matrix.of(values, noise=1e-4, seed=seed)
        b = operator.fresh(7)(0)
        found = solve(operator, b, [1 + 1e-7, 1.5], operator.fresh(), "minres", num_matvecs=41)
        exact = torch.linalg.solve(
            operator.matrix + 1.5 * torch.eye(41, dtype=torch.float64), operator.full(b)
        )
        assert found.errors[0] == np.inf
        assert (operator.full(found.x[1]) - exact).norm() <= found.errors[1] < 0.1 * exact.norm()


@pytest.mark.parametrize("num_matvecs", cells([10, 50], [10]))
@pytest.mark.parametrize("damping", [0.01, 0.1])
def test_bars_of_indefinite_solutions_hold_what_ritz_values_do_not_show(
    damping: float, num_matvecs: int
) -> None:
    """Of 600 eigenvalues about zero, one is far nearer to -damping than any Ritz value.

    For one of the eight spectra it happens to be 200 times nearer than is to be expected.
    """
    held = []
    for seed in range(8):
        values = np.random.default_rng(seed).standard_normal(600) * 0.2
        values[-1] = 3.0
        found, errors = answers(values, [damping], "minres", num_matvecs=num_matvecs)
        assert found.negative_curvature.all() and np.isfinite(found.errors).all()
        held.append(bool((errors <= found.errors).all()))
    assert sum(held) >= 7


@pytest.mark.parametrize("share", [1e-3, 1e-2])
def test_bars_without_damping_hold_what_lies_about_zero(share: float) -> None:
    """Most eigenvalues of a net's Hessian do, and a gradient has little of them."""
    held = []
    for seed in range(8):
        generator = np.random.default_rng(seed)
        signs = generator.choice([-1.0, 1.0], 40)
        values = np.r_[signs * 10 ** generator.uniform(-5, -3, 40), -0.5, np.linspace(0.5, 3.0, 7)]
        operator = Matrix.of(values, noise=1e-5, seed=seed)
        weights = torch.where(torch.tensor(abs(values) < 2e-3), share, 1.0).double()
        vectors = torch.linalg.eigh(operator.matrix)[1]
        order = torch.tensor(np.argsort(np.argsort(values)))
        whole = vectors[:, order] @ (weights * torch.tensor(generator.standard_normal(48)))
        found = solve(operator, whole.float(), [0.0], operator.fresh(), "minres", num_matvecs=12)
        exact = torch.linalg.solve(operator.matrix, whole)
        held.append(bool((operator.full(found.x[0]) - exact).norm() <= found.errors[0]))
    assert sum(held) >= 7


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_bars_of_few_steps_hold_what_lies_about_zero(method: Any) -> None:
    """No Ritz value is there yet, with a damping of 1e-3: errors were up to 130 bars."""
    for seed in range(8):
        values = 10 ** np.random.default_rng(seed).uniform(-6.0, 1.5, 100)
        found, errors = answers(values, [1e-3, 1e-2], method, num_matvecs=4)
        assert not found.converged.any() and (errors <= found.errors).all()


def test_bars_where_conjugate_gradients_stop_at_once_hold_what_lies_between_them_and_zero() -> None:
    """All Ritz values are below -damping: errors were up to 5 bars, of a net 2300."""
    held = []
    for seed in range(16):
        values = np.random.default_rng(seed).normal(size=300) ** 3 - 0.5
        found, errors = answers(values, [0.1], "cg", num_matvecs=4)
        assert found.negative_curvature.all() and not found.converged.any()
        held.append(bool((errors <= found.errors).all()))
    assert sum(held) >= 14


@pytest.mark.parametrize("method", ["cg", "minres"])
def test_bars_of_few_preconditioned_steps_hold_what_lies_about_zero(method: Any) -> None:
    """Of D, which is unlike H: errors were up to 100 bars."""
    for seed in range(8):
        generator = np.random.default_rng(seed)
        operator = Matrix.of(10 ** generator.uniform(-6.0, 1.5, 100))
        b, damping = operator.fresh(7)(0), 1e-3
        metric = operator.shard(torch.tensor(10 ** generator.uniform(-4.0, 1.0, 100)))
        found = solve(operator, b, [damping], operator.fresh(), method, 1e-3, 4, metric)
        shifted = operator.matrix + damping * torch.eye(100, dtype=torch.float64)
        exact = torch.linalg.solve(shifted, operator.full(b))
        error = float((operator.full(found.x[0]) - exact).norm())
        assert not found.converged.any() and error <= found.errors[0]


def test_bars_of_solutions_scale_with_the_right_hand_side() -> None:
    """Those that the errors of products make, too."""
    found = []
    for scale in (1.0, 1000.0):
        operator = Matrix.of(POSITIVE, noise=1e-3)
        b = scale * operator.fresh(7)(0)
        found.append(solve(operator, b, [0.5], operator.fresh(), "minres", num_matvecs=30))
    one, thousand = found
    assert thousand.errors == pytest.approx(1000 * one.errors, rel=1e-3)
    assert thousand.residuals == pytest.approx(one.residuals, rel=1e-3)


def test_negative_curvature_in_the_first_step_gives_zero() -> None:
    found, _ = answers(-POSITIVE - 1, [0.0], "cg")
    assert found.steps.tolist() == [0] and not found.x.any()
    assert found.residuals.tolist() == [pytest.approx(1.0)]


def test_a_diagonal_preconditioner_saves_products() -> None:
    scales = np.geomspace(1e-2, 1e2, 100)
    q = rotation(100)
    inner = q.T @ torch.diag(torch.linspace(1.0, 2.0, 100, dtype=torch.float64)) @ q
    root = torch.tensor(np.sqrt(scales))
    operator = Matrix(root[:, None] * inner * root)
    b, damping = operator.fresh()(0), [1e-3]
    plain = solve(operator, b, damping, operator.fresh(), num_matvecs=60)
    diagonal = operator.shard(torch.tensor(scales))
    better = solve(operator, b, damping, operator.fresh(), num_matvecs=60, preconditioner=diagonal)
    assert better.converged.all() and not plain.converged.any()
    assert better.num_matvecs < 30 and (better.errors < 1).all()
    exact = torch.linalg.solve(
        operator.matrix + 1e-3 * torch.eye(100, dtype=torch.float64), operator.full(b)
    )
    assert (operator.full(better.x[0]) - exact).norm() < 1e-3 * exact.norm()


class Diagonal:
    """A metric that is known as a diagonal."""

    def __init__(self, diagonal: torch.Tensor) -> None:
        self.diagonal, self.least = diagonal, float(diagonal.min())

    def inverse_root(self, shift: float) -> torch.Tensor:
        return (self.diagonal + shift).rsqrt()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", [Diagonal, lambda diagonal: diagonal])
def test_bars_of_a_preconditioned_solution_are_of_the_solution(scale: float, kind: Any) -> None:
    """They were of S^-1 x, a thousandth of the error where the curvature is a millionth."""
    operator = Matrix.of(scale * POSITIVE)
    b, damping, n = operator.fresh(7)(0), 0.1 * scale, len(POSITIVE)
    exact = torch.linalg.solve(
        operator.matrix + damping * torch.eye(n, dtype=torch.float64), operator.full(b)
    )
    metric = kind(operator.shard(operator.matrix.diagonal().clone()))
    for tolerance in (0.3, 1e-3):
        found = solve(
            operator, b, [damping], operator.fresh(), "minres", tolerance, preconditioner=metric
        )
        assert found.converged.all()
        error = float((operator.full(found.x[0]) - exact).norm())
        assert error < 2 * found.errors[0] < 600 * error


@pytest.mark.parametrize("method", ["cg", "minres"])
@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_residuals_of_preconditioned_solutions_are_those_of_the_system(
    method: Any, scale: float
) -> None:
    """They were |S r| / |S b|, a fiftieth of |r| / |b| where D varies by a million."""
    generator = torch.Generator().manual_seed(1)
    diagonal = scale * torch.logspace(-3, 3, 80, dtype=torch.float64)
    noise = torch.randn(80, 80, generator=generator, dtype=torch.float64) / 100
    root = diagonal.sqrt()
    operator = Matrix(root[:, None] * (torch.eye(80) + noise + noise.T) * root)
    b, damping = operator.fresh(7)(0), 1e-3 * scale
    metric = operator.shard(diagonal.float())
    found = solve(operator, b, [damping], operator.fresh(), method, 1e-3, preconditioner=metric)
    shifted = operator.matrix + damping * torch.eye(80, dtype=torch.float64)
    true = (shifted @ operator.full(found.x[0]) - operator.full(b)).norm()
    assert found.converged.all() and found.num_matvecs < 40
    assert found.residuals[0] == pytest.approx(float(true), rel=0.1)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("method", ["cg", "minres"])
def test_no_spectrum_makes_a_nan(name: str, method: Any) -> None:
    scale = max(abs(SPECTRA[name]).max(), 1.0)
    found, _ = answers(SPECTRA[name], [0.5 * scale], method, num_matvecs=20)
    assert torch.isfinite(found.x).all() and np.isfinite(found.residuals).all()


def test_impossible_systems_are_refused() -> None:
    operator = Matrix.of(POSITIVE)
    with pytest.raises(NumericsError, match="other than zero"):
        solve(operator, operator.space.zeros(), [1.0], operator.fresh())
    with pytest.raises(NumericsError, match="at least one damping"):
        solve(operator, operator.fresh()(0), [], operator.fresh())
    bad = operator.space.zeros() - 1
    with pytest.raises(NumericsError, match="not in 152 coordinates"):
        solve(operator, operator.fresh()(0), [0.5], operator.fresh(), preconditioner=bad)
