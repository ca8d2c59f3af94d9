"""Families against the estimates of errors: losses, nets and data on which nothing was chosen.

    python benchmarks/attack.py                        # all, fp32, 1, 4, 8 and 16 micro-batches
    python benchmarks/attack.py hot gru --arithmetic bf16 --counts 1
    python benchmarks/attack.py --all                  # those of benchmarks/families.py too

Each case is three operators: the Krylov vectors of a random one, the gradient alone, and an outlier
alone. The table has the least ratio of estimate to error, the share of products whose ratio is
below a fifth, the share within a factor of 3, and extra gradients of a product in a run of 20, all
but two of which are like the third to the ninth (docs/numerics.md).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from families import (
    ARITHMETICS,
    COUNTS,
    FAMILIES,
    Batch,
    Classifier,
    Family,
    Language,
    Problem,
    Regression,
    _dense,
    _shrunk,
    _zeroed,
    extra_in_a_run,
    halves,
    points,
    problem,
    relative,
    targets,
    tokens,
)
from torch import Tensor, nn
from torch.nn import functional

from ds_hessian.errors import NumericsError
from ds_hessian.operators import FiniteDifferenceHessian


class Loss(nn.Module):
    """A net and any loss of its outputs."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Of features `(b, d)`; labels `(b,)` or targets `(b, d)`."""
        dtype = next(self.parameters()).dtype
        out = self.net(x.to(dtype) if x.is_floating_point() else x)
        wide = out if dtype == torch.float64 else out.float()
        return self.loss(wide, y.to(wide.dtype) if y.is_floating_point() else y)


class HugeBias(nn.Module):
    """One parameter near 1024 beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 3)
        self.bias = nn.Parameter(torch.tensor([1024.0]))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        return self.down(torch.tanh(self.up(x) + (self.bias - 1024)))


class Sine(nn.Module):
    """An activation of high frequency."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.sin(10 * x)


class SquaredReLU(nn.Module):
    """An activation whose second derivative jumps."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.relu(x).square()


class Times(nn.Module):
    """A net's outputs, times a number."""

    def __init__(self, net: nn.Module, factor: float) -> None:
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x: Tensor) -> Tensor:
        """What the net takes."""
        return self.factor * self.net(x)


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(10, width), nn.Linear(10, width)
        self.down = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 3)`."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class OverBatch(nn.Module):
    """Batch normalisation by the micro-batch's own statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, width)`."""
        x = x - x.mean(0)
        return x / (x.square().mean(0) + 1e-5).sqrt() * self.weight + self.bias


class RootMeanSquare(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, width)`."""
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


