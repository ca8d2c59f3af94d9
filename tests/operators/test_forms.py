"""Curvatures by forwards: a displacement that no scale misleads, and errors that hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.operators import GaussNewton
from ds_hessian.operators.outputs.forms import Forms, Ladder
from ds_hessian.vectors import random_vector
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import relative

LEAST = 1e-9
ROUNDOFF = 1e-9


def bending(*lengths: float, sizes: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Forms:
    """Forms of tanh outputs: each is its size where h is far below its length, and falls above."""

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        found = [s * (np.tanh(h / d) * d / h) ** 2 for s, d in zip(sizes, lengths, strict=False)]
        return np.array(found if some is None else [found[i] for i in some])

    return forms


@pytest.mark.parametrize(
    ("forms", "exact"),
    [
        (bending(1e-5, 1e-5), 1.0),  # curvature of parameters far smaller than the norm of all
        (bending(1.0, 1e-3), 1.0),  # a micro-batch that bends more than the first
        (bending(1.0, 1e-3, sizes=(0.0, 2.0)), 1.0),  # the first has no part in it
    ],
    ids=["small parameters", "unlike micro-batches", "the first is flat"],
)
def test_the_error_of_a_form_holds(forms: Forms, exact: float) -> None:
    ladder = Ladder()
    for _ in range(3):
        value, error, _ = ladder.settled(forms, 1e-1, LEAST)
        assert abs(value - exact) <= 1.01 * error + ROUNDOFF and error < 0.05


def test_displacements_at_which_nothing_is_finite_are_left() -> None:
    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        return np.array([np.inf if h > 1e-6 else 1 + h**2])

    value, error, h = Ladder().settled(forms, 1.0, LEAST)
    assert h <= 1e-6 and abs(value - 1) <= error < 1e-3


def test_of_two_plateaus_the_lower_one_is_taken() -> None:
    """Of outputs whose first layers saturate, with the noise of 16 bits."""

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        noise = 0.02 * np.sin(7 * np.log(h)) / min(1, h / 1e-3) if h < 1 else 0.0
        return np.array([0.4 + 0.6 / (1 + (h / 0.5) ** 8) + noise])

    value, error, h = Ladder().settled(forms, 3.0, 1e-5)
    assert h < 0.5 and abs(value - 1) <= min(error, 0.05)


def test_forms_that_agree_by_chance_far_below_are_no_plateau() -> None:
    """Those of a Llama of 4,816 weights in fp32, which has 0.0237884 in fp64: the last two agree,
    and are 1.5e-3 off.
    """
    ladder = [0.02378816, 0.02378959, 0.02378663, 0.02380012, 0.02375384, 0.02375724]

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        rung = round(np.log(0.3 / h) / np.log(3))
        return np.array([ladder[max(rung, 0)]])

    value, error, h = Ladder().settled(forms, 0.1, 1e-9)
    assert abs(value - 0.0237884) <= error < 1e-3 * value


def test_the_bar_has_kinks_of_other_micro_batches_than_the_largest() -> None:
    off = np.array([0.0, 0.03, 0.0, 0.01])

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        found = np.array([5.0, 1.0, 4.0, 2.0]) * (1 - off * (h / 1e-1) ** 0.5)
        return found if some is None else found[some.start : some.stop]

    ladder = Ladder()
    for _ in range(2):
        value, error, _ = ladder.settled(forms, 1e-1, LEAST)
        assert abs(value - 3) <= 3 * error + ROUNDOFF


def test_a_step_that_rounding_loses_is_no_plateau() -> None:
    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        return np.array([0.0 if h < 1e-3 else 1 + 0.05 * np.sin(5 * np.log(h))])

    value, _, h = Ladder().settled(forms, 0.1, 1e-9)
    assert h >= 1e-3 and abs(value - 1) < 0.1


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 4), nn.Tanh(), nn.Linear(4, 3))


def _loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1])


def test_a_direction_that_the_first_micro_batch_does_not_have_is_measured() -> None:
    net = _net()
    data = [(torch.full((4,), token), torch.arange(4) % 3) for token in range(6)]
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(data, _loss)
    v = torch.zeros(sum(p.numel() for p in net.parameters()))
    v[4 * 5 : 4 * 6] = 1.0  # the vector of the last token
    found = hessian.curvatures((), {"token": v}, operator="ggn").along("token")
    wide = _net().double()
    point, tangent = wide[0].weight[5].detach(), torch.ones(4, dtype=torch.float64)
    f, slope = torch.func.jvp(lambda e: wide[2](torch.tanh(e)), (point,), (tangent,))
    p = f.detach().softmax(-1)
    exact = float(slope.detach() @ (torch.diag(p) - torch.outer(p, p)) @ slope) / 4 / 6
    assert found.error < 1e-3 * exact
    assert abs(found.value - exact) <= 3 * found.error + 1e-4 * exact


def test_bars_of_a_vector_of_another_kind_are_no_ones_of_those_before() -> None:
    """Random vectors first, then one towards the top, whose outputs bend more: of 32 micro-batches
    all change, not the one that is measured with each vector."""

    def forms(size: float, bend: float) -> Forms:
        def of(h: float, some: range | None) -> NDArray[np.float64]:
            each = size * (1 + bend * h**2) + (1e-6 / h) ** 2
            return np.full(32 if some is None else len(some), each)

        return of

    ladder = Ladder()
    for _ in range(40):  # until each has been measured
        value, error, _ = ladder.settled(forms(1.0, 0.1), 0.1, 1e-9)
        assert abs(value - 1) < 3 * error < 1e-3
    value, error, _ = ladder.settled(forms(100.0, 30.0), 0.1, 1e-9)
    assert abs(value - 100) > 1e-6 * 100  # so that there is something to tell
    assert abs(value - 100) < 3 * error < 1.0


def test_what_no_change_shows_is_in_the_bar() -> None:
    """The rounding of a softmax and of the weights of tokens, which all displacements share."""

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        return np.full(8 if some is None else len(some), 1 + 1.5e-7)

    value, error, _ = Ladder().settled(forms, 0.1, LEAST)
    assert abs(value - 1) < 3 * error < 1e-6


def test_forms_and_products_are_of_the_displacement_that_is_made() -> None:
    """Which is rounded to fp32: by 6e-8, in forms twice that."""
    net = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(net.weight)  # so that no rounding of weights is added
    x = torch.randint(-4, 5, (8, 4), generator=torch.Generator().manual_seed(0)).float()
    backend = ModuleBackend(net)
    v = torch.tensor([1.0, -1.0, 2.0]).repeat(4)
    length = float(v.norm(dtype=torch.float64))
    with backend.measuring(backend.objective([(x, torch.arange(8) % 3)], _loss)) as session:
        g = GaussNewton(session)
        near = 2.0**-6 * length * (1 + 2.0**-24.1)  # nearest to 2^-6 |v|
        forms = [float(g.forms(v, h)[0]) for h in (near, 2.0**-6 * length)]
        sizes = [float(g.product_at(v, h).norm) for h in (near, 2.0**-6 * length)]
    assert forms[0] == pytest.approx(forms[1], rel=1e-12)
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-12)


def require_in_bars(
    net: nn.Sequential, loss: Any, data: list[Any], count: int, most: float
) -> None:
    """Forms and products of this many vectors are within three bars, and these below `most`."""
    exact, backend = ExactGaussNewton(net, "2", loss, data), ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    with backend.measuring(backend.objective(data, loss)) as session:
        forms, products = GaussNewton(session), GaussNewton(session)
        for _ in range(count):
            truth, form, product = exact(v), forms.along(v), products.matvec(v)
            value = float(v.double() @ truth) / float(v.double() @ v.double())
            assert abs(form.value - value) < 3 * form.error < most * abs(value)
            assert product.error is not None
            assert relative(product.vector, truth) < 3 * product.error < most
            v = truth.float()


def test_differencing_a_loss_that_bends_within_the_outputs_is_in_bars_and_made_small() -> None:
    """A distance of directions, of short outputs: no displacement of the weights shows that error,
    which was 3e-3 of both, in bars of 3e-4."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        found = net(batch[0].to(next(net.parameters()).dtype))
        return (1 - functional.cosine_similarity(found, batch[1].to(found.dtype))).mean()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    with torch.no_grad():
        net[2].weight.mul_(0.3)
    data = [(torch.randn(8, 6), torch.randn(8, 4)) for _ in range(4)]
    require_in_bars(net, loss, data, count=3, most=2e-3)


