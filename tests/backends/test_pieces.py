"""Kinks are held: the function is the smooth piece of the loss on which the weights lie."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ds_hessian
from ds_hessian.backends import pieces
from ds_hessian.backends.bits import Bits
from ds_hessian.backends.choices import sides_of
from ds_hessian.backends.function import FixedFunction
from tests.backends import kink_jobs
from tests.backends.test_kinks import KINKED
from tests.tiers import cells

Function = Callable[[Tensor], Tensor]
ROOM = 2**20
CROSSED = {"a recurrence"}
"""What cannot be held."""


def image(x: Tensor) -> Tensor:
    """One channel of 4 x 8."""
    return x.view(1, 1, 4, 8)


@torch.no_grad()
def no_grad_mask(x: Tensor) -> Tensor:
    """Where elements are positive."""
    return x > 0


def no_mask(x: Tensor) -> Tensor:
    """A mask to be filled."""
    return torch.empty(x.shape, dtype=torch.bool)


def half(x: Tensor) -> Tensor:
    """The signs of a target."""
    return torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(4).expand(4, 8)


class OwnReLU(torch.autograd.Function):
    """With a backward that compares for itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Its values."""
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Its slopes, of which one kink is only here."""
        (x,) = ctx.saved_tensors
        return gradients[0] * (x > 0) + 0.1 * x.clamp(min=-0.5)


def selectively(x: Tensor, policy: CheckpointPolicy) -> Tensor:
    """Kinks, choices and constants between products, of what a policy recomputes but products."""

    def policy_of(_: Any, call: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if call == torch.ops.aten.mm.default else policy

    def function(y: Tensor) -> Tensor:
        y = (y @ y.mT @ y).relu() + y.abs() * y.topk(2).values.sum() + y.square().detach() * y
        return (y @ y.mT @ y.clamp(-1.0, 0.4)) * (y > 0.2) + functional.elu(y)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy_of)

    return checkpoint(function, 0.3 * x, use_reentrant=False, context_fn=contexts)


