"""The function that is measured is training's, but for what the settings switch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.errors import UnsupportedError
from ds_hessian.operators import finite_difference
from tests.routing import jobs

QUIET = {"progress": False, "plot": False}
WIDTH = 6


class Scaled(nn.Module):
    """A layer without parameters that drops whole samples, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Scale what is left."""
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1) > self.rate) / (1 - self.rate)


class Kernel(torch.autograd.Function):
    """A kernel of another library, which is given its probability."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.mask = (torch.rand(x.shape) >= p) / (1 - p)
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.mask, None


@dataclass(frozen=True)
class Settings:
    """A configuration that a module reads in its forward."""

    attention_dropout: float


class Dropping(nn.Module):
    """A layer that drops in one of many ways, and a term of the loss that only training has."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)
        self.drop, self.alpha, self.depth = nn.Dropout(0.3), nn.AlphaDropout(0.3), Scaled()
        self.config, self.way = Settings(attention_dropout=0.3), way

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean square error, and in train mode an auxiliary loss."""
        hidden = self.way(self, torch.tanh(self.up(x)))
        loss = (self.down(hidden) - y).square().mean()
        return loss + self.up.weight.square().square().sum() * self.training


def _attend(m: Any, x: Tensor) -> Tensor:
    q = x.unsqueeze(0)
    rate = 0.3 if m.training else 0.0
    return functional.scaled_dot_product_attention(q, q, q, None, rate).squeeze(0)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module": lambda m, x: m.drop(x),
    "alpha dropout": lambda m, x: m.alpha(x),
    "functional": lambda m, x: functional.dropout(x, 0.3, m.training),
    "functional, by keywords": lambda m, x: functional.dropout(x, training=m.training, p=0.3),
    "functional, of whole features": lambda m, x: functional.dropout1d(x.clone(), 0.3, m.training),
    "in place": lambda m, x: functional.dropout(x.clone(), 0.3, m.training, inplace=True),
    "of torch": lambda m, x: torch.dropout(x, 0.3, m.training),
    "native": lambda m, x: torch.native_dropout(x, 0.3, m.training)[0],
    "scaled dot product attention": _attend,
    "multi-head attention": lambda m, x: m.attention(x[None], x[None], x[None])[0][0],
    "recurrent": lambda m, x: m.recurrent(x[None])[0][0],
    "a kernel given an attribute": lambda m, x: (
        Kernel.apply(x, m.config.attention_dropout) if m.training else x
    ),  # fmt: skip
    "a module without parameters": lambda m, x: m.depth(x),
}


