"""What runs on the ranks: routers, analyses, and jobs that were measured wrongly or not at all."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.megatron.job import (
    QUIET,
    SEQUENCE,
    SIZE,
    SIZES,
    VOCABULARY,
    Job,
    Stored,
    build,
    chain,
    fill,
    groups_of,
    hessian_of,
    make_forward_step,
    make_optimizer,
    micro_batches,
    my_batches,
    reference,
    run_schedule,
    running,
    stored,
    token_losses,
    wrap,
)


def automatic(job: Job, context: str = "") -> tuple[Stored, Stored, float, tuple[int, float], Any]:
    """v, product, its estimated error, `(choices, flips)`, and the forwards of a layer."""
    with running(job) as chunks:
        from ds_hessian.backends.megatron.host import unwrap

        hessian, forwards = hessian_of(chunks, job), [0]
        layers = [unwrap(chunk).decoder.layers[0] for chunk in chunks]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
        v = hessian.random_vector(seed=5)
        contexts = {"": torch.enable_grad, "no_grad": torch.no_grad, "no_sync": chunks[0].no_sync}
        with contexts[context](), hessian.measuring() as operator:
            product = hessian.matvec(v)
        of = [stored(hessian.backend, x) for x in (v, product.vector)]
        cost = operator.cost
        evaluations = (cost.gradient_evaluations + 1) * len(my_batches()) * len(chunks)
        return *of, product.error, (cost.choices, cost.flips), forwards[0] / evaluations


def runs_of_products(job: Job, products: int) -> list[tuple[int, int, int]]:
    """How many runs of the schedule, reductions and gathers each of some products makes."""
    from ds_hessian.backends.megatron import host
    from ds_hessian.backends.megatron.reductions import Reductions

    places = [(host, "run_schedule"), (Reductions, "make"), (host, "gather_parameters")]
    with running(job) as chunks:
        hessian, found = hessian_of(chunks, job), list[tuple[int, int, int]]()
        vectors = [hessian.random_vector(seed=seed) for seed in range(products)]
        with hessian.measuring(), contextlib.ExitStack() as stack:
            calls = [
                stack.enter_context(
                    mock.patch.object(place, name, autospec=True, side_effect=getattr(place, name))
                )
                for place, name in places
            ]
            for v in vectors:
                before = [call.call_count for call in calls]
                hessian.matvec(v)
                runs, reduced, gathered = (
                    call.call_count - b for call, b in zip(calls, before, strict=True)
                )
                found.append((runs, reduced, gathered))
        return found


def choices_in_bf16(job: Job) -> tuple[int, float, bool]:
    """Held choices, how many would have flipped, and whether the products are symmetric."""
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        u, v = (hessian.random_vector(seed=seed) for seed in (1, 2))
        with hessian.measuring(displacement=1.0) as operator:
            hu, hv = hessian.matvec(u), hessian.matvec(v)
        size = hu.norm * hv.norm
        difference = abs(hessian.dot(u, hv.vector) - hessian.dot(v, hu.vector))
        return operator.cost.choices, operator.cost.flips, difference < 0.1 * size**0.5


def as_trained(job: Job) -> tuple[float, float, float]:
    """How far gradient and product are from what Megatron's own steps find in the same layout, in
    fp64, and the estimated error of the product.
    """
    gradient, exact = _trained(replace(job, dtype="float64"))
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        space = hessian.backend.space
        with hessian.measuring() as operator:
            product = hessian.matvec(hessian.random_vector(seed=5))
            found = operator.gradient * operator.session.gradient_scale
            pairs = (found, gradient), (product.vector, exact)
            far = [space.norm(a - b) / space.norm(b) for a, b in pairs]
        return far[0], far[1], product.error


def _trained(job: Job) -> tuple[Tensor, Tensor]:
    """Gradient and product of this rank by Megatron's own steps."""
    with running(job) as chunks:
        backend, found = (hessian := hessian_of(chunks, job)).backend, []
        v = hessian.random_vector(seed=5)
        for h in (0.0, 1e-5, -2e-5):  # from the weights before
            for run, (_, part) in zip(backend.runs, backend.layout, strict=True):
                run.weight.add_(v[part], alpha=h)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            run_schedule(job, chunks, my_batches())
            found.append(torch.cat([run.gradient.clone() for run in backend.runs]))
        return found[0].float(), ((found[1] - found[2]) / 2e-5).float()


