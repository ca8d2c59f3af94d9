"""Models whose forward changes more than buffers: each evaluation is of one function, and training
goes on from what was there before.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import UnsupportedError
from tests.backends import state_jobs
from tests.backends.jobs import QUIET
from tests.backends.state_jobs import GLOBAL, MODELS, Net, data, state_of, told
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


def double_backward(net: nn.Module, v: Tensor, loss: Any = None, entry: Any = None) -> Tensor:
    """`H v` of a micro-batch, the first by default."""
    x, y = data()[0] if entry is None else entry
    value = net(x, y) if loss is None else loss(net, (x, y))
    weights = [p for p in net.parameters() if p.requires_grad]
    first = torch.autograd.grad(value, weights, create_graph=True)
    along = torch.cat([g.flatten() for g in first]) @ v
    return torch.cat([g.flatten() for g in torch.autograd.grad(along, weights)])


@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_changes_is_one_function_and_as_it_was(name: str) -> None:
    GLOBAL.manual_seed(7)
    net, entries = MODELS[name](), data()
    before = state_of(net, entries)
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(entries[:1])
    v = hessian.random_vector(seed=1)
    product = hessian.matvec(v)
    assert state_of(net, entries) == before
    expected = double_backward(MODELS[name](), v)
    assert (product.vector - expected).norm() < 1e-3 * expected.norm()
    GLOBAL.manual_seed(7)
    # Several micro-batches, and a failure in the middle.
    hessian.use(entries)
    assert hessian.self_test().passed
    assert state_of(net, entries) == before
    calls = []

    def failing(model: nn.Module, entry: Any) -> Tensor:
        calls.append(model(*entry))
        if len(calls) == 2:
            raise OSError("on purpose")
        return calls[-1]

    with pytest.raises(ds_hessian.MeasurementError, match="on purpose"):
        hessian.use(entries, failing).matvec(v)
    assert state_of(net, entries) == before


class Criterion(nn.Module):
    """A loss with a weight of its own, a teacher in train mode, and noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.teacher = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
        self.calls, self.noise = 0, np.random.default_rng(0)

    def forward(self, model: Net, entry: Any) -> Tensor:
        """Scalar loss."""
        self.calls += 1
        x, _ = entry
        target = self.teacher(x) + self.calls + self.noise.random()
        return self.scale * functional.mse_loss(model.b(model.hidden(x)), target)


@pytest.mark.parametrize("way", ["itself", "closure", "method", "containers"])
def test_what_a_loss_of_its_own_changes_is_as_it_was(way: str) -> None:
    criterion, net = Criterion(), Net()
    several = {"all": [criterion]}
    criterion.scale.grad = torch.tensor(5.0)
    kept = criterion.scale.grad
    losses: dict[str, Any] = {
        "itself": criterion,
        "closure": lambda model, entry: criterion(model, entry),
        "method": criterion.forward,
        "containers": lambda model, entry: several["all"][0](model, entry),
    }

    def all_told() -> str:
        parts = {**dict(criterion.named_buffers()), **dict(criterion.named_parameters())}
        return str((told(parts), criterion.calls, told(criterion.noise)))

    before = all_told()
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(data()[:1], losses[way])
    v = hessian.random_vector(seed=1)
    product = hessian.matvec(v)
    assert criterion.scale.grad is kept and float(kept) == 5.0
    assert all_told() == before
    expected = double_backward(Net(), v, Criterion())
    assert (product.vector - expected).norm() < 1e-3 * expected.norm()


def test_hooks_of_parameters_of_a_loss_of_its_own_rest() -> None:
    """As those by which an optimizer steps in the backward."""
    criterion, net, called = Criterion(), Net(), list[Tensor]()
    criterion.scale.register_post_accumulate_grad_hook(called.append)
    criterion.teacher[0].weight.register_hook(called.append)
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(data()[:1], criterion)
    hessian.matvec(hessian.random_vector(seed=1))
    assert not called
    criterion(net, data()[0]).backward()
    assert len(called) == 2


class Scaled(torch.autograd.Function):
    """x times a weight, by operations that torch hands to no mode, as a kernel's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        """Scale."""
        ctx.save_for_backward(x, scale)
        with torch._C.DisableTorchFunction():
            return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Of both."""
        x, scale = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return gradients[0] * scale, (gradients[0] * x).sum()


def test_gradients_of_what_only_a_written_function_reads_are_put_back() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    kept = scale.grad = torch.tensor(5.0)
    hessian: Any = ds_hessian.attach(Net(), config=QUIET)
    hessian.use(data()[:1], lambda model, entry: Scaled.apply(model.hidden(entry[0]), scale).mean())
    hessian.matvec(hessian.random_vector(seed=1))
    assert scale.grad is kept and float(kept) == 5.0


