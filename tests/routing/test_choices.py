"""Discrete choices of a model are held as they are at the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.backends.function import FixedFunction
from ds_hessian.config import OperatorName
from ds_hessian.errors import HessianError, MeasurementError
from tests.routing import jobs, models
from tests.routing.models import MODELS
from tests.tiers import cells

QUIET = {"progress": False, "plot": False}

A = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
B = torch.tensor([[1.0, 2.0, 3.0], [5.0, 4.0, 0.5]])  # other choices in both rows

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "topk": lambda x: torch.topk(x, 2, dim=-1).values,
    "topk of the method": lambda x: x.topk(2)[0],
    "topk over tokens": lambda x: torch.topk(x.t(), k=2, dim=0, sorted=False)[0].t(),
    "sort": lambda x: x.sort(dim=-1, descending=True)[0],
    "stable sort": lambda x: torch.sort(x, stable=True).values,
    "argsort": lambda x: x.gather(1, torch.argsort(x, dim=-1)),
    "max": lambda x: x.max(dim=1).values,
    "min with the dim kept": lambda x: torch.min(x, 1, keepdim=True)[0],
    "argmax": lambda x: x.gather(1, x.argmax(-1, keepdim=True)),
    "argmin of all": lambda x: x.flatten()[x.argmin()],
    "kthvalue": lambda x: torch.kthvalue(x, 2).values,
}


@pytest.mark.parametrize("name", CALLS)
def test_values_elsewhere_are_those_at_the_indices_of_the_first_evaluation(name: str) -> None:
    """They are linear in the input then: f(A) and its derivative there give f(B)."""
    call, function = CALLS[name], FixedFunction(dropout=False)
    x = A.clone().requires_grad_()
    with function.evaluating(0):
        first = call(x)
        jacobian = [torch.autograd.grad(y, x, retain_graph=True)[0] for y in first.reshape(-1)]
    assert torch.equal(first, call(A))
    with function.evaluating(0):
        other = call(B)
    expected = torch.stack([(row * B).sum() for row in jacobian]).view(other.shape)
    assert torch.equal(other, expected)
    assert not torch.equal(other, call(B))
    extreme = name.split()[0] in ("max", "min", "kthvalue")  # a value as often as a choice
    expected_number = 0 if extreme else 1 if name == "argmin of all" else 2
    assert function.decisions.choices([0])[:2].tolist() == [expected_number] * 2


def test_sums_of_integers_and_elementwise_maxima_are_no_choices() -> None:
    function = FixedFunction(dropout=False)
    with function.evaluating(0):
        assert torch.equal(torch.max(A, B), torch.maximum(A, B))
        assert int(A.long().argmax()) == 4
        assert float(A.max()) == 5.0
    assert function.decisions.choices([0]).tolist() == [0.0] * 4


def test_what_describes_tensors_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of what a host calls in its own code: under ZeRO-3 three calls of five."""
    function, followed = FixedFunction(dropout=False), []
    inner = function._followed

    def note(func: Any, *args: Any) -> Any:
        followed.append(func.__name__)
        return inner(func, *args)

    monkeypatch.setattr(function, "_followed", note)
    x = A.clone().requires_grad_()
    with function.evaluating(0):
        with torch.no_grad():
            described = (
                x.shape,
                x.numel(),
                x.dim(),
                x.device,
                x.requires_grad,
                x.is_floating_point(),
            )
        y = x.detach() * x
        assert y.grad_fn is not None
    assert described == (A.shape, A.numel(), A.dim(), A.device, True, True)
    assert followed == ["detach", "mul"]


def test_a_micro_batch_has_its_own_choices_in_any_order_of_evaluations() -> None:
    function = FixedFunction(dropout=False)
    inputs = {0: A, 1: B}
    first = {}
    for key, x in inputs.items():
        with function.evaluating(key):
            first[key] = x.topk(1).indices
    for key in (1, 0, 1):
        with function.evaluating(key):
            assert torch.equal(A.topk(1).indices, first[key])


