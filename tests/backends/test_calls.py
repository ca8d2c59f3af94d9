"""Ranks that make different calls, or give them other settings, all raise and are told of both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hessian
from ds_hessian.errors import HessianError
from ds_hessian.hessian import Hessian
from ds_hessian.ranks.entrance import alike
from ds_hessian.records import HessianSpectrum, HessianTrace
from tests.plain import jobs
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
Do = Callable[[Hessian, Tensor], Any]
QUIET = {"plot": False, "progress": False}

DIFFERENT: dict[str, tuple[Do, Do, str]] = {
    "a number of products": (
        lambda h, v: h.spectrum(num_matvecs=2),
        lambda h, v: h.spectrum(num_matvecs=3),
        "for measuring the spectrum: num_matvecs: 2 on rank 0, 3 on rank 1",
    ),
    "a seed and a section": (
        lambda h, v: h.trace(num_matvecs=2, seed=1),
        lambda h, v: h.trace(num_matvecs=2, seed=2, finite_difference={"displacement": 1e-3}),
        "seed: 1 on rank 0, 2 on rank 1; finite_difference.displacement: 'auto' on rank 0, 0.001 ",
    ),
    "operators": (
        lambda h, v: h.curvatures(operator="ggn"),
        lambda h, v: h.curvatures(),
        "operator: 'ggn' on rank 0, 'hessian' on rank 1",
    ),
    "a tolerance": (
        lambda h, v: h.sharpness(preconditioned=False, tolerance=0.1),
        lambda h, v: h.sharpness(preconditioned=False, tolerance=0.01),
        "measuring the sharpness: tolerance: 0.1 on rank 0, 0.01 on rank 1",
    ),
    "a method": (
        lambda h, v: h.solve(v, [0.1], method="cg", num_matvecs=2),
        lambda h, v: h.solve(v, [0.1], method="minres", num_matvecs=2),
        "measuring the solve: method: 'cg' on rank 0, 'minres' on rank 1",
    ),
    "dampings of an influence": (
        lambda h, v: h.influence(h.batches, h.batches, [0.1], num_matvecs=2),
        lambda h, v: h.influence(h.batches, h.batches, [0.1, 0.2], num_matvecs=2),
        r"dampings: \[0.1\] on rank 0, \[0.1, 0.2\] on rank 1",
    ),
    "blocks": (
        lambda h, v: h.block_coupling(blocks="layers"),
        lambda h, v: h.block_coupling(blocks={"up": "up", "rest": "."}),
        "blocks: 'layers' on rank 0, {'up': 'up', 'rest': '.'} on rank 1",
    ),
    "vectors and a file": (
        lambda h, v: h.alignment(k=1, earlier=v[None]),
        lambda h, v: h.alignment(k=1, earlier="nowhere"),
        r"earlier: a tensor \(1, ...\) on rank 0, 'a path' on rank 1",
    ),
    "directions": (
        lambda h, v: h.displacement_sweep(["gradient"], [1e-2]),
        lambda h, v: h.displacement_sweep({"own": v}, [1e-2]),
        "directions: .*'gradient'.* on rank 0",
    ),
    "analyses": (
        lambda h, v: h.spectrum(num_matvecs=2),
        lambda h, v: h.eigenpairs(k=1),
        "measuring the spectrum on rank 0, measuring the eigenpairs on rank 1",
    ),
    "products": (
        lambda h, v: h.matvec(v),
        lambda h, v: h.spectrum(num_matvecs=2),
        "different calls: measuring a product on rank 0, measuring the spectrum on rank 1",
    ),
    "an inner product": (
        lambda h, v: h.dot(v, v),
        lambda h, v: h.spectrum(num_matvecs=2),
        "different calls: taking an inner product on rank 0, measuring the spectrum on rank 1",
    ),
    "micro-batches": (
        lambda h, v: h.use(h.batches),
        lambda h, v: h.matvec(v),
        "different calls: choosing the micro-batches on rank 0, measuring a product on rank 1",
    ),
    "a random vector": (
        lambda h, v: h.random_vector(seed=1),
        lambda h, v: h.random_vector(seed=2),
        "drawing a random vector: seed: 1 on rank 0, 2 on rank 1",
    ),
    "numbers of vectors": (
        lambda h, v: h.save_vectors(v[None], "out.safetensors"),
        lambda h, v: h.save_vectors(torch.stack([v, v]), "out.safetensors"),
        r"vectors: a tensor \(1, ...\) on rank 0, a tensor \(2, ...\) on rank 1",
    ),
    "records": (
        lambda h, v: h.load(HessianSpectrum, "nowhere"),
        lambda h, v: h.load(HessianTrace, "nowhere"),
        "reading results: record: 'spectrum' on rank 0, 'trace' on rank 1",
    ),
    "gathering and scattering": (
        lambda h, v: h.gather(v),
        lambda h, v: h.scatter(None),
        "different calls: gathering a vector on rank 0, scattering a vector on rank 1",
    ),
    "settings of a job": (
        lambda h, v: attached({"num_matvecs": 2}),
        lambda h, v: attached({"num_matvecs": 3}),
        "for attaching: num_matvecs: 2 on rank 0, 3 on rank 1",
    ),
}
"""What rank 0 does, what rank 1 does, and what both are told."""

ALONE: dict[str, tuple[Do, Do, str]] = {
    "no vector": (lambda h, v: h.dot(v, v), lambda h, v: h.dot(None, v), "rank 1: "),  # type: ignore[arg-type]
    "a vector of another size": (
        lambda h, v: h.dot(v, v),
        lambda h, v: h.dot(v[:3], v),
        "while taking an inner product, rank 1: ",
    ),
    "no file to read": (
        lambda h, v: h.load_vectors("nowhere"),
        lambda h, v: h.load_vectors(None),  # type: ignore[arg-type]
        "cannot read nowhere",
    ),
    "no folder to read": (
        lambda h, v: h.load(HessianSpectrum, "nowhere"),
        lambda h, v: h.load(HessianSpectrum, None),  # type: ignore[arg-type]
        "no spectrum in nowhere",
    ),
    "no file to write": (
        lambda h, v: h.save_vectors(v[None], "out.safetensors"),
        lambda h, v: h.save_vectors(v[None], 7),  # type: ignore[arg-type]
        "rank 1: ConfigError: a path must be a text or a Path, got 7",
    ),
    "no vectors to write": (
        lambda h, v: h.save_vectors(v[None], "out.safetensors"),
        lambda h, v: h.save_vectors(None, "out.safetensors"),  # type: ignore[arg-type]
        r"vectors: a tensor \(1, ...\) on rank 0, None on rank 1",
    ),
    "no such method": (
        lambda h, v: h.trace(num_matvecs=2),
        lambda h, v: h.trace("hutch"),  # type: ignore[arg-type]
        'rank 1: ConfigError: trace: method must be "hutchinson"',
    ),
    "no such kinds": (
        lambda h, v: h.kronecker(["kfac"]),
        lambda h, v: h.kronecker(["k-fac"]),  # type: ignore[list-item]
        "rank 1: ConfigError: kronecker needs kinds",
    ),
    "no directions": (
        lambda h, v: h.displacement_sweep(["gradient"], [1e-2]),
        lambda h, v: h.displacement_sweep(None),  # type: ignore[arg-type]
        "rank 1: ConfigError: displacement_sweep: directions must be a list",
    ),
    "no such kind of probe": (
        lambda h, v: h.random_vector(),
        lambda h, v: h.random_vector(kind="cauchy"),  # type: ignore[arg-type]
        "kind: 'gaussian' on rank 0, 'cauchy' on rank 1",
    ),
    "no job": (
        lambda h, v: attached({}),
        lambda h, v: ds_hessian.attach(None),  # type: ignore[arg-type]
        "rank 1: ConfigError: attach.. takes a DeepSpeed engine",
    ),
    "a wrong section": (
        lambda h, v: attached({}),
        lambda h, v: attached({"num_matvecs": 0}),
        "rank 1: ConfigError: hessian.num_matvecs",
    ),
}
"""Arguments that cannot be, on rank 1 alone, and what both are told."""

QUICK = ("a number of products", "analyses", "an inner product", "settings of a job", "records")


def attached(settings: dict[str, Any]) -> Hessian:
    """A plain module with its Hessian."""
    return ds_hessian.attach(nn.Linear(3, 2), config=settings)


def call(cases: str, name: str) -> tuple[str, str, Any, Any]:
    """One of the cases; returns what it raised, the cause's text, and products before and after."""
    hessian = ds_hessian.attach(jobs.mixed({}), config=QUIET)
    hessian.use([jobs.data(dist.get_rank())])
    v = hessian.random_vector()
    before = hessian.dot(v, hessian.matvec(v).vector)
    caught: BaseException | None = None
    try:
        globals()[cases][name][dist.get_rank()](hessian, v)
    except HessianError as error:
        caught = error
    after = hessian.dot(v, hessian.matvec(v).vector)
    return type(caught).__name__, str(caught), before, after


