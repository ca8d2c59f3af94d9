"""What runs on the ranks: real ZeRO-3 engines, their spectra, and what training left behind."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from ds_hessian.backends.function import FixedFunction
from ds_hessian.backends.zero import ZeroBackend
from ds_hessian.errors import HessianError
from ds_hessian.hosts import hessian_of
from ds_hessian.records import HessianEigenpairs, HessianSolution
from ds_hessian.vectors import VectorSpace
from tests.nets import TinyGPT, batch, of_scaled_loss

TOTAL = 6  # micro-batches over all ranks: divides by 1, 2 and 3
FEW = 4  # two for each of two ranks
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 10**9,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
}


def make_engine(
    module: nn.Module | None = None,
    zero: dict[str, Any] | None = None,
    client: Any = None,
    **config: Any,
) -> Any:
    """An engine on the same initial weights in every call; with the hessian section, attached.

    Its optimizer is that of the configuration, or the client's."""
    hpz = groups._get_zero_param_intra_parallel_group()
    if hpz is not None:  # DeepSpeed keeps it, and later engines would have hpZ too
        deepspeed.comm.destroy_process_group(hpz)
    if module is None:
        torch.manual_seed(0)
        module = TinyGPT()
    merged = {**CONFIG, **config}
    merged["zero_optimization"] = {**merged["zero_optimization"], **(zero or {})}
    torch.manual_seed(1234 + dist.get_rank())  # dropout masks
    parameters = [p for p in module.parameters() if p.requires_grad]
    if client is not None:
        del merged["optimizer"]
    return ds_hessian.initialize(
        model=module, optimizer=client, model_parameters=parameters, config=merged
    )[0]


QUIET = {"progress": False, "plot": False}


def my_batches(total: int = TOTAL) -> list[Any]:
    """This rank's part of the micro-batches of all."""
    return [batch(500 + i, 0) for i in range(dist.get_rank(), total, dist.get_world_size())]


def full_weights(engine: Any) -> dict[str, Tensor] | None:
    """Unsharded master weights on rank 0 (the weights themselves where they have no masters)."""
    hessian = engine.hessian
    backend, v = hessian.backend, hessian.backend.space.zeros()
    for piece, (_, part) in zip(backend.pieces, backend.layout, strict=True):
        master = backend.shards.master(piece)
        v[part] = backend.shards.weight(piece) if master is None else master
    return hessian.gather(v)


def measure(num_matvecs: int, num_probes: int, zero: dict[str, Any], **config: Any) -> Any:
    """(weights, probe, product, spectrum, product at h = 0.1) of an untrained TinyGPT."""
    engine = make_engine(zero=zero, hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches())
    v = hessian.random_vector(seed=5)
    product = hessian.matvec(v)
    spectrum = hessian.spectrum(num_matvecs=num_matvecs, num_probes=num_probes)
    weights = full_weights(engine)
    with hessian.measuring(displacement=0.1):
        fixed = hessian.matvec(v)
    gathered = [hessian.gather(vector) for vector in (v, product.vector, fixed.vector)]
    engine.destroy()
    return weights, *gathered[:2], spectrum, gathered[2]


