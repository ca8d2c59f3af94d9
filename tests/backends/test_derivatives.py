"""Gradients that are not those of the loss are refused, and those that are stay as they were."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.errors import UnsupportedError

QUIET = {"progress": False, "plot": False}


class Net(nn.Module):
    """Three layers, and something between the first two."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.way = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4), way

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy, or a loss that the way returns."""
        h = self.way(self, torch.tanh(self.a(x)))
        return h if h.dim() == 0 else functional.cross_entropy(self.c(torch.tanh(self.b(h))), y)


def data() -> list[Any]:
    """One micro-batch."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(7, 5, generator=draw), torch.randint(4, (7,), generator=draw))]


class Scaled(torch.autograd.Function):
    """A gradient times a number: -1 turns it round, 0 stops it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scale, None


class Nearest(torch.autograd.Function):
    """Entries of a book, and the gradient handed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, book: Tensor) -> Tensor:
        return book[(x.unsqueeze(1) - book).square().sum(-1).argmin(1)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


@pytest.mark.parametrize("scale", [-1.0, 0.1, 0.0])
def test_a_backward_that_is_no_derivative_is_refused_by_name(scale: float) -> None:
    """A single product was 0.7 off, and said to be 2e-5."""
    net = Net(lambda m, h: h + Scaled.apply(h, 1.0) + Scaled.apply(h, scale))
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    with pytest.raises(UnsupportedError, match=r"derivative of its forward \(Scaled\)"):
        hessian.matvec(hessian.random_vector(seed=2))


def test_so_is_one_of_what_a_table_has() -> None:
    net = Net(lambda m, h: Nearest.apply(h, m.b.weight.detach()))
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    with pytest.raises(UnsupportedError, match="Nearest"):
        hessian.matvec(hessian.random_vector(seed=2))


class Doubled(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return 2 * gradients[0]


class Fused(torch.autograd.Function):
    """Cross entropy that writes its gradient over its logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        logits = logits.detach()
        loss = functional.cross_entropy(logits, y)
        logits.copy_((logits.softmax(-1) - functional.one_hot(y, 4)) / len(y))
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class Added(torch.autograd.Function):
    """A term of the loss that its value has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0].new_ones(())


class Recomputed(torch.autograd.Function):
    """A layer whose activations are made again, and whose weights' gradients by a backward."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, *gradients)
        return None, x.grad


class Counted(torch.autograd.Function):
    """Notes each call in a tensor."""

    calls = torch.zeros(())

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counted.calls += 1
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError


class Several(torch.autograd.Function):
    """Further values, which have no gradient, and numbers that are complex."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: None, turn: Tensor) -> tuple[Any, ...]:
        ctx.save_for_backward(turn)
        return x.argmax(-1), 3, (x.to(turn.dtype) * turn).real, None

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (turn,) = ctx.saved_tensors
        return gradients[2] * turn.real, None, None


class Complex(torch.autograd.Function):
    """A complex number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.complex64) * 2j

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (gradients[0] * -2j).real


def balance(x: Tensor) -> Tensor:
    """The number t of each row at which the sum of sigmoid(x - t) is 2, by bisection."""
    low, high = x.amin(-1, keepdim=True) - 3, x.amax(-1, keepdim=True) + 3
    for _ in range(60):
        middle = (low + high) / 2
        above = torch.sigmoid(x - middle).sum(-1, keepdim=True) > 2
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


class Balanced(torch.autograd.Function):
    """Values that comparisons find: none of them is the side of a kink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        shares = torch.sigmoid(x - balance(x))
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (shares,) = ctx.saved_tensors
        slope = shares * (1 - shares)
        mean = (gradients[0] * slope).sum(-1, keepdim=True) / slope.sum(-1, keepdim=True)
        return slope * (gradients[0] - mean)


def balanced(x: Tensor) -> Tensor:
    """The same; two steps of Newton's give the first and second derivatives of the balance."""
    t = balance(x.detach())
    for _ in range(2):
        shares = torch.sigmoid(x - t)
        t = t + (shares.sum(-1, keepdim=True) - 2) / (shares * (1 - shares)).sum(-1, keepdim=True)
    return torch.sigmoid(x - t)


class Sorted(torch.autograd.Function):
    """The nearest point of the simplex: what is above the number at which the sum is one."""

    @staticmethod
    def threshold(x: Tensor) -> Tensor:
        """The number, of what is largest."""
        largest = x.sort(-1, descending=True).values
        places = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
        sums = largest.cumsum(-1) - 1
        last = (places * largest > sums).sum(-1, keepdim=True) - 1
        return sums.gather(-1, last) / (last + 1)

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        made = torch.clamp(x - cls.threshold(x), min=0)
        made /= made.sum(-1, keepdim=True)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        there = (ctx.saved_tensors[0] > 0).to(gradients[0].dtype)
        along = gradients[0] * there
        return along - there * (along.sum(-1, keepdim=True) / there.sum(-1, keepdim=True))


class Bisected(Sorted):
    """The same, by bisection."""

    @staticmethod
    def threshold(x: Tensor) -> Tensor:
        """The number, between the largest one and that less one."""
        low, step = x.max(-1, keepdim=True).values - 1, 1.0
        for _ in range(50):
            step /= 2
            over = torch.clamp(x - low - step, min=0).sum(-1, keepdim=True) >= 1
            low = torch.where(over, low + step, low)
        return low


class Noted(Bisected):
    """Notes each call in a tensor, so that no further one is made."""

    calls = torch.zeros(())

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        cls.calls += 1
        return super().forward(ctx, x)


class Rooted(torch.autograd.Function):
    """A root of what a module returns, by bisection."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        low, high = x.amin(-1, keepdim=True) - 3, x.amax(-1, keepdim=True) + 3
        for _ in range(60):
            middle = (low + high) / 2
            above = module(x - middle).sum(-1, keepdim=True) > 2
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        shares = module(x - (low + high) / 2)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, Balanced.backward(ctx, *gradients)


class Sometimes(Balanced):
    """Bisects where it is told to; else the steps are Newton's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bisects: Tensor) -> Tensor:
        if bisects:
            return Balanced.forward(ctx, x)
        t = x.mean(-1, keepdim=True)
        for _ in range(20):
            shares = torch.sigmoid(x - t)
            change = (shares.sum(-1, keepdim=True) - 2) / (shares * (1 - shares)).sum(
                -1, keepdim=True
            )
            t = t + change
        ctx.save_for_backward(torch.sigmoid(x - t))
        return torch.sigmoid(x - t)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return Balanced.backward(ctx, *gradients), None


def nearest(x: Tensor) -> Tensor:
    """The nearest point of the simplex, with the derivatives of the piece."""
    there = x.detach() > Sorted.threshold(x.detach())
    kept = x.masked_fill(~there, 0.0)
    t = (kept.sum(-1, keepdim=True) - 1) / there.sum(-1, keepdim=True)
    return (kept - t).masked_fill(~there, 0.0)


def masked(x: Tensor, number: float) -> Tensor:
    """Scores of which some are masked."""
    return (3 * x).masked_fill(torch.arange(42).view(7, 6) % 5 < 2, number)


class CutOff(torch.autograd.Function):
    """Most values are one, since others are cut off, which its backward sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        made = torch.where(x > 0.3, x - 0.3, torch.zeros_like(x))
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (ctx.saved_tensors[0] > 0)


def halves(net: nn.Module, x: Tensor) -> list[Tensor]:
    """A reversible block: each half is added a function of the other."""
    a, b = x.chunk(2, -1)
    a = a + half(net, b, 0)
    return [a, b + half(net, a, 3)]


def half(net: nn.Module, x: Tensor, at: int) -> Tensor:
    """What one half is added of the other."""
    return torch.tanh(functional.linear(x, net.get_parameter("b.weight")[at : at + 3, at : at + 3]))


class Reversible(torch.autograd.Function):
    """A block of which the backward computes the inputs again, and gives weights gradients."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: Tensor) -> Tensor:
        made = torch.cat(halves(net, x.detach()), -1)
        ctx.net = net
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (a, b), (da, db) = (t.chunk(2, -1) for t in (ctx.saved_tensors[0], gradients[0]))
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            of_a = half(ctx.net, a, 3)
            torch.autograd.backward(of_a, db)
        da = da + a.grad
        with torch.enable_grad():
            b = (b - of_a).detach().requires_grad_()
            torch.autograd.backward(half(ctx.net, b, 0), da)
        return None, torch.cat([da, db + b.grad], -1)


class Timed(torch.autograd.Function):
    """One way in the forward, and back in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: Tensor) -> Tensor:
        ctx.times = times
        return x * (3 if times[0] > times[1] else 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (2 if ctx.times[1] > ctx.times[0] else 3), None


class Unit(torch.autograd.Function):
    """Rows of length 1; its forward has no context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        along = (y * gradients[0]).sum(-1, keepdim=True)
        return (gradients[0] - y * along) / x.norm(dim=-1, keepdim=True)


class Rounded(Unit):
    """Stairs, and a gradient that is handed on."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


TURN = torch.tensor(0.6 + 0.8j)
TIMES = torch.tensor([0.0, 1.0])
RIGHT: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "in place": (lambda m, h: Doubled.apply(m.b(h)), lambda m, h: 2 * m.b(h)),
    "written over": (
        lambda m, h: Fused.apply(m.c(h), data()[0][1]),
        lambda m, h: functional.cross_entropy(m.c(h), data()[0][1]),
    ),
    "recomputed": (lambda m, h: Recomputed.apply(m.b, h), lambda m, h: m.b(h)),
    "turned round by what is stopped": (
        lambda m, h: -h + (2 * h).detach(),
        lambda m, h: -h + (2 * h).detach(),
    ),
    "several": (lambda m, h: Several.apply(h, None, TURN)[2], lambda m, h: 0.6 * h),
    "complex": (lambda m, h: Complex.apply(h).imag, lambda m, h: 2 * h),
    "found by comparing": (lambda m, h: Balanced.apply(3 * h), lambda m, h: balanced(3 * h)),
    "found by comparing, and recomputed": (
        lambda m, h: checkpoint(Balanced.apply, 3 * h, use_reentrant=True),
        lambda m, h: balanced(3 * h),
    ),
    "of a module": (
        lambda m, h: Rooted.apply(nn.Sigmoid(), 3 * h),
        lambda m, h: balanced(3 * h),
    ),
    "recomputed with kinks": (
        lambda m, h: Recomputed.apply(nn.Sequential(m.b, nn.ReLU()), h),
        lambda m, h: functional.relu(m.b(h)),
    ),
    "noted": (lambda m, h: Noted.apply(3 * h), lambda m, h: nearest(3 * h)),
    "where all are alike": (
        lambda m, h: Bisected.apply(h - h.detach()) + Bisected.apply(3 * h),
        lambda m, h: nearest(h - h.detach()) + nearest(3 * h),
    ),
    **{
        f"{made.__name__} of {number}": (
            lambda m, h, f=made, n=number: f.apply(masked(h, n)),
            lambda m, h, n=number: nearest(masked(h, n)),
        )
        for made in (Sorted, Bisected)
        for number in (-1e4, -1e9, -3e38, -math.inf)
    },
    "cut off": (lambda m, h: CutOff.apply(h), lambda m, h: functional.relu(h - 0.3)),
    "reversible": (lambda m, h: Reversible.apply(m, h), lambda m, h: torch.cat(halves(m, h), -1)),
    "there and back": (lambda m, h: Timed.apply(h, TIMES), lambda m, h: 2 * h),
    "without a context": (
        lambda m, h: Unit.apply(h),
        lambda m, h: h / h.norm(dim=-1, keepdim=True),
    ),
    "one": (lambda m, h: Scaled.apply(h, 1.0), lambda m, h: h),
}


def exact(net: nn.Module, v: Tensor, *batch: Tensor) -> Tensor:
    """The product with the Hessian, by a double backward in fp64."""
    wide = copy.deepcopy(net).double()
    trained, (x, y) = list(wide.parameters()), batch or data()[0]
    gradients = torch.autograd.grad(
        wide(x.double(), y), trained, create_graph=True, materialize_grads=True
    )
    flat = torch.cat([g.reshape(-1) for g in gradients])
    products = torch.autograd.grad(flat @ v.double(), trained, materialize_grads=True)
    return torch.cat([p.reshape(-1) for p in products])


@pytest.mark.parametrize("name", RIGHT)
def test_a_derivative_is_measured_and_called_beside_the_model(name: str) -> None:
    """Also one that writes over its inputs, or the gradients of weights."""
    way, plain = RIGHT[name]
    net = Net(way)
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact(Net(plain), v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()
    assert all(p.grad is None for p in net.parameters())
    if name in ("cut off", "recomputed with kinks"):  # held
        assert (product.vector.double() - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("first", [False, True])
def test_each_way_of_a_function_is_judged(first: bool) -> None:
    """One that decides in some of its calls was held in all others: products were 0.1 off."""
    (x, y), *_ = data()
    batches = [(x, y), (x.flip(0) + 1, y)]
    net = Net(lambda m, h: Sometimes.apply(3 * h, m.told))
    told = iter([torch.tensor(first), torch.tensor(not first)])
    answers = {float(b[0].sum()): next(told) for b in batches}
    net.register_forward_pre_hook(lambda m, args: setattr(m, "told", answers[float(args[0].sum())]))
    hessian = ds_hessian.attach(net, config=QUIET).use(batches)
    v = hessian.random_vector(seed=2)
    plain = Net(lambda m, h: balanced(3 * h))
    expected = sum(exact(plain, v, *batch) for batch in batches) / 2
    product = hessian.matvec(v)
    off = (product.vector.double() - expected).norm() / expected.norm()
    assert off < 1e-3 and off < 3 * (product.error or 0)


def test_stairs_of_a_forward_without_a_context_are_refused_by_name() -> None:
    """Rounded values were held, and a gradient at others taken: an error of 2e-5 was told."""
    hessian = ds_hessian.attach(Net(lambda m, h: Rounded.apply(h)), config=QUIET).use(data())
    with pytest.raises(UnsupportedError, match=r"rounds, or only compares.*\(Rounded\)"):
        hessian.matvec(hessian.random_vector(seed=2))


def test_a_term_that_only_gradients_have_counts() -> None:
    net = Net(lambda m, h: Added.apply(h, m.b.weight.square().square().sum()))
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    v = hessian.random_vector(seed=2)
    other = Net(lambda m, h: h)
    expected = exact(other, v)
    at, size = 36, other.b.weight.numel()
    weight = other.b.weight.detach().double().reshape(-1)
    expected[at : at + size] += 12 * weight**2 * v[at : at + size].double()
    product = hessian.matvec(v).vector.double()
    assert (product - expected).norm() < 1e-3 * expected.norm()


class Large(torch.autograd.Function):
    """So large that a second call beside the first one does not fit."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Large.calls += 1
        if Large.calls == 2:
            raise torch.OutOfMemoryError
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def test_of_what_does_not_fit_beside_the_model_nothing_is_said() -> None:
    Large.calls = 0
    hessian = ds_hessian.attach(Net(lambda m, h: Large.apply(h)), config=QUIET).use(data())
    hessian.matvec(hessian.random_vector(seed=2))
    assert Large.calls > 2


def test_what_a_function_has_written_is_not_written_for_the_check() -> None:
    """The call of the model is the only one, and its error that of its backward."""
    net = Net(lambda m, h: Counted.apply(h))
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    Counted.calls.zero_()
    with pytest.raises(ds_hessian.HessianError, match="AssertionError"):
        hessian.matvec(hessian.random_vector(seed=2))
    assert Counted.calls == 0


def _hooked(hook: Callable[[Tensor], Tensor | None]) -> Callable[[Any, Tensor], Tensor]:
    def way(m: Any, h: Tensor) -> Tensor:
        h = m.b(h)
        if h.requires_grad:
            h.register_hook(hook)
        return h

    return way


def test_a_hook_that_changes_gradients_is_refused_by_name() -> None:
    of_tensor, of_module = Net(_hooked(lambda g: -g)), Net(lambda m, h: h)
    of_module.b.register_full_backward_hook(lambda m, into, out: (into[0] / 2,))
    for net in (of_tensor, of_module):
        hessian = ds_hessian.attach(net, config=QUIET).use(data())
        with pytest.raises(UnsupportedError, match="hook that changes gradients.*lambda"):
            hessian.matvec(hessian.random_vector(seed=2))


def test_a_hook_that_reads_gradients_or_returns_the_same_is_called() -> None:
    read = list[float]()
    net = Net(_hooked(lambda g: read.append(float(g.norm()))))
    net.c.register_full_backward_hook(lambda m, into, out: tuple(g.clamp(-9, 9) for g in into))
    before = list(net.c._backward_hooks.values())
    hessian = ds_hessian.attach(net, config=QUIET).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v).vector.double(), exact(Net(lambda m, h: m.b(h)), v)
    assert (product - expected).norm() < 1e-3 * expected.norm()
    assert read and list(net.c._backward_hooks.values()) == before
