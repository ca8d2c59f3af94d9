"""Models of transformers: products are those of a double backward, within their estimates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_hessian
from tests.tiers import cells, needs

pytestmark = needs("transformers")

VOCABULARY = 24
SMALL = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "use_cache": False},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"initializer_range": 0.1, "attn_implementation": "eager", "max_position_embeddings": 40},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SIDES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1),)}
SIDES |= {"d_model": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4},
    "llama": {},
    "gemma2": {"head_dim": 4, "sliding_window": 4},  # logits that are softly capped
    "falcon": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "qwen3_moe": {**EXPERTS, "head_dim": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "recurrent_gemma": {"lru_width": 16, "attention_window_size": 4},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16, "activation_function": "gelu"},
    "bert": {},
    "roberta": {},
    "albert": {"embedding_size": 8},  # layers that share their weights
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "fnet": {},
    "bart": {**SIDES, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    "vit": {"image_size": 8, "patch_size": 4},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
}
IMAGES = {"vit": 8, "poolformer": 32}
MASKED = ("bert", "roberta", "albert", "deberta-v2", "fnet")


def make(family: str) -> nn.Module:
    """A small model, always the same."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    kind: Any = hf.AutoModelForCausalLM
    if family in IMAGES:
        kind = hf.AutoModelForImageClassification
    elif family in MASKED:
        kind = hf.AutoModelForMaskedLM
    elif family == "bart":
        kind = hf.AutoModelForSeq2SeqLM
    model: nn.Module = kind.from_config(config)
    return model


def micro_batches(family: str) -> list[dict[str, Tensor]]:
    """Two micro-batches with labels; tokens 0 and 1 are among them, which are padding to some."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(2):
        if family in IMAGES:
            images = torch.randn(4, 3, IMAGES[family], IMAGES[family], generator=generator)
            labels = torch.randint(0, 2, (4,), generator=generator)
            found.append({"pixel_values": images, "labels": labels})
        else:
            tokens = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
            found.append({"input_ids": tokens, "labels": tokens.clone()})
    return found


def loss_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(**batch).loss
    return loss


def exact(family: str, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v by double backward in fp64, without dropout."""
    model: Any = make(family).double().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no fp64
    names, parameters = zip(*((n, p) for n, p in model.named_parameters() if n in v), strict=True)
    wide = [
        {k: t.double() if t.is_floating_point() else t for k, t in b.items()}
        for b in micro_batches(family)
    ]
    loss = torch.stack([loss_of(model, batch) for batch in wide]).mean()
    gradient = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    pairs = [
        (g, v[n].double())
        for n, g in zip(names, gradient, strict=True)
        if g is not None and g.requires_grad
    ]
    slope = torch.stack([(g * along).sum() for g, along in pairs]).sum()
    product = torch.autograd.grad(slope, parameters, allow_unused=True)
    return {
        n: torch.zeros_like(p) if t is None else t
        for n, p, t in zip(names, parameters, product, strict=True)
    }


@pytest.mark.parametrize("family", cells(FAMILIES, ["opt"]))
def test_products_are_those_of_a_double_backward(family: str) -> None:
    """To 5e-4, and to five times what they say of themselves."""
    settings = ds_hessian.HessianConfig.parse({"progress": False, "plot": False})
    hessian = ds_hessian.attach(make(family), config=settings).use(micro_batches(family), loss_of)
    v = hessian.random_vector(seed=5)
    product = hessian.matvec(v)
    found, expected = hessian.gather(product.vector), exact(family, hessian.gather(v))
    off = sum(float((found[n] - t).square().sum()) for n, t in expected.items()) ** 0.5
    size = sum(float(t.square().sum()) for t in expected.values()) ** 0.5
    assert product.error is not None
    assert off < 5e-4 * size and off < 5 * product.error * product.norm