def tolerant(num_matvecs: int, tolerance: float) -> Any:
    """(weights, spectrum, its table) with a tolerance of eigenvalues."""
    engine = make_engine(hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    spectrum = hessian.spectrum(num_matvecs=num_matvecs, tolerance=tolerance)
    weights = full_weights(engine)
    engine.destroy()
    return weights, spectrum, spectrum.table()


def uneven(factor: float) -> Any:
    """(weights, vector, product, its h) where rank 1 would take another step than rank 0, and no
    third difference.
    """
    engine = make_engine(zero={}, hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    v = hessian.random_vector(seed=5)
    with hessian.measuring() as operator:
        operator._controller.h *= factor ** dist.get_rank()
        operator._controller.next_third = 9 * dist.get_rank()
        product = operator.matvec(v)
    found = full_weights(engine), hessian.gather(v), hessian.gather(product.vector)
    engine.destroy()
    return *found, product.displacement


def of_rank_0() -> list[float]:
    """Figures that differ between the ranks, as all of them get them."""
    return VectorSpace(1, 1).of_rank_0(1.5 + dist.get_rank(), -2.0)


# ---- neutrality


class Broken(Exception):
    """Raised on purpose."""


class Saboteur:
    """Raises at the n-th call, on the chosen ranks."""

    def __init__(self, at: int, ranks: tuple[int, ...]) -> None:
        self.at, self.active, self.calls = at, dist.get_rank() in ranks, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.active and self.calls == self.at:
            raise Broken("on purpose")


class FailingBackward(torch.autograd.Function):
    """Identity whose backward calls a saboteur."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, saboteur: Saboteur) -> Tensor:
        ctx.saboteur = saboteur
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.saboteur()
        return gradients[0], None


Failure = list[tuple[str, int, tuple[int, ...]]]
"""(stage, number of the call on that rank, ranks) of each thing that raises in one spectrum."""


def failing_spectrum(engine: Any, failures: Failure, precision: str) -> str:
    """Try a spectrum that fails at each (stage, number of the call, ranks); returns the error."""
    saboteurs = {stage: Saboteur(at, ranks) for stage, at, ranks in failures}

    def reached(stage: str, *_: Any) -> None:
        if stage in saboteurs:
            saboteurs[stage]()

    def failing_backward(stage: str, x: Tensor) -> Tensor:
        return FailingBackward.apply(x, saboteurs[stage]) if stage in saboteurs else x

    def batches() -> Any:
        for b in my_batches():
            reached("batches")
            yield b

    def loss_fn(model: Any, b: Any) -> Tensor:
        reached("before")
        loss = model(*b)
        reached("loss")
        return failing_backward("backward", loss)

    def gather(*args: Any, **kwargs: Any) -> Any:
        reached("gather")
        return allgather(*args, **kwargs)

    module = engine.module
    handles = [
        module.down.register_forward_hook(lambda *_: reached("model")),
        module.down.register_forward_hook(lambda m, i, y: failing_backward("model backward", y)),
    ]
    allgather = deepspeed.comm.allgather_fn
    deepspeed.comm.allgather_fn = gather
    try:
        engine.hessian_spectrum(batches(), loss_fn, num_matvecs=4, precision=precision)
    except ds_hessian.HessianError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        deepspeed.comm.allgather_fn = allgather
        for handle in handles:
            handle.remove()
    return "no error"


EVERYWHERE = {(0, 0): "model", (3, 1): "fp32"}
"""Precision of spectra by (step, micro-batch): before any step in a window, and after one."""


def train(
    mode: str,
    steps: int = 10,
    zero: dict[str, Any] | None = None,
    failures: Sequence[Failure] = (),
    dropout_on: bool = True,
    displacement: float | str = 1e-2,
    operator: str = "hessian",
    **config: Any,
) -> dict[str, Any]:
    """Train with dropout; mode "bare", "measured" (after steps 3 and 7), "inside" (a window),
    "everywhere" (before a step, and where `EVERYWHERE` says), "kronecker" (factors before a step
    and after one) or "failing" (after step 3 one that does not fail, then one with each of the
    `failures` after each of the last steps).

    Returns everything that must be bitwise the same whatever the mode, and the errors.
    """
    # The section is there in every mode: attaching must not change training either, which the
    # bare mode, made by deepspeed.initialize without it, is compared with.
    settings = {"dropout": dropout_on, "finite_difference": {"displacement": displacement}}
    settings["operator"] = operator
    section = {} if mode == "bare" else {"hessian": {**QUIET, **settings}}
    engine = make_engine(zero=zero, **section, **config)
    losses, errors = [], []
    micro_batches = my_batches(2 * dist.get_world_size())
    accumulate = engine.gradient_accumulation_steps()
    for step in range(steps):
        for k in range(accumulate):
            loss = engine(*batch(step * accumulate + k, dist.get_rank()))
            engine.backward(loss)
            if mode == "kronecker" and step == 2 and k == 0:
                kronecker(engine, micro_batches)
            if mode == "everywhere" and step == 2:
                engine.hessian_spectrum(micro_batches, num_matvecs=2)
            engine.step()
            if mode == "everywhere" and (step, k) in EVERYWHERE:
                precision = EVERYWHERE[step, k]
                engine.hessian_spectrum(micro_batches, num_matvecs=2, precision=precision)
            losses.append(loss.detach().clone())
            if mode == "inside" and step in (3, 7) and k == 0:
                engine.hessian_spectrum(micro_batches, num_matvecs=3)
        if mode == "measured" and step in (3, 7):
            engine.hessian_spectrum(micro_batches, num_matvecs=2)
        if mode == "kronecker" and step == 3:
            kronecker(engine, micro_batches)
        if mode == "failing" and step == 3:
            engine.hessian_spectrum(micro_batches, num_matvecs=2)
        if mode == "failing" and step >= steps - 1 - len(failures) and step < steps - 1:
            number = step - (steps - 1 - len(failures))
            precision = ("model", "auto")[number % 2]
            errors.append(failing_spectrum(engine, failures[number], precision))
    backend = ZeroBackend(engine)  # to find the shards of engines without a Hessian
    shards, pieces = backend.shards, backend.pieces
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    state = {
        "losses": torch.stack(losses),
        "masters": [m.clone() for m in map(shards.master, pieces) if m is not None],
        "weights": [shards.weight(piece).clone() for piece in pieces],
        "moments": [
            t.clone() for s in inner.state.values() for t in s.values() if torch.is_tensor(t)
        ],
        "random": torch.get_rng_state(),
        "buffers": [b.clone() for b in engine.module.buffers()],
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "scaler": sorted((k, v) for k, v in vars(scaler).items() if isinstance(v, (int, float)))
        if scaler is not None
        else [],
        "training": [m.training for m in engine.module.modules()],
    }
    engine.destroy()
    return {"state": state, "errors": errors}


def kronecker(engine: Any, micro_batches: list[Any]) -> None:
    """Measure EK-FAC, whose passes have no gradients of weights, of all layers."""
    hessian = engine.hessian.use(micro_batches)
    found = hessian.kronecker(["ekfac"], basis=1, probes=2, extremes=0, precision="model")
    assert len(found.layers) == 4 and found.mismatches.max() < 0.02


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested containers of tensors."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def compare_training(modes: list[dict[str, Any]]) -> tuple[list[list[str]], list[list[str]]]:
    """Train in the first mode and in each other; returns what differs, and the errors."""
    first = train(**modes[0])
    differing, errors = [], []
    for mode in modes[1:]:
        other = train(**mode)
        differing.append(
            [k for k in first["state"] if not same(first["state"][k], other["state"][k])]
        )
        errors.append(other["errors"])
    return differing, errors


# ---- variants of model, loss and batches


class Partial(nn.Module):
    """Frozen, tied and unused parameters, and a loss that is quartic in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 7)
        self.b.weight.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 11))

    def forward(self, x: Tensor) -> Tensor:
        """Scalar loss."""
        return (self.b(torch.tanh(self.a(x))) ** 2).mean() + (self.w**4).sum()