def data(number: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    shapes = (8, WIDTH), (8, 1)
    return [tuple(torch.randn(s, generator=generator) for s in shapes) for _ in range(number)]


def exact_product(net: nn.Module, v: Tensor) -> Tensor:
    """By double backward in fp64; what no dropout touches is in train mode."""
    wide: Any = copy.deepcopy(net).double().eval()
    wide.training = True
    way = wide.way
    wide.way = lambda m, x: _in_evaluation(m, way, x)
    trained = [p for p in wide.parameters() if p.requires_grad]
    loss = torch.stack([wide(*(t.double() for t in batch)) for batch in data()]).mean()
    gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    present = [(p, g) for p, g in zip(trained, gradients, strict=True) if g is not None]
    flat: Any = 0.0
    parts = dict(zip(map(id, trained), v.double().split([p.numel() for p in trained]), strict=True))
    for p, g in present:
        flat = flat + (g.reshape(-1) * parts[id(p)]).sum()
    products = torch.autograd.grad(flat, trained, allow_unused=True)
    return torch.cat([
        torch.zeros(p.numel(), dtype=torch.float64) if h is None else h.reshape(-1)
        for p, h in zip(trained, products, strict=True)
    ])  # fmt: skip


def _in_evaluation(m: Any, way: Any, x: Tensor) -> Tensor:
    m.training = False
    try:
        return way(m, x)
    finally:
        m.training = True


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_dropped_and_the_loss_is_that_of_training(way: str) -> None:
    net = Dropping(WAYS[way])
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    v = hessian.random_vector(seed=2)
    product = hessian.matvec(v)
    expected = exact_product(net, v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("way", WAYS)
def test_masks_are_training_s_and_fixed_where_they_are_asked_for(way: str) -> None:
    net = Dropping(WAYS[way])
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    v = hessian.random_vector(seed=2)
    plain = hessian.matvec(v).vector
    with hessian.measuring(dropout=True, displacement=1e-2):
        dropped, again = hessian.matvec(v).vector, hessian.matvec(v).vector
    assert torch.equal(dropped, again)
    assert (dropped - plain).norm() > 1e-2 * plain.norm()


def test_a_measurement_leaves_modes_and_probabilities_as_they_are() -> None:
    net = Dropping(WAYS["module"])
    net.attention.eval()

    def state() -> list[Any]:
        return [(m.training, {k: v for k, v in vars(m).items() if isinstance(v, float)})
                for m in net.modules()]  # fmt: skip

    before, random = state(), torch.get_rng_state()
    seen = list[Any]()
    net.up.register_forward_pre_hook(lambda *_: seen.append((net.attention.training, net.training)))
    ds_hessian.attach(net, config=QUIET).use(data()).spectrum(num_matvecs=2)
    assert state() == before
    assert torch.equal(random, torch.get_rng_state())
    assert set(seen) == {(False, True)}  # what the job has in eval mode stays so


def test_a_model_in_eval_mode_is_measured_as_it_trains() -> None:
    found = []
    for mode in (True, False):
        net = Dropping(WAYS["functional"]).train(mode)
        hessian = ds_hessian.attach(net, config=QUIET).use(data())
        found.append(hessian.matvec(hessian.random_vector(seed=2)).vector)
    assert torch.equal(*found)


class Normalised(nn.Module):
    """Batch normalisation, and spectral normalisation of a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        up = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.up, self.norm, self.down = up, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean square error."""
        return (self.down(torch.tanh(self.norm(self.up(x)))) - y).square().mean()


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_batch_normalisation_is_by_the_statistics_of_the_setting(batch_statistics: bool) -> None:
    net = Normalised()
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    before = copy.deepcopy(net.state_dict())
    v = hessian.random_vector(seed=2)
    with hessian.measuring(batch_statistics=batch_statistics):
        product = hessian.matvec(v).vector
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    wide = copy.deepcopy(net).double().eval()
    wide.norm.train(batch_statistics)
    if batch_statistics:
        return  # the power iteration moves along, which no double backward sees
    trained = list(wide.parameters())
    loss = torch.stack([wide(*(t.double() for t in batch)) for batch in data()]).mean()
    flat = torch.cat([
        g.reshape(-1) for g in torch.autograd.grad(loss, trained, create_graph=True)
    ])  # fmt: skip
    expected = torch.cat([h.reshape(-1) for h in torch.autograd.grad(flat @ v.double(), trained)])
    assert (product.double() - expected).norm() < 1e-3 * expected.norm()


# ---- the caller's context


def test_a_call_inside_of_no_grad_is_as_one_outside() -> None:
    found = []
    for context in (torch.enable_grad, torch.no_grad):
        net = Dropping(WAYS["functional"])
        with context():
            hessian = ds_hessian.attach(net, config=QUIET).use(data())
            found.append(hessian.spectrum(num_matvecs=3).alphas)
            assert torch.is_grad_enabled() == (context is torch.enable_grad)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize(
    "context, name",
    [
        (torch.inference_mode, "torch.inference_mode"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "torch.autocast"),
    ],
)
def test_a_context_that_changes_how_torch_computes_is_refused(
    context: Callable[[], Any], name: str
) -> None:
    hessian = ds_hessian.attach(Dropping(WAYS["functional"]), config=QUIET).use(data())
    with context(), pytest.raises(UnsupportedError, match=name):
        hessian.spectrum(num_matvecs=2)


def _grid(net: nn.Module, x: Tensor) -> Tensor:
    rows, columns = torch.meshgrid(net(x).flatten(), torch.arange(3.0), indexing="ij")
    return torch.einsum("ij,ij->i", torch.relu(rows) ** 2, columns).mean()


def test_functions_that_hand_themselves_to_a_mode_in_another_are_called() -> None:
    """`torch.meshgrid`, of position embeddings and anchors, hands itself over in a helper."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 2), torch.randn(8, 4)
    hessian = ds_hessian.attach(net, config=QUIET).use([x], _grid)
    v = hessian.random_vector(seed=1)
    first = torch.autograd.grad(_grid(net, x), [*net.parameters()], create_graph=True)
    along = torch.cat([g.flatten() for g in first]) @ v
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(along, [*net.parameters()])])
    assert (hessian.matvec(v).vector - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_engine_is_measured_the_same_in_any_context_and_compiled(ranks: Any, stage: int) -> None:
    """By the names of parameters without `_orig_mod.`, the same probe; reduced over the ranks."""
    for plain, *others in ranks(2).run(jobs.engine_in_contexts, stage):
        for other in others:
            assert all(map(torch.equal, plain, other))


def test_the_time_of_a_gradient_is_that_of_one_that_builds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of which the first forward takes 100 s and every other one 1 s."""
    now, calls = [0.0], [0]

    def loss(model: Any, batch: Any) -> Tensor:
        calls[0] += 1
        now[0] += 100.0 if calls[0] == 1 else 1.0
        return model(*batch)

    monkeypatch.setattr(finite_difference.time, "perf_counter", lambda: now[0])
    for number in (1, 8):
        calls[0] = 0
        hessian = ds_hessian.attach(Dropping(WAYS["functional"]), config=QUIET)
        spectrum = hessian.use(data(number), loss).spectrum(num_matvecs=2)
        assert spectrum.cost.seconds_per_gradient == number
