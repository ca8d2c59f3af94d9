"""Curvature against scale: figure 1's rough function, and a GPT.

    OMP_NUM_THREADS=1 python benchmarks/experiments/scale.py

The function is `sum_i a_i w_i^2 / 2 + cos(100 w_i) / 100`, with a_i from 0.1 to 1: its curvature is
a_i - 100 cos(100 w_i) at a point, and a_i from afar. Prints what products and second differences of
the loss find of it at each h beside the closed forms, and where optimizers come whose rates are
made for the one curvature or the other; then draws the sweep of a GPT.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from common import PICTURES, QUIET, micro_batches, size_of, table, trained
from torch import Tensor, nn

import ds_hessian
from ds_hessian.show.canvas import new_figure, save_figure, tidy
from ds_hessian.show.style import COLORS, GREY

ROUGH = 100.0
"""The frequency; the amplitude is its inverse, so slopes of both parts are of one size."""
DIMENSION, ITERATIONS, EARLY, LAST = 100, 1000, 100, 100
RATES = 10.0 ** np.arange(-4, 0.1, 0.25)


class Rough(nn.Module):
    """The function; `forward` returns its value."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())
        self.a = torch.logspace(-1, 0, len(start)) if len(start) > 1 else torch.ones(1)

    def forward(self, _: Tensor) -> Tensor:
        """Sum over the coordinates."""
        return (self.a * self.w**2 / 2 + torch.cos(ROUGH * self.w) / ROUGH).sum()

    def lowest(self) -> float:
        """The smallest value, near |w_i| = pi / 100."""
        w = torch.linspace(0, 2 * math.pi / ROUGH, 10_001)
        return float((self.a[:, None] * w**2 / 2 + torch.cos(ROUGH * w) / ROUGH).amin(1).sum())


def averages() -> tuple[str, tuple[np.ndarray, ...]]:
    """Curvature at 0 of one coordinate, averaged over [-h, h], and its closed forms."""
    h = np.geomspace(1e-4, 10, 201)
    net = Rough(torch.zeros(1))
    found = ds_hessian.attach(net, config=QUIET).use([torch.zeros(1)])
    sweep = found.displacement_sweep({"v": torch.ones(1)}, displacements=h.tolist())
    flat, triangular = sweep.curvatures[0], sweep.triangular()[0]
    x = ROUGH * h
    exact = 1 - ROUGH * np.sin(x) / x
    seen = 1 - ROUGH * 2 * (1 - np.cos(x)) / x**2
    shown = [int(abs(h - target).argmin()) for target in (1e-4, 1e-2, 3.16e-2, 0.1, 1, 10)]
    rows = [
        [f"{h[i]:.2g}", *(f"{y[i]:.3f}" for y in (flat, exact, triangular, seen))] for i in shown
    ]
    head = ["h", "product", "flat kernel", "differences of the loss", "triangular kernel"]
    return table(head, rows), (h, flat, exact, triangular, seen)


Make = Callable[[list[Tensor], float, float], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p, rate, _: torch.optim.SGD(p, rate),
    "Nesterov": lambda p, rate, m: torch.optim.SGD(p, rate, momentum=m, nesterov=True),
    "Adam": lambda p, rate, _: torch.optim.Adam(p, rate),
}


def run(name: str, rate: float, momentum: float) -> tuple[np.ndarray, float, float]:
    """Loss above the lowest at each step, and of the last steps the mean |gradient| and |step|."""
    net = Rough(torch.randn(DIMENSION, generator=torch.Generator().manual_seed(0)))
    optimizer, lowest = OPTIMIZERS[name]([net.w], rate, momentum), net.lowest()
    losses, slopes, moves = list[float](), list[float](), list[float]()
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        loss = net(net.w)
        loss.backward()
        before = net.w.detach().clone()
        optimizer.step()
        losses.append(float(loss.detach()) - lowest)
        slopes.append(float(net.w.grad.norm()))
        moves.append(float((net.w.detach() - before).norm()))
    return np.array(losses), float(np.mean(slopes[-LAST:])), float(np.mean(moves[-LAST:]))


def momentum_of(condition: float) -> float:
    """Nesterov's, for a quadratic function of that condition number."""
    return (math.sqrt(condition) - 1) / (math.sqrt(condition) + 1)


