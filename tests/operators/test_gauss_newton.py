"""Gauss-Newton, residual and Fisher products against automatic differentiation in fp64."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends import Passes
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.krylov import lanczos
from ds_hessian.operators import Curvature, FiniteDifferenceHessian, GaussNewton, curvature
from ds_hessian.operators.displacement.control import StepController
from ds_hessian.operators.outputs.losses import read_cross_entropy
from ds_hessian.operators.outputs.steps import OutputSteps
from ds_hessian.operators.outputs.trials import Trial
from ds_hessian.vectors import random_vector
from tests.nets import TinyGPT, batch
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import Exact, batches, dense, loss_of, relative, train
from tests.tiers import cells

SLACK = 3.0
"""Estimates are within this factor of the error."""
LEAST = 0.2
"""No estimate is a smaller part of the error, in whatever arithmetic."""


def tokens(net: nn.Module, b: Any) -> Tensor:
    """The mean of what a loss of logits gives."""
    return functional.cross_entropy(net.logits(b[0]).flatten(0, 1), b[1].flatten())


def masked(net: nn.Module, b: Any) -> Tensor:
    """Every third label -100."""
    labels = b[1].flatten().clone()
    labels[::3] = -100
    return functional.cross_entropy(net.logits(b[0]).flatten(0, 1), labels)


def weighted(net: nn.Module, b: Any) -> Tensor:
    """A weight for each token, one of them zero."""
    each = functional.cross_entropy(
        net.logits(b[0]).flatten(0, 1), b[1].flatten(), reduction="none"
    )
    return (each * torch.linspace(0, 2, len(each), dtype=each.dtype)).sum() / 17


def smooth(net: nn.Module, b: Any) -> Tensor:
    """Label smoothing."""
    return functional.cross_entropy(
        net.logits(b[0]).flatten(0, 1), b[1].flatten(), label_smoothing=0.1
    )


def z_loss(net: nn.Module, b: Any) -> Tensor:
    """A penalty of log Z."""
    logits = net.logits(b[0]).flatten(0, 1)
    return (
        functional.cross_entropy(logits, b[1].flatten())
        + 1e-2 * logits.logsumexp(-1).square().mean()
    )


def squared(net: nn.Module, b: Any) -> Tensor:
    """Squares with a weight for each token."""
    logits = net.logits(b[0])
    target = functional.one_hot(b[1], logits.shape[-1]).to(logits.dtype)
    weights = torch.linspace(0.5, 2, logits.shape[1], dtype=logits.dtype)[:, None]
    return (weights * (logits - target).square()).mean()


LOSSES = {
    tokens: "cross entropy",
    masked: "cross entropy",
    weighted: "cross entropy",
    smooth: "a loss known by its values",
    z_loss: "a loss known by its values",
    squared: "squares",
}
DATA = [batch(500 + i, 0) for i in range(4)]


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for i in range(40):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
    return net.eval()


@contextmanager
def operators(
    net: nn.Module,
    data: Any,
    loss: Any,
    *names: OperatorName,
    outputs: str | None = None,
    passes: Passes | None = None,
) -> Iterator[tuple[ModuleBackend, list[Curvature]]]:
    backend = ModuleBackend(net)
    with backend.measuring(backend.objective(data, loss), passes or Passes()) as session:
        settings = FiniteDifferenceConfig()
        yield backend, [curvature(session, settings, name, outputs) for name in names]


def krylov(backend: ModuleBackend, exact: Any, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A random vector and powers of it, towards the top, with their exact products."""
    v = random_vector(backend.layout, backend.space, seed=0)
    for _ in range(count):
        product = exact(v)
        yield v, product
        v = (product / product.norm()).float()


@pytest.mark.parametrize("loss", cells(LOSSES, [weighted, squared]), ids=lambda f: f.__name__)
def test_products_are_exact_whatever_the_loss(gpt: nn.Module, loss: Callable[..., Tensor]) -> None:
    exact = ExactGaussNewton(gpt, "head", loss, DATA)
    with operators(gpt, DATA, loss, "ggn", "residual", "hessian") as (backend, found):
        g, r, h = found
        assert g.outputs == f"head: {LOSSES[loss]}"
        for k, (v, truth) in enumerate(krylov(backend, exact, 3)):
            products = [operator.matvec(v) for operator in (g, r, h)]
            error = relative(products[0].vector, truth)
            assert error < (3e-4 if k == 0 else 1e-4)
            assert error < SLACK * products[0].error
            gap = (products[0].vector + products[1].vector - products[2].vector).norm()
            assert gap < SLACK * sum(p.error * p.norm for p in products)
            form = g.forms(v, products[0].displacement).mean()
            assert abs(form - v.double() @ truth) < 1e-3 * products[0].norm
    assert not any(m._forward_hooks for m in gpt.modules())


@pytest.mark.parametrize(
    "loss", cells([tokens, masked, weighted], [masked]), ids=lambda f: f.__name__
)
def test_fisher_is_the_sum_over_tokens(gpt: nn.Module, loss: Callable[..., Tensor]) -> None:
    exact = ExactGaussNewton(gpt, "head", loss, DATA, fisher=True)
    with operators(gpt, DATA, loss, "fisher") as (backend, (fisher,)):
        for v, truth in krylov(backend, exact, 3):
            product = fisher.matvec(v)
            assert relative(product.vector, truth) < min(3e-4, SLACK * product.error)


def _poisson(f: Tensor, y: Tensor) -> Tensor:
    return (f.exp() - y * f).mean()


def _focal(f: Tensor, y: Tensor) -> Tensor:
    likelihood = f.log_softmax(-1).gather(-1, y[:, None])
    return (-((1 - likelihood.exp()) ** 2) * likelihood).mean()