def test_a_model_whose_number_of_choices_depends_on_the_weights_is_an_error() -> None:
    function = FixedFunction(dropout=False)
    with function.evaluating(0):
        A.topk(1)
    with pytest.raises(MeasurementError, match="choice number 2 is now topk"), \
            function.evaluating(0):  # fmt: skip
        A.topk(1)
        A.topk(1)


class Routed(nn.Module):
    """Layers that each pass a token to one of four experts; checkpointed ones recompute."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.routers = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(6, 24) for _ in range(3))
        self.recompute, self.forwards = recompute, 0

    def layer(self, x: Tensor, i: int) -> Tensor:
        """One layer."""
        self.forwards += 1
        weights, index = self.routers[i](x).softmax(-1).topk(1)
        out = self.experts[i](x).view(*x.shape[:-1], 4, 6)
        chosen = out.gather(-2, index.unsqueeze(-1).expand(*index.shape, 6)).squeeze(-2)
        return x + torch.tanh(chosen) * weights

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean square."""
        for i in range(3):
            if self.recompute and self.training:
                reentrant = self.recompute == "reentrant"
                x = checkpoint(self.layer, x, i, use_reentrant=reentrant)
            else:
                x = self.layer(x, i)
        return (x - y).square().mean()


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputed_activations_make_the_same_choices(recompute: str) -> None:
    """And are recomputed, as in training; a jump would be seen a thousand times in the product."""
    data = [tuple(torch.randn(2, 40, 6, generator=torch.Generator().manual_seed(i)))
            for i in range(3)]  # fmt: skip
    data = [(x.requires_grad_(), y) for x, y in data]  # which reentrant checkpoints need
    found = []
    for kind in ("", recompute):
        net = Routed(kind)
        hessian = ds_hessian.attach(net, config=QUIET).use(data)
        with hessian.measuring(displacement=0.05) as operator:
            product = hessian.matvec(hessian.random_vector(seed=1))
        assert operator.cost.choices == 3 * 40 * 3
        assert operator.cost.flips > 0
        found.append((product, net.forwards))
    (plain, once), (again, twice) = found
    assert torch.equal(plain.vector, again.vector)
    assert once == twice == 0  # attributes of modules are restored, too


ROUTED = [(model, experts, recompute) for model in MODELS for experts in jobs.EXPERTS
          for recompute in jobs.RECOMPUTE]  # fmt: skip
QUICK = [("qwen2_moe", "grouped_mm", "not reentrant")]


@pytest.fixture(scope="module")
def exact() -> Callable[..., Tensor]:
    """The product by double backward in fp64 of a model, for one v.

    Reentrant checkpoints run without gradients what transformers takes the routers' own loss from:
    training does not see it then.
    """
    known: dict[tuple[str, bool], Tensor] = {}

    def get(name: str, v: Tensor, recompute: str = "") -> Tensor:
        key = name, recompute == "reentrant"
        if key not in known:
            model = MODELS[name](**({"router_aux_loss_coef": 0.0} if key[1] else {}))
            known[key] = models.exact_product(model, models.batches(), v)
        return known[key]

    return get


@pytest.mark.parametrize("name, experts, recompute", cells(ROUTED, QUICK))
def test_products_of_experts_are_those_of_a_double_backward(
    exact: Callable[..., Tensor], name: str, experts: str, recompute: str
) -> None:
    """In train mode, whose loss has the routers' own; by the automatic step, in fp32."""
    hessian = jobs.hessian_of(MODELS[name](experts), recompute)
    v = hessian.random_vector(seed=1)
    product = hessian.matvec(v)
    expected = exact(name, v, recompute)
    error = float((product.vector.double() - expected).norm() / expected.norm())
    assert error < 1e-3  # 0.1 to 0.7 where the routing is not held
    assert product.error is not None and error < 5 * product.error


@pytest.mark.full
def test_a_compiled_model_is_measured_as_it_is_without() -> None:
    plain, compiled = (
        jobs.hessian_of(wrap(MODELS["mixtral"]())) for wrap in (lambda m: m, torch.compile)
    )
    v, same = (h.random_vector(seed=1) for h in (plain, compiled))
    assert torch.equal(v, same)  # by checkpoint names, without `_orig_mod.`
    assert torch.equal(plain.matvec(v).vector, compiled.matvec(v).vector)


