"""Every ZeRO stage, dtype and placement: real engines on 2 gloo ranks, fp64 oracle, neutrality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends import jobs
from tests.backends.test_zero3 import oracle, relative
from tests.nets import DenseHessian
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
STATIC = {"fp16": {"enabled": True, "loss_scale": 128}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
FP32_COMMUNICATION = {"communication_data_type": "fp32"}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
ON_CPU = {"device": "cpu"}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}

FP32_ENGINES: dict[str, dict[str, Any]] = {
    "0": zero(0),
    "1": zero(1),
    "1 overlap": zero(1, overlap_comm=True),
    "1 round robin": zero(1, round_robin_gradients=True),
    "2": zero(2),
    "2 round robin": zero(2, round_robin_gradients=True),
    "2 not contiguous": zero(2, contiguous_gradients=False),
    "2 overlap": zero(2, overlap_comm=True),
    "2 summed gradients": {**zero(2), "gradient_allreduce_op": "sum"},
    "1 optimizer offload": {**zero(1, offload_optimizer=ON_CPU), **TORCH_ADAM},
    "2 optimizer offload": {**zero(2, offload_optimizer=ON_CPU), **TORCH_ADAM},
    "3": zero(3),
    "3 parameter offload": zero(3, offload_param=ON_CPU),
    "3 optimizer offload": {**zero(3, offload_optimizer=ON_CPU), **TORCH_ADAM},
    "3 offload": {**zero(3, offload_param=ON_CPU, offload_optimizer=ON_CPU), **TORCH_ADAM},
    "3 hpZ": zero(3, zero_hpz_partition_size=2, stage3_param_persistence_threshold=0),
}
LOW_ENGINES: dict[str, dict[str, Any]] = {
    "0 bf16": {**zero(0), **BF16},
    "1 bf16": {**zero(1), **BF16},
    "1 bf16 fp32 accumulation": {**zero(1), **BF16, **FP32_ACCUMULATION},
    "1 bf16 immediate": {
        **zero(1),
        **FP32_ACCUMULATION,
        "bf16": {"enabled": True, "immediate_grad_update": True},
    },
    "2 bf16": {**zero(2), **BF16},
    "2 bf16 fp32 accumulation": {
        **zero(2),
        **BF16,
        **FP32_ACCUMULATION,
        **FP32_COMMUNICATION,
    },
    "2 bf16 optimizer offload": {**zero(2, offload_optimizer=ON_CPU), **BF16, **TORCH_ADAM},
    "3 bf16": {**zero(3), **BF16},
    "3 bf16 fp32 accumulation": {
        **zero(3),
        **BF16,
        **FP32_ACCUMULATION,
        **FP32_COMMUNICATION,
    },
    "3 bf16 masters": {
        **zero(3),
        "bf16": {
            "enabled": True,
            "bf16_master_weights_and_grads": True,
            "bf16_optimizer_states": True,
        },
    },
    "3 bf16 offload": {
        **zero(3, offload_param=ON_CPU, offload_optimizer=ON_CPU),
        **BF16,
        **FP32_ACCUMULATION,
        **TORCH_ADAM,
    },
    "3 bf16 hpZ": {
        **zero(3, zero_hpz_partition_size=2, stage3_param_persistence_threshold=20),
        **BF16,
    },
    "0 fp16": {**zero(0), **FP16},
    "1 fp16": {**zero(1), **FP16},
    "2 fp16": {**zero(2), **FP16},
    "2 fp16 static": {**zero(2), **STATIC},
    "3 fp16": {**zero(3), **FP16},
    "1 bf16 communication": {**zero(1), "communication_data_type": "bf16"},
    "3 fp16 communication": {**zero(3), "communication_data_type": "fp16"},
    "0 autocast": {**zero(0), **AUTOCAST},
    "1 autocast": {**zero(1), **AUTOCAST},
    "2 autocast": {**zero(2), **AUTOCAST},
    "3 autocast": {**zero(3), **AUTOCAST},
}
ENGINES = {**FP32_ENGINES, **LOW_ENGINES}
QUICK = ("0", "2 summed gradients")  # classes of shards


@pytest.fixture(scope="module")
def zero3(ranks: Ranks) -> Any:
    """Lanczos coefficients of ZeRO-3 in fp32."""
    return ranks(2).run(jobs.product_in_both_precisions, ENGINES["3"])[0][4][0]


def off(found: Any, expected: Any, steps: int) -> float:
    """Largest difference of alphas and betas, relative to the largest alpha."""
    pairs = zip(found, expected, strict=True)
    return float(max(abs(a - b)[:steps].max() for a, b in pairs) / abs(expected[0]).max())


@pytest.mark.parametrize("name", cells(ENGINES, QUICK))
def test_products_are_those_of_the_dense_hessian_and_coefficients_those_of_zero3(
    ranks: Ranks, zero3: Any, name: str
) -> None:
    results = ranks(2).run(jobs.product_in_both_precisions, ENGINES[name])
    weights, v, products, diagnostics, coefficients = results[0]
    dense = oracle(weights, jobs.FEW)
    exact = dense.matvec(dense.flat(v))
    in_model, in_fp32 = (relative(dense.flat(p), exact) for p in products)
    low = name in LOW_ENGINES
    # In 16 bits the first step: what its product is off by, later steps multiply.
    off_model = off(coefficients[0], zero3, steps=1 if low else 3)
    off_fp32 = off(coefficients[1], zero3, steps=3)
    print(name, in_model, in_fp32, off_model, off_fp32, diagnostics)
    assert in_fp32 < 2e-4
    assert in_model < (0.15 if low else 2e-4)
    assert off_model < (0.1 if low else 1e-3)
    # Engines in bf16 and fp16 start from rounded weights, so even in fp32 their Hessian is another.
    assert off_fp32 < (1e-2 if "bf16" in name else 1e-3)


@pytest.mark.parametrize("name", cells(FP32_ENGINES, ("1 optimizer offload",)))
def test_a_layer_that_some_micro_batches_do_not_use_has_no_gradient_there(
    ranks: Ranks, name: str
) -> None:
    results = ranks(2).run(jobs.gradient_of_a_layer_used_sometimes, FP32_ENGINES[name])
    weights, gradient, _ = results[0]
    entries = [b for r in results for b in r[2]]
    dense = DenseHessian(jobs.Sometimes(), weights, entries, lambda m, b: m(b.double()))
    assert relative(dense.flat(gradient), dense.gradient.detach()) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_eigenvalues_of_a_trained_bf16_engine(ranks: Ranks, stage: int) -> None:
    weights, (in_model, in_fp32) = ranks(2).run(jobs.bf16_spectra, stage, 20)[0]
    exact = torch.linalg.eigvalsh(oracle(weights).matrix()).numpy()
    for spectrum, tolerance in ((in_model, 0.03), (in_fp32, 1e-3)):
        print(spectrum.ritz_values[0][-3:], spectrum.eigenvalue_min, exact[[0, -3, -2, -1]])
        assert np.allclose(np.sort(spectrum.ritz_values[0])[-3:], exact[-3:], rtol=tolerance)
        # Nothing lies outside the spectrum by more than its bar, and the rounding of fp32 products.
        rounding = 1e-4 * exact[-1]
        assert spectrum.eigenvalue_max.value <= exact[-1] + spectrum.eigenvalue_max.error + rounding
        assert spectrum.eigenvalue_min.value >= exact[0] - spectrum.eigenvalue_min.error - rounding
        if spectrum is in_model:
            assert abs(spectrum.eigenvalue_max.value - exact[-1]) <= spectrum.eigenvalue_max.error
            assert abs(spectrum.eigenvalue_min.value - exact[0]) <= spectrum.eigenvalue_min.error


@pytest.mark.full
def test_1e8_weights_in_bf16_warn_of_a_step_that_is_lost_in_their_rounding(ranks: Ranks) -> None:
    fidelities, warnings = ranks(1).run(jobs.huge_spectrum, 0.2)[0]
    assert 0.3 < fidelities[0, 0] < 0.9 and any("fidelity" in text for text in warnings)


@pytest.mark.parametrize("name", cells(ENGINES, []))  # test_zero3 has one
def test_training_is_bitwise_the_same(ranks: Ranks, name: str) -> None:
    common = {"steps": 5, "gradient_accumulation_steps": 2, **ENGINES[name]}
    modes = [{"mode": "bare", **common}, {"mode": "everywhere", **common}]
    for differing, _ in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]]


REFUSED = (
    "sparse gradients",
    "parameters that share memory at stage 0",
    "the engine class PipelineEngine",
    "an mpu with tensor-parallel ranks",
    "parameters marked as experts",
    "sequence parallelism",
    "an engine without an optimizer",
)


@pytest.mark.parametrize("feature", cells(REFUSED, REFUSED[:-1]))
def test_what_is_not_supported_is_refused_by_name_on_all_ranks(feature: str) -> None:
    pool = RankPool(2)  # of its own: some of these set process groups up for good
    try:
        for text in pool.run(jobs.refused, feature):
            assert text.startswith(f"ds_hessian does not support {feature}")
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("stage", "how"),
    cells(
        [(stage, how) for stage in range(4) for how in ("frozen", "replaced")],
        [(3, "frozen"), (2, "replaced")],
    ),
)
def test_a_parameter_changed_since_is_refused_on_all_ranks(
    ranks: Ranks, stage: int, how: str
) -> None:
    """One that was replaced was still in products, which were zero there."""
    said = "trainable parameters have changed since attach()"
    if (stage, how) == (3, "replaced"):
        said = "parameters that ZeRO-3 has not partitioned"
    for text in ranks(2).run(jobs.changed_since, stage, how):
        assert said in text


@pytest.mark.parametrize("stage", cells((0, 2), (2,)))
def test_the_schedule_of_dropped_tokens_counts_those_of_training(ranks: Ranks, stage: int) -> None:
    for before, after in ranks(2).run(jobs.schedule_of_dropped_tokens, stage):
        assert before == after


def test_contiguous_checkpoints_are_empty_after_a_forward_alone(ranks: Ranks) -> None:
    for message, trains in ranks(2).run(jobs.training_on_after_a_failure_among_checkpoints):
        assert "after its forward" in message and trains


@pytest.mark.parametrize("name", cells(("1", "2", "3", "1 bf16 immediate"), ("2", "3")))
def test_an_engine_after_its_destroy_is_refused_by_name(ranks: Ranks, name: str) -> None:
    for engine, module in ranks(2).run(jobs.after_destroy, ENGINES[name]):
        assert "an engine after its destroy()" in engine
        assert name != "3" or "parameters that ZeRO-3 has partitioned" in module


@pytest.mark.parametrize("name", cells(("0", "1", "2", "3", "2 bf16"), ("3",)))
def test_a_call_in_a_backward_is_refused_and_changes_nothing(ranks: Ranks, name: str) -> None:
    for message, same in ranks(2).run(jobs.in_a_backward, ENGINES[name]):
        assert "a call in a backward pass" in message and same


@pytest.mark.parametrize("name", cells(("1", "2", "2 bf16", "1 bf16 immediate"), ("2 bf16",)))
def test_an_engine_whose_module_has_another_one_is_refused(ranks: Ranks, name: str) -> None:
    for messages in ranks(2).run(jobs.taken_over, ENGINES[name]):
        assert len(messages) == 2
        assert all("another engine has been made of the model since" in m for m in messages)


@pytest.mark.parametrize("stage", cells((0, 1, 2, 3), (2,)))
def test_a_parameter_frozen_before_attaching_is_no_part_of_the_space(
    ranks: Ranks, stage: int
) -> None:
    after, before = ranks(2).run(jobs.frozen_before_attaching, stage)[0]
    assert after.keys() == before.keys() and "position" not in after
    for name, product in before.items():
        assert torch.allclose(after[name], product, rtol=0, atol=1e-4 * float(product.norm()))


@pytest.mark.full
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_parameter_that_the_optimizer_does_not_have_is_no_part_of_the_space(
    ranks: Ranks, stage: int
) -> None:
    n, v, sharpness = ranks(2).run(jobs.without_some, stage)[0]
    assert "position" not in v and n == sum(part.numel() for part in v.values())
    assert sharpness > 0


FAILING_ENGINES = {
    "0": zero(0),
    "1": zero(1, reduce_bucket_size=150),
    "1 overlap": zero(1, reduce_bucket_size=150, overlap_comm=True),
    "2": zero(2, reduce_bucket_size=150),
    "2 overlap": zero(2, reduce_bucket_size=150, overlap_comm=True),
    "2 not contiguous": zero(2, reduce_bucket_size=150, contiguous_gradients=False),
    "2 bf16 fp32 accumulation": {
        **zero(2, reduce_bucket_size=150),
        **BF16,
        **FP32_ACCUMULATION,
        **FP32_COMMUNICATION,
    },
    "2 bf16 optimizer offload": {
        **zero(2, reduce_bucket_size=150, offload_optimizer=ON_CPU),
        **BF16,
        **TORCH_ADAM,
    },
    "1 bf16 fp32 accumulation": LOW_ENGINES["1 bf16 fp32 accumulation"],
    "3 bf16": LOW_ENGINES["3 bf16"],
    "3 offload": FP32_ENGINES["3 offload"],
}
ON_ONE_RANK = [("model", 4, (1,)), ("model backward", 2, (0,)), ("loss", 9, (1,))]


def test_autocast_in_a_loss_is_seen_on_engines_too(ranks: Ranks) -> None:
    for roundoff, message in ranks(2).run(jobs.autocast_in_the_loss):
        assert roundoff == 2.0**-8
        assert "fp32 passes of a model or loss_fn that uses torch.autocast" in message


@pytest.mark.full
@pytest.mark.parametrize("name", FAILING_ENGINES)
def test_a_failure_on_one_rank_raises_on_both_and_leaves_training_alone(
    ranks: Ranks, name: str
) -> None:
    common = {"steps": 8, **FAILING_ENGINES[name]}
    failing = {"mode": "failing", "failures": [[failure] for failure in ON_ONE_RANK], **common}
    modes: list[dict[str, Any]] = [{"mode": "bare", **common}, failing]
    for differing, errors in ranks(2).run(jobs.compare_training, modes):
        assert differing == [[]]
        for (_, _, (rank,)), message in zip(ON_ONE_RANK, errors[0], strict=True):
            assert f"rank {rank}: Broken: on purpose" in message
