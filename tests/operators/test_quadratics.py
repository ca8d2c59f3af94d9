"""Losses without a third derivative: all of the error is rounding, of the weights for the most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.operators.displacement.line import Line
from ds_hessian.vectors import random_vector
from tests.operators.nets import relative
from tests.tiers import cells


class Quadratic(nn.Module):
    """A loss of the weights `(n,)` alone."""

    def __init__(self, n: int, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.loss = nn.Parameter(torch.randn(n)), loss


def scales(n: int) -> Tensor:
    """`(n,)`, over three decades."""
    return torch.logspace(-3, 0, n)


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "identity": (lambda w: w.square().sum() / 2, lambda v: v),
    "far from its minimum": (lambda w: (w - 100).square().sum() / 2, lambda v: v),
    "weight decay": (lambda w: 1e-4 * w.square().sum() / 2, lambda v: 1e-4 * v),
    "scales": (lambda w: (scales(len(w)) * w.square()).sum() / 2, lambda v: scales(len(v)) * v),
}


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("n", cells([10, 1000], [10]))
@pytest.mark.parametrize("name", LOSSES)
def test_a_quadratic_is_exact_to_its_rounding(name: str, n: int, count: int) -> None:
    """Steps are long: the rounding of the weights, which all micro-batches share, is seen."""
    loss, hessian = LOSSES[name]
    backend, data = ModuleBackend(Quadratic(n, loss)), [torch.zeros(1)] * count
    objective = backend.objective(data, lambda net, _: net.loss(net.weight))
    with backend.measuring(objective) as session:
        operator = FiniteDifferenceHessian(session)
        for seed in range(3):
            v = random_vector(backend.layout, backend.space, seed=seed)
            product, truth = operator.matvec(v), hessian(v.double())
            error = relative(product.vector, truth)
            assert error < (2e-5 if name == "far from its minimum" else 1e-6), seed
            assert product.error is not None and product.error > error / 5, (product.error, error)


def flat(net: nn.Module) -> Tensor:
    """All weights."""
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_the_rounding_of_a_step_is_in_the_second_difference() -> None:
    """A step of 1.3 units in the last place: from w, one to either side, which is 23 % less."""
    net = nn.Linear(4, 2, bias=False)
    nn.init.constant_(net.weight, 1.5)
    backend, unit = ModuleBackend(net), 2.0**-23
    objective = backend.objective([torch.zeros(1)], lambda net, _: net.weight.square().sum())
    with backend.measuring(objective) as session:
        w, line = flat(net), Line(session, torch.ones(8), reach=1.0)
        line.move(1.3 * unit, inner=True)
        assert torch.equal(flat(net), w + unit)
        line.move(-1.3 * unit, inner=True)  # 2.6 units from there
        assert torch.equal(flat(net), w - 2 * unit)
        line.move(1.3 * unit, inner=True)
        assert torch.equal(flat(net), w + unit)
        line.move(0.0, inner=True)
        assert torch.equal(flat(net), w)
        far = Line(session, torch.ones(8), reach=unit)  # where rounding is that of the step
        for sign in (1, -1):
            far.move(sign * 1.3 * unit, inner=True)
            assert torch.equal(flat(net), w + sign * unit)