def test_the_record_says_that_choices_were_held_and_how_many_would_have_changed() -> None:
    trace = jobs.hessian_of(MODELS["mixtral"]()).trace(
        "hutchinson", num_matvecs=2, displacement=0.2
    )
    # Two layers' routers, and once more in their own loss, which the last call of `forward` takes.
    tokens = 2 * models.TOKENS * 4
    assert trace.provenance.held_choices == 2 * tokens * 2
    assert 0 < trace.provenance.flipped_choices < trace.provenance.held_choices


@pytest.mark.parametrize("operator", cells(get_args(OperatorName), ["ggn"]))
def test_operators_of_the_outputs_record_held_choices(operator: OperatorName) -> None:
    """Where the weights are displaced: at the weights, where a product ends, nothing changes."""
    found = jobs.hessian_of(MODELS["mixtral"]()).trace(
        "hutchinson", num_matvecs=2, displacement=0.2, operator=operator
    )
    assert found.provenance.held_choices == 2 * (2 * models.TOKENS * 4) * 2
    assert 0 < found.provenance.flipped_choices < found.provenance.held_choices


def test_curvatures_by_forwards_alone_record_held_choices() -> None:
    hessian = jobs.hessian_of(MODELS["mixtral"]())
    found = hessian.curvatures(("gradient",), operator="ggn").provenance
    assert found.held_choices == 2 * (2 * models.TOKENS * 4) * 2