def descents() -> tuple[str, str, dict[str, np.ndarray]]:
    """Rates from the two curvatures, and the best of a grid of rates."""
    at_point, afar = 1 + ROUGH, 1.0
    curves, rows = dict[str, np.ndarray](), []
    for which, steepest in (("at the point", at_point), ("from afar", afar)):
        for name in ("SGD", "Nesterov"):
            losses, slope, move = run(name, 1 / steepest, momentum_of(steepest / 0.1))
            curves[f"{name}, {which}"] = losses
            rows.append(
                [name, which, f"{1 / steepest:.3g}", f"{losses[-LAST:].mean():.3g}"]
                + [f"{slope:.2g}", f"{move:.2g}"]
            )
    head = ["", "curvature", "rate", "loss above the lowest", "gradient", "step"]
    first = table(head, rows)
    best = []
    for name in OPTIMIZERS:
        found = {rate: run(name, rate, 0.9)[0] for rate in RATES}
        cells: list[str] = [name]
        for part in (slice(EARLY - EARLY // 10, EARLY), slice(-LAST, None)):
            rate = min(found, key=lambda rate: found[rate][part].mean())
            cells += [f"{rate:.2g}", f"{found[rate][part].mean():.3g}"]
        curves[f"{name}, best rate {rate:.2g}"] = found[rate]
        best.append(cells)
    head = ["", f"best rate for {EARLY} iterations", "loss above the lowest"]
    head += [f"best rate for {ITERATIONS}", "loss above the lowest"]
    return first, table(head, best), curves


def draw(points: tuple[np.ndarray, ...], curves: dict[str, np.ndarray]) -> None:
    """Figure 1, beside one another: curvature over h, and loss over iterations."""
    h, flat, exact, triangular, seen = points
    figure = new_figure(12.5, 4.6, layout="constrained")
    left, right = figure.subplots(1, 2)
    for y, line, color, label in (
        (flat, exact, COLORS[0], "product: flat kernel"),
        (triangular, seen, COLORS[1], "differences of the loss: triangular kernel"),
    ):
        left.plot(h, line, color=color, linewidth=1.2, label=label)
        left.plot(h[::4], y[::4], "o", color=color, markersize=3.5)
    left.axhline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    left.set_xscale("log")
    left.set_xlabel("displacement h")
    left.set_ylabel("curvature (lines: closed forms)")
    for i, (name, losses) in enumerate(curves.items()):
        style = {"linestyle": "-" if i < 4 else (0, (3, 1.5)), "linewidth": 1.2}
        right.plot(np.maximum(losses, 1e-4), color=COLORS[i % 6], label=name, **style)
    right.set_yscale("log")
    right.set_xlabel("iteration")
    right.set_ylabel("loss above the lowest")
    left.legend(fontsize=8.5, frameon=False)
    right.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        tidy(axes)
    save_figure(figure, PICTURES / "scale_rough.png")


def gpt() -> str:
    """The sweep of a GPT, drawn, and how wide its plateaus are."""
    model = trained(64, 2)
    hessian = ds_hessian.attach(model, config=QUIET).use(micro_batches(4, 2))
    sweep = hessian.displacement_sweep()
    sweep.plot(PICTURES / "scale_gpt.png")
    rows = []
    for row, name in enumerate(sweep.directions):
        plateau, best = sweep.plateau(name), sweep.best(name)
        near = abs(sweep.curvatures[row] / plateau.value - 1) < 0.1
        low, high = best, best
        while low > 0 and near[low - 1]:
            low -= 1
        while high + 1 < len(near) and near[high + 1]:
            high += 1
        h = sweep.displacements
        rows.append(
            [name, plateau, f"{h[best]:.1e}", f"{h[low]:.1e} - {h[high]:.1e}"]
            + [f"{sweep.curvatures[row, -1]:.3g} at {h[-1]:.2g}"]
        )
    head = ["direction", "plateau", "h there", "within 10 %", "farthest"]
    return f"GPT of {size_of(model):,} parameters\n\n{table(head, rows)}"


def main() -> None:
    """Print and draw."""
    PICTURES.mkdir(exist_ok=True)
    text, points = averages()
    print(f"{text}\n", flush=True)
    first, best, curves = descents()
    print(f"{first}\n\n{best}\n", flush=True)
    draw(points, curves)
    print(gpt(), flush=True)


if __name__ == "__main__":
    main()