def _binary(f: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(f[:, 0], (y % 2).to(f.dtype))


@pytest.mark.parametrize(
    ("outputs", "outer"),
    cells([(1, _poisson), (1, _binary), (3, _focal)], [(3, _focal)]),
    ids=lambda part: getattr(part, "__name__", str(part)).strip("_"),
)
def test_a_loss_that_looks_quadratic_or_entropic_at_one_point_is_neither(
    outputs: int, outer: Callable[..., Tensor]
) -> None:
    """One slope of scalar outputs is any; a focal loss has the cotangent of a weighted entropy."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, outputs))
    data = batches(3)

    def loss(net: nn.Module, b: Any) -> Tensor:
        x, y = b
        f = net(x.to(next(net.parameters()).dtype))
        return outer(f, y[:, None].to(f.dtype) if outer is _poisson else y)

    wide = copy.deepcopy(net).double()
    parameters = list(wide.parameters())
    exact = torch.zeros(1)
    for x, y in data:
        f = wide(x.double())
        rows = [torch.autograd.grad(e, parameters, retain_graph=True) for e in f.flatten()]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        target = y[:, None].double() if outer is _poisson else y
        inner = torch.autograd.functional.hessian(
            lambda z, target=target: outer(z, target), f.detach()
        ).reshape(f.numel(), -1)
        exact = exact + jacobian.T @ inner @ jacobian / len(data)
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(data, loss)
    with hessian.measuring(operator="ggn") as operator:
        for seed in range(3):
            v = hessian.random_vector(seed)
            product, truth = operator.matvec(v), exact @ v.double()
            error = relative(product.vector, truth)
            assert error < 1e-3 and (product.error or 0.0) > LEAST * error
    largest = hessian.spectrum(operator="ggn", num_matvecs=20).eigenvalue_max
    assert abs(largest.value - float(torch.linalg.eigvalsh(exact)[-1])) <= largest.error


def _poly(f: Tensor, y: Tensor) -> Tensor:
    likelihood = f.log_softmax(-1).gather(-1, y[:, None])
    return (0.3 * (1 - likelihood.exp()) - likelihood).mean()


def _log_cosh(f: Tensor, y: Tensor) -> Tensor:
    return (f - functional.one_hot(y, f.shape[-1])).cosh().log().mean()


def _unlikely(f: Tensor, y: Tensor) -> Tensor:
    return (1 - f.softmax(-1).gather(-1, y[:, None])).mean()


@pytest.mark.parametrize(
    "outer",
    cells([_focal, _poly, _log_cosh, _unlikely], [_poly, _unlikely]),
    ids=lambda f: f.__name__.strip("_"),
)
def test_losses_of_small_outputs_in_16_bits_are_as_exact_as_a_cross_entropy(
    outer: Callable[..., Tensor],
) -> None:
    """Of nearly even probabilities, as before training, the weights of tokens of a focal or a
    poly-1 loss differ by less than 16 bits tell at once; and differences of cotangents are not
    those of rounded ones. Where H_out has both signs, noise of a product is not as v'Gv.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    nn.init.normal_(net[2].weight, std=0.03)
    data = [(x.bfloat16(), y) for x, y in batches(2)]

    def loss(net: nn.Module, b: Any) -> Tensor:
        f = net(b[0])
        return outer(f if f.dtype == torch.float64 else f.float(), b[1])

    exact = ExactGaussNewton(net, "2", loss, data)
    with operators(net, data, loss, "ggn") as (backend, (g,)):
        assert g.outputs is not None and g.outputs.endswith("a loss known by its values")
        for k, (v, truth) in enumerate(krylov(backend, exact, 4)):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            print(f"error {error:.1e}, estimate {product.error:.1e}")
            assert product.error is not None and error < SLACK * product.error
            assert error < (2e-2 if k == 0 else 8e-3)


def test_a_loss_of_many_nearly_even_classes_is_told_from_a_cross_entropy() -> None:
    """Of 20,000 classes before training a focal loss shows only where its probabilities are others
    by factors: as a cross entropy's, v'Gv along the gradient would be -0.07 of what it is.
    """
    torch.manual_seed(0)
    net, data = nn.Linear(2, 20_000, bias=False), [(torch.randn(4, 2), torch.randint(20_000, (4,)))]
    nn.init.normal_(net.weight, std=1e-3)
    wide = copy.deepcopy(net).double()
    loss = _focal(wide(data[0][0].double()), data[0][1])
    (slope,) = torch.autograd.grad(loss, wide.weight, create_graph=True)
    v = slope.detach() / slope.norm().detach()
    (truth,) = torch.autograd.grad(slope, wide.weight, v)  # of a linear net G is H
    with operators(net, data, lambda net, b: _focal(net(b[0]), b[1]), "ggn") as (_, (g,)):
        assert g.outputs is not None and g.outputs.endswith("a loss known by its values")
        product = g.matvec(v.float().flatten())
        error = relative(product.vector, truth.flatten())
        assert product.error is not None and error < min(3e-3, SLACK * product.error)


def test_cotangents_of_the_first_micro_batch_are_sampled_too() -> None:
    """Where its outputs were found by what looks like a cross entropy, and is a focal loss, how far
    the loss bends there was not seen, and rho was chosen as if it were all noise.
    """
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 3)), batches(3)
    with operators(net, data, lambda net, b: _focal(net(b[0]), b[1]), "ggn") as (_, (g,)):
        assert isinstance(g, GaussNewton) and g._differences.passes.cotangents.keys() == {0, 1, 2}


def test_fisher_of_another_loss_is_refused(gpt: nn.Module) -> None:
    with (
        pytest.raises(UnsupportedError, match="empirical Fisher matrix of another loss"),
        operators(gpt, DATA, smooth, "fisher"),
    ):
        pass


def test_gauss_newton_is_the_hessian_of_softmax_regression() -> None:
    torch.manual_seed(0)
    data = batches(6)
    net = train(nn.Sequential(nn.Linear(10, 3)), data, 10)
    exact = Exact(net, data)
    with operators(net, data, loss_of, "ggn", "hessian", "residual") as (backend, found):
        g, h, r = found
        for v, truth in exact.krylov(backend, 4):
            product = g.matvec(v)
            assert relative(product.vector, truth) < min(1e-5, SLACK * product.error)
            assert relative(h.matvec(v).vector, product.vector) < 1e-3
            assert r.matvec(v).norm < 1e-3 * product.norm


