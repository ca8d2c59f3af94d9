"""Factors that real optimizers keep, beside those of the gradients that they were given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from ds_hessian.errors import ConfigError, UnsupportedError
from ds_hessian.operators.kronecker import KeptFactors
from tests.operators.nets import batches, loss_of, mlp

QUIET = {"progress": False, "plot": False}
DATA = batches(4)
STEPS, DECAY = 5, 0.9

Made = Callable[[Any, list[nn.Parameter]], Any]


def kin() -> Any:
    return pytest.importorskip(
        "pytorch_optimizer", reason="pytorch-optimizer is not installed (extra: dev)"
    )


def trained(make: Callable[[list[nn.Parameter]], Any], dtype: torch.dtype) -> Any:
    """A net after some steps, its optimizer, and the gradients of each weight of two dims."""
    net = mlp().to(dtype)
    optimizer, gradients = make(list(net.parameters())), dict[str, list[Tensor]]()
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, DATA[i % len(DATA)]).backward()
        for name, p in net.named_parameters():
            if p.ndim == 2:
                assert p.grad is not None
                gradients.setdefault(name, []).append(p.grad.double())
        optimizer.step()
    return net, optimizer, gradients


def soap(kin: Any, parameters: list[nn.Parameter], **settings: Any) -> Any:
    return kin.SOAP(parameters, lr=1e-3, shampoo_beta=DECAY, precondition_frequency=2, **settings)


def shampoo(kin: Any, parameters: list[nn.Parameter]) -> Any:
    return kin.Shampoo(parameters, lr=1e-3, matrix_eps=1e-3)


def blocks(kin: Any, parameters: list[nn.Parameter], **settings: Any) -> Any:
    return kin.ScalableShampoo(parameters, lr=1e-3, betas=(0.9, DECAY), matrix_eps=1e-3, **settings)


def averages(gradients: list[Tensor], first: float = 0.0) -> tuple[Tensor, Tensor]:
    """Decaying averages of G G' and G' G from `first` times the identity on, not corrected."""
    left, right = (first * torch.eye(s, dtype=torch.float64) for s in gradients[0].shape)
    for g in gradients:
        left = DECAY * left + (1 - DECAY) * g @ g.T
        right = DECAY * right + (1 - DECAY) * g.T @ g
    return left, right


def sums(gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of G G' and G' G, beside 1e-3 times the identity."""
    left, right = (1e-3 * torch.eye(s, dtype=torch.float64) for s in gradients[0].shape)
    return left + sum(g @ g.T for g in gradients), right + sum(g.T @ g for g in gradients)


READ: dict[str, tuple[Made, Callable[[list[Tensor]], tuple[Tensor, Tensor]], torch.dtype, float]]
READ = {
    "SOAP": (soap, averages, torch.float32, 1e-5),
    # Five sums in bf16.
    "SOAP in bf16": (soap, averages, torch.bfloat16, 2.0**-6),
    "Shampoo": (shampoo, sums, torch.float32, 1e-5),
    "ScalableShampoo": (
        lambda kin, p: blocks(kin, p, shape_interpretation=False),
        lambda gradients: averages(gradients, 1e-3),
        torch.float32,
        1e-5,
    ),
}


@pytest.mark.parametrize("name", READ)
def test_factors_are_those_of_the_gradients_of_all_steps(name: str) -> None:
    make, exact, dtype, limit = READ[name]
    package = kin()
    net, optimizer, gradients = trained(lambda p: make(package, p), dtype)
    hessian: Any = ds_hessian.attach(net, optimizer, config=QUIET).use(DATA, loss_of)
    kept = KeptFactors(optimizer, hessian.backend.weights())
    for weight, seen in gradients.items():
        left, right = exact(seen)
        found = kept(weight)
        assert found is not None and found[0] is not None and found[1] is not None
        k = torch.kron(found[0].double(), found[1].double())
        wanted = torch.kron(left, right) / left.trace()
        assert (k - wanted).norm() < limit * wanted.norm(), weight


def test_the_optimizer_itself_is_an_adapter() -> None:
    package = kin()
    net, optimizer, gradients = trained(lambda p: soap(package, p), torch.float32)
    hessian: Any = ds_hessian.attach(net, optimizer, config=QUIET).use(DATA, loss_of)
    hessian.step = STEPS
    effort = {"basis": 4, "probes": 2, "extremes": 2}
    found = hessian.kronecker(["optimizer"], adapter=optimizer, **effort)

    def by_hand(name: str) -> tuple[Tensor, Tensor]:
        left, right = averages(gradients[name])
        return left, right / left.trace()

    again = hessian.kronecker(["optimizer"], adapter=by_hand, **effort)
    assert len(found.layers) == 3
    assert np.allclose(found.cosines, again.cosines, rtol=1e-3)
    assert np.allclose(found.scales, again.scales, rtol=1e-3)
    assert np.allclose(found.extremes, again.extremes, rtol=1e-2)


