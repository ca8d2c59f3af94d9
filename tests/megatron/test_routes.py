"""Routing, the losses of training, all analyses, and what is refused before a first pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.megatron import job, routes_jobs
from tests.megatron.job import MOE, Job
from tests.megatron.test_layouts import error, whole
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]

LOSSES: dict[str, Any] = {**MOE, "aux_loss": 0.05, "z_loss": 0.02, "shared": 8}

ROUTED: dict[str, tuple[int, dict[str, Any]]] = {
    "EP": (2, {"ep": 2}),
    "EP, all-to-all": (2, {"ep": 2, "dispatcher": "alltoall"}),
    "EP, recomputed, distributed optimizer": (2, {"ep": 2, "recompute": True, "distributed": True}),
    "TP x EP": (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "TP x EP, all-to-all, recomputed": (
        2,
        {"tp": 2, "ep": 2, "sequence_parallel": True, "dispatcher": "alltoall", "recompute": True},
    ),
    "EP x PP": (4, {"ep": 2, "pp": 2}),
    "EP x PP interleaved, all-to-all, distributed optimizer": (
        4,
        {"ep": 2, "pp": 2, "vpp": 2, "layers": 4, "dispatcher": "alltoall", "distributed": True},
    ),
    "TP x EP x DP": (4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "TP x EP x DP, all-to-all, distributed optimizer": (
        4,
        {
            **{"tp": 2, "ep": 2, "sequence_parallel": True},
            **{"dispatcher": "alltoall", "distributed": True},
        },
    ),
    "PP, recomputed": (2, {"pp": 2, "recompute": True}),
    "PP interleaved, recomputed": (2, {"pp": 2, "vpp": 2, "layers": 4, "recompute": True}),
}


@pytest.fixture(scope="module")
def exact(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """v and the exact product of a model with experts and all their losses."""

    @functools.cache
    def get(alone: Job) -> Any:
        ((v, *_),) = megatron_ranks(1).run(job.product_in_fp64, alone)
        full = whole([v])
        ((_, product),) = megatron_ranks(1).run(job.reference, alone, full)
        return full, product

    return lambda layout: get(replace(layout, dtype="float64").alone)


@pytest.mark.parametrize("name", cells(ROUTED, ["PP, recomputed"]))
def test_fp32_products_of_experts_by_the_automatic_step_are_those_of_fp64(
    megatron_ranks: Ranks, exact: Callable[[Job], Any], name: str
) -> None:
    """With the auxiliary and z losses of the routers, shared experts, and recomputation."""
    size, layout = ROUTED[name]
    v, product = exact(Job(**layout, **LOSSES))
    runs = megatron_ranks(size).run(routes_jobs.automatic, Job(**layout, **LOSSES))
    assert error(whole([r[0] for r in runs]), v) == 0.0
    true = error(whole([r[1] for r in runs]), product)
    assert true < 5e-4
    assert true < 5 * runs[0][2]
    for run in runs:
        assert run[3] == runs[0][3]
        if layout.get("recompute"):
            assert run[4] == pytest.approx(2.0, abs=0.01)  # each forward twice, as in training


DEEPSEEK: dict[str, Any] = {
    **{**MOE, "latent": True, "positions": "rope", "tied": False, "shared": 8},
    **{"expert_bias": True, "aux_loss": 0.05, "balancing": "seq_aux_loss"},
}
GROUPS = (
    ("moe_router_num_groups", 2),
    ("moe_router_group_topk", 1),
    ("moe_router_topk_scaling_factor", 2.5),
)
SINKHORN = (("moe_router_load_balancing_type", "sinkhorn"), ("moe_router_topk", 1))
TWO = (
    ("moe_router_load_balancing_type", ("aux_loss", "seq_aux_loss")),
    ("moe_aux_loss_coeff", (0.05, 0.03)),
)
ROUTERS: dict[str, dict[str, Any]] = {
    "groups of experts": {**MOE, "ep": 2, "expert_bias": True, "options": GROUPS},
    "sinkhorn": {**MOE, "ep": 2, "options": SINKHORN},
    "two auxiliary losses": {**MOE, "ep": 2, "aux_loss": 0.05, "options": TWO},
    "probabilities of all experts": {
        **{**MOE, "ep": 2, "aux_loss": 0.05, "options": (("moe_router_pre_softmax", True),)},
    },
    "later tokens dropped": {
        **{**MOE, "ep": 2, "capacity": 0.8, "options": (("moe_token_drop_policy", "position"),)},
    },
    "experts filled up": {
        **{**MOE, "ep": 2, "capacity": 1.0},
        "options": (("moe_pad_expert_input_to_capacity", True),),
    },
    "latent attention and experts": {**DEEPSEEK, "ep": 2},
    "latent attention and experts, interleaved": {**DEEPSEEK, "pp": 2, "vpp": 2, "layers": 4},
}


@pytest.mark.parametrize("name", cells(ROUTERS, []))
def test_fp32_products_of_other_routers_are_those_of_fp64(
    megatron_ranks: Ranks, exact: Callable[[Job], Any], name: str
) -> None:
    layout = Job(**ROUTERS[name])
    v, product = exact(layout)
    runs = megatron_ranks(2).run(routes_jobs.automatic, layout)
    assert error(whole([r[0] for r in runs]), v) == 0.0
    true = error(whole([r[1] for r in runs]), product)
    assert true < 5e-4
    assert true < 5 * runs[0][2]


STOPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
}


@pytest.mark.parametrize("name", cells(STOPPED, []))
def test_what_is_detached_is_a_constant_in_parallel_layers(
    megatron_ranks: Ranks, name: str
) -> None:
    size, layout = STOPPED[name]
    runs = megatron_ranks(size).run(routes_jobs.stopped, Job(**layout))
    v, found = (whole([run[part] for run in runs]) for part in (0, 1))
    alone = replace(Job(**layout).alone, dtype="float64")
    (exact,) = megatron_ranks(1).run(routes_jobs.stopped_reference, alone, v)
    assert error(found, exact) < min(3e-4, 3 * runs[0][2])


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_that_computes_in_bf16_tells_the_rounding_of_an_fp32_job(
    megatron_ranks: Ranks, recompute: bool
) -> None:
    here = Job(pp=2, recompute=recompute)
    runs = megatron_ranks(2).run(routes_jobs.narrow_in_part, here)
    v, found = (whole([run[part] for run in runs]) for part in (0, 1))
    ((_, exact),) = megatron_ranks(1).run(job.reference, replace(here.alone, dtype="float64"), v)
    assert error(found, exact) < min(0.1, 3 * runs[0][2])


@pytest.mark.full
@pytest.mark.parametrize("activation", [False, True])
def test_what_a_fused_function_rounds_does_not_round_the_products_of_an_fp32_job(
    megatron_ranks: Ranks, activation: bool
) -> None:
    """They were 4 % off with a loss whose backward returns bf16, and 44 % with an activation that
    keeps 8 bits for its own.
    """
    (run,) = megatron_ranks(1).run(routes_jobs.fused, Job(), activation)
    v, found = (whole([part]) for part in run[:2])
    ((_, exact),) = megatron_ranks(1).run(job.reference, Job(dtype="float64"), v)
    assert error(found, exact) < min(3e-4, 3 * run[2])


@pytest.mark.full
@pytest.mark.parametrize("size, layout", [(1, {}), (2, {"ep": 2}), (4, {"ep": 2, "pp": 2})])
def test_a_loss_of_what_a_step_counts_is_that_of_training(
    megatron_ranks: Ranks, size: int, layout: dict[str, Any]
) -> None:
    """Its routers balance what all micro-batches so far have counted: products were 1.5 % off."""
    balanced = {**MOE, "aux_loss": 0.05, "balancing": "global_aux_loss"}
    here = Job(**layout, **balanced)
    for gradient, product, told in megatron_ranks(size).run(routes_jobs.as_trained, here):
        assert gradient < 1e-5
        assert product < 3 * told < 1e-3
    for message in megatron_ranks(size).run(job.refused, replace(here, recompute=True)):
        assert "global_aux_loss in layers that are recomputed" in message


@pytest.mark.full
def test_routers_that_count_are_measured_beside_recomputed_layers(megatron_ranks: Ranks) -> None:
    """Of which none counts: only the first layer, without experts, is recomputed."""
    balanced = {**MOE, "aux_loss": 0.05, "balancing": "global_aux_loss"}
    beside = Job(**balanced, dense=1, recompute=True, method="block")
    ((gradient, product, told),) = megatron_ranks(1).run(routes_jobs.as_trained, beside)
    assert gradient < 1e-5
    assert product < 3 * told < 1e-3
    (message,) = megatron_ranks(1).run(job.refused, replace(beside, dense=0))
    assert "global_aux_loss in layers that are recomputed" in message


SELECTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "TP, attention": (2, {"tp": 2, "selective": ("core_attn",)}),
    "TP sequence parallel, norms": (
        2,
        {"tp": 2, "sequence_parallel": True, "selective": ("layernorm", "core_attn")},
    ),
    # Megatron's MLP returns its bias, which a recomputation makes its own output: training would
    # call its backward without end.
    "PP, MLP": (2, {"pp": 2, "bias": False, "selective": ("mlp", "layernorm")}),
    "PP, MLP with ReLU": (
        2,
        {"pp": 2, "bias": False, "activation": "relu", "selective": ("mlp", "layernorm")},
    ),
    "PP interleaved, norms": (
        2,
        {"pp": 2, "vpp": 2, "layers": 4, "selective": ("layernorm", "core_attn")},
    ),
    "EP, experts": (2, {"ep": 2, **LOSSES, "shared": 0, "selective": ("moe", "core_attn")}),
    "EP, shared experts": (2, {"ep": 2, **LOSSES, "selective": ("shared_experts", "layernorm")}),
    "latent attention": (
        2,
        {"latent": True, "positions": "rope", "selective": ("mla_up_proj", "layernorm")},
    ),
}


@pytest.mark.parametrize("name", cells(SELECTIVE, ["PP, MLP with ReLU"]))
def test_products_are_bitwise_those_without_selective_recomputation(
    megatron_ranks: Ranks, name: str
) -> None:
    size, layout = SELECTIVE[name]
    for same, (often, once) in megatron_ranks(size).run(
        routes_jobs.with_and_without_recomputation, Job(**layout)
    ):
        assert same == [True, True]
        assert often > once  # passes recompute, as training does


@pytest.mark.full
def test_adapters_whose_gradient_a_recomputation_loses_are_refused(megatron_ranks: Ranks) -> None:
    layout = Job(recompute=True, tied=False)
    for message in megatron_ranks(2).run(routes_jobs.measured_or_refused, layout, "embedding"):
        assert "let the embedding's output require gradients" in message


@pytest.mark.parametrize(
    "layout", cells([{"pp": 2}, {}, {"pp": 2, "vpp": 2, "layers": 4}], [{"pp": 2}])
)
def test_a_product_is_two_runs_of_the_schedule_after_the_first_two(
    megatron_ranks: Ranks, layout: dict[str, Any]
) -> None:
    """And one with a third difference: two reductions, two gathers, two waits for the stages."""
    for found in megatron_ranks(2).run(routes_jobs.runs_of_products, Job(**layout), 6):
        later = found[2:]
        assert sum(made == (2, 2, 2) for made in later) >= 3, found
        assert all(made in ((2, 2, 2), (3, 3, 3)) for made in later), found


@pytest.mark.full
def test_dropped_tokens_are_the_same_in_each_evaluation(megatron_ranks: Ranks) -> None:
    layout: dict[str, Any] = {**MOE, "dispatcher": "alltoall", "capacity": 1.0}
    exact = Job(**layout, dtype="float64")
    ((v, *_),) = megatron_ranks(1).run(job.product_in_fp64, exact)
    ((_, product),) = megatron_ranks(1).run(job.reference, exact, whole([v]))
    runs = megatron_ranks(2).run(routes_jobs.automatic, Job(ep=2, **layout))
    true = error(whole([r[1] for r in runs]), product)
    assert true < 1e-3 and true < 5 * runs[0][2]


@pytest.mark.full
def test_choices_that_would_have_changed_are_counted(megatron_ranks: Ranks) -> None:
    for choices, flips, symmetric in megatron_ranks(2).run(
        routes_jobs.choices_in_bf16, Job(ep=2, **MOE, dtype="bfloat16")
    ):
        assert choices == 2 * 4 * job.SIZE * job.SEQUENCE  # layers, micro-batches, tokens
        assert 0 < flips / 2 < choices  # two products
        assert symmetric


def test_what_modules_make_in_their_first_forward_is_left_to_training(
    megatron_ranks: Ranks,
) -> None:
    """Training went on with noise in fp32, whose type the activations of a bf16 model became."""
    bf16 = Job(**MOE, dtype="bfloat16", precision="auto")
    assert megatron_ranks(1).run(routes_jobs.made_in_a_measurement, bf16) == [[]]


@pytest.mark.full
def test_a_call_in_no_grad_or_no_sync_is_as_one_outside(megatron_ranks: Ranks) -> None:
    ranks, layout = megatron_ranks(2), Job()
    plain, *others = (
        ranks.run(routes_jobs.automatic, layout, context)[0][1]
        for context in ("", "no_grad", "no_sync")
    )
    for other in others:
        assert all(torch.equal(a[2], b[2]) for a, b in zip(plain, other, strict=True))


ANALYSED: dict[str, tuple[int, dict[str, Any]]] = {
    "TP sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "DP distributed optimizer overlap": (2, {"distributed": True, "overlap": True}),
    "PP": (2, {"pp": 2}),
    "EP distributed optimizer": (2, {"ep": 2, "distributed": True, **MOE}),
    "DP": (2, {}),
}


@pytest.fixture(scope="module")
def analysed(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """Figures of one process."""
    return functools.cache(lambda job: megatron_ranks(1).run(routes_jobs.analyses, job))


@pytest.mark.parametrize("name", cells(ANALYSED, []))
def test_all_analyses_are_those_of_one_process(
    megatron_ranks: Ranks, analysed: Callable[[Job], Any], name: str
) -> None:
    """After a step of Adam, whose state preconditions. Its first step divides each gradient by its
    own size, so that signs of the smallest ones, which are rounding, differ.
    """
    size, layout = ANALYSED[name]
    (expected,) = analysed(Job(**layout).alone)
    runs = megatron_ranks(size).run(routes_jobs.analyses, Job(**layout))
    assert all(run == runs[0] for run in runs)
    for kind, figures in expected.items():
        scale = np.abs(figures).max()
        assert np.allclose(runs[0][kind], figures, atol=1e-2 * scale, rtol=0), kind


@pytest.mark.full
@pytest.mark.parametrize("name", ["TP sequence parallel", "DP distributed optimizer overlap"])
def test_preconditioned_sharpness_is_that_of_one_process(megatron_ranks: Ranks, name: str) -> None:
    size, layout = ANALYSED[name]
    ((*top, along, update),) = megatron_ranks(1).run(routes_jobs.sharpness, Job())
    for found in megatron_ranks(size).run(routes_jobs.sharpness, Job(**layout)):
        assert np.allclose(found[:2], top, rtol=0.05)
        assert np.allclose(found[2:], [along, update], rtol=0.05)


OPTIMIZERS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "Adam": (1, {}, {}, 1),
    "distributed": (2, {"distributed": True}, {}, 1),
    "of experts too": (2, {**MOE, "ep": 2}, {"lr": 3e-3}, 2),
    "SGD": (1, {}, {"optimizer": "sgd", "sgd_momentum": 0.9}, 1),
}


@pytest.mark.parametrize("name", cells(OPTIMIZERS, ["SGD"]))
def test_records_know_the_optimizer(megatron_ranks: Ranks, name: str) -> None:
    size, layout, options, chained = OPTIMIZERS[name]
    for found, number in megatron_ranks(size).run(
        routes_jobs.optimizer_on_record, Job(**layout), **options
    ):
        assert number == chained
        assert found.learning_rate == options.get("lr", 1e-2)
        if name == "SGD":
            assert (found.name, found.momentum) == ("SGD", 0.9)
            assert found.edge == pytest.approx(2 * 1.9 / 1e-2)
        else:
            assert "Adam" in found.name and found.beta1 == 0.9


@pytest.mark.full
def test_the_rounding_of_autocast_on_one_stage_is_that_of_all(megatron_ranks: Ranks) -> None:
    assert megatron_ranks(2).run(routes_jobs.autocast_on_the_last_stage) == [2.0**-8] * 2


@pytest.fixture(scope="module")
def influences(megatron_ranks: Ranks) -> Callable[[Job], Any]:
    """Those of one process."""
    return functools.cache(lambda job: megatron_ranks(1).run(routes_jobs.influences, job))


INFLUENCED = {
    **ANALYSED,
    "PP interleaved": (2, {"pp": 2, "vpp": 2, "layers": 4}),
    "PP interleaved, per token": (2, {"pp": 2, "vpp": 2, "layers": 4, "per_token": True}),
    "PP interleaved, experts, recomputed": (
        2,
        {"pp": 2, "vpp": 2, "layers": 4, "recompute": True, **LOSSES},
    ),
}


@pytest.mark.parametrize("name", cells(INFLUENCED, []))
def test_influences_are_those_of_one_process(
    megatron_ranks: Ranks, influences: Callable[[Job], Any], name: str
) -> None:
    """Of single micro-batches, also where the schedule runs groups of them."""
    size, layout = INFLUENCED[name]
    ((expected, loss),) = influences(Job(**layout).alone)
    for scores, query in megatron_ranks(size).run(routes_jobs.influences, Job(**layout)):
        assert query == pytest.approx(loss, rel=1e-5)
        mine = expected.reshape(scores.shape[0], scores.shape[1], -1).mean(-1)
        assert np.allclose(scores, mine, atol=1e-2 * np.abs(mine).max(), rtol=0)


def test_adam_needs_its_optimizer_and_a_step_of_it(megatron_ranks: Ranks) -> None:
    ((unknown, fresh),) = megatron_ranks(1).run(routes_jobs.without_an_optimizer)
    assert "pass it, MegatronHessian(model, config, optimizer)" in unknown
    assert "make an optimizer step" in fresh


@pytest.mark.parametrize("dtype", cells(["float32", "bfloat16"], ["float32"]))
def test_a_gradient_that_megatron_multiplies_is_refused_by_its_name(
    megatron_ranks: Ranks, dtype: str
) -> None:
    """Of the norm of queries in multi-latent attention: whole on each tensor-parallel rank, and
    summed over them."""
    layout = Job(tp=2, latent=True, bias=False, dtype=dtype)
    for message in megatron_ranks(2).run(routes_jobs.measured_or_refused, layout, split_keys=False):
        assert "q_layernorm" in message and "trains with 2 times the gradient" in message


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {**MOE, "ep": 2}, {**MOE, "ep": 2, "distributed": True}]
)
def test_parts_of_parallel_layers_that_are_described_as_copies_are_refused(
    megatron_ranks: Ranks, layout: dict[str, Any]
) -> None:
    """Half of them did not count, and the others were displaced with their coordinates. With the
    same values on all ranks no gradient tells them from copies.
    """
    for message in megatron_ranks(2).run(routes_jobs.described_as_copies, Job(**layout)):
        assert "decoder.layers.0.mlp.inner." in message
        assert "the model's sharded_state_dict says that each has the whole" in message


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_latent_keys_of_which_ranks_have_parts_are_refused(
    megatron_ranks: Ranks, sequence_parallel: bool
) -> None:
    """Megatron's own gradient was 4 % off in fp64, and products 5.5e-2 with an error of 8e-5."""
    layout = Job(tp=2, latent=True, bias=False, sequence_parallel=sequence_parallel)
    for message in megatron_ranks(2).run(routes_jobs.measured_or_refused, layout):
        assert "multi-latent attention whose down-projections are split" in message