def test_no_eigenvalue_is_below_zero_by_more_than_its_bar(gpt: nn.Module) -> None:
    hessian = ds_hessian.attach(gpt).use(DATA)
    spectrum = hessian.spectrum(num_matvecs=15, operator="ggn", progress=False)
    low = spectrum.eigenvalue_min
    assert low.value > -low.error and spectrum.provenance.operator == "ggn"
    assert hessian.spectrum(num_matvecs=25, progress=False).eigenvalue_min.value < -1e-2


NARROW = [(d, p) for d in (torch.bfloat16, torch.float16) for p in ("model", "fp32")]


@pytest.mark.parametrize(("dtype", "precision"), cells(NARROW, NARROW[:1]))
def test_narrow_passes(gpt: nn.Module, dtype: torch.dtype, precision: Any) -> None:

    net = copy.deepcopy(gpt).to(dtype)
    exact = ExactGaussNewton(net, "head", tokens, DATA)
    passes = Passes(precision=precision)
    with operators(net, DATA, None, "ggn", passes=passes) as (backend, (g,)):
        for k, (v, truth) in enumerate(krylov(backend, exact, 3)):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            limit = (3e-4 if precision == "fp32" else 0.2) if k == 0 else 0.05
            assert error < min(limit, product.error / LEAST), k


class Passing:
    """A session that counts the gradients and the forwards of single micro-batches."""

    def __init__(self, session: Any) -> None:
        self._session, self.gradients, self.forwards = session, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """Of the session."""
        self.gradients += len(micro_batches)
        self._session.add_gradient(out, micro_batches)

    def forward(self, micro_batches: range) -> None:
        """Of the session."""
        self.forwards += len(micro_batches)
        self._session.forward(micro_batches)

    def spent(self) -> float:
        """Passes since the last call, a forward as a third of a gradient."""
        found, self.gradients, self.forwards = self.gradients + self.forwards / 3, 0, 0
        return found


EXTRA = {tokens: (1, 1), squared: (3, 1), smooth: (2, 3)}
"""Passes of every micro-batch in which the loss is recognised, and further ones of the first."""


@pytest.mark.parametrize("loss", cells(EXTRA, [tokens]), ids=lambda f: f.__name__)
def test_the_cost_is_that_of_the_passes_that_are_made(
    gpt: nn.Module, loss: Callable[..., Tensor]
) -> None:
    data = [batch(500 + i, 0) for i in range(8)]
    backend, (every, first) = ModuleBackend(gpt), EXTRA[loss]
    least = 8 / 3 if loss is smooth else 5 / 3
    with backend.measuring(backend.objective(data, loss)) as session:
        passing: Any = Passing(session)
        g = curvature(passing, FiniteDifferenceConfig(), "ggn")
        assert passing.spent() == every * len(data) + first
        fresh = partial(random_vector, backend.layout, backend.space)
        lanczos(g, fresh(0), 20, fresh)
        assert g.cost.products == 20
        mean = passing.spent() / len(data) / 20
        assert mean == pytest.approx(g.cost.gradient_evaluations / 20)
        assert least <= mean <= (1.05 if loss is tokens else 1.1) * least
        forms = curvature(passing, FiniteDifferenceConfig(), "ggn")
        passing.spent()
        found = list[float]()
        for seed in range(3):
            forms.along(fresh(seed))
            found.append(passing.spent() / len(data))
        # All micro-batches at one displacement, and at another one the largest, and that in which
        # the loss bends most.
        each, doubts = (2 / 3, 0) if loss is not smooth else (8 / 3, 2)
        least, most = (each + some * (each + doubts) / 8 for some in (1, 2 if doubts else 1))
        assert all(least <= spent + 1e-9 and spent <= most + 1e-9 for spent in found[1:])
        # Of a loss known by its values four micro-batches are doubted, the first at up to two rho.
        assert found[0] <= (each * 18 + (4 * doubts + 2 * (each + doubts) if doubts else 0)) / 8


# ---- outputs


class Heads(nn.Module):
    """Two heads, the second of some classes, or one that is called twice."""

    def __init__(self, twice: bool = False, classes: int = 3) -> None:
        super().__init__()
        self.body, self.first = nn.Linear(10, 8), nn.Linear(8, 3)
        self.second = self.first if twice else nn.Linear(8, classes)
        self.classes = classes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of both cross entropies."""
        hidden = torch.tanh(self.body(x))
        return functional.cross_entropy(self.first(hidden), y) + functional.cross_entropy(
            self.second(0.5 * hidden), y % self.classes
        )


class Fused(nn.Module):
    """A head whose weight alone is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of logits that no module returns."""
        return functional.cross_entropy(
            functional.linear(torch.tanh(self.body(x)), self.head.weight), y
        )


@pytest.mark.parametrize(
    ("net", "outputs", "error", "message"),
    [
        (Heads(), None, UnsupportedError, "several heads.*'first', 'second'"),
        (Heads(classes=2), None, UnsupportedError, "several heads.*'first', 'second'"),
        (Heads(True), "first", UnsupportedError, "'first' that is called more than once"),
        (Fused(), "head", UnsupportedError, "did not call 'head'.*fused"),
        (Fused(), "haed", ConfigError, "no module 'haed'; did you mean 'head'"),
    ],
    ids=["two heads", "one of two classes", "one twice", "fused", "no such"],
)
def test_outputs_without_a_matrix_are_refused_by_name(
    net: nn.Module, outputs: str | None, error: type[Exception], message: str
) -> None:
    with (
        pytest.raises(error, match=message),
        operators(net, batches(2), None, "ggn", outputs=outputs),
    ):
        pass


def test_of_several_heads_one_may_be_named() -> None:
    """The other's loss is in the residual."""
    torch.manual_seed(0)
    net, data = Heads(), batches(2)

    def loss(net: nn.Module, batch: Any) -> Tensor:
        found = net(batch[0].to(next(net.parameters()).dtype), batch[1])
        assert isinstance(found, Tensor)
        return found

    exact = ExactGaussNewton(net, "second", loss, data)
    with operators(net, data, loss, "ggn", outputs="second") as (backend, (g,)):
        assert g.outputs == "second: cross entropy, without another part of the loss"
        v = random_vector(backend.layout, backend.space, seed=0)
        product = g.matvec(v)
        assert product.error is not None
        error = relative(product.vector, exact(v))
    assert error < SLACK * product.error < 1e-3


