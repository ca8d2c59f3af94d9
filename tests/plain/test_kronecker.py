"""Kronecker factors and their comparison with the Hessian against dense fp64 matrices."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.errors import ConfigError, NumericsError, UnsupportedError
from ds_hessian.operators.kronecker import (
    Eigenform,
    Factors,
    KroneckerMetric,
    Settings,
    estimate,
    find_layers,
)
from ds_hessian.operators.kronecker.planned import size_of_square
from ds_hessian.operators.kronecker.sums import Square
from ds_hessian.records import HessianKronecker
from tests.nets import TinyGPT, batch
from tests.operators.gauss_newton import ExactGaussNewton
from tests.operators.nets import Exact, batches, dense, loss_of, mlp, train
from tests.plain.jobs import Mixed, data

QUIET = {"progress": False, "plot": False}
DATA = batches(4)


def matrix_of(form: Eigenform) -> Tensor:
    """K as a matrix of order m n."""
    eye = torch.eye(form.values.numel(), dtype=torch.float64).view(-1, *form.values.shape)
    return form.apply(eye).flatten(1)


def factors_of(net: nn.Module, data: list[Any], loss: Any = None, **settings: Any) -> list[Factors]:
    backend = ModuleBackend(net)
    layers, _ = find_layers(backend, None)
    settings = {"kinds": ("kfac", "ekfac", "shampoo", "klshampoo"), **settings}
    with backend.measuring(backend.objective(data, loss)) as session:
        return estimate(session, backend, layers, Settings(**settings))


def seen(net: nn.Module, data: list[Any], loss: Any) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Inputs and cotangents of each micro-batch's mean loss over their number, in fp64."""
    net, found = copy.deepcopy(net).double(), dict[str, list[tuple[Tensor, Tensor]]]()
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):

            def hook(_: Any, args: Any, output: Tensor, name: str = name) -> None:
                def note(c: Tensor) -> None:
                    a, c = args[0].detach().flatten(0, -2), c.flatten(0, -2) / len(data)
                    found.setdefault(f"{name}.weight", []).append((a, c))

                output.register_hook(note)

            module.register_forward_hook(hook)
    for entry in data:
        loss(net, entry).backward()
    return found