@pytest.mark.full
@pytest.mark.parametrize("precision", ["auto", "model"])
def test_masters_that_only_some_ranks_keep_displace_all_copies(
    megatron_ranks: Ranks, precision: str
) -> None:
    """Those of the layer-wise optimizer."""
    layout = Job(dtype="bfloat16", precision=precision)
    expected = megatron_ranks(2).run(job.chain, layout, 1, num_matvecs=1)
    found = megatron_ranks(2).run(routes_jobs.layer_wise, layout)
    for (((v, product, _),), _), (((same, other, _),), _) in zip(expected, found, strict=True):
        for a, b in zip((*v, *product), (*same, *other), strict=True):
            assert torch.equal(a[2], b[2])


@pytest.mark.full
def test_the_layer_wise_optimizer_in_fp32_is_measured(megatron_ranks: Ranks) -> None:
    """Each rank has all weights, and nothing else."""
    assert len(megatron_ranks(2).run(routes_jobs.layer_wise, Job())) == 2


def test_tied_embeddings_of_which_one_copy_is_frozen_are_refused(megatron_ranks: Ranks) -> None:
    for message in megatron_ranks(2).run(routes_jobs.measured_or_refused, Job(pp=2), "first stage"):
        assert "one pipeline stage trains its copy and another has it frozen" in message


