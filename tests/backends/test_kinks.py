"""Which functions make kinks where they are crossed, and that all ranks know of one's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.backends.function import FixedFunction
from tests.ranks import RankPool

Function = Callable[[Tensor], Tensor]
KINKED: dict[str, Function] = {
    "relu": nn.ReLU(),
    "relu in place": lambda x: functional.relu_(1 * x),
    "leaky relu": nn.LeakyReLU(),
    "elu": nn.ELU(),
    "celu": nn.CELU(),
    "selu": nn.SELU(),
    "prelu": nn.PReLU(),
    "relu6": nn.ReLU6(),
    "hard swish": nn.Hardswish(),
    "hard sigmoid": nn.Hardsigmoid(),
    "hard tanh": nn.Hardtanh(),
    "threshold": nn.Threshold(0.1, 0.0),
    "soft shrink": nn.Softshrink(),
    "hard shrink": nn.Hardshrink(),
    "abs": abs,
    "clamp": lambda x: x.clamp(min=0.5),
    "clamp of each": lambda x: x.clamp(min=torch.linspace(-1, 1, 8)),
    "clip": lambda x: torch.clip(x, -1, 1),
    "bf16": lambda x: torch.relu(x.bfloat16()),
    "hinge": lambda x: (1 - x).clamp_min(0),
    "max pooling": nn.MaxPool1d(2),
    "adaptive max pooling": nn.AdaptiveMaxPool1d(2),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "max of two": lambda x: torch.max(x, x.flip(0)),
    "huber": lambda x: functional.huber_loss(x, torch.zeros_like(x), delta=0.5),
    "smooth l1": lambda x: nn.SmoothL1Loss()(x, torch.zeros_like(x)),
    "l1": lambda x: nn.L1Loss()(x, torch.zeros_like(x)),
    "margins": lambda x: functional.multi_margin_loss(x, torch.zeros(4, dtype=torch.long)),
    "a recurrence": lambda x: nn.RNN(8, 3, nonlinearity="relu")(x)[0],
    "recomputed": lambda x: checkpoint(torch.relu, x, use_reentrant=True),
}
JUMPS: dict[str, Function] = {
    "floor": torch.floor,
    "remainder": lambda x: x % 0.7,
    "fractions": torch.frac,
    "division to integers": lambda x: torch.div(x, 0.7, rounding_mode="trunc"),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "distances": lambda x: torch.cdist(x, x.detach(), p=1.0),
    "order 1": lambda x: torch.linalg.norm(x, ord=1),
    "scaled rows": lambda x: torch.renorm(x, 2, 0, 1.0),
    "fractional pooling": lambda x: functional.fractional_max_pool2d(x.view(1, 4, 8), 2, 2),
    "scattered": lambda x: x.new_zeros(2, 8).scatter_reduce(0, rows(), x, "amax"),
    "a bag's largest": lambda x: functional.embedding_bag(rows()[:, :2], x, mode="max"),
    "an image": lambda x: functional.grid_sample(torch.rand(1, 1, 4, 4), x.view(1, 4, 4, 2)),
    "vmap": torch.vmap(torch.relu),
}
"""What is crossed, and has to be known of."""


def rows() -> Tensor:
    """Two rows by turns."""
    return (torch.arange(4) % 2).unsqueeze(1).expand(4, 8)


SMOOTH: dict[str, Function] = {
    "euclidean distances": lambda x: torch.cdist(x, x.detach() + 1),
    "another width": lambda x: x.to(torch.float64),
    "added": lambda x: x.new_zeros(2, 8).scatter_reduce(0, rows(), x, "sum"),
    "read where it always is": lambda x: functional.grid_sample(
        x.view(1, 1, 4, 8), torch.rand(1, 2, 2, 2)
    ),
    "a table": lambda x: functional.embedding_bag(rows()[:, :2], x, mode="mean"),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "layer norm": nn.LayerNorm(8),
    "normalised": functional.normalize,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "cross entropy": lambda x: functional.cross_entropy(x, torch.zeros(4, dtype=torch.long)),
    "a guard": lambda x: x.square().clamp(min=-1e-6).sqrt(),
    "a mask": lambda x: torch.max(x, torch.full((), -1e30)),
    "relu of data": lambda x: torch.relu(x.detach()) * x,
    "relu of one side": lambda x: torch.relu(x.square()),
    "moduli": lambda x: torch.fft.fft(x).abs(),
    "no values": lambda x: torch.relu(x[:0]),
    "a held integer": lambda x: x * x.long(),
    "held integers": lambda x: x * x.to(torch.int32),
    "held choices": lambda x: x.max(-1).values + x.topk(2).values.sum(-1),
}


def is_smooth(function: Function) -> bool:
    """Whether a function of values on both sides of 0 counts as smooth."""
    x, fixed = torch.linspace(-6, 6, 32).view(4, 8).requires_grad_(), FixedFunction(dropout=False)
    with fixed.evaluating(0):
        function(x).sum().backward()
    return fixed.decisions.smooth


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("name", [*KINKED, *JUMPS])
def test_values_on_both_sides_of_a_kink_are_seen(name: str) -> None:
    assert not is_smooth({**KINKED, **JUMPS}[name])


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_and_kinks_out_of_reach_are_none(name: str) -> None:
    assert is_smooth(SMOOTH[name])


def displacements(data: list[Tensor]) -> list[float]:
    """The steps of some products of a ReLU net, of which a rank has its share of the data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2), nn.Tanh())
    with torch.no_grad():
        net[0].weight.abs_()
    model: nn.Module = net
    if dist.is_initialized() and dist.get_world_size() > 1:
        model, data = DistributedDataParallel(net), data[dist.get_rank() :: dist.get_world_size()]
    hessian = ds_hessian.attach(model, config={"finite_difference": {"kinks": "crossed"}})
    hessian.use(data, loss_fn=lambda model, x: model(x).square().mean())
    found = []
    with hessian.measuring():
        for seed in range(4):
            product = hessian.matvec(hessian.random_vector(seed=seed))
            assert product.error is not None and math.isfinite(product.error)
            found.append(product.displacement)
    return found


