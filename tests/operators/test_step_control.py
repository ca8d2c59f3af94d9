"""The step control: on the error model itself, and on nets that are hard for it."""

from __future__ import annotations

import math

import pytest
import torch

from ds_hessian.operators import SCHEMES, FiniteDifferenceHessian
from ds_hessian.operators.step_control import MAX_TRIALS, StepController, Trial
from tests.operators.nets import Exact, backend_of, batches, loss_of, mlp, relative, train

GRID = {False: [10 ** (k / 3) for k in range(-13, 0)], True: [10 ** (k / 3) for k in range(-8, 3)]}
FIXED = {False: 5e-3, True: 0.2}


def search(controller: StepController, noise: float, truncation: float) -> tuple[float, int]:
    """h and number of trials where changes follow the error model exactly; |D| = 1."""
    trials, h = list[Trial](), controller.first_h()
    while True:
        change = math.inf
        if trials:
            last, p = trials[-1].h, controller.order
            change = math.hypot(
                noise * math.hypot(1 / h, 1 / last), truncation * abs(h**p - last**p)
            )
        trials.append(Trial(h, 1.0, min(change, 1.5) if trials else change))
        advice = controller.advise(trials)
        if advice.accept:
            return h, len(trials)
        h = advice.h


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("noise", [1e-9, 1e-7])
@pytest.mark.parametrize("length", [1e-3, 1e-2, 1e-1])
def test_h_is_near_its_best_from_wherever_the_search_starts(
    scheme: str, noise: float, length: float
) -> None:
    p = SCHEMES[scheme].order
    controller = StepController(SCHEMES[scheme], 2.0**-24, 10.0, 8, 8)
    for vector, scale in enumerate((length, length / 10, length / 10, length * 10, length / 30)):
        truncation = 0.1 * scale**-p
        h, trials = search(controller, noise, truncation)
        best = (noise / (math.sqrt(p) * truncation)) ** (1 / (p + 1))
        assert 0.45 < h / best < 2.0, (vector, h, best)
        assert trials <= MAX_TRIALS + 1
        controller.assess(h, 1.0)


def test_noise_alone_leads_to_larger_steps_only() -> None:
    controller = StepController(SCHEMES["central"], 2.0**-24, 1.0, 1, 1)
    controller.h, controller.noise, controller.products = 1e-6, 1e-6, 2
    trials, h, seen = list[Trial](), controller.first_h(), list[float]()
    for _ in range(6):
        change = 1e-6 * math.hypot(1 / h, 1 / trials[-1].h) if trials else math.inf
        trials.append(Trial(h, max(1.0, 1e-6 / h), change))
        advice = controller.advise(trials)
        seen.append(h)
        if advice.accept:
            break
        h = advice.h
    assert seen[1:] == sorted(seen[1:])


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [0, 40, 400], ids=["untrained", "trained", "memorised"])
def test_auto_is_near_the_best_constant_of_each_vector(steps: int, bf16: bool) -> None:
    data = batches()
    net = train(mlp(), data, steps)
    if steps == 400:
        assert sum(float(loss_of(net, b)) for b in data) / len(data) < 1e-3
    backend, exact = backend_of(net, data, bf16), Exact(net, data)
    auto, best, fixed, estimates = [], [], [], []
    with backend.measuring():
        operator = FiniteDifferenceHessian(backend)
        for v, truth in exact.krylov(backend, 8):
            errors = [relative(operator.product_at(v, h).vector, truth) for h in GRID[bf16]]
            best.append(min(errors))
            fixed.append(relative(operator.product_at(v, FIXED[bf16]).vector, truth))
            product = operator.matvec(v)
            auto.append(relative(product.vector, truth))
            estimates.append(product.error or 0.0)
    ratio, against = (
        torch.tensor(auto) / torch.tensor(best),
        torch.tensor(auto) / torch.tensor(fixed),
    )
    off = (torch.tensor(estimates) / torch.tensor(auto)).log().abs()
    assert ratio.median() < 1.6 and (ratio < 3).sum() >= 7, ratio
    assert against.median() < 1.2 and (against < 3).all(), against  # h = 5e-3 can be right
    assert (off < math.log(3)).sum() >= 6, off