def test_copies_of_an_embedding_that_megatron_does_not_sum_are_refused(
    megatron_ranks: Ranks,
) -> None:
    """As those of multi-token prediction in its own stage are not by default: 46 % off."""
    for message in megatron_ranks(2).run(routes_jobs.apart, Job(pp=2)):
        assert "not in Megatron's embedding group" in message


def test_a_parameter_frozen_since_is_refused(megatron_ranks: Ranks) -> None:
    for message in megatron_ranks(1).run(routes_jobs.frozen_since, Job()):
        assert "trainable parameters have changed since attach()" in message


def test_biases_to_which_megatron_gives_no_gradient_are_refused(megatron_ranks: Ranks) -> None:
    """Those of frozen weights: products were 0.2 to 0.4 off with an error of 6e-5."""
    (message,) = megatron_ranks(1).run(routes_jobs.measured_or_refused, Job(), "weights")
    assert "does not support biases of layers whose weights are frozen" in message
    found = megatron_ranks(1).run(routes_jobs.measured_or_refused, Job(bias=False), "weights")
    assert found == ["measured"]


def test_a_module_of_ones_own_need_not_say_which_weight_its_output_layer_has(
    megatron_ranks: Ranks,
) -> None:
    """It raised an AttributeError."""
    assert megatron_ranks(1).run(routes_jobs.given_weight, False) == ["measured"]
    (message,) = megatron_ranks(1).run(routes_jobs.given_weight, True)
    assert "does not support biases of layers whose weights are frozen" in message


