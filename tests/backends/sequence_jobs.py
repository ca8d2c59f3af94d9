"""What runs on the ranks: engines whose ranks share sequences (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor
from torch.distributed.nn import functional as collectives
from torch.nn import functional

import ds_hessian
from ds_hessian.operators.kronecker import Settings, estimate, find_layers
from tests.backends.auto_tp_jobs import CONFIG, QUIET, compared, llama, micro_batches, train

SIZES = {"num_key_value_heads": 4, "attn_implementation": "sdpa", "attention_dropout": 0.0}


def sums(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of this rank's tokens, and their number."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    flat, labels = logits.flatten(0, 1).float(), batch["shift_labels"].flatten()
    total = functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def pair(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum and count, to be added up over all ranks."""
    return sums(model, batch)


def own(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of this rank's tokens."""
    total, count = sums(model, batch)
    return total / count


def gathered(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the sequence's tokens, as DeepSpeed's tutorial of ALST makes it.

    For one group of all ranks: on gloo its backward takes the group's ranks for those of the job.
    """
    total, count = sums(model, batch)
    group = parallel_state_sp.get_sequence_parallel_group()
    totals = torch.stack(tuple(collectives.all_gather(total, group=group)))
    counts = torch.stack(tuple(collectives.all_gather(count, group=group)))
    return totals.sum() / counts.sum()


class _Total(torch.autograd.Function):
    """The sum over the ranks of a sequence, whose backward takes the rank's own part alone, as
    Megatron's and DeepSpeed's cross entropies of split sequences do.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=parallel_state_sp.get_sequence_parallel_group())
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def replicated(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The same total, counted once."""
    total, count = sums(model, batch)
    return _Total.apply(total) / _Total.apply(count.float())


def wrong(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss whose gradient is three times its own."""
    loss = own(model, batch)
    return 3 * loss - 2 * loss.detach()


LOSSES: dict[str, Callable[..., Any]] = {
    loss.__name__: loss for loss in (pair, own, gathered, replicated, wrong)
}


def parts() -> list[dict[str, Tensor]]:
    """This rank's part of each of its sequences; labels are shifted before they are split."""
    ranks = parallel_state_sp.get_sequence_parallel_world_size()
    rank, row = dist.get_rank() % ranks, dist.get_rank() // ranks
    rows = dist.get_world_size() // ranks
    return [split(b, rank, ranks) for b in micro_batches()[row::rows]]


def split(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """One rank's part of a micro-batch."""
    tokens = batch["input_ids"]
    whole = {
        "input_ids": tokens,
        "position_ids": torch.arange(tokens.shape[1]).expand_as(tokens),
        "shift_labels": functional.pad(tokens[:, 1:], (0, 1), value=-100),
    }
    return {key: t.chunk(ranks, 1)[rank].contiguous() for key, t in whole.items()}


def make(stage: int, **config: Any) -> Any:
    """An engine whose ranks share sequences two by two."""
    model = llama(**SIZES)
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        UlyssesSPAttentionHF.register_with_transformers(  # for the rest of this process
            model_name_or_path=model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=2,
            micro_batch_size=2,
        )
    return deepspeed.initialize(
        model=model,
        mpu=parallel_state_sp,
        config={**CONFIG, "zero_optimization": {"stage": stage}, **config},
    )[0]


def measured(stage: int, loss: str, operator: str = "hessian", **config: Any) -> Any:
    """(v, product, spectrum's alphas, loss, layout); vectors whole, on rank 0."""
    engine = make(stage, **config)
    settings = ds_hessian.HessianConfig.parse({**QUIET, "operator": operator})
    hessian = ds_hessian.attach(engine, settings).use(parts(), LOSSES[loss])
    v = hessian.random_vector(seed=5)
    try:
        product = hessian.matvec(v).vector
    except ds_hessian.HessianError as error:
        engine.destroy()
        return str(error)
    spectrum = hessian.spectrum(num_matvecs=4)
    found = hessian.gather(v), hessian.gather(product), spectrum
    engine.destroy()
    return found


def forms(stage: int, loss: str, **config: Any) -> tuple[float, ...]:
    """`forms_of` these ranks."""
    engine = make(stage, **config)
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
    found = forms_of(hessian.use(parts(), LOSSES[loss]))
    engine.destroy()
    return found


def forms_of(hessian: Any) -> tuple[float, ...]:
    """v'Gv by the outputs, its error, the error of Gv, and the trace of K-FAC by drawn labels."""
    with hessian.measuring(operator="ggn") as operator:
        v = hessian.random_vector(seed=5)
        product, form = operator.matvec(v), operator.along(v)
    layers, _ = find_layers(hessian.backend, "up_proj")
    with hessian.backend.measuring(hessian._objective) as session:
        (found, *_) = estimate(session, hessian.backend, layers, Settings(("kfac",), draws=16))
    trace = float(found.forms["kfac"].values.sum()) if found.forms else 0.0
    total = hessian.backend.space.reduce(torch.tensor([trace], dtype=torch.float64))
    return form.value, form.error, product.error, float(total)


def factors(stage: int, loss: str) -> Any:
    """`factors_of` of this rank's layers."""
    engine = make(stage)
    hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
    found = factors_of(hessian.use(parts(), LOSSES[loss]))
    engine.destroy()
    return found


def factors_of(hessian: Any) -> Any:
    """{layer: {kind: (values, left, right)}} of the layers that this rank owns, {layer: samples} of
    all, and the norm of a solution that is preconditioned by them, with its residual.
    """
    layers, _ = find_layers(hessian.backend, None)
    with hessian.backend.measuring(hessian._objective) as session:
        kinds = Settings(("kfac", "ekfac", "shampoo", "klshampoo"))
        found = estimate(session, hessian.backend, layers, kinds)
    forms = {
        f.layer.name: {k: (v.values, v.left, v.right) for k, v in f.forms.items()} for f in found
    }
    v = hessian.random_vector(seed=5)
    solved = hessian.solve(v, [1.0], num_matvecs=3, preconditioner="ekfac")
    figures = hessian.backend.space.norm(solved.x[0]), float(solved.residuals[0])
    return forms, {f.layer.name: dict(f.samples) for f in found}, figures


def compare_training(stage: int, loss: str, **config: Any) -> tuple[list[bool], list[str]]:
    """Training of ranks that share sequences, whose parts are added up into one loss."""
    return compared(lambda measure: train(make(stage, **config), parts(), LOSSES[loss], measure))
