"""Analyses from end to end against dense fp64 Hessians: whether what is told holds the truth.

    python benchmarks/bars.py                           # all families, fp32, 1 and 8 micro-batches
    python benchmarks/bars.py hot gru --arithmetic bf16

The families of benchmarks/families.py and benchmarks/attack.py of at most 700 parameters, on the
plain torch host. Of each: both ends of a spectrum of 20 products, three eigenpairs and the
sharpness (whether *some* eigenvalue is within the bar), a trace of 20 probes (whether it is
within the bound), and a damped solve whose right-hand side is the gradient (whether the
solution is within its error).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from attack import ATTACK
from families import ARITHMETICS, FAMILIES, Problem, problem
from torch import Tensor

from ds_hessian.config import HessianConfig
from ds_hessian.errors import NumericsError
from ds_hessian.hessian import Hessian

LARGEST = 700
"""Parameters of a net whose eigenvalues are found in a second."""

ROUNDING = 1e-6
"""Of fp32 vectors, relative to the largest eigenvalue; bars count from there."""

Told = tuple[str, float, float]
"""What was told, its error, and its bar."""


def told(p: Problem, arithmetic: str) -> Iterator[Told]:
    """Each figure of the analyses of one problem."""
    h = p.dense()
    eigenvalues = torch.linalg.eigvalsh(h).numpy()
    largest = float(np.abs(eigenvalues).max())
    if largest == 0:
        return
    precision = "fp32" if arithmetic == "fp32 passes" else "model"
    settings = {"progress": False, "plot": False, "finite_difference": {"precision": precision}}
    config = HessianConfig.model_validate(settings)
    hessian = Hessian(p.backend, config).use(p.batches, lambda module, batch: module(*batch))

    def near(what: str, value: float, error: float) -> Told:
        return what, float(np.abs(eigenvalues - value).min()), error + ROUNDING * largest

    n = len(eigenvalues)
    spectrum = hessian.spectrum(num_matvecs=min(20, n))
    for end in (spectrum.eigenvalue_max, spectrum.eigenvalue_min):
        yield near("ends of the spectrum", end.value, end.error)
    pairs = hessian.eigenpairs(min(3, n), max_matvecs=60)
    for value, error in zip(pairs.values, pairs.errors, strict=True):
        yield near("eigenpairs", value, error)
    trace = hessian.trace("hutchinson", num_matvecs=20)
    yield "trace", abs(trace.value - eigenvalues.sum()), trace.bound + ROUNDING * largest
    if not p.alone:
        return
    sharpness = hessian.sharpness(preconditioned=False)
    yield near("sharpness", sharpness.eigenvalue_max.value, sharpness.eigenvalue_max.error)
    yield solved(hessian, h, p.alone[0], 0.5 * largest + max(0.0, -float(eigenvalues[0])))


def solved(hessian: Hessian, h: Tensor, b: Tensor, damping: float) -> Told:
    """The error of a solution of (H + damping) x = b."""
    found = hessian.solve(b, [damping], method="minres", num_matvecs=25)
    exact = torch.linalg.solve(h + damping * torch.eye(len(h)).double(), b.double())
    error = float((found.x[0].double() - exact).norm())
    return "solve", error, float(found.errors[0]) + ROUNDING * float(exact.norm())


def main() -> None:
    """Print what is outside of its bar, and the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--arithmetic", nargs="*", default=["fp32"], choices=ARITHMETICS)
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    FAMILIES.update(ATTACK)
    found = defaultdict[tuple[str, str], list[float]](list)
    for name in args.families or list(FAMILIES):
        for arithmetic in args.arithmetic:
            for count in args.counts:
                p = problem(name, arithmetic, count, args.seed)
                if p.backend.space.n > LARGEST:
                    continue
                try:
                    for what, error, bar in told(p, arithmetic):
                        found[what, arithmetic].append(error / bar)
                        if error > bar:
                            print(f"{name}, {arithmetic}, {count}: {what} {error:.2e} > {bar:.2e}")
                except NumericsError as error:
                    print(f"{name}, {arithmetic}, {count}: {error}")
    print("\n| | cases | within the bar | within three |\n|---|---|---|---|")
    for (what, arithmetic), ratios in found.items():
        shares = [f"{np.mean(np.array(ratios) <= limit):.1%}" for limit in (1, 3)]
        print(f"| {what}, {arithmetic} | {len(ratios)} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
