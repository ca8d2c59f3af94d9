"""Models whose forward changes more than buffers, on engines too."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.backends.zero.host import OF_HOOKS
from ds_hessian.errors import HessianError
from tests.backends.jobs import QUIET, full_weights, make_engine

GLOBAL = torch.Generator()


class Net(nn.Module):
    """Two layers, and whatever state a case adds."""

    def __init__(self, **state: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 1)
        for name, value in state.items():
            setattr(self, name, value)

    def hidden(self, x: Tensor) -> Tensor:
        """The values between the layers."""
        return torch.tanh(self.a(x))

    def loss(self, hidden: Tensor, y: Tensor, factor: Any = 1.0) -> Tensor:
        """A loss that depends on the state by a factor."""
        return functional.mse_loss(self.b(hidden * factor), y)


class Counts(Net):
    """A number of calls, as schedules of temperatures have it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        self.calls = getattr(self, "calls", 0) + 1
        return self.loss(self.hidden(x), y, 1 + self.calls)


class Remembers(Net):
    """The last hidden values, as a recurrent state that goes on."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        hidden = self.hidden(x)
        if self.memory is not None:
            hidden = hidden + self.memory
        self.memory = hidden.detach()
        return self.loss(hidden, y)


class Appends(Net):
    """Containers of several kinds, and an array, which the loss reads."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        hidden = self.hidden(x)
        self.seen.append(float(hidden.detach().mean()))
        self.logs["calls"] = self.logs.get("calls", 0) + 1
        self.logs["inner"].append(self.logs["calls"])
        self.recent.append(self.logs["calls"])
        self.kinds.add(len(self.seen))
        self.array += 1
        total = len(self.seen) + len(self.logs["inner"]) + sum(self.recent) + len(self.kinds)
        return self.loss(hidden, y, total + float(self.array.sum()))


class Writes(Net):
    """Tensors that are no buffers, frozen parameters, and one that is bound anew."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        hidden = self.hidden(x)
        self.plain[1:] *= 2
        self.inside["list"][0].add_(1)
        with torch.no_grad():
            self.frozen.lerp_(torch.ones(4), 0.5)
            self.momentum.data.mul_(0.5).add_(torch.ones(6), alpha=0.5)
        self.bound.data = self.bound.data + 1
        state = self.plain.sum() + self.inside["list"][0].sum() + self.bound.sum()
        return self.loss(hidden, y, state + self.frozen.sum() + self.momentum.sum())


class Registers(Net):
    """Buffers that a forward makes, binds, shares between modules, and cannot write."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.zeros(())
        self.register_buffer("late", None)
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.register_buffer("count", shared)
        self.b.register_buffer("count", shared)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        hidden = self.hidden(x)
        self.late = torch.ones(()) + (0 if self.late is None else self.late)
        self.register_buffer("new", getattr(self, "new", torch.zeros(())) + 1)
        self.count += 1
        return self.loss(hidden, y, self.b.count + self.wide.sum() + self.new + self.late)


class Hooks(Net):
    """Hooks that the first forward registers, as transformers' capture outputs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        if not getattr(self, "hooked", False):
            self.hooked = True
            self.a.register_forward_hook(lambda module, args, output: output * 1.5)
        return self.loss(self.hidden(x), y)


class Draws(Net):
    """Noise of generators of its own, and of one that no module has."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        noise = torch.rand((), generator=self.own) + torch.rand((), generator=GLOBAL)
        noise = noise + self.numpy.random() + self.python.random() + self.many[0].random()
        return self.loss(self.hidden(x), y, noise)


