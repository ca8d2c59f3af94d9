"""The stated error of sampling against the spread over independently drawn micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import ConfigError
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.operators.sampling import micro_batch_curvatures, standard_error
from tests.operators.nets import measuring
from tests.tiers import cells

DRAWS = 2000
POPULATION, SIZE = 400, 4  # micro-batches, and examples in one


class Net(nn.Module):
    """A classifier of 53 parameters, in fp64 or fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.down(torch.tanh(self.up(x))), y)


@pytest.fixture(scope="module")
def data() -> tuple[Net, list[Any], Any]:
    """A trained net, the population of micro-batches, and the fp64 Hessian of each `(N, n, n)`."""
    torch.manual_seed(0)
    scale = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.5, 0.2])
    x, teacher = torch.randn(POPULATION, SIZE, 6) * scale, torch.randn(6, 3)
    y = (x @ teacher + torch.randn(POPULATION, SIZE, 3)).argmax(-1)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(200):
        optimizer.zero_grad()
        net(x.reshape(-1, 6), y.reshape(-1)).backward()
        optimizer.step()
    names = list(dict(net.named_parameters()))
    sizes = [p.numel() for p in net.parameters()]

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(w.split(sizes), net.parameters(), strict=True)]
        found = torch.func.functional_call(net, dict(zip(names, parts, strict=True)), (x, y))
        assert isinstance(found, Tensor)
        return found

    w = torch.cat([p.detach().double().flatten() for p in net.parameters()])
    hessians = torch.func.vmap(torch.func.hessian(loss), (None, 0, 0))(w, x.double(), y)
    return net, list(zip(x, y, strict=True)), hessians.numpy()


def test_curvatures_are_those_of_each_micro_batch(data: Any) -> None:
    net, batches, hessians = data
    backend = ModuleBackend(net)
    mean = hessians[:6].mean(0)
    v = torch.tensor(np.linalg.eigh(mean)[1][:, -1], dtype=torch.float32)
    with measuring(backend, batches[:6], None) as session:
        found = micro_batch_curvatures(FiniteDifferenceHessian(session), 3 * v, 1e-2)
    exact = np.einsum("i,gij,j->g", v.double(), hessians[:6], v.double())
    # Truncation h^2 / 6 of the third derivative, and fp32 slopes over 2 h.
    assert np.allclose(found, exact, atol=1e-4 * abs(exact).max())


@pytest.mark.parametrize(
    "group, said",
    [
        (1, "at least 2 micro-batches for each rank, got 1"),
        (2, r"at least 4 micro-batches for each rank \(the schedule runs groups of 2\), got 2"),
    ],
)
def test_one_micro_batch_has_no_spread(data: Any, group: int, said: str) -> None:
    """Nor has one group of them, as an interleaved pipeline runs; it was said to be one."""
    net, batches, _ = data
    backend = ModuleBackend(net)
    with measuring(backend, batches[:1], None) as session:
        session.head = replace(session.head, per_unit=group)
        operator = FiniteDifferenceHessian(session)
        with pytest.raises(ConfigError, match=said):
            micro_batch_curvatures(operator, backend.space.zeros() + 1, 1e-2)


@pytest.mark.parametrize("count", cells([8, 32], [8]))
@pytest.mark.parametrize("which", ["largest", "smallest", "trace"])
def test_bars_cover_the_figures_of_other_draws(data: Any, which: str, count: int) -> None:
    """Student's 95 % interval around a figure of `count` micro-batches.

    It covers what other draws give. Whether it covers the figure of the whole population depends on
    the second order: the largest eigenvalue stands apart, the smallest is the end of a bulk.
    """
    *_, hessians = data
    draw, n = np.random.default_rng(0), hessians.shape[1]
    v = draw.normal(size=n)
    v /= np.linalg.norm(v)
    figures, errors = [], []
    for _ in range(DRAWS):
        some = hessians[draw.integers(0, POPULATION, count)]
        value = n * float(v @ some.mean(0) @ v)
        y, factor = v, float(n)
        if which != "trace":
            values, vectors = np.linalg.eigh(some.mean(0))
            at = -1 if which == "largest" else 0
            value, y, factor = values[at], vectors[:, at], 1.0
        figures.append(value)
        errors.append(factor * standard_error(np.einsum("i,gij,j->g", y, some, y)))
    found, stated = np.array(figures), np.array(errors)
    whole = hessians.mean(0)
    values = np.linalg.eigvalsh(whole)
    truth = {"largest": values[-1], "smallest": values[0], "trace": n * float(v @ whole @ v)}
    limit = student.ppf(0.975, count - 1) * stated
    spread = np.mean(abs(found - found.mean()) <= limit)
    covered = np.mean(abs(found - truth[which]) <= limit)
    ratio = np.sqrt(np.mean(stated**2)) / found.std()
    print(f"{which} of {count}: stated / true {ratio:.2f}, draws {spread:.3f}, all {covered:.3f}")
    # Never too small, but for the rarest micro-batches, which few draws contain.
    assert 0.95 < ratio < 2.1 and spread > 0.88
    if which == "largest":
        assert covered > 0.95
    if which != "trace":  # what the first order leaves out: they lie too far out
        outward = found.mean() - truth[which]
        assert np.sign(outward) == (1 if which == "largest" else -1)