def test_views_of_weights_in_a_written_forward_are_not_kept() -> None:
    """Under ZeRO-3 they would be the whole model, gathered."""
    views = list["weakref.ref[Tensor]"]()

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            across = weight.t()
            views.append(weakref.ref(across))
            return x @ across

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
            return None, gradients[0].t() @ ctx.saved_tensors[0]

    backend = ModuleBackend(nn.Linear(3, 2, bias=False))
    objective = backend.objective(
        [torch.ones(4, 3)], lambda model, x: Linear.apply(x, model.weight).square().mean()
    )
    with backend.measuring(objective) as session:
        session.add_gradient(session.space.zeros(), range(1))
        assert views and not any(view() is not None for view in views)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("backward", [Tensor.backward, torch.autograd.backward])
def test_a_loss_that_runs_a_backward_pass_is_refused_by_name(
    backward: Callable[..., None], again: bool
) -> None:
    """Its gradients are added to those of the loss: twice the Hessian, with no word of it."""
    net = nn.Linear(3, 1)
    hessian = ds_hessian.attach(net, config={"progress": False})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).square().mean()
        backward(found, retain_graph=True)
        return model(x).square().mean() if again else found

    with pytest.raises(UnsupportedError, match="runs a backward pass itself"):
        hessian.spectrum([torch.ones(2, 3)], loss, num_matvecs=1)


class Normalises(Net):
    """A forward that writes the weights which it is about to use."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        with torch.no_grad():
            self.WAYS[self.way](self.a)
        return self.loss(self.hidden(x), y)

    WAYS: dict[str, Callable[[nn.Linear], object]]
    WAYS = {
        "in place": lambda layer: layer.weight.div_(layer.weight.norm()),
        "its data": lambda layer: layer.weight.data.clamp_(-0.1, 0.1),
        "a row": lambda layer: layer.weight[0].zero_(),
        "new data": lambda layer: setattr(layer.weight, "data", layer.weight.data * 0.5),
        "out": lambda layer: torch.mul(layer.weight, 0.5, out=layer.weight),
    }


@pytest.mark.parametrize("way", Normalises.WAYS)
def test_a_forward_that_writes_its_weights_is_refused_by_name(way: str) -> None:
    net = Normalises(way=way)
    before = copy.deepcopy(net.state_dict())
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(data())
    with pytest.raises(UnsupportedError, match=r"writes its own trainable weights \(a\.weight\)"):
        hessian.matvec(hessian.random_vector())
    assert all(torch.equal(before[k], value) for k, value in net.state_dict().items())


class Casts(Net):
    """A forward that casts a layer to the dtype that it has, as routers of Switch Transformers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        self.a = self.a.to(x.dtype)
        return self.loss(self.hidden(x), y)


def test_a_forward_that_binds_weights_to_what_they_are_writes_nothing() -> None:
    hessian: Any = ds_hessian.attach(Casts(), config=QUIET).use(data()[:1])
    v = hessian.random_vector(seed=1)
    expected = double_backward(Casts(), v)
    assert (hessian.matvec(v).vector - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize(
    ("stage", "name"),
    cells(
        [(stage, name) for stage in range(4) for name in MODELS],
        [
            *[(3, "a number of calls"), (3, "containers"), (1, "tensors"), (3, "buffers")],
            (1, "hooks of gradients"),
        ],
    ),
)
def test_engines_too(ranks: Ranks, stage: int, name: str) -> None:
    if (stage, name) == (3, "tensors"):
        pytest.skip("what a forward writes into a gathered parameter ZeRO-3 itself forgets")
    if (stage, name) == (3, "inputs"):
        pytest.skip(
            "ZeRO-3 itself cannot train a loss with a gradient in it: weights are partitioned"
        )
    config = {"zero_optimization": {"stage": stage}}
    (weights, v, found, _), _ = results = ranks(2).run(state_jobs.measured, name, config)
    assert all(same for *_, same in results)
    expected: list[Tensor] = []
    for entry in data():
        GLOBAL.manual_seed(7)
        net = MODELS[name]()
        net.load_state_dict({k: w for k, w in weights.items()}, strict=False)
        direction = torch.cat([v[n].flatten() for n, p in net.named_parameters() if n in v])
        expected.append(double_backward(net, direction, entry=entry))
    flat = torch.cat([found[n].flatten() for n, p in net.named_parameters() if n in v])
    mean = torch.stack(expected).mean(dim=0)
    assert (flat - mean).norm() < 1e-3 * mean.norm()


def test_gradients_from_before_zero_3_are_put_back(ranks: Ranks) -> None:
    """Torch takes none of another size than the weights, which are parted: the job had to end."""
    without, with_ = (
        ranks(2).run(state_jobs.with_gradients_from_before, measures)[0]
        for measures in (False, True)
    )
    assert without[1] and with_[1]
    assert all(torch.equal(with_[0][name], w) for name, w in without[0].items())


def test_a_loss_that_hands_gradients_to_another_engine_is_refused(ranks: Ranks) -> None:
    """It would train on them: its weights after the next step were others."""
    (without, _), (with_, message) = (
        ranks(2).run(state_jobs.with_a_critic, measures)[0] for measures in (False, True)
    )
    assert "hands gradients to another engine" in message
    assert all(torch.equal(with_[name], w) for name, w in without.items())
