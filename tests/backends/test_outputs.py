"""Gauss-Newton, residual and Fisher operators on engines of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.backends import jobs, output_jobs
from tests.backends.test_stages import ENGINES
from tests.nets import TinyGPT, batch
from tests.operators.gauss_newton import ExactGaussNewton, of_functions
from tests.operators.nets import relative
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
SLACK = 3.0
"""Estimates are within this factor of the error."""

PLACES = (  # where outputs and cotangents are made otherwise: dtypes, gathering, offload
    *("0", "1", "2", "3", "3 offload", "3 hpZ", "1 round robin", "2 summed gradients"),
    *("2 bf16", "3 bf16", "3 bf16 masters", "3 bf16 hpZ", "0 fp16", "3 fp16", "3 autocast"),
)
CASES = {name: (name, "model") for name in PLACES} | {
    f"{name} in fp32": (name, "fp32") for name in ("1 bf16", "3 bf16", "2 fp16", "3 bf16 offload")
}
QUICK = ("3",)


def net_with(weights: dict[str, Tensor]) -> nn.Module:
    """TinyGPT in fp64 at these weights."""
    net = TinyGPT(dropout=0.0).double()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(weights[name].double().reshape(p.shape))
    return net


def loss(net: nn.Module, b: Any) -> Tensor:
    """The module's own."""
    value = net(*b)
    assert isinstance(value, Tensor)
    return value


@pytest.mark.parametrize("name", cells(CASES, QUICK))
def test_products_are_those_of_automatic_differentiation(ranks: Ranks, name: str) -> None:
    engine, precision = CASES[name]
    weights, rows, outputs = ranks(2).run(output_jobs.products, ENGINES[engine], precision, 2)[0]
    assert outputs == "head: cross entropy"
    net, data = net_with(weights), [batch(500 + i, 0) for i in range(jobs.FEW)]
    names = [n for n, _ in net.named_parameters()]
    exact = {
        "ggn": ExactGaussNewton(net, "head", loss, data),
        "fisher": ExactGaussNewton(net, "head", loss, data, fisher=True),
    }
    narrow = precision == "model" and engine not in jobs_in_fp32()
    for k, (v, figures, gap) in enumerate(rows):
        for kind, of in exact.items():
            found, error, _ = figures[kind]
            off = relative(flat(found, names), of(flat(v, names)))
            limit = (0.3 if k == 0 else 0.1) if narrow else (3e-4 if k == 0 else 1e-4)
            assert off < min(limit, SLACK * error), (kind, k)
        products = [figures[kind] for kind in ("ggn", "residual", "hessian")]
        assert gap < SLACK * sum(error * norm for _, error, norm in products)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["0", "2", "3", "3 offload", "2 bf16", "3 bf16", "3 fp16"])
def test_products_of_capped_logits(ranks: Ranks, engine: str) -> None:
    weights, rows, outputs = ranks(2).run(output_jobs.products, ENGINES[engine], "model", 3, True)[
        0
    ]
    assert outputs == "the logits of the loss: cross entropy"
    net = output_jobs.Capped(dropout=0.0)
    net.load_state_dict(
        {n: w.reshape(net.state_dict()[n].shape) for n, w in weights.items()}, False
    )
    names = [n for n, _ in net.named_parameters()]
    net.forward = net.logits  # type: ignore[method-assign]

    def capped(tokens: Tensor, call: Callable[..., Any]) -> Any:
        return call(tokens)

    def entropy(labels: Tensor, f: Tensor) -> Tensor:
        return nn.functional.cross_entropy(f.flatten(0, 1), labels.flatten())

    narrow = engine not in jobs_in_fp32()
    for k, (v, figures, gap) in enumerate(rows):
        each = [
            of_functions(net, partial(capped, x), partial(entropy, y), flat(v, names))
            for x, y in (batch(500 + i, 0) for i in range(jobs.FEW))
        ]
        found, error, _ = figures["ggn"]
        off = relative(flat(found, names), torch.stack(each).mean(0))
        limit = (0.3 if k == 0 else 0.1) if narrow else (3e-4 if k == 0 else 1e-4)
        assert off < min(limit, SLACK * error), k
        products = [figures[kind] for kind in ("ggn", "residual", "hessian")]
        assert gap < SLACK * sum(error * norm for _, error, norm in products)