class TopGated(nn.Module):
    """Takes the better of three experts, times its share in the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate, self.head = nn.Linear(10, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        x = torch.tanh(self.body(x))
        share, best = self.gate(x).softmax(-1).max(-1, keepdim=True)
        each = torch.stack([expert(x) for expert in self.experts], -1)
        found = self.head(x + share * each.gather(-1, best[..., None].expand(-1, 8, 1))[..., 0])
        assert isinstance(found, Tensor)
        return found


def test_gates_of_the_best_expert_are_no_heads_of_few_rows() -> None:
    """Of one row the cotangent at such a gate is that of a cross entropy, if it has its sign."""
    data = [(x[:1], y[:1]) for x, y in batches(2)]
    seen = set[str | None]()
    for seed in range(4):
        torch.manual_seed(seed)
        with operators(TopGated(), data, loss_of, "ggn") as (_, (g,)):
            seen.add(g.outputs)
    assert seen == {"head: cross entropy"}


class Gated(nn.Module):
    """Layers between two experts each, by a softmax, as the residual ones of PR-MoE."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 8), nn.Linear(8, classes)
        self.gates = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, classes)`."""
        x = torch.tanh(self.body(x))
        for i, gate in enumerate(self.gates):
            first, second = (torch.tanh(self.experts[2 * i + k](x)) for k in range(2))
            part = gate(x).softmax(-1)
            x = x + first * part[..., :1] + second * part[..., 1:]
        found = self.head(x)
        assert isinstance(found, Tensor)
        return found


def gated_loss(net: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the first classes."""
    found = net(batch[0].to(next(net.parameters()).dtype))
    return functional.cross_entropy(found, batch[1] % found.shape[-1])


def gated_distance(net: nn.Module, batch: Any) -> Tensor:
    """Mean square of the distance from unit vectors."""
    found = net(batch[0].to(next(net.parameters()).dtype))
    return (found - functional.one_hot(batch[1], found.shape[-1])).square().mean()


@pytest.mark.parametrize(
    ("classes", "loss", "outputs"),
    [
        (3, gated_loss, "head: cross entropy"),
        (2, gated_loss, "head: cross entropy"),
        (3, gated_distance, "the model itself: squares"),  # which returns last
    ],
)
@pytest.mark.parametrize("dtype", cells([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_gates_between_two_experts_are_no_heads(
    classes: int, loss: Any, outputs: str, dtype: torch.dtype
) -> None:
    """Cotangents of their outputs look like those of a cross entropy of two classes."""
    torch.manual_seed(0)
    net, data = Gated(classes).to(dtype), batches(2)
    exact = ExactGaussNewton(net, "head", loss, data)
    with operators(net, data, loss, "ggn") as (backend, (g,)):
        assert g.outputs == outputs
        v = random_vector(backend.layout, backend.space, seed=0)
        product = g.matvec(v)
        assert product.error is not None
        error = relative(product.vector, exact(v))
    assert error < SLACK * product.error < (1e-3 if dtype == torch.float32 else 0.5)


class Centred(nn.Module):
    """Logits less their mean, after a layer that adds a large number to all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 8), nn.Linear(8, 3)
        nn.init.constant_(self.head.bias, 64.0)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        logits = self.head(torch.tanh(self.body(x)))
        return logits - logits.mean(-1, keepdim=True)


def test_outputs_that_differ_by_a_number_in_each_row_are_one_head() -> None:
    torch.manual_seed(0)
    net, data = Centred(), batches(2)
    exact = ExactGaussNewton(net, "head", loss_of, data)
    with operators(net, data, loss_of, "ggn") as (backend, (g,)):
        assert g.outputs == "the model itself: cross entropy"
        v = random_vector(backend.layout, backend.space, seed=0)
        truth, product = exact(v), g.matvec(v)
    error = relative(product.vector, truth)
    assert product.error is not None
    assert error < 1e-2 and LEAST * error < product.error < 5 * error


class LowRank(nn.Module):
    """A frozen layer and a low-rank update beside it, small enough that both have one softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.a, self.b = nn.Linear(8, 3), nn.Linear(8, 2), nn.Linear(2, 3)
        self.frozen.requires_grad_(False)
        nn.init.normal_(self.b.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 8)` to `(b, 3)`."""
        found = self.frozen(x) + self.b(self.a(x))
        assert isinstance(found, Tensor)
        return found


def test_a_part_of_the_head_is_not_the_head() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), LowRank()).to(torch.bfloat16)
    data = [(x.bfloat16(), y) for x, y in batches(2)]
    with operators(net, data, loss_of, "ggn") as (_, (g,)):
        assert g.outputs == "2: cross entropy"


def test_an_update_of_the_head_that_is_zero_is_in_the_matrix() -> None:
    """As all low-rank updates are at first: the frozen layer's outputs are the head's there."""
    torch.manual_seed(0)
    net, data = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), LowRank()), batches(2)
    nn.init.zeros_(net[2].b.weight)
    nn.init.zeros_(net[2].b.bias)
    exact = ExactGaussNewton(net, "2", loss_of, data)
    with operators(net, data, loss_of, "ggn") as (backend, (g,)):
        v = random_vector(backend.layout, backend.space, seed=0)
        product = g.matvec(v)
    assert product.error is not None and g.outputs == "2: cross entropy"
    assert relative(product.vector, exact(v)) < SLACK * product.error < 1e-3


class Scaled(nn.Linear):
    """A layer whose weights are of another size than its outputs."""

    factor: float

    def forward(self, x: Tensor) -> Tensor:
        """`(b, n)` to `(b, m)`."""
        return super().forward(x) / self.factor


def uneven() -> nn.Module:
    """Weights of two layers, a factor of 10^4 apart: a step of the norm of all saturates one."""
    torch.manual_seed(0)
    net = nn.Sequential(Scaled(10, 16), nn.SiLU(), Scaled(16, 3))
    for layer, factor in ((net[0], 1e-2), (net[2], 1e2)):
        layer.factor = factor
        for p in layer.parameters():
            p.data.mul_(factor)
    return net


def require_within(g: Curvature, pairs: Iterable[tuple[Tensor, Tensor]], most: float) -> None:
    """Require errors of products that their estimates allow, and of at most so much."""
    for v, truth in pairs:
        product = g.matvec(v)
        error = relative(product.vector, truth)
        print(f"error {error:.1e}, estimate {product.error:.1e} at {product.displacement:.1e}")
        assert error < min(most, SLACK * product.error)


@contextmanager
def of_uneven() -> Iterator[tuple[ModuleBackend, ExactGaussNewton, Curvature]]:
    """G of such a net, in bf16."""
    net, data = uneven(), batches(4)
    masters = [p.detach().clone() for p in net.parameters()]
    exact = ExactGaussNewton(net, "2", distance, data)
    backend = ModuleBackend(net.bfloat16(), masters=masters)
    with backend.measuring(backend.objective(data, distance), Passes(precision="model")) as session:
        yield backend, exact, curvature(session, FiniteDifferenceConfig(), "ggn")


def distance(net: nn.Module, batch: Any) -> Tensor:
    """Mean square of the distance from unit vectors."""
    found = net(batch[0].to(net[0].weight.dtype))
    return (found - functional.one_hot(batch[1], 3).to(found.dtype)).square().mean()


@pytest.mark.parametrize(("pilot", "norm"), [(1.0, 1.0), (1 / 4, 1.0), (1 / 16, 1.0), (1.0, 1e3)])
def test_the_displacement_is_the_best_one_of_all_micro_batches(pilot: float, norm: float) -> None:
    """Whose noise is less than the pilot's: the least of what is expected of the whole product,
    however large other weights are than those that bend it.
    """
    steps = OutputSteps(2.0**-8, norm, pilot, 0, None)
    steps._bend, steps._kappa, steps._noise = 1.7, 2.0, 4e-4
    heights = np.geomspace(1e-3, 1, 400)
    trial = Trial(1.0, 1.0, 1e-4, 0.0, 1.0, form=1.0, back=1.0)
    errors = [steps.error(float(h), trial, steps.quiet) for h in heights]
    assert steps.error(steps._best(trial), trial, steps.quiet) < 1.001 * min(errors)


def test_truncation_that_the_witness_shows_makes_displacements_smaller() -> None:
    """v'(Gv) by the backward and by the outputs alone are apart by 50 times what kappa expects."""

    def next_h(apart: float) -> float:
        steps = OutputSteps(2.0**-8, 1.0, 1.0, 0, None)
        steps._bend, steps._kappa, steps._noise, steps.learnt.products = 1.0, 0.1, 1e-5, 2
        product = Trial(
            0.1, 1.0, nonlinearity=0.1, roundoff=0, spread=1, form=1, back=1, apart=apart
        )
        steps.judge(product)
        steps.conclude(product, apart)
        return steps.learnt.h

    assert next_h(4e-3) == next_h(0.0)  # of rounding
    assert next_h(0.05) == pytest.approx(next_h(0.0) * 50 ** (-1 / 3), rel=1e-3)


