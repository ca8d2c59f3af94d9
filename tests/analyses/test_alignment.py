"""Alignment with the top eigenspace: dense fp64 references, and spaces that are not defined."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_hessian.analyses import analysis_of, plan_job
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError, NumericsError, ResultError
from ds_hessian.hessian import Hessian
from ds_hessian.records import Bounded, HessianAlignment
from tests.operators.nets import Exact, batches, loss_of, mlp, train
from tests.tiers import cells

HALF = math.pi / 2


class Quadratic(nn.Module):
    """`w'Aw / 2`, whose Hessian A has the given eigenvalues, and the columns of q as vectors."""

    def __init__(self, eigenvalues: list[float], seed: int | None = None) -> None:
        super().__init__()
        n = len(eigenvalues)
        generator = torch.Generator().manual_seed(seed or 0)
        random = torch.randn(n, n, generator=generator, dtype=torch.float64)
        self.q = torch.eye(n).double() if seed is None else torch.linalg.qr(random)[0]
        self.a = (self.q * torch.tensor(eigenvalues).double()) @ self.q.T
        self.w = nn.Parameter(torch.randn(n, generator=generator))

    def forward(self, _: Tensor) -> Tensor:
        """The loss."""
        return self.w @ (self.a.float() @ self.w) / 2


def hessian_of(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Hessian:
    return Hessian(ModuleBackend(net, optimizer), HessianConfig()).use([torch.zeros(1)])


def shares(vectors: Tensor, x: Tensor) -> float:
    """Exact share of x in the span of orthonormal columns, in fp64."""
    return float((vectors.T @ x.double()).square().sum() / x.double().square().sum())


def holds(found: Bounded | None, truth: float, slack: float = 1e-6) -> bool:
    """Whether the bar does; `slack`: rounding of fp32 vectors."""
    assert found is not None and found.lower <= found.value <= found.upper
    return found.lower - slack <= truth <= found.upper + slack


def test_shares_and_their_bars_are_those_of_the_dense_hessian() -> None:
    data = batches(4)
    net = train(mlp(), data, 30)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    loss_of(net, data[0]).backward()
    before = torch.cat([p.detach().clone().view(-1) for p in net.parameters()])
    optimizer.step()
    update = torch.cat([p.detach().view(-1) for p in net.parameters()]) - before
    exact = Exact(net, data)
    n = len(exact.gradient)
    values, vectors = torch.linalg.eigh(exact.matrix())
    hessian = Hessian(ModuleBackend(net, optimizer)).use(data, loss_of)
    for which, order in (("LA", values), ("SA", -values), ("LM", abs(values))):
        top = vectors[:, order.argsort(descending=True)[:4]]
        found = hessian.alignment(4, which=which, tolerance=1e-4)
        assert found.angle < 0.2 and found.n == n and len(found.vectors) == 4
        for share, x in ((found.gradient, exact.gradient.detach()), (found.update, update)):
            assert share is not None and holds(share, shares(top, x), 1e-4)
            assert share.upper - share.lower < 0.3
        assert found.gradient is not None
        assert found.gradient_shares.sum() == pytest.approx(found.gradient.value, abs=1e-5)
    assert found.update_norm == pytest.approx(float(update.norm()), rel=1e-4)


@pytest.mark.parametrize("seed", cells(range(12), range(4)))
def test_bars_hold_for_spaces_that_are_hardly_found(seed: int) -> None:
    """Few products: the vectors are rough, and the bars as wide as they are wrong."""
    rng = np.random.default_rng(seed)
    net = Quadratic([*sorted(rng.uniform(2, 6, 4))[::-1], *rng.uniform(-1, 1, 26)], seed + 1)
    earlier = torch.linalg.qr(torch.randn(30, 3, generator=torch.Generator().manual_seed(seed)))[0]
    found = hessian_of(net).alignment(
        3, earlier.T.contiguous(), tolerance=0.3, max_matvecs=8, update=False
    )
    truth = net.q[:, :3]
    assert holds(found.gradient, shares(truth, net.a @ net.w.detach().double()))
    angles = np.arccos(np.linalg.svd((truth.T @ earlier.double()).numpy())[1].clip(0, 1))
    assert (abs(angles - found.principal_angles) <= found.angle + 1e-3).all()
    assert holds(found.overlap, float((np.cos(angles) ** 2).mean()))
    turned = np.linalg.svd((truth.T @ found.vectors.T.double()).numpy())[1].min().clip(0, 1)
    assert math.acos(turned) <= found.angle + 1e-3


def test_an_eigenvector_that_was_missed_is_found_in_the_complement() -> None:
    """One of a close pair, whose other mixture the first search has taken for both."""
    values = [5.80, 5.79, 4.0, *torch.linspace(1, -1, 27).tolist()]
    net = Quadratic(values, seed=2)
    hessian = hessian_of(net)
    pairs = hessian.eigenpairs(3, "LA", 0.05)
    assert pairs.converged.all() and pairs.values[2] < 2  # without a sign of the second one
    found = hessian.alignment(3, tolerance=0.05, update=False)
    assert found.next_value is not None and found.next_value.value > 5.7 > found.values[-1]
    assert found.angle == HALF
    assert holds(found.gradient, shares(net.q[:, :3], net.a @ net.w.detach().double()))
    exact = hessian.alignment(3, tolerance=1e-4, update=False)
    assert exact.values == pytest.approx(values[:3], rel=1e-4) and exact.angle < 0.1


def test_a_degenerate_eigenvalue_is_not_cut() -> None:
    net = Quadratic([5.0, 3.0, 3.0, 1.0, 0.5, 0.2], seed=3)
    x = net.a @ net.w.detach().double()
    cut = hessian_of(net).alignment(2)
    assert cut.angle == HALF and cut.gradient is not None and cut.gradient.upper == 1
    for turn in (0.0, 0.7, 2.0):  # whichever of the two-dimensional space is chosen
        second = math.cos(turn) * net.q[:, 1] + math.sin(turn) * net.q[:, 2]
        assert holds(cut.gradient, shares(torch.stack([net.q[:, 0], second], 1), x))
    assert cut.gradient.lower == pytest.approx(shares(net.q[:, :1], x), abs=1e-3)
    whole = hessian_of(net).alignment(3)
    assert whole.angle < 1e-3 and whole.gradient is not None
    assert whole.gradient.value == pytest.approx(shares(net.q[:, :3], x), abs=1e-5)


def test_more_directions_than_the_rank_of_h_are_no_definite_space() -> None:
    net = Quadratic([5.0, 3.0, *[0.0] * 8], seed=4)
    found = hessian_of(net).alignment(4)
    assert found.angle == HALF and found.gradient is not None
    assert found.gradient.lower == pytest.approx(1.0, abs=1e-4)  # the gradient A w is in its range
    assert found.next_value is not None and abs(found.next_value.value) < 1e-4


def test_all_directions_are_the_whole_space() -> None:
    found = hessian_of(Quadratic([3.0, 2.0, 1.0])).alignment(3)
    assert found.angle < 1e-3 and found.next_value is None and found.gradient is not None
    assert found.gradient.value == pytest.approx(1.0) and found.gradient.lower > 1 - 1e-6
    with pytest.raises(NumericsError, match="k must be within"):
        hessian_of(Quadratic([3.0, 2.0, 1.0])).alignment(9, basis_size=2)


def test_a_zero_gradient_has_no_share() -> None:
    net = Quadratic([4.0, 2.0, 1.0])
    nn.init.zeros_(net.w)
    found = hessian_of(net).alignment(1, torch.eye(3)[:1])
    assert found.gradient is None and len(found.gradient_shares) == 0
    assert found.overlap is not None and found.overlap.value == pytest.approx(1.0)
    assert "share of the gradient" not in found.table()


def test_without_adam_there_is_no_update() -> None:
    net = Quadratic([4.0, 2.0, 1.0])
    hessian = hessian_of(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = hessian.alignment(1)
    assert found.update is None and found.update_norm is None and len(found.update_shares) == 0
    with pytest.raises(ConfigError, match="use Adam or AdamW"):
        hessian.alignment(1, update=True)


def test_the_space_of_an_earlier_step_is_compared_by_principal_angles(tmp_path: Path) -> None:
    net = Quadratic([5.0, 4.0, 1.0, 0.5])
    hessian = hessian_of(net)
    before = hessian.alignment(2)
    hessian.save(before, tmp_path)
    angle = 0.3
    c, s = math.cos(angle), math.sin(angle)
    turn = torch.eye(4).double()
    turn[1, 1], turn[1, 2], turn[2, 1], turn[2, 2] = c, -s, s, c
    net.a = turn @ net.a @ turn.T
    for earlier in (tmp_path, str(tmp_path / "alignment.safetensors"), 3.0 * before.vectors):
        found = hessian.alignment(2, earlier)
        assert found.principal_angles == pytest.approx([0.0, angle], abs=1e-3)
        assert holds(found.overlap, (1 + c**2) / 2)
        assert found.overlap is not None and found.overlap.upper - found.overlap.lower < 1e-2
    assert "overlap with before" in found.table() and "17.2" in found.table()
    one = hessian.alignment(2, before.vectors[:1])
    assert one.principal_angles == pytest.approx([0.0], abs=1e-3)
    loaded = hessian.load(HessianAlignment, tmp_path)
    assert torch.equal(loaded.vectors, before.vectors) and loaded.gradient == before.gradient


def test_an_earlier_space_that_is_none_is_refused(tmp_path: Path) -> None:
    hessian = hessian_of(Quadratic([3.0, 2.0, 1.0]))
    with pytest.raises(NumericsError, match="the 2 vectors of the earlier space are linearly"):
        hessian.alignment(1, torch.ones(2, 3))
    with pytest.raises(
        ConfigError, match=r"must be vectors \(k, 3\).*got a tensor of shape \(3,\)"
    ):
        hessian.alignment(1, torch.ones(3))
    with pytest.raises(ResultError, match="alignment.safetensors"):
        hessian.alignment(1, tmp_path)


@pytest.mark.parametrize(
    ("settings", "vectors"),
    [({"k": 2}, 2 + 24), ({"k": 2, "update": False}, 24), ({"k": 2, "earlier": "out"}, 2 + 2 + 24)],
    ids=str,
)
def test_its_plan_is_that_of_the_search_and_of_what_it_compares(
    settings: dict[str, Any], vectors: int
) -> None:
    n = 700_000_000_000  # so that blocks of 256 MiB are nothing beside a vector
    job = {"num_parameters": n, "world_size": 64}
    config = HessianConfig()
    plan = plan_job(config, "alignment", settings, **job)
    operator = plan_job(config, "trace", {}, **job)  # with a probe, and trials being compared
    found = (plan.peak("accelerator") - operator.peak("accelerator")) / (4 * n / 64)
    assert found == pytest.approx(vectors + 2 + 1 - 3, abs=0.03)
    assert analysis_of("alignment", settings)[0].products(config) == 302 + 301
