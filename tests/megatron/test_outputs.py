"""Gauss-Newton, residual and Fisher operators in every layout of megatron-core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.megatron import output_jobs
from tests.megatron.job import MOE, Job
from tests.megatron.test_layouts import KINDS, LAYOUTS, error, whole
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
SLACK = 3.0
QUICK, TWICE = ("TP sequence parallel",), ("PP",)
EXPERTS: dict[str, tuple[int, dict[str, Any]]] = {
    "EP": (2, {**MOE, "ep": 2}),
    "EP auxiliary loss": (2, {**MOE, "ep": 2, "aux_loss": 0.1}),
    "TP x EP": (2, {**MOE, "tp": 2, "ep": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def one(megatron_ranks: Ranks) -> Callable[..., Any]:
    """Of one process: vectors, exact products of G and of the Fisher matrix, and coefficients."""

    @functools.cache
    def get(alone: Job, count: int, steps: int) -> Any:
        ranks = megatron_ranks(1)
        (run,) = ranks.run(output_jobs.products, alone, count, steps)
        vectors = [whole([row[0]]) for row in run[0]]
        job = replace(alone, dtype="float64")
        exact = {
            name: ranks.run(output_jobs.reference, job, vectors, name == "fisher")[0]
            for name in ("ggn", "fisher")
        }
        return vectors, exact, run[3]

    return lambda count, steps=3, **layout: get(Job(**layout).alone, count, steps)


TP_4 = {"TP 4": (4, {"tp": 4, "query_groups": 4})}


CELLS = [(name, steps) for name in QUICK for steps in (0, 3)]


@pytest.mark.parametrize(
    ("name", "steps"),
    cells(dict.fromkeys([*CELLS, *((name, 3) for name in (*KINDS, *TP_4))]), [(QUICK[0], 0)]),
)
def test_products_and_spectra_are_those_of_one_process(
    megatron_ranks: Ranks, one: Callable[..., Any], name: str, steps: int
) -> None:
    """Spectra are of so many steps; the quick tier has none."""
    size, layout = (LAYOUTS | TP_4)[name]
    count = 2 if name in TWICE else 1
    vectors, exact, coefficients = one(count, steps, **layout)
    runs = megatron_ranks(size).run(output_jobs.products, Job(**layout), count, steps)
    assert all(run[1] == "output_layer: cross entropy" and run[2] for run in runs)
    for k, v in enumerate(vectors[:count]):
        rows = [run[0][k] for run in runs]
        if k == 0:
            assert error(whole([row[0] for row in rows]), v) == 0.0
            for kind, of in exact.items():
                found = whole([row[1][kind][0] for row in rows])
                assert error(found, of[0]) < min(3e-4, SLACK * rows[0][1][kind][1])
        check(rows)
    for found, expected in zip(runs[0][3], coefficients, strict=True):
        scale = abs(expected[0]).max()
        for a, b in zip(found, expected, strict=True):
            assert np.abs(a - b).max() < 1e-3 * scale


def check(rows: list[Any]) -> None:
    """G + R = H, and v'Gv by outputs alone is that of the product."""
    _, figures, gap, form = rows[0]
    products = [figures[kind] for kind in ("ggn", "residual", "hessian")]
    assert gap < SLACK * sum(error * norm for _, error, norm in products)
    assert abs(form) < SLACK * figures["ggn"][1] * figures["ggn"][2]