@pytest.mark.parametrize("name", ["judge", "first_h"])
def test_no_product_is_made_where_its_step_is_lost(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It ended in an error about a displacement that nobody had given: of a product that was to be
    made again, or of the first trial of a later vector.
    """
    chosen = getattr(OutputSteps, name)

    def far_below(steps: OutputSteps, *args: Any) -> float:
        found = float(chosen(steps, *args))
        return 1e-6 * found if steps.learnt.products or args else found

    monkeypatch.setattr(OutputSteps, name, far_below)
    with of_uneven() as (backend, exact, g):
        require_within(g, krylov(backend, exact, 3), 0.2)


def under_autocast(net: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        f = net(batch[0])
    return functional.mse_loss(f.float(), batch[1])


@pytest.mark.parametrize(("name", "steps"), [("hessian", StepController), ("ggn", OutputSteps)])
def test_a_step_that_autocast_loses_has_no_product(
    monkeypatch: pytest.MonkeyPatch, name: OperatorName, steps: type
) -> None:
    """It was 0, with no error: the weights had the step, but not what autocast makes of them."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(16, 8)
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    objective = backend.objective([batch.split([5, 3], 1)], under_autocast)
    with backend.measuring(objective, Passes()) as session:
        given = curvature(session, FiniteDifferenceConfig(displacement=1e-6), name, None)
        with pytest.raises(NumericsError, match="lost in the rounding.*larger displacement"):
            given.matvec(v)
        searched = curvature(session, FiniteDifferenceConfig(), name, None)
        before = searched.matvec(v)
        monkeypatch.setattr(steps, "first_h", lambda _: 1e-6)
        after = searched.matvec(v)
    assert before.error is not None and after.error is not None
    assert relative(after.vector, before.vector.double()) < 3 * (before.error + after.error) < 0.3


def test_a_product_of_which_the_pilot_tells_nothing_has_all_of_it_for_its_error() -> None:
    """Trials whose steps were lost in the pilot alone left one without an error, as of a zero."""
    steps = OutputSteps(2.0**-8, 1.0, 1 / 4, 0, None)
    lost, product = (
        Trial(1e-3, size, nonlinearity=0.9, roundoff=0, spread=size, form=size, back=size)
        for size in (0.0, 1.0)
    )
    assert steps.advise([lost]) == (1e-3, True)
    assert steps.conclude(product, 0.1) == (None, 1.0)
    assert steps.conclude(lost, 0.0) == (None, None)


def test_truncation_of_vectors_of_another_kind_is_forgotten() -> None:
    """Random vectors after some towards the top had displacements a quarter as long as theirs."""
    steps = OutputSteps(2.0**-8, 1.0, 1.0, 0, None)
    steps.learnt = replace(steps.learnt, kappa=60.0, square=60.0**2, shown=9, spread=5.0, bend=1.0)
    steps.learnt = replace(steps.learnt, noise=1e-5, products=12)

    def kappas(spread: float) -> tuple[float, float]:
        steps.first_h()
        steps.advise([Trial(0.1, 1.0, 0.1, roundoff=0, spread=spread, form=1, back=1)])
        return steps.learnt.kappa, steps.learnt.square

    assert kappas(2.0) == (60.0, 60.0**2)
    assert kappas(1.0) == (1.0, 1.0) and steps.learnt.spread == 1.0


def _of_inputs(*sizes: float) -> list[tuple[Tensor, Tensor]]:
    """A micro-batch of inputs of each size, and classes."""
    torch.manual_seed(0)
    return [(size * torch.randn(16, 4), torch.randint(0, 3, (16,))) for size in sizes]


def _entropy(net: nn.Module, entry: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(net(entry[0]), entry[1])


@pytest.mark.parametrize("h", cells([0.005, 0.02, 0.1], [0.02]))
def test_a_given_displacement_is_judged_by_all_micro_batches(h: float) -> None:
    """Outputs of the pilot bend a twentieth as much as those of the others."""
    torch.manual_seed(1)
    data, net = _of_inputs(0.1, 2.0), nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    hessian = ds_hessian.attach(net, config={"progress": False}).use(data, _entropy)
    exact = ExactGaussNewton(net, "1", _entropy, data)
    for seed in range(3):
        v = hessian.random_vector(seed)
        with hessian.measuring(operator="ggn", displacement=h) as found:
            product = found.matvec(v)
        error = relative(product.vector, exact(v))
        print(f"error {error:.1e}, estimate {product.error:.1e}")
        assert product.error is not None and error < 3 * product.error


class Angles(nn.Module):
    """Of points in the plane, which bend most near its origin."""

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 2 m)` to `(b, m)`."""
        a, b = x.chunk(2, -1)
        return torch.atan2(a, b)


@pytest.mark.parametrize("seed", [4, 9])
def test_truncation_of_micro_batches_beside_the_pilot_is_in_the_error(seed: int) -> None:
    """It is 4 to 7 times what the pilot's is in units of r^2: of few of their examples."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), Angles())
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(4)]
    hessian = ds_hessian.attach(net, config={"progress": False}).use(data, _entropy)
    v = hessian.random_vector(1)
    with hessian.measuring(operator="ggn") as found:
        product = found.matvec(v)
    error = relative(product.vector, ExactGaussNewton(net, "1", _entropy, data)(v))
    assert product.error is not None and error < SLACK * product.error


@pytest.mark.parametrize("seed", cells([0, 1], [0]))
def test_a_pilot_with_next_to_no_part_in_a_product_leaves_its_place_to_another(seed: int) -> None:
    """It has 1e-4 of it: errors were up to 4e-2, and told 25 times too small."""
    torch.manual_seed(seed)
    bare = [nn.Linear(a, b, bias=False) for a, b in ((6, 8), (8, 3))]
    net, sizes = nn.Sequential(bare[0], nn.Tanh(), bare[1]), (0.01, 3.0, 3.0, 3.0)
    data = [(size * torch.randn(8, 6), torch.randint(0, 3, (8,))) for size in sizes]
    with operators(net, data, _entropy, "ggn", "ggn") as (backend, (ggn, resumed)):
        for v, truth in krylov(backend, ExactGaussNewton(net, "2", _entropy, data), 3):
            product = ggn.matvec(v)
            error = relative(product.vector, truth)
            assert product.error is not None and error < min(SLACK * product.error, 1e-4)
        resumed.load_state_dict(json.loads(json.dumps(ggn.state_dict())))
        assert torch.equal(resumed.matvec(v).vector, ggn.matvec(v).vector)


def test_kinks_that_outputs_cross_are_in_the_error() -> None:
    """Of the largest of four rows of a table; the change at a kink is of first order."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(12, 6, mode="max"), nn.Tanh(), nn.Linear(6, 3))
    data = [(torch.randint(0, 12, (8, 4)), torch.randint(0, 3, (8,))) for _ in range(2)]
    settings = {"progress": False, "finite_difference": {"kinks": "crossed"}}
    hessian = ds_hessian.attach(net, config=settings).use(data, _entropy)
    like = copy.deepcopy(net)
    like[0] = Largest(net[0].weight)
    exact = ExactGaussNewton(like, "2", _entropy, data)
    for seed in range(6):
        v = hessian.random_vector(seed)
        with hessian.measuring(operator="ggn") as found:
            product = found.matvec(v)
        error = relative(product.vector, exact(v))
        print(f"error {error:.1e}, estimate {product.error:.1e}")
        assert product.error is not None and error < 3 * product.error


class Largest(nn.Module):
    """`EmbeddingBag` of the largest rows, which has no double backward."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach())

    def forward(self, rows: Tensor) -> Tensor:
        """`(bags, width)`."""
        return functional.embedding(rows, self.weight).amax(1)


def test_outputs_that_saturate_are_left_downward() -> None:
    net, data = uneven(), batches(4)
    exact = ExactGaussNewton(net, "2", distance, data)
    with operators(net, data, distance, "ggn") as (backend, (g,)):
        for v, truth in krylov(backend, exact, 3):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            assert error < min(1e-3, SLACK * product.error)
            found = g.along(v)
            form = float(v.double() @ truth) / float(v.double() @ v.double())
            assert abs(found.value - form) < SLACK * found.error < 1e-2 * form


class FarApart(nn.Module):
    """A hidden layer whose stored weights are far smaller than its stored biases."""

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self.ratio = ratio
        self.weight = nn.Parameter(torch.randn(8, 10) * 0.3 / ratio)
        self.bias = nn.Parameter(torch.randn(8) * 500)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 8)`."""
        weight, bias = self.weight * self.ratio, self.bias * 1e-3
        return torch.tanh(functional.linear(x, weight.to(x), bias.to(x)))


def test_the_first_vector_finds_parameters_far_smaller_than_all() -> None:
    """Along them the outputs saturate at eight displacements, each a quarter of the one before."""
    torch.manual_seed(1)
    net, data = nn.Sequential(FarApart(1e4), nn.Identity(), nn.Linear(8, 3)), batches(4)
    exact = ExactGaussNewton(net, "2", distance, data)
    with operators(net, data, distance, "ggn") as (backend, (g,)):
        require_within(g, krylov(backend, exact, 3), 0.1)


def test_noise_of_the_backward_is_that_of_weights_rounded_each_by_itself() -> None:
    """In bf16 the norm of all, times its roundoff, is a step that bends a layer of small ones."""
    with of_uneven() as (backend, exact, g):
        for v, truth in krylov(backend, exact, 4):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            assert LEAST * error < product.error < SLACK * error


def test_sure_tokens_are_as_exact_as_others() -> None:
    """Their `H_out u` is a difference of nearly equal entries of u."""
    torch.manual_seed(0)
    f, y = 2 * torch.randn(32, 5), torch.randint(5, (32,))
    f[torch.arange(32), y] += 14
    p = f.double().softmax(-1)
    c = (p - functional.one_hot(y, 5)).float() / 32
    found = read_cross_entropy(f, c)
    assert found is not None
    u = torch.randn(32, 5)
    truth = p * (u - (p * u).sum(-1, keepdim=True)) / 32
    apart = (found.hessian(f, u) - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert apart.max() < 1e-5


@pytest.mark.parametrize("least", [0.0, 16.0], ids=["some", "all"])
def test_a_label_whose_probability_rounds_to_one_is_the_likeliest_class(least: float) -> None:
    """Its cotangent has no negative entry, and that of a surer token all of its rounding there."""
    torch.manual_seed(0)
    f, y, omega = torch.randn(32, 5), torch.randint(5, (32,)), torch.rand(32) + 0.5
    f[torch.arange(32), y] += torch.linspace(least, 30, 32)
    leaf = f.clone().requires_grad_()
    each = functional.cross_entropy(leaf, y, reduction="none")
    (c,) = torch.autograd.grad((omega * each).sum(), leaf)
    assert bool((c >= 0).all(-1).any())
    found = read_cross_entropy(f, c)
    assert found is not None
    d, u = f.double().softmax(-1) - functional.one_hot(y, 5), torch.randn(32, 5)
    d[torch.arange(32), y] = -d.where(d > 0, 0).sum(-1)
    weighted = omega[:, None] * d
    for mine, exact in (
        (found.fisher(f, u), weighted * (d * u).sum(-1, keepdim=True)),
        (found.less_rounding(c), weighted),
    ):
        assert ((mine - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 1e-4


def test_rounding_of_the_cotangents_is_in_the_error_of_the_residual() -> None:
    """Of data that the model knows by heart they are mostly rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = [torch.randn(16, 4) for _ in range(2)]
    data = [(b, net(b).detach() + 1e-6 * torch.randn(16, 3)) for b in x]

    def loss(net: nn.Module, b: Any) -> Tensor:
        weight = next(net.parameters())
        return functional.mse_loss(net(b[0].to(weight)), b[1].to(weight))

    exact, h = ExactGaussNewton(net, "", loss, data), Exact(net, data, loss)
    with operators(net, data, loss, "residual") as (backend, (r,)):
        for v, product in krylov(backend, exact, 3):
            truth, found = h(v) - product, r.matvec(v)
            error = relative(found.vector, truth)
            assert error > 1e-3
            assert LEAST * error < found.error < 10 * error


def test_large_outputs_are_displaced_by_more_than_they_are_rounded() -> None:
    """The loss is known by its values, at outputs that fp32 holds to a share of their size."""

    def loss(net: nn.Module, b: Any) -> Tensor:
        p, q = net(b[0].to(next(net.parameters()))).unbind(-1)
        return (p * q - b[1]).square().mean()

    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 2))
    net[2].weight.data.mul_(100)
    data = [(torch.randn(6, 5), torch.randn(6)) for _ in range(4)]
    exact = ExactGaussNewton(net, "", loss, data)
    with operators(net, data, loss, "ggn") as (backend, (g,)):
        for v, truth in krylov(backend, exact, 6):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            assert error < 5e-5
            assert error < SLACK * product.error


