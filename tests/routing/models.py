"""Small models that route, and their exact products by double backward in fp64."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 48
SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": TOKENS,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
    "output_router_logits": True,
    "initializer_range": 0.15,
    "use_cache": False,
    "attn_implementation": "eager",
}


def mixtral(experts: str = "eager", **settings: Any) -> nn.Module:
    """A Mixtral of two layers, in train mode, the same in every call."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(intermediate_size=24, num_local_experts=4, **{**SIZES, **settings})
    return _made(MixtralForCausalLM, config, experts)


def qwen2_moe(experts: str = "eager", **settings: Any) -> nn.Module:
    """A Qwen2-MoE of two layers with shared experts."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {"intermediate_size": 24, "moe_intermediate_size": 12, "num_experts": 4}
    shared = {"shared_expert_intermediate_size": 12}
    config = Qwen2MoeConfig(**{**SIZES, **sizes, **shared, **settings})
    return _made(Qwen2MoeForCausalLM, config, experts)


MODELS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe}


def _made(kind: Any, config: Any, experts: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = kind(config)
    model.set_experts_implementation(experts)
    return model.train()


def batches(number: int = 4) -> list[dict[str, Tensor]]:
    """Micro-batches of two sequences."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(31, (2, TOKENS), generator=generator) for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in rows]


def exact_product(model: nn.Module, data: Sequence[Any], v: Tensor) -> Tensor:
    """`H v` in fp64, of the mean loss in train mode."""
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # type: ignore[operator]
    named = dict(wide.named_parameters())
    loss = torch.stack([wide(**batch).loss for batch in data]).mean()
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in gradients])
    product = torch.autograd.grad(flat @ v.double(), list(named.values()))
    return torch.cat([p.reshape(-1) for p in product])
