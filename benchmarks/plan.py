"""`ds-hessian plan` against measurements: memory and time of a product, in several configurations.

    deepspeed --num_accelerators 2 benchmarks/plan.py
    python benchmarks/plan.py --paper

For each configuration one job, of DeepSpeed or of Megatron, trains a few steps; one plain gradient
is timed and its peak memory read; then a spectrum is measured. The plan gets the gradient's time
and nothing else of the measurement. Prints predicted and measured seconds of a product, and peak
memory of a rank beyond training's. With `--paper`, which measures nothing, plans stand beside the
cost model and the figures of the paper.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import deepspeed
import paper_costs
import plan_megatron as megatron
import torch
import torch.distributed as dist
from measuring import give_back_freed_memory, peak_bytes, peak_since_here, plain_gradient
from train_gpt import GPT, sample, standard_library

import ds_hessian
from ds_hessian import HessianSpectrum, planning
from ds_hessian.analyses import Spectrum
from ds_hessian.config import HessianConfig
from ds_hessian.memory import Item, MemoryPlan
from ds_hessian.planning import Job, times
from tests.megatron import job as tested

WIDTH, LAYERS, CONTEXT = 256, 4, 32
GRADIENTS = 3
"""Plain gradients before a spectrum, and after it: the machine's speed changes."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    stage: int
    dtype: str
    micro_batches: int
    settings: dict[str, Any]
    zero: dict[str, Any]

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage} {self.dtype}", *self.zero, f"{self.micro_batches} mb"]
        return ", ".join([*words, *(f"{k}={v}" for k, v in self.settings.items())])


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CASES = [
    Case(3, "fp32", 8, {"num_matvecs": 15}, {}),
    Case(3, "bf16", 8, {"num_matvecs": 10, "dtype": "bf16"}, {}),
    Case(3, "fp32", 2, {"num_matvecs": 10, "scheme": "fourth_order"}, {}),
    Case(3, "fp32", 4, {"num_matvecs": 10, "mode": "none"}, OFFLOAD),
    Case(3, "bf16", 8, {"num_matvecs": 6, "dtype": "bf16", "precision": "fp32"}, {}),
    Case(2, "bf16", 4, {"num_matvecs": 10, "dtype": "bf16", "device": "host"}, {}),
    Case(1, "fp32", 16, {"num_matvecs": 8}, {}),
    Case(0, "fp32", 8, {"num_matvecs": 8, "displacement": 1e-2}, {}),
]


def engine_of(case: Case) -> Any:
    """A fresh engine."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, **case.zero},
        "zero_force_ds_cpu_optimizer": False,
        "hessian": {
            "progress": False,
            "plot": False,
            "finite_difference": {"precision": "model"},
        },
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    model = GPT(WIDTH, LAYERS, 4, CONTEXT, 0.1)
    return ds_hessian.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


HEAD = "| job | gradients | s, planned | s, measured | ratio | MB, planned | MB | ratio |"


def row(
    case: object,
    spectrum: HessianSpectrum,
    plan: MemoryPlan,
    measured: int,
    seconds: float,
) -> str:
    """One line of the table: memory is that of the rank that is furthest from its plan."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (plan.peak("host"), measured))
    peak, most = max(found, key=lambda pair: abs(math.log(pair[0] / pair[1])))
    cost = spectrum.cost
    return (
        f"| {case} | {cost.gradients_per_product:.2f} | {seconds:.3f} | "
        f"{cost.seconds_per_product:.3f} | {seconds / cost.seconds_per_product:.2f} | "
        f"{peak / 2**20:.1f} | {most / 2**20:.1f} | {peak / most:.2f} |"
    )


def data(count: int) -> list[Any]:
    """This rank's micro-batches."""
    text, generator = standard_library(), torch.Generator().manual_seed(dist.get_rank())
    return [sample(text, 4, CONTEXT, generator) for _ in range(count)]


