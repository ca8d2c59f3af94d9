"""ZeRO-3 in fp32: real engines on 1, 2 and 3 gloo ranks against a dense fp64 Hessian."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.records import HessianSharpness
from tests.backends import jobs
from tests.nets import DenseHessian, TinyGPT, batch, merged
from tests.operators.nets import relative
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


def oracle(weights: dict[str, torch.Tensor], total: int = jobs.TOTAL) -> DenseHessian:
    return DenseHessian(TinyGPT(), weights, merged([batch(500 + i, 0) for i in range(total)]))


@pytest.fixture(scope="module")
def run(ranks: Ranks) -> Callable[[int], Any]:
    """Weights, probe, product and a 4-step spectrum on so many ranks."""
    return functools.cache(lambda w: ranks(w).run(jobs.measure, 4, 1, {})[0])


@pytest.mark.parametrize("world_size", cells([1, 2, 3], [2]))
def test_a_product_is_the_dense_hessian_times_the_vector(
    run: Callable[[int], Any], world_size: int
) -> None:
    weights, v, product, spectrum, _ = run(world_size)
    dense = oracle(weights)
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4
    assert spectrum.n == sum(p.numel() for p in TinyGPT().parameters())
    assert spectrum.loss == pytest.approx(dense.loss.item(), rel=1e-5)
    assert spectrum.gradient_norm == pytest.approx(float(dense.gradient.detach().norm()), rel=1e-4)


@pytest.mark.parametrize("world_size", cells([2, 3], [2]))
def test_coefficients_do_not_depend_on_the_number_of_ranks(
    run: Callable[[int], Any], world_size: int
) -> None:
    one, many = run(1), run(world_size)
    dense = oracle(one[0])
    assert torch.equal(dense.flat(one[1]), dense.flat(many[1]))  # the probe: the same bits
    # At the best h, the rounding of the gradients in their reduction alone makes 2e-5.
    assert relative(dense.flat(many[2]), dense.flat(one[2])) < 6e-5
    assert relative(dense.flat(many[4]), dense.flat(one[4])) < 1e-5
    a, b = one[3], many[3]
    scale = abs(a.alphas).max()
    assert abs(a.alphas - b.alphas).max() < 1e-3 * scale
    assert abs(a.betas - b.betas).max() < 1e-3 * scale


@pytest.mark.full
def test_a_tolerance_takes_one_gradient_a_product_and_its_bars_hold(ranks: Ranks) -> None:
    (weights, spectrum, table), (_, other, _) = ranks(2).run(jobs.tolerant, 25, 1e-2)
    cost, exact = spectrum.cost, torch.linalg.eigvalsh(oracle(weights).matrix()).numpy()
    off = abs(spectrum.ritz_values[0][:, None] - exact).min(axis=1)
    assert (off <= spectrum.ritz_errors[0]).all(), off / spectrum.ritz_errors[0]
    assert 2 * spectrum.product_errors.max() <= 1e-2 * abs(exact).max()
    assert cost.one_sided > 15 and cost.gradients_per_product < 1.6  # a trial is a third of it
    assert f"{cost.one_sided} one-sided and {25 - cost.one_sided} central" in table
    assert spectrum.alphas.tolist() == other.alphas.tolist()
    assert (spectrum.provenance.scheme, spectrum.provenance.tolerance) == ("auto", 1e-2)


def test_all_ranks_take_the_same_step_though_they_computed_different_ones(ranks: Ranks) -> None:
    """As processors of different makes may, in the last bits."""
    found = ranks(2).run(jobs.uneven, 1.3)
    weights, v, product, displacement = found[0]
    dense = oracle(weights)
    assert found[1][3] == displacement
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4


TRANSPORT = ("runtime/zero/stage", "runtime/zero/partition", "runtime/comm")


@pytest.mark.parametrize("stage", [2, 3])
def test_transport_of_shards_is_not_followed(ranks: Ranks, stage: int) -> None:
    """Most calls of torch under ZeRO are not the model's."""
    for called in ranks(2).run(jobs.followed_callers, stage):
        moving = sum(n for name, n in called.items() if name.startswith(TRANSPORT))
        assert moving < 0.1 * called[""], called


@pytest.mark.parametrize("stage", cells([0, 1, 3], [3]))
def test_the_gradient_of_a_scaled_loss_is_the_gradient_but_for_rounding(
    ranks: Ranks, stage: int
) -> None:
    for apart, scale in ranks(2).run(jobs.scaled_losses, stage):
        assert 0 < apart < 1e-6 and scale == 1


def test_figures_of_rank_0_are_those_of_all_ranks(ranks: Ranks) -> None:
    assert ranks(2).run(jobs.of_rank_0) == 2 * [[1.5, -2.0]]