def test_moments_of_adam_are_those_without_their_scale(megatron_ranks: Ranks) -> None:
    """As Transformer Engine stores them in 8 or 16 bits."""
    assert megatron_ranks(1).run(routes_jobs.scaled_moments) == [True]


@pytest.mark.full
def test_wrappers_derived_from_megatrons_are_measured(megatron_ranks: Ranks) -> None:
    """NeMo's is; they were refused."""
    assert megatron_ranks(1).run(routes_jobs.subclassed) == [True]


def test_a_call_in_a_backward_is_refused(megatron_ranks: Ranks) -> None:
    (message,) = megatron_ranks(1).run(routes_jobs.in_a_backward, Job())
    assert "does not support a call in a backward pass" in message


@pytest.mark.parametrize("change", routes_jobs.CHANGES)
def test_a_parameter_that_is_not_in_the_buffers_of_its_wrapper_is_refused(
    megatron_ranks: Ranks, change: str
) -> None:
    """It was left out, or measured as it had been: displaced where no forward reads it."""
    layout = Job(distributed=True)
    for message in megatron_ranks(1).run(routes_jobs.changed_since_wrapping, layout, change):
        name = "extra" if change == "added" else "weight"
        assert f"parameter 'decoder.final_layernorm.{name}'" in message
        assert "has no place in the buffers of its DistributedDataParallel" in message


