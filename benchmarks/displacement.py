"""Errors of products for fixed displacements, the automatic one, and the best constant per vector.

    python benchmarks/displacement.py

For small GPTs, untrained, trained and memorised, and the first Lanczos vectors (made with exact
fp64 products): relative error of `H v` in fp32 against an fp64 double backward.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ds_hessian.backends.module import ModuleBackend
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.vectors import random_vector

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, sample, standard_library  # noqa: E402

FIXED = 5e-3  # u^(1/3) for fp32, the published constant
GRID = [10 ** (k / 4) for k in range(-18, 1)]
CONTEXT = 32


def nets(batches: list[list[Tensor]]) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each net; a memorised one has seen nothing but the micro-batches."""
    text, generator = standard_library(), torch.Generator().manual_seed(1)
    for name, steps, memorise in (
        ("untrained", 0, False),
        ("trained", 200, False),
        ("memorised", 400, True),
    ):
        torch.manual_seed(0)
        net = GPT(width=32, layers=2, heads=2, context=CONTEXT, dropout=0.0)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for i in range(steps):
            data = batches[i % len(batches)] if memorise else sample(text, 8, CONTEXT, generator)
            optimizer.zero_grad()
            net(*data).backward()
            optimizer.step()
        yield name, net


class Exact:
    """fp64 products by double backward."""

    def __init__(self, net: nn.Module, batches: list[list[Tensor]]) -> None:
        net = copy.deepcopy(net).double()
        self.parameters = list(net.parameters())
        # The math kernel: the fused attention has no second derivative.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            self.loss = torch.stack([net(*b) for b in batches]).mean()
        self.gradient = torch.autograd.grad(self.loss, self.parameters, create_graph=True)

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)`, fp64."""
        parts = v.double().split([p.numel() for p in self.parameters])
        inner = sum((g.reshape(-1) @ part for g, part in zip(self.gradient, parts, strict=True)))
        product = torch.autograd.grad(inner, self.parameters, retain_graph=True)
        return torch.cat([p.reshape(-1) for p in product])


def compare(net: nn.Module, batches: list[list[Tensor]], vectors: int) -> Iterator[list[float]]:
    """Per vector: error at the fixed h, with auto, at the best h of the grid, the estimate, h."""
    exact = Exact(net, batches)
    backend = ModuleBackend(net, batches, lambda module, batch: module(*batch))
    with backend.measuring():
        auto = FiniteDifferenceHessian(backend)
        constant = {h: FiniteDifferenceHessian(backend, h) for h in (FIXED, *GRID)}
        basis = [random_vector(backend.layout, backend.space, seed=0)]
        for _ in range(vectors):
            v = basis[-1]
            truth = exact(v)

            def error(product: Tensor, truth: Tensor = truth) -> float:
                return float((product.double() - truth).norm() / truth.norm())

            errors = {h: error(o.matvec(v).vector) for h, o in constant.items()}
            product = auto.matvec(v)
            best = min(errors[h] for h in GRID)
            yield [
                errors[FIXED],
                error(product.vector),
                best,
                product.error or 0.0,
                product.displacement,
            ]
            w = truth.clone()
            for q in (*basis, *basis):
                w -= (q.double() @ w) * q.double()
            basis.append((w / w.norm()).float())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--vectors", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    batches = [sample(standard_library(), 2, CONTEXT, generator) for _ in range(8)]
    for name, net in nets(batches):
        loss = torch.stack([net(*b).detach() for b in batches]).mean().item()
        print(f"\n{name}, loss {loss:.3g}\n")
        print(
            f"| vector | h = {FIXED} | auto | best constant | auto / best | estimate / true | h |"
        )
        print("|---|---|---|---|---|---|---|")
        for i, (fixed, auto, best, estimate, h) in enumerate(compare(net, batches, args.vectors)):
            print(
                f"| v{i} | {fixed:.1e} | {auto:.1e} | {best:.1e} | {auto / best:.2f} "
                f"| {estimate / auto:.2f} | {h:.1e} |"
            )


if __name__ == "__main__":
    main()