def test_a_schedule_measures_once_for_a_step_of_several_micro_batches(ranks: Ranks) -> None:
    assert ranks(1).run(jobs.measured_at, 3) == [[1, 2]]


@pytest.mark.full
def test_the_ten_largest_eigenvalues_and_the_trace_are_those_of_the_dense_hessian(
    ranks: Ranks,
) -> None:
    weights, _, _, spectrum, _ = ranks(2).run(jobs.measure, 60, 2, {})[0]
    exact = torch.linalg.eigvalsh(oracle(weights).matrix()).numpy()
    largest = exact[np.argsort(-abs(exact))][:10]
    for probe in range(2):
        ritz = spectrum.ritz_values[probe]
        found = ritz[np.argsort(-abs(ritz))][:10]
        assert np.allclose(found, largest, rtol=1e-3)
    assert abs(spectrum.trace.value - exact.sum()) <= spectrum.trace.error
    assert abs(spectrum.eigenvalue_max.value - exact[-1]) <= spectrum.eigenvalue_max.error
    assert abs(spectrum.eigenvalue_min.value - exact[0]) <= spectrum.eigenvalue_min.error


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing persistent": ({"stage3_param_persistence_threshold": 0}, {}),
    "sub-groups": ({"sub_group_size": 100}, {}),
    "accumulation": ({}, {"gradient_accumulation_steps": 3}),
    "contiguous off": ({"contiguous_gradients": False}, {}),
    "overlap on": ({"overlap_comm": True}, {}),
    "overlap off": ({"overlap_comm": False, "reduce_scatter": False}, {}),
}


@pytest.mark.parametrize("name", cells(VARIANTS, []))
def test_every_variant_of_zero3_gives_the_dense_product(ranks: Ranks, name: str) -> None:
    zero, config = VARIANTS[name]
    weights, v, product, _, _ = ranks(2).run(jobs.measure, 2, 1, zero, **config)[0]
    dense = oracle(weights)
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4


@pytest.mark.parametrize("name", cells(["default", *VARIANTS], ["default"]))
def test_training_with_spectra_in_between_is_bitwise_the_same(ranks: Ranks, name: str) -> None:
    zero, config = VARIANTS.get(name, ({}, {}))
    common = {"zero": zero, **config}
    if name == "default":
        common["displacement"] = "auto"
    modes = [{"mode": "bare", **common}, {"mode": "measured", **common}]
    if name == "default":
        modes.append({"mode": "measured", "dropout_on": False, **common})
    if name == "accumulation":
        modes.append({"mode": "inside", **common})
    for differing, _ in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]] * (len(modes) - 1)


# (stage, number of the call on that rank, ranks), and the rank that the error names.
# Of 4 products on 3 micro-batches: 1 - 3 are the gradient at w, then come trials at +h and -h.
Failures = list[tuple[jobs.Failure, int]]
FAILURES: Failures = [
    ([("batches", 2, (1,))], 1),
    ([("before", 2, (1,))], 1),
    ([("before", 6, (0,))], 0),
    ([("loss", 1, (0, 1))], 0),
    ([("loss", 2, (1,))], 1),
    ([("loss", 4, (0,))], 0),
    ([("loss", 9, (1,))], 1),
    ([("model", 4, (0, 1))], 0),
    ([("model", 1, (1,))], 1),
    ([("model", 7, (0,))], 0),
    ([("backward", 8, (0, 1))], 0),
    ([("backward", 3, (0,))], 0),
    ([("backward", 5, (1,))], 1),
    ([("model backward", 2, (0, 1))], 0),
    ([("model backward", 1, (0,))], 0),
    ([("model backward", 6, (1,))], 1),
    ([("gather", 3, (1,))], 1),
    ([("gather", 10, (0,))], 0),
    ([("model", 2, (1,)), ("model backward", 2, (0,))], 1),
]
FAILURES_OF_3: Failures = [
    ([("model", 2, (0,))], 0),
    ([("model backward", 4, (2,))], 2),
    ([("model backward", 2, (0,)), ("before", 2, (2,))], 2),
    ([("model", 3, (0,)), ("model backward", 3, (1,)), ("loss", 3, (2,))], 0),
]
FAILURES_OF_1: Failures = [
    ([(stage, number, (0,))], 0)
    for stage, number in (("batches", 2), ("loss", 4), ("model", 5), ("model backward", 4))
]
# Many collectives, some of them under way at any time.
SPLIT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 300,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 150,
}


