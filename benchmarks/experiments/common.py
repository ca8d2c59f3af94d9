"""What the experiments share: models trained alike, exact products, tables, where pictures go."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measuring import ROOT  # noqa: I001  # finds the scripts of examples, and the tests
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_gpt import GPT, sample, standard_library

PICTURES = ROOT / "docs" / "_static" / "paper"
QUIET = {"progress": False, "plot": False}
CONTEXT, SIZE = 64, 4
"""Bytes of a sequence, and sequences of a micro-batch."""
RATE, STEPS = 2e-3, 80
"""Of Adam, which trains on four micro-batches a step."""


def micro_batches(count: int, seed: int, context: int = CONTEXT) -> list[Any]:
    """Random pieces of the standard library's sources."""
    text, generator = standard_library(), torch.Generator().manual_seed(seed)
    return [sample(text, SIZE, context, generator) for _ in range(count)]


def trained(width: int, layers: int, steps: int = STEPS, context: int = CONTEXT) -> GPT:
    """A GPT after so many steps: the same data in the same order for every size."""
    torch.manual_seed(0)
    model = GPT(width, layers, 4, context, 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    data = micro_batches(4 * steps, 1, context)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in data[4 * step :][:4]:
            (model(*batch) / 4).backward()
        optimizer.step()
    return model


def size_of(model: nn.Module) -> int:
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


class Exact:
    """Products of the Hessian of the mean loss in fp64, by double backward."""

    def __init__(self, model: nn.Module, batches: Sequence[Any]) -> None:
        self.model, self.batches = copy.deepcopy(model).double(), batches
        self.parameters = list(self.model.parameters())

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)` fp64."""
        total = torch.zeros(len(v), dtype=torch.float64)
        for batch in self.batches:
            with sdpa_kernel(SDPBackend.MATH):
                loss = self.model(*batch) / len(self.batches)
                gradients = torch.autograd.grad(loss, self.parameters, create_graph=True)
                slope = torch.cat([g.reshape(-1) for g in gradients]) @ v.double()
                parts = torch.autograd.grad(slope, self.parameters)
            total += torch.cat([p.reshape(-1) for p in parts])
        return total

    def lanczos(self, start: Tensor, steps: int) -> tuple[Tensor, list[Tensor]]:
        """T `(steps, steps)` fp64, and the basis, with two sweeps against all of it."""
        basis, columns = [start.double() / start.double().norm()], list[Tensor]()
        for _ in range(steps):
            w = self(basis[-1])
            found = torch.zeros(len(basis), dtype=torch.float64)
            for _ in range(2):
                dots = torch.stack([q @ w for q in basis])
                found += dots
                for q, dot in zip(basis, dots, strict=True):
                    w -= dot * q
            columns.append(torch.cat([found, w.norm().view(1)]))
            basis.append(w / w.norm())
        alphas = torch.stack([c[j] for j, c in enumerate(columns)])
        betas = torch.stack([c[-1] for c in columns])[:-1]
        tridiagonal = torch.diag(alphas) + torch.diag(betas, 1) + torch.diag(betas, -1)
        return tridiagonal, basis[:steps]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