def with_and_without_recomputation(job: Job) -> tuple[list[bool], list[int]]:
    """Whether products of H and G have the same bits with what the job recomputes and without, and
    how often modules are called in either.
    """
    products, calls = [], []
    for each in (job, replace(job, selective=())):
        with running(each) as chunks:
            hessian, count = hessian_of(chunks, each), [0]
            for module in (m for chunk in chunks for m in chunk.modules()):
                module.register_forward_pre_hook(
                    lambda *_, count=count: count.__setitem__(0, count[0] + 1)
                )
            v, vectors = hessian.random_vector(seed=5), []
            for operator in ("hessian", "ggn"):
                with hessian.measuring(operator=operator):
                    vectors.append(hessian.matvec(v).vector)
        products.append(vectors)
        calls.append(count[0])
    return [torch.equal(a, b) for a, b in zip(*products, strict=True)], calls


def made_in_a_measurement(job: Job) -> list[str]:
    """Names of the modules' attributes that a measurement before the first forward of training has
    changed, with routers that add noise to their inputs.
    """
    with running(job) as chunks:
        chunks[0].config.moe_input_jitter_eps = 0.1
        hessian = hessian_of(chunks, job)
        before = [dict(vars(m)) for m in chunks[0].modules()]
        hessian.matvec(hessian.random_vector(seed=5))
        after = [vars(m) for m in chunks[0].modules()]
        pairs = [(a, b) for a, b in zip(before, after, strict=True)]
        return [k for a, b in pairs for k in a.keys() | b.keys() if a.get(k) is not b.get(k)]


# ---- stopped gradients


@contextlib.contextmanager
def changing(change: Callable[[Any], None]) -> Iterator[None]:
    """Build jobs whose models are changed."""
    from ds_hessian.backends.megatron.host import unwrap

    def built(job: Job) -> list[Any]:
        chunks = build(job)
        for chunk in chunks:
            change(unwrap(chunk))
        return chunks

    with mock.patch("tests.megatron.job.build", built):
        yield


def _stop(model: Any) -> None:
    """Let no gradient go from the output layer, a function with a written backward, to a tied
    embedding.
    """

    def detached(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "weight": kwargs["weight"].detach()}

    head = getattr(model, "output_layer", None)
    if head is not None:
        head.register_forward_pre_hook(detached, with_kwargs=True)


def _fuse(model: Any) -> None:
    """Use Megatron's fused cross entropy."""
    model.config.cross_entropy_loss_fusion = True


def _store_in_8_bits(model: Any) -> None:
    """Use Megatron's fused activation, which keeps what its backward needs in 8 bits."""
    model.config.bias_activation_fusion = model.config.activation_func_fp8_input_store = True


def stopped(job: Job) -> tuple[Stored, Stored, float]:
    """v, product and its error."""
    with changing(_stop):
        return chain(job, 1)[0][0]


def stopped_reference(job: Job, v: dict[str, Tensor]) -> dict[str, Tensor]:
    """H v by double backward."""
    with changing(_stop):
        return reference(job, v)[1]


def fused(job: Job, activation: bool) -> tuple[Stored, Stored, float]:
    """v, product and its error, with a fused activation or loss."""
    with changing(_store_in_8_bits if activation else _fuse):
        return chain(job, 1)[0][0]


def _round(model: Any) -> None:
    """Let the first layer compute in bf16 in part."""

    def rounded(module: Any, args: Any, made: Any) -> Any:
        return made[0].bfloat16().to(made[0].dtype), *made[1:]

    for layer in model.decoder.layers:
        if layer.layer_number == 1:
            layer.mlp.register_forward_hook(rounded)


def narrow_in_part(job: Job) -> tuple[Stored, Stored, float]:
    """v, product and its error."""
    with changing(_round):
        return chain(job, 1)[0][0]