def test_a_part_of_the_loss_that_does_not_pass_the_outputs_is_none_of_their_rounding() -> None:
    torch.manual_seed(0)
    net, data = Auxiliary(), [(torch.randn(16, 10), torch.randint(3, (16,))) for _ in range(2)]

    def loss(net: nn.Module, b: Any) -> Tensor:
        return net(b[0].to(next(net.parameters())), b[1])

    exact, h = ExactGaussNewton(net, "head", loss, data), Exact(net, data, loss)
    with operators(net, data, loss, "residual") as (backend, (r,)):
        for v, product in krylov(backend, exact, 3):
            found = r.matvec(v)
            assert relative(found.vector, h(v) - product) < SLACK * found.error < 1e-3


class Auxiliary(nn.Module):
    """A part of the loss that does not pass the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy, and a penalty of the hidden activations."""
        hidden = torch.tanh(self.body(x))
        return functional.cross_entropy(self.head(hidden), y) + hidden.pow(4).mean()


def test_what_does_not_pass_the_outputs_is_in_the_residual() -> None:
    torch.manual_seed(0)
    net, data = Auxiliary(), batches(4)
    exact = ExactGaussNewton(net, "head", lambda m, b: m(*b), data)
    with operators(net, data, None, "ggn", "residual", "hessian") as (backend, (g, r, h)):
        for v, truth in krylov(backend, exact, 3):
            products = [operator.matvec(v) for operator in (g, r, h)]
            assert relative(products[0].vector, truth) < min(1e-4, SLACK * products[0].error)
            gap = (products[0].vector + products[1].vector - products[2].vector).norm()
            assert gap < SLACK * sum(p.error * p.norm for p in products)


