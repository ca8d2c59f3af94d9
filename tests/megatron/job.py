"""What runs on the ranks: GPTs of real megatron-core in every layout, and their Hessians."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional

from tests.megatron import shim
from tests.nets import forward_hooks, of_scaled_loss

VOCABULARY, SEQUENCE, SIZE, TOTAL = 40, 8, 2, 4  # TOTAL micro-batches, split over DP
QUIET = {"progress": False, "plot": False}
MOE: dict[str, Any] = {"experts": 4, "bias": False}


@dataclass(frozen=True)
class Job:
    """A layout and what it trains."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: int = 2  # at least one for each stage and chunk
    stages: str | None = None  # what each of them has, where they differ
    varies: bool = False  # whether stages tell each other the shapes of what they send
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    distributed: bool = False  # the distributed optimizer
    instances: int = 1
    overlap: bool = False
    per_token: bool = False
    recompute: bool = False
    selective: tuple[str, ...] = ()  # parts of layers that are recomputed
    method: str = "uniform"  # of recomputation; "block": the first layer of a stage
    deferred: bool = False  # weight gradients of the output layer
    experts: int = 0
    dense: int = 0  # the first layers, which have none
    expert_bias: bool = False
    aux_loss: float = 0.0
    balancing: str = "aux_loss"  # its kind
    z_loss: float = 0.0
    shared: int = 0  # width of shared experts
    dispatcher: str = "allgather"
    capacity: float | None = None  # of experts; the tokens beyond it are dropped
    latent: bool = False  # multi-latent attention
    predicted: int = 0  # further tokens: layers of multi-token prediction
    tied: bool = True  # the output layer's weight is the embedding's
    positions: str = "learned_absolute"  # their embedding
    softmax: str = "vanilla"  # of attention
    query_groups: int = 2  # of attention's heads; tensor-parallel ranks must divide them
    dropout: float = 0.0
    bias: bool = True
    activation: str = "swiglu"
    dtype: str = "float32"
    precision: str = "model"  # of the passes that measure
    narrow_sums: bool = False  # of gradients in 16 bits
    options: tuple[tuple[str, Any], ...] = ()  # further ones of the model's configuration

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def alone(self) -> Job:
        """The same model and loss in one process."""
        return replace(
            self,
            **dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "instances"), 1),
            **dict.fromkeys(("sequence_parallel", "distributed", "overlap", "recompute"), False),
            selective=(),
            stages=None,
        )


def activation_of(job: Job) -> Any:
    from megatron.core.activations import squared_relu

    return {"relu": functional.relu, "squared relu": squared_relu}.get(
        job.activation, functional.silu
    )


def model_config(job: Job) -> Any:
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    recompute: dict[str, Any] = {}
    if job.recompute:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": job.method,
            "recompute_num_layers": 1,
        }
    if job.selective:
        recompute = {
            "recompute_granularity": "selective",
            "recompute_modules": list(job.selective),
        }
    moe: dict[str, Any] = {}
    if job.experts:
        moe = {
            "num_moe_experts": job.experts,
            "moe_router_topk": 2,
            "moe_layer_freq": [int(i >= job.dense) for i in range(job.layers)],
            "moe_ffn_hidden_size": 12,
            "moe_z_loss_coeff": job.z_loss or None,
            "moe_expert_capacity_factor": job.capacity,
            "moe_shared_expert_intermediate_size": job.shared or None,
            "moe_router_load_balancing_type": job.balancing if job.aux_loss else "none",
            "moe_aux_loss_coeff": job.aux_loss,
            "moe_router_enable_expert_bias": job.expert_bias,
            "moe_router_score_function": "sigmoid" if job.expert_bias else "softmax",
            "expert_model_parallel_size": job.ep,
            "expert_tensor_parallel_size": job.etp,
        }
    latent: dict[str, Any] = {}
    if job.latent:
        latent = {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "kv_channels": 8,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
            "rope_type": "rope",
        }
    lists = {name: list(v) if isinstance(v, tuple) else v for name, v in job.options}
    options = dict(
        num_layers=job.layers,
        hidden_size=16,
        ffn_hidden_size=20,
        num_attention_heads=4,
        softmax_type=job.softmax,
        num_query_groups=None if job.latent else job.query_groups,
        gated_linear_unit=job.activation == "swiglu",
        activation_func=activation_of(job),
        add_bias_linear=job.bias,
        use_cpu_initialization=True,
        params_dtype=job.torch_dtype,
        pipeline_dtype=job.torch_dtype,
        bf16=job.dtype == "bfloat16",
        hidden_dropout=job.dropout,
        attention_dropout=job.dropout,
        gradient_accumulation_fusion=job.deferred,
        defer_embedding_wgrad_compute=job.deferred,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        virtual_pipeline_model_parallel_size=job.vpp if job.vpp > 1 else None,
        pipeline_model_parallel_layout=job.stages,
        variable_seq_lengths=job.varies,
        moe_token_dispatcher_type=job.dispatcher,
        sequence_parallel=job.sequence_parallel,
        # With PP=2 interleaved, previous and next stage are one rank: batched sends would be
        # matched in posting order. On gloo, a send then races with the freeing of its tensor.
        overlap_p2p_comm=job.vpp > 1,
        batch_p2p_comm=job.vpp == 1,
        deallocate_pipeline_outputs=job.pp > 1 and job.vpp == 1,
        calculate_per_token_loss=job.per_token,
        mtp_num_layers=job.predicted or None,
        **recompute,
        **moe,
        **latent,
    )
    return (MLATransformerConfig if job.latent else TransformerConfig)(**{**options, **lists})


@contextlib.contextmanager
def running(job: Job) -> Iterator[list[Any]]:
    """The job's DDP chunks on weights that do not depend on the layout."""
    with groups_of(job):
        yield build(job)