@pytest.mark.parametrize("name", cells(DIFFERENT, QUICK))
def test_ranks_that_call_differently_all_raise_and_name_who_says_what(
    ranks: Ranks, name: str
) -> None:
    first, second = ranks(2).run(call, "DIFFERENT", name, timeout=60)
    for kind, text, before, after in (first, second):
        assert kind == "CallsDiffer" and before == after
        assert re.search(DIFFERENT[name][2], text), text


@pytest.mark.parametrize("name", cells(ALONE, ("no vector", "no file to read", "no job")))
def test_an_argument_that_cannot_be_on_one_rank_is_raised_on_all(ranks: Ranks, name: str) -> None:
    (_, other, *products), (_, own, *same) = ranks(2).run(call, "ALONE", name, timeout=60)
    assert products[0] == products[1] == same[0] == same[1]
    assert re.search(ALONE[name][2], other), (other, own)
    assert own != "None"


def test_three_ranks_are_told_which_two_agree(ranks: Ranks) -> None:
    for _, text, before, after in ranks(3).run(call, "THIRD", "a seed", timeout=60):
        assert "seed: 0 on ranks 0, 1, 5 on rank 2" in text and before == after


THIRD: dict[str, tuple[Do, Do, Do]] = {
    "a seed": (
        lambda h, v: h.trace(num_matvecs=2),
        lambda h, v: h.trace(num_matvecs=2),
        lambda h, v: h.trace(num_matvecs=2, seed=5),
    )
}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, np.int64(3), True),
        (3, 3.0, True),
        (1, True, False),
        ("3", 3, False),
        ((1, 2), [1, 2], True),
        ({"a": 1}, {"a": 2}, False),
        ({1, 2}, {2, 1}, True),
        (torch.zeros(2, 5), torch.ones(2, 7), True),
        (torch.zeros(2, 5), torch.zeros(3, 5), False),
        (torch.tensor(0.5), 0.5, True),
        (np.arange(2), [0, 1], True),
        (Path("a"), "a", True),
        (float("nan"), float("nan"), True),
        (10**400, 10**400 + 1, False),
    ],
)
def test_values_are_compared_as_the_caller_means_them(one: Any, other: Any, same: bool) -> None:
    assert (alike(one) == alike(other)) == same