# ---- analyses


def _stepped(job: Job, chunks: list[Any]) -> Any:
    """An optimizer that has made a step on the job's micro-batches."""
    optimizer = make_optimizer(job, chunks)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    run_schedule(job, chunks, my_batches())
    optimizer.step()
    return optimizer


def analyses(job: Job) -> dict[str, Any]:
    """Figures of all analyses after a step of Adam, as lists of numbers."""
    with running(job) as chunks:
        from ds_hessian.megatron import MegatronHessian

        optimizer = _stepped(job, chunks)
        hessian = MegatronHessian(chunks, QUIET, optimizer)
        hessian.use(my_batches(), make_forward_step(job), **SIZES)
        pairs = hessian.eigenpairs(k=1, which="LA", max_matvecs=12)
        b = hessian.random_vector(seed=3)
        solution = hessian.solve(b, [100.0], num_matvecs=5)
        coupling = hessian.block_coupling("layers")
        trace = hessian.trace("hutchinson", num_matvecs=2)
        adam = hessian.backend.adam()
        return {
            "eigenpairs": list(pairs.values),
            "trace": [trace.value],
            "solve": [hessian.dot(b, solution.x[0]), hessian.dot(solution.x[0], solution.x[0])],
            "block coupling": coupling.relative_errors.tolist(),
            "Adam's divisor": [hessian.dot(adam.denominator, adam.denominator)],
            "Adam's step": [hessian.dot(adam.last_step, adam.last_step)],
        }


@functools.cache
def sharpness(job: Job) -> list[float]:
    """Figures of the sharpness, as Adam sees it too."""
    with running(job) as chunks:
        from ds_hessian.megatron import MegatronHessian

        optimizer = _stepped(job, chunks)
        hessian = MegatronHessian(chunks, QUIET, optimizer)
        hessian.use(my_batches(), make_forward_step(job), **SIZES)
        found = hessian.sharpness()
        top = [found.eigenvalue_max.value, found.preconditioned.value]
        return [*top, found.gradient_curvature, found.update_curvature]


def optimizer_on_record(job: Job, **options: Any) -> Any:
    """The optimizer that a record knows, and whether it is a chain of several."""
    with running(job) as chunks:
        from ds_hessian.megatron import MegatronHessian

        optimizer = make_optimizer(job, chunks, **options)
        hessian = MegatronHessian(chunks, QUIET, optimizer)
        hessian.use(my_batches(), make_forward_step(job), **SIZES)
        found = hessian.trace("hutchinson", num_matvecs=2)
        return found.provenance.optimizer, len(optimizer.chained_optimizers)


def autocast_on_the_last_stage() -> float:
    """The unit roundoff of a pipeline whose last stage calls a module under autocast."""
    job = Job(pp=2)
    with running(job) as chunks:
        from megatron.core import parallel_state

        inner, head = make_forward_step(job), nn.Linear(2, 2)

        def forward_step(iterator: Any, model: Any) -> Any:
            last = parallel_state.is_pipeline_last_stage()
            with torch.autocast("cpu", torch.bfloat16, enabled=last):
                head(torch.ones(2))
            return inner(iterator, model)

        hessian = hessian_of(chunks, job).use(my_batches(), forward_step, **SIZES)
        with hessian.measuring() as operator:
            return float(operator.session.unit_roundoff)


@functools.cache
def influences(job: Job) -> tuple[Any, float]:
    """Scores of each micro-batch, an example each, on all of them; and the query's loss."""
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        found = hessian.influence(my_batches(), my_batches(), [50.0], num_matvecs=5)
        return found.scores, found.query_loss


def without_an_optimizer() -> list[str]:
    """What is said where Adam's state is needed and unknown, or not there yet."""
    import ds_hessian
    from ds_hessian.megatron import MegatronHessian

    said = []
    with running(Job()) as chunks:
        optimizer = make_optimizer(Job(), chunks)
        for known in (None, optimizer):
            hessian = MegatronHessian(chunks, QUIET, known)
            hessian.use(my_batches(), make_forward_step(Job()), **SIZES)
            try:
                hessian.sharpness()
            except ds_hessian.ConfigError as error:
                said.append(str(error))
    return said


