"""What products cost where runs are costly: one run at each point, beside runs of pilots.

    deepspeed --num_accelerators 2 benchmarks/few_runs.py

For jobs of megatron-core on two ranks, with a pipeline and without: the third to the twelfth
product of a measurement by the clock, in gradients of the same job (with the gather and the
reduction of training), with runs over all micro-batches (`Session.costly_runs`, as is) and with
those of pilot and rest, which is what other hosts have. Measurements of both kinds and gradients
take turns. The largest differences between products of both kinds and their errors are printed too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from unittest.mock import patch

import plan_megatron as megatron
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian.backends.megatron import host
from ds_hessian.megatron import MegatronHessian
from ds_hessian.operators.finite_difference import SEARCHED
from ds_hessian.planning import Mesh

WHOLE = {"distributed_optimizer": False}
CASES = {
    "PP 2, 4 micro-batches": megatron.Case(Mesh(pipeline=2, **WHOLE), 4),
    "PP 2, 8 micro-batches": megatron.Case(Mesh(pipeline=2, **WHOLE), 8),
    "PP 2 interleaved, 8 micro-batches": megatron.Case(Mesh(pipeline=2, virtual=2, **WHOLE), 8),
    "DP 2, 8 micro-batches": megatron.Case(Mesh(**WHOLE), 8),
    "DP 2, distributed optimizer, 8 micro-batches": megatron.Case(Mesh(), 8),
}
PRODUCTS = 12


@dataclass
class Found:
    """Figures of the later products of some measurements.

    Attributes:
        seconds, evaluated, runs: Of each product: its time, its gradients, runs of the schedule.
        vectors, errors: Of the last measurement: the products, and their stated errors.
    """

    seconds: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)
    vectors: list[Tensor] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def measure(hessian: Any, few: bool, found: Found) -> None:
    """Measure, and note what the later products are and take."""
    vectors = [hessian.random_vector(seed=seed) for seed in range(PRODUCTS)]
    found.vectors, found.errors = [], []
    with hessian.measuring() as operator:
        operator.session.costly_runs = few
        with patch.object(host, "run_schedule", wraps=host.run_schedule) as schedule:
            for i, v in enumerate(vectors):
                evaluated, runs = operator.cost.gradient_evaluations, schedule.call_count
                began = time.perf_counter()
                product = hessian.matvec(v)
                if i >= SEARCHED:
                    found.seconds.append(time.perf_counter() - began)
                    found.evaluated.append(operator.cost.gradient_evaluations - evaluated)
                    found.runs.append(schedule.call_count - runs)
                    found.vectors.append(product.vector / product.norm)
                    found.errors.append(product.error or 0.0)


def row(name: str, case: megatron.Case, rounds: int) -> str:
    """Figures of a job, as a row of Markdown."""
    generator = torch.Generator().manual_seed(dist.get_rank() * (case.mesh.pipeline == 1))
    shape = (megatron.SIZE, megatron.SHAPE.sequence + 1)
    tokens = [torch.randint(256, shape, generator=generator) for _ in range(case.micro_batches)]
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    few, pilots, gradients = Found(), Found(), list[float]()
    with megatron.chunks_of(case) as chunks:
        hessian: Any = MegatronHessian(chunks, {"progress": False})
        hessian.use(batches, megatron.forward_step, **megatron.SIZES)
        megatron.plain_gradient(chunks, batches)
        for _ in range(rounds):
            for kind in (few, pilots):
                measure(hessian, kind is few, kind)
                gradients += [megatron.plain_gradient(chunks, batches) for _ in range(4)]
        space = hessian.backend.space
        pairs = zip(few.vectors, pilots.vectors, strict=True)
        apart = max(space.norm(a - b) for a, b in pairs)
    ratios = " | ".join(
        f"{fmean(kind.seconds) / fmean(gradients):.2f} | {fmean(kind.evaluated):.2f} | "
        f"{fmean(kind.runs):.1f}"
        for kind in (few, pilots)
    )
    told = max(few.errors) + max(pilots.errors)
    return f"| {name} | {ratios} | {apart:.0e} | {told:.0e} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    megatron.prepare()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rows = [row(name, case, args.rounds) for name, case in CASES.items()]
    if dist.get_rank() == 0:
        print("| | few runs: by the clock | evaluated | runs ", end="")
        print("| pilots: by the clock | evaluated | runs | apart | stated |")
        print("|---" * 9 + "|", *rows, sep="\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