def matrices(parts: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """K-FAC, EK-FAC and Shampoo^2, dense, from their definitions."""
    a, c = (torch.cat(x) for x in zip(*parts, strict=True))
    tokens, count = len(a), len(parts)
    factor_a, factor_b = a.T @ a / tokens, tokens * c.T @ c
    basis = torch.kron(torch.linalg.eigh(factor_b)[1], torch.linalg.eigh(factor_a)[1])
    each = torch.einsum("tm,tn->tmn", c, a).flatten(1) @ basis
    eigenvalues = tokens * each.square().sum(0)
    gradients = [count * c.T @ a for a, c in parts]
    left = torch.stack([g @ g.T for g in gradients]).mean(0)
    right = torch.stack([g.T @ g for g in gradients]).mean(0)
    return {
        "kfac": torch.kron(factor_b, factor_a),
        "ekfac": basis @ torch.diag(eigenvalues) @ basis.T,
        "shampoo": torch.kron(left, right) / left.trace(),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return train(mlp(), batches(), 40)


def test_factors_are_those_of_their_definitions(net: nn.Module) -> None:
    found = factors_of(net, DATA, loss_of)
    exact = seen(net, DATA, loss_of)
    assert [f.layer.name for f in found] == ["0.weight", "2.weight", "4.weight"]
    for f in found:
        assert f.samples == {
            "kfac": 64,
            "ekfac": 64,
            "shampoo": 4,
            "klshampoo": 4,
        }
        assert f.mismatch < 1e-5
        wanted = matrices(exact[f.layer.name])
        for kind, matrix in wanted.items():
            assert (matrix_of(f.forms[kind]) - matrix).norm() < 1e-4 * matrix.norm(), kind


def test_factors_at_a_minimum_are_those_of_their_definitions() -> None:
    """Layers were said to be none: what is left of their gradients is rounding."""
    torch.manual_seed(0)
    data = [(torch.randn(20, 4), torch.randn(20, 3)) for _ in range(2)]
    x, y = (torch.cat(parts).double() for parts in zip(*data, strict=True))
    net = nn.Sequential(nn.Linear(4, 3, bias=False))
    net[0].weight.data.copy_(torch.linalg.lstsq(x, y).solution.T)

    def loss(net: Any, entry: Any) -> Tensor:
        x, y = (each.to(net[0].weight) for each in entry)
        return functional.mse_loss(net(x), y)

    (found,) = factors_of(net, data, loss, kinds=("kfac", "shampoo"))
    k = matrices(seen(net, data, loss)["0.weight"])["kfac"]
    assert (matrix_of(found.forms["kfac"]) - k).norm() < 1e-4 * k.norm()
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(data, loss)
    record = hessian.kronecker(["kfac", "shampoo"], basis=4, probes=2, extremes=0)
    assert np.isnan(record.solves).all() and "whose tokens cancel" in record.unsolved["0.weight"]


class Branch(nn.Module):
    """A layer that only some micro-batches use, as an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of inputs and labels."""
        x = x.to(self.out.weight)
        hidden = torch.tanh(self.some(x)) if float(x[0, 0]) > 0 else x
        return functional.cross_entropy(self.out(hidden), y)


def test_micro_batches_without_tokens_of_a_layer_have_gradients_of_zero() -> None:
    """Shampoo's K was that of all micro-batches times the share of those that had some."""
    torch.manual_seed(0)
    net = Branch()
    data = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(5)]
    for i, (x, _) in enumerate(data):
        x[0, 0] = 1.0 if i in (1, 4) else -1.0
    kinds = ("shampoo", "klshampoo")
    found, _ = factors_of(net, data, lambda m, b: m(*b), kinds=kinds)
    assert found.samples == {"shampoo": 2, "klshampoo": 2}
    parts = seen(net, data, lambda m, b: m(*b))["some.weight"]
    gradients = torch.stack([len(data) * c.T @ a for a, c in parts])
    left, right = (
        g.sum(0) / len(data) for g in (gradients @ gradients.mT, gradients.mT @ gradients)
    )
    wanted = torch.kron(left, right) / left.trace()
    assert (matrix_of(found.forms["shampoo"]) - wanted).norm() < 1e-4 * wanted.norm()
    form = found.forms["klshampoo"]  # whose scale makes this 1
    inverse = torch.stack([form.apply(g, lambda v: 1 / (v + 1e-3 * form.mean)) for g in gradients])
    spent = float((gradients * inverse).sum()) / len(data) / gradients[0].numel()
    assert spent == pytest.approx(1, rel=0.5)


@pytest.mark.parametrize("n", [1, 95, 96, 193, pytest.param(3200, marks=pytest.mark.full)])
def test_sums_of_squares_are_whole_from_one_triangle(n: int) -> None:
    x = torch.randn(7, n, generator=torch.Generator().manual_seed(0))
    square = Square(n, torch.device("cpu"))
    square.add(x[:3])
    square.add(x[3:], alpha=0.5)
    wide = x.double()
    wanted = wide[:3].T @ wide[:3] + 0.5 * wide[3:].T @ wide[3:]
    size, (found, lower) = n * n, (f(square.flat) for f in (square.whole, square.triangle))
    assert size_of_square(n) == len(square.flat) <= max(size * 17 / 32 + 96 * n, 1)
    rounding = 2e-7 * 7 * float(x.square().max())
    assert torch.allclose(found, wanted, rtol=0, atol=rounding)
    assert torch.equal(lower.tril(), found.tril())


def test_adams_diagonal_is_that_of_its_second_moments() -> None:
    """Of gradients in fp64 at each step's weights; against the dense block of H."""
    net, moments = mlp(), dict[str, Tensor]()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-3)
    hessian: Any = ds_hessian.attach(net, optimizer, QUIET).use(DATA, loss_of)
    steps = 12
    for i in range(steps):
        entry = DATA[i % len(DATA)]
        wide = copy.deepcopy(net).double()
        loss_of(wide, entry).backward()
        for name, p in wide.named_parameters():
            assert p.grad is not None
            moments[name] = 0.98 * moments.get(name, 0.0) + 0.02 * p.grad.square()
        optimizer.zero_grad()
        loss_of(net, entry).backward()
        optimizer.step()
        hessian.step()
    found = hessian.kronecker(["adam"], basis=12, probes=8, extremes=8)
    assert (found.samples == steps).all()
    exact = Exact(net, DATA).matrix()
    for i, name, part in _parts(found, net):
        k = ((moments[name] / (1 - 0.98**steps)).sqrt() + 1e-3).flatten().diag()
        _check(found, i, 0, exact[part, part], k)


