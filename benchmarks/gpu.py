"""What a product and a Lanczos step cost on a GPU, of one tool in this process: a row of a table.

    python benchmarks/gpu.py "ds_hessian, ZeRO-3" --dtype bf16 --precision fp32

The GPT has 125 million parameters unless its sizes are given. ds_hessian measures a live engine
under ZeRO-3 with NCCL on one device; of the other tools, what benchmarks/peers.py has of them that
follows the device of its operands. Everything is timed between two waits for the device. A Lanczos
step is a run over its steps: trials, products and orthogonalisation.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import peers
import torch
from measuring import peak_bytes, plain_gradient
from torch import nn
from train_gpt import GPT, sample, standard_library

MICRO_BATCHES, SIZE = 8, 4
HEAD = (
    "| tool | dtype | gradient | product, gradients | Lanczos step, gradients | "
    "gradients evaluated a product | rest of Lanczos | MB, more |"
)


@dataclass(frozen=True)
class Job:
    """The part of `peers.Files` that its tools read, on a device."""

    device: torch.device
    batches: list[list[torch.Tensor]]
    sizes: tuple[int, int, int]

    def net(self) -> nn.Module:
        """The GPT, at its initial weights, in eval mode."""
        width, layers, context = self.sizes
        torch.manual_seed(0)
        return GPT(width, layers, 4, context, 0.0).eval().to(self.device)


def job_of(options: argparse.Namespace) -> Job:
    """Micro-batches and sizes, as the command asks for them."""
    device = torch.device(options.device)
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    batches = [
        [tensor.to(device) for tensor in sample(text, SIZE, options.context, generator)]
        for _ in range(MICRO_BATCHES)
    ]
    return Job(device, batches, (options.width, options.layers, options.context))


class Clock:
    """Times calls, each between two waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, of: Callable[..., Any], *arguments: Any) -> float:
        """Seconds of one call."""
        self.wait()
        started = time.perf_counter()
        of(*arguments)
        self.wait()
        return time.perf_counter() - started

    def peak(self) -> float:
        """MB at most so far, of the device or of this process."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return peak_bytes() / 2**20


def ours(job: Job, options: argparse.Namespace, clock: Clock) -> list[str]:
    """The figures of a spectrum on a live engine."""
    import deepspeed

    import ds_hessian

    deepspeed.utils.logger.setLevel("ERROR")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "hessian": {
            "progress": False,
            "plot": False,
            "finite_difference": {"precision": options.precision},
        },
    }
    if options.dtype != "fp32":
        config[options.dtype] = {"enabled": True}
    net = job.net()
    engine, *_ = ds_hessian.initialize(model=net, model_parameters=net.parameters(), config=config)
    for batch in job.batches:  # Adam's state and the gather trace exist from here on
        engine.backward(engine(*batch))
        engine.step()
    engine.module.eval()
    gradients = [clock(plain_gradient, engine, job.batches) for _ in range(3)][1:]
    trained, runs, spectra = clock.peak(), list[float](), list[Any]()

    def spectrum() -> None:
        spectra.append(engine.hessian_spectrum(job.batches, num_matvecs=options.steps))

    for _ in range(options.rounds):
        runs.append(clock(spectrum))
        gradients += [clock(plain_gradient, engine, job.batches) for _ in range(4)]
    more, gradient = clock.peak() - trained, fmean(gradients)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    costs = [spectrum.cost for spectrum in spectra]
    return [
        f"{1e3 * gradient:.1f} ms",
        f"{fmean(c.seconds_per_product for c in costs) / gradient:.2f}",
        f"{fmean(runs) / options.steps / gradient:.2f}",
        f"{fmean(c.gradients_per_product for c in costs):.2f}",
        f"{100 * fmean(c.lanczos_overhead for c in costs):.2f} %",
        f"{more:.0f}",
    ]


def peer(tool: peers.Peer, options: argparse.Namespace, clock: Clock) -> list[str]:
    """The figures of another tool."""
    gradients = [clock(tool.gradient) for _ in range(3)][1:]
    trained, products, runs = clock.peak(), list[float](), list[float]()
    v = {name: torch.randn_like(w, dtype=torch.float32) for name, w in tool.net.named_parameters()}
    tool.product(v)
    for _ in range(options.rounds):
        products += [clock(tool.product, v) for _ in range(4)]
        runs.append(clock(tool.lanczos))
        gradients += [clock(tool.gradient) for _ in range(4)]
    more, gradient = clock.peak() - trained, fmean(gradients)
    return [
        f"{1e3 * gradient:.1f} ms",
        f"{fmean(products) / gradient:.2f}",
        f"{fmean(runs) / peers.STEPS / gradient:.2f}",
        *("", ""),
        f"{more:.0f}",
    ]


PEERS: dict[str, Callable[[Any, str], peers.Peer]] = {
    "hessian-eigenthings, autograd": lambda j, d: peers.Eigenthings(j, d, "autograd"),
    "hessian-eigenthings, differences": lambda j, d: peers.Eigenthings(j, d, "finite_difference"),
    "curvlinops": peers.Curvlinops,
}
OURS = "ds_hessian, ZeRO-3"


def main() -> None:
    """Measure one tool and print its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=[OURS, *PEERS, "head"], help="head: that of the table")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="fp32", choices=list(peers.DTYPES))
    parser.add_argument("--precision", default="model", help="of ds_hessian's passes")
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.tool == "head":
        print(f"{HEAD}\n{'|---' * 8}|")
        return
    # One rank, as a launcher would say it; DeepSpeed has read DS_ACCELERATOR as it was imported.
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(peers.free_port())}
    os.environ.update(place)
    job, clock = job_of(options), Clock(torch.device(options.device))
    if options.tool == OURS:
        figures = ours(job, options, clock)
    else:
        torch.set_default_device(job.device)  # peers draw vectors where torch does
        figures = peer(PEERS[options.tool](job, options.dtype), options, clock)
    passes = ", fp32 passes" if options.precision == "fp32" else ""
    print(f"| {options.tool}{passes} | {options.dtype} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