def test_passes_of_a_model_partly_in_bf16_are_in_fp32(megatron_ranks: Ranks) -> None:
    """Its first parameter, in fp32, was taken for all."""
    ((error, told, precision),) = megatron_ranks(1).run(routes_jobs.mixed, Job(dtype="bfloat16"))
    assert precision == "fp32" and error < 3 * told < 1e-3


@pytest.mark.parametrize(
    "kind, precision", [("object", "fp32"), ("list", "fp32"), ("function", "model")]
)
def test_weights_that_something_else_than_a_module_keeps_are_displaced_too(
    megatron_ranks: Ranks, kind: str, precision: str
) -> None:
    """Passes in fp32 read them as they are in bf16, and not displaced (Megatron's Mamba layers);
    where such a one cannot be put in their place, passes are those of training.
    """
    job = Job(dtype="bfloat16", precision="auto")
    ((error, told, found),) = megatron_ranks(1).run(routes_jobs.mixed, job, kind)
    assert found == precision and error < min(3 * told, 0.1 if precision == "model" else 1e-3)


def test_a_loss_that_hands_gradients_to_a_second_model_is_refused(megatron_ranks: Ranks) -> None:
    """Its wrapper added them to what it had pending, and it trained on them."""
    (without, _), (with_, message) = (
        megatron_ranks(1).run(routes_jobs.with_a_critic, measures)[0] for measures in (False, True)
    )
    assert "hands gradients to another engine or model that is trained" in message
    assert all(map(torch.equal, without, with_))