HELD: dict[str, Function] = {
    **{name: call for name, call in KINKED.items() if name not in CROSSED | {"bf16"}},
    "x (x > 0)": lambda x: x * (x > 0),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked fill": lambda x: x.masked_fill(x.lt(0.3), 0.0),
    "by index": lambda x: x[x >= 0.2].square().sum(),
    "sign": lambda x: x * x.sign(),
    "amax": lambda x: x.amax(),
    "amin of rows": lambda x: x.amin(1, keepdim=True),
    "max of all": lambda x: x.max() * x,
    "min of all": torch.min,
    "median": lambda x: x.median(),
    "median of rows": lambda x: x.median(1).values,
    "cummax": lambda x: x.cummax(1).values,
    "both extremes": lambda x: x.aminmax()[0] + torch.aminmax(x, dim=1)[1],
    "1-norm": lambda x: x.norm(1),
    "largest": lambda x: torch.linalg.vector_norm(x, math.inf, dim=1),
    "functional relu in place": lambda x: functional.relu(1 * x, True),
    "module in place": lambda x: nn.ReLU(inplace=True)(1 * x),
    "clamp in place": lambda x: (1 * x).clamp_(-1, 1),
    "leaky in place": lambda x: functional.leaky_relu_(1 * x, 0.2),
    "elu in place": lambda x: functional.elu(1 * x, inplace=True),
    "hard swish in place": lambda x: nn.Hardswish(inplace=True)(1 * x),
    "threshold in place": lambda x: functional.threshold_(1 * x, 0.1, 0.0),
    "clamp by tensors": lambda x: x.clamp(torch.tensor(-0.5).to(x), torch.tensor(0.7).to(x)),
    "clamp from below": lambda x: x.clamp(torch.tensor(-0.5).to(x), torch.tensor(9.0).to(x)),
    "clamp max": lambda x: x.clamp_max(0.4),
    "maximum with ties": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "rrelu": nn.RReLU().eval(),
    "squared hinge": lambda x: (1 - x).clamp(min=0) ** 2,
    "triplets": lambda x: functional.triplet_margin_loss(x, x.flip(0), x.roll(1, 0), swap=True),
    "cosines": lambda x: functional.cosine_embedding_loss(
        x, x.flip(0), torch.tensor([1.0, -1.0, 1.0, -1.0])
    ),
    "hinge of embeddings": lambda x: functional.hinge_embedding_loss(x, half(x)),
    "ranking": lambda x: functional.margin_ranking_loss(x, x.flip(0), half(x)),
    "squared margins": lambda x: functional.multi_margin_loss(x, torch.arange(4), p=2, margin=0.5),
    "pooling": lambda x: functional.max_pool2d(image(x), 2),
    "pooling that overlaps": lambda x: functional.max_pool2d(image(x), 3, 1, 1),
    "pooling with indices": lambda x: functional.max_pool2d(image(x), 2, return_indices=True)[0],
    "adaptive pooling": lambda x: functional.adaptive_max_pool2d(image(x), (2, 3)),
    "pooling of volumes": lambda x: functional.max_pool3d(x.view(1, 1, 2, 2, 8), 2),
    "channels last": lambda x: functional.relu(
        x.view(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    ),
    "expanded": lambda x: functional.relu(x[:1].expand(4, 8)),
    "a slice": lambda x: functional.relu(x[:, ::3]),
    "soft sign": nn.Softsign(),
    "soft plus": nn.Softplus(beta=3, threshold=2),
    "sign of another": lambda x: torch.copysign(x.square(), x),
    "sorted": lambda x: torch.msort(x).square(),
    "normalised by sums": lambda x: functional.normalize(x, p=1.0),
    "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.tensor(0.5).to(x)),
    "places": lambda x: x * torch.bucketize(x, torch.tensor([-0.5, 0.6]).to(x)),
    "places by search": lambda x: x * torch.searchsorted(torch.tensor([-0.5, 0.6]).to(x), x),
    "near": lambda x: torch.where(x.isclose(torch.zeros_like(x), atol=0.4), x.square(), x),
    "sign bit": lambda x: torch.where(x.signbit(), 0.1 * x, x),
    "truth": lambda x: x.square() * x.clamp(min=0).bool(),
    "weighted l1": lambda x: functional.l1_loss(x, x.flip(0), weight=half(x) + 2),
    "l1 by number": lambda x: torch._C._nn.l1_loss(x, torch.zeros_like(x), 1),
    "l1 of old": lambda x: functional.l1_loss(x, torch.zeros_like(x), size_average=False),
    "distances": lambda x: functional.triplet_margin_with_distance_loss(x, x.flip(0), x.roll(1, 0)),
    "a detached mask": lambda x: x.square() * (x.detach() > 0.1),
    "a mask without gradients": lambda x: x.square() * no_grad_mask(x),
    "compared in place": lambda x: x.square() * (1 * x).gt_(0.1),
    "a mask in place": lambda x: x.square() * x.detach().clone().ge_(0).logical_not_(),
    "two in place": lambda x: x * x.clone().less_(x.flip(0)).ne_(torch.zeros_like(x)),
    "compared into another": lambda x: x.square() * torch.gt(x, 0.1, out=no_mask(x)),
    "compared into numbers": lambda x: x.square() * torch.le(x, x.flip(0), out=1 * x.detach()),
    "a backward of its own": OwnReLU.apply,
    "recomputed with a mask": lambda x: checkpoint(
        lambda y: (y * y.detach().gt(0)).relu() * y, 1.1 * x, use_reentrant=True
    ),
    "several of one recomputed": lambda x: checkpoint(
        lambda y: (
            y.clamp(min=-0.7).square() * y.clamp(max=0.4) * (y > 0.2)
            + y * (y > -0.3)
            + y.topk(2).values.sum() * y.topk(4).values.square().sum()
        ),
        1.1 * x,
        use_reentrant=False,
    ),
    "all but products recomputed": lambda x: selectively(x, CheckpointPolicy.PREFER_RECOMPUTE),
    "nothing recomputed": lambda x: selectively(x, CheckpointPolicy.MUST_SAVE),
    "recomputed in turn": lambda x: checkpoint(
        lambda y: functional.relu(y) * functional.leaky_relu(y + 1), x, use_reentrant=False
    ),
    "recomputed inside": lambda x: checkpoint(
        lambda y: (
            checkpoint(lambda z: torch.relu(z) * abs(z - 1), 1.1 * y, use_reentrant=True)
            * torch.relu(y)
        ),
        x,
        use_reentrant=True,
    ),
}


def values() -> Tensor:
    """Values on both sides of all kinks, and at some of them."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)) * 1.3
    at = [0.0, 0.0, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 6.0, 0.1]
    x.view(-1)[: 3 * len(at) : 3] = torch.tensor(at)
    return x


def evaluated(function: Function, x: Tensor, fixed: FixedFunction | None) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of a curved function of them."""
    x = x.clone().requires_grad_()
    with fixed.evaluating(0) if fixed is not None else nullcontext():
        y = function(x)
        ramp = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).view(y.shape)
        (y.double() * ramp + 0.1 * y.double().square()).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HELD)