@pytest.fixture(scope="module")
def experts(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """What one process finds."""
    return functools.cache(lambda job: megatron_ranks(1).run(output_jobs.products, job, 1))


@pytest.mark.parametrize("name", cells(EXPERTS, []))
def test_experts(megatron_ranks: Ranks, experts: Callable[[Job], Any], name: str) -> None:
    size, layout = EXPERTS[name]
    alone = Job(**layout).alone
    (single,) = experts(alone)
    runs = megatron_ranks(size).run(output_jobs.products, Job(**layout), 1)
    v, of = [whole([single[0][0][0]])], replace(alone, dtype="float64")
    for kind in ("ggn", "fisher"):
        found = whole([run[0][0][1][kind][0] for run in runs])
        (exact,) = megatron_ranks(1).run(output_jobs.reference, of, v, kind == "fisher")[0]
        assert error(found, exact) < min(1e-3, SLACK * runs[0][0][0][1][kind][1])
        expected = whole([single[0][0][1][kind][0]])
        errors = [run[0][0][1][kind][1] for run in (*runs[:1], single)]
        assert error(found, expected) < SLACK * sum(errors)
    check([run[0][0] for run in runs])


@pytest.mark.full
@pytest.mark.parametrize("refuses", [False, True])
def test_stages_without_outputs_repeat_products_of_a_loss_that_bends(
    megatron_ranks: Ranks, refuses: bool
) -> None:
    """Only the last stage has cotangents that show it, or a loss that takes no fp64."""
    ((v, expected, least),) = megatron_ranks(1).run(output_jobs.bending, Job())
    runs = megatron_ranks(2).run(output_jobs.bending, Job(pp=2), refuses)
    assert error(whole([run[0] for run in runs]), whole([v])) == 0.0
    assert error(whole([run[1] for run in runs]), whole([expected])) < 3 * (least + runs[0][2])


@pytest.mark.parametrize("layout", cells([{"tp": 2}, {"pp": 2, "tied": False}], []))
def test_outputs_of_the_language_model_of_a_multimodal_one(
    megatron_ranks: Ranks, layout: dict[str, Any]
) -> None:
    """They were found on one process alone."""
    job = Job(**layout)
    runs = megatron_ranks(2).run(output_jobs.multimodal, output_jobs.products, job, 1)
    v = [whole([run[0][0][0] for run in runs])]
    of = replace(job.alone, dtype="float64")
    ((exact,),) = megatron_ranks(1).run(output_jobs.multimodal, output_jobs.reference, of, v)
    found = whole([run[0][0][1]["ggn"][0] for run in runs])
    assert error(found, exact) < min(1e-3, SLACK * runs[0][0][0][1]["ggn"][1])


@pytest.mark.parametrize("operator", ["hessian", "ggn", "residual"])
def test_what_another_module_does_with_logits_is_measured_or_refused(
    megatron_ranks: Ranks, operator: str
) -> None:
    """A model as the `module` of another was a KeyError; G was refused where weights are behind the
    output layer, and the residual was a matrix that is not symmetric, without a word.
    """
    ((message, all_of_them),) = megatron_ranks(1).run(output_jobs.scaled_logits, operator)
    assert all_of_them
    behind = "does not support outputs ('output_layer') with weights behind them"
    assert message == "measured" if operator == "hessian" else behind in message


NESTED: dict[str, dict[str, Any]] = {"one": {}, "TP": {"tp": 2}, "PP": {"pp": 2, "tied": False}}


@pytest.mark.full
@pytest.mark.parametrize("name", NESTED)
def test_an_output_layer_inside_of_another_module_is_the_outputs_if_it_is_all(
    megatron_ranks: Ranks, name: str
) -> None:
    """G was that of an auxiliary head, and R had the loss of the model's own."""
    job = Job(**NESTED[name])
    measured = megatron_ranks(job.tp * job.pp).run
    for message in measured(output_jobs.nested_head, "ggn", False, job):
        assert message == "output_layer: cross entropy"
    for operator in ("ggn", "residual"):
        for message in measured(output_jobs.nested_head, operator, True, job):
            assert "does not know the outputs of this model: the loss depends on" in message
    for message in measured(output_jobs.nested_head, "ggn", True, job, outputs="output_layer"):
        assert message == "output_layer: cross entropy, without another part of the loss"


@pytest.mark.full
@pytest.mark.parametrize("name", NESTED)
def test_the_second_head_of_bert_is_not_left_out_without_a_word(
    megatron_ranks: Ranks, name: str
) -> None:
    """G was that of the output layer alone."""
    job = Job(**NESTED[name])
    measured = megatron_ranks(job.tp * job.pp).run
    for message in measured(output_jobs.bert, "ggn", True, job):
        assert "beside those of 'output_layer'; name the module" in message
    for message in measured(output_jobs.bert, "ggn", True, job, outputs="output_layer"):
        assert message == "output_layer: cross entropy, without another part of the loss"
    for message in measured(output_jobs.bert, "ggn", False, job):
        assert message.startswith("output_layer") and "without another part" not in message


def test_several_predictions_for_a_token_are_refused(megatron_ranks: Ranks) -> None:
    (message,) = megatron_ranks(1).run(output_jobs.several_predictions)
    assert "'output_layer' that is called more than once" in message


@pytest.mark.full
def test_bf16(megatron_ranks: Ranks, one: Callable[..., Any]) -> None:
    _, exact, _ = one(1)
    runs = megatron_ranks(2).run(output_jobs.products, Job(tp=2, dtype="bfloat16"))
    rows = [run[0][0] for run in runs]
    found: dict[str, Tensor] = whole([row[1]["ggn"][0] for row in rows])
    assert error(found, exact["ggn"][0]) < min(0.2, SLACK * rows[0][1]["ggn"][1])