@pytest.mark.parametrize(
    ("engine", "takes"),
    cells(
        [(e, t) for e in ("0", "2", "3", "3 bf16") for t in (None, (), (1,))],
        [("3", (1,))],
    ),
)
def test_a_loss_may_refuse_outputs_in_fp64(
    ranks: Ranks, engine: str, takes: tuple[int, ...] | None
) -> None:
    """On all ranks, or on one: then it is differenced in fp32 on all."""
    found = ranks(2).run(output_jobs.smoothed, ENGINES[engine], takes)
    dtype = "torch.float64" if takes is None else "torch.float32"
    assert all(run[4:] == ("head: a loss known by its values", dtype) for run in found)
    weights, v, product, error = found[0][:4]
    net = output_jobs.Smoothed(dropout=0.0).double()
    net.load_state_dict(
        {n: w.reshape(net.state_dict()[n].shape) for n, w in weights.items()}, False
    )
    names = [n for n, _ in net.named_parameters()]
    exact = ExactGaussNewton(net, "head", loss, [batch(500 + i, 0) for i in range(jobs.FEW)])
    assert relative(flat(product, names), exact(flat(v, names))) < SLACK * error < 1e-2


def jobs_in_fp32() -> set[str]:
    """The engines whose passes are fp32."""
    return {name for name in ENGINES if not any(t in name for t in ("bf16", "fp16", "autocast"))}


def flat(full: dict[str, Tensor], names: list[str]) -> Tensor:
    """One fp64 vector."""
    return torch.cat([full[name].double().reshape(-1) for name in names])


OPERATORS = ["ggn", "residual", "fisher"]


@pytest.fixture(scope="module")
def on_two(ranks: Ranks) -> Any:
    """Spectra of ZeRO-3 on two ranks."""
    return ranks(2).run(output_jobs.spectra, ENGINES["3"], OPERATORS)[0]


@pytest.mark.parametrize(("size", "stage"), cells([(1, 0), (1, 3), (2, 0), (2, 1), (3, 3)], []))
def test_spectra_do_not_depend_on_the_layout(
    ranks: Ranks, on_two: Any, size: int, stage: int
) -> None:
    config = {"zero_optimization": {"stage": stage}}
    for found in ranks(size).run(output_jobs.spectra, config, OPERATORS):
        assert_same(found, on_two)


@pytest.mark.full
def test_spectra_of_four_ranks_are_those_of_one(ranks: Ranks) -> None:
    (one,) = ranks(1).run(output_jobs.spectra, ENGINES["0"], OPERATORS, 4)
    for found in ranks(4).run(output_jobs.spectra, ENGINES["3"], OPERATORS, 4):
        assert_same(found, one)


def assert_same(found: Any, expected: Any) -> None:
    """Coefficients of each operator."""
    for (alphas, betas), (a, b) in zip(found, expected, strict=True):
        scale = abs(a).max()
        # Random directions have the largest relative errors: 3e-4 of |Gv|.
        assert np.abs(alphas - a).max() < 1e-3 * scale
        assert np.abs(betas - b).max() < 1e-3 * scale


TRAINED = {
    "3 ggn": ("ggn", {"zero_optimization": {"stage": 3}}),
    "1 residual": ("residual", {"zero_optimization": {"stage": 1}}),
    "2 bf16 fisher": ("fisher", {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    "3 bf16 ggn": ("ggn", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}),
    "0 residual": ("residual", {"zero_optimization": {"stage": 0}}),
}


@pytest.mark.parametrize("name", cells(TRAINED, []))
def test_training_is_bitwise_the_same_with_measurements_in_between(ranks: Ranks, name: str) -> None:
    operator, config = TRAINED[name]
    modes = [{"mode": mode, "operator": operator, **config} for mode in ("bare", "measured")]
    for differing, _ in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]]


def test_a_tap_that_fails_on_one_rank_fails_on_all(ranks: Ranks) -> None:
    for message, left in ranks(2).run(output_jobs.twice_on_one_rank):
        assert "UnsupportedError" in message and "called more than once" in message
        assert left == 0


@pytest.mark.full
@pytest.mark.parametrize("operator", ["ggn", "residual"])
def test_failures_in_the_passes_leave_training_as_it_was(ranks: Ranks, operator: str) -> None:
    places = [("model", 7), ("backward", 9), ("model backward", 12), ("gather", 20)]
    failures = [[(stage, at, (number % 2,))] for number, (stage, at) in enumerate(places)]
    modes = [
        {"mode": "bare"},
        {"mode": "failing", "operator": operator, "failures": failures},
    ]
    for differing, errors in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]]
        for number, error in enumerate(errors[0]):
            assert f"rank {number % 2}: Broken: on purpose" in error, places[number]
