"""A spectrum over a grid of constant displacements, beside "auto", in fp32 and in bf16 (7.1).

    OMP_NUM_THREADS=1 python benchmarks/experiments/grid.py

One GPT whose weights bf16 represents exactly, the same data and start vector. The reference is the
tridiagonal of as many steps in fp64 by double backward: all differences are those of the products.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from common import PICTURES, QUIET, Exact, micro_batches, size_of, table, trained
from torch import nn

import ds_hessian
from ds_hessian.records import HessianSpectrum
from ds_hessian.show.canvas import new_figure, save_figure, tidy
from ds_hessian.show.style import COLORS, GREY

MATVECS = 12
GRID = {"fp32": (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0), "bf16": (1e-3, 1e-2, 0.1, 1.0, 10.0)}


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's, in fp32."""
    return model(*batch).float()


def main() -> None:
    """Print and draw."""
    PICTURES.mkdir(exist_ok=True)
    model, batches = trained(64, 2), micro_batches(4, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    models = {"fp32": model, "bf16": copy.deepcopy(model).bfloat16()}
    start = ds_hessian.attach(copy.deepcopy(model), config=QUIET).random_vector(seed=0)
    exact = torch.linalg.eigvalsh(Exact(model, batches).lanczos(start, MATVECS)[0])
    largest, smallest = float(exact[-1]), float(exact[0])
    rows: list[list[Any]] = [["fp64, double backward", "", f"{largest:.4f}", f"{smallest:.4f}"]]
    rows[0] += ["", "", ""]
    found: dict[str, dict[str, HessianSpectrum]] = {}
    for dtype, net in models.items():
        hessian = ds_hessian.attach(net, config=QUIET).use(batches, loss_fn)
        found[dtype] = {}
        for h in ("auto", *GRID[dtype]):
            one = hessian.spectrum(displacement=h, precision="model", num_matvecs=MATVECS)
            found[dtype][str(h)] = one
            off = [abs(e.value - x) for e, x in zip(ends(one), (largest, smallest), strict=True)]
            within = [o <= e.error for o, e in zip(off, ends(one), strict=True)]
            rows.append(
                [dtype, h, *ends(one), f"{off[0] / largest:.1e}, {off[1] / -smallest:.1e}"]
                + [f"{np.median(one.nonlinearities):.1e}", "yes" if all(within) else "no"]
            )
            print(*rows[-1], sep=" | ", flush=True)
    print(f"GPT of {size_of(model):,} parameters, {MATVECS} steps\n")
    head = ["", "h", "largest", "smallest", "off by, relative", "nonlinearity", "within the bars"]
    print(table(head, rows))
    draw(found, (largest, smallest))


def ends(spectrum: HessianSpectrum) -> tuple[Any, Any]:
    """The extreme eigenvalues."""
    return spectrum.eigenvalue_max, spectrum.eigenvalue_min


def draw(found: dict[str, dict[str, HessianSpectrum]], exact: tuple[float, float]) -> None:
    """The extreme Ritz values over h; "auto" at the left."""
    figure = new_figure(11.5, 4.2, layout="constrained")
    for axes, (dtype, spectra) in zip(figure.subplots(1, 2), found.items(), strict=True):
        h = list(spectra)
        for row, color in enumerate(COLORS[:2]):
            values = [ends(one)[row] for one in spectra.values()]
            bars = [e.error for e in values]
            y = [e.value for e in values]
            style: dict[str, Any] = {"capsize": 3, "markersize": 4, "linewidth": 1.2}
            label = ("largest", "smallest")[row]
            axes.errorbar(range(len(h)), y, yerr=bars, fmt="o", color=color, label=label, **style)
            axes.axhline(exact[row], color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.set_xticks(range(len(h)), labels=h)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_xlabel(f"displacement h, {dtype} (dashed: fp64)")
        axes.set_ylabel("extreme Ritz values")
        axes.legend(fontsize=8.5, frameon=False)
        tidy(axes)
    save_figure(figure, PICTURES / "grid.png")


if __name__ == "__main__":
    main()