class Spoils(Net):
    """Inputs that are written in place, and differentiated by."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        x.mul_(0.5)
        y += 1
        x.requires_grad_()
        hidden = self.hidden(x)
        (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=True)
        return self.loss(hidden, y) + slope.square().mean()


class Listens(Net):
    """Hooks of gradients: of a module, whose count the loss reads; of parameters, one of which
    counts too, and one halves what training has accumulated.
    """

    def __init__(self) -> None:
        super().__init__(heard=0, dropout=0.1)  # which measurements switch
        self.b.register_full_backward_hook(self.hear)
        self.b.weight.register_hook(self.hear)
        self.a.weight.register_post_accumulate_grad_hook(self.halve)

    def hear(self, *_: Any) -> None:
        """Count."""
        self.heard += 1

    def halve(self, parameter: Tensor) -> None:
        """Halve the gradient."""
        if parameter.grad is not None:
            parameter.grad *= 0.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        return self.loss(self.hidden(x), y, 1 + self.heard)


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


MODELS: dict[str, Callable[[], Net]] = {
    "a number of calls": Counts,
    "the last hidden state": lambda: Remembers(memory=None),
    "containers": lambda: Appends(
        seen=[], logs={"inner": []}, recent=deque(maxlen=3), kinds=set(), array=np.zeros(2)
    ),
    "tensors": lambda: Writes(
        plain=torch.ones(3),
        inside={"list": [torch.zeros(2)]},
        frozen=frozen(torch.zeros(4)),
        momentum=frozen(torch.zeros(6)),
        bound=frozen(torch.zeros(2)),
    ),
    "buffers": Registers,
    "hooks": Hooks,
    "generators": lambda: Draws(
        own=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(2),
        python=random.Random(3),
        many=[np.random.RandomState(4)],
    ),
    "inputs": Spoils,
    "hooks of gradients": Listens,
}


def data(count: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    draw = [torch.randn(count, 8, n, generator=generator) for n in (4, 1)]
    return [(x.clone(), y.clone()) for x, y in zip(*draw, strict=True)]


def told(value: Any) -> Any:
    """What a value is and holds, to compare."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, value.tolist(), value.grad is None
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return str(value.get_state())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {k: told(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [told(v) for v in value]
    return value


def state_of(module: nn.Module, *others: Any) -> Any:
    nets = [vars(m) for m in module.modules() if isinstance(m, Net)]
    own = [{k: told(v) for k, v in each.items() if k not in OF_HOOKS} for each in nets]
    inside = [told({**m._parameters, **m._buffers}) for m in module.modules()]
    hooks = sum(len(m._forward_hooks) for m in module.modules())
    return str((own, inside, told(GLOBAL), told(others), hooks))


def measured(name: str, config: dict[str, Any]) -> Any:
    """Weights, v and Hv of an engine, and whether everything is as it was."""
    torch.manual_seed(0)
    GLOBAL.manual_seed(7)
    engine = make_engine(MODELS[name](), **config, hessian=QUIET)
    entries = [data()[dist.get_rank()]]
    hessian = engine.hessian.use(entries)
    v = hessian.random_vector(seed=1)
    before = state_of(engine.module, entries)
    product = hessian.matvec(v)
    same = state_of(engine.module, entries) == before
    out = full_weights(engine), hessian.gather(v), hessian.gather(product.vector), same
    engine.destroy()
    return out


def with_gradients_from_before(measures: bool) -> tuple[Any, bool]:
    """Weights after a step of a model that had gradients before ZeRO-3 parted its weights, with
    spectra in between or not; whether these are still there.
    """
    (entry,), net = data(1), Net()
    net.loss(net.hidden(entry[0]), entry[1]).backward()
    engine = make_engine(net, hessian=QUIET)

    def loss(engine: Any, entry: Any) -> Tensor:
        return functional.mse_loss(engine(entry[0]), entry[1])

    net.forward = lambda x: net.b(net.hidden(x))
    before = [p.grad for p in net.parameters()]
    if measures:
        engine.hessian.use([entry], loss).spectrum(num_matvecs=2)
    kept = all(p.grad is g and g is not None for p, g in zip(net.parameters(), before, strict=True))
    engine.backward(loss(engine, entry))
    engine.step()
    out = full_weights(engine), kept
    engine.destroy()
    return out


def with_a_critic(measures: bool) -> tuple[Any, str]:
    """Weights of another engine after a step, and why a loss that hands it gradients, as it trains
    on by itself, is not measured.
    """
    torch.manual_seed(0)
    engine, critic = (make_engine(nn.Linear(4, 1), hessian=QUIET) for _ in range(2))
    entry, message = data()[dist.get_rank()], ""

    def loss(engine: Any, entry: Any) -> Tensor:
        return functional.mse_loss(engine(entry[0]), critic(entry[0]))

    if measures:
        try:
            engine.hessian.use([entry], loss).matvec(engine.hessian.random_vector(seed=1))
        except HessianError as error:
            message = str(error)
    critic.backward(functional.mse_loss(critic(entry[0]), entry[1]))
    critic.step()
    out = full_weights(critic), message
    for each in (engine, critic):
        each.destroy()
    return out