@contextlib.contextmanager
def groups_of(job: Job) -> Iterator[None]:
    """Megatron's process groups and random states for a job."""
    shim.install()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()  # what a job before has left
    parallel_state.initialize_model_parallel(
        job.tp,
        job.pp,
        job.vpp if job.vpp > 1 else None,
        expert_model_parallel_size=job.ep,
        expert_tensor_parallel_size=job.etp if job.experts else None,
        num_distributed_optimizer_instances=job.instances,
        get_embedding_ranks=functools.partial(embedding_ranks, job),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(1234)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.barrier()
        for group in list(distributed_c10d._world.pg_map):  # each keeps its threads until then
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


def embedding_ranks(job: Job, ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that have the embedding of words, as Megatron-LM finds them."""
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    found = {ranks[0], *([ranks[-1]] if job.tied else [])}
    if job.predicted:
        found.update(get_mtp_ranks(ranks, model_config(job)))
    return sorted(found)


def gpt(job: Job, config: Any, stage: int = 0) -> Any:
    """The model of one virtual stage on this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = get_gpt_layer_local_spec(
        num_experts=job.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=job.latent,
        multi_latent_attention=job.latent,
    )
    if job.latent:  # the local attention, which takes no widths of its own
        spec.submodules.self_attention.submodules.core_attention = shim.latent_attention()
    where = {"ignore_virtual": job.vpp == 1, "vp_stage": stage if job.vpp > 1 else None}
    farther = get_gpt_mtp_block_spec(config, spec, False) if job.predicted else None
    block = get_gpt_decoder_block_spec(config, False) if job.dense else spec
    model = GPTModel(
        config,
        block,
        mtp_block_spec=farther,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=job.tied,
        position_embedding_type=job.positions,
        vp_stage=where["vp_stage"],
        # Megatron's parallel cross entropy is fp32: fp64 takes torch's on gathered logits.
        parallel_output=job.dtype != "float64",
    ).to(job.torch_dtype)
    if job.deferred:  # by the output layer alone: Transformer Engine's other layers have no buffers
        alone = copy.copy(config)
        alone.defer_embedding_wgrad_compute = False
        for module in model.decoder.modules():
            if hasattr(module, "config"):
                module.config = alone
    return model


def build(job: Job) -> list[Any]:
    """The chunks of `running`."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    config = model_config(job)
    chunks = [gpt(job, config, stage) for stage in range(job.vpp)]
    if job.dtype == "bfloat16":
        chunks = [Float16Module(config, model) for model in chunks]
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=job.distributed,
        num_distributed_optimizer_instances=job.instances,
        overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.overlap and job.distributed,
        bucket_size=1500,
        grad_reduce_in_fp32=job.dtype == "bfloat16" and not job.narrow_sums,
    )
    chunks = [
        DistributedDataParallel(config, ddp, model, disable_bucketing=i > 0)
        for i, model in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    if job.overlap:
        config.no_sync_func = [c.no_sync for c in chunks] if job.vpp > 1 else chunks[0].no_sync
    if not (job.predicted and job.tied):  # Megatron cannot name its copies of a tied embedding
        fill(chunks)
    return chunks


class Plain(nn.Module):
    """What Megatron asks of a model beside its forward, for a plain module."""

    def __init__(self, inner: nn.Module) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.inner, self.model_type = inner, ModelType.encoder_or_decoder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        return self.inner(*args, **kwargs)

    def set_input_tensor(self, _: Any) -> None:
        """Without a pipeline there is none."""

    def sharded_state_dict(self, metadata: Any) -> Any:
        """Parameters by name; tied ones once."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(dict(self.inner.named_parameters()), "")


def wrap(inner: nn.Module, job: Job) -> Any:
    """A plain module in Megatron's data parallelism; of the job, its dtype and optimizer count."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        params_dtype=job.torch_dtype,
        bf16=job.dtype == "bfloat16",
    )
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=job.distributed,
        overlap_grad_reduce=job.overlap,
        bucket_size=1500 if job.overlap else None,
        grad_reduce_in_fp32=job.dtype == "bfloat16",
    )
    chunk = DistributedDataParallel(config, ddp, Plain(inner.to(job.torch_dtype)))
    config.no_sync_func = chunk.no_sync if job.overlap else None
    return chunk


def weight(name: str, shape: Any) -> Tensor:
    """Initial value of a whole parameter, a function of its checkpoint name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "layernorm" in name or "layer_norm" in name:
        return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    return values * (0.05 if name.endswith("bias") else 0.15)


@torch.no_grad()
def fill(chunks: list[Any]) -> None:
    """Set every parameter of these layers from `weight`."""
    from ds_hessian.backends.megatron import host
    from ds_hessian.backends.megatron.runs import fragment_of

    for chunk in chunks:
        for parameter, offset, tensor in host.sharded_tensors(chunk):
            fragment = fragment_of(tensor, 0, tensor.data.numel(), True)
            values = weight(fragment.name, fragment.shape).reshape(-1)[fragment.index()]
            parameter.data.view(-1).narrow(0, offset, fragment.numel).copy_(values)


# ---- data and loss


def micro_batches() -> list[dict[str, Tensor]]:
    """All `TOTAL` of them."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for i in range(TOTAL):
        rows = torch.randint(0, VOCABULARY, (2, SIZE, SEQUENCE), generator=generator)
        mask = (torch.rand(SIZE, SEQUENCE, generator=generator) < 0.3 + 0.15 * i).float()
        batches.append({"tokens": rows[0], "labels": rows[1], "mask": mask})
    return batches


def my_batches() -> list[dict[str, Tensor]]:
    """This data-parallel rank's."""
    from megatron.core import parallel_state

    size = parallel_state.get_data_parallel_world_size()
    return micro_batches()[parallel_state.get_data_parallel_rank() :: size]


POSITIONS = torch.arange(SEQUENCE)[None].expand(SIZE, -1)
CAUSAL = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]


def token_losses(model: Any, batch: dict[str, Tensor], job: Job) -> Tensor:
    """`(SIZE, SEQUENCE)` losses on the last stage, else the stage's output."""
    from ds_hessian.backends.megatron.host import unwrap

    if job.dtype != "float64":
        return model(batch["tokens"], POSITIONS, CAUSAL, labels=batch["labels"])
    logits = model(batch["tokens"], POSITIONS, CAUSAL)
    if not unwrap(model).post_process:
        return logits
    losses = functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), batch["labels"].reshape(-1), reduction="none"
    )
    return losses.view(SIZE, SEQUENCE)


