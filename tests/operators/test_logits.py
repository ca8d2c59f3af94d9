"""Logits that a loss takes and that are no module's outputs: Gauss-Newton is that in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.config import FiniteDifferenceConfig, OperatorName
from ds_hessian.operators import curvature
from ds_hessian.operators.outputs.find import ITSELF
from ds_hessian.vectors import random_vector
from tests.operators.gauss_newton import ExactGaussNewton, of_functions
from tests.operators.nets import batches, relative

CAP = 0.7
DATA = batches(3)


class Net(nn.Module):
    """A head, one beside it, and a weight of another that is no module's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.aside, self.head = nn.Linear(10, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Outputs of the heads, `(b, 3)`."""
        h = torch.tanh(self.body(x))
        return {"aside": self.aside(h), "head": self.head(h), "bare": h @ self.weight.T}


def capped(f: dict[str, Tensor]) -> Tensor:
    return CAP * torch.tanh(f["head"] / CAP)


def smoothed(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(x, y, label_smoothing=0.1)


def picked(x: Tensor, y: Tensor) -> Tensor:
    return -x.log_softmax(-1).gather(1, y[:, None]).mean()


def named(x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(target=y, input=x)


Logits = Callable[[dict[str, Tensor]], Tensor]
KNOWN, VALUES = "cross entropy", "a loss known by its values"
MOVED: dict[str, tuple[Logits, Callable[[Tensor, Tensor], Tensor], str]] = {
    "scaled": (lambda f: 3 * f["head"], functional.cross_entropy, KNOWN),
    "scaled, by name": (lambda f: f["head"] / 4, named, KNOWN),
    "capped": (capped, functional.cross_entropy, KNOWN),
    "capped, smoothed labels": (capped, smoothed, VALUES),
    "capped, by log_softmax": (capped, picked, KNOWN),
    "a weight of no module": (lambda f: f["bare"], functional.cross_entropy, KNOWN),
    "two heads added": (lambda f: f["aside"] + 2 * f["head"], functional.cross_entropy, KNOWN),
}


def products(
    loss: Callable[..., Tensor],
    *names: OperatorName,
    net: nn.Module | None = None,
    outputs: str | None = None,
) -> tuple[nn.Module, Tensor, list[Any], str]:
    """A net, a random vector, its products by several operators, and the outputs of the first."""
    torch.manual_seed(0)
    net = Net() if net is None else net
    backend = ModuleBackend(net)
    v = random_vector(backend.layout, backend.space, seed=0)
    with backend.measuring(backend.objective(DATA, loss)) as session:
        settings = FiniteDifferenceConfig()
        found: list[Any] = [curvature(session, settings, name, outputs) for name in names]
        return net, v, [operator.matvec(v) for operator in found], found[0].outputs


def _called(logits: Logits, x: Tensor, net: Callable[..., Any]) -> Tensor:
    return logits(net(x))


def _loss(of_logits: Callable[[Tensor, Tensor], Tensor], y: Tensor, f: Tensor) -> Tensor:
    return of_logits(f, y)


@pytest.mark.parametrize("name", MOVED)
def test_the_matrix_is_that_in_the_logits_of_the_loss(name: str) -> None:
    logits, of_logits, kind = MOVED[name]

    def loss(net: nn.Module, b: Any) -> Tensor:
        return of_logits(logits(net(b[0].to(next(net.parameters()).dtype))), b[1])

    net, v, (g, r, h), outputs = products(loss, "ggn", "residual", "hessian")
    assert outputs == f"the logits of the loss: {kind}"
    each = [
        of_functions(net, partial(_called, logits, x.double()), partial(_loss, of_logits, y), v)
        for x, y in DATA
    ]
    truth = torch.stack(each).mean(0)
    error = relative(g.vector, truth)
    assert error < 3 * g.error < (3e-4 if kind == KNOWN else 1e-2)
    gap = float((g.vector + r.vector - h.vector).norm())
    assert gap < 3 * sum(p.error * p.norm for p in (g, r, h))


def twice(f: dict[str, Tensor], y: Tensor) -> Tensor:
    x = 3 * f["head"]
    return functional.cross_entropy(x, y) + 0.1 * x.logsumexp(-1).square().mean()


def around(f: dict[str, Tensor], y: Tensor) -> Tensor:
    return functional.cross_entropy(3 * f["head"], y) + f["head"].square().mean()


def aside(f: dict[str, Tensor], y: Tensor) -> Tensor:
    target = functional.one_hot(y, 3).to(f["head"].dtype)
    return functional.cross_entropy(3 * f["aside"], y) + (f["head"] - target).pow(4).mean()


def two(f: dict[str, Tensor], y: Tensor) -> Tensor:
    return functional.cross_entropy(3 * f["head"], y) + functional.cross_entropy(2 * f["head"], y)


def as_it_is(f: dict[str, Tensor], y: Tensor) -> Tensor:
    return functional.cross_entropy(f["head"][None].flatten(0, 1), y, label_smoothing=0.1)


@pytest.mark.parametrize("of_outputs", [twice, around, two, as_it_is])
def test_a_module_is_taken_where_the_loss_depends_on_it_otherwise(
    of_outputs: Callable[[dict[str, Tensor], Tensor], Tensor],
) -> None:
    def loss(net: nn.Module, b: Any) -> Tensor:
        return of_outputs(net(b[0].to(next(net.parameters()).dtype)), b[1])

    net, v, (g,), outputs = products(loss, "ggn")
    assert outputs == f"head: {VALUES}"
    exact = ExactGaussNewton(net, "head", loss, DATA)
    assert relative(g.vector, exact(v)) < 3 * g.error < 1e-2


class Wide(nn.Module):
    """Outputs in fp64, of a head that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(10, 8), nn.Linear(8, 3).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        """`(b, 3)`."""
        return self.head(torch.tanh(self.body(x)).double())


def test_outputs_may_be_in_fp64() -> None:
    def loss(net: nn.Module, b: Any) -> Tensor:
        return functional.cross_entropy(net(b[0]), b[1])

    torch.manual_seed(0)
    net = Wide()
    job = ds_hessian.attach(net, config={"progress": False}).use(DATA, loss)
    v = job.random_vector()
    with job.measuring(operator="ggn") as operator:
        found = operator.matvec(v)
    error = relative(found.vector, ExactGaussNewton(net, "head", loss, DATA)(v))
    assert found.error is not None and error < 3 * found.error < 1e-3


def test_of_a_loss_of_several_outputs_of_the_model_the_matrix_is_in_all() -> None:
    """It had been in one of them alone, and the other's part in the residual."""

    def loss(net: nn.Module, b: Any) -> Tensor:
        return aside(net(b[0].to(next(net.parameters()).dtype)), b[1])

    def both(x: Tensor, net: Callable[..., Any]) -> Tensor:
        f = net(x)
        return torch.cat([f["head"], f["aside"]], -1)

    def of_both(y: Tensor, f: Tensor) -> Tensor:
        return aside({"head": f[:, :3], "aside": f[:, 3:]}, y)

    require_in_both(loss, both, of_both)


def require_in_both(
    loss: Callable[..., Tensor],
    both: Callable[..., Tensor],
    of_both: Callable[[Tensor, Tensor], Tensor],
    most: float = 1e-2,
    net: nn.Module | None = None,
    outputs: str | None = None,
) -> None:
    names: list[OperatorName] = ["ggn", "residual", "hessian"]
    net, v, (g, r, h), words = products(loss, *names, net=net, outputs=outputs)
    assert words == f"{ITSELF}: {VALUES}"
    each = [of_functions(net, partial(both, x.double()), partial(of_both, y), v) for x, y in DATA]
    assert relative(g.vector, torch.stack(each).mean(0)) < 3 * g.error < most
    gap = float((g.vector + r.vector - h.vector).norm())
    assert gap < 3 * sum(p.error * p.norm for p in (g, r, h))


MASKS = [-math.inf, torch.finfo(torch.float32).min, -1e9]


def mask(f: Tensor, number: float) -> Tensor:
    """The middle class of each row, or the last, is masked."""
    place = 1 + torch.arange(len(f))[:, None] % 2
    return f.scatter(1, place, number)


def focal(f: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(f, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@pytest.mark.parametrize("number", MASKS)
@pytest.mark.parametrize(
    ("of_logits", "kind"), [(functional.cross_entropy, KNOWN), (focal, VALUES)]
)
def test_masked_classes_count_for_nothing(
    of_logits: Callable[[Tensor, Tensor], Tensor], kind: str, number: float
) -> None:
    """Infinite ones had been refused, and large ones taken for the size of the outputs: products
    were 300 times less accurate, of displacements as large as rounding of 1e9 would need.
    """

    def logits(f: dict[str, Tensor]) -> Tensor:
        return mask(f["head"], number)

    def loss(net: nn.Module, b: Any) -> Tensor:
        return of_logits(logits(net(b[0].to(next(net.parameters()).dtype))), 0 * b[1])

    net, v, (g,), outputs = products(loss, "ggn")
    assert outputs.endswith(kind)
    each = [
        of_functions(net, partial(_called, logits, x.double()), partial(_loss, of_logits, 0 * y), v)
        for x, y in DATA
    ]
    assert relative(g.vector, torch.stack(each).mean(0)) < 3 * g.error < 3e-4


class Both(nn.Module):
    """Returns two heads, each with a class that is masked."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.net, self.number = Net(), number

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`(b, 3)` each."""
        f = self.net(x)
        return mask(f["head"], self.number), mask(f["aside"], self.number)


@pytest.mark.parametrize("number", MASKS)
@pytest.mark.parametrize("outputs", [None, ITSELF])
def test_of_several_cross_entropies_of_what_a_model_returns_the_matrix_is_in_all(
    outputs: str | None, number: float
) -> None:
    """It had been in the first one alone; masked heads had looked alike."""

    def of_both(y: Tensor, f: Tensor) -> Tensor:
        one, other = f.split(3, -1)
        return functional.cross_entropy(one, 0 * y) + functional.cross_entropy(other, 0 * y)

    def both(x: Tensor, net: Callable[..., Any]) -> Tensor:
        return torch.cat(net(x), -1)

    def loss(net: nn.Module, b: Any) -> Tensor:
        return of_both(b[1], both(b[0].to(next(net.parameters()).dtype), net))

    require_in_both(loss, both, of_both, 1e-3, Both(number), outputs)