@pytest.mark.full
def test_kl_shampoo_is_its_fixed_point(net: nn.Module) -> None:
    """Of the gradients of single examples; with few gradients the iteration has no fixed point."""
    examples = [(x[None], y[None]) for xs, ys in DATA for x, y in zip(xs, ys, strict=True)]
    *_, found = factors_of(net, examples, loss_of, kinds=("klshampoo",))
    form, parts = found.forms["klshampoo"], seen(net, examples, loss_of)["4.weight"]
    gradients = torch.stack([len(parts) * c.T @ a for a, c in parts])
    left, right = torch.eye(3, dtype=torch.float64), torch.eye(16, dtype=torch.float64)
    for _ in range(100):
        inverses = [
            torch.linalg.inv(len(s) * s / s.trace() + 1e-4 * torch.eye(len(s)))
            for s in (left, right)
        ]
        left = (gradients @ inverses[1] @ gradients.mT).mean(0)
        right = (gradients.mT @ inverses[0] @ gradients).mean(0)
    assert cosine(matrix_of(form), torch.kron(left, right)) > 0.999
    ridge = 1e-4 * form.mean
    inverse = torch.stack([form.apply(g, lambda v: 1 / (v + ridge)) for g in gradients])
    spent = float((gradients * inverse).flatten(1).sum(1).mean()) / gradients[0].numel()
    assert spent == pytest.approx(1, rel=0.05)


def test_softmax_regression_on_one_example_is_exactly_k_fac_of_all_labels() -> None:
    """One token: K-FAC of the data's label is the outer product of the gradient; over all labels,
    weighted by their probabilities, it is the Gauss-Newton matrix, which is the Hessian here."""
    torch.manual_seed(3)
    net = nn.Linear(5, 4, bias=False)
    x = torch.randn(1, 5)
    p = net(x).detach().softmax(-1)[0].double()
    total = torch.zeros(20, 20, dtype=torch.float64)
    for label in range(4):
        entry = [(x, torch.tensor([label]))]
        (found,) = factors_of(net, entry, loss_of, kinds=("kfac", "ekfac"))
        total += p[label] * matrix_of(found.forms["kfac"])
        assert (matrix_of(found.forms["ekfac"]) - matrix_of(found.forms["kfac"])).norm() < 1e-5
    exact = Exact(net, [(x, torch.tensor([0]))])
    hessian = dense(exact, 20)
    assert (total - hessian).norm() < 1e-5 * hessian.norm()


@pytest.mark.full
def test_labels_drawn_from_the_model_give_the_gauss_newton_matrix() -> None:
    """Softmax regression on one example with 400 draws: K-FAC up to the error of a mean of them."""
    torch.manual_seed(3)
    net = nn.Linear(5, 4, bias=False)
    entry = [(torch.randn(1, 5), torch.tensor([2]))]
    (found,) = factors_of(net, entry, loss_of, kinds=("kfac", "ekfac", "shampoo"), draws=400)
    exact = Exact(net, entry)
    hessian = dense(exact, 20)
    assert found.samples["kfac"] == 400 and found.samples["shampoo"] == 400
    for kind in ("kfac", "ekfac"):
        distance = (matrix_of(found.forms[kind]) - hessian).norm() / hessian.norm()
        assert distance < 4 / 400**0.5, kind
    assert cosine(matrix_of(found.forms["shampoo"]), hessian) > 0.9


@pytest.mark.full
def test_drawn_labels_need_a_cross_entropy(net: nn.Module) -> None:
    def cubes(net: nn.Module, given: Any) -> Tensor:
        found = (net(given[0]) - 1).abs().pow(3).mean()
        assert isinstance(found, Tensor)
        return found

    with pytest.raises(UnsupportedError, match="where the loss is no cross entropy"):
        factors_of(net, DATA[:1], cubes, kinds=("kfac",), draws=1)


def test_drawn_labels_give_the_factors_of_the_fisher_matrix(net: nn.Module) -> None:
    """Of the last layer, where they are known: B is the mean of diag(p) - p p'."""
    *_, found = factors_of(net, DATA, loss_of, kinds=("kfac", "ekfac"), draws=16)
    exact = copy.deepcopy(net).double()
    a = torch.cat([exact[:-1](x.double()) for x, _ in DATA]).detach()
    p = exact[-1](a).softmax(-1).detach()
    each = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    factor_a, factor_b = a.T @ a / len(a), each.mean(0)
    wanted = torch.kron(factor_b, factor_a)
    # The variance of d d' over draws of a label, which few unlikely labels make.
    d = torch.eye(3, dtype=torch.float64) - p[:, None]
    fourth = (p * d.square().sum(-1).square()).sum(1)
    error = 4 * float((fourth - each.square().sum((1, 2))).mean() / (16 * len(a))) ** 0.5
    assert (matrix_of(found.forms["kfac"]) - wanted).norm() < error * factor_a.norm()
    square = a.square().sum(1)
    trace = float((each.diagonal(dim1=1, dim2=2).sum(1) * square).mean())
    spread = (p * d.square().sum(-1).square()).sum(1) - each.diagonal(dim1=1, dim2=2).sum(1) ** 2
    bar = 4 * float((spread * square**2).mean() / (16 * len(a))) ** 0.5
    assert abs(float(found.forms["ekfac"].values.sum()) - trace) < bar
    assert found.samples["kfac"] == 16 * 64


