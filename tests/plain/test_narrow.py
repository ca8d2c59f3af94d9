"""Models in fp32, parts of which compute in 16 bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_hessian
from tests.nets import DenseHessian


class Adapted(nn.Module):
    """Adapters in fp32 around frozen layers in 16 bits, as LoRA has them; returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.top = nn.Linear(7, 9), nn.Linear(9, 5)
        self.down, self.up = nn.Linear(7, 3, bias=False), nn.Linear(3, 9, bias=False)
        for frozen in (self.base, self.top):
            frozen.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        own, frozen = self.up.weight.dtype, self.base.weight.dtype
        hidden = self.base(x.to(frozen)).to(own) + self.up(torch.tanh(self.down(x.to(own))))
        return functional.cross_entropy(self.top(torch.tanh(hidden).to(frozen)).to(own), y)


class Rounding(nn.Module):
    """A layer whose results the model itself rounds to 16 bits; returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one, self.two, self.narrow = nn.Linear(7, 9), nn.Linear(9, 5), dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        hidden = torch.tanh(self.one(x))
        if hidden.dtype == torch.float32:
            hidden = hidden.to(self.narrow).float()
        return functional.cross_entropy(self.two(hidden), y)


class Recomputing(Rounding):
    """A model that is recomputed in the backward, in a graph of its own; returns its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        if x.dtype == torch.float64:
            return super().forward(x, y)
        given = x.clone().requires_grad_()
        loss: Tensor = checkpoint(super().forward, given, y, use_reentrant=True)
        return loss


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", [Adapted, Rounding, Recomputing])
def test_errors_are_those_of_16_bits_where_a_part_computes_in_them(
    kind: type[Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    model = kind(dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(6, 7, generator=generator), torch.arange(6) % 5)]
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    hessian = ds_hessian.attach(model, {"progress": False}).use(batches)
    exact = DenseHessian(copy.deepcopy(model), weights, [(x.double(), y) for x, y in batches])
    for precision in ("model", "auto"):
        largest = 1e-3 if kind is Adapted and precision == "auto" else 0.1
        v = hessian.random_vector(seed=5)
        with hessian.measuring(precision=precision) as operator:
            for _ in range(3):
                product = operator.matvec(v)
                right, found = (exact.flat(hessian.gather(u)) for u in (v, product.vector))
                right = exact.matvec(right)
                assert (found - right).norm() / right.norm() < min(5 * product.error, largest)
                v = product.vector / product.norm


class Reporting(Rounding):
    """A model that computes a metric in 16 bits beside its loss."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        logits = self.two(torch.tanh(self.one(x)))
        self.certainty = logits.to(self.narrow).softmax(-1).amax(-1).mean()
        return functional.cross_entropy(logits, y)


def test_values_beside_the_loss_tell_nothing_of_its_rounding() -> None:
    model = Reporting(torch.bfloat16)
    batches = [(torch.randn(6, 7), torch.arange(6) % 5)]
    hessian = ds_hessian.attach(model, {"progress": False}).use(batches)
    with hessian.measuring() as operator:
        error = operator.matvec(hessian.random_vector(seed=5)).error
        assert error is not None and error < 1e-3
