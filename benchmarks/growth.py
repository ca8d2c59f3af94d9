"""What attaching to a job, and agreeing on one measurement, cost a rank of a large job.

    OMP_NUM_THREADS=1 python benchmarks/growth.py

One process is one rank of each job in turn: real model chunks of megatron-core (on a CPU, see
tests/megatron/shim.py) in torch's fake process group, which has any number of ranks and answers
every collective at once with this rank's own figures. Weights are memory that nothing touches. The
time is of this process alone: what networks add is in the messages (steps of binary trees and of
recursive doubling, one after the other) and the bytes (of all buffers, in and out).

Each pipeline stage tells the names of its parameters once. The fake group has one stage, so what
one stage tells, and figures for each name, are counted as often as there are stages.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from measuring import peak_bytes
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the group

from ds_hessian.hosts import megatron_hessian
from ds_hessian.ranks import entrance
from tests.megatron import shim

WORLDS = (512, 8192, 16384)
LARGE = 1 << 20
FREE: dict[Any, int] = {"host": 2**41, "disk": 2**43}
NODE = 8
"""Ranks of a node, which share what is free."""
os.environ.setdefault("LOCAL_WORLD_SIZE", str(NODE))


@dataclass(frozen=True)
class Model:
    """A model and the part of the mesh that does not grow."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    tp: int
    pp: int
    ep: int = 1
    experts: int = 0
    vocabulary: int = 128256
    gated: bool = True


MODELS = (
    Model("70 B", 80, 8192, 28672, 64, 8, tp=8, pp=8),
    Model("1 T", 128, 25600, 102400, 160, 160, tp=8, pp=64, vocabulary=51200, gated=False),
    Model("1 T, experts", 64, 7168, 2048, 64, 8, tp=1, pp=16, ep=32, experts=352),
)


@dataclass
class Cost:
    """Of a part of the work, on one rank."""

    seconds: float = 0.0
    peak: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def messages(self, ranks: int) -> int:
        """Steps of all collectives, one after the other."""
        depth = math.ceil(math.log2(ranks))
        return sum(n * depth * (2 if name == "allreduce" else 1) for name, n in self.calls.items())

    def times(self, number: int) -> Cost:
        """The same collectives so often."""
        calls = {name: n * number for name, n in self.calls.items()}
        return Cost(self.seconds, self.peak, calls, self.bytes * number)