def test_a_single_micro_batch_is_pilot_and_all(gpt: nn.Module) -> None:
    exact = ExactGaussNewton(gpt, "head", tokens, DATA[:1])
    with operators(gpt, DATA[:1], None, "ggn") as (backend, (g,)):
        for v, truth in krylov(backend, exact, 4):
            product = g.matvec(v)
            error = relative(product.vector, truth)
            assert error < min(3e-4, SLACK * product.error)


def test_a_measurement_may_have_several_operators(gpt: nn.Module) -> None:
    backend = ModuleBackend(gpt)
    with backend.measuring(backend.objective(DATA)) as session:
        first = FiniteDifferenceHessian(session)
        v = random_vector(backend.layout, backend.space, seed=3)
        alone = first.matvec(v).vector
    with operators(gpt, DATA, None, "ggn", "hessian", "fisher") as (_, (_, h, _)):
        assert torch.equal(h.matvec(v).vector, alone)


ANALYSES: dict[str, Callable[[Any, OperatorName], Any]] = {
    "eigenpairs": lambda h, name: h.eigenpairs(k=2, operator=name, sampling=True),
    "trace": lambda h, name: h.trace(num_matvecs=6, operator=name, blocks="layers"),
    "solve": lambda h, name: h.solve(h.random_vector(), [1.0], operator=name),
    "influence": lambda h, name: h.influence(DATA[:1], DATA[1:], [1.0], operator=name),
    "sharpness": lambda h, name: h.sharpness(preconditioned=False, operator=name),
    "block_coupling": lambda h, name: h.block_coupling(operator=name),
    "off_block_share": lambda h, name: h.off_block_share(num_probes=2, operator=name),
    "alignment": lambda h, name: h.alignment(k=2, operator=name, update=False),
    "self_test": lambda h, name: h.self_test(operator=name),
    "displacement_sweep": lambda h, name: h.displacement_sweep(
        ("random",), [1e-3, 1e-2], operator=name
    ),
}