def test_at_the_weights_values_and_gradients_are_torch_s(name: str, dtype: torch.dtype) -> None:
    """Also at the kinks themselves."""
    function, x = HELD[name], values().to(dtype)
    function = copy.deepcopy(function).to(dtype) if isinstance(function, nn.Module) else function
    if dtype == torch.bfloat16 and "margins" in name:
        pytest.skip("torch has no such kernel")
    fixed = FixedFunction(dropout=False, allowed=ROOM)
    for found, expected in zip(
        evaluated(function, x, fixed), evaluated(function, x, None), strict=True
    ):
        # Constants of torch's own hard sigmoid are in fp32.
        near = max(8 * torch.finfo(dtype).eps, 1e-7)
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
    assert fixed.decisions.smooth and fixed.decisions.holds


@pytest.mark.parametrize("name", HELD)
def test_off_the_weights_it_is_a_smooth_function(name: str) -> None:
    """Differences of its gradient do not depend on the displacement, over a hundred."""
    function, x = HELD[name], values().double()
    function = copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
    fixed = FixedFunction(dropout=False, allowed=ROOM)
    evaluated(function, x, fixed)
    v = torch.randn(4, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    slopes = []
    for h in (1e-4, 1e-2):
        ends = [evaluated(function, x + side * h * v, fixed)[1] for side in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * h))
    assert (slopes[0] - slopes[1]).norm() <= 1e-3 * slopes[0].norm()


def test_values_in_64_bits_are_compared_as_such() -> None:
    """The last bit of a value decides to what it is rounded in 32: a kink was crossed for it."""
    x = torch.tensor([1 + 2.0**-24], dtype=torch.float64)
    kinked = pieces.found(functional.relu, (x,), {})
    assert kinked is not None
    assert sides_of(kinked, (), x, x.nextafter(torch.full_like(x, 2.0))) is not None


@pytest.mark.parametrize("allowed", [0, ROOM])
def test_weights_of_an_l1_loss_are_kept(allowed: int) -> None:
    """torch hands `l1_loss` to a mode without them."""

    def function(x: Tensor) -> Tensor:
        return nn.functional.l1_loss(x, torch.zeros_like(x), reduction="none", weight=half(x) + 2)

    fixed = FixedFunction(dropout=False, allowed=allowed)
    for _ in range(2):
        with fixed.evaluating(0):
            assert torch.equal(function(values()), values().abs() * (half(values()) + 2))


def test_constants_between_kinks_may_be_called_in_some_forwards_alone() -> None:
    fixed, calls = FixedFunction(dropout=False, allowed=ROOM), list[int]()

    def function(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) % 2:
            (torch.ones(4) > torch.rand(4)).sum()
        return torch.relu(x) * (x.detach() > -0.5)

    first = evaluated(function, values(), fixed)
    for _ in range(3):
        again = evaluated(function, values(), fixed)
        assert all(map(torch.equal, first, again))
    moved, slope = evaluated(function, -values(), fixed)
    assert torch.equal(moved == 0, first[0] == 0)