@pytest.mark.parametrize(
    ("world_size", "zero", "failures"),
    [
        pytest.param(2, {}, FAILURES[:-1], marks=pytest.mark.full),
        pytest.param(
            *(2, {**SPLIT, "zero_hpz_partition_size": 2}, FAILURES[14:]), marks=pytest.mark.full
        ),
        pytest.param(1, {}, FAILURES_OF_1, marks=pytest.mark.full),
        (2, SPLIT, FAILURES[4::6]),
        pytest.param(2, SPLIT, FAILURES, marks=pytest.mark.full),
        pytest.param(3, SPLIT, FAILURES_OF_3, marks=pytest.mark.full),
    ],
    ids=["2", "2-hpZ", "1", "2-split", "2-split-all", "3-split"],
)
def test_a_failing_spectrum_raises_everywhere_and_leaves_training_bitwise_alone(
    ranks: Ranks, world_size: int, zero: dict[str, Any], failures: Failures
) -> None:
    common = {"zero": zero, "steps": 8 + len(failures)}
    failing = {"mode": "failing", "failures": [f for f, _ in failures], **common}
    modes = [{"mode": "bare", **common}, failing]
    for differing, errors in ranks(world_size).run(jobs.compare_training, modes):
        assert differing == [[]]
        for (failure, rank), message in zip(failures, errors[0], strict=True):
            assert f"rank {rank}: Broken: on purpose" in message, (failure, message)


def test_frozen_unused_and_quartic_parameters(ranks: Ranks) -> None:
    results = ranks(2).run(jobs.partial_product)
    weights, v, product, round_trip, _ = results[0]
    assert all(r[3] for r in results) and round_trip
    assert "b.weight" not in v
    # b.weight is frozen at its initial value, which the seed makes the same.
    torch.manual_seed(0)
    module = jobs.Partial()
    dense = DenseHessian(
        module, weights, [b for r in results for b in r[4]], lambda m, b: m(b.double())
    )
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4
    assert not product["unused.weight"].any()
    expected = 12 * weights["w"].double() ** 2 * v["w"]
    assert relative(product["w"].double(), expected) < 2e-4


def test_a_leaf_module_with_parameters_that_some_ranks_do_not_use(ranks: Ranks) -> None:
    results = ranks(3).run(jobs.leaf_product)
    weights, v, product, _ = results[0]
    micro_batches = [b for r in results for b in r[3]]
    dense = DenseHessian(jobs.Routed(), weights, micro_batches, lambda m, b: m(b[0].double(), b[1]))
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4


@pytest.mark.full
def test_tuples_dicts_loss_fn_and_equal_counts_give_one_product(ranks: Ranks) -> None:
    first, *others = ranks(2).run(jobs.forms_of_batches)[0]
    for i, other in enumerate(others):
        if i < 2:
            assert torch.equal(other, first)
        else:  # the loss is scaled by its count: rounding differs, and so do the trials
            assert relative(other, first) < 2e-4


def test_counts_weight_micro_batches_by_their_tokens(ranks: Ranks) -> None:
    weights, v, product, loss = ranks(2).run(jobs.token_weighted)[0]
    batches = [(r, batch(500 + i, 0)) for r in range(2) for i in range(r, jobs.TOTAL, 2)]

    def cut(r: int, b: Any) -> Any:
        return tuple(t[:, : 1 + 4 * r] for t in b)

    total = sum(cut(r, b)[1].numel() for r, b in batches)
    weighted = [(cut(r, b), cut(r, b)[1].numel() * len(batches) / total) for r, b in batches]
    dense = DenseHessian(TinyGPT(), weights, weighted, lambda m, x: m(*x[0]) * x[1])
    assert loss == pytest.approx(float(dense.loss.detach()), rel=1e-6)
    assert relative(dense.flat(product), dense.matvec(dense.flat(v))) < 2e-4


@pytest.mark.full
def test_spectra_and_sharpness_on_schedule(ranks: Ranks, tmp_path: Path) -> None:
    for *steps, fixed in ranks(2).run(jobs.on_schedule, str(tmp_path)):
        assert steps == [[3, 6], [2, 4, 6], []] and fixed
    written = {
        p.name: {file.stem for file in p.iterdir()} for p in (tmp_path / "out").glob("step_*")
    }
    assert written == {
        "step_000002": {"sharpness"},
        "step_000003": {"spectrum"},
        "step_000004": {"sharpness"},
        "step_000006": {"sharpness", "spectrum"},
    }
    record = HessianSharpness.load(tmp_path / "out" / "step_000006")
    assert record.warm and record.preconditioned is not None and record.num_matvecs <= 5
    (events,) = tmp_path.rglob("*sharpness_preconditioned.csv")
    rows = [row.split(",") for row in events.read_text().split()[1:]]
    assert [int(row[0]) for row in rows] == [2, 4, 6]
    assert float(rows[-1][1]) == pytest.approx(record.preconditioned.value)


def test_a_config_without_the_section_leaves_the_engine_untouched(ranks: Ranks) -> None:
    assert ranks(2).run(jobs.without_section) == [[], []]