# ---- what is refused


def layer_wise_optimizer(job: Job, chunks: list[Any]) -> Any:
    """Megatron's layer-wise distributed optimizer, which Muon takes, with Adam for every weight."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = OptimizerConfig(optimizer="adam", lr=1e-2, params_dtype=job.torch_dtype, clip_grad=1.0)
    adam = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    config.bf16 = job.dtype == "bfloat16"  # it makes the masters of what it keeps
    parts = list(getattr(adam, "chained_optimizers", [adam]))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer(parts, config, groups)


def layer_wise(job: Job) -> Any:
    """`chain` of one product with this optimizer."""
    with mock.patch("tests.megatron.job.make_optimizer", layer_wise_optimizer):
        return chain(job, 1, num_matvecs=1)


def said_of(chunks: list[Any], job: Job, refusal: type[Exception]) -> str:
    """Why chunks are refused, at `attach` or at the first product; else "measured"."""
    try:
        hessian = hessian_of(chunks, job)
        hessian.matvec(hessian.random_vector(seed=5))
    except refusal as error:
        return str(error)
    return "measured"


def measured_or_refused(job: Job, freeze: str = "", split_keys: bool = True) -> str:
    """The message with which a measurement is refused, before its first pass; without `split_keys`,
    as if nobody knew of those of multi-latent attention.
    """
    import ds_hessian
    from ds_hessian.backends.megatron import host

    known = contextlib.nullcontext()
    if not split_keys:
        known = mock.patch.object(host, "splits_latent_keys", lambda chunk: False)
    with known, running(job) as chunks:
        if freeze == "first stage":
            for p in chunks[0].parameters():
                if host.is_tied_over_stages(p) and host.pipeline_rank() == 0:
                    p.requires_grad_(False)
        if freeze == "embedding":
            host.unwrap(chunks[0]).embedding.requires_grad_(False)
        if freeze == "weights":
            for p in (p for p in chunks[0].parameters() if p.dim() > 1):
                p.requires_grad_(False)
        if job.dtype == "bfloat16":
            make_optimizer(job, chunks)
        return said_of(chunks, job, ds_hessian.UnsupportedError)


def other_groups() -> list[str]:
    """What is said of a model whose gradients are averaged over the rank alone, by process groups
    that it was given, and of one without Megatron's parallel state.
    """
    import torch.distributed as dist
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    import ds_hessian
    from ds_hessian.megatron import MegatronHessian

    said = []
    with running(Job()) as chunks:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        names = ("tp", "pp", "cp", "ep", "dp", "dp_cp", "expt_dp")
        groups = ProcessGroupCollection(**dict.fromkeys(names, alone))
        own = DistributedDataParallel(
            chunks[0].config, chunks[0].ddp_config, chunks[0].module, pg_collection=groups
        )
        try:
            MegatronHessian(own)
        except ds_hessian.UnsupportedError as error:
            said.append(str(error))
    try:
        MegatronHessian(chunks)
    except ds_hessian.UnsupportedError as error:
        said.append(str(error))
    return said


def apart(job: Job) -> str:
    """The same where the last stage is not in Megatron's embedding group."""
    with mock.patch("tests.megatron.job.embedding_ranks", lambda _, ranks: ranks[:1]):
        return measured_or_refused(job)


def given_weight(frozen: bool) -> str:
    """What is said of a trained bias of an output layer that is given the embedding's weight,
    frozen or not, inside of a module of one's own."""
    from tests.megatron.job import Plain, gpt

    def wrapped(*args: Any) -> nn.Module:
        model = gpt(*args)
        model.output_layer.bias = nn.Parameter(torch.zeros(VOCABULARY))
        model.embedding.requires_grad_(not frozen)
        return Plain(model)

    with mock.patch("tests.megatron.job.gpt", wrapped):
        return measured_or_refused(Job())


class Holding(nn.Module):
    """A module of torch around one of Megatron's."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The other's."""
        return self.inner(*args, **kwargs)


