"""Products and Kronecker factors in fp16, whose loss is scaled micro-batch by micro-batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hessian.backends import Passes
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import GaussNewton
from ds_hessian.operators.kronecker import Settings, estimate, find_layers
from ds_hessian.operators.outputs.residual import residual
from ds_hessian.vectors import random_vector
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import batches, loss_of, mlp, train
from tests.plain.test_kronecker import matrices, matrix_of, seen
from tests.tiers import cells

Weighted = tuple[Tensor, Tensor, Tensor]


def weighted(net: nn.Module, entry: Weighted) -> Tensor:
    x, y, factor = entry
    return factor * loss_of(net, (x, y))


def uneven(scale: float) -> list[Weighted]:
    """Micro-batches whose losses differ by 1000, in all times a scale."""
    factors = [torch.tensor(scale * 10.0 ** -(i % 4), dtype=torch.float64) for i in range(8)]
    return [(x, y, factor) for (x, y), factor in zip(batches(), factors, strict=True)]


def under(autocast: bool) -> Any:
    def loss(net: nn.Module, entry: Weighted) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            return weighted(net, entry)

    return loss


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scale", cells([1.0, 1e-6], [1e-6]))
def test_gauss_newton_products_in_fp16_know_their_scale(scale: float, autocast: bool) -> None:
    net, data = train(mlp(), batches(), 40), uneven(scale)
    net = net if autocast else net.half()
    exact = ExactGaussNewton(net, "4", weighted, data)
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    objective = backend.objective(data, under(autocast))
    with backend.measuring(objective, Passes(precision="model")) as session:
        operator = GaussNewton(session)
        assert operator.outputs == "4: cross entropy"
        for _ in range(3):
            truth = exact(v)
            product, form = operator.matvec(v), operator.along(v)
            error = float((product.vector.double() - truth).norm() / truth.norm())
            print(f"error {error:.1e}, estimate {product.error:.1e}")
            assert product.error is not None
            assert error < 3 * product.error and product.error < 0.1
            curvature = float(v.double() @ truth / (v.double() @ v.double()))
            assert abs(form.value - curvature) < max(3 * form.error, 0.01 * curvature)
            v = (truth / truth.norm()).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_noise_of_a_light_pilot_is_not_that_of_all(dtype: torch.dtype) -> None:
    """The stated error of the first product was down to 1/59 of its own."""
    net, data = train(mlp(), batches(), 40).to(dtype), uneven(1.0)[::-1]
    exact, backend = ExactGaussNewton(net, "4", weighted, data), ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    objective = backend.objective(data, weighted)
    with backend.measuring(objective, Passes(precision="model")) as session:
        product, truth = GaussNewton(session).matvec(v), exact(v)
    error = float((product.vector.double() - truth).norm() / truth.norm())
    print(f"error {error:.1e}, estimate {product.error:.1e}")
    assert product.error is not None
    assert error < 5 * product.error and product.error < 0.1


def test_residuals_in_fp16_know_the_scale_of_each_micro_batch() -> None:
    """All had that of the last one of a pass: products were wrong altogether."""
    narrow, found = train(mlp(), batches(), 40).half(), list[Any]()
    data = [(x.half().double(), y, factor) for x, y, factor in uneven(1.0)]
    for net in (narrow, copy.deepcopy(narrow).float()):
        backend = ModuleBackend(net)
        v = random_vector(backend.layout, backend.space, seed=0)
        objective = backend.objective(data, weighted)
        with backend.measuring(objective, Passes(precision="model")) as session:
            found.append(residual(session).matvec(v))
    product, exact = found
    error = float((product.vector - exact.vector).norm() / exact.norm)
    print(f"error {error:.1e}, estimate {product.error:.1e}")
    assert error < 3 * product.error and product.error < 0.1


@pytest.mark.parametrize("draws", cells([0, 64], [0]))
def test_factors_in_fp16_are_of_one_scale(draws: int) -> None:
    net, data = train(mlp(), batches(), 40).half(), uneven(1e-3)
    backend = ModuleBackend(net)
    layers, _ = find_layers(backend, None)
    objective = backend.objective(data, weighted)
    with backend.measuring(objective, Passes(precision="model")) as session:
        settings = Settings(("kfac", "ekfac", "shampoo"), draws=draws)
        found = estimate(session, backend, layers, settings)
    exact = seen(net, data, weighted)
    for f in found:
        assert f.mismatch < 1e-2
        assert f.samples["kfac"] == 128 * max(draws, 1)
        if draws:
            continue
        for kind, matrix in matrices(exact[f.layer.name]).items():
            assert (matrix_of(f.forms[kind]) - matrix).norm() < 0.02 * matrix.norm(), kind
    if draws:  # of the last layer the Fisher matrix is G's block
        gauss_newton = ExactGaussNewton(net, "4", weighted, data)
        block = torch.stack([gauss_newton(e)[-51:-3] for e in torch.eye(607)[-51:-3]])
        k = matrix_of(found[-1].forms["ekfac"])
        assert float(k.trace()) == pytest.approx(float(block.trace()), rel=0.1)


class Scaled(nn.Module):
    """A branch whose outputs are scaled down, as LayerScale does at first: so are its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits = self.head(x + 1e-6 * torch.tanh(self.branch(x)))
        assert isinstance(logits, Tensor)
        return logits


def test_drawn_labels_are_not_lost_in_fp16() -> None:
    """Their cotangents are scaled as the job's are; the labels are those of fp32, but for some
    between which rounding decides.
    """
    torch.manual_seed(0)
    net, data, found = Scaled().half(), uneven(1.0), []
    for each in (net, copy.deepcopy(net).float()):
        backend = ModuleBackend(each)
        layers, _ = find_layers(backend, None)
        objective = backend.objective(data, weighted)
        with backend.measuring(objective, Passes(precision="model")) as session:
            settings = Settings(("kfac", "ekfac", "shampoo"), draws=4)
            found.append(estimate(session, backend, layers, settings))
    for narrow, wide in zip(*found, strict=True):
        for kind in narrow.forms:
            a, b = matrix_of(narrow.forms[kind]), matrix_of(wide.forms[kind])
            assert (a - b).norm() < 0.03 * b.norm(), (narrow.layer.name, kind)