def partial_product() -> Any:
    """Weights, v and Hv of `Partial`."""
    torch.manual_seed(0)
    engine = make_engine(Partial(), hessian=QUIET)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 7, generator=generator) for _ in range(2)]
    hessian = engine.hessian.use(batches)
    v = hessian.random_vector(seed=1)
    out = (
        full_weights(engine),
        hessian.gather(v),
        hessian.gather(hessian.matvec(v).vector),
        torch.equal(hessian.scatter(hessian.gather(v)), v),
        batches,
    )
    engine.destroy()
    return out


class Sometimes(nn.Module):
    """A layer that only micro-batches of positive mean use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scalar loss."""
        hidden = torch.tanh(self.a(x))
        if x.mean() > 0:
            hidden = torch.tanh(self.b(hidden))
        return (hidden**2).mean()


def gradient_of_a_layer_used_sometimes(config: dict[str, Any]) -> Any:
    """Weights and gradient of `Sometimes`, which uses one layer in the first micro-batch alone."""
    torch.manual_seed(0)
    engine = make_engine(Sometimes(), **config, hessian=QUIET)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(4, 7, generator=generator) + shift for shift in (2.0, -2.0, -2.0)]
    hessian = engine.hessian.use(batches)
    with hessian.measuring() as operator:
        gradient = operator.gradient * operator.scale
    out = full_weights(engine), hessian.gather(gradient), batches
    engine.destroy()
    return out


def nested(config: dict[str, Any]) -> tuple[str, bool, bool]:
    """A measurement in the loss of another: the message, whether the next one has the same bits as
    the one before, and whether DeepSpeed's communication is as it was.
    """
    engine, calls = make_engine(**config, hessian=QUIET), itertools.count()
    hessian, entries = engine.hessian, my_batches(FEW)
    before, own = hessian.spectrum(entries, num_matvecs=2), dict(vars(deepspeed.comm.comm.cdb))

    def loss(model: Any, entry: Any) -> Tensor:
        if next(calls) == 1:
            hessian.trace(num_matvecs=2)
        found: Tensor = model(*entry)
        return found

    message = "no error"
    try:
        hessian.spectrum(entries, loss, num_matvecs=2)
    except HessianError as error:
        message = f"{type(error).__name__}: {error}"
    after = hessian.spectrum(entries, num_matvecs=2)
    engine.backward(engine(*entries[0]))
    engine.step()
    same = bool((before.alphas == after.alphas).all())
    left = dict(vars(deepspeed.comm.comm.cdb)) == own
    engine.destroy()
    return message, same, left


def forms_of_batches() -> list[Tensor]:
    """The same product through tuples, dicts, loss_fn, an output object, summed losses."""
    engine = make_engine(hessian=QUIET)
    hessian, pairs = engine.hessian, my_batches()
    dicts = [{"tokens": t, "targets": y} for t, y in pairs]

    class Output:
        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    def summed(model: Any, b: Any) -> tuple[Tensor, int]:
        return model(*b) * b[1].numel(), b[1].numel()

    cases: list[tuple[Any, Any]] = [
        (pairs, None),
        (dicts, None),
        (iter(pairs), lambda model, b: model(*b)),
        (pairs, summed),
    ]
    v = hessian.random_vector(seed=2)
    vectors = [hessian.use(b, f).matvec(v).vector for b, f in cases]
    engine.destroy()
    return vectors


def token_weighted() -> Any:
    """Weights, v and Hv of a loss whose micro-batches have different numbers of tokens."""
    engine = make_engine(hessian=QUIET)
    hessian = engine.hessian
    keep = 1 + 4 * dist.get_rank()

    def loss_fn(model: Any, b: Any) -> tuple[Tensor, int]:
        tokens, targets = b[0][:, :keep], b[1][:, :keep]
        return model(tokens, targets) * targets.numel(), targets.numel()

    v = hessian.random_vector(seed=3)
    product = hessian.use(my_batches(), loss_fn).matvec(v)
    loss = hessian.spectrum(num_matvecs=1).loss
    out = (full_weights(engine), hessian.gather(v), hessian.gather(product.vector), loss)
    engine.destroy()
    return out


class OneTensorGroup:
    """An mpu with all ranks in one tensor-parallel group."""

    def __init__(self) -> None:
        self.alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self.alone[dist.get_rank()]