def described_as_copies(job: Job) -> str:
    """What is said of parallel layers inside of a module of torch, of which Megatron's
    `sharded_state_dict` says that every rank has the whole; `fill` gives all the same values.
    """
    import ds_hessian
    from tests.megatron.job import gpt

    def wrapped(*args: Any) -> nn.Module:
        model = gpt(*args)
        model.decoder.layers[0].mlp = Holding(model.decoder.layers[0].mlp)
        return model

    with mock.patch("tests.megatron.job.gpt", wrapped), running(job) as chunks:
        return said_of(chunks, job, ds_hessian.HessianError)


def frozen_since(job: Job) -> str:
    """The message for a parameter that is frozen after the micro-batches were chosen."""
    import ds_hessian

    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        next(chunks[0].parameters()).requires_grad_(False)
        try:
            hessian.matvec(hessian.random_vector(seed=5))
        except ds_hessian.HessianError as error:
            return str(error)
    return "measured"


CHANGES: dict[str, Callable[[Any], None]] = {
    "added": lambda layer: setattr(layer, "extra", nn.Parameter(torch.zeros(3))),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 2)),
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight.data.clone()),
}


def changed_since_wrapping(job: Job, change: str) -> str:
    """The message for a layer that is changed after the model was wrapped, attached anew."""
    import ds_hessian

    with running(job) as chunks:
        from ds_hessian.backends.megatron.host import unwrap

        CHANGES[change](unwrap(chunks[0]).decoder.final_layernorm)
        try:
            hessian_of(chunks, job).spectrum(num_matvecs=1)
        except ds_hessian.HessianError as error:
            return str(error)
    return "measured"


def in_a_backward(job: Job) -> str:
    """The message for a measurement in a hook of training's backward."""
    import ds_hessian

    said = list[str]()
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)

        def hook(_: Tensor) -> None:
            try:
                hessian.spectrum(num_matvecs=1)
            except ds_hessian.HessianError as error:
                said.append(str(error))

        handle = next(chunks[0].parameters()).register_hook(hook)
        run_schedule(job, chunks, my_batches()[:1])
        handle.remove()
    return said[0]


def with_a_critic(measures: bool) -> tuple[list[Tensor], str]:
    """Weights of a second model after a step on gradients that were pending, and why a loss that
    hands it more is not measured.
    """
    import ds_hessian

    job = Job()
    with running(job) as chunks:
        (critic,) = build(job)
        optimizer, batch = make_optimizer(job, [critic]), my_batches()[0]

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)

            def loss(output: Tensor) -> Any:
                value = functional.mse_loss(output, token_losses(critic, batch, job))
                return value, {"loss": value.detach().clone()}

            return token_losses(model, batch, job), loss

        critic.zero_grad_buffer()
        token_losses(critic, batch, job).mean().backward()
        message = ""
        if measures:
            hessian = hessian_of(chunks, job).use([batch], forward_step, **SIZES)
            try:
                hessian.matvec(hessian.random_vector(seed=5))
            except ds_hessian.HessianError as error:
                message = str(error)
        optimizer.step()
        return [p.detach().clone() for p in critic.parameters()], message


def loss_with_state() -> tuple[float, float | None]:
    """The running mean of a loss_func after a measurement, and the gradient of its parameter."""
    job, mean, scale = Job(), torch.ones(1), torch.ones(1, requires_grad=True)

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)

        def loss(output: Tensor) -> Any:
            value = (scale * output).mean()
            mean.mul_(0.5).add_(value.detach())
            return value, {"loss": value.detach().clone()}

        return token_losses(model, batch, job), loss

    with running(job) as chunks:
        hessian = hessian_of(chunks, job).use(my_batches(), forward_step, **SIZES)
        hessian.matvec(hessian.random_vector(seed=5))
    return float(mean), None if scale.grad is None else float(scale.grad)


def offloaded(job: Job) -> tuple[str, bool]:
    """The message where gradient buffers are offloaded, and whether the job is measured again."""
    import ds_hessian

    with running(job) as chunks:
        hessian, said = hessian_of(chunks, job), "measured"
        v = hessian.random_vector(seed=5)
        chunks[0].offload_grad_buffers()
        try:
            hessian.matvec(v)
        except ds_hessian.UnsupportedError as error:
            said = str(error)
        chunks[0].restore_grad_buffers()
        return said, hessian.matvec(v).norm > 0


