"""Estimates where the nonlinearity ratio says nothing: no bar may be tight on a wrong figure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.backends.restricted import Restricted
from ds_hessian.krylov import lanczos, ritz
from ds_hessian.operators import FiniteDifferenceHessian, Product
from ds_hessian.operators.displacement.control import StepController
from ds_hessian.operators.displacement.schemes import SchemeName
from ds_hessian.vectors import random_vector
from tests.operators.nets import (
    Batch,
    Exact,
    backend_of,
    batches,
    loss_of,
    measuring,
    mlp,
    relative,
    train,
)

FULL = pytest.mark.full
OPEN = pytest.mark.xfail(reason="estimates down to 0.15 of the error (docs/numerics.md, Limits)")


class Scaled(nn.Module):
    """A linear layer whose stored weight is `factor` times the effective one."""

    def __init__(self, inputs: int, outputs: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(nn.Linear(inputs, outputs).weight.detach() * factor)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, inputs)` to `(b, outputs)`."""
        return functional.linear(x, self.weight / self.factor)


def logistic() -> nn.Module:
    """Logistic regression at w = 0, where the third derivative of its loss is zero."""
    net = nn.Linear(10, 2)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    return net


def kinked() -> nn.Module:
    """A ReLU net."""
    torch.manual_seed(0)
    layers = nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def uneven() -> nn.Module:
    """Parameters whose scales differ by 1e4."""
    torch.manual_seed(0)
    return nn.Sequential(Scaled(10, 16, 1e-2), nn.SiLU(), Scaled(16, 3, 1e2))


def halves(count: int) -> list[Batch]:
    """Micro-batches of two kinds."""
    return [(x, y % 2) for x, y in batches(count)]


def told_of(product: Product, truth: Tensor) -> tuple[float, float]:
    """The error of a product and the estimate of it, in units of the truth's norm."""
    size = float(truth.norm())
    return relative(product.vector, truth), (product.error or 0.0) * product.norm / size


def products(
    backend: ModuleBackend,
    exact: Exact,
    data: list[Batch],
    scheme: SchemeName = "central",
    count: int = 8,
) -> Iterator[tuple[float, float]]:
    """Error and estimate of products with Krylov vectors, and of two first products alone.

    Both are in units of |Hv|; the estimate is one of the error vector, relative to the product.
    """
    with measuring(backend, data) as session:
        operator = FiniteDifferenceHessian(session, scheme=scheme)
        pairs = list(exact.krylov(backend, count))
        for v, truth in pairs:
            product = operator.matvec(v)
            yield told_of(product, truth)
        gradient = exact.gradient.detach()
        along = (gradient / gradient.norm()).float()
        for v, truth in ((along, exact(along)), pairs[3]):
            product = FiniteDifferenceHessian(session, scheme=scheme).matvec(v)
            yield told_of(product, truth)


