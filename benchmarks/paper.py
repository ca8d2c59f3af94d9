"""The paper's tables in kind, on a GPT and real text of a size that two cores can have.

    OMP_NUM_THREADS=1 python benchmarks/paper.py

Under ZeRO-3 by the real launcher, on one rank, two and four, of one thread each: the same training
on the same data. Prints strong and weak scaling (the paper's tables 3 and 4: a product over the
same global batch, and over as much on every rank), the overhead of Lanczos (table 2), block
coupling (tables 6 and 7: one probe, as there, in blocks by transformer layer), and the spectrum for
the dtype of the stored basis and for parts of the data (section 7.1). Four ranks share two cores:
they show the cost of more messages, and no speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from measuring import peak_bytes, plain_gradient
from train_gpt import GPT, sample, standard_library

import ds_hessian
from ds_hessian import HessianSpectrum

WIDTH, LAYERS, CONTEXT = 64, 6, 64
SIZE, WINDOW, STEPS = 4, 8, 80
"""Of a micro-batch, of an accumulation window over all ranks, and of training."""
MEASURED = 32
"""Micro-batches that spectra are taken of, over all ranks; tables of cost use a window."""
SCALED = {"num_matvecs": 10}
RANKS = (1, 2, 4)
SCALING = "Strong and weak scaling"
"""Weak: every rank has as many micro-batches as one of the largest job has of the window."""
PROBED = {"num_matvecs": 25, "num_probes": 2}


def trained(steps: int) -> tuple[Any, list[Any]]:
    """The engine after training, and this rank's part of the micro-batches to measure."""
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = GPT(WIDTH, LAYERS, 4, CONTEXT, 0.0)
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": WINDOW // ranks,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "hessian": {"progress": False, "plot": False},
    }
    engine, *_ = ds_hessian.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    for _ in range(steps):
        window = [sample(text, SIZE, CONTEXT, generator) for _ in range(WINDOW)]
        for batch in window[rank::ranks]:
            engine.backward(engine(*batch))
            engine.step()
    batches = [sample(text, SIZE, CONTEXT, generator) for _ in range(MEASURED)]
    engine.module.eval()
    return engine, batches[rank::ranks]