def test_kinks_of_one_rank_are_kinks_of_all(ranks: Callable[[int], RankPool]) -> None:
    """The inputs of one rank's units are positive; the step is decided alike."""
    torch.manual_seed(1)
    data = [torch.rand(8, 3), torch.randn(8, 3)]
    one, other = ranks(2).run(displacements, data, timeout=120)
    smooth, _ = ranks(2).run(displacements, [x.abs() for x in data], timeout=120)
    assert one == other
    assert all(h < s for h, s in zip(one[1:], smooth[1:], strict=True)), (one, smooth)


class Tiled(torch.autograd.Function):
    """What `function` makes, recomputed in the backward in tiles that are cut in another way."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(tile) for tile in x.chunk(2, dim=1)], dim=1)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        given, tiles = x.detach().requires_grad_().flatten(0, 1), list[Any]()
        for each, of in zip(given.chunk(2), cotangent.flatten(0, 1).chunk(2), strict=True):
            tile = each.requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(ctx.function(tile), of)
            tiles.append(tile.grad)
        return None, torch.cat(tiles).view(x.shape)


class TiledNet(nn.Module):
    """A layer around what `kind` makes of another one, in tiles or at once."""

    def __init__(self, kind: str, tiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.kind, self.tiled = kind, tiled

    def block(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return torch.relu(x) if self.kind == "relu" else x * (x >= x.topk(3).values[..., -1:])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = Tiled.apply(self.block, x) if self.tiled else self.block(x)
        return self.last(x).square().mean()


@pytest.mark.parametrize("kind", ["relu", "top"])
def test_each_micro_batch_has_its_own_sides_where_only_backwards_call_a_function(kind: str) -> None:
    torch.manual_seed(1)
    data = [torch.randn(2, 4, 3) for _ in range(3)]
    tiled, whole = (ds_hessian.attach(TiledNet(kind, t)).use(data) for t in (True, False))
    v = whole.random_vector(seed=0)
    product, exact = tiled.matvec(v), whole.matvec(v)
    assert product.error is not None and exact.error is not None
    error = tiled.dot(*[product.vector - exact.vector] * 2) ** 0.5
    size = exact.norm * tiled.dot(v, v) ** 0.5
    assert error <= 3 * (product.error + exact.error) * size
