"""Adam's state on every kind of shard, and sharpness during training, against dense references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends import jobs
from tests.nets import DenseHessian, TinyGPT, batch, merged
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 0 fp16": {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True, "loss_scale": 1}},
    "stage 0 fp16 fused": {
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": True, "loss_scale": 1},
    },
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 1 BF16_Optimizer": {
        "zero_optimization": {"stage": 1},
        "data_types": {"grad_accum_dtype": "fp32"},
        **BF16,
    },
    "stage 2 offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "stage 3": {"zero_optimization": {"stage": 3, "sub_group_size": 400}},
    "stage 3 bf16": {"zero_optimization": {"stage": 3}, **BF16},
}
QUICK = (
    "stage 0 fp16",
    "stage 0 fp16 fused",
    "stage 1 BF16_Optimizer",
    "stage 2 offload",
    "stage 3",
)


@pytest.mark.parametrize("name", cells(LAYOUTS, QUICK))
def test_adams_divisor_and_step_are_those_of_the_training(name: str, ranks: Ranks) -> None:
    found = ranks(2).run(jobs.adam_state, LAYOUTS[name], fused=name.endswith("fused"))[0]
    refusals, before, after, divisor, step, squares, steps, decay = found
    for refusal, part in zip(
        refusals, ("make an optimizer step", '"sgd"', "at least 4"), strict=True
    ):
        assert part in refusal
    (t,) = steps
    for parameter, update in step.items():
        moved = after[parameter] - (1 - decay) * before[parameter]
        # The difference of two fp32 masters of size 1 to 3, of which an update is about 1e-2.
        assert torch.allclose(update, moved, atol=4 * 2.0**-23, rtol=1e-5)
        if squares[parameter] is not None:  # stage 0 does not say
            exact = (squares[parameter].double() / (1 - 0.999**t)).sqrt() + 1e-8
            whole = divisor[parameter].double()
            assert torch.allclose(whole, exact.reshape(whole.shape), rtol=1e-5, atol=0)
    assert any(square is not None for square in squares.values()) or name.startswith("stage 0")


def test_adams_state_is_that_of_the_optimizer_that_steps_the_sub_group(ranks: Ranks) -> None:
    """Sub-groups of another one were taken for parameters without a gradient, whose D is eps."""
    before, after, step, stepped = ranks(2).run(jobs.adam_beside)[0]
    assert stepped and step.keys() == before.keys()
    for name, update in step.items():
        assert torch.allclose(update, after[name] - before[name], atol=4 * 2.0**-23, rtol=1e-5)


@pytest.fixture(scope="module", params=cells([1, 3], []))
def run(request: pytest.FixtureRequest, ranks: Ranks) -> Any:
    """What rank 0 of 2 found."""
    return ranks(2).run(jobs.sharpness_in_training, request.param, 2, 2, 1e-3)[0]


def dense_at(weights: Any) -> tuple[DenseHessian, torch.Tensor]:
    dense = DenseHessian(TinyGPT(), weights, merged([batch(500 + i, 0) for i in range(jobs.TOTAL)]))
    return dense, dense.matrix()


def test_top_eigenvalues_and_curvatures_in_five_products_once_warm(run: Any) -> None:
    found, _, _ = run
    cold, *warm = [record for *_, record in found]
    assert not cold.warm and all(record.warm and record.num_matvecs <= 5 for record in warm)
    for weights, divisor, step, record in (found[0], found[-1]):
        dense, matrix = dense_at(weights)
        scale = dense.flat(divisor).rsqrt()
        problems = (
            (matrix, record.eigenvalue_max),
            (scale[:, None] * matrix * scale, record.preconditioned),
        )
        for h, estimate in problems:
            exact = torch.linalg.eigvalsh(h).numpy()
            assert np.abs(exact - estimate.value).min() <= estimate.error
            assert estimate.value == pytest.approx(exact[-1], rel=0.02)
        gradient, update = dense.gradient.detach(), dense.flat(step)
        for v, curvature, error in (
            (gradient, record.gradient_curvature, record.gradient_curvature_error),
            (update, record.update_curvature, record.update_curvature_error),
        ):
            exact_curvature = float(v @ matrix @ v / (v @ v))
            assert abs(curvature - exact_curvature) <= error < 1e-3 * float(exact[-1])
        assert record.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-4)
        assert record.update_norm == pytest.approx(float(update.norm()), rel=1e-5)


def test_without_a_preconditioner_a_warm_start_is_taken_over(run: Any) -> None:
    *_, (weights, *_), plain = run
    _, matrix = dense_at(weights)
    exact = float(torch.linalg.eigvalsh(matrix)[-1])
    assert plain.warm and plain.num_matvecs <= 5
    assert plain.preconditioned is None and plain.update_curvature is None
    assert plain.eigenvalue_max.value == pytest.approx(exact, rel=0.02)


def test_ranks_start_together_where_one_has_a_loss_of_other_numbers(ranks: Ranks) -> None:
    """One alone started from its direction: the others waited for its products."""
    mine, others = ranks(2).run(jobs.sharpness_of_other_numbers)
    assert mine == others and [warm for warm, _ in mine] == [False, False]


def test_adam_preconditions_a_solve(run: Any) -> None:
    _, (weights, _, b, x, errors), _ = run
    dense, matrix = dense_at(weights)
    exact = torch.linalg.solve(matrix + 12 * torch.eye(len(matrix)), dense.flat(b))
    assert float((dense.flat(x) - exact).norm()) <= errors[0]
    assert float((dense.flat(x) - exact).norm()) < 2e-3 * float(exact.norm())
