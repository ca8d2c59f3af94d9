"""Derivatives that a forward takes itself: of energies, of inputs, of physics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.errors import UnsupportedError
from ds_hessian.operators import Curvature, curvature
from ds_hessian.vectors import random_vector
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import batches, relative

DATA = batches(2)


class Descent(nn.Module):
    """Classes of what a step down an energy has made of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(10, 6), nn.Softplus(), nn.Linear(6, 1))
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        x = x.detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        classes: Tensor = self.head(x - slope)
        return classes


def entropy(net: nn.Module, batch: Any) -> Tensor:
    """A cross entropy."""
    x, y = batch
    return functional.cross_entropy(net(x), y)


def smooth_in_inputs(net: nn.Module, batch: Any) -> Tensor:
    """A cross entropy, and the slope of its sum along the inputs."""
    x = batch[0].detach().clone().requires_grad_(True)
    each = functional.cross_entropy(net(x), batch[1], reduction="none")
    (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    return each.mean() + slope.square().mean()


def flat(net: nn.Module, batch: Any) -> Tensor:
    """The slope of what a net returns, and its square."""
    x = batch[0].detach().clone().requires_grad_(True)
    f = net(x)
    (slope,) = torch.autograd.grad(f.sum(), x, create_graph=True)
    return f.square().mean() + slope.square().mean()


def measured(net: nn.Module, loss: Callable[..., Tensor], name: OperatorName) -> Any:
    """A product of a random vector, beside that vector and the operator."""
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    with backend.measuring(backend.objective(DATA, loss)) as session:
        operator: Curvature = curvature(session, FiniteDifferenceConfig(), name)
        return v, operator.matvec(v), operator


def test_a_model_that_takes_derivatives_has_a_gauss_newton_matrix() -> None:
    """Its forwards alone take them, too."""
    torch.manual_seed(0)
    net = Descent()
    v, product, operator = measured(net, entropy, "ggn")
    truth = ExactGaussNewton(net, "head", entropy, DATA)(v)
    assert operator.outputs == "head: cross entropy"
    assert relative(product.vector, truth) < min(1e-3, 5 * (product.error or 0.0))


@pytest.mark.parametrize("loss", [smooth_in_inputs, flat])
@pytest.mark.parametrize("name", ["ggn", "residual"])
def test_a_derivative_of_the_outputs_is_another_part_of_the_loss(
    loss: Callable[..., Tensor], name: OperatorName
) -> None:
    """Its cotangents at the outputs are none of the loss, which depends on weights past them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 3))
    with pytest.raises(UnsupportedError, match="weights behind them|depends on '0' beside"):
        measured(net, loss, name)
