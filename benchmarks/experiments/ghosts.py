"""Theorem 4.1: ghosts, their splitting, and what delocalised eigenvectors do to rounding.

    OMP_NUM_THREADS=1 python benchmarks/experiments/ghosts.py

First matrices of a known spectrum, whose products have independent errors of a given size: at which
step Lanczos without reorthogonalisation finds a second copy of the largest eigenvalue, how many
copies there are in the end, and how far the settled ones lie apart. Then a GPT in fp32, against
Lanczos in fp64 on double backward: ghosts, participation of eigenvectors, and the part of
a product's error that enters an eigenvalue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import PICTURES, QUIET, Exact, micro_batches, size_of, table, trained
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal

import ds_hessian
from ds_hessian.krylov import LanczosOptions, lanczos
from ds_hessian.show.canvas import new_figure, save_figure, tidy
from ds_hessian.show.style import COLORS
from tests.krylov.matrices import Matrix

Array = NDArray[np.float64]

VALUES = np.r_[np.linspace(0, 1, 396), 10.0, 20.0, 50.0, -5.0]
NOISES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
STEPS, SEEDS = (50, 100, 200), 4
NEAR = 0.05
"""Ritz values within this share of an eigenvalue are its copies: the next one is 60 % below."""
SETTLED = 1e-3
"""Residual, as a share of the eigenvalue, below which a copy has converged: where noise leaves it,
independently of further steps."""


def copies(alphas: Array, betas: Array, steps: int, value: float) -> Array:
    """The settled Ritz values near `value` after so many steps."""
    values, vectors = eigh_tridiagonal(alphas[:steps], betas[: steps - 1])
    residuals = abs(betas[steps - 1] * vectors[-1])
    near = (abs(values - value) < NEAR * value) & (residuals < SETTLED * value)
    return np.asarray(values[near])


def first_ghost(alphas: Array, betas: Array, value: float) -> int | None:
    """The step at which a second copy has settled."""
    for steps in range(2, len(alphas) + 1):
        if len(copies(alphas, betas, steps, value)) > 1:
            return steps
    return None


def matrices(mode: Any) -> tuple[list[list[Any]], list[Array]]:
    """A row for each size of errors; the splitting after STEPS, in units of the eigenvalue."""
    rows, curves, top = [], [], float(VALUES.max())
    for noise in NOISES:
        starts, counts, shifts = [], [], []
        splittings: list[list[float]] = [[] for _ in STEPS]
        for seed in range(SEEDS):
            operator = Matrix.of(VALUES, noise, seed, basis=seed)
            fresh = operator.fresh(seed)
            run = lanczos(operator, fresh(0), STEPS[-1], fresh, None, LanczosOptions(mode))
            starts.append(first_ghost(run.alphas, run.betas, top))
            for place, steps in zip(splittings, STEPS, strict=True):
                found = copies(run.alphas, run.betas, steps, top)
                if len(found) > 1:
                    place.append(float(found.std()) / top)
            counts.append(len(found))
            shifts.append(abs(found - top).max(initial=0) / top)
        split = np.array([np.mean(place) if place else np.nan for place in splittings])
        curves.append(split)
        seen = [s for s in starts if s is not None]
        rows.append(
            [f"{noise:g}", f"{np.mean(seen):.0f}" if seen else "never", f"{np.mean(counts):.1f}"]
            + ["" if np.isnan(s) else f"{s:.1e}" for s in split]
            + [f"{np.mean(shifts):.1e}", f"{noise / len(VALUES) ** 0.5:.1e}"]
        )
    return rows, curves


def draw(noises: Sequence[float], curves: list[Array], delocalised: list[list[float]]) -> None:
    """Splitting over steps, and the participation of Krylov vectors."""
    figure = new_figure(11.5, 4.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (noise, curve) in enumerate(zip(noises, curves, strict=True)):
        label = f"errors of {noise:g}" if noise else "exact products, fp32 vectors"
        left.plot(STEPS, curve, "o-", color=COLORS[i], label=label, linewidth=1.2, markersize=4)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xticks(STEPS, labels=[str(step) for step in STEPS])
    left.minorticks_off()
    left.set_xlabel("Lanczos steps, no reorthogonalisation")
    left.set_ylabel("splitting of copies / eigenvalue")
    names = ("Krylov vectors", "eigenvectors")
    for i, (name, ratios) in enumerate(zip(names, delocalised, strict=True)):
        x = range(1, len(ratios) + 1)
        right.plot(x, ratios, "o-", color=COLORS[i], label=name, linewidth=1.2, markersize=4)
    right.set_yscale("log")
    right.set_xlabel("number of the vector")
    right.set_ylabel("1 / IPR, as a share of n")
    right.axhline(1 / 3, color=COLORS[2], linewidth=0.9, label="random vector")
    for axes in (left, right):
        axes.legend(fontsize=8.5, frameon=False)
        tidy(axes)
    save_figure(figure, PICTURES / "ghosts.png")


def gpt() -> tuple[str, list[list[float]]]:
    """Tables of a GPT."""
    model, batches = trained(32, 2), micro_batches(2, 2)
    hessian, exact = ds_hessian.attach(model, config=QUIET).use(batches), Exact(model, batches)
    n = size_of(model)
    tridiagonal, basis = exact.lanczos(hessian.random_vector(seed=0), 30)
    top = float(torch.linalg.eigvalsh(tridiagonal)[-1])
    rows = []
    for name, settings in {
        "full, auto": {},
        "none, auto": {"mode": "none"},
        "none, h = 1e-4": {"mode": "none", "displacement": 1e-4},
        "none, h = 0.3": {"mode": "none", "displacement": 0.3},
    }.items():
        found = hessian.spectrum(num_matvecs=40, **settings)
        alphas, betas = found.alphas[0], found.betas[0]
        same = copies(alphas, betas, len(alphas), top)
        rows.append(
            [name, first_ghost(alphas, betas, top) or "never", len(same)]
            + [f"{same.std() / top:.1e}" if len(same) > 1 else ""]
            + [found.eigenvalue_max, f"{np.median(found.product_errors / top):.1e}"]
        )
        print(*rows[-1], sep=" | ", flush=True)
    head = ["", "first ghost at step", "copies", "splitting", "largest", "error of a product"]
    text = f"GPT of {n:,} parameters; largest eigenvalue in fp64: {top:.5f}\n\n{table(head, rows)}"

    pairs = hessian.eigenpairs(8, "LM")
    rows, share = [], []
    for i, y in enumerate(pairs.vectors):
        product = hessian.matvec(y).vector.double()
        error, ratio = product - exact(y), float(pairs.participation[i])
        along = abs(float(y.double() @ error)) / float(error.norm())
        share.append(1 / ratio / n)
        rows.append(
            [f"{pairs.values[i]:.3f}", f"{ratio:.2e}", f"{1 / ratio:,.0f}", f"{share[-1]:.3f}"]
            + [f"{float(error.norm()) / abs(pairs.values[i]):.1e}", f"{along:.4f}"]
            + [f"{n**-0.5:.4f}", f"{ratio**0.5:.4f}"]
        )
    head = ["eigenvalue", "IPR", "1 / IPR", "of n", "error of Hy, relative", "along y"]
    head += ["1 / sqrt(n)", "sqrt(IPR)"]
    krylov = [1 / float((q**4).sum()) / n for q in basis]
    return f"{text}\n\n{table(head, rows)}", [krylov, share]


def main() -> None:
    """Print and draw."""
    PICTURES.mkdir(exist_ok=True)
    rows, curves = matrices("none")
    head = ["error of a product", "first ghost at step", "copies"]
    head += [f"splitting, {steps} steps" for steps in STEPS]
    head += ["farthest from the eigenvalue", "error / sqrt(n)"]
    print(f"{table(head, rows)}\n", flush=True)
    full = [row[2] for row in matrices("full")[0]]
    print(f"copies with full reorthogonalisation: {', '.join(full)}\n", flush=True)
    text, delocalised = gpt()
    draw(NOISES, curves, delocalised)
    print(text, flush=True)


if __name__ == "__main__":
    main()
