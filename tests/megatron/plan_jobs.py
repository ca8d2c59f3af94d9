"""What runs on the ranks for plans: a live job's counts and memory plan, and the forecast's."""

from __future__ import annotations

from typing import Any

from ds_hessian.planning import Job as Planned
from ds_hessian.planning import Mesh, Shape
from tests.megatron.job import SEQUENCE, VOCABULARY, Job, hessian_of, make_optimizer, running

Items = list[tuple[str, str, int]]


def planned(job: Job, ranks: int) -> Planned:
    """The job, for a plan."""
    shape = Shape(
        layers=job.layers,
        hidden=16,
        heads=4,
        vocabulary=VOCABULARY,
        sequence=SEQUENCE,
        groups=job.query_groups,
        ffn=20,
        gated=True,
        positions=SEQUENCE,
        bias=job.bias,
        experts=job.experts,
        expert_ffn=12,
        shared_ffn=job.shared,
    )
    mesh = Mesh(
        tensor=job.tp,
        pipeline=job.pp,
        virtual=job.vpp,
        expert=job.ep,
        expert_tensor=job.etp if job.experts else 0,
        sequence_parallel=job.sequence_parallel,
        distributed_optimizer=job.distributed,
        instances=job.instances,
    )
    return Planned(
        num_parameters=shape.parameters,
        world_size=ranks,
        dtype="bf16" if job.dtype == "bfloat16" else "fp32",
        accelerator=False,
        mesh=mesh,
        shape=shape,
    )


def live_and_planned(job: Job) -> list[dict[str, Any]]:
    """Of this rank: parameters of the model and of its layers, coordinates, the plan's items."""
    import torch.distributed as dist

    from ds_hessian.analyses import Spectrum
    from ds_hessian.planning import plan

    with running(job) as chunks:
        from ds_hessian.backends.megatron import host

        optimizer = make_optimizer(job, chunks)
        hessian = hessian_of(chunks, job)
        assert optimizer is not None
        forecast = planned(job, dist.get_world_size())
        assert forecast.mesh is not None
        stage = host.pipeline_rank()
        share = forecast.shares[stage]
        config = hessian.config.with_overrides(precision=job.precision)
        space = hessian.backend.space
        live = {
            "n": space.n,
            "layers": sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            "n_local": space.n_local,
            "items": _items(hessian.memory_plan()),
        }
        foreseen = {
            "n": share.n,
            "layers": sum(forecast.on_rank(forecast.mesh, stage)),
            "n_local": share.n_local,
            "items": _items(plan(Spectrum(), share, config)),
        }
        return [live, foreseen]


def _items(plan: Any) -> Items:
    return [(item.name, item.tier, item.size) for item in plan.items]