class Mixed(nn.Module):
    """Two layers, of which the second is in bf16, whatever the job's type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()

    def to(self, *_: Any, **__: Any) -> Mixed:
        """Return it as it is."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        y = self.second(self.first(x).tanh().to(self.second.weight.dtype))
        return y.to(self.first.weight.dtype).tanh().square().mean()


class Aside(nn.Module):
    """Two layers, and a reference to the weight of the second past its module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8))
        # As Megatron's Mamba keeps A, D and the bias of its steps for context parallelism.
        references = {"object": types.SimpleNamespace(scale=self.scale), "list": [self.scale]}
        self.kept = references.get(kind, functools.partial(lambda scale: scale, self.scale))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        kept = self.kept
        scale = kept.scale if hasattr(kept, "scale") else kept() if callable(kept) else kept[0]
        if isinstance(kept, list):
            kept.append(None)
        y = self.first(x.to(self.first.weight.dtype)).tanh()
        return (y * scale.to(y.dtype)).tanh().square().mean()


def mixed(job: Job, kind: str = "mixed") -> tuple[float, float, str]:
    """How far a product is from one in fp64, what it tells, and the precision of its passes."""
    from ds_hessian.megatron import MegatronHessian

    def forward_step(iterator: Any, model: Any) -> Any:
        return model(next(iterator)), lambda loss: (loss, {})

    with groups_of(job):
        torch.manual_seed(0)
        model, x = Mixed() if kind == "mixed" else Aside(kind), torch.randn(16, 8)
        if kind != "mixed":
            model = model.bfloat16()
        exact = copy.deepcopy(model).double()
        hessian = MegatronHessian(wrap(model, job), QUIET)
        hessian.use([x], forward_step, seq_length=1, micro_batch_size=16)
        v = hessian.random_vector(seed=5)
        with hessian.measuring():
            product = hessian.matvec(v)
        parameters = dict(exact.named_parameters())
        directions = [hessian.gather(v)[name].double() for name in parameters]
        loss = exact(x.double())
        gradient = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        expected = torch.autograd.grad(gradient, list(parameters.values()), directions)
        found = [hessian.gather(product.vector)[name].double() for name in parameters]
        a, b = (torch.cat([t.flatten() for t in each]) for each in (found, expected))
        precision = hessian.spectrum(num_matvecs=1).provenance.precision
        if kind == "list":
            (kept,) = model.kept
            assert kept is model.scale
        return float((a - b).norm() / b.norm()), product.error, precision


def frozen_since_wrapping(job: Job) -> tuple[float, float, bool]:
    """<w, H v>, <v, H w> of a model of which a weight is frozen after it was wrapped, and whether
    the coordinates of that are left out."""
    with running(job) as chunks:
        from ds_hessian.backends.megatron.host import unwrap

        frozen = unwrap(chunks[0]).decoder.layers[0].mlp.linear_fc1.weight
        frozen.requires_grad_(False)
        hessian = hessian_of(chunks, job)
        v, w = (hessian.random_vector(seed=seed) for seed in (5, 6))
        with hessian.measuring(displacement=2e-2):
            forth, back = (hessian.matvec(x).vector for x in (v, w))
        trained = sum(p.numel() for p in chunks[0].parameters() if p.requires_grad)
        n = hessian.spectrum(num_matvecs=1, displacement=2e-2).n
        return hessian.dot(w, forth), hessian.dot(v, back), n == trained


def edited(job: Job, masters: bool) -> list[float]:
    """Coefficients of a model whose weights are edited, behind an optimizer with masters or not."""
    with running(job) as chunks:
        if masters:
            make_optimizer(job, chunks)
        for p in chunks[0].parameters():
            p.data.mul_(1.25)
        found: list[float] = hessian_of(chunks, job).spectrum(num_matvecs=1).alphas.tolist()
        return found


def scaled_moments() -> bool:
    """Whether Adam's state is the same where its moments are stored with a scale."""
    from ds_hessian.megatron import MegatronHessian

    job = Job(distributed=True)
    with running(job) as chunks:
        optimizer = make_optimizer(job, chunks)
        run_schedule(job, chunks, my_batches())
        optimizer.step()
        hessian = MegatronHessian(chunks, QUIET, optimizer)
        before = hessian.backend.adam()
        for adam in (part.optimizer for part in optimizer.chained_optimizers):
            for state in adam.state.values():
                state["exp_avg"] /= 4
                state["exp_avg_sq"] /= 4
            adam.get_unscaled_state = lambda p, name, adam=adam: 4 * adam.state[p][name]
        return all(map(torch.equal, before, hessian.backend.adam()))