class GatedRecurrence(nn.Module):
    """A GRU over tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, width), nn.Linear(width, 16)
        self.update, self.reset, self.new = (nn.Linear(2 * width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """`(b, t)` to `(b, t, 16)`."""
        inputs, states = self.embedding(x), list[Tensor]()
        state = torch.zeros_like(inputs[:, 0])
        for i in range(x.shape[1]):
            both = torch.cat([inputs[:, i], state], -1)
            update, reset = torch.sigmoid(self.update(both)), torch.sigmoid(self.reset(both))
            new = torch.tanh(self.new(torch.cat([inputs[:, i], reset * state], -1)))
            state = (1 - update) * new + update * state
            states.append(state)
        return self.head(torch.stack(states, 1))


class Pairs(nn.Module):
    """Cosines of two views, over a temperature: contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, b)`."""
        a = functional.normalize(self.first(x[:, :5]), dim=-1)
        b = functional.normalize(self.second(x[:, 5:]), dim=-1)
        return a @ b.T / 0.05


def _rare(generator: torch.Generator) -> Batch:
    """Tokens of very unequal frequency."""
    frequency = 1.0 / torch.arange(1, 17).float() ** 2
    drawn = torch.multinomial(frequency, 28, True, generator=generator).view(4, 7)
    return drawn[:, :-1], drawn[:, 1:]


def _unequal(generator: torch.Generator) -> Batch:
    """Micro-batches of very unequal size of their inputs."""
    x, y = points(generator)
    return x * float(10 ** (2 * torch.rand((), generator=generator) - 1)), y


def _signs(out: Tensor, y: Tensor) -> Tensor:
    return 2 * functional.one_hot(y, out.shape[-1]).to(out.dtype) - 1


def _focal(out: Tensor, y: Tensor) -> Tensor:
    logarithm = out.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return (-((1 - logarithm.exp()) ** 2) * logarithm).mean()


def _softplus(out: Tensor, y: Tensor) -> Tensor:
    return (functional.softplus(-20 * (2.0 * y[:, None] - 1) * out) / 20).mean()


def _log_sigmoid(out: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(out[:, 0], y.to(out.dtype))


class Rounded(torch.autograd.Function):
    """Nothing, whose gradient is rounded, as one that is sent in few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: float) -> Tensor:
        """Of outputs of any shape, and what their gradient is a multiple of."""
        ctx.unit = unit
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the outputs; as it is in fp64, of which the truth is made."""
        (gradient,) = gradients
        if gradient.dtype == torch.float64:
            return gradient, None
        return torch.round(gradient / ctx.unit) * ctx.unit, None


def rounded(bits: int, activation: type[nn.Module] = nn.Tanh) -> Family:
    """A net the gradient of whose outputs is a multiple of 2^-bits."""
    return Family(
        lambda: Loss(
            _dense(activation), lambda f, y: functional.mse_loss(Rounded.apply(f, 2.0**-bits), y)
        ),
        targets,
    )


def _zero(net: nn.Module) -> nn.Module:
    return _shrunk(net, 0.0)


def _deep() -> nn.Module:
    layers = [layer for _ in range(8) for layer in (nn.Linear(10, 10), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(10, 3))


def _normalised(norm: nn.Module, activation: nn.Module) -> nn.Module:
    return Classifier(nn.Sequential(nn.Linear(10, 16), norm, activation, nn.Linear(16, 3)))


def _cosh(out: Tensor, y: Tensor) -> Tensor:
    return torch.cosh(out).mean()


ATTACK = {
    # third derivatives that are zero, or nearly
    "even loss at 0": Family(lambda: Loss(_zero(nn.Linear(10, 3)), _cosh), targets, 0),
    "even loss": Family(lambda: Loss(_zeroed(_dense(nn.Tanh)), _cosh), targets, 0),
    "zero head, 2 classes": Family(
        lambda: Classifier(_zeroed(_dense(nn.GELU, (10, 24, 2)))), halves, 0
    ),
    "hot zero head": Family(lambda: Classifier(Times(_zeroed(_dense(nn.Tanh)), 30.0)), points, 0),
    "hot": Family(lambda: Classifier(Times(_dense(nn.Tanh), 30.0)), points),
    "nearly linear": Family(
        lambda: Regression(_shrunk(_dense(nn.Sigmoid, (10, 12, 3)), 0.05)), targets, 0
    ),
    "sigmoid": Family(lambda: Regression(_dense(nn.Sigmoid)), targets, 0),
    "quadratic": Family(lambda: Regression(nn.Linear(10, 3)), targets),
    # losses
    "poisson": Family(
        lambda: Loss(_dense(nn.SiLU), lambda f, y: (f.exp() - y.abs() * f).mean()), targets
    ),
    "cauchy": Family(
        lambda: Loss(_dense(nn.Tanh), lambda f, y: torch.log1p((f - y) ** 2).mean()), targets
    ),
    "fourth power": Family(
        lambda: Loss(_dense(nn.SiLU), lambda f, y: (f - y).pow(4).mean()), targets
    ),
    "focal": Family(lambda: Loss(_dense(nn.GELU), _focal), points),
    "steep softplus": Family(lambda: Loss(_dense(nn.Tanh, (10, 16, 1)), _softplus), halves),
    "loss 1e-8": Family(lambda: Classifier(_dense(nn.ELU), 1e-8), points),
    "loss 1e8": Family(lambda: Classifier(_dense(nn.ELU), 1e8), points),
    "contrastive": Family(
        lambda: Loss(Pairs(), lambda f, _: functional.cross_entropy(f, torch.arange(len(f)))),
        points,
    ),
    # kinks
    "hinge": Family(
        lambda: Loss(_dense(nn.Tanh), lambda f, y: (1 - _signs(f, y) * f).clamp_min(0).mean()),
        points,
    ),
    "squared hinge": Family(
        lambda: Loss(
            _dense(nn.Tanh), lambda f, y: (1 - _signs(f, y) * f).clamp_min(0).square().mean()
        ),
        points,
    ),
    "relu6": Family(lambda: Regression(_dense(nn.ReLU6)), targets),
    "hard swish": Family(lambda: Regression(_dense(nn.Hardswish)), targets),
    "leaky relu": Family(lambda: Classifier(_dense(nn.LeakyReLU)), points),
    # kinks of the gradient's slope
    "elu": Family(lambda: Regression(_dense(nn.ELU)), targets),
    "celu": Family(lambda: Classifier(_dense(nn.CELU)), points),
    "squared relu": Family(lambda: Classifier(_dense(SquaredReLU)), points),
    "huber": Family(lambda: Loss(_dense(nn.Tanh), functional.huber_loss), targets),
    "smooth l1": Family(
        lambda: Loss(_dense(nn.SiLU), lambda f, y: functional.smooth_l1_loss(f, y, beta=0.3)),
        targets,
    ),
    # nets and data
    "huge bias": Family(lambda: Classifier(HugeBias()), points),
    "gru": Family(lambda: Classifier(GatedRecurrence(10)), tokens, 100),
    "rare tokens": Family(lambda: Classifier(Language(8, 1, norm=True)), _rare),
    "unequal": Family(lambda: Classifier(_dense(nn.Tanh)), _unequal),
    "sine": Family(lambda: Regression(_dense(Sine)), targets),
    "swiglu": Family(lambda: Classifier(Gated(20)), points),
    "batch normalisation": Family(lambda: _normalised(OverBatch(16), nn.GELU()), points),
    "rms normalisation": Family(lambda: _normalised(RootMeanSquare(16), nn.Softplus()), points),
    "deep": Family(lambda: Classifier(_deep()), points),
    # gradients in steps: of probabilities next to 1, and of few bits
    "sure": Family(lambda: Classifier(_dense(nn.SiLU)), points, 2000, memorised=True),
    "sure tanh": Family(lambda: Classifier(_dense(nn.Tanh)), points, 1000, memorised=True),
    "sure attention": Family(
        lambda: Classifier(Language(8, 1, norm=True)), tokens, 400, memorised=True
    ),
    "sure sigmoid": Family(
        lambda: Loss(_dense(nn.Tanh, (10, 16, 1)), _log_sigmoid), halves, 500, memorised=True
    ),
    "rounded": rounded(16),
    "coarse": rounded(13),
}


@dataclass(frozen=True)
class Found:
    """A product of one case.

    Attributes:
        told: Its estimate over its error.
        error: Its error, relative.
        extra: Gradients beyond those of its formula.
        first: Whether it is the first one of the Krylov vectors.
        alone: Whether it is of an operator of its own.
    """

    told: float
    error: float
    extra: float
    first: bool
    alone: bool


def products(p: Problem) -> Iterator[Found]:
    """Products of one problem beside exact ones."""
    alone = [p.alone] if p.alone else []
    groups = [p.vectors, *([pair] for pair in (*alone, *p.vectors[4:5]))]
    with p.measuring() as session:
        for number, pairs in enumerate(groups):
            operator = FiniteDifferenceHessian(session)
            for i, (v, truth) in enumerate(pairs):
                before, size = operator.cost.gradient_evaluations, float(truth.norm())
                if not size:
                    continue
                product = operator.matvec(v)
                error = relative(product.vector, truth)
                told = (product.error or 0.0) * product.norm / size
                extra = operator.cost.gradient_evaluations - before - len(operator.scheme.nodes)
                yield Found(told / max(error, 1e-12), error, extra, i == 0, number > 0)


def extra_of(case: Sequence[Found]) -> float:
    """Extra gradients of a product in a run of 20."""
    return extra_in_a_run([product.extra for product in case if not product.alone])


def line(name: str, cases: Sequence[Sequence[Found]]) -> str:
    """Figures of these cases together."""
    told = np.array([product.told for case in cases for product in case])
    extra = [extra_of(case) for case in cases]
    error = np.median([product.error for case in cases for product in case])
    return (
        f"| {name} | {len(told)} | {told.min():.2f} | {np.mean(told < 0.2):.1%} | "
        f"{np.mean((told > 1 / 3) & (told < 3)):.0%} | {error:.0e} | {np.mean(extra):.2f} |"
    )


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*")
    parser.add_argument("--all", action="store_true", help="benchmarks/families.py's too")
    parser.add_argument("--arithmetic", nargs="*", default=["fp32"], choices=ARITHMETICS)
    parser.add_argument("--counts", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    FAMILIES.update(ATTACK)
    names, found = args.families or list(FAMILIES if args.all else ATTACK), defaultdict(list)
    print("| | products | least | below 1/5 | within 3x | median error | extra |")
    print("|---|---|---|---|---|---|---|")
    for name in names:
        for arithmetic in args.arithmetic:
            for count in args.counts:
                try:
                    case = list(products(problem(name, arithmetic, count, args.seed)))
                except NumericsError as error:
                    print(f"{name}, {arithmetic}, {count}: {error}")
                    continue
                for key in (name, arithmetic, f"{count} micro-batches", "all"):
                    found[key].append(case)
        print(line(name, found[name]), flush=True)
    for key in (*args.arithmetic, *(f"{count} micro-batches" for count in args.counts), "all"):
        print(line(key, found[key]))


if __name__ == "__main__":
    main()
