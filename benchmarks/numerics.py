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

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.krylov import LanczosRun, lanczos, ritz
from ds_hessian.operators import FiniteDifferenceHessian, LinearOperator, Product
from ds_hessian.vectors import random_vector

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, sample, standard_library  # noqa: E402

MICRO_BATCHES, STEPS, CONTEXT = 16, 20, 16
COMPUTES = ("fp32", "bf16")
FIXED = {"fp32": 5e-3, "bf16": 0.2}  # u^(1/3), the published constants
GRID = {
    "fp32": [10 ** (k / 3) for k in range(-12, 1)],
    "bf16": [10 ** (k / 3) for k in range(-8, 3)],
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
    """4,546 parameters."""
    layers = [nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 10)]
    return Classifier(nn.Sequential(nn.Flatten(), *layers))


def convolutional() -> nn.Module:
    """1,930 parameters; smooth activations, so that there is a Hessian."""
    stem = [nn.Conv2d(1, 8, 3, padding=1), nn.SiLU(), nn.AvgPool2d(2)]
    body = [nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.AvgPool2d(2)]
    return Classifier(nn.Sequential(*stem, *body, nn.Flatten(), nn.Linear(64, 10)))


def gpt() -> nn.Module:
    """27,168 parameters."""
    return GPT(width=24, layers=2, heads=2, context=CONTEXT, dropout=0.0)


def images(generator: torch.Generator) -> Batch:
    """8 noisy 8 x 8 pictures of ten kinds."""
    kinds = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    y = torch.randint(10, (8,), generator=generator)
    return [kinds[y] + 1.2 * torch.randn(8, 1, 8, 8, generator=generator), y]


def bytes_of_text(generator: torch.Generator) -> Batch:
    """2 x 16 bytes of Python's standard library."""
    return sample(standard_library(200_000), 2, CONTEXT, generator)


