"""What runs on the ranks: engines whose layers DeepSpeed itself has split (AutoTP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hessian
from ds_hessian.backends.zero import ZeroBackend
from tests.backends.jobs import Broken
from tests.megatron.job import same

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}
QUIET = {"progress": False, "plot": False}
VOCABULARY = 24


FAMILIES = ("llama", "qwen2", "qwen3", "opt", "gpt_neox")
"""With and without biases, norms of each rank's own heads, a position table, fused layers; which
DeepSpeed 0.19.8 splits, of transformers 5, without a `partition_config`."""


def llama(**sizes: Any) -> nn.Module:
    """A Llama of two layers with grouped queries, the same on every rank."""
    return make_model("llama", **sizes)


def make_model(family: str, **sizes: Any) -> nn.Module:
    """A small causal language model of transformers, the same on every rank."""
    from transformers import AutoConfig, AutoModelForCausalLM

    small = {
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"attention_dropout": 0.1, "initializer_range": 0.1, "use_cache": False},
        **{"attn_implementation": "eager", "tie_word_embeddings": False},
    }
    own: dict[str, dict[str, Any]] = {
        "qwen3": {"head_dim": 4},
        "opt": {"activation_function": "gelu", "ffn_dim": 20, "word_embed_proj_dim": 16},
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**small, **own.get(family, {}), **sizes})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def micro_batches(number: int = 4) -> list[dict[str, Tensor]]:
    """Random tokens, which are their own labels."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCABULARY, (number, 2, 8), generator=generator)
    return [{"input_ids": t, "labels": t} for t in tokens]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss."""
    loss: Tensor = model(**batch).loss
    return loss


def make(
    stage: int, tp: int, family: str = "llama", **config: Any
) -> tuple[Any, list[dict[str, Tensor]]]:
    """An engine, and this rank's micro-batches, which tensor-parallel ranks share."""
    engine = deepspeed.initialize(
        model=make_model(family),
        config={
            **CONFIG,
            "zero_optimization": {"stage": stage},
            "tensor_parallel": {"autotp_size": tp},
            **config,
        },
    )[0]
    row, rows = dist.get_rank() // tp, dist.get_world_size() // tp
    return engine, micro_batches()[row::rows]


def measured(stage: int, tp: int, precision: str = "model", **config: Any) -> Any:
    """(v, product, spectrum, whether products repeat bitwise); vectors whole, on rank 0."""
    engine, batches = make(stage, tp, **config)
    settings = {**QUIET, "finite_difference": {"precision": precision}}
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(settings))
    hessian.use(batches, loss_of)
    v = hessian.random_vector(seed=5)
    with hessian.measuring(displacement=2e-2):
        product, again = hessian.matvec(v).vector, hessian.matvec(v).vector
    spectrum = hessian.spectrum(num_matvecs=5)
    found = hessian.gather(v), hessian.gather(product), spectrum, torch.equal(product, again)
    engine.destroy()
    return found


def of_family(family: str) -> Any:
    """(v, product), whole, on rank 0; or the reason of a refusal."""
    engine, batches = make(1, 2, family)
    try:
        hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
        hessian.use(batches, loss_of)
        v = hessian.random_vector(seed=5)
        return hessian.gather(v), hessian.gather(hessian.matvec(v).vector)
    except ds_hessian.HessianError as error:
        return str(error)
    finally:
        engine.destroy()


def reference(
    v: dict[str, Tensor], rounded: bool = False, family: str = "llama", **sizes: Any
) -> dict[str, Tensor]:
    """H v by double backward of the whole model in fp64; at weights rounded to bf16 if asked."""
    model = make_model(family, **sizes)
    if rounded:
        model = model.bfloat16()
    model = model.double().eval()
    losses = [loss_of(model, batch) for batch in micro_batches()]
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradient = torch.autograd.grad(torch.stack(losses).mean(), parameters, create_graph=True)
    along = [v[name].double() for name in names]
    return dict(zip(names, torch.autograd.grad(gradient, parameters, along), strict=True))


def train(
    engine: Any, batches: list[Any], loss_fn: Callable[[Any, Any], Any], measure: str
) -> tuple[list[Any], list[str]]:
    """What must be the same whatever is measured, and the errors of measurements.

    Args:
        engine: The engine, which is destroyed.
        batches: This rank's micro-batches.
        loss_fn: Of training and measurements.
        measure: "" for none, "spectrum" after every step, "failing" for one whose second loss
            raises on the last rank.
    """
    torch.manual_seed(99)  # dropout
    calls = [0]

    def failing(model: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise Broken("on purpose")
        return loss_fn(model, batch)

    if measure:
        settings = ds_hessian.HessianConfig.parse({**QUIET, "dropout": True})
        hessian = ds_hessian.attach(engine, settings)
    losses, errors = [], []
    for _ in range(2):
        for batch in batches:
            loss = loss_fn(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
        if measure == "spectrum":
            hessian.spectrum(batches, loss_fn, num_matvecs=2)
        elif measure:
            calls[0] = 0
            try:
                hessian.spectrum(batches, failing, num_matvecs=2)
            except ds_hessian.HessianError as error:
                errors.append(str(error))
    backend = ZeroBackend(engine)
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    state = [
        losses,
        [backend.shards.weight(piece).clone() for piece in backend.pieces],
        [t.clone() for s in inner.state.values() for t in s.values() if torch.is_tensor(t)],
        torch.get_rng_state(),
    ]
    engine.destroy()
    return state, errors


def compared(run: Callable[[str], tuple[list[Any], list[str]]]) -> tuple[list[bool], list[str]]:
    """Whether training with spectra, and with failing ones, is bitwise that without; the errors."""
    bare, _ = run("")
    with_spectra, _ = run("spectrum")
    with_failures, errors = run("failing")
    return [same(bare, with_spectra), same(bare, with_failures)], errors


def compare_training(stage: int, tp: int, **config: Any) -> tuple[list[bool], list[str]]:
    """Training of tensor-parallel ranks."""
    return compared(lambda measure: train(*make(stage, tp, **config), loss_of, measure))
