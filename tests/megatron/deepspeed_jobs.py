"""What runs on the ranks: DeepSpeed engines that are given megatron-core's mesh as their mpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.megatron.job import (
    QUIET,
    Broken,
    FailingBackward,
    Job,
    Stored,
    build,
    fill,
    gpt,
    groups_of,
    hessian_of,
    micro_batches,
    model_config,
    my_batches,
    same,
    stored,
    token_losses,
)

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}


class Mesh:
    """`parallel_state` as DeepSpeed asks for it, by names that megatron-core has since given up and
    Megatron-DeepSpeed's own copy of it still has.
    """

    def __getattr__(self, name: str) -> Any:
        from megatron.core import parallel_state

        return getattr(parallel_state, name.replace("get_model_", "get_tensor_model_"))

    def get_model_parallel_group(self) -> Any:
        """Tensor and pipeline ranks together."""
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group()


def make_engine(job: Job, stage: int, mpu: Any, **config: Any) -> Any:
    """An engine with a GPT of megatron-core."""
    import deepspeed

    model = gpt(job, model_config(job))
    fill([model])
    torch.manual_seed(1234)
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**CONFIG, "zero_optimization": {"stage": stage}, **config},
        mpu=mpu,
    )[0]


def make_loss(job: Job) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """The mean loss of a micro-batch."""
    return lambda model, batch: token_losses(model, batch, job).float().mean()


@contextmanager
def groups_for_engines(job: Job) -> Iterator[None]:
    """Megatron's process groups, and none left of DeepSpeed's, which keeps them for the process."""
    from deepspeed.utils import groups

    with groups_of(job):
        try:
            yield
        finally:
            groups.mpu = groups._WORLD_GROUP = None


def spectra(stage: int) -> list[Any]:
    """Of one GPT: under ZeRO without an mpu and with megatron-core's mesh, and in Megatron's own
    data parallelism.
    """
    import ds_hessian

    job, found = Job(), []
    with groups_for_engines(job):
        for mpu in (None, Mesh()):
            engine = make_engine(job, stage, mpu)
            hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
            found.append(hessian.spectrum(my_batches(), make_loss(job), num_matvecs=8))
            engine.destroy()
        return [*found, hessian_of(build(job), job).spectrum(num_matvecs=8)]


# ---- tensor parallelism


def measured(
    job: Job, stage: int, num_matvecs: int = 3, precision: str = "model", **config: Any
) -> tuple[Stored, Stored, Any, bool, bool, float]:
    """v, product, spectrum, whether weights came back and products repeat bitwise, <v, v>."""
    import ds_hessian

    with groups_for_engines(job):
        engine = make_engine(job, stage, Mesh(), **config)
        settings = {**QUIET, "finite_difference": {"precision": precision}}
        hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(settings))
        hessian.use(my_batches(), make_loss(job))
        backend = hessian.backend
        before = state_of(engine, backend)
        v = hessian.random_vector(seed=5)
        displacement = 0.5 if "bf16" in config and precision == "model" else 2e-2
        with hessian.measuring(displacement=displacement):
            product, again = hessian.matvec(v).vector, hessian.matvec(v).vector
        spectrum = hessian.spectrum(num_matvecs=num_matvecs)
        found = (
            stored(backend, v),
            stored(backend, product),
            spectrum,
            same(before, state_of(engine, backend)),
            torch.equal(product, again),
            hessian.dot(v, v),
        )
        engine.destroy()
        return found


def state_of(engine: Any, backend: Any) -> list[Any]:
    """All that later steps depend on."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    shards, pieces = backend.shards, backend.pieces
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return [
        [shards.weight(piece).clone() for piece in pieces],
        [m.clone() for m in map(shards.master, pieces) if m is not None],
        [t.clone() for s in inner.state.values() for t in s.values() if torch.is_tensor(t)],
        [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()],
        [m.training for m in engine.module.modules()],
    ]


def reference(v: dict[str, Tensor], rounded: bool = False) -> dict[str, Tensor]:
    """H v by double backward of the unsharded model in fp64, `{name: flat tensor}`; at the weights,
    or at those that a bf16 engine has for its masters.
    """
    job = Job(dtype="float64")
    with groups_for_engines(job):
        model = gpt(job, model_config(job)).eval()
        fill([model])
        if rounded:
            for p in model.parameters():
                p.data = p.data.bfloat16().double()
        losses = [token_losses(model, batch, job).mean() for batch in micro_batches()]
        names, parameters = zip(*model.named_parameters(), strict=True)
        loss = torch.stack(losses).mean()
        gradient = torch.autograd.grad(loss, parameters, create_graph=True)
        along = [v[name].view(p.shape) for name, p in zip(names, parameters, strict=True)]
        product = torch.autograd.grad(gradient, parameters, along)
        return {name: t.reshape(-1) for name, t in zip(names, product, strict=True)}


