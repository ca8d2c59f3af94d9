"""Products, probes and coefficients of every layout against one process and double backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends import jobs as zero_jobs
from tests.megatron import job
from tests.megatron.job import MOE, Job, Stored
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP": (2, {}),
    "DP overlap": (2, {"overlap": True}),
    "DP distributed optimizer": (2, {"distributed": True}),
    "DP distributed optimizer overlap": (2, {"distributed": True, "overlap": True}),
    "TP": (2, {"tp": 2}),
    "TP sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "PP": (2, {"pp": 2}),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "PP, a rank's first chunk empty": (2, {"pp": 2, "vpp": 2, "stages": "Et||t|L"}),
    "TP x PP": (4, {"tp": 2, "pp": 2}),
    "TP x DP distributed optimizer": (4, {"tp": 2, "distributed": True}),
    "two optimizer instances": (4, {"distributed": True, "instances": 2}),
    "TP per token": (2, {"tp": 2, "per_token": True}),
    "DP distributed optimizer per token": (2, {"distributed": True, "per_token": True}),
    "PP per token": (2, {"pp": 2, "per_token": True}),
}
QUICK = (
    *("DP", "DP distributed optimizer overlap", "TP sequence parallel"),
    *("PP per token", "PP, a rank's first chunk empty"),  # which is interleaved
)


def whole(ranks: list[Stored]) -> dict[str, Tensor]:
    """`{name: flat fp64 tensor}` from what each rank owns; every coordinate must be owned once."""
    found: dict[str, dict[int, float]] = {}
    for name, index, values, owned in (entry for rank in ranks for entry in rank):
        if owned:
            part = found.setdefault(name, {})
            assert not part.keys() & set(index.tolist()), f"{name} is owned twice"
            part.update(zip(index.tolist(), values.tolist(), strict=True))
    return {
        name: torch.tensor([part[i] for i in range(len(part))], dtype=torch.float64)
        for name, part in found.items()
    }


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    a, b = (torch.cat([x[name] for name in exact]) for x in (found, exact))
    return float((a - b).norm() / b.norm())


def assert_replicas_agree(ranks: list[Stored], tolerance: float) -> None:
    full = whole(ranks)
    for name, index, values, _ in (entry for rank in ranks for entry in rank):
        assert (values - full[name][index]).abs().max() <= tolerance * full[name].abs().max(), name


@pytest.fixture(scope="module")
def one(megatron_ranks: Ranks) -> Callable[..., Any]:
    """Of one process: v, exact gradient and product."""

    @functools.cache
    def get(exact: Job) -> Any:
        ranks = megatron_ranks(1)
        ((v, *_),) = ranks.run(job.product_in_fp64, exact)
        full = whole([v])
        ((gradient, product),) = ranks.run(job.reference, exact, full)
        return full, gradient, product

    return lambda **layout: get(replace(Job(**layout).alone, dtype="float64"))


@pytest.fixture(scope="module")
def single(megatron_ranks: Ranks) -> Callable[..., Any]:
    """What one process measures in fp32."""

    @functools.cache
    def get(alone: Job) -> Any:
        return megatron_ranks(1).run(job.measured, alone)[0]

    return lambda **layout: get(Job(**layout).alone)


@pytest.mark.parametrize("name", cells(LAYOUTS, QUICK))
def test_fp64_gradients_and_products_are_those_of_a_double_backward(
    megatron_ranks: Ranks, one: Callable[..., Any], name: str
) -> None:
    size, layout = LAYOUTS[name]
    v, gradient, product = one(**layout)
    runs = megatron_ranks(size).run(job.product_in_fp64, Job(**layout, dtype="float64"))
    assert error(whole([r[0] for r in runs]), v) == 0.0  # the same probe, bit for bit
    assert error(whole([r[1] for r in runs]), gradient) < 1e-14
    assert error(whole([r[2] for r in runs]), product) < 1e-7
    for vector in range(3):
        assert_replicas_agree([r[vector] for r in runs], 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_spectra_are_those_of_one_process(
    megatron_ranks: Ranks, one: Callable[..., Any], single: Callable[..., Any], name: str
) -> None:
    size, layout = LAYOUTS[name]
    runs = megatron_ranks(size).run(job.measured, Job(**layout))
    assert_spectra_are_those_of_one(runs, one(**layout)[2], single(**layout))


def assert_spectra_are_those_of_one(
    runs: list[Any], product: dict[str, Tensor], single: Any
) -> None:
    """What `measured` found on the ranks, beside the exact product and what one process found."""
    assert error(whole([r[1] for r in runs]), product) < 2e-4
    assert all(r[3] for r in runs), "weights came back bit for bit"
    assert all(r[4] for r in runs), "products repeat bit for bit"
    spectra = [r[2] for r in runs]
    assert all((s.alphas == spectra[0].alphas).all() for s in spectra)
    expected = single[2]
    scale = abs(expected.alphas).max()
    assert abs(spectra[0].alphas - expected.alphas).max() < 1e-3 * scale
    assert abs(spectra[0].betas - expected.betas).max() < 1e-3 * scale
    assert spectra[0].n == expected.n
    assert spectra[0].loss == pytest.approx(expected.loss, rel=1e-5)
    assert spectra[0].gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert {r[5] for r in runs} == {runs[0][5]}
    assert runs[0][5] == pytest.approx(single[5], rel=1e-12)


@pytest.mark.full
def test_learned_offsets_of_softmaxes_are_split_by_heads(
    megatron_ranks: Ranks, one: Callable[..., Any]
) -> None:
    """Megatron does not mark them; they were refused, as copies that differ."""
    layout = {"tp": 2, "softmax": "learnable"}
    v, _, product = one(**layout)
    runs = megatron_ranks(2).run(job.chain, Job(**layout), 1)
    same, found = (whole([run[0][0][part] for run in runs]) for part in (0, 1))
    assert error(same, v) == 0.0
    assert error(found, product) < 3 * runs[0][0][0][2] < 1e-3


@pytest.mark.parametrize("name", cells(["DP distributed optimizer overlap", "TP", "PP"], []))
def test_bf16_products_are_those_of_fp64_to_the_rounding_of_gradients(
    megatron_ranks: Ranks, one: Callable[..., Any], single: Callable[..., Any], name: str
) -> None:
    size, layout = LAYOUTS[name]
    runs = megatron_ranks(size).run(job.measured, Job(**layout, dtype="bfloat16"))
    assert error(whole([r[1] for r in runs]), one(**layout)[2]) < 0.15
    assert all(r[3] and r[4] for r in runs)
    assert runs[0][5] == pytest.approx(single(**layout)[5], rel=1e-12)


@pytest.fixture(scope="module")
def converged(megatron_ranks: Ranks) -> Callable[..., Any]:
    """A spectrum in fp32 of one process, with converged extremes."""

    @functools.cache
    def get(alone: Job) -> Any:
        ((_, spectrum),) = megatron_ranks(1).run(job.chain, alone, 0)
        return spectrum

    return lambda **layout: get(Job(**layout).alone)


@pytest.mark.parametrize(
    "name, dtype",
    cells(
        [
            ("DP distributed optimizer overlap", "bfloat16"),
            ("TP sequence parallel", "bfloat16"),
            ("PP", "bfloat16"),
            ("PP", "float32"),
        ],
        [],
    ),
)
def test_products_and_eigenvalues_know_their_own_error(
    megatron_ranks: Ranks, converged: Callable[..., Any], name: str, dtype: str
) -> None:
    """Products within a factor of 3, the step control's promise; eigenvalues within their bars of
    those of fp32.
    """
    size, layout = LAYOUTS[name]
    runs = megatron_ranks(size).run(job.chain, Job(**layout, dtype=dtype), 3)
    for products in zip(*(r[0] for r in runs), strict=True):
        v, found = (whole([p[i] for p in products]) for i in (0, 1))
        ((_, product),) = megatron_ranks(1).run(job.reference, Job(dtype="float64"), v)
        true = error(found, product)
        assert true / 3 < products[0][2] < 3 * true
        assert dtype == "bfloat16" or true < 2e-4
    for of in ("eigenvalue_max", "eigenvalue_min"):
        spectra = runs[0][1], converged(**layout)
        found, expected = (getattr(spectrum, of) for spectrum in spectra)
        assert abs(found.value - expected.value) < found.error + expected.error


KINDS = (  # one layout of every kind of shards and of gradients
    *("DP distributed optimizer overlap", "TP", "PP", "PP interleaved", "TP x PP", "PP per token"),
    "two optimizer instances",
)
WIDE = {
    **{name: LAYOUTS[name] for name in KINDS},
    "TP recompute": (2, {"tp": 2, "sequence_parallel": True, "recompute": True}),
}
QUICK_WIDE = ("PP",)


@pytest.mark.parametrize("name", cells(WIDE, QUICK_WIDE))
def test_fp32_passes_of_a_bf16_model_are_those_of_fp64_at_its_masters(
    megatron_ranks: Ranks, converged: Callable[..., Any], name: str
) -> None:
    """At the defaults; of masters that bf16 does not hold."""
    size, layout = WIDE[name]
    runs = megatron_ranks(size).run(job.chain, Job(**layout, dtype="bfloat16", precision="auto"), 2)
    for products in zip(*(r[0] for r in runs), strict=True):
        v, found = (whole([p[i] for p in products]) for i in (0, 1))
        fp64 = replace(Job(**layout).alone, dtype="float64")
        ((_, product),) = megatron_ranks(1).run(job.reference, fp64, v)
        true = error(found, product)
        assert true < 2e-4 and true / 3 < products[0][2]
    for spectrum in (r[1] for r in runs):
        assert spectrum.provenance.precision == "fp32" and spectrum.warnings == ()
        for of in ("eigenvalue_max", "eigenvalue_min"):
            found, expected = getattr(spectrum, of), getattr(converged(**layout), of)
            assert abs(found.value - expected.value) < found.error + expected.error


def test_fp32_passes_whose_gradients_would_be_summed_in_bf16_are_refused(
    megatron_ranks: Ranks,
) -> None:
    (message,) = megatron_ranks(1).run(job.fp32_passes, Job(dtype="bfloat16", narrow_sums=True))
    assert "does not support fp32 passes of a bf16 Megatron model whose gradients are" in message


@pytest.mark.full
def test_products_repeat_bit_for_bit_with_dropout(megatron_ranks: Ranks) -> None:
    """Also under sequence parallelism, whose masks come from the tensor-parallel random states."""
    layout = Job(tp=2, sequence_parallel=True, recompute=True, dropout=0.1)
    for run in megatron_ranks(2).run(job.measured, layout, 2, dropout=True):
        assert run[3] and run[4]


@pytest.mark.parametrize(
    "name", cells(["DP distributed optimizer overlap", "TP sequence parallel", "PP"], [])
)
def test_sweeps_are_those_of_one_process(
    megatron_ranks: Ranks, sweep_of_one: Any, name: str
) -> None:
    size, layout = LAYOUTS[name]
    for sweep, gathers in megatron_ranks(size).run(job.sweep, Job(**layout)):
        assert sweep.curvatures == pytest.approx(sweep_of_one.curvatures, rel=1e-2)
        assert gathers


@pytest.fixture(scope="module")
def sweep_of_one(megatron_ranks: Ranks) -> Any:
    return megatron_ranks(1).run(job.sweep, Job())[0][0]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout, failed",
    [
        ({"distributed": True, "overlap": True}, set()),
        ({"tp": 2, "sequence_parallel": True}, set()),
        ({"tp": 2, "dtype": "bfloat16"}, {"fidelity", "error"}),
    ],
)
def test_the_self_test_passes_and_suggests_what_there_is(
    megatron_ranks: Ranks, layout: dict[str, Any], failed: set[str]
) -> None:
    for verdict in megatron_ranks(2).run(job.self_test, Job(**layout)):
        assert {check.name for check in verdict.checks if not check.passed} <= failed
        assert ("precision" in " ".join(verdict.suggestions)) == ("dtype" in layout)


@pytest.mark.parametrize(
    "layout", cells([{"pp": 2}, {"distributed": True, "per_token": True}], [{"pp": 2}])
)
def test_the_gradient_of_a_scaled_loss_is_the_gradient_but_for_rounding(
    megatron_ranks: Ranks, layout: dict[str, Any]
) -> None:
    for apart, scale in megatron_ranks(2).run(job.scaled_losses, Job(**layout)):
        assert 0 < apart < 1e-6 and scale == pytest.approx(1 / 1.3)


@pytest.mark.parametrize(
    "size, layout",
    cells(
        [
            (2, {"distributed": True}),
            (2, {}),
            (2, {"distributed": True, "dtype": "bfloat16", "precision": "auto"}),
            (2, {"ep": 2, **MOE}),
            (4, {"tp": 2, "distributed": True, "sequence_parallel": True, "recompute": True}),
            (4, {"pp": 2, "distributed": True}),
            (4, {"pp": 2, "vpp": 2, "layers": 4, "distributed": True}),
        ],
        [(2, {"distributed": True})],
    ),
)
def test_collectives_overlap_with_passes_where_those_of_training_do(
    megatron_ranks: Ranks, size: int, layout: dict[str, Any]
) -> None:
    runs = megatron_ranks(size).run(job.overlapped, Job(**layout, overlap=True))
    for found in runs:
        assert found.same and found.kept
        assert 0 < found.in_backward <= found.reductions
        assert found.for_modules == found.gathers and (found.gathers > 0) == (
            "distributed" in layout
        )
        assert found.together <= 1  # of two, gloo may free a name twice
    assert sum(x.in_backward for x in runs) > 0.5 * sum(x.reductions for x in runs)


def test_reductions_that_overlap_have_one_order_where_one_rank_needs_fewer_modules(
    megatron_ranks: Ranks,
) -> None:
    """One that needs all of them began with another bucket: the gradients of both were added."""
    runs = megatron_ranks(2).run(job.overlapped_in_one_order, Job(overlap=True))
    for with_overlap, without in runs:
        assert torch.equal(with_overlap, without)


@pytest.mark.full
def test_zero_3_and_megatron_have_the_same_spectrum(megatron_ranks: Ranks, ranks: Ranks) -> None:
    """Of the same model and data, on two data-parallel ranks each."""
    _, v, _, zero, product = ranks(2).run(zero_jobs.measure, 10, 1, {"stage": 3})[0]
    same_v, same_product, megatron = megatron_ranks(2).run(job.tiny_gpt, 10)[0]
    assert v.keys() == same_v.keys()
    assert all(torch.equal(v[name], same_v[name]) for name in v)
    a, b = (torch.cat([x[name].flatten() for name in v]) for x in (product, same_product))
    assert (a - b).norm() < 1e-5 * a.norm()
    scale = abs(zero.alphas).max()
    assert abs(zero.alphas - megatron.alphas).max() < 1e-3 * scale
    assert abs(zero.betas - megatron.betas).max() < 1e-3 * scale
    assert (zero.n, zero.loss) == (megatron.n, pytest.approx(megatron.loss, rel=1e-6))
    assert zero.gradient_norm == pytest.approx(megatron.gradient_norm, rel=1e-5)
