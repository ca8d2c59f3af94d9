"""A sweep measures averages of the Hessian over ±h, known in closed form for simple losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import FiniteDifferenceHessian, default_range, sweep
from ds_hessian.records import DisplacementSweep
from ds_hessian.vectors import random_vector
from tests.operators.nets import batches, loss_of, measuring, mlp, train
from tests.results.makers import COST, PROVENANCE


class Point(nn.Module):
    """Weights, few enough to integrate by hand."""

    def __init__(self, w: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))


def record(
    net: nn.Module,
    vectors: dict[str, Tensor],
    h: list[float],
    loss: Callable[..., Tensor],
    data: Sequence[Any] = (None,),
) -> DisplacementSweep:
    backend = ModuleBackend(net)
    with measuring(backend, data, loss) as session:
        operator = FiniteDifferenceHessian(session)
        points = [sweep(operator, v, h) for v in vectors.values()]
        norm = operator.gradient_norm
    names = ("curvature", "norm", "change", "nonlinearity", "fidelity")
    arrays = {n: np.array([[getattr(p, n) for p in row] for row in points]) for n in names}
    return DisplacementSweep(
        n=backend.space.n,
        directions=tuple(vectors),
        displacements=np.array(h),
        curvatures=arrays["curvature"],
        norms=arrays["norm"],
        changes=arrays["change"],
        nonlinearities=arrays["nonlinearity"],
        fidelities=arrays["fidelity"],
        loss=session.loss,
        gradient_norm=norm,
        cost=COST,
        provenance=PROVENANCE,
    )


CASES: dict[str, tuple[Callable, list[float], list[float], Callable, Callable]] = {
    # loss, w, v, flat average, triangular average of v'Hv over [-h, h]
    "w^4": (lambda w: (w**4).sum(), [0.7], [1.0], lambda h: 12 * 0.49 + 4 * h**2,
            lambda h: 12 * 0.49 + 2 * h**2),
    "cos": (lambda w: -torch.cos(w).sum(), [0.3], [1.0], lambda h: math.cos(0.3) * math.sin(h) / h,
            lambda h: math.cos(0.3) * 2 * (1 - math.cos(h)) / h**2),
    "2-d": (lambda w: (w[0] * w[1]) ** 2, [1.0, 2.0], [0.6, 0.8],
            # v'H(w + t v) v along (1 + 0.6 t, 2 + 0.8 t): the even part is 12 (0.48)^2 t^2 + ...
            lambda h: _along(0.0) + 12 * 0.48**2 * h**2 / 3,
            lambda h: _along(0.0) + 12 * 0.48**2 * h**2 / 6),
}  # fmt: skip


def _along(t: float) -> float:
    a, b = 1 + 0.6 * t, 2 + 0.8 * t
    return 2 * (0.6 * b) ** 2 + 2 * (0.8 * a) ** 2 + 8 * a * b * 0.48


@pytest.mark.parametrize("case", CASES)
def test_curvature_is_the_average_of_the_hessian_over_the_step(case: str) -> None:
    loss, w, v, flat, triangular = CASES[case]
    h = [10 ** (k / 20) for k in range(-30, 9)]
    found = record(Point(w), {"v": torch.tensor(v)}, h, lambda m, _: loss(m.w.double()))
    # fp32 gradients: rounding 6e-8 |g| / h, 1e-5 at the smallest h.
    np.testing.assert_allclose(found.curvatures[0], [flat(x) for x in h], rtol=2e-5)
    # The trapezoidal rule with steps of 12 %: (0.12)^2 / 12 of the curved part.
    np.testing.assert_allclose(found.triangular()[0], [triangular(x) for x in h], rtol=5e-3)


def test_figures_do_not_depend_on_the_length_of_the_direction() -> None:
    """Four times the vector: powers of two change no bit."""
    data = batches(2)
    net = train(mlp(), data, 20)
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=1)
    found = record(net, {"one": v, "four": 4 * v}, [1e-3, 1e-2, 0.1], loss_of, data)
    for name in ("curvatures", "norms", "changes", "nonlinearities", "fidelities"):
        one, four = getattr(found, name)
        assert np.array_equal(one, four, equal_nan=True), name


def test_locally_rough_globally_smooth_is_seen() -> None:
    # The paper's figure 1: curvature 1 - 100 cos(0) = -99 at the point, 1 at any larger scale.
    def loss(m: Point, _: None) -> Tensor:
        return (m.w**2 / 2 + torch.cos(100 * m.w) / 100).sum()

    h = [1e-4, 1e-3, math.pi / 100, 10.0]
    found = record(Point([0.0]), {"v": torch.ones(1)}, h, loss)
    assert found.curvatures[0, 0] == pytest.approx(-99, rel=1e-3)
    assert found.curvatures[0, 2] == pytest.approx(1, abs=1e-3)
    assert found.curvatures[0, 3] == pytest.approx(1, abs=0.2)


def test_the_plateau_is_between_noise_and_averaging_and_is_the_hessian(tmp_path) -> None:
    data = batches()
    net = train(mlp(), data, 40)
    backend = ModuleBackend(net)
    generator = torch.Generator().manual_seed(3)
    v = torch.nn.functional.normalize(torch.randn(backend.space.n, generator=generator), dim=0)
    with measuring(backend, data) as session:
        h = default_range(session)
        product = FiniteDifferenceHessian(session).matvec(v)
    found = record(net, {"random": v}, h, loss_of, data)
    assert 0 < found.best("random") < len(h) - 2
    plateau = found.plateau("random")
    assert abs(plateau.value - float(v @ product.vector)) < 10 * plateau.error
    changes = found.relative_changes[0]
    assert changes[1] > 30 * np.nanmin(changes) and changes[-1] > 30 * np.nanmin(changes)
    assert DisplacementSweep.load(found.save(tmp_path)) == found
    assert found.plot(tmp_path / "sweep.png").stat().st_size > 10_000