def figures(found: Iterator[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Errors, and estimates in units of them."""
    errors, estimates = np.array(list(found)).T
    return errors, estimates / errors


@pytest.mark.parametrize("count", [1, 4])
def test_weights_a_billion_times_smaller_than_others_are_displaced_by_their_size(
    count: int,
) -> None:
    """Products were 0 with errors of twice that, where |Hv| is 1e11, and bars of spectra missed."""
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(10, 20, 1e-6), nn.GELU(), Scaled(20, 3, 1e3))
    data = batches(count)
    backend, exact = backend_of(net), Exact(net, data)
    with measuring(backend, data) as session:
        operator = FiniteDifferenceHessian(session)
        for v, truth in exact.krylov(backend, 5):
            product = operator.matvec(v)
            error = relative(product.vector, truth)
            assert product.error is not None and product.displacement < 1e-4
            assert error < 0.02 and error < 3 * product.error


class Attention(nn.Module):
    """A loss on which the biases of keys have no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of `(b, t, 8)` and labels `(b,)`."""
        found = functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return functional.cross_entropy(self.head(found + x).mean(1), y)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=FULL) for s in (3, 4, 5))])
def test_where_curvature_is_zero_up_to_rounding_bars_are_as_small(seed: int) -> None:
    """Noise over a tiny h counted as the largest |Hv|: bars were 0.05 to 0.2."""
    torch.manual_seed(seed)
    data = [(torch.randn(4, 5, 8), torch.randint(3, (4,))) for _ in range(4)]
    hessian = ds_hessian.attach(Attention(), config={"progress": False}).use(
        data, lambda net, batch: net(*batch)
    )
    spectrum = hessian.spectrum(num_matvecs=6, num_probes=2, parameters=["k.bias"])
    for value in (spectrum.eigenvalue_max, spectrum.eigenvalue_min):
        assert abs(value.value) <= value.error < 0.02  # of a largest eigenvalue of 0.3
    assert "curvature along them is 0" in spectrum.warnings[0], spectrum.warnings


@pytest.mark.parametrize("count", [1, pytest.param(4, marks=FULL), 16])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_loss_without_third_derivative_is_measured_and_not_averaged(
    bf16: bool, count: int
) -> None:
    """The nonlinearity ratio is zero at any h; the change between two displacements is not."""
    data, net = halves(count), logistic()
    errors, told = figures(products(backend_of(net, bf16), Exact(net, data), data, count=6))
    assert errors.max() < (0.06 if bf16 else 1e-4), errors
    assert told.min() > 1 / 3 and told.max() < 5, told


@pytest.mark.parametrize("count", [1, 4])
def test_rounding_that_is_opposite_on_both_sides_is_noise(count: int) -> None:
    """So do the gradients of a net of zeros round in 16 bits: no ratio shows it. Estimates were
    down to 0.01 of errors of half of the product.
    """
    net = mlp()
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    data = batches(count)
    errors, told = figures(products(backend_of(net, bf16=True), Exact(net, data), data, count=6))
    assert errors.max() < 0.3 and np.median(errors) < 0.03, errors
    assert told.min() > 1 / 3, told


def test_a_product_of_which_no_bit_changes_is_made_with_a_longer_step() -> None:
    """All tokens have the same probabilities, which round alike: it was 0 without an error."""
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    data = batches(4)
    errors, told = figures(products(backend_of(net, bf16=True), Exact(net, data), data, count=4))
    assert np.median(errors) < 0.3, errors
    assert told.min() > 1 / 5, told


class Plateau(nn.Module):
    """A loss that saturates along `steep`, and is quadratic, with far larger weights, along
    `flat`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steep = nn.Parameter(torch.tensor([0.05, -0.02, 0.01]))
        self.flat = nn.Parameter(torch.full((3,), 60.0))

    def forward(self, x: Tensor) -> Tensor:
        """The loss of inputs `(b, 3)`."""
        saturating = (torch.tanh(10 * x @ self.steep) - 0.3).square().mean()
        return saturating + 5e-4 * self.flat.square().sum()


@pytest.mark.parametrize("scheme", ["central", "forward"])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("order", ["ffs", "s"])
def test_where_both_sides_saturate_alike_the_step_is_shorter(
    scheme: SchemeName, bf16: bool, order: str
) -> None:
    """D was what is left of two gradients of zero, and so was the product: 0, without an error."""
    torch.manual_seed(0)
    net = Plateau()
    data = [(torch.randn(8, 3),)]

    def loss_fn(net: nn.Module, batch: Any) -> Tensor:
        return net(batch[0].to(next(net.parameters()).dtype))

    exact = Exact(net, data, loss_fn)
    with measuring(backend_of(net, bf16=bf16), data, loss_fn) as session:
        operator = FiniteDifferenceHessian(session, scheme=scheme)
        for part in order:
            v = torch.zeros(6)
            v[:3] = torch.tensor([1.0, 2.0, -1.0]) * (part == "s")
            v[3:] = part == "f"
            product = operator.matvec(v)
    error = relative(product.vector, exact(v))
    assert product.error is not None and error < 5 * product.error < 1.0, (error, product)


def test_no_product_is_repeated_where_its_step_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in an error about a displacement that nobody had given (a vmapped ReLU in bf16)."""
    judge = StepController.judge
    monkeypatch.setattr(StepController, "judge", lambda s, p: 1e-9 * judge(s, p))
    net, data = mlp(), batches(4)
    errors, told = figures(products(backend_of(net, bf16=True), Exact(net, data), data, count=4))
    assert errors.max() < 0.1, errors
    assert told.min() > 1 / 3, told


@pytest.mark.parametrize(
    ("count", "seeds"),
    [(1, 1), (16, 1), pytest.param(1, 40, marks=FULL), pytest.param(16, 40, marks=FULL)],
)
def test_eigenvalues_of_logistic_regression_at_zero_are_within_their_bars(
    count: int, seeds: int
) -> None:
    """Truncation errors of all products point the same way."""
    data, net = halves(count), logistic()
    backend, exact = backend_of(net), Exact(net, data)
    n = backend.layout.n_local
    true = torch.linalg.eigvalsh(torch.stack([exact(e) for e in torch.eye(n)])).numpy()
    held = []
    for seed in range(seeds):
        with measuring(backend, data) as session:
            operator = FiniteDifferenceHessian(session)

            def fresh(k: int, seed: int = seed) -> Tensor:
                return random_vector(backend.layout, backend.space, seed=1000 * seed + k)

            pairs = ritz(lanczos(operator, fresh(0), 12, fresh))
        assert pairs.errors[-1] < 1e-2 * true[-1]
        held.append(abs(pairs.values[-1] - true[-1]) <= pairs.errors[-1])
    assert np.mean(held) >= 0.95


@pytest.mark.parametrize(
    ("bf16", "count"),
    [(False, 1), pytest.param(True, 16, marks=FULL), pytest.param(True, 1, marks=FULL)],
)
def test_an_estimate_holds_the_kinks_that_it_saw(bf16: bool, count: int) -> None:
    data = batches(count)
    net = train(kinked(), data, 40)
    _, told = figures(products(backend_of(net, bf16), Exact(net, data), data))
    assert told.min() > 0.2 and np.median(told) < 3, told


@pytest.mark.parametrize("count", [1, pytest.param(8, marks=FULL), 16])
def test_parameters_that_are_far_smaller_than_the_weights_norm_are_displaced_by_little(
    count: int,
) -> None:
    data = batches(count)
    net = train(uneven(), data, 40)
    errors, told = figures(products(backend_of(net, bf16=True), Exact(net, data), data))
    assert np.median(errors) < 0.5, errors  # that of u |w| / 16 is above 1
    assert told.min() > 0.2, told


@pytest.mark.parametrize("count", [1, 4, pytest.param(16, marks=FULL)])
def test_masters_that_bf16_holds_have_estimates_of_their_errors(count: int) -> None:
    """The rounding of w + hv and w - hv cancels in the nonlinearity ratio."""
    data = batches(count)
    net = train(mlp(), data, 40).bfloat16().float()
    masters = [p.detach().clone() for p in net.parameters()]
    backend = ModuleBackend(copy.deepcopy(net).bfloat16(), masters=masters)
    errors, told = figures(products(backend, Exact(net, data), data))
    assert errors.max() < 0.3 and told.min() > 0.2, (errors, told)


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        (1, 40),
        pytest.param(8, 40, marks=FULL),
        pytest.param(8, 200, marks=FULL),
        pytest.param(1, 200, marks=(FULL, OPEN)),
    ],
)
def test_what_extrapolation_removes_tells_the_error_that_it_leaves(count: int, steps: int) -> None:
    data = batches(count)
    net = train(mlp(), data, steps)
    _, told = figures(products(backend_of(net), Exact(net, data), data, "fourth_order"))
    assert told.min() > 0.2 and ((told > 1 / 3) & (told < 3)).mean() >= 0.7, told


class Root(nn.Module):
    """A quadratic form, and roots of what is left to an edge beyond which gradients are NaN."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(30))
        self.register_buffer("a", torch.randn(30, 30))
        self.gap, self.edge = gap, float(self.w.max()) + gap

    def forward(self, w: Tensor) -> Tensor:
        """A scalar."""
        left = self.edge - w
        roots = torch.where(left > 0, left.sqrt(), 0 * left).sum()
        a = self.get_buffer("a").to(w.dtype)
        return 0.5 * w @ (a + a.T) @ w + 0.1 * self.gap * roots


@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4])
def test_extremes_are_within_their_bars_where_gradients_are_not_finite_nearby(gap: float) -> None:
    net = Root(gap)
    weights = net.w.detach().double()
    true = torch.linalg.eigvalsh(torch.autograd.functional.hessian(net, weights)).numpy()
    backend = ModuleBackend(net)

    def fresh(k: int) -> Tensor:
        return random_vector(backend.layout, backend.space, seed=k)

    with measuring(backend, [None], lambda module, _: module(module.w)) as session:
        pairs = ritz(lanczos(FiniteDifferenceHessian(session), fresh(0), 20, fresh))
    assert abs(pairs.values[-1] - true[-1]) <= pairs.errors[-1]
    assert abs(pairs.values[0] - true[0]) <= pairs.errors[0]
    assert pairs.errors[[0, -1]].max() < 0.05 * true[-1]