def make_forward_step(job: Job) -> Callable[..., Any]:
    """The job's forward step."""

    def forward_step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)

        def loss_func(losses: Tensor) -> Any:
            losses = losses if job.dtype == "float64" else losses.float()
            mask = batch["mask"] if job.per_token else torch.ones_like(batch["mask"])
            total = (losses * mask).sum()
            logs = {"lm loss": total.detach().clone()}
            return total, mask.sum().to(torch.int), logs

        return token_losses(model, batch, job), loss_func

    return forward_step


SIZES = {"seq_length": SEQUENCE, "micro_batch_size": SIZE}


def hessian_of(chunks: list[Any], job: Job, **config: Any) -> Any:
    """The job's Hessian on its micro-batches."""
    from ds_hessian.megatron import MegatronHessian

    precision = {"finite_difference": {"precision": job.precision}}
    hessian = MegatronHessian(chunks, {**QUIET, **precision, **config})
    return hessian.use(my_batches(), make_forward_step(job), **SIZES)


# ---- measurements

Stored = list[tuple[str, Tensor, Tensor, bool]]


def stored(backend: Any, v: Tensor) -> Stored:
    """A vector as this rank has it: `(name, unsharded indices, values, owned)`."""
    return [(f.name, f.index(), v[part].clone(), f.owned) for f, part in backend.layout]


def product_in_fp64(job: Job, h: float = 2e-4) -> tuple[Stored, Stored, Stored, float]:
    """v, gradient and product of a fp64 job, in fp64, and <v, v>; vectors are fp32 otherwise."""
    with running(job) as chunks:
        from ds_hessian.backends.megatron import host

        hessian = hessian_of(chunks, job)
        backend, v = hessian.backend, hessian.random_vector(seed=5)
        sums = []
        with backend.measuring(hessian._objective) as session:
            for sign in (0, 1, -1):
                with torch.no_grad():
                    for w, master, (_, part) in zip(
                        session.weights.weights,
                        session.weights.masters,
                        backend.layout,
                        strict=True,
                    ):
                        w.copy_(master + sign * h * v[part].double())
                host.gather_parameters(chunks)
                out = torch.zeros_like(v, dtype=torch.float64)
                session.add_gradient(out, range(session.num_micro_batches))
                sums.append(out * session.gradient_scale)
        product = (sums[1] - sums[2]) / (2 * h)
        vectors = [stored(backend, x) for x in (v, sums[0], product)]
        return vectors[0], vectors[1], vectors[2], hessian.dot(v, v)


def scaled_losses(job: Job) -> tuple[float, float]:
    """`tests.nets.of_scaled_loss` of a job."""
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        with hessian.backend.measuring(hessian._objective) as session:
            return of_scaled_loss(session)


def measured(
    job: Job, num_matvecs: int = 3, **config: Any
) -> tuple[Stored, Stored, Any, bool, bool, float]:
    """v, product, spectrum, whether weights came back and products repeat bitwise, <v, v>."""
    with running(job) as chunks:
        before = [p.detach().clone() for c in chunks for p in c.parameters()]
        hessian = hessian_of(chunks, job, **config)
        v = hessian.random_vector(seed=5)
        # A fixed displacement of both products: the automatic one learns from the first.
        displacement = 0.5 if job.dtype == "bfloat16" else 2e-2
        with hessian.measuring(displacement=displacement):
            product, again = hessian.matvec(v), hessian.matvec(v)
        spectrum = hessian.spectrum(num_matvecs=num_matvecs)
        after = [p.detach() for c in chunks for p in c.parameters()]
        restored = all(map(torch.equal, before, after))
        backend = hessian.backend
        vector = product.vector
        repeats = torch.equal(vector, again.vector)
        return (
            stored(backend, v),
            stored(backend, vector),
            spectrum,
            restored,
            repeats,
            hessian.dot(v, v),
        )


def chain(
    job: Job, count: int, num_matvecs: int = 10
) -> tuple[list[tuple[Stored, Stored, float]], Any]:
    """`(v, H v, estimated error)` of `count` products by the automatic displacement, each of the
    one before, from a random vector to those that the largest eigenvalues rule; and a spectrum.

    As in training, weights in bf16 are roundings of fp32 masters.
    """
    with running(job) as chunks:
        make_optimizer(job, chunks)
        hessian = hessian_of(chunks, job)
        for piece in hessian.backend.runs:
            if piece.master is not None:
                whole = weight(piece.fragment.name, piece.fragment.shape)
                piece.master.copy_(whole.reshape(-1)[piece.fragment.index()])
        v, out = hessian.random_vector(seed=5), []
        with hessian.measuring():
            for _ in range(count):
                product = hessian.matvec(v)
                vectors = [stored(hessian.backend, x) for x in (v, product.vector)]
                out.append((*vectors, product.error))
                v = product.vector / hessian.dot(product.vector, product.vector) ** 0.5
        return out, hessian.spectrum(num_matvecs=num_matvecs)


def self_test(job: Job) -> Any:
    """The verdict."""
    with running(job) as chunks:
        make_optimizer(job, chunks)
        return hessian_of(chunks, job).self_test()


def sweep(job: Job) -> tuple[Any, bool]:
    """A sweep, and whether a vector survives `gather` and `scatter`."""
    with running(job) as chunks:
        hessian = hessian_of(chunks, job)
        v = hessian.random_vector(seed=5)
        back = hessian.scatter(hessian.gather(v))
        found = hessian.displacement_sweep(("random", "gradient"), (3e-3, 3e-2, 0.3))
        return found, torch.equal(v, back)


