"""What the step control takes for granted, measured: docs/numerics.md's table of noise and bend.

    python benchmarks/noise_and_bend.py          # every net of numerics.py, about 40 minutes
    python benchmarks/noise_and_bend.py mlp

For the first Krylov vectors of each net: products of one micro-batch (the pilot) and of all of them
on a fine grid of displacements, their nonlinearity ratios, and the errors against an fp64 double
backward. Prints mean and standard deviation of the logarithm of each figure that
`belief.py` and `priors.py` in `ds_hessian/operators/displacement/` have as a constant.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from numerics import COMPUTES, MICRO_BATCHES, TASKS, Batch, Exact, backend_of, nets
from numpy.typing import NDArray
from torch import nn

from ds_hessian.backends import Session

Grid = NDArray[np.float64]
GRID = {
    "fp32": 10 ** (np.arange(-33, 3) / 7),
    "bf16": 10 ** (np.arange(-19, 7) / 7),
}
SEEN = 0.15
"""Largest error at which the truncation error is taken for that of small h."""


@dataclass
class Curve:
    """Of one vector, over the displacements: products, nonlinearity ratios, relative errors."""

    products: torch.Tensor
    ratio: Grid
    error: Grid

    def size(self, i: int) -> float:
        """|D|."""
        return float(self.products[i].norm())

    def change(self, i: int, j: int) -> float:
        """|D - D'|, relative."""
        return float((self.products[i] - self.products[j]).norm()) / self.size(j)


def curves(
    session: Session, v: torch.Tensor, truth: torch.Tensor, grid: Grid
) -> tuple[Curve, Curve]:
    """Of the first micro-batch, whose errors are not known, and of all."""
    parts = (range(1), range(1, MICRO_BATCHES))

    def gradients(h: float) -> list[torch.Tensor]:
        session.displace(v, h)
        total, found = session.space.zeros(), []
        for part in parts:
            session.add_gradient(total, part)
            found.append(total.double())
        return found

    middle = gradients(0.0)
    assert session.gradient_scale is not None
    scale = session.gradient_scale * MICRO_BATCHES
    products: tuple[list[torch.Tensor], ...] = ([], [])
    ratios: tuple[list[float], ...] = ([], [])
    for h in grid:
        sides = gradients(h), gradients(-h)
        for k, count in enumerate((1, MICRO_BATCHES)):
            plus, minus = sides[0][k], sides[1][k]
            difference = plus - minus
            products[k].append(difference * scale / (2 * h * count))
            ratios[k].append(float((plus + minus - 2 * middle[k]).norm() / difference.norm()))
    errors = [float((d - truth).norm() / truth.norm()) for d in products[1]]
    pilot, everything = (
        Curve(torch.stack(products[k]), np.array(ratios[k]), np.array(errors)) for k in range(2)
    )
    return pilot, everything


def figures(pilot: Curve, everything: Curve, grid: Grid) -> dict[str, float]:
    """Logarithms of what one vector tells; what does not show is left out."""
    best = int(everything.error.argmin())
    size, size_of_pilot = everything.size(best), pilot.size(best)
    found = {"|Hv| of all / of the pilot": math.log(size / size_of_pilot)}
    noisy = np.flatnonzero((everything.error < 0.7) & (grid < grid[best] / 2.5))
    if len(noisy):
        i = noisy[0]
        noise = everything.error[i] * grid[i] * size
        heard = [c.ratio[i] * grid[i] * c.size(i) / math.sqrt(3) for c in (pilot, everything)]
        found |= {
            "noise": math.log(noise),
            "noise by the ratio / true": math.log(heard[1] / noise),
            "noise of all / of the pilot": math.log(heard[1] / heard[0]),
        }
    seen = np.flatnonzero(
        (everything.error < SEEN)
        & (everything.error > 4 * everything.error[best])
        & (grid > 2.2 * grid[best])
    )
    if len(seen):
        i = seen[min(1, len(seen) - 1)]
        truncation = everything.error[i] / grid[i] ** 2
        below = max(i - 3, 0)
        of_pilot = pilot.change(i, below) / (grid[i] ** 2 - grid[below] ** 2)
        bend, bend_of_pilot = everything.ratio[i] / grid[i], pilot.ratio[i] / grid[i]
        mixed = (bend**2 + bend_of_pilot**2) / 2
        kappa = of_pilot / bend_of_pilot**2
        found |= {
            "bend": math.log(bend),
            "bend of all / of the pilot": math.log(bend / bend_of_pilot),
            "kappa of the pilot": math.log(kappa),
            "kappa of all": math.log(truncation / mixed),
            "kappa of all / of the pilot": math.log(truncation / mixed / kappa),
        }
    return found


def tell(
    net: nn.Module, batches: list[Batch], compute: str, vectors: int
) -> dict[str, list[float]]:
    """The figures of a net's first Krylov vectors, and how two of them change between vectors."""
    told: dict[str, list[float]] = defaultdict(list)
    backend, last = backend_of(net, compute), dict[str, float]()
    exact = Exact(net, batches, backend)
    with backend.measuring(backend.objective(batches)) as session:
        for number, (v, truth) in enumerate(exact.krylov(backend, vectors)):
            found = figures(*curves(session, v, truth, GRID[compute]), GRID[compute])
            for kind in ("noise", "bend"):
                value = found.pop(kind, math.nan)
                change = value - last.get(kind, math.nan)
                if math.isfinite(change) and number > 1:
                    found[f"{kind}, from vector to vector"] = change
                last[kind] = value
            for kind, value in found.items():
                told[kind].append(value)
    return told


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--vectors", type=int, default=14)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, list[float]] = defaultdict(list)
    for name in args.tasks:
        generator = torch.Generator().manual_seed(0)
        batches = [TASKS[name].batch(generator) for _ in range(MICRO_BATCHES)]
        for _, net in nets(TASKS[name], batches):
            for compute in COMPUTES:
                for kind, values in tell(net, batches, compute, args.vectors).items():
                    table[kind] += values
    print("| ln of | mean | standard deviation | 5 % | 95 % | vectors |\n" + "|---" * 6 + "|")
    for kind, values in table.items():
        low, high = np.percentile(values, (5, 95))
        cells = [np.mean(values), np.std(values), low, high]
        print(f"| {kind} | {' | '.join(f'{x:.2f}' for x in cells)} | {len(values)} |")


if __name__ == "__main__":
    main()
