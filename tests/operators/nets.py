"""Small nets with their fp64 products by double backward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.backends import Session
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.vectors import random_vector

Batch = tuple[Tensor, Tensor]


def batches(count: int = 8) -> list[Batch]:
    """Micro-batches of 16 points of three overlapping kinds in ten dimensions."""
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(3, 10, generator=generator)
    found = []
    for _ in range(count):
        y = torch.randint(3, (16,), generator=generator)
        found.append((kinds[y] + torch.randn(16, 10, generator=generator), y))
    return found


def mlp() -> nn.Module:
    """611 parameters, smooth."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy; in fp64 for an fp64 net, else with fp32 logits."""
    dtype = next(net.parameters()).dtype
    logits = net(batch[0].to(dtype))
    return functional.cross_entropy(logits if dtype == torch.float64 else logits.float(), batch[1])


def train(net: nn.Module, data: list[Batch], steps: int) -> nn.Module:
    """Adam on the given batches and no others: enough steps memorise them."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for i in range(steps):
        optimizer.zero_grad()
        loss_of(net, data[i % len(data)]).backward()
        optimizer.step()
    return net


def drawn(net: nn.Module, count: int) -> Iterator[nn.Module]:
    """Copies of a net whose weights differ by 1e-5: draws of the rounding of its products, which
    the kind of processor draws too.
    """
    for seed in range(count):
        copied, generator = copy.deepcopy(net), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(1 + 1e-5 * torch.randn(p.shape, generator=generator))
        yield copied


class Exact:
    """fp64 products of the mean loss at the net's weights."""

    def __init__(
        self,
        net: nn.Module,
        data: Sequence[Any],
        loss_of: Callable[[nn.Module, Any], Tensor] = loss_of,
    ) -> None:
        self.net = copy.deepcopy(net).double()
        self.parameters = list(self.net.parameters())
        self.loss = torch.stack([loss_of(self.net, b) for b in data]).mean()
        gradient = torch.autograd.grad(self.loss, self.parameters, create_graph=True)
        self.gradient = torch.cat([g.reshape(-1) for g in gradient])

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)`."""
        product = torch.autograd.grad(
            self.gradient @ v.double(), self.parameters, retain_graph=True
        )
        return torch.cat([p.reshape(-1) for p in product])

    def matrix(self) -> Tensor:
        """`(n, n)`, a hundred rows at a time."""
        blocks = []
        for directions in torch.eye(len(self.gradient), dtype=torch.float64).split(100):
            rows = torch.autograd.grad(
                self.gradient, self.parameters, directions, True, is_grads_batched=True
            )
            blocks.append(torch.cat([r.flatten(1) for r in rows], 1))
        return torch.cat(blocks)

    def krylov(self, backend: ModuleBackend, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first Lanczos vectors, fp32, each with its exact product."""
        basis = [random_vector(backend.layout, backend.space, seed=0)]
        for _ in range(count):
            truth = self(basis[-1])
            yield basis[-1], truth
            w = truth.clone()
            for q in (*basis, *basis):
                w -= (q.double() @ w) * q.double()
            basis.append((w / w.norm()).float())


def backend_of(net: nn.Module, bf16: bool = False) -> ModuleBackend:
    """fp32, or bf16 weights and passes with fp32 masters."""
    if not bf16:
        return ModuleBackend(net)
    masters = [p.detach().clone() for p in net.parameters()]
    return ModuleBackend(copy.deepcopy(net).bfloat16(), masters=masters)


def costs(operator: FiniteDifferenceHessian, vectors: Iterable[Tensor]) -> Iterator[float]:
    """Gradients that the product with each of these vectors evaluates."""
    before = operator.cost.gradient_evaluations
    for v in vectors:
        operator.matvec(v)
        yield operator.cost.gradient_evaluations - before
        before = operator.cost.gradient_evaluations


@contextmanager
def measuring(
    backend: ModuleBackend, data: Sequence[Any], loss: Callable[..., Tensor] | None = loss_of
) -> Iterator[Session]:
    """A session on the mean of `loss(module, micro-batch)`."""
    with backend.measuring(backend.objective(data, loss)) as session:
        yield session


def dense(product: Callable[[Tensor], Tensor], n: int) -> Tensor:
    """The matrix `(n, n)` of a product."""
    return torch.stack([product(row) for row in torch.eye(n)])


def preempted(call: int) -> Callable[[nn.Module, Batch], Tensor]:
    """`loss_of`, of which the n-th call fails."""
    calls = itertools.count(1)

    def loss(net: nn.Module, given: Batch) -> Tensor:
        if next(calls) == call:
            raise OSError("preempted")
        return loss_of(net, given)

    return loss


def relative(a: Tensor, b: Tensor) -> float:
    """`|a - b| / |b|`."""
    return float((a.double() - b.double()).norm() / b.double().norm())