@pytest.mark.parametrize(
    ("make", "message"),
    {
        "blocks": (
            lambda kin, p: blocks(kin, p, block_size=10, shape_interpretation=False),
            r"ScalableShampoo has factors of sizes \[\(10, 10\), \(10, 10\), \(10, 10\)",
        ),
        "no factor": (
            lambda kin, p: soap(kin, p, max_precondition_dim=2),
            r"SOAP has factors of sizes \[None, None\]",
        ),
    }.values(),
    ids=["blocks", "no factor"],
)
def test_factors_of_other_things_than_rows_and_columns_are_refused(
    make: Made, message: str
) -> None:
    package = kin()
    net, optimizer, _ = trained(lambda p: make(package, p), torch.float32)
    hessian: Any = ds_hessian.attach(net, optimizer, config=QUIET).use(DATA, loss_of)
    with pytest.raises(UnsupportedError, match=message):
        hessian.kronecker(["optimizer"], adapter=optimizer, layers=["0.weight"])


def test_a_side_that_is_too_large_for_a_factor_has_the_identity() -> None:
    package = kin()
    net, optimizer, gradients = trained(
        lambda p: soap(package, p, max_precondition_dim=16), torch.float32
    )
    hessian: Any = ds_hessian.attach(net, optimizer, config=QUIET).use(DATA, loss_of)
    found = KeptFactors(optimizer, hessian.backend.weights())("0.weight")
    assert found is not None and found[0] is None and found[1] is not None
    wanted = averages(gradients["0.weight"])[1] / 20
    assert (found[1].double() - wanted).norm() < 1e-5 * wanted.norm()
    effort = {"basis": 4, "probes": 2, "extremes": 0}
    record = hessian.kronecker(["optimizer"], ["0.weight"], adapter=optimizer, **effort)
    assert np.isfinite(record.cosines).all()


class Weights(nn.Module):
    """The weights of two dims alone, which is what Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(10, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("Muon", "no Kronecker factors, but momentum_buffer"),
        ("AdamW", "no Kronecker factors, but exp_avg, exp_avg_sq, step"),
    ],
)
def test_optimizers_without_factors_are_refused_by_name(kind: str, has: str) -> None:
    net = Weights()
    optimizer = getattr(torch.optim, kind)(net.parameters())
    hessian: Any = ds_hessian.attach(net, optimizer, config=QUIET).use(DATA, loss_of)
    with pytest.raises(UnsupportedError, match=f"net.0.weight .*: {kind} has no state of this"):
        hessian.kronecker(["optimizer"], adapter=optimizer)
    loss_of(net, DATA[0]).backward()
    optimizer.step()
    with pytest.raises(UnsupportedError, match=f"net.0.weight .*: {kind} has {has}"):
        hessian.kronecker(["optimizer"], adapter=optimizer)


def test_what_is_neither_an_optimizer_nor_a_function_is_refused() -> None:
    hessian: Any = ds_hessian.attach(mlp(), config=QUIET).use(DATA, loss_of)
    with pytest.raises(ConfigError, match="an adapter is a function .*; got dict"):
        hessian.kronecker(["optimizer"], adapter={})


class Conv1D(nn.Module):
    """A linear layer whose weight is stored as `(inputs, outputs)`, as that of transformers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_factors_of_a_square_weight_that_is_stored_transposed_are_not_exchanged() -> None:
    """No size tells which factor is which."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), Conv1D(8), nn.Tanh(), nn.Linear(8, 3))
    gradients = []
    for entry in DATA:
        twin = copy.deepcopy(net)
        loss_of(twin, entry).backward()
        gradients.append(twin[2].weight.grad.double())
    stored = [
        torch.stack([g @ g.T for g in gradients]).mean(0),
        torch.stack([g.T @ g for g in gradients]).mean(0),
    ]
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA, loss_of)
    found = hessian.kronecker(
        ["shampoo", "optimizer"], ["2.weight"], 4, 2, 0, adapter=lambda name: tuple(stored)
    )
    assert found.cosines[0, 1] == pytest.approx(found.cosines[0, 0], rel=1e-4)