def refused(feature: str) -> str:
    """The message with which an engine that uses the feature is refused."""
    module: nn.Module = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    config: dict[str, Any] = {**CONFIG, "zero_optimization": {"stage": 1}, "hessian": QUIET}
    arguments: dict[str, Any] = {}
    if feature == "sparse gradients":
        module[0].sparse = True
        config["zero_optimization"] = {"stage": 0}
    if feature == "parameters that share memory at stage 0":
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight.data = module[0].weight.data
        config["zero_optimization"] = {"stage": 0}
    if feature == "the engine class PipelineEngine":
        layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        module = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss())
    if feature == "an mpu with tensor-parallel ranks":
        arguments["mpu"] = OneTensorGroup()
    if feature == "sequence parallelism":
        config |= {"sequence_parallel_size": 2, "data_parallel_size": 1, "train_batch_size": 2}
        arguments["mesh_param"] = (1, 2)
    parameters: Any = module.parameters()
    if feature == "an engine without an optimizer":
        config = {k: v for k, v in config.items() if k != "optimizer"}
        config["zero_optimization"], parameters = {"stage": 3}, None
    if feature == "parameters marked as experts":
        module = nn.Sequential(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), 2, ep_size=2, k=1))
        module[0].weight.allreduce, module[0].weight.group_name = False, "ep_size_2"
        parameters = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(module.parameters()), "name": "all"}
        )
    try:
        ds_hessian.initialize(model=module, model_parameters=parameters, config=config, **arguments)
    except ds_hessian.UnsupportedError as error:
        return str(error)
    return "accepted"


def autocast_in_the_loss() -> tuple[float, str]:
    """The unit roundoff of a loss under autocast, and what is said of its fp32 passes."""
    engine = make_engine(zero={"stage": 2}, hessian=QUIET)

    def loss(model: Any, b: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*b).float()

    hessian, message = engine.hessian.use(my_batches(), loss), ""
    with hessian.measuring() as operator:
        roundoff = float(operator.session.unit_roundoff)
    try:
        hessian.matvec(hessian.random_vector(seed=1))
        with hessian.measuring(precision="fp32"):
            pass
    except ds_hessian.UnsupportedError as error:
        message = str(error)
    engine.destroy()
    return roundoff, message


class Checkpointed(nn.Module):
    """Layers whose inputs DeepSpeed keeps in contiguous memory for as many as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        """Scalar loss."""
        x = self.first(x)
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(lambda y, a=layer: torch.tanh(a(y)), x)
        return x.square().mean()


def training_on_after_a_failure_among_checkpoints() -> tuple[str, bool]:
    """The error of a measurement that fails between forward and backward, and whether the next
    step of training has a finite loss.
    """
    torch.manual_seed(0)
    keep = deepspeed.checkpointing.configure
    engine = make_engine(Checkpointed(), zero={"stage": 2}, hessian=QUIET)
    keep(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=3)

    def failing(model: Any, x: Tensor) -> Tensor:
        model(x)
        raise Broken("after its forward")

    x, message = torch.randn(4, 6), "no error"
    try:
        try:
            engine.hessian_spectrum([x], failing, num_matvecs=1)
        except HessianError as error:
            message = str(error)
        loss = engine(x)
        engine.backward(loss)
        engine.step()
    finally:
        deepspeed.checkpointing.reset()
        keep(None, partition_activations=False, contiguous_checkpointing=False)
    engine.destroy()
    return message, bool(torch.isfinite(loss.detach()))


def after_destroy(config: dict[str, Any]) -> tuple[str, str]:
    """The messages for a measurement of an engine after its `destroy()`, and of its module."""
    engine = make_engine(hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches())
    engine.destroy()
    found = []
    module = engine.module
    for call in (hessian.spectrum, hessian.memory_plan, lambda: ds_hessian.attach(module)):
        try:
            call()
        except HessianError as error:
            found.append(str(error))
    assert found[0] == found[1]
    return found[0], found[-1]


def in_a_backward(config: dict[str, Any]) -> tuple[str, bool]:
    """The message for a measurement in a hook of training's backward, and whether training has
    ended with the same weights as without.
    """
    said, ends = "measured", []
    for measures in (False, True):
        engine = make_engine(hessian=QUIET, **config)
        hessian = engine.hessian.use(my_batches())

        def hook(_: Tensor, measures: bool = measures, hessian: Any = hessian) -> None:
            nonlocal said
            if measures and not FixedFunction.is_evaluated():
                try:
                    hessian.matvec(hessian.random_vector(seed=5))
                except HessianError as error:
                    said = str(error)

        next(engine.module.parameters()).register_hook(hook)
        engine.backward(engine(*batch(0, dist.get_rank())))
        engine.step()
        ends.append([hessian.backend.shards.weight(p).clone() for p in hessian.backend.pieces])
        engine.destroy()
    return said, all(map(torch.equal, *ends))


def taken_over(config: dict[str, Any]) -> list[str]:
    """The messages for an engine of whose module another one has been made, as it is measured and
    as it is attached.
    """
    old = make_engine(hessian=QUIET, **config)
    hessian = old.hessian.use(my_batches())
    other = make_engine(old.module, **config)
    found = []
    for call in (lambda: hessian.matvec(hessian.random_vector(seed=5)), lambda: hessian_of(old)):
        try:
            call()
        except HessianError as error:
            found.append(str(error))
    other.destroy()
    return found


def changed_since(stage: int, how: str) -> str:
    """The message for a parameter that one rank has frozen, or replaced by another of its name and
    shape, since the micro-batches were chosen.
    """
    engine = make_engine(zero={"stage": stage}, hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    if dist.get_rank() == 0 and how == "frozen":
        next(engine.module.parameters()).requires_grad_(False)
    elif dist.get_rank() == 0:
        engine.module.position = nn.Parameter(engine.module.position.detach().clone())
    try:
        hessian.matvec(hessian.random_vector(seed=5))
    except HessianError as error:
        return str(error)
    finally:
        engine.destroy()
    return "measured"


def schedule_of_dropped_tokens(stage: int) -> tuple[Any, Any]:
    """The state of random-LTD's schedule after a step, and after a product then."""
    schedule = {"min_value": 2, "max_value": 6, "schedule_type": "fixed_linear"}
    schedule["schedule_config"] = {"require_steps": 4, "seq_per_step": 1}
    layers = {"total_layer_num": 2, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0]}
    kind = {"model_mask_name": None, "model_type": "decoder", "hidden_state_order": "batch_seq_dim"}
    ltd = {"enabled": True, **layers, **kind, "random_ltd_schedule": schedule}
    routing = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}
    engine = make_engine(zero={"stage": stage}, hessian=QUIET, data_efficiency=routing)
    engine.backward(engine(*batch(0, dist.get_rank())))
    engine.step()
    before = dict(engine.random_ltd_scheduler.state)
    hessian = engine.hessian.use(my_batches())
    hessian.matvec(hessian.random_vector(seed=5))
    after = dict(engine.random_ltd_scheduler.state)
    engine.destroy()
    return before, after