BENT = ["soft sign", "soft plus", "sign of another", "near", "truth", "distances", "sign bit"]


@pytest.mark.parametrize("name", BENT)
def test_where_slopes_bend_sides_are_held(name: str) -> None:
    """Differences over a step do not show it, but products are off by the slope's jump."""
    fixed = FixedFunction(dropout=False, allowed=ROOM)
    evaluated(HELD[name], values(), fixed)
    assert fixed.decisions.held > 0 and fixed.decisions.smooth


def test_as_many_bits_are_held_as_there_are_elements_at_kinks() -> None:
    fixed, x = FixedFunction(dropout=False, allowed=ROOM), torch.randn(1000)
    evaluated(lambda x: torch.relu(x) + x.clamp(-1, 1), x, fixed)
    assert fixed.decisions.held == 125 + 2 * 125
    assert fixed.decisions.choices([0]).tolist() == [0, 0, 2000, 0]
    evaluated(lambda x: torch.relu(x) + x.clamp(-1, 1), x.neg(), fixed)
    moved = 1000 + int((x.abs() > 1).sum())
    assert fixed.decisions.choices([0]).tolist() == [0, 0, 2000, moved]


def test_values_on_one_side_take_no_memory() -> None:
    fixed = FixedFunction(dropout=False, allowed=ROOM)
    evaluated(lambda x: x.square().clamp(min=-1e-6).exp() + torch.relu(x.exp()), values(), fixed)
    assert fixed.decisions.held == 0 and fixed.decisions.smooth


def test_without_room_kinks_are_crossed() -> None:
    fixed, x = FixedFunction(dropout=False, allowed=200), torch.randn(1000)

    def function(x: Tensor) -> Tensor:
        return torch.relu(x) + x.clamp(-1, 1) + x.topk(10).values.sum()

    evaluated(function, x, fixed)
    kinks = fixed.decisions
    assert kinks.over and not kinks.holds and not kinks.smooth and kinks.held == 0
    moved, first = x + 0.1 * torch.randn(1000), x.topk(10).indices
    with fixed.evaluating(0):
        assert torch.equal(torch.relu(moved), moved.clamp_min(0))
        assert torch.equal(moved.topk(10).indices, first)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_stay_what_they_are(value: float) -> None:
    x = values()
    x[0, 1] = value
    functions: list[Function] = [torch.relu, lambda x: x.clamp(-1, 1), nn.ELU(), nn.MaxPool1d(2)]
    for function in functions:
        fixed = FixedFunction(dropout=False, allowed=ROOM)
        for _ in range(2):
            y = x.clone().requires_grad_()
            with fixed.evaluating(0):
                found = function(y)
            torch.testing.assert_close(found, function(x), equal_nan=True)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5), (2, 8)])
