"""What runs on the ranks: Kronecker factors of a Megatron GPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from ds_hessian.operators.kronecker import (
    KeptFactors,
    KroneckerMetric,
    Settings,
    estimate,
    find_layers,
    layers,
)
from tests.megatron import job
from tests.megatron.job import Job
from tests.nets import forward_hooks


def factors(
    layout: Job, kinds: tuple[Any, ...] = ("kfac", "ekfac", "shampoo"), draws: int = 0
) -> Any:
    """{layer: {kind: K on some matrices}} of this rank's layers, and the samples of all."""
    with job.running(layout) as chunks:
        hessian = job.hessian_of(chunks, layout)
        backend = hessian.backend
        found_layers, _ = find_layers(backend, job.FACTORS)
        with backend.measuring(hessian._objective) as session:
            found = estimate(session, backend, found_layers, Settings(kinds, draws=draws))
        forms = {
            f.layer.name: {k: _apply(form) for k, form in f.forms.items()} for f in found if f.forms
        }
        return forms, [(f.layer.name, f.layer.shape, dict(f.samples), f.mismatch) for f in found]


def reductions(layout: Job) -> tuple[int, int]:
    """How often EK-FAC's factors, of two passes, reduce gradients, and the micro-batches."""
    from ds_hessian.backends.megatron.reductions import Reductions

    make, count = Reductions.make, [0]

    def counted(self: Reductions) -> None:
        count[0] += 1
        make(self)

    with mock.patch.object(Reductions, "make", counted):
        factors(layout, kinds=("ekfac",))
    return count[0], len(job.micro_batches())


def gathered(layout: Job, draws: int) -> Any:
    """`factors` of a model whose logits every tensor-parallel rank has whole."""
    build = job.gpt

    def whole(*args: Any) -> Any:
        model = build(*args)
        model.output_layer.gather_output, model.parallel_output = True, False
        return model

    def losses(model: Any, batch: dict[str, torch.Tensor], _: Job) -> torch.Tensor:
        logits, labels = model(batch["tokens"], job.POSITIONS, job.CAUSAL), batch["labels"]
        found = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return found.view(labels.shape)

    with (
        mock.patch("tests.megatron.job.gpt", whole),
        mock.patch("tests.megatron.job.token_losses", losses),
    ):
        return factors(layout, draws=draws)


def _apply(form: Any) -> torch.Tensor:
    """K on some matrices, which do not depend on the signs of eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *form.values.shape, generator=generator, dtype=torch.float64)
    found = form.apply(x)
    assert isinstance(found, torch.Tensor)
    return found


def diagonal(layout: Job) -> dict[str, float]:
    """{name: how far from the mean squares of gradients EK-FAC's diagonal is where it is one}."""
    with job.running(layout) as chunks:
        hessian = job.hessian_of(chunks, layout)
        backend, off = hessian.backend, dict[str, float]()
        found_layers, _ = find_layers(backend, job.FACTORS)
        with backend.measuring(hessian._objective) as session:
            metric = KroneckerMetric(session, backend, found_layers)
            gradients = [session.space.zeros() for _ in range(session.num_micro_batches)]
            for i, gradient in enumerate(gradients):
                session.add_gradient(gradient, range(i, i + 1))
        mean = torch.stack(gradients).square().mean(0) * session.num_micro_batches**2
        mean *= session.gradient_scale**2 * job.SIZE * job.SEQUENCE
        for fragment, part in backend.layout:
            if fragment.name not in metric.layers:
                off[fragment.name] = float((metric._diagonal - mean)[part].norm() / mean.norm())
        return off


def kept(layout: Job) -> float:
    """How far factors that SOAP keeps are from those of its gradients; in bf16 it steps masters."""
    import pytorch_optimizer
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    with job.running(layout) as chunks:
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        soap = pytorch_optimizer.SOAP(parameters, lr=1e-3, shampoo_beta=0.9)
        config = OptimizerConfig(bf16=layout.dtype == "bfloat16", clip_grad=0.0)
        if config.bf16:
            optimizer = Float16OptimizerWithFloat16Params(soap, config, None, lambda *_: None)
        else:
            optimizer = FP32Optimizer(soap, config, lambda *_: None)
        job.run_schedule(layout, chunks, job.my_batches())
        weights = {w.name: w for w in job.hessian_of(chunks, layout).backend.weights()}
        sides = {}
        for name, weight in weights.items():
            g = weight.module.weight.main_grad.double()
            sides[name] = 0.1 * g @ g.T, g.T @ g / g.square().sum()
        optimizer.step()
        hessian, off = job.hessian_of(chunks, layout), 0.0
        read = KeptFactors(optimizer, hessian.backend.weights())
        found = hessian.kronecker(
            ["optimizer"], job.FACTORS, adapter=optimizer, basis=1, probes=2, extremes=0
        )
        for name in found.layers:
            for exact, factor in zip(sides.get(name, ()), read(name) or (), strict=True):
                off = max(off, float((factor.double() - exact).norm() / exact.norm()))
        return off


def record(layout: Job) -> Any:
    """The record of two layers, and whether hooks are left."""
    with job.running(layout) as chunks:
        hessian = job.hessian_of(chunks, layout)
        choice = r"layers\.(0|1)\..*fc1\.weight"
        found = hessian.kronecker(["kfac", "shampoo"], choice, basis=6, probes=4, extremes=2)
        return found, forward_hooks(*chunks)


def uneven(layout: Job) -> str:
    """The refusal of a layer of which a rank sees another part than the ranks divide."""
    from ds_hessian.errors import HessianError

    whole = layers._columns

    def cut(layer: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return whole(layer, x[..., :-1] if "fc1" in layer.name else x, *rest)

    with job.running(layout) as chunks:
        hessian = job.hessian_of(chunks, layout)
        try:
            with mock.patch.object(layers, "_columns", cut):
                hessian.kronecker(["kfac"], r"layers\.0\..*fc1\.weight", basis=2, probes=2)
        except HessianError as error:
            return str(error)
        return ""


def in_parts() -> Sequence[str]:
    """The layers on record where a checkpoint has the first weight of the MLP as two parameters."""
    from megatron.core.ssm.gated_delta_net import _split_tensor_factory

    from ds_hessian.backends.megatron import host

    layout = Job(activation="relu")
    with job.running(layout) as chunks:
        layer: Any = host.unwrap(chunks[0]).decoder.layers[0].mlp.linear_fc1
        whole = layer.sharded_state_dict

        def described(prefix: str = "", *rest: Any, **options: Any) -> Any:
            found, name = whole(prefix, *rest, **options), f"{prefix}weight"
            found[name] = _split_tensor_factory(found[name], [8, 12], ["first", "second"], 0)
            return found

        layer.sharded_state_dict = described
        hessian, choice = job.hessian_of(chunks, layout), r"layers\.0\.mlp.*weight"
        layers: Sequence[str] = hessian.kronecker(
            ["kfac"], choice, basis=1, probes=2, extremes=0
        ).layers
        return layers