class OwnLoss(nn.Module):
    """Layers of two experts, whose routers have a loss of their own in training: with gradients."""

    def __init__(self, balanced: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.balanced = balanced
        self.routers = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
        self.experts = nn.ModuleList(nn.Linear(6, 24) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy; the routers' own loss counts nothing, so that both models have one G."""
        own = torch.zeros(())
        for router, expert in zip(self.routers, self.experts, strict=True):
            scores = router(x).softmax(-1)
            weights, index = scores.topk(1)
            out = expert(x).view(len(x), 4, 6)
            x = x + torch.tanh(out[torch.arange(len(x)), index[:, 0]]) * weights
            if self.balanced and torch.is_grad_enabled():
                own = own + 0.0 * scores.gather(1, scores.topk(1).indices).sum()
        return functional.cross_entropy(self.head(x), y) + own


def test_choices_that_are_made_with_gradients_only_move_no_others() -> None:
    """As in megatron-core: the second layer's router is the third choice with gradients, and the
    second without.
    """
    generator = torch.Generator().manual_seed(2)
    data = [
        (torch.randn(40, 6, generator=generator), torch.randint(5, (40,), generator=generator))
        for _ in range(3)
    ]
    found = []
    for balanced in (False, True):
        hessian = ds_hessian.attach(OwnLoss(balanced), config=QUIET).use(data)
        v = hessian.random_vector(seed=1)
        with hessian.measuring(operator="ggn", displacement=0.1) as operator:
            found.append(operator.product_at(v, 0.1).vector)
        assert operator.cost.choices == 3 * 40 * 3
    assert torch.equal(*found)


def test_a_choice_that_is_made_without_gradients_only_is_an_error() -> None:
    function = FixedFunction(dropout=False)
    with function.evaluating(0):
        A.topk(1)
    with (
        pytest.raises(MeasurementError, match="or without gradients: its choice number 2"),
        function.evaluating(0),
        torch.no_grad(),
    ):
        B.topk(1)


def test_a_model_that_makes_no_choices_has_none_on_record() -> None:
    net = nn.Linear(3, 1)
    data = [(torch.randn(4, 3), torch.randn(4, 1))]
    hessian = ds_hessian.attach(net, config=QUIET)
    hessian.use(data, lambda m, b: (m(b[0]) - b[1]).square().mean())
    provenance = hessian.spectrum(num_matvecs=2).provenance
    assert (provenance.held_choices, provenance.flipped_choices) == (0, 0.0)


ZERO: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (2, {"zero": {"stage": 3}}),
    "stage 2": (2, {"zero": {"stage": 2}}),
    "stage 1, recomputed": (2, {"zero": {"stage": 1}, "recompute": "not reentrant"}),
    "stage 3, recomputed": (2, {"zero": {"stage": 3}, "recompute": "reentrant"}),
}


@pytest.mark.parametrize("name", cells(ZERO, ["stage 3"]))
def test_products_of_experts_under_zero_are_those_of_a_double_backward(
    ranks: Any, exact: Callable[..., Tensor], name: str
) -> None:
    size, options = ZERO[name]
    found = ranks(size).run(jobs.mixtral_under_zero, **options)
    v, product, error = found[0]
    expected = exact("mixtral", v, options.get("recompute", ""))
    true = float((product.double() - expected).norm() / expected.norm())
    assert true < 1e-3
    assert true < 5 * error


class Padded(nn.Module):
    """Unmasked padding, whose row is also one of the head's if `tied`; of a table that each forward
    makes anew if `made`.
    """

    def __init__(self, tied: bool, padding: int, made: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.made = made
        self.embed = nn.Embedding(6, 5, padding_idx=padding)
        nn.init.normal_(self.embed.weight)
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.row: Tensor | None = None  # for padding, where the reference reads it

    def forward(self, tokens: Tensor) -> Tensor:
        table, padding = self.embed.weight, self.embed.padding_idx
        x = self.embed(tokens)
        if self.made:
            table = table + table.roll(1, 0)
            x = functional.embedding(tokens, table, padding)
        if self.row is not None:
            padded = (tokens == padding).unsqueeze(-1)
            x = torch.where(padded, self.row, functional.embedding(tokens, table))
        x = x + torch.tanh(self.mix(x.cumsum(1)))
        logits = self.head(x[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())


@pytest.mark.parametrize(
    "tied, padding, made",
    cells(
        [(False, 0, False), (True, 0, False), (True, -2, False), (False, 0, True)],
        [(True, -2, False), (False, 0, True)],
    ),
)
def test_the_row_of_padding_is_the_constant_that_it_is_to_training(
    tied: bool, padding: int, made: bool
) -> None:
    """Where it is not masked: the products of the function that has a constant there, in fp64."""
    batches = [torch.tensor([[0, 1, 4, 3], [4, 0, 2, 0]]), torch.tensor([[1, 2, 3, 5]])]
    net = Padded(tied, padding, made)
    hessian = ds_hessian.attach(net, config=ds_hessian.HessianConfig.parse(QUIET)).use(batches)
    v = hessian.random_vector(seed=3)
    found, along = hessian.gather(hessian.matvec(v).vector), hessian.gather(v)
    wide = Padded(tied, padding, made).double()
    table = wide.embed.weight.detach()
    wide.row = (table + table.roll(1, 0) if made else table)[wide.embed.padding_idx].clone()
    names, parameters = zip(*wide.named_parameters(), strict=True)
    loss = torch.stack([wide(batch) for batch in batches]).mean()
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    exact = torch.autograd.grad(gradient, parameters, [along[name].double() for name in names])
    pairs = [(found[name], t) for name, t in zip(names, exact, strict=True)]
    off = sum(float((a - b).square().sum()) for a, b in pairs)
    assert off < 2e-4**2 * sum(float(b.square().sum()) for _, b in pairs)


def test_an_embedding_that_rescales_its_rows_is_refused() -> None:
    net = Padded(tied=False, padding=0)
    net.embed.max_norm = 1.0
    before = net.embed.weight.detach().clone()
    hessian = ds_hessian.attach(net, config=ds_hessian.HessianConfig.parse(QUIET))
    with pytest.raises(HessianError, match="embeddings with max_norm"):
        hessian.use([torch.tensor([[0, 1, 4, 3]])]).matvec(hessian.random_vector())
    assert torch.equal(net.embed.weight, before)
    bag = torch.nn.EmbeddingBag(5, 4, max_norm=1.0)
    hessian = ds_hessian.attach(bag, config=ds_hessian.HessianConfig.parse(QUIET))
    hessian.use([torch.tensor([[0, 1, 4, 3]])], lambda net, tokens: net(tokens).square().sum())
    with pytest.raises(HessianError, match="embeddings with max_norm"):
        hessian.matvec(hessian.random_vector())
