"""The finite-difference Hessian on functions whose Hessian is known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from ds_hessian.backends import Session
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import NumericsError
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.operators.displacement.control import StepController
from ds_hessian.operators.displacement.trials import Trial
from tests.operators import nets
from tests.operators.nets import relative


class Weights(nn.Module):
    """A bare vector of weights."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())


@contextmanager
def measuring(
    module: nn.Module, loss: Callable[[Tensor], Tensor], terms: int = 1
) -> Iterator[Session]:
    data = [None] * terms
    with nets.measuring(ModuleBackend(module), data, lambda m, _: loss(m.w)) as session:
        yield session


@pytest.mark.parametrize("displacement", ["auto", 1e-2])
def test_the_hessian_is_taken_at_the_weights_not_at_the_vector(displacement: object) -> None:
    w = torch.linspace(0.5, 2.0, 20)
    v = torch.randn(20, generator=torch.Generator().manual_seed(0))
    module = Weights(w)
    with measuring(module, lambda w: (w**4).sum()) as session:
        product = FiniteDifferenceHessian(session, displacement).matvec(v)
    # Truncation (h^2 / w^2 with |v| = 1 spread over 20) and rounding of g / h: under 2e-4 for both.
    assert relative(product.vector, 12 * w.double() ** 2 * v) < 2e-4


@pytest.mark.parametrize("displacement", ["auto", 1e-3, 1e-1, 10.0])
def test_a_quadratic_gives_its_matrix_at_any_displacement(displacement: object) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(30, 30, generator=generator)
    a = a + a.T
    w, v = torch.randn(30, generator=generator), torch.randn(30, generator=generator)
    module = Weights(w)
    with measuring(module, lambda w: 0.5 * w @ a @ w) as session:
        product = FiniteDifferenceHessian(session, displacement).matvec(v)
    # No truncation; rounding is about u (|w| |A| / (h |Av|)): 6e-8 * 5 / h.
    h = product.displacement
    assert relative(product.vector, a.double() @ v.double()) < 1e-6 + 1e-6 / h


def test_scaling_the_argument_scales_the_product() -> None:
    w = torch.linspace(0.5, 2.0, 20)
    v = torch.ones(20)
    module = Weights(w)
    with measuring(module, lambda w: (w**4).sum()) as session:
        operator = FiniteDifferenceHessian(session, 1e-2)
        small, large = operator.matvec(1e-3 * v).vector, operator.matvec(1e3 * v).vector
    assert relative(1e6 * small, large) < 1e-5


@pytest.mark.parametrize("displacement", [1e-6, 2.0])
def test_a_given_displacement_is_the_one_that_is_used(displacement: float) -> None:
    """Also where rounding or truncation makes another one far better, of ten micro-batches."""
    w = torch.linspace(0.5, 2.0, 20)
    with measuring(Weights(w), lambda w: (w**4).sum() + w.cos().sum(), terms=10) as session:
        operator = FiniteDifferenceHessian(session, displacement)
        for _ in range(3):
            product, bare = operator.matvec(w), operator.product_at(w, displacement)
            assert product.displacement == displacement
            assert torch.equal(product.vector, bare.vector)


@pytest.mark.parametrize("displacement", [1e-30, 1e-9])
def test_a_given_displacement_that_rounding_loses_has_no_product(displacement: float) -> None:
    """It was 0, with no error."""
    w = torch.linspace(0.5, 2.0, 20)
    with measuring(Weights(w), lambda w: (w**4).sum()) as session:
        operator = FiniteDifferenceHessian(session, displacement)
        with pytest.raises(NumericsError, match="lost in the rounding.*larger displacement"):
            operator.matvec(w)
        assert operator.product_at(w, displacement).norm == 0  # of a sweep


def test_the_third_difference_of_a_slice_is_that_of_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the sum of w^4 it is exactly 4 h^2 |u^3| for u of length 1, and v of any length."""
    found = list[Trial]()
    judge = StepController.judge

    def judged(control: StepController, product: Trial) -> float:
        found.append(product)
        return judge(control, product)

    monkeypatch.setattr(StepController, "judge", judged)
    monkeypatch.setattr(StepController, "doubts_of_slice", lambda *_: True)
    w = torch.linspace(0.5, 2.0, 20)
    v = 3 * torch.randn(20, generator=torch.Generator().manual_seed(0))
    with measuring(Weights(w), lambda w: (w**4).sum(), terms=8) as session:
        product = FiniteDifferenceHessian(session, 0.3).matvec(v)
    first, second = found
    assert first.third is None and second.third is not None
    cubes = float((v.double() / v.double().norm()).pow(3).norm())
    # Rounding: 6e-8 of 20 gradients (1 + 9 + 9 + 1 squares) of norm 70 over 6 h, 3e-4 of it.
    assert second.third == pytest.approx(4 * 0.3**2 * cubes, rel=1e-3)
    assert relative(product.vector, 12 * w.double() ** 2 * v) < 0.1


def test_the_weights_are_bitwise_restored_also_after_an_error() -> None:
    w = torch.randn(100, generator=torch.Generator().manual_seed(2))
    module = Weights(w)
    with pytest.raises(KeyError), measuring(module, lambda w: (w**4).sum()) as session:
        FiniteDifferenceHessian(session).matvec(torch.ones(100))
        raise KeyError
    assert torch.equal(module.w.detach(), w)


@pytest.mark.parametrize("v", [torch.zeros(5), torch.tensor([1.0, float("nan"), 0, 0, 0])])
def test_a_vector_without_direction_is_refused(v: Tensor) -> None:
    module = Weights(torch.ones(5))
    with (
        measuring(module, lambda w: (w**4).sum()) as session,
        pytest.raises(NumericsError, match="other than zero"),
    ):
        FiniteDifferenceHessian(session).matvec(v)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    module = Weights(torch.ones(5))
    with (
        measuring(module, lambda w: (w - 1.0).abs().sqrt().sum()) as session,
        pytest.raises(NumericsError, match="gradient at the current weights"),
    ):
        FiniteDifferenceHessian(session)