@pytest.mark.full
def test_the_other_operators_are_compared_too(net: nn.Module) -> None:
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA, loss_of)
    settings = {"layers": ["4.weight"], "basis": 8, "probes": 4, "extremes": 0, "draws": 4}
    found = hessian.kronecker(["kfac"], operator="ggn", **settings)
    assert found.provenance.operator == "ggn" and found.draws == 4
    a = torch.cat([net[:-1](x) for x, _ in DATA]).double().detach()
    p = (a @ net[-1].weight.double().T + net[-1].bias.double()).softmax(-1).detach()
    each = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    exact = torch.einsum("tij,tk,tl->ikjl", each, a, a).reshape(48, 48) / len(a)
    assert abs(found.norms[0] - float(exact.norm())) <= 4 * found.norm_errors[0]
    plain = float(exact.diag().square().sum() / exact.square().sum())
    assert abs(found.plain_shares[0] - plain) <= 4 * found.plain_share_errors[0]


@pytest.fixture(scope="module")
def record(net: nn.Module) -> HessianKronecker:
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA, loss_of)
    found = hessian.kronecker(basis=12, probes=8, extremes=8)
    assert isinstance(found, HessianKronecker)
    return found


def test_comparisons_are_those_of_dense_matrices(record: HessianKronecker, net: nn.Module) -> None:
    exact, parts = Exact(net, DATA), seen(net, DATA, loss_of)
    matrix = exact.matrix()
    for i, name, part in _parts(record, net):
        c = matrix[part, part]
        assert record.tops[i] == pytest.approx(float(torch.linalg.eigvalsh(c).abs().max()), 1e-3)
        assert abs(record.norms[i] - float(c.norm())) <= 4 * record.norm_errors[i]
        plain = float(c.diag().square().sum() / c.square().sum())
        assert abs(record.plain_shares[i] - plain) <= 4 * record.plain_share_errors[i]
        gradient = exact.gradient[part].detach()
        for j, (kind, k) in enumerate(matrices(parts[name]).items()):
            assert record.kinds[j] == kind
            scale = _check(record, i, j, c, k)
            shift = record.dampings[i] * torch.eye(len(c))
            a, b = (torch.linalg.solve(m + shift, gradient) for m in (c, scale * k))
            assert abs(record.solves[i, j] - cosine(a, b)) <= 2 * record.solve_errors[i, j]
    # Products whose ratio is far above the pilot's have that ratio as their error: 4 of 156 here.
    assert (record.cosine_errors < 0.1).all() and np.median(record.cosine_errors) < 0.02


def _parts(record: HessianKronecker, net: nn.Module) -> Iterator[tuple[int, str, slice]]:
    """Yield (number, name, coordinates) of the layers of a record."""
    offset = 0
    for name, p in net.named_parameters():
        if name in record.layers:
            yield record.layers.index(name), name, slice(offset, offset + p.numel())
        offset += p.numel()


def _check(record: HessianKronecker, i: int, j: int, c: Tensor, k: Tensor) -> float:
    """Assert that figures of a layer and a kind are those of dense matrices; return the scale."""
    assert abs(record.cosines[i, j] - cosine(c, k)) <= 4 * record.cosine_errors[i, j]
    scale = float((c * k).sum() / k.square().sum())
    assert abs(record.scales[i, j] - scale) <= 4 * record.scale_errors[i, j]
    values, vectors = torch.linalg.eigh(k + record.ridge * k.trace() / len(k) * torch.eye(len(k)))
    root = vectors @ torch.diag(values.rsqrt()) @ vectors.T
    exact = float(torch.linalg.eigvalsh(root @ c @ root)[-1])
    assert abs(record.extremes[i, j] - exact) <= 2 * record.extreme_errors[i, j]
    return scale


def test_the_record_is_saved_printed_and_drawn(record: HessianKronecker, tmp_path: Path) -> None:
    assert HessianKronecker.load(record.save(tmp_path)) == record
    assert record.plot(tmp_path / "kronecker.png").stat().st_size > 1000
    assert "klshampoo" in record.table() and "4.weight" in record.table()
    assert record.num_matvecs == record.cost.products == 3 * (12 + 8 + 4 * 8)


def gpt() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.1)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def trained(measure: bool) -> list[Tensor]:
    """What training leaves behind, with or without a measurement after each step."""
    net, optimizer = gpt()
    hessian: Any = ds_hessian.attach(net, optimizer, QUIET).use([batch(9, 0)])
    for i in range(2):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
        hessian.step()
        if measure:
            found = hessian.kronecker(("kfac", "adam"), basis=2, probes=2, extremes=0)
            assert found.left_out == {
                "embed.weight": "it is an embedding",
                "position": "it is no whole weight of a module",
            }
            assert found.layers == ("qkv.weight", "out.weight", "up.weight", "down.weight")
            assert np.isnan(found.extremes).all() and np.isfinite(found.cosines).all()
            assert (found.samples == [12, i + 1]).all()
            assert not any(m._forward_hooks for m in net.modules())
    return [*net.parameters(), *net.buffers(), torch.get_rng_state()]