def tiny_gpt(num_matvecs: int) -> tuple[Any, Any, Any]:
    """The ZeRO tests' model and data under Megatron's distributed optimizer: a probe and its
    product at h = 0.1, gathered, and the spectrum.
    """
    job = Job(distributed=True)
    with groups_of(job):
        from ds_hessian.megatron import MegatronHessian
        from tests.backends.jobs import my_batches as zero_batches
        from tests.nets import TinyGPT

        def forward_step(iterator: Any, model: Any) -> Any:
            return model(*next(iterator)), lambda loss: (loss, {})

        torch.manual_seed(0)
        hessian = MegatronHessian(wrap(TinyGPT(), job), QUIET)
        hessian.use(zero_batches(), forward_step, seq_length=1, micro_batch_size=2)
        v = hessian.random_vector(seed=5)
        with hessian.measuring(displacement=0.1):
            product = hessian.matvec(v)
        vectors = [hessian.gather(x) for x in (v, product.vector)]
        return vectors[0], vectors[1], hessian.spectrum(num_matvecs=num_matvecs)


class Names:
    """Which part of which tensor of a checkpoint each parameter of an unsharded chunk is."""

    def __init__(self, chunk: Any) -> None:
        from ds_hessian.backends.megatron import host
        from ds_hessian.backends.megatron.runs import fragment_of

        self.where: dict[int, list[tuple[int, Any]]] = {}
        for parameter, offset, tensor in host.sharded_tensors(chunk):
            fragment = fragment_of(tensor, 0, tensor.data.numel(), True)
            self.where.setdefault(id(parameter), []).append((offset, fragment))

    def of(self, v: dict[str, Tensor], p: Tensor) -> Tensor:
        """The part of a vector by name that is of a parameter, in its shape, fp64."""
        flat = torch.zeros(p.numel(), dtype=torch.float64)
        for offset, fragment in self.where[id(p)]:
            flat[offset : offset + fragment.numel] = v[fragment.name][fragment.index()]
        return flat.view(p.shape)

    def full(self, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> dict[str, Tensor]:
        """`{name: flat fp64 tensor}` of a tensor for each parameter."""
        found: dict[str, Tensor] = {}
        for p, t in zip(parameters, values, strict=True):
            for offset, fragment in self.where[id(p)]:
                whole = torch.zeros(fragment.shape.numel(), dtype=torch.float64)
                part = t.detach().reshape(-1)[offset : offset + fragment.numel]
                found.setdefault(fragment.name, whole)[fragment.index()] = part
        return found


def reference(job: Job, v: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradient and H v by double backward, `{name: flat fp64 tensor}`; one process, job unsharded.

    Avoids Megatron's parallel cross entropy and recomputation, which have no second derivative.
    """
    with running(job) as chunks:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        from ds_hessian.backends.megatron import host

        model = host.unwrap(chunks[0])  # in train mode: the losses of routers are part of it
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([1.0 / TOTAL]))  # as schedules do
        parameters = list(model.parameters())

        def gradient_of(create_graph: bool) -> tuple[Tensor, ...]:
            total = count = torch.zeros((), dtype=torch.float64)
            for batch in micro_batches():
                mask = batch["mask"].double() if job.per_token else torch.ones(SIZE, SEQUENCE)
                total = total + (token_losses(model, batch, job) * mask).sum()
                count = count + mask.sum()
            return torch.autograd.grad(total / count, parameters, create_graph=create_graph)

        own_losses = bool(job.aux_loss or job.z_loss)
        gradient = gradient_of(not own_losses)
        names = Names(chunks[0])
        directions = [names.of(v, p) for p in parameters]
        if own_losses:  # which have no second derivative in Megatron (MoEAuxLossAutoScaler)
            product = differences(gradient_of, parameters, directions)
        else:
            product = torch.autograd.grad(gradient, parameters, directions)
        return names.full(parameters, gradient), names.full(parameters, product)


def differences(
    gradient_of: Callable[[bool], Any], parameters: list[Any], directions: list[Tensor]
) -> Any:
    """Central differences of fp64 gradients, exact to some 1e-5, far below the next jump: routers
    compute probabilities in fp32 whatever the dtype.
    """
    sides, weights = [], [p.detach().clone() for p in parameters]
    for h in (3e-4, -3e-4, 0.0):
        with torch.no_grad():
            for p, w, d in zip(parameters, weights, directions, strict=True):
                p.copy_(w + h * d)
        if h:
            sides.append(gradient_of(False))
    return [(a - b) / 6e-4 for a, b in zip(*sides, strict=True)]


# ---- training


def make_optimizer(job: Job, chunks: list[Any], **options: Any) -> Any:
    """Megatron's Adam, with fp32 masters where the weights are bf16."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **{"optimizer": "adam", "lr": 1e-2, **options},
            weight_decay=0.01,
            use_distributed_optimizer=job.distributed,
            overlap_param_gather=job.overlap and job.distributed,
            bf16=job.dtype == "bfloat16",
            params_dtype=job.torch_dtype,
            clip_grad=1.0,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    optimizer.reload_model_params()  # `fill` wrote behind its back
    return optimizer


def run_schedule(
    job: Job, chunks: list[Any], batches: list[Any], forward_step: Callable[..., Any] | None = None
) -> None:
    """Forward and backward of training."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=forward_step or make_forward_step(job),
        data_iterator=[iter(batches) for _ in chunks] if job.vpp > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        forward_only=False,
        **SIZES,
    )


FACTORS = r"layers\.(0|1)\..*(qkv|proj|fc1|fc2)\.weight"
"""The layers of which training with measurements of Kronecker factors has them."""


def train(job: Job, measure: str = "", steps: int = 2, config: dict[str, Any] | None = None) -> Any:
    """Train, with dropout if the job has some; what must be the same with and without `measure`.

    Args:
        job: The layout.
        measure: "" for none, "spectrum" or "kronecker" after every step, or where one after step 0
            fails on one rank alone: "batch" (before the model is called), "forward" (after it),
            "loss", "backward", "layer" and "experts" (inside of the model), "layer backward",
            "experts backward", "iterator" (a batch is given out), "receive" and "received" (before
            and after stages exchange something), "exchange" (amid of it) and "finalize" (gradients
            are reduced); on the last rank, or with " on 0" after it on rank 0.
        steps: Optimizer steps.
        config: Of the measurements.

    Returns:
        State by name, `[(loss, gradient norm, n), ...]` measured, and the errors.
    """
    with running(job) as chunks:
        optimizer = make_optimizer(job, chunks)
        hessian = hessian_of(chunks, job, **(config or {}))
        measured, errors, norms = [], [], []
        batches = my_batches()
        for step in range(steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            run_schedule(job, chunks, batches)
            norms.append(optimizer.step()[1])
            if measure == "spectrum":
                spectrum = hessian.spectrum(num_matvecs=1)
                measured.append((spectrum.loss, spectrum.gradient_norm, spectrum.n))
            elif measure == "kronecker":
                found = hessian.kronecker(["ekfac"], FACTORS, basis=1, probes=2, extremes=0)
                measured.append((found.mismatches.max(), len(found.layers)))
            elif measure and step == 0:
                errors.append(failing_spectrum(chunks, job, measure))
        return training_state(job, chunks, optimizer, norms), measured, errors


def training_state(job: Job, chunks: list[Any], optimizer: Any, norms: list[Any]) -> Any:
    """All that later steps depend on."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.moe.moe_utils import (
        clear_aux_losses_tracker,
        get_moe_layer_wise_logging_tracker,
    )

    from ds_hessian.backends.megatron.host import unwrap

    if job.overlap and job.distributed:
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=True)
    states = [s for o in optimizer.chained_optimizers for s in o.optimizer.state.values()]
    state = {
        "gradient norms": norms,
        "hooks": forward_hooks(*chunks),
        "weights": [p.detach().clone() for c in chunks for p in c.parameters()],
        "moments": [t.clone() for s in states for t in s.values() if torch.is_tensor(t)],
        "random": [torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()],
        "buffers": [b.clone() for c in chunks for b in unwrap(c).buffers()],
        "training": [m.training for c in chunks for m in c.modules()],
        "logs": [t["values"].clone() for t in get_moe_layer_wise_logging_tracker().values()],
    }
    clear_aux_losses_tracker()
    return state