def places_by_checkpoint() -> tuple[int, list[str]]:
    """How many parameters' places by the attributes of Megatron's layers were compared with their
    places by the sharded state dict, and which differ.
    """
    from ds_hessian.backends.megatron import host
    from ds_hessian.backends.megatron.runs import fragment_of
    from ds_hessian.backends.zero.tensor_parallel import place

    job, differing = Job(tp=2), []
    with groups_of(job):
        from megatron.core import parallel_state

        model = gpt(job, model_config(job))
        rank = parallel_state.get_tensor_model_parallel_rank()
        names = {id(p): name for name, p in model.named_parameters()}
        index = {
            i: torch.full((p.numel(),), -1) for i, p in zip(names, model.parameters(), strict=True)
        }
        expected: dict[int, tuple[Tensor, torch.Size, bool]] = {}
        for p, offset, tensor in host.sharded_tensors(model):
            fragment = fragment_of(tensor, 0, tensor.data.numel(), True)
            index[id(p)][offset : offset + fragment.numel] = fragment.index()
            expected[id(p)] = index[id(p)], fragment.shape, not any(tensor.replica_id)
        for p in model.parameters():
            name = names[id(p)]
            placement = place(name, p, p.shape, rank, 2)
            runs = [f for _, f in placement.fragments(name, 0, p.numel(), True)]
            found = torch.cat([f.index() for f in runs]), placement.shape, runs[0].owned
            if not all(map(same, found, expected[id(p)])):
                differing.append(name)
        return len(names), differing


def train(job: Job, stage: int, measure: str, steps: int = 2, **config: Any) -> tuple[Any, Any]:
    """What must be the same whatever is measured, and the errors of measurements.

    Args:
        job: The layout.
        stage: Of ZeRO.
        measure: "" for none, "spectrum" after every step, or where one after step 0 fails on the
            last rank alone: "batch", "forward", "loss", "backward".
        steps: Optimizer steps.
        config: Of DeepSpeed.
    """
    import ds_hessian
    from ds_hessian.backends.zero import ZeroBackend

    with groups_for_engines(job):
        engine = make_engine(job, stage, Mesh(), **config)
        if measure:
            settings = ds_hessian.HessianConfig.parse({**QUIET, "dropout": True})
            hessian = ds_hessian.attach(engine, settings)
            hessian.use(my_batches(), make_loss(job))
        losses, errors = [], []
        for step in range(steps):
            for batch in my_batches():
                loss = make_loss(job)(engine, batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach().clone())
            if measure == "spectrum":
                hessian.spectrum(num_matvecs=1)
            elif measure and step == 0:
                errors.append(failing_spectrum(hessian, job, measure))
        state = [losses, *state_of(engine, ZeroBackend(engine))]
        engine.destroy()
        return state, errors


def compare_training(
    job: Job, stage: int, measures: list[str], **config: Any
) -> list[tuple[list[int], list[str]]]:
    """For each of `measures`, which parts of the state differ from training without, and errors."""
    bare, out = train(job, stage, "", **config)[0], []
    for measure in measures:
        state, errors = train(job, stage, measure, **config)
        differing = [i for i, (a, b) in enumerate(zip(bare, state, strict=True)) if not same(a, b)]
        out.append((differing, errors))
    return out


def failing_spectrum(hessian: Any, job: Job, stage: str) -> str:
    """A spectrum whose second evaluation fails on the last rank, as text."""
    import ds_hessian

    inner, last, calls = make_loss(job), dist.get_rank() == dist.get_world_size() - 1, [0]

    def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
        calls[0] += 1
        broken = last and calls[0] == 2
        if broken and stage == "batch":
            raise Broken("on purpose")

        def inside(_: Any, __: Any, output: Any) -> Any:
            if broken and stage == "forward":
                raise Broken("on purpose")
            if broken and stage == "backward":
                return FailingBackward.apply(output)
            return output

        handle = model.module.decoder.layers[1].mlp.linear_fc2.register_forward_hook(
            lambda m, i, output: (inside(m, i, output[0]), *output[1:])
        )
        try:
            loss = inner(model, batch)
        finally:
            handle.remove()
        if broken and stage == "loss":
            raise Broken("on purpose")
        return loss

    try:
        hessian.spectrum(my_batches(), loss_fn, num_matvecs=2)
    except ds_hessian.HessianError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        hessian.use(my_batches(), inner)
    return "no error"


def refusal(name: str) -> str:
    """The message for one thing that is wrong with a job of two tensor-parallel (or pipeline) ranks
    or with its measurement.
    """
    import ds_hessian
    from ds_hessian.backends.zero import tensor_parallel

    job = {"pipeline": Job(pp=2), "experts": Job(tp=2, etp=2, experts=2, bias=False)}.get(
        name, Job(tp=2)
    )
    with groups_for_engines(job):
        engine = make_engine(job, 1, Mesh())
        layers, rank = engine.module.decoder.layers[0], dist.get_rank()
        for p in engine.module.parameters():
            p.sequence_parallel = name == "sequence"
            p.tensor_model_parallel = tensor_parallel.is_split(p) and name != "unmarked"
            if name == "gate":
                p.partition_stride = 1
        if name == "strange":
            layers.mlp.linear_fc2.weight.partition_stride = 2

        def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
            partial = engine.module.decoder.final_layernorm.weight.sum() * rank
            return make_loss(job)(model, batch) + 0.1 * partial * (name == "partial")

        try:
            hessian = ds_hessian.attach(engine, ds_hessian.HessianConfig.parse(QUIET))
            hessian.use(micro_batches()[rank * (name == "batches") :][:2], loss_fn)
            hessian.spectrum(num_matvecs=2)
        except ds_hessian.HessianError as error:
            return str(error)
        finally:
            engine.destroy()
    return "accepted"