def without_some(stage: int) -> Any:
    """(number of coordinates, a vector's parts, preconditioned sharpness) where the optimizer has
    all parameters but one.
    """
    torch.manual_seed(0)
    module = TinyGPT()
    given = [p for p in module.parameters() if p is not module.position]
    adam = torch.optim.Adam(given)
    engine = make_engine(module, zero={"stage": stage}, client=adam, hessian=QUIET)
    engine.backward(engine(*batch(0, dist.get_rank())))
    engine.step()
    hessian = engine.hessian.use(my_batches())
    v = hessian.gather(hessian.random_vector(seed=5))
    found = hessian.backend.space.n, v, hessian.sharpness(max_matvecs=4).preconditioned.value
    engine.destroy()
    return found


def frozen_before_attaching(stage: int) -> Any:
    """A product where a parameter was frozen after, and one where it was before the engine."""
    found = []
    for before in (False, True):
        torch.manual_seed(0)
        module = TinyGPT()
        module.position.requires_grad_(not before)
        engine = make_engine(module, zero={"stage": stage})
        module.position.requires_grad_(False)
        hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
        v = hessian.use(my_batches()).random_vector(seed=5)
        with hessian.measuring(displacement=1e-2):
            found.append(hessian.gather(hessian.matvec(v).vector))
        engine.destroy()
    return found


def on_schedule(folder: str) -> tuple[list[int], list[int], list[int], bool]:
    """Train 7 steps with spectra every 3 and sharpness every 2, with DeepSpeed's CSV monitor.

    Returns the steps of spectra, of sharpness, of failures, and whether the data were fixed.
    """
    section = {**QUIET, "interval": 3, "num_matvecs": 3, "num_micro_batches": 2}
    engine = make_engine(
        zero={"stage": 1},
        hessian={**section, "sharpness_interval": 2, "output_path": f"{folder}/out"},
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "events"},
    )
    for step in range(7):
        loss = engine(*batch(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
    schedule = engine.hessian_schedule
    records = [*schedule.spectra.values(), *schedule.sharpness.values()]
    prints = {record.provenance.data_fingerprint for record in records}
    steps = map(list, (schedule.spectra, schedule.sharpness, schedule.failures))
    out = (*steps, len(prints) == 1)
    engine.destroy()
    return out


def without_section() -> list[str]:
    """Attributes that `initialize` added to an engine whose config has no section."""
    engine = make_engine()
    added = [n for n in ("hessian", "hessian_spectrum", "hessian_schedule") if n in vars(engine)]
    engine.destroy()
    return added


# ---- every stage and dtype


def product_in_both_precisions(config: dict[str, Any]) -> Any:
    """Of an engine, as the model computes and on fp32 copies: products and 3 Lanczos steps."""
    engine = make_engine(hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches(FEW))
    v = hessian.random_vector(seed=5)
    products, coefficients = [], []
    for precision in ("model", "fp32"):
        with hessian.measuring(precision=precision):
            products.append(hessian.matvec(v))
        spectrum = hessian.spectrum(num_matvecs=3, precision=precision)
        coefficients.append((spectrum.alphas[0], spectrum.betas[0]))
    out = (
        full_weights(engine),
        hessian.gather(v),
        [hessian.gather(p.vector) for p in products],
        [(p.error, p.fidelity, p.displacement) for p in products],
        coefficients,
    )
    engine.destroy()
    return out


def bf16_spectra(stage: int, steps: int) -> Any:
    """Master weights and 20-step spectra in both precisions of a bf16 engine after training."""
    engine = make_engine(hessian=QUIET, bf16={"enabled": True}, zero_optimization={"stage": stage})
    for step in range(steps):
        engine.backward(engine(*batch(step, dist.get_rank())))
        engine.step()
    spectra = [
        engine.hessian_spectrum(my_batches(), num_matvecs=20, precision=precision)
        for precision in ("model", "fp32")
    ]
    out = (full_weights(engine), spectra)
    engine.destroy()
    return out


class Huge(nn.Module):
    """A weight of 1e8 elements, of the size and the curvature of a layer's."""

    def __init__(self, rows: int = 10_000, columns: int = 10_000) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns).normal_(0, 0.02))

    def forward(self, x: Tensor) -> Tensor:
        """Scalar loss."""
        return functional.linear(x, self.weight).float().square().mean()


