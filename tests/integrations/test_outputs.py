"""The outputs of models of transformers are found, and their Gauss-Newton products are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import ds_hessian
from ds_hessian.config import FiniteDifferenceConfig
from ds_hessian.operators import curvature
from tests.operators.gauss_newton import ExactGaussNewton, of_functions
from tests.tiers import cells

transformers = pytest.importorskip("transformers")

VOCABULARY = 29
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "intermediate_size": 12}
Made = tuple[nn.Module, dict[str, Any], str]


def words(count: int = 6) -> torch.Tensor:
    """Tokens of two sentences."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (2, count), generator=generator)


def gpt2() -> Made:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, n_positions=8
    )
    labels = words().clone()
    labels[0, :2] = -100
    return transformers.GPT2LMHeadModel(config), {"input_ids": words(), "labels": labels}, "lm_head"


def llama() -> Made:
    config = transformers.LlamaConfig(**SMALL, **HEADS, num_key_value_heads=1)
    return (
        transformers.LlamaForCausalLM(config),
        {"input_ids": words(), "labels": words()},
        "lm_head",
    )


def qwen2() -> Made:
    config = transformers.Qwen2Config(**SMALL, **HEADS, num_key_value_heads=1)
    labels = words().clone()
    labels[1, 3:] = -100
    return (
        transformers.Qwen2ForCausalLM(config),
        {"input_ids": words(), "labels": labels},
        "lm_head",
    )


def mixtral() -> Made:
    config = transformers.MixtralConfig(
        **SMALL,
        **HEADS,
        num_key_value_heads=1,
        num_local_experts=3,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        experts_implementation="eager",  # in fp64 too
    )
    model = transformers.MixtralForCausalLM(config)
    return model, {"input_ids": words(), "labels": words()}, "lm_head"


def bert() -> Made:
    config = transformers.BertConfig(**SMALL, **HEADS, max_position_embeddings=8)
    labels = torch.where(words() % 3 == 0, words(), -100)
    model = transformers.BertForMaskedLM(config)
    return model, {"input_ids": words(), "labels": labels}, "cls.predictions.decoder"


def t5() -> Made:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": words(), "labels": words(4)}, "lm_head"


def vit() -> Made:
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        **HEADS,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
    )
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    model = transformers.ViTForImageClassification(config)
    return model, {"pixel_values": images, "labels": torch.tensor([0, 1, 2, 1])}, "classifier"


def measured(make: Callable[[], Made]) -> Any:
    """The model, its inputs, the name of its outputs, the job, a random vector, the outputs that
    were found, and products of the vector with G, R and H.
    """
    torch.manual_seed(0)
    model, inputs, name = make()
    model.eval()
    hessian = ds_hessian.attach(model, None, {"progress": False}).use([inputs])
    v = hessian.random_vector(seed=0)
    with hessian.measuring(operator="ggn") as g:
        settings = FiniteDifferenceConfig()
        others = [curvature(g.session, settings, kind) for kind in ("residual", "hessian")]
        products = [operator.matvec(v) for operator in (g, *others)]
        return model, inputs, name, hessian, v, g.outputs, products


@pytest.mark.parametrize(
    "make", cells([gpt2, llama, qwen2, mixtral, bert, t5, vit], [gpt2]), ids=lambda f: f.__name__
)
def test_outputs_are_found_and_products_are_exact(make: Callable[[], Made]) -> None:
    model, inputs, name, hessian, v, outputs, products = measured(make)
    rest = ", without another part of the loss" if make is mixtral else ""  # its routers'
    assert outputs == f"{name}: cross entropy{rest}"
    exact = ExactGaussNewton(
        model,
        name,
        lambda m, b: m(**dict(zip(inputs, b, strict=True))).loss,
        [list(inputs.values())],
    )
    with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
        truth = exact(v)
    error = float((products[0].vector - truth).norm() / truth.norm())
    assert error < min(1e-3, 3 * products[0].error)
    gap = float((products[0].vector + products[1].vector - products[2].vector).norm())
    if make is not mixtral:  # whose routing may change between displaced weights
        assert gap < 3 * sum(p.error * p.norm for p in products)


def causal(kind: str, **settings: Any) -> Callable[[], Made]:
    """A small model whose logits are not what its head returns."""

    def make() -> Made:
        config = getattr(transformers, f"{kind}Config")(
            **SMALL, **HEADS, num_key_value_heads=1, head_dim=4, pad_token_id=0, **settings
        )
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
        return model, {"input_ids": words(), "labels": words()}, "lm_head"

    make.__name__ = kind
    return make


SCALED = [
    causal("Cohere", logit_scale=0.25),
    causal("Granite", logits_scaling=0.2),
    causal("Gemma2", final_logit_softcapping=0.5),
    causal("Gemma3Text", final_logit_softcapping=0.5),
]


@pytest.mark.parametrize("make", cells(SCALED, SCALED[2:3]), ids=lambda f: f.__name__)
def test_outputs_are_the_logits_that_the_loss_takes(make: Callable[[], Made]) -> None:
    model, inputs, head, hessian, v, outputs, products = measured(make)
    assert outputs == "the logits of the loss: cross entropy"
    labels = inputs["labels"][:, 1:].flatten()
    truth = of_functions(
        model,
        lambda net: net(input_ids=inputs["input_ids"]).logits,
        lambda f: functional.cross_entropy(f[:, :-1].flatten(0, 1), labels),
        v,
    )
    error = float((products[0].vector - truth).norm() / truth.norm())
    assert error < min(1e-4, 3 * products[0].error)
    gap = float((products[0].vector + products[1].vector - products[2].vector).norm())
    assert gap < 3 * sum(p.error * p.norm for p in products)
    with hessian.measuring(operator="ggn", outputs=head) as g:  # a module that is named is taken
        assert g.outputs == f"{head}: a loss known by its values"


def test_two_heads_of_a_model_are_refused() -> None:
    config = transformers.BertConfig(**SMALL, **HEADS, max_position_embeddings=8)
    model = transformers.BertForPreTraining(config).eval()
    inputs = {
        "input_ids": words(),
        "labels": words(),
        "next_sentence_label": torch.tensor([0, 1]),
    }
    hessian = ds_hessian.attach(model, None, {"progress": False}).use([inputs])
    with pytest.raises(ds_hessian.UnsupportedError, match="several heads.*seq_relationship"):
        hessian.spectrum(operator="ggn", num_matvecs=2)
