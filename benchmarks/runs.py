"""What trials add to the cost of whole runs: docs/numerics.md.

    python benchmarks/runs.py                  # reporting families, ten minutes on one core
    python benchmarks/runs.py lora --seed 1

A run is the Lanczos run of a spectrum at its defaults, 30 products with a random vector first, on
the families of `benchmarks/families.py`. Prints the gradients of a product beyond the two of its
formula, in the mean of the run and of the families, by arithmetic and number of micro-batches.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import torch
from families import ARITHMETICS, FAMILIES, Problem, problem
from torch import Tensor

from ds_hessian.config import HessianConfig
from ds_hessian.krylov import LanczosState
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.vectors import random_vector

COUNTS = (1, 2, 4, 8, 16)


def extra_of_run(p: Problem) -> float:
    """Extra gradients of a product, in the mean of a run."""
    seeds = itertools.count(1)  # where the Krylov space is exhausted

    def fresh(_: int) -> Tensor:
        return random_vector(p.backend.layout, p.backend.space, seed=next(seeds))

    with p.measuring() as session:
        operator = FiniteDifferenceHessian(session)
        before = operator.cost.gradient_evaluations
        state = LanczosState(operator, p.vectors[0][0], HessianConfig().num_matvecs, fresh)
        while not state.done:
            state.step()
        evaluated = operator.cost.gradient_evaluations - before
    return evaluated / state.products - len(operator.scheme.nodes)


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.families or [n for n, f in FAMILIES.items() if not f.calibration]
    print("| micro-batches | " + " | ".join(map(str, COUNTS)) + " |")
    print("|---" * (len(COUNTS) + 1) + "|")
    for arithmetic in ARITHMETICS:
        problems = [[problem(n, arithmetic, c, args.seed) for c in COUNTS] for n in names]
        extra = np.mean([[extra_of_run(p) for p in row] for row in problems], axis=0)
        print(f"| {arithmetic} | " + " | ".join(f"{e:.2f}" for e in extra) + " |", flush=True)


if __name__ == "__main__":
    main()