def test_differencing_a_loss_that_bends_in_one_micro_batch_alone_is_in_bars_and_made_small() -> (
    None
):
    """As of mixture densities, where one example is sharp: products were off by 2e-3 in bars of
    1e-5, by what the first micro-batch knew of the loss."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, sharp = (part.to(next(net.parameters()).dtype) for part in batch)
        return (torch.cosh(sharp * net(x)) / sharp**2).mean()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        net[2].weight.mul_(0.1)
    data = [(torch.randn(8, 6), torch.ones(8, 1)) for _ in range(4)]
    data[2][1][5] = 30.0
    require_in_bars(net, loss, data, count=4, most=1e-3)


def test_the_bar_of_a_form_has_what_the_loss_bends_by_in_each_micro_batch() -> None:
    """Vectors in turn along which the loss bends in one micro-batch alone, not in the one that was
    measured last: forms were off by up to 16 bars.
    """
    bent, data = [0], 8

    def off() -> NDArray[np.float64]:
        return np.where(np.arange(data) == bent[0], 1e-3, 1e-7)

    def forms(h: float, some: range | None) -> NDArray[np.float64]:
        found = 1 + off()
        return found if some is None else found[some.start : some.stop]

    ladder = Ladder()
    for turn in range(12):
        bent[0] = 3 * turn % data
        value, error, _ = ladder.settled(
            forms, 0.1, LEAST, lambda h, one: (1.0, -off()[one]), lambda: off() / 10
        )
        assert abs(value - 1) <= 3 * error
        assert 0.9 < ladder.valued / (1e-3 / data) < 2.1


def test_noise_that_micro_batches_share_is_in_the_bar() -> None:
    """As that of weights rounded once for all of them, a new draw with each vector."""
    rng, ladder, ratios = np.random.default_rng(0), Ladder(), list[float]()
    for _ in range(40):
        draws = dict[float, float]()

        def forms(h: float, some: range | None, draws: dict[float, float] = draws) -> Any:
            shared = draws.setdefault(h, float(rng.standard_normal()))
            return np.full(16 if some is None else len(some), 1 + 1e-7 / h * shared)

        value, error, _ = ladder.settled(forms, 1e-2, LEAST)
        ratios.append(abs(value - 1) / error)
    assert np.quantile(ratios, 0.8) < 3, ratios  # it was 8