class Broken(Exception):
    """Raised on purpose."""


class FailingBackward(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Broken("on purpose")


def failing_spectrum(chunks: list[Any], job: Job, stage: str) -> str:
    """A spectrum whose second step forward, or its backward, fails on one rank, as text; or the
    second time that a batch is given out, weights are displaced, or gradients are reduced.
    """
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    import ds_hessian
    from ds_hessian import ops
    from ds_hessian.backends.megatron import host
    from ds_hessian.backends.megatron.host import unwrap

    stage, _, rank = stage.partition(" on ")
    inner, active = (
        make_forward_step(job),
        dist.get_rank() == int(rank or dist.get_world_size() - 1),
    )
    calls, hooks = [0], contextlib.ExitStack()

    def inside(_: Any, __: Any, output: Any) -> Any:
        if not stage.endswith("backward"):
            raise Broken("on purpose")
        return (FailingBackward.apply(output[0]), *output[1:])

    def forward_step(iterator: Any, model: Any) -> Any:
        calls[0] += 1
        broken = active and calls[0] == 2
        if broken and stage == "batch":
            raise Broken("on purpose")
        layer = unwrap(model).decoder.layers[0]
        places = {"layer": layer.self_attention, "experts": getattr(layer.mlp, "experts", None)}
        place = places.get(stage.split()[0]) if broken else None
        hooks.close()
        if place:
            hooks.callback(place.register_forward_hook(inside).remove)
        try:
            output, loss_func = inner(iterator, model)
        finally:
            if not stage.endswith("backward"):  # which may compute the layer anew
                hooks.close()
        if broken and stage == "forward":
            raise Broken("on purpose")
        if broken and stage == "backward":
            output = FailingBackward.apply(output)

        def failing_loss(losses: Tensor) -> Any:
            if broken and stage == "loss":
                raise Broken("on purpose")
            return loss_func(losses)

        return output, failing_loss

    def failing_second(function: Any, after: bool = False) -> Any:
        times = [0]

        def call(*args: Any, **kwargs: Any) -> Any:
            times[0] += 1
            if active and times[0] == 2:
                if after:
                    function(*args, **kwargs)
                raise Broken("on purpose")
            return function(*args, **kwargs)

        return call

    hessian = hessian_of(chunks, job)
    try:
        hessian.use(my_batches(), forward_step, **SIZES)
        with hooks, contextlib.ExitStack() as stack:
            if stage == "iterator":
                objective = hessian._objective
                failing = failing_second(objective.iterator)
                stack.enter_context(mock.patch.object(objective, "iterator", failing))
            if stage == "displace":
                failing = failing_second(ops.Shards.displace)
                stack.enter_context(mock.patch.object(ops.Shards, "displace", failing))
            if stage == "finalize":
                config = host.model_config(chunks[0])
                function = config.finalize_model_grads_func or finalize_model_grads
                failing = failing_second(function)
                stack.enter_context(mock.patch.object(config, "finalize_model_grads_func", failing))
            if stage in ("receive", "received"):  # the former: as without memory for it
                failing = failing_second(P2PCommunicator._communicate, after=stage == "received")
                stack.enter_context(mock.patch.object(P2PCommunicator, "_communicate", failing))
            if stage == "exchange":  # which is in flight
                name = "_p2p_ops" if job.vpp > 1 else "_batched_p2p_ops"
                failing = failing_second(getattr(p2p_communication, name), after=True)
                stack.enter_context(mock.patch.object(p2p_communication, name, failing))
            if stage.endswith("embedding"):  # of which two stages sum their gradients
                name = "_allreduce_word_embedding_grads"
                module = inspect.getmodule(finalize_model_grads)
                failing = failing_second(getattr(module, name), after=stage.startswith("after"))
                stack.enter_context(mock.patch.object(module, name, failing))
            hessian.spectrum(num_matvecs=2)
    except (ds_hessian.HessianError, Broken) as error:  # which all ranks share, if there is one
        return f"{type(error).__name__}: {error}"
    return "no error"


def same(a: Any, b: Any) -> bool:
    """Bitwise equality of nested lists of tensors."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def compare_training(job: Job, measures: list[str], config: dict[str, Any]) -> list[Any]:
    """`(what differs from training without, measured, errors)` for each of `measures`."""
    bare = train(job)[0]
    out = []
    for measure in measures:
        gc.collect()  # the job before, whose process groups have threads that poll
        state, measured, errors = train(job, measure, config=config)
        differing = [name for name in bare if not same(bare[name], state[name])]
        out.append((differing, measured, errors))
    return out


class Overlaps(NamedTuple):
    """Of a measurement in a job that has trained, and the same one without overlap.

    Attributes:
        reductions: How many there were.
        in_backward: How many of them began inside of a backward.
        gathers: How many there were.
        for_modules: For how many of them a module has waited.
        together: The most that had begun and were not waited for.
        same: Whether products have the same bits.
        kept: Whether the job's switches are what they were, and no hook is left.
    """

    reductions: int
    in_backward: int
    gathers: int
    for_modules: int
    together: int
    same: bool
    kept: bool


def overlapped(job: Job) -> Overlaps:
    """Measure with the job's overlap, and without."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group
    from torch.distributed.distributed_c10d import _CoalescingManager as Work

    from ds_hessian.backends.megatron.gathers import Gathers

    reduce, gather, wait = Group.start_grad_sync, Gathers.begin, Gathers.finish
    start, end, under_way, together = Group.start_param_sync, Work.wait, set[Any](), 0
    in_backward, gathers, for_modules, kept = list[bool](), 0, 0, list[bool]()

    def starting(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal together
        start(self, *args, **kwargs)
        under_way.update({self.param_gather_handle} - {None})
        together = max(together, len(under_way))

    def ending(self: Any) -> None:
        end(self)
        under_way.discard(self)

    def reducing(self: Any, *args: Any, **kwargs: Any) -> None:
        in_backward.append(torch._C._current_graph_task_id() != -1)
        reduce(self, *args, **kwargs)

    def gathering(self: Any) -> None:
        nonlocal gathers
        gather(self)
        gathers += len(self._begun)

    def waiting(self: Any, which: Any = None) -> None:
        nonlocal for_modules
        for_modules += len(self._begun.keys() & (which or ()))
        wait(self, which)

    with running(job) as chunks:
        optimizer = make_optimizer(job, chunks)
        run_schedule(job, chunks, my_batches())
        optimizer.step()
        hessian, ddp, products = hessian_of(chunks, job), chunks[0].ddp_config, []
        modules = [m for chunk in chunks for m in chunk.modules()]
        for overlap in (True, False):
            ddp.overlap_grad_reduce = overlap
            if not overlap and job.distributed:
                for chunk in chunks:
                    chunk.disable_forward_pre_hook()
            hooks = [len(m._forward_pre_hooks) for m in modules]
            with (
                mock.patch.object(Group, "start_grad_sync", reducing if overlap else reduce),
                mock.patch.object(Group, "start_param_sync", starting),
                mock.patch.object(Work, "wait", ending),
                mock.patch.object(Gathers, "begin", gathering),
                mock.patch.object(Gathers, "finish", waiting),
                hessian.measuring(displacement=3e-2),
            ):
                products.append(hessian.matvec(hessian.random_vector(seed=5)).vector)
            kept += [c.ddp_config is ddp and ddp.overlap_grad_reduce == overlap for c in chunks]
            kept.append(hooks == [len(m._forward_pre_hooks) for m in modules])
        figures = len(in_backward), sum(in_backward), gathers, for_modules, together
        return Overlaps(*figures, torch.equal(*products), all(kept))


class Sometimes(nn.Module):
    """Two layers with as many parameters, each in a bucket, of which not all data need the second.

    Args:
        width: Of both.
    """

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        """The loss."""
        y = self.always(x)
        return (self.sometimes(y) if whole else y).square().mean()


def overlapped_in_one_order(job: Job) -> list[Tensor]:
    """Gradients with reductions that overlap, and without, where rank 1 needs one layer alone."""
    from ds_hessian.megatron import MegatronHessian

    def forward_step(iterator: Any, model: Any) -> Any:
        return model(*next(iterator)), lambda loss: (loss, {})

    with groups_of(job):
        torch.manual_seed(0)
        chunk, x, found = wrap(Sometimes(), job), torch.randn(4, 40), []
        run_schedule(job, [chunk], [(x, True)], forward_step)
        for overlap in (True, False):
            chunk.ddp_config.overlap_grad_reduce = overlap
            hessian = MegatronHessian(chunk, QUIET)
            hessian.use([(x, dist.get_rank() == 0)], forward_step, **SIZES)
            with hessian.measuring(displacement=3e-2) as operator:
                found.append(operator.gradient.clone())
    return found


# ---- traps


def note_weights(seen: dict[int, Tensor], module: nn.Module, _: Any) -> None:
    """Keep copies of a module's own weights, by their ids."""
    seen.update((id(p), p.detach().clone()) for p in module.parameters(recurse=False))


def gather_in_flight() -> list[tuple[list[Tensor], list[int]]]:
    """Weights of the first displaced forward: without and with an asynchronous gather that training
    has left in flight, and with one while training has its hooks off; and the numbers of hooks that
    gather before forward: before, inside, after.
    """
    out = []
    for hooked, dispatch in ((True, False), (True, True), (False, True)):
        job = Job(distributed=True, overlap=True)
        with running(job) as chunks:
            hessian, hooks = hessian_of(chunks, job), chunks[0].remove_forward_pre_hook_handles
            if not hooked:
                chunks[0].disable_forward_pre_hook()
            if dispatch:
                chunks[0].start_param_sync()
            counts = [len(hooks)]
            with hessian.backend.measuring(hessian._objective) as session:
                counts.append(len(hooks))
                session.displace(hessian.random_vector(seed=5), 1.0)
                seen = dict[int, Tensor]()
                hook = functools.partial(note_weights, seen)
                taps = [m.register_forward_pre_hook(hook) for m in chunks[0].modules()]
                session.add_gradient(None, range(1))
                for tap in taps:
                    tap.remove()
                displaced = [seen[id(p)] for p in chunks[0].parameters()]
            out.append((displaced, [*counts, len(hooks)]))
    return out


def late(job: Job, signalled: bool) -> tuple[str, bool]:
    """The message where rank 1 gets a signal once stages have met to begin a schedule, or fails in
    what it does for one; and whether the next product is that of before.
    """
    import ds_hessian
    from ds_hessian.backends.megatron import host
    from ds_hessian.backends.megatron.backend import MegatronSession

    places: Any = [(host, "pipeline_rank", 2), (MegatronSession, "_meet_stages", 3)]
    owner, name, last = places[signalled]
    function, calls = getattr(owner, name), [0]

    def failing(*args: Any) -> Any:
        found = function(*args)
        calls[0] += 1
        if calls[0] == last and dist.get_rank() == 1:
            if not signalled:
                raise Broken("on purpose")
            os.kill(os.getpid(), signal.SIGUSR2)
        return found

    with running(job) as chunks:
        hessian, said = hessian_of(chunks, job), "no error"

        def product() -> Tensor:
            with hessian.measuring(displacement=3e-2):
                found: Tensor = hessian.matvec(hessian.random_vector(seed=5)).vector
            return found

        before, handler = product(), signal.signal(signal.SIGUSR2, lambda *_: None)
        try:
            with mock.patch.object(owner, name, failing):
                product()
        except (ds_hessian.HessianError, RuntimeError) as error:
            said = str(error)
        finally:
            signal.signal(signal.SIGUSR2, handler)
        return said, torch.equal(product(), before)


def deferred_weight_gradients() -> list[tuple[Tensor, Tensor, int]]:
    """Gradient, product and gradients left undone of a pipeline, without and with deferral."""
    out = []
    for deferred in (False, True):
        job = Job(pp=2, deferred=deferred)
        with running(job) as chunks:
            from ds_hessian.backends.megatron.host import unwrap

            hessian = hessian_of(chunks, job)
            with hessian.measuring(displacement=3e-2) as operator:
                product = hessian.matvec(hessian.random_vector(seed=5))
            model = unwrap(chunks[0])
            left = len(getattr(model, "embedding_activation_buffer", None) or ())
            left += len(getattr(model, "grad_output_buffer", None) or ())
            out.append((operator.gradient.clone(), product.vector, left))
    return out


def amid_training() -> tuple[Any, Any, list[str]]:
    """Coefficients before and after the job has what Megatron-LM's loop sets and its steps write:
    timers, a scale of the loss, callbacks, logged losses, attention maxima, batches that are
    emptied as they are read; and what of it the measurement has touched.
    """
    job = Job(pp=2, vpp=2, layers=4)
    with running(job) as chunks:
        from megatron.core.timers import Timers
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        from ds_hessian.backends.megatron.host import unwrap

        hessian, inner = hessian_of(chunks, job), make_forward_step(job)
        bare = hessian.spectrum(num_matvecs=1, displacement=3e-2).alphas
        config, timers, calls = chunks[0].config, Timers(2, "minmax"), []
        config.timers, config.grad_scale_func = timers, lambda loss: loss * 8
        config.param_sync_func = config.grad_sync_func = calls.append
        config.finalize_model_grads_func = None
        attention = [unwrap(chunk).decoder.layers[0].self_attention for chunk in chunks]
        for module in attention:
            module.current_max_attn_logits = torch.zeros(4)
        MTPLossLoggingHelper.save_loss_to_tracker(torch.ones(()), 0, 1)

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = next(iterator)
            result = inner(iter([dict(batch)]), model)
            batch.clear()
            unwrap(model).decoder.layers[0].self_attention.current_max_attn_logits += 1
            MTPLossLoggingHelper.save_loss_to_tracker(torch.ones(()), 0, 1)
            return result

        hessian.use(my_batches(), forward_step, **SIZES)
        amid = hessian.spectrum(num_matvecs=1, displacement=3e-2).alphas
        touched = {
            "timers": timers._timers,
            "callbacks": calls,
            "attention maxima": any(m.current_max_attn_logits.any() for m in attention),
            "logged losses": MTPLossLoggingHelper.tracker["values"] != 1,
        }
        MTPLossLoggingHelper.tracker.clear()
        return bare, amid, [name for name, change in touched.items() if change]


def gradients_after_a_spectrum() -> list[tuple[bool, bool]]:
    """After a step of plain DDP and of the distributed optimizer, and a spectrum: whether training
    finds its gradient buffers zero, and its own tensors as `param.grad`.
    """
    out = []
    for job in (Job(), Job(distributed=True)):
        with running(job) as chunks:
            optimizer = make_optimizer(job, chunks)
            chunks[0].zero_grad_buffer()
            run_schedule(job, chunks, my_batches())
            optimizer.step()
            kept = [p.grad for p in chunks[0].parameters()]
            hessian_of(chunks, job).spectrum(num_matvecs=1)
            left = [p.grad for p in chunks[0].parameters()]
            buffers = [buffer.grad_data for buffer in chunks[0].buffers]
            zero = all(not data.any() for data in buffers)
            out.append((zero, all(a is b for a, b in zip(kept, left, strict=True))))
    return out


def with_rerun_machine() -> str:
    """Measure with a loss that asks the rerun machine, outside of its loop; the mode afterwards."""
    with running(Job()) as chunks:
        from megatron.core import rerun_state_machine

        rerun_state_machine.initialize_rerun_state_machine(
            mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS
        )
        machine = rerun_state_machine.get_rerun_state_machine()
        inner = make_forward_step(Job())

        def forward_step(iterator: Any, model: Any) -> Any:
            output, loss_func = inner(iterator, model)

            def validated(losses: Tensor) -> Any:
                result = loss_func(losses)
                machine.validate_result(result[0], torch.isnan, message="loss", fatal=True)
                return result

            return output, validated

        try:
            hessian = hessian_of(chunks, Job()).use(my_batches(), forward_step, **SIZES)
            hessian.spectrum(num_matvecs=1)
            return str(machine.get_mode().value)
        finally:
            rerun_state_machine.destroy_rerun_state_machine()


def refused(job: Job, where: str = "", option: str = "", value: Any = None) -> str:
    """The message with which a job is refused, with one option set behind Megatron's back."""
    import ds_hessian
    from ds_hessian.megatron import MegatronHessian

    with running(job) as chunks:
        if option:
            owner = chunks[0].config if where == "config" else chunks[0].ddp_config
            setattr(owner, option, value)
        try:
            MegatronHessian(chunks[0].module if where == "unwrapped" else chunks)
        except ds_hessian.UnsupportedError as error:
            return str(error)
    return "accepted"


def bad_inputs() -> list[str]:
    """What each wrong use of a Hessian raises, as text."""
    import ds_hessian
    from ds_hessian.megatron import MegatronHessian

    job, said = Job(), list[str]()
    with running(job) as chunks:
        batches, step = my_batches(), make_forward_step(job)

        def fresh() -> Any:
            return MegatronHessian(chunks, QUIET)

        def ready(forward_step: Any) -> Any:
            return fresh().use(batches, forward_step, **SIZES)

        def sized(**sizes: Any) -> Any:
            return fresh().use(batches, step, **{**SIZES, **sizes})

        wrong: list[Callable[[], Any]] = [
            lambda: fresh().spectrum(),
            lambda: fresh().spectrum(batches=batches),
            lambda: fresh().use(batches, step),
            lambda: fresh().use(batches, "forward_step", **SIZES),
            lambda: fresh().use(batches[0], step, **SIZES),
            lambda: fresh().use(7, step, **SIZES),
            lambda: fresh().use([], step, **SIZES),
            lambda: sized(seq_length=0),
            lambda: sized(micro_batch_size=2.0),
            lambda: ready(lambda iterator, model: next(iterator)).spectrum(),
            lambda: ready(lambda iterator, model: step(iterator, model)[0]).spectrum(),
            lambda: ready(lambda i, model: (step(i, model)[0], lambda x: x.sum())).spectrum(),
            lambda: ready(lambda i, model: (next(i), step(i, model))[1]).spectrum(),
            lambda: MegatronHessian([]),
            lambda: MegatronHessian([*chunks, *chunks]),
            lambda: MegatronHessian(chunks, "ds_config.json"),
        ]
        for use in wrong:
            try:
                use()
                said.append("accepted")
            except ds_hessian.HessianError as error:
                said.append(f"{type(error).__name__}: {error}")
        chunks[0].config.calculate_per_token_loss = True
        try:
            ready(lambda i, model: (step(i, model)[0], lambda x: (x.sum(), {}))).spectrum()
        except ds_hessian.ConfigError as error:
            said.append(f"ConfigError: {error}")
        finally:
            chunks[0].config.calculate_per_token_loss = False
    return said


def bad_stages(job: Job) -> list[str]:
    """What each use of a pipeline is told that would leave the other stages waiting, as text; and
    whether the next measurement is right.
    """
    import ds_hessian

    with running(job) as chunks:
        batches, step, said = my_batches(), make_forward_step(job), list[str]()
        hessian = hessian_of(chunks, job)
        before = hessian.spectrum(num_matvecs=1).alphas

        def sized(**sizes: Any) -> Any:
            return hessian.use(batches, step, **{**SIZES, **sizes})

        def returning(output: Any = None, change: Any = None) -> Any:
            def forward_step(iterator: Any, model: Any) -> Any:
                found, loss_func = step(iterator, model)
                made = output(found) if output else found

                def changed(losses: Tensor) -> Any:
                    return change(*loss_func(losses)) if change else loss_func(losses)

                return made, changed

            return hessian.use(batches, forward_step, **SIZES)

        wrong: list[Callable[[], Any]] = [
            lambda: sized(seq_length=2 * SEQUENCE),
            lambda: sized(micro_batch_size=SIZE - 1),
            lambda: returning(lambda found: None),
            lambda: returning(lambda found: found.half()),
            lambda: returning(lambda found: found.detach()),
            lambda: returning(change=lambda loss, count, logs: (loss, count.float(), logs)),
            lambda: returning(change=lambda loss, count, logs: (loss, count.view(1), logs)),
            lambda: returning(change=lambda loss, count, logs: (loss, int(count), logs)),
            lambda: returning(change=lambda loss, count, logs: (loss.expand(2), count, logs)),
            lambda: returning(change=lambda loss, count, logs: (loss.detach(), logs)),
        ]
        for use in wrong:
            try:
                use().spectrum(num_matvecs=1)
                said.append("accepted")
            except ds_hessian.HessianError as error:
                said.append(str(error))
        again = sized().spectrum(num_matvecs=1).alphas
        return [*said, "the same" if (again == before).all() else "another"]


def other_batches() -> list[float]:
    """Loss on half of the micro-batches: by `use` in full, and given to `spectrum` alone."""
    job = Job()
    with running(job) as chunks:
        half = my_batches()[:1]
        first = hessian_of(chunks, job).use(half, make_forward_step(job), **SIZES)
        again = hessian_of(chunks, job)
        return [first.spectrum(num_matvecs=2).loss, again.spectrum(half, num_matvecs=2).loss]


def fp32_passes(job: Job) -> str:
    """The message for passes of another precision than the model's."""
    import ds_hessian

    with running(job) as chunks:
        try:
            hessian_of(chunks, job).spectrum(precision="fp32")
        except ds_hessian.UnsupportedError as error:
            return str(error)
    return "accepted"


def interleaved_mistakes() -> list[str]:
    """The messages for 3 micro-batches in an interleaved pipeline of 2 stages, and one chunk."""
    import ds_hessian

    job, said = Job(pp=2, vpp=2, layers=4), list[str]()
    with running(job) as chunks:
        for model, batches in ((chunks, my_batches()[:3]), (chunks[0], my_batches())):
            try:
                hessian_of(model, job).use(batches, make_forward_step(job), **SIZES)
            except ds_hessian.ConfigError as error:
                said.append(str(error))
    return said


def infinite_loss() -> str:
    """The message for a loss that is NaN on the last rank alone."""
    import torch.distributed as dist

    import ds_hessian

    with running(Job()) as chunks:
        inner = make_forward_step(Job())

        def forward_step(iterator: Any, model: Any) -> Any:
            output, loss_func = inner(iterator, model)
            return output * (float("nan") if dist.get_rank() == 1 else 1.0), loss_func

        try:
            hessian_of(chunks, Job()).use(my_batches(), forward_step, **SIZES).spectrum()
        except ds_hessian.HessianError as error:
            return str(error)
    return "no error"
