"""Jobs in plain figures: parameters, shards, operations and messages, by hand and by others."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ds_hessian.errors import ConfigError
from ds_hessian.planning import Job, Machine, Mesh, Shape, activations, times, traffic
from ds_hessian.planning.shape import ROUTED, SPLIT, WHOLE
from tests.tiers import cells

SMALL = Shape(layers=4, hidden=8, heads=4, vocabulary=40, sequence=16, groups=2)
EXPERTS = Shape(4, 8, 4, 40, 16, bias=False, experts=4, active=2, expert_ffn=6, shared_ffn=4)
GPT3 = Shape(96, 12288, 96, 51200, 2048, positions=2048)
FREE = {"accelerator": 1e30, "host": 1e30, "disk": 1e30}


def job(shape: Shape | None = SMALL, ranks: int = 1, **given: Any) -> Job:
    number = 1000 if shape is None else shape.parameters
    return Job(num_parameters=number, world_size=ranks, shape=shape, **given)


# ---- parameters


def test_a_layer_has_the_parameters_of_torchs_own() -> None:
    layer = nn.TransformerEncoderLayer(8, 4, dim_feedforward=20, device="meta")
    count = sum(p.numel() for p in layer.parameters())
    assert sum(Shape(1, 8, 4, 40, 16, ffn=20).of_layer(0).values()) == count


def test_gpt_3_has_the_parameters_of_its_formula() -> None:
    """Narayanan et al. 2021, equation 2, which leaves out the last norm."""
    l, h, v, s = 96, 12288, 51200, 2048  # noqa: E741
    formula = 12 * l * h**2 + 13 * l * h + (v + s) * h
    assert GPT3.parameters == formula + 2 * h


TRANSFORMERS: dict[str, tuple[str, dict[str, Any], Shape]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
        Shape(12, 768, 12, 50257, 1024, positions=1024),
    ),
    "llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        Shape(
            *(32, 4096, 32, 128256, 1, 8, 0, 14336),
            **{"gated": True, "bias": False, "tied": False, "rms": True},
        ),
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        Shape(
            *(28, 3584, 28, 152064, 1, 4, 0, 18944),
            **{"gated": True, "bias": False, "qkv_bias": True, "tied": False, "rms": True},
        ),
    ),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        {
            "vocab_size": 50688,
            "hidden_size": 5120,
            "intermediate_size": 20480,
            "num_hidden_layers": 36,
            "num_attention_heads": 40,
        },
        Shape(36, 5120, 40, 50688, 1, tied=False),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
        },
        Shape(
            *(32, 4096, 32, 32000, 1, 8, 0, 14336),
            **{"gated": True, "bias": False, "tied": False, "rms": True, "experts": 8},
        ),
    ),
}


@pytest.mark.parametrize("name", cells(TRANSFORMERS, ()))
def test_models_of_transformers_have_the_parameters_of_their_sizes(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings, shape = TRANSFORMERS[name]
    config = transformers.AutoConfig.for_model(name, **settings)
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_parameters_are_split_and_replicated_as_megatron_does() -> None:
    # Of a layer: queries, keys and values 8 x (8 + 4 + 4) with biases, their projection back 8 x 8;
    # up 8 x 32 and down 32 x 8; biases of the two row-parallel layers and of two norms are whole.
    split = 8 * 16 + 16 + 64 + 8 * 32 + 32 + 32 * 8
    assert SMALL.of_layer(0) == Counter({SPLIT: split, WHOLE: 8 + 8 + 4 * 8})
    # Of four experts, each 8 x 6 up and 6 x 8 down; a shared one of 4, and the router.
    found = EXPERTS.of_layer(0)
    assert found[ROUTED] == 4 * 2 * 48
    assert found[WHOLE] == 4 * 8 + 4 * 8 and found[SPLIT] == 4 * 64 + 2 * 32
    mesh = Mesh(tensor=2, expert=2, expert_tensor=1)
    assert mesh.on_rank(EXPERTS, 0)[0] == 4 * 4 * 2 * 48 // 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_have_all_parameters_together(tied: bool, virtual: int) -> None:
    shape = Shape(4, 8, 4, 40, 16, positions=16, tied=tied, experts=4, dense_layers=3)
    mesh = Mesh(pipeline=2, virtual=virtual)
    parts = [sum(mesh.parameters(shape, stage).values()) for stage in range(2)]
    copy = 40 * 8 if tied else 0  # the last stage has its own
    assert sum(parts) == shape.parameters + copy
    # In turns, the only layer with experts is the last in either case.
    assert mesh.layers(shape, 1) == ([2, 3] if virtual == 1 else [1, 3])


# ---- shards


@pytest.mark.parametrize(
    ("mesh", "ranks", "share"),
    [
        (Mesh(), 4, 1 / 4),
        (Mesh(distributed_optimizer=False), 4, 1),
        (Mesh(tensor=2), 4, 1 / 4),
        (Mesh(tensor=2, distributed_optimizer=False), 4, 1 / 2),
        (Mesh(pipeline=2, context=2), 8, 1 / 8),
        (Mesh(pipeline=2, context=2, distributed_optimizer=False), 8, 1 / 2),
    ],
    ids=str,
)
def test_a_model_known_by_its_parameters_is_split_evenly(
    mesh: Mesh, ranks: int, share: float
) -> None:
    assert job(None, ranks, mesh=mesh).share.n_local == 1000 * share


def test_experts_are_shared_out_by_the_ranks_that_have_the_same_ones() -> None:
    mesh = Mesh(tensor=2, expert=4, expert_tensor=1, sequence_parallel=True)
    # Of 16 ranks, 8 have the same part of a layer, and 16 / 4 the same experts.
    assert mesh.copies(16) == (4, 8)
    experts, others = mesh.on_rank(EXPERTS, 0)
    share = job(EXPERTS, 16, mesh=mesh).share
    assert share.n_local == math.ceil(experts / 4) + math.ceil(others / 8)


def test_the_first_stage_of_a_small_model_has_the_largest_share() -> None:
    shares = job(SMALL, 2, mesh=Mesh(pipeline=2)).shares
    sizes = [share.n_local for share in shares]
    # The embedding is on both stages; the last one has the last norm.
    assert sizes[1] - sizes[0] == 16
    assert job(SMALL, 2, mesh=Mesh(pipeline=2)).share.n_local == max(sizes)


def test_what_a_session_of_megatron_holds() -> None:
    mesh = Mesh(tensor=2)
    narrow = job(SMALL, 4, mesh=mesh, dtype="bf16").share
    assert [item.size for item in narrow.backend("model")] == [0]  # restored from masters
    whole = sum(mesh.on_rank(SMALL, 0))
    assert [item.size for item in narrow.backend("fp32")] == [4 * whole, 0]
    wide = job(SMALL, 4, mesh=mesh, dtype="fp32").share
    assert [item.size for item in wide.backend("fp32")] == [4 * wide.n_local]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 6, "mesh": Mesh(tensor=4)}, "6 ranks are not a multiple of tensor 4 x"),
        ({"ranks": 4, "mesh": Mesh(pipeline=3)}, "4 ranks are not a multiple of tensor 1 x pip"),
        ({"ranks": 3, "mesh": Mesh(pipeline=3)}, "3 stages do not divide 4 layers"),
        ({"ranks": 2, "mesh": Mesh(pipeline=2, virtual=4)}, "8 stages do not divide 4 layers"),
        ({"ranks": 4, "mesh": Mesh(tensor=4)}, "4 tensor-parallel ranks do not divide 2 query gr"),
        ({"mesh": Mesh(virtual=2)}, "virtual stages need a pipeline"),
        ({"mesh": Mesh(sequence_parallel=True)}, "sequence parallelism splits over tensor-paral"),
        ({"ranks": 2, "mesh": Mesh(expert=2)}, "needs experts, of which the model has none"),
        ({"ranks": 2, "shape": None, "mesh": Mesh(expert=2)}, "needs the number of experts"),
        ({"ranks": 3, "shape": EXPERTS, "mesh": Mesh(expert=3)}, "3 expert-parallel ranks do not"),
        (
            {"ranks": 2, "shape": EXPERTS, "mesh": Mesh(expert=4)},
            "2 ranks are not a multiple of expert 4 x expert-tensor 1 x pipeline 1 = 4",
        ),
        ({"mesh": Mesh(tensor=0)}, "the tensor size must be at least 1: 0"),
        ({"mesh": Mesh(), "dtype": "fp16"}, "Megatron jobs in fp16 are not measured"),
        ({"mesh": Mesh(), "offload_optimizer": True}, "offload is of ZeRO"),
        ({"mesh": Mesh(), "secondary": 2}, "hpZ. is of ZeRO-3"),
        ({"stage": 2, "ranks": 4, "secondary": 2}, "hpZ. is of ZeRO-3"),
        ({"ranks": 6, "secondary": 4}, "4 ranks of a secondary copy do not divide 6 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_could_not_be_started_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(**{"shape": SMALL, **given})


# ---- operations


def test_operations_are_those_of_the_formula() -> None:
    """Narayanan et al. 2021, equation 3, of a job that computes all layers anew; per token."""
    l, h, v, s = 96, 12288, 51200, 2048  # noqa: E741
    formula = 96 * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert times.operations(job(GPT3, recompute="full"), 1) == pytest.approx(formula, rel=1e-12)
    plain = formula - (24 * l * h**2 + 4 * l * s * h)
    assert times.operations(job(GPT3), 1) == pytest.approx(plain, rel=1e-12)
    attention = times.operations(job(GPT3, recompute="selective"), 1) - plain
    assert attention == pytest.approx(4 * l * s * h, rel=1e-9)


def test_ranks_share_operations_and_the_last_stage_has_the_logits() -> None:
    alone = times.operations(job(SMALL), 10)
    both = [
        times.operations(job(SMALL, 8, mesh=Mesh(tensor=2, pipeline=2, context=2)), 10, stage)
        for stage in range(2)
    ]
    assert 4 * sum(both) == pytest.approx(alone)
    assert both[1] - both[0] == pytest.approx(3 * SMALL.of_logits * 10 / 4)
    assert times.operations(job(None, 4, mesh=Mesh(pipeline=4), recompute="full"), 5) == 8 * 1250


# ---- messages


def test_zero_sends_what_its_stage_does() -> None:
    def sent(stage: Any, **more: Any) -> tuple[traffic.Traffic, traffic.Traffic]:
        one = job(None, 4, stage=stage, dtype="bf16", **more)
        return traffic.of_micro_batch(one, 1), traffic.of_run(one)

    size = 1000 * 2 * 3 / 4
    assert [sent(stage)[0].far / size for stage in range(4)] == [0, 0, 1, 3]
    assert [sent(stage)[1].far / size for stage in range(4)] == [2, 3, 1, 0]
    nodes = sent(3, secondary=2)[0]
    assert nodes.far == 2 * size and nodes.near == 1000 * 2 / 2
    # Weights come from the host for forward and backward, and gradients go there.
    local = 1000 * 2 / 4
    assert sent(3, offload_parameters=True, offload_optimizer=True)[0].host == 3 * local
    # A message for each block, in forward, in backward, and for its gradients.
    assert traffic.of_micro_batch(job(SMALL, 4), 1).messages == 3 * (4 + 2)
    assert traffic.of_micro_batch(job(SMALL, 1), 1) == traffic.Traffic()


def layers(recompute: Any = "none", stage: int = 0, **axes: Any) -> traffic.Traffic:
    mesh = Mesh(**axes)
    ranks = mesh.tensor * mesh.pipeline * mesh.context * mesh.expert
    shape = EXPERTS if mesh.expert > 1 else SMALL
    one = job(shape, ranks, mesh=mesh, dtype="bf16", recompute=recompute)
    return traffic.of_micro_batch(one, 32, stage)


def test_layers_send_what_their_axes_do() -> None:
    activation = 32 * 8 * 2
    # Four all-reduces in each of four layers, one of the embedding, one before the logits.
    assert layers(tensor=2).near == (4 * 4 + 2) * activation
    assert layers("full", tensor=2).near == (6 * 4 + 2) * activation
    assert layers(tensor=2, sequence_parallel=True).near == layers(tensor=2).near
    # Keys and values, half of the tokens, once forward and twice back.
    assert layers(context=2).near == 4 * 3 * 2 * 4 * 16 * 2
    # Two experts for a token, there and back in forward and in backward, half of them elsewhere.
    assert layers(expert=2).far == 4 * 4 * 2 * activation / 2
    # The first of two stages sends on, the last back; with virtual stages three times.
    assert [layers(pipeline=2, stage=s).far for s in (0, 1)] == [activation] * 2
    assert layers(pipeline=2, virtual=2).far == 3 * activation
    assert layers() == traffic.Traffic()


def test_a_run_of_megatron_reduces_and_gathers() -> None:
    def far(**axes: Any) -> float:
        return traffic.of_run(job(None, 4, mesh=Mesh(**axes), dtype="bf16")).far

    assert far(distributed_optimizer=False) == 2 * 3 / 4 * 1000 * 4
    assert far() == 3 / 4 * 1000 * (4 + 2)
    assert far(tensor=4) == 0
    tied = job(SMALL, 2, mesh=Mesh(pipeline=2))
    assert traffic.of_run(tied) == traffic.Traffic(1, 40 * 8 * 4)


def test_time_of_a_micro_batch_is_that_of_the_slowest_stage() -> None:
    machine = Machine(FREE, latency=0.5, network=1e3, node_network=1e3)
    one = job(SMALL, 2, mesh=Mesh(pipeline=2), dtype="bf16")
    found = times.micro_batch(one, 32, 1e6, machine)
    assert found.computing == times.operations(one, 32, 1) / 1e6
    assert found.sending == 0.5 + 32 * 8 * 2 / 1e3
    hidden = times.micro_batch(one, 32, 1e6, machine, overlap=0.75)
    assert hidden.sending == found.sending / 4 and hidden.computing == found.computing


# ---- activations


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "layer"),
    [
        ("none", False, 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8)),
        ("none", True, (34 + 5 * 96 * 2048 / 12288) / 8),
        ("selective", False, 10 + 24 / 8),
        ("selective", True, 34 / 8),
        ("full", False, 2),
    ],
)
def test_activations_are_those_of_the_formulas(
    recompute: Any, sequence_parallel: bool, layer: float
) -> None:
    """Korthikanti et al. 2022, table 2, in s b h; of full recomputation a layer is added."""
    mesh = Mesh(tensor=8, pipeline=8, sequence_parallel=sequence_parallel)
    one = job(GPT3, 64, mesh=mesh, recompute=recompute)
    added = 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8) if recompute == "full" else 0
    found = activations(one, 2048, 16) / (2048 * 12288)
    assert found == pytest.approx(96 * layer + added)  # of eight micro-batches, a share of layers
    turns = Mesh(tensor=8, pipeline=8, virtual=3, sequence_parallel=sequence_parallel)
    more = activations(job(GPT3, 64, mesh=turns, recompute=recompute), 2048, 16) / (2048 * 12288)
    assert more == pytest.approx(96 * layer * (1 + 7 / 24) + added)


def test_activations_of_one_stage_are_of_one_micro_batch_and_twice_in_fp32() -> None:
    one = job(EXPERTS, 2, mesh=Mesh(context=2))
    # Queries, keys and values, two experts and a shared one, and scores; norms and three inputs.
    layer = 2 * (4 * 8 + 2 * (2 * 6 + 4)) + 4 * 16 * 5 + 2 * 8 * 5 + 2 * 8
    assert activations(one, 10, 8) == 5 * 4 * layer
    masks = 5 * 4 * (4 * 16 + 2 * 8)
    assert activations(one, 10, 8, size=4) == 2 * activations(one, 10, 8) - masks
