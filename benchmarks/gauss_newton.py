"""How exact Gauss-Newton products are, family by family of models: docs/gauss_newton.md.

    python benchmarks/gauss_newton.py                 # reporting families, some minutes on one core
    python benchmarks/gauss_newton.py --calibration   # those that constants were looked at on
    python benchmarks/gauss_newton.py lora tied --arithmetic bf16

The families are those of `benchmarks/families.py`. Products with a random vector and with powers of
G are compared with automatic differentiation in fp64, and with the best of many constant
displacements; v'Gv by forwards alone with the exact form.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from families import FAMILIES, Problem, problem
from torch import Tensor, nn

from ds_hessian.operators import GaussNewton
from ds_hessian.vectors import random_vector

ROUNDOFF = 2.0**-22
"""Four times the unit roundoff of fp32, in which products are added up."""

Row = tuple[float, float, float, float, float, float, float]
"""Error, its estimate, the best of a constant h, gradients, error of the form, its estimate, and
the least error of a single product at any h."""

NEAR = (0.93, 0.97, 1.03, 1.07)
"""A constant's error is the root of the mean square of those beside it: rounding makes the error at
a single displacement a draw, of which the least of many is 2 to 4 times too small in 16 bits."""


class Exact:
    """fp64 products of G at a net whose outputs are those of one module."""

    def __init__(self, net: nn.Module, batches: Sequence[Sequence[Tensor]]) -> None:
        self.net = copy.deepcopy(net).double()
        self.head = getattr(self.net, "logits", None) or self.net.net
        self.parameters = [p for p in self.net.parameters() if p.requires_grad]
        self.batches = batches

    def __call__(self, v: Tensor) -> Tensor:
        """`(n,)` to `(n,)`."""
        parts = v.double().split([p.numel() for p in self.parameters])
        return torch.stack([self._of(batch, parts) for batch in self.batches]).mean(0)

    def _of(self, batch: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
        seen = list[Tensor]()
        handle = self.head.register_forward_hook(lambda m, a, f: seen.append(f))
        loss = self.net(*batch)
        handle.remove()
        (f,) = seen
        (c,) = torch.autograd.grad(loss, f, create_graph=True)
        dual = torch.zeros_like(f, requires_grad=True)
        options = {"create_graph": True, "materialize_grads": True}
        back = torch.autograd.grad(f, self.parameters, dual, **options)
        along = sum((g * p.view_as(g)).sum() for g, p in zip(back, parts, strict=True))
        (u,) = torch.autograd.grad(along, dual)
        (product,) = torch.autograd.grad(c, f, u.detach(), retain_graph=True)
        found = torch.autograd.grad(f, self.parameters, product, materialize_grads=True)
        return torch.cat([g.reshape(-1) for g in found])


def rows(case: Problem, exact: Exact, count: int, weight: float) -> Iterator[Row]:
    """Measure products with a random vector and the powers of G after it."""
    v = random_vector(case.backend.layout, case.backend.space, seed=0)
    with case.measuring() as session:
        operator, forms = GaussNewton(session), GaussNewton(session)
        for _ in range(count):
            truth, before = exact(v), operator.cost.gradient_evaluations
            size = float(truth.norm())
            if size == 0:
                return
            product, found = operator.matvec(v), forms.along(v)
            cost = operator.cost.gradient_evaluations - before
            least, best = constants(operator, v, truth, weight or 1.0)
            error = float((product.vector.double() - truth).norm()) / size
            form = float(v.double() @ truth) / float(v.double() @ v.double())
            off = abs(found.value - form) / form, found.error / form
            yield error, product.error or math.nan, best, cost, *off, least
            v = (truth / size).float()


def constants(
    operator: GaussNewton, v: Tensor, truth: Tensor, weight: float
) -> tuple[float, float]:
    """The least error of a product at 26 displacements, and the best of these as constants."""

    def error(h: float) -> float:
        found = operator.product_at(v, h).vector.double() - truth
        return float(found.norm() / truth.norm())

    heights = [float(h) for h in weight * np.geomspace(1e-6, 3, 26)]
    errors = {h: error(h) for h in heights}
    best = sorted(heights, key=errors.__getitem__)[:5]
    around = [math.sqrt(np.mean([error(h * near) ** 2 for near in NEAR])) for h in best]
    return min(errors.values()), min(around)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--calibration", action="store_true")
    parser.add_argument("--arithmetic", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--count", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = args.names or [n for n, f in FAMILIES.items() if f.calibration == args.calibration]
    every = list[Row]()
    print("family: error (estimate; best constant h) of each vector; gradients of the last")
    for name in chosen:
        case = problem(name, args.arithmetic, args.count)
        masters = case.backend.masters or [p.detach() for p in _trained(case.backend.model)]
        net = copy.deepcopy(case.backend.model).float()
        for p, master in zip(_trained(net), masters, strict=True):
            p.data.copy_(master.detach())
        weight = math.sqrt(sum(float(m.double().square().sum()) for m in masters))
        found = list(rows(case, Exact(net, case.batches), 6, weight))
        every += found
        texts = [f"{e:.1e} ({s:.1e}; {b:.1e})" for e, s, b, *_ in found]
        print(f"{name:20} " + "  ".join(texts) + (f"  {found[-1][3]:.2f}" if found else ""))
    e, s, b, cost, f, fs, least = np.array(every).T
    print(f"gradients of a product: {cost.mean():.2f}")
    near = (e <= 2 * b) | (e < ROUNDOFF)
    print(f"{len(e)} products: within 2x of the best constant h, or below 2.4e-7, {_share(near)}")
    print(f"of the least error at any of 26 h {_share((e <= 2 * least) | (e < ROUNDOFF))}")
    print(f"estimate within 3x of the error {_share((s < 3 * e) & (e < 3 * s))}, ", end="")
    print(f"error above 3 x estimate {_share(e > 3 * s)}")
    print(
        f"v'Gv by forwards: median error {np.median(f):.1e}, above 3 x its bar {_share(f > 3 * fs)}"
    )


def _trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _share(mask: np.ndarray) -> str:
    return f"{100 * float(np.mean(mask)):.0f} %"


if __name__ == "__main__":
    main()
