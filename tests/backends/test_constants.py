"""Values through which a model stops gradients are constants: products are a double backward's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.errors import UnsupportedError
from tests.backends import constant_jobs
from tests.tiers import cells


class Net(nn.Module):
    """Two layers, and one way to stop gradients between them."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.way = nn.Linear(5, 6), nn.Linear(6, 3), way
        self.target = nn.Linear(5, 6).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(6))
        self.register_buffer("scales", torch.linspace(0.05, 0.2, 6))
        self.register_buffer("table", torch.randn(9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A loss with all second derivatives."""
        h = self.way(self, torch.tanh(self.up(x)))
        return (self.down(h).exp() - y).square().mean() + (h * h).mean()


@torch.no_grad()
def _moving(m: Any, h: Tensor) -> Tensor:
    m.target.weight.mul_(0.5).add_(m.up.weight, alpha=0.5)
    return m.target(h[:, :5])


def _noted(m: Any, h: Tensor) -> Tensor:
    m.kept[:3] = h.detach().mean(0)[:3]
    return h * m.kept


def _slope(m: Any, h: Tensor) -> Tensor:
    """A weight made of gradients, as of adversarial losses."""
    (g,) = torch.autograd.grad(h.square().sum(), m.up.weight, retain_graph=True)
    return h * g.norm()


def _penalty(m: Any, h: Tensor) -> Tensor:
    leaf = h.detach().requires_grad_()
    (g,) = torch.autograd.grad(m.down(leaf).square().sum(), leaf, create_graph=True)
    return h * g


def _branch(m: Any, h: Tensor) -> Tensor:
    rows = [row if float(row.sum()) < 0.1 else row.square() for row in h]
    return torch.stack(rows)


def _written(m: Any, h: Tensor) -> Tensor:
    other = h.detach().clone()
    other.mul_(h)
    return other


def _observed(m: Any, h: Tensor) -> Tensor:
    """Quantization in the range of what is seen; the kernel has no fp64."""
    if h.dtype == torch.float64:
        least, most = h.float().aminmax()
        scale = (most - least) / 255
        zero = int(-128 - torch.round(least / scale))
        return torch.fake_quantize_per_tensor_affine(h, float(scale), zero, -128, 127)
    on, zeros = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    ends = torch.full((1,), float("inf")), torch.full((1,), -float("inf"))
    rest = torch.ones(1), zeros, 1.0, -128, 127, -1
    return torch.fused_moving_avg_obs_fake_quant(h, on, on, *ends, *rest)


class _Times(torch.autograd.Function):
    """The product, as the layers of tensor parallelism are made."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Multiply."""
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Both derivatives."""
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


_times = _Times.apply  # as kernels are called: bound before a measurement

WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detach": lambda m, h: h * h.detach(),
    "data": lambda m, h: h * h.data.square(),
    "straight-through rounding": lambda m, h: h + (torch.round(4 * h) / 4 - h).detach(),
    "floors": lambda m, h: h * (8 * h).floor() + (8 * h).round().clamp(-3, 3) * h.square(),
    "a table by position": lambda m, h: h * m.table[(4 * h + 4).long().clamp(0, 8)],
    "a wrapped phase": lambda m, h: (
        torch.remainder(3 * h + 0.5, 1.0) + (5 * h) % 0.7 + (9 * h).frac()
    ),
    "divided down": lambda m, h: h * torch.div(h, 0.1, rounding_mode="floor"),
    "fake quantization": lambda m, h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -5, 5),
    "by channel": lambda m, h: torch.fake_quantize_per_channel_affine(
        h, m.scales.float(), torch.zeros(6, dtype=torch.int32), 1, -5, 5
    ),
    "a target without gradients": lambda m, h: functional.mse_loss(h, _moving(m, h)) * h,
    "a buffer": _noted,
    "gradients of the loss": _slope,
    "observed fake quantization": _observed,
    "a penalty at a leaf": _penalty,
    "a number": lambda m, h: h * h.abs().max().item(),
    "a branch on a number": _branch,
    "an array": lambda m, h: h * torch.from_numpy(h.detach().numpy().cumsum(1)).to(h),
    "drawn by probabilities": lambda m, h: h * torch.bernoulli(h.detach().sigmoid().float()).to(h),
    "recomputed": lambda m, h: checkpoint(
        lambda y: y * y.detach().exp(),
        checkpoint(lambda y: y * y.data, h, use_reentrant=False),
        use_reentrant=False,
    ),
    "written into": _written,
    "given to a written backward": lambda m, h: _Times.apply(h.detach(), h),
    "given to one that is bound": lambda m, h: _times(h, _times(h.data, h.data).exp()),
    "given to one that is recomputed": lambda m, h: checkpoint(
        lambda y: _Times.apply(y, y.detach().exp()), h, use_reentrant=False
    ),
    "joined": lambda m, h: torch.cat([h[:, :3], h.detach()[:, :3].exp()], 1),
    "given to a module": lambda m, h: h * torch.tanh(m.target(h.detach()[:, :5])),
    "reduced by name": lambda m, h: h / torch.linalg.vector_norm(h.detach(), dim=1, keepdim=True),
}


def data() -> list[tuple[Tensor, Tensor]]:
    """One micro-batch."""
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator))]


def exact_product(net: nn.Module, v: Tensor) -> Tensor:
    """By double backward in fp64."""
    wide = copy.deepcopy(net).double()
    trained = [p for p in wide.parameters() if p.requires_grad]
    torch.manual_seed(1)
    loss = wide(*(t.double() for t in data()[0]))
    gradients = torch.autograd.grad(loss, trained, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    products = torch.autograd.grad(flat @ v.double(), trained)
    return torch.cat([p.reshape(-1) for p in products])


def test_what_a_model_keeps_from_its_first_forward_changes_no_other_constant() -> None:
    """Both have one shape, and one of them is made once."""
    kept = list[Tensor]()

    def way(m: Any, h: Tensor) -> Tensor:
        if not kept or kept[0].dtype != h.dtype:
            kept[:] = [h.detach().exp()]
        h = h * kept[0]
        return h * h.detach().square()

    net = Net(way)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact_product(net, v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()


QUICK = ["straight-through rounding", "gradients of the loss", "a penalty at a leaf", "recomputed"]
QUICK += ["given to one that is bound"]


@pytest.mark.parametrize("way", cells(WAYS, [*QUICK, "a wrapped phase", "fake quantization"]))
def test_products_are_those_of_a_double_backward(way: str) -> None:
    net = Net(WAYS[way])
    torch.manual_seed(1)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact_product(net, v)
    error = float((product.vector.double() - expected).norm() / expected.norm())
    assert error < 1e-3 and product.error is not None and error < 5 * product.error


ENGINES = [
    (way, stage) for way in ("straight-through rounding", "joined") for stage in (0, 1, 2, 3)
]
ENGINES += [("given to a module", 3)]  # whose hooks pass it on


@pytest.mark.parametrize(
    "way, stage", cells(ENGINES, [("straight-through rounding", 3), ENGINES[-1]])
)
def test_constants_are_held_on_the_ranks_of_an_engine(ranks: Any, way: str, stage: int) -> None:
    v, product, error = ranks(2).run(constant_jobs.product, way, stage)[0]
    net = Net(WAYS[way])
    named = [name for name, p in net.named_parameters() if p.requires_grad]
    v, product = (torch.cat([each[name].reshape(-1) for name in named]) for each in (v, product))
    expected = exact_product(net, v)
    far = float((product.double() - expected).norm() / expected.norm())
    assert far < 1e-3 and far < 5 * error


def test_what_is_stopped_where_the_forward_has_no_graph_is_refused() -> None:
    net = Net(lambda m, h: checkpoint(lambda y: y * y.detach(), h, use_reentrant=True))
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        hessian.matvec(hessian.random_vector(seed=2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_weights_whose_gradient_a_checkpoint_loses_are_refused(reentrant: bool) -> None:
    """Training leaves them as they are; their products were 0."""
    net = Net(lambda m, h: checkpoint(lambda y: m.target(y[:, :5]), h, use_reentrant=reentrant))
    net.up.requires_grad_(False)
    net.target.requires_grad_()
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    lost = pytest.raises(UnsupportedError, match="let the embedding's output require gradients")
    with lost if reentrant else contextlib.nullcontext():
        assert hessian.matvec(hessian.random_vector(seed=2)).norm > 0


@pytest.mark.parametrize(
    "read",
    [
        lambda m, y: m.target(y[:, :5]),
        lambda m, y: y * m.down.weight.detach().norm(),
        lambda m, y: y * m.down.weight.data.norm(),
    ],
    ids=["frozen", "detached", "data"],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_checkpoint_that_loses_no_gradient_is_measured(read: Callable[..., Tensor]) -> None:
    net = Net(lambda m, h: checkpoint(lambda y: read(m, y), h, use_reentrant=True))
    net.up.requires_grad_(False)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    expected = exact_product(net, v)
    product = hessian.matvec(v)
    assert product.error is not None
    far = float((product.vector.double() - expected).norm() / expected.norm())
    assert far < 5 * product.error < 1e-3


@pytest.mark.parametrize("trained", [False, True])
def test_a_checkpoint_without_a_graph_around_it_is_measured(trained: bool) -> None:
    """A teacher that is a submodule, with weights that are frozen or not."""

    @torch.no_grad()
    def taught(m: Any, h: Tensor) -> Tensor:
        made: Tensor = checkpoint(lambda y: m.target(y[:, :5]), h, use_reentrant=True)
        return made

    net = Net(lambda m, h: h * taught(m, h))
    net.target.requires_grad_(trained)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    assert hessian.matvec(hessian.random_vector(seed=2)).norm > 0


class Rounded(torch.autograd.Function):
    """Straight-through, by a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Round."""
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Hand on."""
        return gradients[0]


class Region(torch.autograd.Function):
    """A forward without a graph, but in a part, as of Megatron's layers where they recompute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """Add."""
        ctx.save_for_backward(x)
        y = x * x
        with torch.enable_grad():
            return y + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Its derivative."""
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0], gradients[0].sum(0)


def test_a_graph_within_a_function_s_forward_stops_nothing() -> None:
    net = Net(lambda m, h: Region.apply(h, m.up.bias))
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact_product(net, v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()


def test_a_written_backward_of_what_rounds_is_refused_by_name() -> None:
    net = Net(lambda m, h: Rounded.apply(h))
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    with pytest.raises(UnsupportedError, match=r"\(Rounded\).*detach"):
        hessian.matvec(hessian.random_vector(seed=2))


class Spike(torch.autograd.Function):
    """Steps, with the slope of an arcus tangent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compare."""
        ctx.save_for_backward(x)
        return torch.stack([(x > level).type_as(x) for level in (0.0, 0.2, 0.4, 0.6)]).sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The slope."""
        return gradients[0] / (1 + ctx.saved_tensors[0].square())


class Gate(torch.autograd.Function):
    """ReLU, which compares too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A mask of numbers."""
        mask = (x > 0).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The mask."""
        return gradients[0] * ctx.saved_tensors[0]


def test_a_surrogate_gradient_of_a_comparison_is_refused_by_name() -> None:
    net = Net(lambda m, h: h * Spike.apply(h))
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    with pytest.raises(UnsupportedError, match=r"\(Spike\).*detach"):
        hessian.matvec(hessian.random_vector(seed=2))


def test_a_written_function_may_compare() -> None:
    net = Net(lambda m, h: Gate.apply(h) * h)
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact_product(net, v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()


def test_a_parameter_with_gaps_in_memory_is_measured() -> None:
    net = Net(WAYS["detach"])
    net.down.weight = nn.Parameter(torch.randn(3, 12)[:, ::2])
    hessian = ds_hessian.attach(net, config={"progress": False, "plot": False}).use(data())
    v = hessian.random_vector(seed=2)
    product, expected = hessian.matvec(v), exact_product(net, v)
    assert (product.vector.double() - expected).norm() < 1e-3 * expected.norm()


class Buffered(nn.Module):
    """Gives a product of its own a buffer that has activations, and counts 0 times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The loss of `(b, 4)`."""
        h = torch.tanh(self.first(x))
        with torch.no_grad():
            buffer = self.first(x)[None]
        h = torch.baddbmm(buffer, h[None], self.first.weight[None], beta=0.0)[0]
        return self.last(torch.tanh(h)).square().mean()


def test_an_addend_that_counts_zero_times_is_no_constant() -> None:
    """Of Megatron's attention it is a buffer of others: in full recomputation it was refused."""
    torch.manual_seed(0)
    net, x = Buffered(), torch.randn(8, 4, requires_grad=True)
    products = []
    for way in (True, False):  # reentrant
        hessian = ds_hessian.attach(copy.deepcopy(net), config={"progress": False, "plot": False})

        def loss(module: nn.Module, batch: Tensor, way: bool = way) -> Tensor:
            return checkpoint(module, batch, use_reentrant=way)

        hessian.use([x.detach().requires_grad_()], loss)
        products.append(hessian.matvec(hessian.random_vector(seed=1)))
    one, other = products
    assert float((one.vector - other.vector).norm()) <= 3 * (one.error + other.error) * one.norm
