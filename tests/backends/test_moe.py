"""Engines with experts of `deepspeed.moe`: the Hessian of the whole model, each expert once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ds_hessian
from tests.backends import moe_jobs as jobs
from tests.backends.test_auto_tp import Ranks, error, split_ranks
from tests.tiers import cells

__all__ = ["split_ranks"]  # pools of their own: DeepSpeed keeps the groups of experts

BF16 = {"bf16": {"enabled": True}}
FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
GIVEN = ("top 1", "top 2", "top 3", "dropless")


@pytest.fixture(scope="module")
def one() -> Any:
    """Spectra of the models by hand, on plain torch in one process."""

    def of(gate: str) -> Any:
        config = ds_hessian.HessianConfig.parse(jobs.QUIET)
        hessian = ds_hessian.attach(jobs.by_hand(gate), config=config)
        return hessian.spectrum(jobs.micro_batches(), jobs.loss_of, num_matvecs=3)

    return of


def require_same_coefficients(found: Any, expected: Any, tolerance: float = 2e-3) -> None:
    scale = tolerance * abs(expected.alphas[0]).max()  # products are right to some 1e-4
    assert np.allclose(found.alphas[0], expected.alphas[0], rtol=0, atol=scale)
    assert np.allclose(found.betas[0], expected.betas[0], rtol=0, atol=scale)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize(
    "size, ep, stage, gate",
    cells(
        [
            *((2, ep, stage, "top 1") for ep in (1, 2) for stage in (0, 1, 2)),
            *((2, 2, 2, gate) for gate in GIVEN[1:]),
            *((4, 2, stage, "top 2") for stage in (0, 1, 2)),
        ],
        [(2, 2, 2, "top 2")],
    ),
)
def test_products_are_those_of_the_dense_hessian_and_coefficients_those_of_one_process(
    split_ranks: Ranks, one: Any, size: int, ep: int, stage: int, gate: str
) -> None:
    found = split_ranks(size).run(jobs.measured, stage, ep, gate)[0]
    weights, v, product, spectrum, names, repeats = found
    assert repeats and error(product, jobs.reference(weights, v, gate)) < 2e-4
    require_same_coefficients(spectrum, one(gate))
    assert names == [name for name, _ in jobs.by_hand(gate).named_parameters()]
    assert spectrum.provenance.layout == f"ZeRO-{stage}, {size} ranks, EP {ep}"


@pytest.mark.parametrize("size, gate", cells([(2, "random"), (2, "sampled"), (4, "random")], []))
def test_what_routers_draw_is_held_and_the_same_however_many_ranks_share_a_layer(
    split_ranks: Ranks, size: int, gate: str
) -> None:
    """Each rank draws the same noise with its experts alone and with those of two ranks."""
    found = {ep: split_ranks(size).run(jobs.measured, 1, ep, gate)[0] for ep in (1, 2)}
    assert found[1][-1] and found[2][-1]
    assert error(found[2][2], found[1][2]) < 2e-4
    require_same_coefficients(found[2][3], found[1][3])


@pytest.mark.parametrize(
    "size, ep, stage, config",
    cells(
        [
            *((2, 2, stage, BF16) for stage in (0, 1, 2)),
            *((2, 2, stage, {"fp16": {"enabled": True}}) for stage in (0, 2)),
            *((2, ep, 1, {**BF16, **FP32_ACCUMULATION}) for ep in (1, 2)),
            (4, 2, 2, BF16),
        ],
        [],
    ),
)
def test_fp32_passes(
    split_ranks: Ranks, size: int, ep: int, stage: int, config: dict[str, Any]
) -> None:
    found = split_ranks(size).run(jobs.measured, stage, ep, "top 2", "fp32", **config)
    weights, v, product, _, _, repeats = found[0]
    assert repeats
    assert error(product, jobs.reference(weights, v, "top 2")) < 2e-4


@pytest.mark.full
@pytest.mark.parametrize(
    "stage, config",
    [
        (0, {"gradient_allreduce_op": "sum"}),
        (2, {"gradient_allreduce_op": "sum"}),
        (0, {"prescale_gradients": True, "gradient_predivide_factor": 3.0}),
        (1, {"zero_optimization": {"stage": 1, "reduce_bucket_size": 60}}),
        (2, {"zero_optimization": {"stage": 2, "reduce_bucket_size": 60, "overlap_comm": True}}),
        (2, {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
        (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
        (1, {"use_data_before_expert_parallel": True}),
    ],
)
def test_other_ways_to_reduce_gradients(
    split_ranks: Ranks, stage: int, config: dict[str, Any]
) -> None:
    weights, v, product, *_ = split_ranks(4).run(jobs.measured, stage, 2, "top 2", **config)[0]
    assert error(product, jobs.reference(weights, v, "top 2")) < 2e-4


@pytest.mark.full
@pytest.mark.parametrize(
    "size, ep, stage, gate, config",
    [
        (2, 2, 0, "random", {}),
        (2, 1, 1, "top 1", {}),
        (2, 2, 1, "dropless", {}),
        (2, 2, 1, "sampled", {**BF16, **FP32_ACCUMULATION}),
        (2, 2, 2, "sampled", BF16),
        (2, 2, 2, "top 3", {"wall_clock_breakdown": True}),
        (4, 2, 0, "top 2", BF16),
        (4, 2, 2, "random", {}),
        (2, 2, 1, "random", {"gradient_accumulation_steps": 4}),
        (2, 2, 2, "random", {"gradient_accumulation_steps": 4, **BF16}),
    ],
)
def test_training_is_bitwise_the_same_with_spectra_and_with_those_that_fail_on_one_rank(
    split_ranks: Ranks, size: int, ep: int, stage: int, gate: str, config: dict[str, Any]
) -> None:
    for found, errors in split_ranks(size).run(jobs.compare_training, stage, ep, gate, **config):
        assert found == [True, True]
        assert len(errors) == 2
        assert all(f"rank {size - 1}: Broken: on purpose" in text for text in errors)


@pytest.mark.parametrize(
    "stage, ep, variant",
    cells(
        [(0, 2, "tied"), (2, 2, "tied"), (1, 2, "starved"), (0, (2, 1), ""), (2, (1, 2), "")],
        [],
    ),
)
def test_tied_and_starved_experts_and_layers_with_other_groups(
    split_ranks: Ranks, stage: int, ep: Any, variant: str
) -> None:
    """The last ones with 1 and 2 ranks that share the experts of a layer."""
    job = jobs.measured, stage, ep, "top 1", "model", variant
    weights, v, product, _, names, _ = split_ranks(2).run(*job)[0]
    assert error(product, jobs.reference(weights, v, "top 1", variant)) < 2e-4
    assert names == [name for name, _ in jobs.by_hand("top 1", variant).named_parameters()]
    if variant == "starved":
        experts = "layers.0.deepspeed_moe.experts.deepspeed_experts.3"
        assert all(not product[name].any() for name in names if name.startswith(experts))


@pytest.mark.parametrize("when", cells(["before", "after"], ["after"]))
def test_a_frozen_expert_is_no_part_of_the_space(split_ranks: Ranks, when: str) -> None:
    """Before or after the engine was made, whose optimizer then has it."""
    names, weights, v, product = split_ranks(2).run(jobs.frozen, when)[0]
    every = [name for name, _ in jobs.by_hand("top 1").named_parameters()]
    fourth = "layers.0.deepspeed_moe.experts.deepspeed_experts.3"
    assert names == [name for name in every if not name.startswith(fourth)]
    full = jobs.by_hand("top 1").state_dict()
    assert error(product, jobs.reference({**full, **weights}, v, "top 1")) < 2e-4


def test_an_expert_that_one_of_its_ranks_has_frozen_is_refused_on_all(split_ranks: Ranks) -> None:
    for text in split_ranks(2).run(jobs.frozen, "on one rank"):
        assert "deepspeed_experts.2.0.bias' is trained on some of them only" in text


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_products_repeat_and_are_the_same_after_a_checkpoint(
    split_ranks: Ranks, stage: int, tmp_path: Path
) -> None:
    for found in split_ranks(2).run(jobs.around_a_checkpoint, str(tmp_path), stage):
        assert found == (True, True)


@pytest.mark.full
@pytest.mark.parametrize(
    "size, ep, variant", [(2, 1, "tied"), (2, 2, "tied"), (4, 2, "tied"), (2, 2, "")]
)
def test_blocks_and_the_gauss_newton_matrix_are_those_of_one_process(
    split_ranks: Ranks, size: int, ep: int, variant: str
) -> None:
    """Without a variant, with residual experts too."""
    config = ds_hessian.HessianConfig.parse(jobs.QUIET)
    alone = ds_hessian.attach(jobs.by_hand("top 2", variant), config=config)
    expected = jobs.other_kinds(alone.use(jobs.micro_batches(), jobs.loss_of))
    *found, record = split_ranks(size).run(jobs.of_other_kinds, ep, variant)[0]
    for mine, other in zip(found, expected, strict=True):
        require_same_coefficients(mine, other)
    # Experts have no factors; the model was refused for them.
    experts = {name: reason for name, reason in record.left_out.items() if "_experts." in name}
    of_two_dims = [n for n, p in alone.backend.model.named_parameters() if p.ndim == 2]
    assert len(experts) == sum("_experts." in name for name in of_two_dims)
    assert set(experts.values()) == {"it is an expert's, of deepspeed.moe"}
    assert (
        set(record.layers) | set(record.left_out) == set(of_two_dims)
        and "mix.weight" in record.layers
    )
    exact = jobs.factors(alone, list(record.layers))
    for name in ("norms", "cosines", "scales", "samples"):
        assert np.allclose(getattr(record, name), getattr(exact, name), rtol=1e-2), name


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_ranks_whose_micro_batches_have_fewer_tokens(split_ranks: Ranks, stage: int) -> None:
    weights, v, product = split_ranks(2).run(jobs.uneven, stage)[0]
    exact = jobs.reference(weights, v, "dropless", batches=jobs.uneven_batches())
    assert error(product, exact) < 2e-4
