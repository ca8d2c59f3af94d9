"""`ds-hessian plan` against measurements: memory and time of a product, in several configurations.

    deepspeed --num_accelerators 2 benchmarks/plan.py

For each configuration one engine trains a few steps; one plain gradient is timed and its peak
memory read; then a spectrum is measured. The plan gets the gradient's time and nothing else of the
measurement. Prints predicted and measured seconds of a product, and peak memory of a rank beyond
training's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from measuring import give_back_freed_memory, peak_bytes, peak_since_here, plain_gradient
from train_gpt import GPT, sample, standard_library

import ds_hessian
from ds_hessian import planning
from ds_hessian.analyses import Spectrum
from ds_hessian.memory import Item, MemoryPlan
from ds_hessian.planning import Job, times

WIDTH, LAYERS, CONTEXT = 256, 4, 32


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


def measure(case: Case) -> str:
    """One line of the table."""
    engine = engine_of(case)
    text, generator = standard_library(), torch.Generator().manual_seed(dist.get_rank())
    batches = [sample(text, 4, CONTEXT, generator) for _ in range(case.micro_batches)]
    for _ in range(2):
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()
    engine.hessian_spectrum(batches, num_matvecs=2)  # modules and kernels are loaded
    before = peak_since_here()
    engine.module.eval()
    gradients = [plain_gradient(engine, batches)]
    passes = Item("a training pass", "host", peak_bytes() - before, ("passes",))
    before = peak_since_here()
    spectrum = engine.hessian_spectrum(batches, **case.settings)
    measured = peak_bytes() - before
    gradients.append(plain_gradient(engine, batches))
    share = Job(
        num_parameters=spectrum.n,
        world_size=dist.get_world_size(),
        stage=case.stage,
        dtype=case.dtype,
        offload_optimizer=bool(case.zero),
        accelerator=False,
    ).share
    config = engine.hessian.config.with_overrides(
        num_micro_batches=case.micro_batches, **case.settings
    )
    plan = MemoryPlan.of(planning.plan(Spectrum(), share, config).items, [passes])
    seconds = times.plan_time(
        sum(gradients) / 2, share, times.CPU, config, Spectrum().products(config)
    ).product
    engine.destroy()
    cost = spectrum.cost
    return (
        f"| {case} | {cost.gradients_per_product:.2f} | {seconds:.3f} | "
        f"{cost.seconds_per_product:.3f} | {seconds / cost.seconds_per_product:.2f} | "
        f"{plan.peak('host') / 2**20:.1f} | {measured / 2**20:.1f} | "
        f"{plan.peak('host') / measured:.2f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.parse_args()
    give_back_freed_memory()
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed()
    if dist.get_rank() == 0:
        print("| job | gradients | s, planned | s, measured | ratio | MB, planned | MB | ratio |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        line = measure(case)
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