def measure(case: Case) -> str:
    """One line of the table."""
    engine = engine_of(case)
    batches = data(case.micro_batches)
    for _ in range(2):
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()
    engine.hessian_spectrum(batches, num_matvecs=2)  # modules and kernels are loaded
    before = peak_since_here()
    engine.module.eval()
    gradients = [plain_gradient(engine, batches) for _ in range(GRADIENTS)]
    wide = case.settings.get("precision") == "fp32"  # of a model in 16 bits: twice as much
    passes = Item("a pass", "host", (1 + wide) * (peak_bytes() - before), ("passes",))
    before = peak_since_here()
    spectrum = engine.hessian_spectrum(batches, **case.settings)
    measured = peak_bytes() - before
    gradients += [plain_gradient(engine, batches) for _ in range(GRADIENTS)]
    job = Job(
        num_parameters=spectrum.n,
        world_size=dist.get_world_size(),
        stage=case.stage,  # type: ignore[arg-type]
        dtype=case.dtype,  # type: ignore[arg-type]
        offload_optimizer=bool(case.zero),
        accelerator=False,
    )
    config = engine.hessian.config.with_overrides(
        num_micro_batches=case.micro_batches, **case.settings
    )
    seconds = sum(gradients) / len(gradients)
    line = compared(case, spectrum, job, 0, config, passes, measured, seconds)
    engine.destroy()
    return line


def measure_megatron(case: megatron.Case) -> str:
    """One line of the table."""
    from ds_hessian.backends.megatron import host
    from ds_hessian.megatron import MegatronHessian

    mesh = case.mesh
    with megatron.chunks_of(case) as chunks:
        optimizer = tested.make_optimizer(case.tested, chunks, lr=1e-4)
        batches = data(case.micro_batches)
        for _ in range(2):
            megatron.plain_gradient(chunks, batches)
            optimizer.step()
        settings = {"progress": False, "plot": False, "finite_difference": {"precision": "model"}}
        hessian = MegatronHessian(chunks, settings, optimizer)
        hessian.use(batches, megatron.forward_step, **megatron.SIZES)
        hessian.spectrum(num_matvecs=2)  # modules and kernels are loaded
        before = peak_since_here()
        gradients = [megatron.plain_gradient(chunks, batches) for _ in range(GRADIENTS)]
        passes = Item("a training pass", "host", peak_bytes() - before, ("passes",))
        optimizer.step()
        before = peak_since_here()
        spectrum = hessian.spectrum(**case.settings)
        measured = peak_bytes() - before
        gradients += [megatron.plain_gradient(chunks, batches) for _ in range(GRADIENTS)]
        assert spectrum.n == case.shape.parameters
        config = hessian.config.with_overrides(
            num_micro_batches=case.micro_batches, **case.settings
        )
        stage = host.pipeline_rank() if mesh.pipeline > 1 else 0
        seconds = sum(gradients) / len(gradients)
        return compared(case, spectrum, case.job, stage, config, passes, measured, seconds)


def compared(
    case: object,
    spectrum: HessianSpectrum,
    job: Job,
    stage: int,
    config: HessianConfig,
    passes: Item,
    measured: int,
    gradient: float,
) -> str:
    """The plan beside what was measured."""
    share = job.shares[stage]
    plan = MemoryPlan.of(planning.plan(Spectrum(), share, config).items, [passes])
    time = times.plan_time(
        gradient,
        share,
        planning.CPU,
        config,
        Spectrum().products(config),
        times.run_of(job, planning.CPU),
    )
    return row(case, spectrum, plan, measured, time.product)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--paper", action="store_true", help="the paper's figures beside plans")
    parser.add_argument("--only", default="", help="configurations whose line contains this")
    args = parser.parse_args()
    if args.paper:
        print("\n\n".join(paper_costs.tables()))
        return
    give_back_freed_memory()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        print(f"{HEAD}\n|---|---|---|---|---|---|---|---|", flush=True)
    for case in (case for case in CASES if args.only in str(case)):
        line = measure(case)
        if dist.get_rank() == 0:
            print(line, flush=True)
    megatron.prepare()  # not before: megatron-core on a CPU changes torch for the process
    for other in (case for case in megatron.CASES if args.only in str(case)):
        line = measure_megatron(other)
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
