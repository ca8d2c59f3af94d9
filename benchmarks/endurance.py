"""Many spectra in one job: memory, open files and threads stay flat.

A GPT in DistributedDataParallel, or a ZeRO-3 engine, on the ranks that start it; every spectrum is
resumed and saved, as on a schedule. Python's garbage collector is off, so that what waits for it
shows. A figure is flat if its mean over the last tenth of the spectra exceeds that over the second
tenth by less than `--tolerance` (memory), or its least one not at all (files and threads, of which
one may be about to end). The processor time of a spectrum is printed beside them, and not judged.
From the root of the repository:

    torchrun --nproc_per_node 2 --module benchmarks.endurance --spectra 1000
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ds_hessian
from tests.nets import TinyGPT, batch


class Figures(NamedTuple):
    """Of one rank after a spectrum."""

    megabytes: float
    files: float
    threads: float
    seconds: float


def figures(began: float) -> Figures:
    """Now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Figures(
        pages * resource.getpagesize() / 1e6,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        time.process_time() - began,
    )


def plain(folder: str) -> Any:
    """A module in DistributedDataParallel."""
    torch.manual_seed(0)
    module = DistributedDataParallel(TinyGPT())
    return ds_hessian.attach(module, None, settings(folder))


def zero(folder: str) -> Any:
    """A ZeRO-3 engine."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "hessian": settings(folder),
    }
    module = TinyGPT()
    engine = ds_hessian.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )[0]
    return engine.hessian


def settings(folder: str) -> dict[str, Any]:
    """Of the measurements."""
    return {
        **{"num_matvecs": 2, "progress": False, "plot": False},
        **{"output_path": f"{folder}/out", "resume": f"{folder}/state"},
    }


HOSTS: dict[str, Callable[[str], Any]] = {"torch": plain, "zero": zero}


def endured(hessian: Any, spectra: int) -> list[Figures]:
    """Measure so often; the figures of this rank after each spectrum."""
    hessian.use([batch(dist.get_rank(), 0)], lambda model, b: model(*b))
    found = []
    gc.collect()
    gc.disable()
    for _ in range(spectra):
        began = time.process_time()
        hessian.save(hessian.spectrum())
        found.append(figures(began))
    return found


def main() -> int:
    """Measure, print a table on rank 0, and return how many figures are not flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spectra", type=int, default=1000)
    parser.add_argument("--host", choices=HOSTS, default="torch")
    parser.add_argument("--tolerance", type=float, default=1.0, help="growth in MB per 100 spectra")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = [tempfile.mkdtemp(prefix="ds_hessian_endurance")]
    dist.broadcast_object_list(folder)
    mine = endured(HOSTS[arguments.host](folder[0]), arguments.spectra)
    every: list[list[Figures]] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    tenth, wrong = max(1, arguments.spectra // 10), 0
    for rank, found in enumerate(every):
        for k, name in enumerate(Figures._fields):
            tenths = [found[i : i + tenth] for i in range(0, len(found), tenth)]
            means = [sum(f[k] for f in part) / len(part) for part in tenths]
            least = [min(f[k] for f in part) for part in tenths]
            judged = means if name == "megabytes" else least
            growth = judged[-1] - judged[min(1, len(judged) - 1)]
            allowed = {"megabytes": arguments.tolerance * arguments.spectra / 100}
            wrong += name != "seconds" and growth > allowed.get(name, 0.0)
            if dist.get_rank() == 0:
                text = " ".join(f"{mean:.3f}" for mean in means)
                sys.stdout.write(f"rank {rank} {name:10} {text}\n")
    dist.destroy_process_group()
    return wrong + (threading.active_count() > 1)


if __name__ == "__main__":
    sys.exit(main())