def subclassed() -> bool:
    """Whether chunks of a class of another module, derived from Megatron's wrapper, are measured as
    those of its own."""
    import ds_hessian

    found = []
    for renamed in (False, True):
        with running(Job()) as chunks:
            if renamed:
                chunks[0].__class__ = type("DDP", (type(chunks[0]),), {"__module__": "nemo"})
            hessian = ds_hessian.attach(chunks, config={"hessian": QUIET})
            hessian.use(my_batches(), make_forward_step(Job()), **SIZES)
            found.append(hessian.spectrum(num_matvecs=1).alphas.tolist())
    return bool(found[0] == found[1])


def predicting_several_tokens(tied: bool) -> str:
    """The message for multi-token prediction in a pipeline, with learned positions."""
    import ds_hessian
    from ds_hessian.megatron import MegatronHessian

    with running(Job(pp=2, predicted=1, tied=tied)) as chunks:
        try:
            MegatronHessian(chunks)
        except ds_hessian.UnsupportedError as error:
            return str(error)
    return "accepted"


# ---- an encoder and a decoder


class T5(nn.Module):
    """Megatron's T5 with the arguments of its batches; returns the losses of tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Predict `labels` from `tokens`, and from the labels before."""
        none = torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
        causal = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
        logits = self.model(tokens, labels.roll(1, 1), none, causal, none)
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def t5(job: Job, v: dict[str, Tensor] | None = None) -> tuple[Any, Any, Any]:
    """v and product of T5, gathered, and the exact product of `v` (its own, without)."""
    with groups_of(job):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.T5 import t5_spec
        from megatron.core.models.T5.t5_model import T5Model
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ds_hessian.backends.megatron import host
        from ds_hessian.megatron import MegatronHessian

        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            ffn_hidden_size=20,
            num_attention_heads=4,
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=job.tp,
        )
        model = T5Model(
            config,
            config,
            t5_spec.get_t5_encoder_with_local_block_spec(1),
            t5_spec.get_t5_decoder_with_local_block_spec(1),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            parallel_output=False,
            share_embeddings_and_output_weights=True,
        )
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=job.distributed)
        chunk = DistributedDataParallel(config, ddp, model)
        fill([chunk])

        def forward_step(iterator: Any, chunk: Any) -> Any:
            batch = next(iterator)
            return T5(chunk)(batch["tokens"], batch["labels"]), lambda loss: (loss, {})

        hessian = MegatronHessian(chunk, QUIET)
        hessian.use(my_batches(), forward_step, seq_length=SEQUENCE, micro_batch_size=SIZE)
        u = hessian.random_vector(seed=5)
        found = [hessian.gather(x) for x in (u, hessian.matvec(u).vector)]
        if job != Job():
            return found[0], found[1], None
        wide = T5(host.unwrap(chunk).double())
        named: dict[str, Tensor] = {}
        for p, _, tensor in host.sharded_tensors(chunk):
            if all(p is not q for q in named.values()):
                named[tensor.key] = p
        loss = torch.stack([wide(b["tokens"], b["labels"]) for b in micro_batches()]).mean()
        gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        directions = [found[0][name].double().view(p.shape) for name, p in named.items()]
        products = torch.autograd.grad(gradients, list(named.values()), directions)
        return found[0], found[1], dict(zip(named, products, strict=True))