class Untouched(TorchFunctionMode):
    """Leaves the memory of large tensors as it is allocated: no page of it becomes resident."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and args and math.prod(torch.Size(_shape(args))) > LARGE:
            return torch.empty(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_ and args[0].numel() > LARGE:
            return args[0]
        return func(*args, **(kwargs or {}))


def _shape(args: Any) -> Any:
    return args if isinstance(args[0], int) else args[0]


@contextlib.contextmanager
def job(model: Model, rank: int, ranks: int) -> Iterator[list[Any]]:
    """The model chunks of one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)
    new_group = dist.new_group

    def own(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Groups that this rank is not in are training's to make."""
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, *args, **kwargs)

    torch.distributed.new_group = own  # type: ignore[assignment]
    try:
        parallel_state.initialize_model_parallel(
            model.tp,
            model.pp,
            expert_model_parallel_size=model.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        with Untouched():
            chunks = build(model)
        # Sums of the fake group are this rank's alone: in a job whose ranks agree they are 0.
        with patch.object(entrance, "balanced", lambda sums: True):
            yield chunks
    finally:
        torch.distributed.new_group = new_group
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def build(model: Model) -> list[Any]:
    """The chunk of this rank, with the distributed optimizer's buffers."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts: dict[str, Any] = {}
    if model.experts:
        experts = {"num_moe_experts": model.experts, "moe_router_topk": 8}
    config = TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        gated_linear_unit=model.gated,
        activation_func=torch.nn.functional.silu if model.gated else torch.nn.functional.gelu,
        add_bias_linear=not model.gated,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=model.tp,
        pipeline_model_parallel_size=model.pp,
        expert_model_parallel_size=model.ep,
        expert_tensor_parallel_size=1,
        **experts,
    )
    net = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=model.experts or None, moe_grouped_gemm=False),
        vocab_size=model.vocabulary,
        max_sequence_length=4096,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(torch.bfloat16)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=40_000_000
    )
    return [DistributedDataParallel(config, ddp, net)]


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


@contextlib.contextmanager
def measured() -> Iterator[Cost]:
    """The cost of the body."""
    from ds_hessian.ranks.collectives import COLLECTIVES

    cost, methods = Cost(), vars(dist.ProcessGroup)
    kept = {name: methods[name] for name in COLLECTIVES if name in methods}

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            cost.calls[name] = cost.calls.get(name, 0) + 1
            cost.bytes += sum(t.nbytes for t in tensors(args[1:]))
            return method(*args, **kwargs)

        return call

    for name in kept:
        setattr(dist.ProcessGroup, name, counting(name, getattr(dist.ProcessGroup, name)))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = peak_bytes(), time.process_time()
    try:
        yield cost
    finally:
        cost.seconds, cost.peak = time.process_time() - began, peak_bytes() - before
        for name, method in kept.items():
            setattr(dist.ProcessGroup, name, method)


def forward_step(data: Any, model: Any) -> Any:
    """Never called."""
    raise NotImplementedError


def parts(model: Model, chunks: list[Any]) -> Iterator[tuple[str, Cost]]:
    """The costs of a rank, from attaching to the agreements of one spectrum."""
    from ds_hessian.analyses import Spectrum
    from ds_hessian.analyses.base import share_of
    from ds_hessian.backends.megatron import replicas
    from ds_hessian.backends.megatron.runs import parameters_of
    from ds_hessian.backends.objective import MicroBatches
    from ds_hessian.errors import UnsupportedError
    from ds_hessian.planning import needs_of, surely_fits
    from ds_hessian.ranks import collective, count_on_nodes, exchange
    from ds_hessian.resume.identity import _micro_batches

    device = torch.device("cpu")
    with measured() as names:
        parameters_of(chunks, device)
    yield "names of all parameters", names.times(model.pp)
    with measured() as attaching:
        hessian = megatron_hessian(chunks, {"num_matvecs": 20, "basis": {"dtype": "bf16"}})
    for name, number in names.calls.items():
        attaching.calls[name] -= number
    attaching.bytes -= names.bytes
    yield "mapping the shards, the rest of attach()", attaching
    batches = [{"tokens": torch.zeros(1, 1)} for _ in range(16)]
    with measured() as using:
        hessian.use(batches, forward_step, seq_length=4096, micro_batch_size=1)
    yield "use() of 16 micro-batches", using
    with measured() as counting:
        count_on_nodes()
    yield "ranks of each node, counted once", counting
    exchange._most_on_a_node[exchange._world()] = NODE  # by the fake group all are on one
    with measured() as planning:
        config = hessian.config.with_overrides(precision="model")
        needs = needs_of(Spectrum(), share_of(hessian.backend), config, FREE)
        assert surely_fits(needs, dist.get_world_size(), device)
    yield "memory plan of a spectrum", planning
    with measured() as checking, contextlib.suppress(UnsupportedError):
        backend: Any = hessian.backend  # the fake group owns the coordinates of one rank only
        replicas.refuse_uneven_copies(chunks, backend.runs, backend.parameters, backend.space)
    yield "copies of parameters compared", replace(checking, bytes=checking.bytes * model.pp)
    with measured() as opening, collective("measuring", device):
        pass
    yield "a lockstep, opened and closed", opening
    with measured() as identifying:
        _micro_batches(MicroBatches(batches), device)
    yield "identity of the micro-batches, with resume", identifying


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    given = parser.parse_args()
    shim.install()
    print("| model | part | ranks | s | MB | collectives | messages | bytes |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for model in (model for model in MODELS if model.name in given.models):
        for ranks in given.worlds:
            found: dict[str, list[Cost]] = {}
            for rank in (0, ranks // 2 + 3, ranks - 1):
                with job(model, rank, ranks) as chunks:
                    for part, cost in parts(model, chunks):
                        found.setdefault(part, []).append(cost)
            for part, costs in found.items():
                print(line(model, part, ranks, costs), flush=True)


def line(model: Model, part: str, ranks: int, costs: list[Cost]) -> str:
    """The largest figures of the ranks."""
    seconds, peak = max(c.seconds for c in costs), max(c.peak for c in costs)
    calls = max(sum(c.calls.values()) for c in costs)
    messages, size = max(c.messages(ranks) for c in costs), max(c.bytes for c in costs)
    return (
        f"| {model.name} | {part} | {ranks} | {seconds:.3f} | {peak / 2**20:.1f} | {calls} | "
        f"{messages} | {size:,} |"
    )


if __name__ == "__main__":
    main()