EVERY = [(analysis, name) for analysis in ANALYSES for name in ("ggn", "residual", "fisher")]
QUICK = [("eigenpairs", "ggn"), ("sharpness", "residual"), ("self_test", "fisher")]


@pytest.mark.parametrize(("analysis", "name"), cells(EVERY, QUICK))
def test_analyses_take_every_operator(gpt: nn.Module, analysis: str, name: OperatorName) -> None:
    hessian = ds_hessian.attach(gpt).use(DATA)
    record = ANALYSES[analysis](hessian, name)
    assert record.provenance.operator == name
    if analysis == "self_test":
        assert record.passed, record.table()
    if analysis == "eigenpairs" and name == "ggn":
        exact = ExactGaussNewton(gpt, "head", tokens, DATA)
        for value, error, v in zip(record.values, record.errors, record.vectors, strict=True):
            assert abs(v.double() @ exact(v) - value) < error
        assert np.all(record.sampling_errors > 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_vector_that_the_outputs_see_in_second_order_alone_has_a_product_of_zero(
    smoothing: float,
) -> None:
    """All weights are zero: second differences of the outputs over none were taken for overflow."""
    net = nn.Sequential(nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False))
    for weight in net.parameters():
        nn.init.zeros_(weight)
    data = [(torch.randn(6, 5), torch.arange(6) % 3) for _ in range(2)]

    def loss(model: nn.Module, b: Any) -> Tensor:
        return functional.cross_entropy(model(b[0]), b[1], label_smoothing=smoothing)

    backend = ModuleBackend(net)
    with backend.measuring(backend.objective(data, loss)) as session:
        operator = curvature(session, FiniteDifferenceConfig(), "ggn")
        product = operator.matvec(random_vector(backend.layout, backend.space, 0))
    assert product.norm == 0 and not product.vector.any()
    assert product.nonlinearity is None


def logarithmic(factor: float) -> tuple[nn.Module, Any]:
    """A net at 0, and its loss, whose outputs have no value where `factor` f is below -1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 3))
    nn.init.zeros_(net[0].weight), nn.init.zeros_(net[0].bias)
    net[0].register_forward_hook(lambda module, args, f: (factor * f).log1p())

    def loss(net: nn.Module, b: Any) -> Tensor:
        return functional.cross_entropy(net(b[0].to(next(net.parameters()).dtype)), b[1])

    return net, loss


def test_outputs_that_have_no_value_far_out_are_differenced_nearer() -> None:
    """The first trials are beyond the logarithm's domain; no rung of the ladder is passed over."""
    net, loss = logarithmic(150)
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(batches(2), loss)
    v = hessian.random_vector(seed=0)
    with hessian.measuring(operator="ggn") as operator:
        product = operator.matvec(v)
    error = relative(product.vector, ExactGaussNewton(net, "1", loss, batches(2))(v))
    assert error < min(1e-4, 3 * (product.error or 0.0))


def test_a_displacement_at_which_others_than_the_pilot_have_no_outputs_is_given_up() -> None:
    """All micro-batches but the first leave the logarithm's domain a hundred times nearer."""
    net, loss = logarithmic(15)
    data = [(x * (100.0 if i else 1.0), y) for i, (x, y) in enumerate(batches(4))]
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(data, loss)
    exact = ExactGaussNewton(net, "1", loss, data)
    with hessian.measuring(operator="ggn") as operator:
        for seed in range(3):
            product = operator.matvec(v := hessian.random_vector(seed=seed))
            error = relative(product.vector, exact(v))
            assert error < min(1e-3, 5 * (product.error or 0.0)), (error, product)
    with (
        hessian.measuring(operator="ggn", displacement=1.0) as operator,
        pytest.raises(NumericsError, match=r"use a smaller displacement, or \"auto\""),
    ):
        operator.matvec(v)


@pytest.mark.parametrize(("smoothing", "seed"), cells([(0.0, 5), (0.1, 3)], [(0.0, 5)]))
def test_vectors_that_g_maps_to_nothing_spoil_no_others(smoothing: float, seed: int) -> None:
    """kappa in units of their products was that of all others, whose errors were 0.2; differences
    of their cotangents were rounding, for which the loss was differenced over less and less: later
    products were off by 0.1.
    """

    def loss(net: nn.Module, b: Any) -> Tensor:
        return functional.cross_entropy(net(b[0]), b[1], label_smoothing=smoothing)

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = [(torch.randn(1, 5), torch.tensor([i % 3])) for i in range(6)]
    hessian = ds_hessian.attach(net, None, {"progress": False}).use(data, loss)
    exact = ExactGaussNewton(net, "2", loss, data)
    nothing = torch.linalg.eigh(dense(exact, 57))[1][:, :4].T.float()
    with hessian.measuring(operator="ggn") as operator:
        for i in range(12):
            v = nothing[i - 4] if 4 <= i < 8 else hessian.random_vector(seed=i)
            product = operator.matvec(v)
            error, told = float((product.vector - exact(v)).norm()), product.error or 0.0
            if not 4 <= i < 8:
                assert error < 1e-3 * product.norm and told < 1e-2, (i, error, product)