def test_a_hessian_of_zero_shows_no_nonlinearity() -> None:
    data, net = batches(2), nn.Linear(10, 3)
    backend = ModuleBackend(net)
    with measuring(backend, data, lambda m, b: m(b[0]).sum()) as session:
        product = FiniteDifferenceHessian(session).matvec(torch.ones(backend.layout.n_local))
    assert product.norm == 0 and product.nonlinearity == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_product_of_which_no_bit_changes_has_what_rounding_hides_for_its_error(
    count: int,
) -> None:
    """A loss that is linear but for a ten-thousandth: 0 without an error, at any displacement."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        outputs = net(batch[0].to(next(net.parameters()).dtype))
        wide = outputs if outputs.dtype == torch.float64 else outputs.float()
        return wide.mean() + 1e-4 * wide.square().mean()

    torch.manual_seed(0)
    net, data = nn.Linear(10, 3).to(torch.bfloat16), batches(count)
    exact = Exact(net, data, loss)
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    with measuring(backend, data, loss) as session:
        product = FiniteDifferenceHessian(session).matvec(v)
    error = float((product.vector.double() - exact(v)).norm())
    assert product.error is not None and product.error * product.norm > error / 5
    with measuring(backend, data, loss) as session:
        pairs = ritz(lanczos(FiniteDifferenceHessian(session), v, 1, lambda _: v))
    true = torch.linalg.eigvalsh(exact.matrix()).numpy()
    assert abs(pairs.values[-1] - true[-1]) <= pairs.errors[-1]


class Pairs(nn.Module):
    """A net of pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 5)
        self.up, self.down = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)`, whose signs make two tokens, to `(b, 3)`."""
        tokens = ((x > 0).view(-1, 2, 5) * torch.tensor([1, 2, 4, 8, 16])).sum(-1) % 30
        return self.down(torch.tanh(self.up(self.embedding(tokens).flatten(1))))


def test_the_first_product_learns_from_the_change_between_its_displacements() -> None:
    """Its ratio r says little of the truncation of a block whose third derivative is small."""
    data = batches(3)
    net = train(Pairs(), data, 20)
    backend, exact, told = backend_of(net), Exact(net, data), list[tuple[float, float]]()
    for name, _ in backend.parameters:
        inside = Restricted(backend, [name])
        with inside.measuring(inside.objective(data, loss_of)) as session:
            for seed in range(4):
                v = random_vector(inside.layout, inside.space, seed=seed)
                truth = inside.select(exact(inside.embed(v)))
                product = FiniteDifferenceHessian(session).matvec(v)
                told.append(told_of(product, truth))
    _, ratios = figures(iter(told))
    assert ratios.min() > 0.2, ratios


class AtZero(nn.Module):
    """A tanh net whose weights are all zero, so that all tokens have the same probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        return self.net(x)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_rounding_that_all_tokens_share_is_in_the_estimates(count: int) -> None:
    """A short step changes no last bit of their cotangents, and all ratios are those of a smooth
    function: the largest eigenvalue was 0.02 of itself, with a bar of a tenth of that.
    """
    data, net = batches(count), AtZero().to(torch.bfloat16)
    true = torch.linalg.eigvalsh(Exact(net, data).matrix()).numpy()
    backend = backend_of(net)

    def fresh(k: int) -> Tensor:
        return random_vector(backend.layout, backend.space, seed=k)

    with measuring(backend, data) as session:
        pairs = ritz(lanczos(FiniteDifferenceHessian(session), fresh(0), 10, fresh))
    assert abs(pairs.values[-1] - true[-1]) <= pairs.errors[-1] < 0.3 * true[-1]
