"""Gauss-Newton products of vectors that G maps to little, or to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import dense, train
from tests.tiers import cells

SLACK = 5.0
"""The error over what is told of it, at most: for one vector, whose truncation no other shows."""


def drawn(seed: int, examples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(examples, 5, generator=torch.Generator().manual_seed(seed))
    return x, torch.randint(3, (examples,), generator=torch.Generator().manual_seed(seed))


def problem(
    smoothing: float, seed: int, count: int, examples: int, steps: int
) -> tuple[Any, ExactGaussNewton, Tensor, Tensor]:
    """A net of 57 parameters, exact products with its G, and eigenvalues and vectors of this."""

    def loss(net: nn.Module, b: Any) -> Tensor:
        f = net(b[0].to(next(net.parameters()).dtype))
        return functional.cross_entropy(f, b[1], label_smoothing=smoothing)

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = [drawn(100 * seed + i, examples) for i in range(count)]
    train(net, data, steps)
    exact = ExactGaussNewton(net, "2", loss, data)
    matrix = dense(exact, 57)
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(data, loss)
    return hessian, exact, *torch.linalg.eigh((matrix + matrix.T) / 2)


@pytest.mark.parametrize(
    ("smoothing", "seed", "count", "examples", "steps"),
    [(0.0, 0, 2, 8, 40), (0.0, 1, 6, 1, 0), (0.1, 1, 2, 8, 40)],
    ids=["32 outputs", "12 outputs", "by values"],
)
def test_low_and_null_eigenvectors_have_errors_as_they_are_told(
    smoothing: float, seed: int, count: int, examples: int, steps: int
) -> None:
    """Truncation was a share of the product, which is next to nothing here: displacements were a
    hundred times too long, errors 3e-4 of the largest eigenvalue, and what was told of them 2e-6.
    """

    hessian, exact, values, vectors = problem(smoothing, seed, count, examples, steps)
    rank = int((values > 1e-12 * values[-1]).sum())
    low = [0, 1, 57 - rank, 57 - rank // 2, -2, -1]
    random = [hessian.random_vector(seed=i) for i in range(3)]
    top = float(values[-1])
    with hessian.measuring(operator="ggn") as operator:
        for v in (*random[:2], *vectors[:, low].T.float(), random[2]):
            product = operator.matvec(v.contiguous())
            error = float((product.vector - exact(v)).norm())
            told = (product.error or 0.0) * product.norm
            rounding = 1e-7 * top * float(v.norm())
            assert error < SLACK * told + rounding, (error, told, product)
            assert told < 1e-3 * top * float(v.norm())


@pytest.mark.parametrize("smoothing", cells([0.0, 0.1], [0.1]))
def test_forms_of_the_null_space_leave_those_of_others_as_they_are(smoothing: float) -> None:
    """They took displacements of 1e-8 and differences of the loss over next to nothing, which later
    forms had too: errors of 0.4 of the largest eigenvalue. One ended with a TypeError.
    """

    hessian, exact, values, vectors = problem(smoothing, 0, 6, 1, 0)
    top, random = float(values[-1]), hessian.random_vector(seed=0)
    with hessian.measuring(operator="ggn") as operator:
        for v in (random, *vectors[:, [0, 1, 2]].T.float(), vectors[:, -1].float(), random):
            form = operator.along(v.contiguous())
            truth = float(v.double() @ exact(v).double()) / float(v.double().square().sum())
            assert not abs(form.value - truth) > SLACK * form.error + 1e-7 * top
            if truth > 1e-3 * top:
                assert form.error < 1e-3 * top