def scaling(engine: Any, batches: list[Any]) -> dict[str, Any]:
    """Seconds of a gradient and of products, and the peak of memory on this number of ranks."""
    plain_gradient(engine, batches)
    training = peak_bytes()
    gradients, products = list[float](), list[float]()
    for _ in range(3):  # they take turns: a machine's speed changes
        gradients += [plain_gradient(engine, batches) for _ in range(4)]
        spectrum = engine.hessian_spectrum(batches, **SCALED)
        products.append(spectrum.cost.seconds_per_product)
    weak = [
        engine.hessian_spectrum(batches[: WINDOW // max(RANKS)], **SCALED).cost.seconds_per_product
        for _ in range(3)
    ]
    return {
        "ranks": dist.get_world_size(),
        "weak": float(np.mean(weak)),
        "gradient": float(np.mean(gradients)),
        "product": float(np.mean(products)),
        "std": float(np.std(products)),
        "megabytes": [training / 2**20, peak_bytes() / 2**20],
        "largest": str(spectrum.eigenvalue_max),
    }


def table_of_scaling(rows: list[dict[str, Any]]) -> str:
    """Tables 3 and 4."""
    lines = [
        "| ranks | gradient | product | std | product, gradients | speedup | product, weak "
        "| efficiency | MB, training | MB, measuring | largest eigenvalue |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        before, most = row["megabytes"]
        lines.append(
            f"| {row['ranks']} | {row['gradient']:.3f} s | {row['product']:.3f} s | "
            f"{row['std']:.3f} s | {row['product'] / row['gradient']:.2f} | "
            f"{rows[0]['product'] / row['product']:.2f} | {row['weak']:.3f} s | "
            f"{rows[0]['weak'] / row['weak']:.2f} | {before:.0f} | {most:.0f} | "
            f"{row['largest']} |"
        )
    return "\n".join(lines)


def table_of_overhead(engine: Any, batches: list[Any]) -> str:
    """Table 2."""
    lines = ["| Lanczos steps | product | the rest of a step | share |", "|---" * 4 + "|"]
    for steps in (5, 10, 20, 40):
        cost = engine.hessian_spectrum(batches, num_matvecs=steps).cost
        share, product = cost.lanczos_overhead, cost.seconds_per_product
        lines.append(
            f"| {steps} | {1000 * product:.0f} ms | {1000 * share * product:.1f} ms | {share:.2%} |"
        )
    return "\n".join(lines)


def table_of_blocks(engine: Any, batches: list[Any]) -> str:
    """Tables 6 and 7, with what a matrix without structure gives."""
    found = engine.hessian.use(batches).block_coupling()
    layers = np.array([name.startswith("blocks.") for name in found.names])
    last = found.names.index(f"blocks.{LAYERS - 1}")

    def row(name: str, values: Any, null: Any) -> str:
        inside = values[layers]
        return (
            f"| {name} | {inside.mean():.3f} ± {inside.std():.3f} | {values[last]:.3f} | "
            f"{null[layers].mean():.3f} |"
        )

    return "\n".join(
        [
            "| | mean ± std | last layer | no structure |",
            "|---" * 4 + "|",
            row("relative error", found.relative_errors, found.null_relative_errors),
            row("cosine similarity", found.cosines, found.null_cosines),
            f"| blocks: {layers.sum()} layers; {found.share:.2f} of \\|Hv\\|² is made by "
            "off-diagonal blocks | | | |",
        ]
    )


def distance(a: HessianSpectrum, b: HessianSpectrum) -> float:
    """Half the area between two densities, both drawn at the widths of their own."""
    grid = np.union1d(a.density().grid, b.density().grid)
    difference = abs(a.density(grid).values - b.density(grid).values)
    return float(np.trapezoid(difference, grid) / 2)


def table_of_spectra(engine: Any, cases: dict[str, tuple[list[Any], dict[str, Any]]]) -> str:
    """Extreme eigenvalues and trace of each case, and how far its density is from the first's."""
    lines = [
        "| | largest | smallest | trace | outliers | density: distance to the first |",
        "|---" * 6 + "|",
    ]
    first = None
    for name, (batches, settings) in cases.items():
        found = engine.hessian_spectrum(batches, **{**PROBED, **settings})
        first = first or found
        lines.append(
            f"| {name} | {found.eigenvalue_max} | {found.eigenvalue_min} | {found.trace} | "
            f"{len(found.outlier_eigenvalues())} | {distance(first, found):.3f} |"
        )
    return "\n".join(lines)


def work(folder: Path, only: str, steps: int) -> None:
    """Measure in this job: scaling in each, whose table the last one prints; the other tables whose
    title contains `only` in that of two ranks.
    """
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed("gloo", verbose=False)
    first, ranks = dist.get_rank() == 0, dist.get_world_size()
    engine, batches = trained(steps)
    window, kept = batches[: WINDOW // ranks], folder / "scaling.json"
    rows = json.loads(kept.read_text()) if kept.exists() else []
    if only in SCALING:
        rows.append(scaling(engine, window))
    dist.barrier()
    if first:
        kept.write_text(json.dumps(rows))
    if first and rows and ranks == RANKS[-1]:
        print(f"\n### {SCALING}\n\n{table_of_scaling(rows)}", flush=True)
    if ranks != 2:
        return
    part, others = (batches[start:][: len(batches) // 4] for start in (0, len(batches) // 2))
    stored = {
        "fp32": {},
        "bf16": {"dtype": "bf16"},
        "fp32, no reorthogonalisation": {"mode": "none"},
        "fp32, other probes": {"seed": 1},
    }
    spectra = {name: (part, settings) for name, settings in stored.items()}
    parts = {f"{ranks * k} micro-batches": (batches[:k], {"num_probes": 1}) for k in (8, 4, 2, 1)}
    parts["8 others"] = (others, {"num_probes": 1})
    if first:
        print(f"GPT of {engine.hessian.backend.space.n:,} parameters, ZeRO-3, fp32")
    for title, make in {
        "Overhead of Lanczos": lambda: table_of_overhead(engine, window),
        "Block coupling": lambda: table_of_blocks(engine, batches),
        "The stored basis": lambda: table_of_spectra(engine, spectra),
        "Parts of the data": lambda: table_of_spectra(engine, parts),
    }.items():
        table = make() if only in title else None
        if first and table is not None:
            print(f"\n### {title}\n\n{table}", flush=True)


def main() -> None:
    """Launch the jobs, or be one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="", help="tables whose title contains this")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    args = parser.parse_args()
    if args.folder is not None:
        work(args.folder, args.only, args.steps)
        dist.barrier()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        for ranks in RANKS if args.only in SCALING else (2,):
            command = ["deepspeed", "--num_accelerators", str(ranks), __file__, "--folder", folder]
            command += ["--only", args.only, "--steps", str(args.steps)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
