"""What one measurement of a run has learnt of steps serves the next one."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian import Hessian
from ds_hessian.backends.objective import LossFn
from ds_hessian.krylov import LanczosState
from ds_hessian.operators import GaussNewton
from ds_hessian.vectors import random_vector
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import Exact, backend_of, batches, loss_of, measuring, mlp, train
from tests.tiers import cells

VECTORS = 4


def first_products(
    hessian: Hessian, net: nn.Module, start: int = 0, **settings: object
) -> tuple[list[float], list[float], list[list[float]]]:
    """Gradients evaluated for each of the first Lanczos vectors, estimates over errors, vectors."""
    hessian.use(data := batches(8), loss_of)
    exact: Callable[[Tensor], Tensor] = Exact(net, data)
    if settings.get("operator") == "ggn":
        exact = ExactGaussNewton(net, "4", loss_of, data)
    with hessian.measuring(**settings) as operator:
        evaluated, told, found = [0.0], list[float](), list[list[float]]()

        class Noted:
            space = operator.space

            def matvec(self, v: Tensor) -> object:
                product = operator.matvec(v)
                evaluated.append(operator.cost.gradient_evaluations)
                error = float((product.vector.double() - exact(v)).norm()) / float(v.norm())
                told.append((product.error or 0.0) * product.norm / error)
                found.append(product.vector.tolist())
                return product

        def fresh(number: int) -> Tensor:
            return hessian.random_vector(seed=start + number)

        state = LanczosState(Noted(), fresh(0), VECTORS, fresh)  # type: ignore[arg-type]
        while not state.done:
            state.step()
    return [b - a for a, b in zip(evaluated, evaluated[1:], strict=False)], told, found


@pytest.mark.parametrize("tolerance", cells([None, 1e-2], [None]))
def test_the_first_vectors_of_a_later_measurement_need_no_search(tolerance: float | None) -> None:
    """Beside measurements of the same weights that nothing has taught."""
    spent = {"taught": 0.0, "untaught": 0.0}
    for start in (0, 7):
        net = train(mlp(), batches(8), 40)
        hessian = ds_hessian.attach(net, config={"progress": False})
        first_products(hessian, net, start, tolerance=tolerance)
        train(net, batches(8), 10)
        hessian.step = 10
        after, told, _ = first_products(hessian, net, start, tolerance=tolerance)
        assert max(after[:2]) <= 2.25 + 1 / 8, after  # with a third difference of the pilot
        assert min(told) > 0.2 and max(told) < 10, told
        spent["taught"] += sum(after[:2])
        other = ds_hessian.attach(net, config={"progress": False})
        found, *_ = first_products(other, net, start, tolerance=tolerance)
        spent["untaught"] += sum(found[:2])
    assert spent["taught"] < spent["untaught"], spent


def test_the_first_gauss_newton_products_of_a_later_measurement_need_no_search() -> None:
    """They made the trials of a first measurement, 1.6 gradients more than products take."""
    for start in (0, 7):
        net = train(mlp(), batches(8), 40)
        hessian = ds_hessian.attach(net, config={"progress": False})
        before, *_ = first_products(hessian, net, start, operator="ggn")
        train(net, batches(8), 10)
        hessian.step = 10
        after, told, _ = first_products(hessian, net, start, operator="ggn")
        # A backward and third differences of the first, and one trial of the second.
        assert sum(after[:2]) <= 2 * 5 / 3 + 1 / 8 + 2 / 8 + 5 / 24 + 1e-6 < sum(before[:2])
        assert min(told) > 1 / 3 and max(told) < 10, told


def test_taught_gauss_newton_products_go_on_in_a_state() -> None:
    net, data = train(mlp(), batches(8), 40), batches(8)
    backend = backend_of(net)
    vectors = [random_vector(backend.layout, backend.space, seed=seed) for seed in range(3)]
    with measuring(backend, data) as session:
        operator = GaussNewton(session)
        for v in vectors[:2]:
            operator.matvec(v)
        lessons = json.loads(json.dumps(operator.lessons()))
        taught, resumed = GaussNewton(session), GaussNewton(session)
        taught.begin(lessons)
        taught.matvec(vectors[0])
        resumed.load_state_dict(json.loads(json.dumps(taught.state_dict())))
        for v in vectors[1:]:
            assert resumed.matvec(v).vector.equal(taught.matvec(v).vector)
        assert taught.lessons() == resumed.lessons() is not None


def test_figures_at_the_same_weights_repeat() -> None:
    net = train(mlp(), batches(8), 40)
    hessian = ds_hessian.attach(net, config={"progress": False})
    torch.manual_seed(0)
    assert first_products(hessian, net) == first_products(hessian, net)


def large(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 1e6 * loss_of(model, batch)


def small() -> LossFn:
    """Another loss, made anew at each call by the same code."""
    return lambda model, batch: 1e-6 * loss_of(model, batch)


def test_a_measurement_begins_with_what_its_own_loss_has_taught() -> None:
    """It began with the noise of another loss, which may be any other noise."""
    net, data = train(mlp(), batches(2), 20), batches(2)
    taught, untaught = (ds_hessian.attach(net, config={"progress": False}) for _ in range(2))
    taught.use(data, large).spectrum(num_matvecs=3)
    taught.step = 1
    first, fresh = (job.use(data, small()).spectrum(num_matvecs=3) for job in (taught, untaught))
    assert np.array_equal(first.alphas, fresh.alphas)
    taught.step = 2
    later = taught.use(data, small()).spectrum(num_matvecs=3)
    assert later.trials.sum() < fresh.trials.sum()


@pytest.mark.parametrize("operator", ["hessian", "ggn"])
@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_lessons_that_the_first_trial_contradicts_are_forgotten(size: float, operator: str) -> None:
    """The noise of a loss is as large as the loss, whose scale the same code may have changed."""
    net, data, scale = train(mlp(), batches(2), 20), batches(2), [1.0]

    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return scale[0] * loss_of(model, batch)

    taught, untaught = (ds_hessian.attach(net, config={"progress": False}) for _ in range(2))
    taught.use(data, scaled).spectrum(num_matvecs=3, operator=operator)
    scale[0], taught.step = size, 1
    found, fresh = (
        job.use(data, scaled).spectrum(num_matvecs=3, operator=operator)
        for job in (taught, untaught)
    )
    assert np.array_equal(found.alphas, fresh.alphas)


class Point(nn.Module):
    """Four weights, and a loss of which each has a curvature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 1.0, 0.0, 0.0]))

    def forward(self, curvatures: Tensor) -> Tensor:
        return (curvatures * self.w.square()).sum() / 2


def test_the_sharpness_of_a_loss_does_not_start_from_the_direction_of_another() -> None:
    """An eigenvector of both looked converged, far below the largest eigenvalue."""
    job = ds_hessian.attach(Point(), config={"progress": False})
    curvatures = [torch.tensor([10.0, 1.0, 1.0, 2.0])]
    first = job.use(curvatures, lambda model, c: model(c)).sharpness(preconditioned=False)
    job.step = 1
    other = job.use(curvatures, lambda model, c: model(c.flip(0))).sharpness(preconditioned=False)
    for found in (first, other):
        assert found.converged[0] and found.eigenvalue_max.value == pytest.approx(10, rel=1e-3)