def test_bits_are_what_was_packed(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.5
    for each in (mask, ~mask, torch.zeros_like(mask), torch.ones_like(mask), mask.t() ^ True):
        assert torch.equal(Bits(each).mask(), each)
        assert not Bits(each).differs(each).any()
        assert Bits(each).differs(~each).all()


# ---- whole measurements


def perceptron() -> nn.Module:
    """ReLU, one of them in place."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def convolutions() -> nn.Module:
    """Max pooling, and a leaky ReLU."""
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 8, 3), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.LeakyReLU(0.1), nn.Linear(16, 4))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(32, 6, generator=generator), torch.arange(32) % 4) for _ in range(3)]


def loss(net: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(net(batch[0]), batch[1])


def exact(net: nn.Module, v: Tensor) -> Tensor:
    """`H v` by double backward in fp64."""
    wide = copy.deepcopy(net).double()
    weights = list(wide.parameters())
    value = torch.stack([loss(wide, (x.double(), y)) for x, y in data()]).mean()
    gradients = torch.autograd.grad(value, weights, create_graph=True)
    along = torch.cat([g.reshape(-1) for g in gradients]) @ v.double()
    return torch.cat([h.reshape(-1) for h in torch.autograd.grad(along, weights)])


QUIET = {"progress": False, "plot": False}


@pytest.mark.parametrize("make", [perceptron, convolutions])
def test_products_are_those_of_a_double_backward(make: Callable[[], nn.Module]) -> None:
    net = make()
    hessian = ds_hessian.attach(net, config=QUIET).use(data(), loss)
    vectors = [hessian.random_vector(seed=seed) for seed in range(3)]
    answers = [exact(net, v) for v in vectors]
    with hessian.measuring():
        for v, expected in zip(vectors, answers, strict=True):
            product = hessian.matvec(v)
            error = float((product.vector.double() - expected).norm() / expected.norm())
            assert error < 1e-4
            assert product.error is not None and 0.3 * error < product.error < 1e-3


def test_the_record_says_what_became_of_kinks() -> None:
    hessian = ds_hessian.attach(perceptron(), config=QUIET).use(data(), loss)
    found = hessian.spectrum(num_matvecs=3).provenance
    assert (found.kinks, found.kinks_reason) == ("held", "")
    assert found.held_sides == 3 * 32 * 2 * 16
    assert 0 < found.crossed_sides < found.held_sides
    found = hessian.spectrum(num_matvecs=3, kinks="crossed").provenance
    assert (found.kinks, found.kinks_reason, found.held_sides) == ("crossed", "", 0)
    found = hessian.displacement_sweep(displacements=[1e-3, 1e-2]).provenance
    assert found.kinks == "crossed"
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    hessian = ds_hessian.attach(net, config=QUIET).use(data(), loss)
    found = hessian.spectrum(num_matvecs=2).provenance
    assert (found.kinks, found.held_sides) == ("", 0)


def test_a_model_that_calls_kinks_differently_often_off_the_weights_has_them_crossed() -> None:
    net, calls = perceptron(), itertools.count()

    def whimsical(net: Any, batch: Any) -> Tensor:
        moved = next(calls) >= len(data())
        return loss(net, batch) + (0.0 * torch.relu(net[0].bias).sum() if moved else 0.0)

    hessian = ds_hessian.attach(net, config=QUIET).use(data(), whimsical)
    found = hessian.trace("hutchinson", num_matvecs=2).provenance
    assert found.kinks == "crossed"
    assert "differently often" in found.kinks_reason
    v = hessian.random_vector(seed=1)
    product, expected = hessian.matvec(v), exact(net, v)
    assert (product.vector.double() - expected).norm() < 0.1 * expected.norm()


def test_kinks_of_constants_may_be_called_in_the_first_forward_alone() -> None:
    """As a gate of deepspeed.moe makes its distribution, whose arguments are checked."""
    net, made = perceptron(), list[object]()

    def preparing(net: Any, batch: Any) -> Tensor:
        if not made:
            made.append(torch.distributions.Gumbel(torch.zeros(3), torch.ones(3)))
        return loss(net, batch)

    hessian = ds_hessian.attach(net, config=QUIET).use(data(), preparing)
    v = hessian.random_vector(seed=1)
    expected = exact(net, v)
    with hessian.measuring():
        product = hessian.matvec(v)
    assert (product.vector.double() - expected).norm() < 1e-4 * expected.norm()


def test_a_measurement_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_hessian.backends.guard.free_on", lambda device: 4 * 100)
    hessian = ds_hessian.attach(perceptron(), config=QUIET).use(data(), loss)
    found = hessian.trace("hutchinson", num_matvecs=2).provenance
    assert found.kinks == "crossed" and "quarter" in found.kinks_reason


@pytest.mark.parametrize("operator", ["ggn", "residual", "fisher"])
def test_operators_of_the_outputs_hold_kinks(operator: Any) -> None:
    hessian = ds_hessian.attach(perceptron(), config={**QUIET, "operator": operator})
    found = hessian.use(data(), loss).spectrum(num_matvecs=3)
    assert found.provenance.kinks == "held"
    assert found.provenance.held_sides == 3 * 32 * 2 * 16
    assert found.relative_errors.max() < 1e-3


def test_the_plan_has_the_sides_of_kinks_once_they_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hessian = ds_hessian.attach(perceptron(), config=QUIET).use(data(), loss)

    def planned(**settings: Any) -> list[int]:
        items = hessian.memory_plan("spectrum", **settings).items
        return [item.size for item in items if item.name == "sides of kinks"]

    assert planned() == []
    hessian.spectrum(num_matvecs=2)
    assert planned() == [3 * 32 * 2 * 16 // 8]
    assert planned(kinks="crossed") == []
    hessian.spectrum(num_matvecs=2, kinks="crossed")
    assert planned() == [3 * 32 * 2 * 16 // 8]
    hessian.use(data()[:2])
    assert planned() == [2 * 32 * 2 * 16 // 8]
    # What the plan needs for vectors is not given to them.
    needed = hessian.memory_plan("spectrum", num_matvecs=2).peak("host") - planned()[0]
    monkeypatch.setattr("ds_hessian.backends.guard.free_on", lambda device: needed + 100)
    assert hessian.spectrum(num_matvecs=2).provenance.kinks == "crossed"
    monkeypatch.setattr("ds_hessian.backends.guard.free_on", lambda device: needed + 1000)
    assert hessian.spectrum(num_matvecs=2).provenance.kinks == "held"


# ---- on the ranks of jobs

FP32_PASSES = {"hessian": {"finite_difference": {"precision": "fp32"}}}
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "torch": (1, {"kind": "torch"}),
    "torch, recomputed": (1, {"kind": "torch", "recompute": "reentrant"}),
    "DDP": (2, {"kind": "DDP"}),
    "stage 0": (2, {"kind": "0"}),
    "stage 1, recomputed": (2, {"kind": "1", "recompute": "not reentrant"}),
    "stage 2": (2, {"kind": "2"}),
    "stage 3": (2, {"kind": "3"}),
    "stage 3, one rank": (1, {"kind": "3"}),
    "stage 3, recomputed": (2, {"kind": "3", "recompute": "reentrant"}),
    "stage 3, bf16, fp32 passes": (2, {"kind": "3", "dtype": "bf16", **FP32_PASSES}),
    "stage 2, bf16, fp32 passes": (2, {"kind": "2", "dtype": "bf16", **FP32_PASSES}),
    "stage 3, accumulated": (2, {"kind": "3", "gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("name", cells(JOBS, []))
def test_products_of_jobs_are_those_of_a_double_backward(ranks: Any, name: str) -> None:
    size, options = JOBS[name]
    v, product, error, _, source = ranks(size).run(kink_jobs.product, **options)[0]
    expected = kink_jobs.exact(v, torch.bfloat16 if "bf16" in name else torch.float32)
    apart = sum(float((product[n].double() - h).square().sum()) for n, h in expected.items())
    whole = sum(float(h.square().sum()) for h in expected.values())
    true = math.sqrt(apart / whole)
    print(f"{name}: error {true:.1e}, estimate {error:.1e}")
    assert true < 2e-4 and true / 3 < error < 2e-3
    assert source.kinks == "held"
    # Of each token two layers of ReLU, one of max pooling, one of ReLU squared.
    assert source.held_sides == 4 * 16 * 3 * (2 + 1) * kink_jobs.WIDTH


BF16 = ["2", "3"]


@pytest.mark.parametrize("stage", cells(BF16, []))
def test_bf16_passes_hold_kinks(ranks: Any, stage: str) -> None:
    settings = {"hessian": {"finite_difference": {"precision": "model"}}}
    found = ranks(2).run(kink_jobs.product, stage, dtype="bf16", **settings)
    v, product, error, _, source = found[0]
    expected = kink_jobs.exact(v, torch.bfloat16)
    apart = sum(float((product[n].double() - h).square().sum()) for n, h in expected.items())
    whole = sum(float(h.square().sum()) for h in expected.values())
    true = math.sqrt(apart / whole)
    print(f"error {true:.1e}, estimate {error:.1e}")
    assert source.kinks == "held" and true < 0.3 and true / 5 < error
