"""Errors of Hessian-vector products against an fp64 double backward: docs/numerics.md's tables.

    python benchmarks/numerics.py            # every net, a few minutes on one core
    python benchmarks/numerics.py gpt        # one architecture

For small nets, untrained, trained and memorised, in fp32 and in bf16 with fp32 masters: the
relative error of `H v` for the first Lanczos vectors (made with exact products) at the constant
displacements in use elsewhere, with "auto", and at the best constant of a grid for each vector; the
error estimate; and the eigenvalues of whole Lanczos runs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.backends.module import ModuleBackend
from ds_hessian.krylov import LanczosRun, lanczos, ritz
from ds_hessian.operators import FiniteDifferenceHessian, Product
from ds_hessian.vectors import random_vector

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, sample, standard_library  # noqa: E402

MICRO_BATCHES, STEPS, CONTEXT = 8, 20, 32
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9}
FIXED = {"fp32": 5e-3, "bf16": 0.2}  # u^(1/3), the published constants
GRID = {
    "fp32": [10 ** (k / 4) for k in range(-18, 3)],
    "bf16": [10 ** (k / 4) for k in range(-14, 7)],
}

Batch = list[Tensor]


@dataclass
class Task:
    """An architecture and where its batches come from."""

    net: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    trained: int
    memorised: int


class Classifier(nn.Module):
    """A net of logits, as one that returns its loss."""

    def __init__(self, logits: nn.Module) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        dtype = next(self.parameters()).dtype
        return functional.cross_entropy(self.logits(x.to(dtype)).float().to(_loss(dtype)), y)


def _loss(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def mlp() -> nn.Module:
    """4,522 parameters."""
    layers = [nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 10)]
    return Classifier(nn.Sequential(nn.Flatten(), *layers))


def convolutional() -> nn.Module:
    """3,034 parameters; smooth activations, so that there is a Hessian."""
    stem = [nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)]
    body = [nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2)]
    return Classifier(nn.Sequential(*stem, *body, nn.Flatten(), nn.Linear(64, 10)))


def gpt() -> nn.Module:
    """45,024 parameters."""
    return GPT(width=32, layers=2, heads=2, context=CONTEXT, dropout=0.0)


def images(generator: torch.Generator) -> Batch:
    """16 noisy 8 x 8 pictures of ten kinds."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    y = torch.randint(10, (16,), generator=generator)
    return [kinds[y] + 1.2 * torch.randn(16, 1, 8, 8, generator=generator), y]


def bytes_of_text(generator: torch.Generator) -> Batch:
    """2 x 32 bytes of Python's standard library."""
    return sample(standard_library(200_000), 2, CONTEXT, generator)


TASKS = {
    "mlp": Task(mlp, images, 150, 600),
    "conv": Task(convolutional, images, 150, 800),
    "gpt": Task(gpt, bytes_of_text, 200, 900),
}


def nets(task: Task, batches: list[Batch]) -> Iterator[tuple[str, nn.Module]]:
    """State and net; a memorised one has seen nothing but the measured batches."""
    for name, steps in (("untrained", 0), ("trained", task.trained), ("memorised", task.memorised)):
        torch.manual_seed(0)
        net, generator = task.net(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for i in range(steps):
            data = batches[i % len(batches)] if name == "memorised" else task.batch(generator)
            optimizer.zero_grad()
            net(*data).backward()
            optimizer.step()
        yield name, net


class Exact:
    """fp64 products by double backward, as a `LinearOperator`."""

    def __init__(self, net: nn.Module, batches: list[Batch], backend: ModuleBackend) -> None:
        self.space = backend.space
        net = copy.deepcopy(net).double()
        self.parameters = list(net.parameters())
        # The math kernel: the fused attention has no second derivative.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self.loss = torch.stack([net(*batch) for batch in batches]).mean()
        self.gradient = torch.autograd.grad(self.loss, self.parameters, create_graph=True)

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)`, fp64."""
        parts = v.double().split([p.numel() for p in self.parameters])
        inner = sum((g.reshape(-1) @ part for g, part in zip(self.gradient, parts, strict=True)))
        product = torch.autograd.grad(inner, self.parameters, retain_graph=True)
        return torch.cat([p.reshape(-1) for p in product])

    def matvec(self, v: Tensor) -> Product:
        """The same rounded to fp32."""
        product = self(v).float()
        return Product(product, float(product.norm() / v.norm()), 0.0, None, None, 1.0, 0.0, 0)


def backend_of(net: nn.Module, batches: list[Batch], compute: str) -> ModuleBackend:
    """The net's function in fp32, or with bf16 weights and fp32 masters."""
    masters = None
    if compute == "bf16":
        masters = [p.detach().clone() for p in net.parameters()]
        net = copy.deepcopy(net).bfloat16()
    call = lambda module, batch: module(*batch)  # noqa: E731
    return ModuleBackend(net, batches, call, ROUNDOFF[compute], masters)


@dataclass
class Case:
    """Figures of one net in one arithmetic; errors are relative, one entry a vector."""

    name: str
    loss: float
    fixed: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    best_h: list[float] = field(default_factory=list)
    estimate: list[float] = field(default_factory=list)
    h: list[float] = field(default_factory=list)
    extra: float = 0.0  # gradients beyond the scheme's own, per product
    curves: list[dict[float, float]] = field(default_factory=list)


def products(
    name: str, net: nn.Module, batches: list[Batch], compute: str, vectors: int, **settings: str
) -> Case:
    """Errors of the first Lanczos vectors."""
    backend = backend_of(net, batches, compute)
    exact = Exact(net, batches, backend)
    case = Case(name, float(exact.loss.detach()))
    with backend.measuring():
        auto = FiniteDifferenceHessian(backend, "auto", **settings)
        basis = [random_vector(backend.layout, backend.space, seed=0)]
        for _ in range(vectors):
            v = basis[-1]
            truth = exact(v)

            def error(product: Tensor, truth: Tensor = truth) -> float:
                return float((product.double() - truth).norm() / truth.norm())

            errors = {
                h: error(auto.product_at(v, h).vector) for h in (FIXED[compute], *GRID[compute])
            }
            spent = auto.cost.gradient_evaluations
            product = auto.matvec(v)
            case.extra += (
                auto.cost.gradient_evaluations - spent - len(auto.scheme.nodes)
            ) / vectors
            best = min(GRID[compute], key=lambda h: errors[h])
            case.curves.append(errors)
            case.fixed.append(errors[FIXED[compute]])
            case.auto.append(error(product.vector))
            case.best.append(errors[best])
            case.best_h.append(best)
            case.estimate.append(product.error or 0.0)
            case.h.append(product.displacement)
            w = truth.clone()
            for q in (*basis, *basis):
                w -= (q.double() @ w) * q.double()
            basis.append((w / w.norm()).float())
    return case