def huge_spectrum(displacement: float) -> tuple[Any, ...]:
    """(fidelities, warnings) of one product of a bf16 engine with 1e8 weights."""
    engine = make_engine(
        Huge(),
        hessian=QUIET,
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
        optimizer={"type": "SGD", "params": {"lr": 1e-2}},
        zero_allow_untested_optimizer=True,
    )
    x = torch.randn(1, 10_000, dtype=torch.bfloat16)
    finite_difference = {"displacement": displacement, "precision": "model"}
    spectrum = engine.hessian_spectrum([(x,)], num_matvecs=1, finite_difference=finite_difference)
    engine.destroy()
    return spectrum.fidelities, spectrum.warnings


# ---- analyses


def analyse(path: str, stage: int) -> tuple[Any, ...]:
    """Weights and records of every analysis of an untrained TinyGPT; vectors as whole tensors."""
    engine = make_engine(zero={"stage": stage}, hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    pairs = hessian.eigenpairs(3, "LM", max_matvecs=60)
    traces = [hessian.trace("hutchinson", 6, blocks="parameters"), hessian.trace("xtrace", 12)]
    b = hessian.random_vector(seed=9)
    solution = hessian.solve(b, [12.0, 30.0], "minres", num_matvecs=30)
    indefinite = hessian.solve(b, [1.0], "cg", num_matvecs=6)
    coupling = hessian.block_coupling("parameters")
    share = hessian.off_block_share("parameters", num_probes=2)
    hessian.save_vectors(pairs.vectors, path, {"values": pairs.values.tolist()})
    reloaded = torch.equal(hessian.load_vectors(path), pairs.vectors)
    records = hessian.save(pairs, Path(path).parent / "records")
    again = hessian.load(type(pairs), hessian.save(solution, records))
    reloaded &= torch.equal(again.vectors, pairs.vectors) and (again.values == pairs.values).all()
    vectors = [hessian.gather(v) for v in pairs.vectors]
    solved = [hessian.gather(x) for x in solution.x]
    v0 = hessian.gather(hessian.random_vector(seed=0))
    weights = full_weights(engine)
    records = (pairs, *traces, solution, indefinite, coupling, share)
    figures = [
        {k: f for k, f in vars(r).items() if not torch.is_tensor(f) and k != "provenance"}
        for r in records
    ]
    out = (weights, figures, vectors, hessian.gather(b), solved, v0, reloaded)
    engine.destroy()
    return out


def sampled() -> tuple[Any, ...]:
    """Weights, top eigenvector and first probe in full, their records with errors of sampling."""
    engine = make_engine(hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    pairs = hessian.eigenpairs(1, "LA", sampling=True)
    spectrum = hessian.spectrum(num_matvecs=20, sampling=True)
    vectors = [hessian.gather(v) for v in (pairs.vectors[0], hessian.random_vector())]
    out = (full_weights(engine), *vectors, pairs.sampling_errors, spectrum)
    engine.destroy()
    return out


def spectra_of_settings(settings: list[dict[str, Any]]) -> list[Any]:
    """Spectra of an untrained TinyGPT by its configuration, one for each."""
    found = []
    for section in settings:
        engine = make_engine(hessian={**QUIET, "num_matvecs": 8, **section})
        found.append(engine.hessian_spectrum(my_batches()))
        engine.destroy()
    return found


class Experts(nn.Module):
    """Two experts, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        """The sum of the used experts."""
        return sum(torch.tanh(self.inner[i](x)) for i in used)


class Routed(nn.Module):
    """A linear layer, experts, and a squared loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(7, 5), Experts()

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        """Scalar loss."""
        return (self.experts(self.first(x), used) ** 2).mean()


def leaf_product() -> Any:
    """Weights, v, Hv and batches of `Routed`, whose experts are a leaf and used by some ranks."""
    torch.manual_seed(0)
    module = Routed()
    deepspeed.utils.set_z3_leaf_modules(module, [Experts])
    engine = make_engine(module, hessian=QUIET)
    generator = torch.Generator().manual_seed(dist.get_rank())
    used = [((0,), (0,)), ((0, 1), (1,)), ((0,), (0, 1))][dist.get_rank()]
    batches = [(torch.randn(4, 7, generator=generator), use) for use in used]
    hessian = engine.hessian.use(batches)
    v = hessian.random_vector(seed=1)
    product = hessian.gather(hessian.matvec(v).vector)
    out = (full_weights(engine), hessian.gather(v), product, batches)
    engine.destroy()
    return out


CALLS = itertools.count(1)


class Restless(nn.Module):
    """A loss that depends on how often it was computed: no function of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyGPT()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Scalar loss."""
        return self.inner(tokens, targets) * (1 + 0.01 * (next(CALLS) % 7))


def self_tests(module: nn.Module | None, config: dict[str, Any], overrides: dict[str, Any]) -> Any:
    """The verdict of a self-test, and whether it is the same on all ranks."""
    engine = make_engine(module, hessian=QUIET, **config)
    verdict = engine.hessian.self_test(my_batches(), **overrides)
    engine.destroy()
    return verdict


def followed_callers(stage: int) -> dict[str, int]:
    """How often each of DeepSpeed's files calls torch under the mode in the first gradient."""
    engine, called = make_engine(zero_optimization={"stage": stage}), Counter[str]()
    follow = FixedFunction.__torch_function__

    def noting(self: Any, func: Any, *rest: Any) -> Any:
        frame: Any = sys._getframe(1)
        while "/torch/" in frame.f_code.co_filename:
            frame = frame.f_back
        called[frame.f_code.co_filename.partition("/deepspeed/")[2]] += 1
        return follow(self, func, *rest)

    backend = ZeroBackend(engine)
    with (
        mock.patch.object(FixedFunction, "__torch_function__", noting),
        backend.measuring(backend.objective(my_batches())) as session,
    ):
        session.add_gradient(session.space.zeros(), range(session.num_micro_batches))
    engine.destroy()
    return dict(called)


def scaled_losses(stage: int) -> tuple[float, float]:
    """`of_scaled_loss` of an engine."""
    engine = make_engine(zero_optimization={"stage": stage})
    backend = ZeroBackend(engine)
    with backend.measuring(backend.objective(my_batches())) as session:
        found = of_scaled_loss(session)
    engine.destroy()
    return found


def measured_at(accumulation: int) -> list[int]:
    """The steps of the measurements of a schedule, where several micro-batches make a step."""
    section = {**QUIET, "interval": 1, "num_matvecs": 1, "num_micro_batches": 1}
    engine = make_engine(hessian=section, gradient_accumulation_steps=accumulation)
    schedule, steps = engine.hessian_schedule, list[int]()
    take = schedule.take

    def noting(kind: Any, step: int, *rest: Any) -> Any:
        steps.append(step)
        return take(kind, step, *rest)

    schedule.take = noting
    for number in range(2 * accumulation + 1):
        engine.backward(engine(*batch(number, dist.get_rank())))
        engine.step()
    assert schedule.failures == {}
    engine.destroy()
    return steps


def monitored(output: str, tools: dict[str, Any], offline: str = "") -> dict[int, Any]:
    """Five steps with spectra after two of them, told to DeepSpeed's monitor; the spectra.

    Tools that send what they get to a server leave it in the folder `offline`.
    """
    if offline:
        os.environ.update(WANDB_MODE="offline", WANDB_DIR=offline, WANDB_SILENT="true")
        os.environ.update(COMET_OFFLINE_DIRECTORY=offline)
    section = {
        "interval": 2,
        "num_matvecs": 3,
        "num_probes": 2,
        "num_micro_batches": 2,
        "progress": False,
        "output_path": output,
    }
    engine = make_engine(zero={"stage": 1}, hessian=section, **tools)
    for number in range(5):
        engine.backward(engine(*batch(number, dist.get_rank())))
        engine.step()
    assert engine.hessian_schedule.failures == {}
    if "wandb" in tools and dist.get_rank() == 0:
        import wandb

        wandb.finish()
    if "comet" in tools and dist.get_rank() == 0:
        engine.monitor.comet_monitor.experiment.end()
    engine.destroy()
    return engine.hessian_schedule.spectra


def load_elsewhere(path: str) -> Any:
    """The vectors of a file as whole tensors, in this layout; and how a record is loaded."""
    engine = make_engine(zero={"stage": 1}, hessian=QUIET)
    hessian, records = engine.hessian, Path(path).parent / "records"
    vectors = hessian.load_vectors(path)
    loaded = [hessian.gather(v) for v in vectors]
    same = torch.equal(hessian.load(HessianEigenpairs, records).vectors, vectors)
    mixed = records.parent / f"mixed{hessian.backend.space.world_size}"
    if hessian.rank == 0:
        shutil.copytree(records, mixed)
        shutil.copy(mixed / "eigenpairs.safetensors", mixed / "solution.safetensors")
    try:
        hessian.load(HessianSolution, mixed)
        error = ""
    except HessianError as failure:
        error = str(failure)
    engine.destroy()
    return loaded, same, error


# ---- sharpness and influence


def _train(engine: Any, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*batch(step, dist.get_rank())))
        engine.step()


def adam_state(config: dict[str, Any], fused: bool = False) -> Any:
    """(refusals before any step, weights before and after the last step, D, step, v, t, decay)."""
    # DeepSpeed then wraps any optimizer as it does its FusedAdam, which does not run on CPU.
    any_kind = mock.patch.object(deepspeed.runtime.engine, "FusedAdam", torch.optim.Optimizer)
    with any_kind if fused else nullcontext():
        engine = make_engine(hessian=QUIET, **config)
    assert not fused or hasattr(engine.optimizer, "fp32_groups_flat")
    hessian = engine.hessian.use(my_batches())
    b, refusals = hessian.random_vector(), []
    for request in (
        lambda: hessian.solve(b, [1.0], preconditioner="adam"),
        lambda: hessian.solve(b, [1.0], preconditioner="sgd"),
        lambda: hessian.sharpness(max_matvecs=3),
    ):
        try:
            request()
        except ds_hessian.ConfigError as error:
            refusals.append(str(error))
    _train(engine, range(3))
    before = full_weights(engine)
    _train(engine, range(3, 4))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    settings = inner.param_groups[0]
    decay = settings["lr"] * settings["weight_decay"]
    settings["lr"] /= 2  # as a scheduler does after the step
    divisor, step = (hessian.gather(v) for v in hessian.backend.adam())
    squares = {
        name: deepspeed.utils.safe_get_full_optimizer_state(p, "exp_avg_sq")
        for name, p in engine.module.named_parameters()
    }
    steps = {float(state["step"]) for state in inner.state.values() if state}
    out = (refusals, before, full_weights(engine), divisor, step, squares, steps, decay)
    engine.destroy()
    return out


def adam_beside() -> Any:
    """(weights before and after a step, the step that is read, tensors of the other optimizer).

    Another optimizer steps half of the sub-groups, as DeepSpeed has it for an offload with a
    `ratio` below 1; it makes one for its own CPUAdam and an accelerator alone.
    """
    settings = {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}
    zero = {"stage": 3, "sub_group_size": 400, "offload_optimizer": {"device": "cpu"}}
    engine = make_engine(zero=zero, optimizer={"type": "Adam", "params": settings})
    devices = engine.optimizer.subgroup_to_device
    beside = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1e-2)
    engine.optimizer.backup_optimizer = beside
    devices.update({i: "cpu:0" for i in range(len(devices) // 2)})  # which is none of its CPU
    hessian = ds_hessian.attach(engine, QUIET)
    _train(engine, range(3))
    before = full_weights(engine)
    _train(engine, range(3, 4))
    out = (before, full_weights(engine), hessian.gather(hessian.backend.adam()[1]))
    engine.destroy()
    return *out, len(beside.state)


def sharpness_in_training(stage: int, rounds: int, between: int, lr: float, **limits: Any) -> Any:
    """[(weights, D, step, record)] of a training with measurements; then one solve, and b."""
    optimizer = {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}
    engine = make_engine(zero={"stage": stage}, hessian=QUIET, optimizer=optimizer)
    hessian = engine.hessian.use(my_batches())
    _train(engine, range(20))
    found = []
    for number in range(rounds):
        record = hessian.sharpness(**limits)
        state = [hessian.gather(v) for v in hessian.backend.adam()]
        found.append((full_weights(engine), *state, record))
        _train(engine, range(20 + number * between, 20 + (number + 1) * between))
    weights, b = full_weights(engine), hessian.random_vector(seed=9)
    divisor = hessian.gather(hessian.backend.adam()[0])
    solution = hessian.solve(b, [12.0], num_matvecs=30, preconditioner="adam")
    plain = hessian.sharpness(preconditioned=False)
    solved = (weights, divisor, hessian.gather(b), hessian.gather(solution.x[0]), solution.errors)
    engine.destroy()
    return found, solved, plain


def sharpness_of_other_numbers() -> Any:
    """(warm, value) of two calls, whose losses have another number than before on one rank."""
    engine = make_engine(hessian=QUIET)
    hessian, found = engine.hessian, []

    def noting(number: int) -> Any:
        def loss(model: Any, entry: Any) -> Any:
            return model(*entry) + 0 * number

        return loss

    for number in (0, dist.get_rank()):
        hessian.use(my_batches(2), noting(number))
        record = hessian.sharpness(preconditioned=False)
        found.append((record.warm, record.eigenvalue_max.value))
    engine.destroy()
    return found


def influences(damping: float) -> Any:
    """Weights and record of the first 3 micro-batches on a query of 2, on a trained TinyGPT."""
    engine = make_engine(hessian=QUIET)
    hessian = engine.hessian.use(my_batches())
    _train(engine, range(6))
    before = full_weights(engine)
    query = [batch(700 + dist.get_rank(), 0)]
    examples = [batch(500 + i, 0) for i in range(3)]
    found = hessian.influence(query, examples, [damping, 4 * damping], num_matvecs=40)
    kept = hessian._objective.num_micro_batches == len(my_batches())
    kept &= same(before, full_weights(engine))
    refusals = []
    for wrong in (([], examples), (query, examples[: 1 + dist.get_rank()])):
        try:
            hessian.influence(*wrong, [damping])
        except ds_hessian.ConfigError as error:
            refusals.append(str(error))
    engine.destroy()
    return before, found, kept, refusals


class Logistic(nn.Module):
    """Logistic regression; the mean loss of (x, y)."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(weights.float())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scalar loss."""
        return nn.functional.binary_cross_entropy_with_logits(x @ self.w, y)


def influences_at(weights: Tensor, query: Any, examples: list[Any], damping: float) -> Any:
    """Scores at given weights; every rank has all examples, which also define H."""
    engine = make_engine(Logistic(weights), hessian=QUIET)
    hessian = engine.hessian.use(examples)
    found = hessian.influence([query], examples, [damping], method="cg", num_matvecs=10)
    engine.destroy()
    return found


def random_states_after_reading() -> bool:
    """Whether giving a shuffling loader to an engine's Hessian has moved torch's generator."""
    engine = make_engine(hessian=QUIET)
    data = [batch(500 + i, 0) for i in range(4)]
    before = torch.get_rng_state()
    engine.hessian.use(torch.utils.data.DataLoader(data, batch_size=None, shuffle=True))
    moved = not torch.equal(before, torch.get_rng_state())
    engine.destroy()
    return moved