TASKS = {
    "mlp": Task(mlp, images, 150, 600),
    "conv": Task(convolutional, images, 150, 1600),
    "gpt": Task(gpt, bytes_of_text, 200, 1600),
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

    def krylov(self, backend: ModuleBackend, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The first Lanczos vectors, fp32, each with its product."""
        basis = [random_vector(backend.layout, backend.space, seed=0)]
        for _ in range(count):
            truth = self(basis[-1])
            yield basis[-1], truth
            w = truth.clone()
            for q in (*basis, *basis):
                w -= (q.double() @ w) * q.double()
            basis.append((w / w.norm()).float())

    def matvec(self, v: Tensor) -> Product:
        """The same rounded to fp32."""
        product = self(v).float()
        return Product(product, float(product.norm() / v.norm()), 0.0, None, None, 1.0, 0.0, 0)


def backend_of(net: nn.Module, compute: str) -> ModuleBackend:
    """The net's function in fp32, or with bf16 weights and fp32 masters."""
    masters = None
    if compute == "bf16":
        masters = [p.detach().clone() for p in net.parameters()]
        net = copy.deepcopy(net).bfloat16()
    return ModuleBackend(net, masters=masters)


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


def products(
    name: str,
    exact: Exact,
    backend: ModuleBackend,
    batches: list[Batch],
    compute: str,
    vectors: int,
) -> Case:
    """Errors of the first Lanczos vectors."""
    case = Case(name, float(exact.loss.detach()))
    with backend.measuring(backend.objective(batches)) as session:
        auto = FiniteDifferenceHessian(session)
        for v, truth in exact.krylov(backend, vectors):

            def error(product: Tensor, truth: Tensor = truth) -> float:
                return float((product.double() - truth).norm() / truth.norm())

            errors = {
                h: error(auto.product_at(v, h).vector) for h in (FIXED[compute], *GRID[compute])
            }
            product = auto.matvec(v)
            best = min(GRID[compute], key=lambda h: errors[h])
            case.fixed.append(errors[FIXED[compute]])
            case.auto.append(error(product.vector))
            case.best.append(errors[best])
            case.best_h.append(best)
            case.estimate.append(product.error or 0.0)
            case.h.append(product.displacement)
    return case


def spectrum(backend: ModuleBackend, operator: LinearOperator) -> LanczosRun:
    """A Lanczos run of 20 steps from one random vector."""
    start = random_vector(backend.layout, backend.space, seed=0)
    return lanczos(
        operator, start, STEPS, lambda k: random_vector(backend.layout, backend.space, k)
    )


def eigenvalues(
    name: str, exact: Exact, backend: ModuleBackend, batches: list[Batch], fixed: float
) -> tuple[list[str], float]:
    """Three largest and the smallest Ritz value: exact, automatic and fixed displacement.

    Also the gradients that an automatic product cost beyond two.
    """
    rows = []
    with backend.measuring(backend.objective(batches)) as session:
        auto = FiniteDifferenceHessian(session)
        operators: dict[str, LinearOperator] = {
            "exact": exact,
            "auto": auto,
            f"h = {fixed:g}": Fixed(FiniteDifferenceHessian(session, fixed)),
        }
        for kind, operator in operators.items():
            pairs = ritz(spectrum(backend, operator))
            shown = [f"{pairs.values[i]:.4g} ± {pairs.errors[i]:.1g}" for i in (-1, -2, -3, 0)]
            if kind != "auto":
                shown = [text.split(" ")[0] for text in shown]
            rows.append(f"| {name} | {kind} | {' | '.join(shown)} |")
    extra = auto.cost.gradient_evaluations / auto.cost.products - 2
    return [rows[0], f"{rows[1]} {extra:.2f} |", *rows[2:]], extra


class Fixed:
    """Bare products at one displacement."""

    def __init__(self, operator: FiniteDifferenceHessian) -> None:
        self.operator, self.space = operator, operator.space
        self.h = float(operator.displacement)

    def matvec(self, v: Tensor) -> Product:
        """Without trials."""
        return self.operator.product_at(v, self.h)


def row(case: Case) -> str:
    """One line of the first table: the fixed, best and automatic errors, and the estimates."""
    ratio = [a / b for a, b in zip(case.auto, case.best, strict=True)]
    estimate = [e / a for e, a in zip(case.estimate, case.auto, strict=True)]
    cells = [
        f"{min(case.fixed):.0e} - {max(case.fixed):.0e}",
        f"{min(case.best):.0e} - {max(case.best):.0e}",
        f"{min(case.auto):.0e} - {max(case.auto):.0e}",
        " ".join(f"{x:.1f}" for x in ratio),
        " ".join(f"{x:.1f}" for x in estimate),
    ]
    return f"| {case.name} | {case.loss:.2g} | {' | '.join(cells)} |"


def summary(cases: list[Case]) -> str:
    """How often the aims are met."""
    ratio = np.array([a / b for c in cases for a, b in zip(c.auto, c.best, strict=True)])
    estimate = np.array([e / a for c in cases for e, a in zip(c.estimate, c.auto, strict=True)])
    fixed = np.array([a / f for c in cases for a, f in zip(c.auto, c.fixed, strict=True)])
    nets = [max(c.auto) / max(c.fixed) for c in cases]
    within = (estimate > 1 / 3) & (estimate < 3)
    return (
        f"{len(ratio)} products. Error within 2x of the best constant's: "
        f"{np.mean(ratio <= 2):.0%}; "
        f"within 3x: {np.mean(ratio <= 3):.0%}; worst {ratio.max():.1f}x. "
        f"Of the fixed constant's: median {np.median(fixed):.2f}, above it in "
        f"{np.mean(fixed > 1):.0%}, worst {fixed.max():.1f}x; a net's largest error is at most "
        f"{max(nets):.2f} of its largest with the constant. "
        f"Estimate within 3x of the error: {np.mean(within):.0%}."
    )


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--vectors", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases, values, extra = list[Case](), list[str](), list[float]()
    print(
        "| net | loss | fixed | best | auto | auto / best | estimate / error |\n" + "|---" * 7 + "|"
    )
    for task_name in args.tasks:
        task, generator = TASKS[task_name], torch.Generator().manual_seed(0)
        batches = [task.batch(generator) for _ in range(MICRO_BATCHES)]
        for state, net in nets(task, batches):
            for compute in COMPUTES:
                name = f"{task_name}, {state}, {compute}"
                backend = backend_of(net, compute)
                exact = Exact(net, batches, backend)
                cases.append(products(name, exact, backend, batches, compute, args.vectors))
                print(row(cases[-1]), flush=True)
                rows, more = eigenvalues(name, exact, backend, batches, FIXED[compute])
                values += rows
                extra.append(more)
    print(f"\n{summary(cases)}\nExtra gradients: {np.mean(extra):.2f} a product.\n")
    print(
        "| net | displacement | largest | second | third | smallest | extra |\n" + "|---" * 7 + "|"
    )
    print("\n".join(values))


if __name__ == "__main__":
    main()