def test_what_a_loss_func_changes_is_put_back(megatron_ranks: Ranks) -> None:
    """Schedules call it after the forward step, and it was not watched."""
    assert megatron_ranks(1).run(routes_jobs.loss_with_state) == [(1.0, None)]


def test_gradient_buffers_that_are_offloaded_are_refused(megatron_ranks: Ranks) -> None:
    """Their tensors point to no memory: the process ended by a signal."""
    ((message, again),) = megatron_ranks(1).run(routes_jobs.offloaded, Job(distributed=True))
    assert "does not support gradient or weight buffers that are offloaded" in message
    assert again


@pytest.mark.full
def test_a_parameter_frozen_after_the_wrapping_has_no_coordinates(megatron_ranks: Ranks) -> None:
    """Displaced, and without a gradient, it left H with columns that had no rows."""
    layout = Job(distributed=True)
    for forth, back, counted in megatron_ranks(2).run(routes_jobs.frozen_since_wrapping, layout):
        assert counted and forth == pytest.approx(back, rel=0.05)


@pytest.mark.full
def test_fp32_passes_are_at_weights_that_were_edited_without_their_masters(
    megatron_ranks: Ranks,
) -> None:
    """As where a checkpoint of the weights alone was loaded; they ran at the masters."""
    layout = Job(dtype="bfloat16", precision="auto")
    (expected,), (found,) = (
        megatron_ranks(1).run(routes_jobs.edited, layout, masters) for masters in (False, True)
    )
    assert found == expected