def test_training_is_bitwise_the_same_with_measurements_in_between() -> None:
    with_, without = trained(True), trained(False)
    assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))


class Odd(nn.Module):
    """A tied layer, a transposed one as transformers have it, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.last = nn.Linear(10, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.conv = Conv1D(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the weight of `tied` is used twice, once without its module."""
        hidden = torch.tanh(self.conv(torch.tanh(self.first(x))))
        return self.last(functional.linear(torch.tanh(self.tied(hidden)), self.tied.weight))


class Conv1D(nn.Module):
    """`y = x W + b` with W `(n, m)`, as in transformers' pytorch_utils.py."""

    def __init__(self, m: int, n: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n, m) / 3), nn.Parameter(torch.zeros(m))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., m)`."""
        return torch.addmm(self.bias, x, self.weight)


def test_a_tied_weight_is_left_out_or_refused_and_a_transposed_one_is_right() -> None:
    torch.manual_seed(0)
    net = Odd()
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA[:2], loss_of)
    found = hessian.kronecker(["kfac"], basis=2, probes=2, extremes=0)
    assert found.layers == ("first.weight", "last.weight", "conv.weight")
    assert found.left_out == {"tied.weight": "its gradient is not that of one linear layer"}
    with pytest.raises(UnsupportedError, match=r"is not that of one linear layer .*tied\.weight"):
        hessian.kronecker(["kfac"], ["tied.weight"])
    with pytest.raises(ConfigError, match=r"there is no trainable 'lst\.weight'; did you mean"):
        hessian.kronecker(["kfac"], ["lst.weight"])


@pytest.mark.full
def test_solves_and_influence_take_k_fac_as_preconditioner(net: nn.Module) -> None:
    """The same solution as without; with D = H it would take one step."""
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA[:2], loss_of)
    b = hessian.random_vector(seed=3)
    found = hessian.solve(b, [0.5], "minres", 1e-3, 40, preconditioner="ekfac")
    exact = Exact(net, DATA[:2])
    matrix = dense(exact, 607) + 0.5 * torch.eye(607)
    x = torch.linalg.solve(matrix, b.double())
    assert found.converged.all() and (found.x[0].double() - x).norm() < 1e-2 * x.norm()
    plain = hessian.influence(DATA[:1], DATA[:2], [0.5], num_matvecs=40)
    with_ = hessian.influence(DATA[:1], DATA[:2], [0.5], num_matvecs=40, preconditioner="ekfac")
    assert np.allclose(with_.scores, plain.scores, rtol=2e-2, atol=1e-3)
    shapes = ((16, 20), (3, 16))
    assert "Kronecker factors" in hessian.memory_plan("kronecker", shapes=shapes).table()
    with pytest.raises(NumericsError, match="EK-FAC . damping must be positive everywhere"):
        hessian.solve(b, [-1.0], preconditioner="ekfac")
    with pytest.raises(UnsupportedError, match="of which none is a weight of two dims"):
        hessian.solve(b, [0.5], preconditioner="ekfac", parameters="bias")


@pytest.mark.full
@pytest.mark.parametrize("scale", [1e-5, 1.0])
def test_errors_of_influences_with_a_preconditioner_are_those_of_the_scores(
    net: nn.Module, scale: float
) -> None:
    """They were up to 3600 times too small, where the curvature is."""

    def loss(net: nn.Module, entry: Any) -> Tensor:
        return scale * loss_of(net, entry)

    hessian: Any = ds_hessian.attach(net, config={**QUIET, "operator": "ggn"}).use(DATA, loss)
    matrix = dense(ExactGaussNewton(net, "4", loss, DATA), 607)
    damping = 1e-3 * float(torch.linalg.eigvalsh(matrix)[-1])
    query, *examples = (Exact(net, [e], loss).gradient.detach() for e in (DATA[0], *DATA))
    x = torch.linalg.solve(matrix + damping * torch.eye(607), query)
    for tolerance in (0.3, 1e-2, 1e-4):
        limits = {"tolerance": tolerance, "num_matvecs": 60, "method": "minres"}
        found = hessian.influence(DATA[:1], DATA, [damping], preconditioner="ekfac", **limits)
        off = abs(found.scores[0] - (torch.stack(examples) @ x).numpy())
        assert (off < found.errors[0]).all() and (found.errors < abs(found.scores).max()).all()


@pytest.mark.full
def test_ek_fac_saves_products_where_inputs_differ_in_scale() -> None:
    """Softmax regression, of which it is nearly the Gauss-Newton matrix: 31 products without it."""
    torch.manual_seed(0)
    scales = torch.logspace(0, -1.5, 20)
    entries = [(torch.randn(64, 20) * scales, torch.randint(3, (64,))) for _ in range(8)]
    net = nn.Linear(20, 3, bias=False)
    hessian: Any = ds_hessian.attach(net, config={**QUIET, "operator": "ggn"}).use(entries, loss_of)
    damping = 1e-3 * float(hessian.eigenpairs(1).values[0])
    b = hessian.random_vector(seed=3)
    products = []
    for preconditioner in (None, "ekfac"):
        found = hessian.solve(
            b, [damping], tolerance=1e-2, num_matvecs=60, preconditioner=preconditioner
        )
        assert found.converged.all()
        products.append(found.cost.products)
    assert products[1] < products[0] / 4


@pytest.mark.full
def test_the_metric_is_ek_fac_on_layers_and_a_diagonal_elsewhere(net: nn.Module) -> None:
    backend = ModuleBackend(net)
    with backend.measuring(backend.objective(DATA, loss_of)) as session:
        metric = KroneckerMetric(session, backend, find_layers(backend, None)[0])
        root = metric.inverse_root(0.3)
        v = torch.randn(607, generator=torch.Generator().manual_seed(2))
        twice = root(root(v)).double()
    exact = matrices(seen(net, DATA, loss_of)["2.weight"])["ekfac"] + 0.3 * torch.eye(320)
    part = slice(220, 540)
    assert (exact @ twice[part] - v[part].double()).norm() < 1e-3 * v[part].norm()
    bias = slice(604, 607)
    each = torch.stack([Exact(net, [entry]).gradient[bias].detach() for entry in DATA])
    wanted = v[bias].double() / (16 * each.square().mean(0) + 0.3)
    assert (twice[bias] - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.full
def test_factors_that_an_optimizer_keeps_are_read_by_an_adapter(net: nn.Module) -> None:
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA, loss_of)
    parts = seen(net, DATA, loss_of)

    def adapter(name: str) -> tuple[Tensor, Tensor]:
        gradients = [c.T @ a for a, c in parts[name]]
        left = torch.stack([g @ g.T for g in gradients]).mean(0)
        return left, torch.stack([g.T @ g for g in gradients]).mean(0)

    kinds, effort = ["shampoo", "optimizer"], {"basis": 4, "probes": 2, "extremes": 0}
    found = hessian.kronecker(kinds, ["4.weight"], adapter=adapter, **effort)
    assert found.cosines[0, 1] == pytest.approx(found.cosines[0, 0], rel=1e-4)
    with pytest.raises(ConfigError, match="needs an adapter"):
        hessian.kronecker(["optimizer"])
    with pytest.raises(ConfigError, match=r"4\.weight must have shapes \[\(3, 3\), \(16, 16\)\]"):
        hessian.kronecker(
            kinds, ["4.weight"], adapter=lambda name: (torch.eye(2), torch.eye(16)), **effort
        )
    with pytest.raises(NumericsError, match=r"factors of 4\.weight must be finite"):
        hessian.kronecker(
            kinds, ["4.weight"], adapter=lambda name: (math.nan * torch.eye(3), None), **effort
        )


def compared(scale: float, **arguments: Any) -> HessianKronecker:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    entries = [(torch.randn(8, 6), torch.arange(8) % 3) for _ in range(5)]

    def loss(net: nn.Module, entry: Any) -> Tensor:
        return scale * functional.cross_entropy(net(entry[0]), entry[1])

    hessian: Any = ds_hessian.attach(net, config=QUIET).use(entries, loss)
    found = hessian.kronecker(["kfac"], operator="ggn", basis=12, probes=2, **arguments)
    assert isinstance(found, HessianKronecker)
    return found


def test_a_product_of_almost_nothing_has_no_part_in_the_errors() -> None:
    """G of a softmax is singular: what Lanczos finds last has a product of rounding alone, whose
    relative error had been that of all figures, 5.8 for a cosine of 0.99.
    """
    found = compared(1.0, draws=1)
    assert 0 < found.cosine_errors[1, 0] < 1e-3 and 0 < found.norm_errors[1]


@pytest.mark.full
@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_figures_are_those_of_a_loss_of_any_size_or_refused(scale: float) -> None:
    """Squares in fp32 had been lost: the share on the diagonal was 0.29 for 0.40, and a largest
    eigenvalue negative."""
    one, other = compared(1.0, draws=1), compared(scale, draws=1)
    np.testing.assert_allclose(other.plain_shares, one.plain_shares, rtol=1e-3)
    np.testing.assert_allclose(other.cosines, one.cosines, rtol=1e-3)
    np.testing.assert_allclose(other.extremes, one.extremes, rtol=1e-2)
    with pytest.raises(NumericsError, match=r"squares of inputs and gradients of 0.weight must"):
        compared(scale)


def test_inputs_that_are_no_numbers_are_named() -> None:
    """Advice was to multiply the loss by a constant, or to leave out weights that are tied."""
    entries = [(torch.full((2, 10), x), torch.zeros(2)) for x in (0.5, math.nan)]

    def loss(net: nn.Module, entry: Any) -> Tensor:
        return torch.as_tensor(net(entry[0]).nan_to_num().square().mean())

    for some in entries, entries[::-1]:
        with pytest.raises(NumericsError, match=r"0\.weight.* must be numbers, some are NaN"):
            factors_of(mlp(), some, loss)


@pytest.mark.full
def test_a_layer_without_a_gradient_has_no_figures_and_spoils_none(tmp_path: Path) -> None:
    """Beside BatchNorm, dropout, and a layer that these micro-batches do not use."""
    net = Mixed(odd=True)
    hessian: Any = ds_hessian.attach(net, config=QUIET).use([data(i) for i in range(2)])
    found = hessian.kronecker(basis=4, probes=2, extremes=2)
    unused = found.layers.index("odd.weight")
    assert np.isnan(found.cosines[unused]).all()
    assert found.norms[unused] == found.norm_errors[unused] == 0
    assert list(found.unknown) == ["odd.weight"]
    assert "no figures: odd.weight, its C is zero" in found.table()
    others = [i for i in range(len(found.layers)) if i != unused]
    assert len(others) == 2 and np.isfinite(found.cosines[others]).all()
    assert HessianKronecker.load(found.save(tmp_path)) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kinds": ["k-fac"]}, "kronecker needs kinds among kfac, ekfac, shampoo"),
        ({"probes": 1}, "probes >= 2"),
        ({"kinds": ["adam"]}, "there is no optimizer"),
    ],
)
def test_impossible_arguments_are_refused(
    net: nn.Module, arguments: dict[str, Any], message: str
) -> None:
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA[:1], loss_of)
    with pytest.raises(ConfigError, match=message):
        hessian.kronecker(**arguments)


@pytest.mark.full
def test_fewer_layers_at_once_give_the_same_factors_and_are_proposed(net: nn.Module) -> None:
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(DATA[:2], loss_of)
    settings = {"kinds": ["ekfac"], "basis": 3, "probes": 2, "extremes": 0}
    whole, one = (hessian.kronecker(**settings, layers_at_once=k) for k in (None, 1))
    assert np.array_equal(whole.cosines, one.cosines)


def test_a_plan_knows_the_layers_of_the_job() -> None:
    """Without being told: eigenvectors, which EK-FAC shares with K-FAC and Adam has none of, and
    LAPACK's work space.
    """
    net = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 40), nn.Linear(40, 3))
    hessian: Any = ds_hessian.attach(net, config=QUIET)
    squares = sum(m * m + n * n for m, n in ((40, 5), (3, 40)))
    own = 40 * 5 + 3 * 40

    def planned(kinds: list[str]) -> dict[str, int]:
        return {i.name: i.size for i in hessian.memory_plan("kronecker", kinds=kinds).items}

    assert planned(["adam"])["Kronecker factors"] == 8 * own
    assert planned(["kfac", "shampoo"])["Kronecker factors"] == 16 * (squares + own)
    assert planned(["shampoo"])["Shampoo's factors"] == 8 * squares
    for kinds in (["kfac"], ["kfac", "ekfac"]):
        items = planned(kinds)
        assert items["Kronecker factors"] == 8 * (squares + len(kinds) * own)
        work = 8 * (40 * 40 + 5 * 5 + 2 * 40 * 40)
        assert work <= items["a Kronecker factor being decomposed"] < 1.01 * work
    one = hessian.memory_plan("kronecker", kinds=["kfac"], layers=["2.weight"])
    assert {i.name: i.size for i in one.items}["Kronecker factors"] == 8 * (9 + 1600 + 120)
    solve = hessian.memory_plan("solve", preconditioner="ekfac", dampings=[0.1])
    assert {i.name: i.size for i in solve.items}["Kronecker factors"] == 8 * squares + 16 * own


def test_a_plan_has_passes_decompositions_and_figures_at_different_times() -> None:
    """And the operator with its outputs beside the products of a layer alone."""
    net = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 500))
    data = [(torch.randn(60, 20), torch.arange(60) % 500)]
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(data, loss_of)
    settings = {"kinds": ["kfac"], "layers": ["0.weight"], "basis": 4, "probes": 2, "extremes": 0}
    plan = hessian.memory_plan("kronecker", operator="ggn", precision="model", **settings)
    items, own = {item.name: item for item in plan.items}, 20 * 40
    outputs = items["trial before, or outputs"]
    assert (outputs.stage, outputs.moments) == ("products", ("passes",))
    assert items["tokens being squared"].size == 4 * 256 * 40
    assert items["a Kronecker factor being decomposed"].moments == ("figures",)
    figures = items["figures of a layer"]
    assert (figures.stage, figures.moments) == ("products", ("figures",))
    assert figures.size == (4 * 12 + 8 * 20) * own
    # Weights and their gradient, the vector over all parameters and what passes have of the layer.
    n = sum(p.numel() for p in net.parameters())
    passes = 3 * 4 * n + outputs.size + items["samples of the cotangents"].size + 2 * 4 * own
    held = items["Kronecker factors"].size + (4 + 12) * 4 * own
    drawn = figures.size + items["other eigenvectors"].size
    assert plan.peak("host") == max(passes + held, drawn + held + 4 * n + 4 * own)


def test_weights_of_other_than_two_dims_are_refused_by_their_dims() -> None:
    """They were said to be no trainable parameters, and not named among all."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    entries = [(torch.randn(2, 1, 4, 4), torch.arange(2))]
    hessian: Any = ds_hessian.attach(net, config=QUIET).use(entries, loss_of)
    for layers, message in (
        (["0.weight"], r"0\.weight: it has 4 dims"),
        (["2.weight", "2.bias"], r"2\.bias: it has 1 dim$"),
        ("bias", "of which none is a weight of two dims"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            hessian.kronecker(["kfac"], layers)
    found = hessian.kronecker(["kfac"], "weight", basis=1, probes=2, extremes=0)
    assert found.layers == ("2.weight",) and found.left_out == {"0.weight": "it has 4 dims"}


class Rows(nn.Module):
    """Has a weight of two dims, of which it returns rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, index: Tensor) -> Tensor:
        """`(T, 6)`."""
        return self.weight[index]


class Turned(Rows):
    """Multiplies from the right by a weight whose class does not say so."""

    def forward(self, x: Tensor) -> Tensor:
        """`(T, 6)`."""
        return x @ self.weight


class Named(nn.Module):
    """Linear layers whose inputs are given by name, behind what only looks like one."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = first, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        first = self.first(x.argmax(1) % 5 if type(self.first) is Rows else x[:, :5])
        return self.last(input=torch.tanh(self.middle(input=first)))


@pytest.mark.parametrize("kind", [Rows, Turned])
def test_what_is_no_linear_layer_is_left_out_and_inputs_may_be_named(kind: type[Rows]) -> None:
    torch.manual_seed(0)
    net = Named(kind())
    found = factors_of(net, DATA, loss_of, kinds=("kfac",), required=False)
    assert [f.layer.name for f in found] == ["middle.weight", "last.weight"]
    wide, inputs = copy.deepcopy(net).double(), list[Tensor]()
    wide.last.register_forward_pre_hook(
        lambda m, args, kwargs: inputs.append(kwargs["input"].detach()), with_kwargs=True
    )
    for x, _ in DATA:
        wide(x.double())
    a = torch.cat(inputs)
    form, wanted = found[1].forms["kfac"], a.T @ a / len(a)
    assert form.right is not None
    rotated = form.right.T @ wanted @ form.right
    assert (rotated - rotated.diag().diag()).norm() < 1e-5 * wanted.norm()
    with pytest.raises(UnsupportedError, match=r"not that of one linear layer .*: first\.weight"):
        factors_of(net, DATA, loss_of, kinds=("kfac",))


@pytest.mark.full
def test_figures_of_klshampoo_have_the_rounding_of_inverses_of_its_factors() -> None:
    """Of a singular factor it is that of fp32 over the ridge: two roundings of the same weights had
    scales ten bars apart, and largest eigenvalues five.
    """
    torch.manual_seed(0)
    net, entries = nn.Sequential(nn.Linear(10, 5), nn.Tanh(), nn.Linear(5, 3)), batches(4)
    found = []
    for _ in range(3):
        hessian: Any = ds_hessian.attach(net, config=QUIET).use(entries, loss_of)
        found += [hessian.kronecker(["klshampoo"], ["2.weight"], basis=99, extremes=8)]
        with torch.no_grad():
            for weight in net.parameters():
                weight.mul_(1 + 1e-7 * torch.rand_like(weight))
    for name, most in (("scale", 3e-3), ("extreme", 1e-2)):
        values, errors = (np.ravel([getattr(r, name + s) for r in found]) for s in ("s", "_errors"))
        assert np.all(np.abs(values - values[0]) <= 2 * errors[0]), (name, values, errors)
        assert np.all(errors < most * values), (name, values, errors)