@pytest.mark.parametrize("tied, of", [(True, "tied"), (False, "learned position")])
def test_multi_token_prediction_of_which_stages_have_copies_is_refused(
    megatron_ranks: Ranks, tied: bool, of: str
) -> None:
    for message in megatron_ranks(2).run(routes_jobs.predicting_several_tokens, tied):
        assert f"multi-token prediction with {of} embeddings in a pipeline" in message


@pytest.mark.full
@pytest.mark.parametrize("stages", [None, "Et|t|m|L"])
def test_multi_token_prediction_with_rotary_positions_in_a_pipeline_is_that_of_one_process(
    megatron_ranks: Ranks, stages: str | None
) -> None:
    """Two stages have the embedding of words, of which the gradients are summed. A stage of its own
    sends several activations at once, and was refused.
    """
    layout = Job(pp=4 if stages else 2, stages=stages, predicted=1, tied=False, positions="rope")
    (alone,) = megatron_ranks(1).run(job.chain, layout.alone, 1)
    runs = megatron_ranks(layout.pp).run(job.chain, layout, 1)
    v, expected = (whole([alone[0][0][part]]) for part in (0, 1))
    same, found = (whole([run[0][0][part] for run in runs]) for part in (0, 1))
    assert error(same, v) == 0.0
    told = alone[0][0][2] + runs[0][0][0][2]
    assert error(found, expected) < 3 * told < 2e-3


@pytest.mark.full
@pytest.mark.parametrize("size, layout", [(2, {"tp": 2}), (2, {"distributed": True})])
def test_products_of_t5_are_those_of_a_double_backward(
    megatron_ranks: Ranks, size: int, layout: dict[str, Any]
) -> None:
    """Its head is in a checkpoint under two names."""
    ((v, alone, product),) = megatron_ranks(1).run(routes_jobs.t5, Job())
    same, found, _ = megatron_ranks(size).run(routes_jobs.t5, Job(**layout))[0]
    assert v.keys() == same.keys() == product.keys()
    assert all(torch.equal(v[name], same[name]) for name in v)
    exact = torch.cat([product[name].flatten() for name in v])
    for other in (alone, found):
        flat = torch.cat([other[name].double().flatten() for name in v])
        assert (flat - exact).norm() < 1e-3 * exact.norm()
