"""What a product and a Lanczos run cost, in gradients of the same engine measured in the same run.

    deepspeed --num_accelerators 2 benchmarks/cost.py
    deepspeed --num_accelerators 2 benchmarks/cost.py --dtype bf16    # of the basis
    deepspeed --num_accelerators 2 benchmarks/cost.py --operator ggn

Prints, for a GPT of about 5 million parameters under ZeRO-3: a plain gradient evaluation (forward
and backward of the engine on the same micro-batches, nothing of ds_hessian in between), a product
averaged over 20 Lanczos vectors with all trials, a whole step once the trials of the first two
vectors are done, Lanczos' own part of its steps and all that is outside of products (what a
measurement takes once included), as shares of these, and the peak memory of each rank over that of
training. Of the Gauss-Newton matrix also v'Gv by forwards alone, and Kronecker factors of all
layers: K-FAC and Shampoo in one pass, EK-FAC in one more; of these also the sums alone, without the
eigendecompositions, which each owner makes once however many micro-batches there are. Gradients and
measurements take turns, since a machine's speed changes from minute to minute; between measurements
is a training step, so that later ones begin with what the first has learnt. On a machine with
other work, `--processor` takes rank 0's processor time in place of the clock, which leaves out what
ranks wait for each other.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from measuring import peak_bytes, plain_gradient
from train_gpt import GPT, sample, standard_library

import ds_hessian
from ds_hessian.krylov import LanczosState
from ds_hessian.operators.kronecker import Kind, Settings, estimate, find_layers

UNDECOMPOSED = ", the sums alone"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 10**9,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3},
    "hessian": {"progress": False},
}


def peak_megabytes() -> float:
    """Peak device memory so far on an accelerator, else peak resident memory of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_bytes() / 2**20


@contextmanager
def timed(owner: Any, name: str, spent: list[float]) -> Iterator[None]:
    """Append the seconds of each call of a function in the body."""
    inner = getattr(owner, name)

    def call(*args: Any) -> Any:
        began = time.perf_counter()
        found = inner(*args)
        spent.append(time.perf_counter() - began)
        return found

    with patch.object(owner, name, call):
        yield


def form_seconds(engine: Any, batches: Iterable[object], count: int = 4) -> list[float]:
    """The time of v'Gv for vectors after the first, whose displacement they share."""
    hessian, found = engine.hessian.use(batches), list[float]()
    with hessian.measuring(operator="ggn") as operator:
        for seed in range(count + 1):
            v, began = hessian.random_vector(seed=seed), time.perf_counter()
            operator.along(v)
            found.append(time.perf_counter() - began)
    return found[1:]


def factor_seconds(
    engine: Any, batches: Iterable[object], kinds: Sequence[Kind]
) -> tuple[float, float]:
    """The time of Kronecker factors of all linear layers, and that without decompositions."""
    backend, spent = engine.hessian.backend, list[float]()
    layers, _ = find_layers(backend, None)
    with backend.measuring(backend.objective(batches)) as session:
        began = time.perf_counter()
        with timed(torch.linalg, "eigh", spent):
            estimate(session, backend, layers, Settings(kinds, required=False))
        seconds = time.perf_counter() - began
    # The others wait for the owner that takes longest.
    slowest = torch.tensor(sum(spent), dtype=torch.float64, device=backend.space.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return seconds, seconds - float(slowest)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--num_matvecs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--operator", default="hessian")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--processor", action="store_true")
    args = parser.parse_args()
    if args.processor:
        time.perf_counter = time.process_time
    deepspeed.utils.logger.setLevel("ERROR")
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, 4, args.context, 0.1)
    engine, *_ = ds_hessian.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG
    )
    text, generator = standard_library(), torch.Generator().manual_seed(dist.get_rank())

    def train(steps: int) -> None:
        for _ in range(8 * steps):
            engine.backward(engine(*sample(text, 4, args.context, generator)))
            engine.step()

    train(3)  # Adam's state and the gather trace exist from here on
    batches = [sample(text, 4, args.context, generator) for _ in range(8)]
    trained = peak_megabytes()
    engine.module.eval()  # without dropout, as the measurement
    plain_gradient(engine, batches)
    spectra, steps = [], list[float]()
    gradients = [plain_gradient(engine, batches) for _ in range(4)]
    for number in range(args.rounds):
        if number:
            engine.module.train()
            train(1)
            engine.module.eval()
        with timed(LanczosState, "step", steps):
            spectra.append(
                engine.hessian_spectrum(
                    batches, num_matvecs=args.num_matvecs, operator=args.operator, dtype=args.dtype
                )
            )
        gradients += [plain_gradient(engine, batches) for _ in range(8)]
    report(engine, spectra, steps, gradients[:-4], trained)
    if args.operator == "ggn":
        factors: dict[str, tuple[Kind, ...]] = {
            "K-FAC": ("kfac",),
            "K-FAC and Shampoo": ("kfac", "shampoo"),
            "EK-FAC": ("ekfac",),
        }
        beside = [plain_gradient(engine, batches) for _ in range(4)]
        seconds: dict[str, list[float]] = {"v'Gv": []}
        seconds |= {name + end: [] for name in factors for end in ("", UNDECOMPOSED)}
        for _ in range(args.rounds):
            seconds["v'Gv"] += form_seconds(engine, batches)
            for name, kinds in factors.items():
                whole, rest = factor_seconds(engine, batches, kinds)
                seconds[name].append(whole)
                seconds[name + UNDECOMPOSED].append(rest)
            beside += [plain_gradient(engine, batches) for _ in range(4)]
        if dist.get_rank() == 0:
            for name, found in seconds.items():
                ratio = fmean(found) / fmean(beside)
                print(f"{name:36} {fmean(found):8.3f} s  = {ratio:.3f} gradients")
    dist.barrier()
    dist.destroy_process_group()


def report(
    engine: object,
    spectra: list[ds_hessian.HessianSpectrum],
    steps: list[float],
    gradients: list[float],
    trained: float,
) -> None:
    """The table, on rank 0."""
    spectrum, n_local = spectra[0], engine.hessian.backend.layout.n_local
    products = sum(s.cost.products for s in spectra)
    product = fmean(s.cost.seconds_per_product for s in spectra)
    first, *others = (s.cost.seconds_per_product for s in spectra)
    gradient = fmean(gradients)
    extra = peak_megabytes() - trained
    vectors = extra * 2**20 / (4 * n_local)
    if dist.get_rank() > 0:
        return
    later = [s for number, s in enumerate(steps) if number % len(spectrum.alphas[0]) >= 2]
    lines = [
        f"{spectrum.n:,} parameters, {spectrum.provenance.layout}, 8 micro-batches",
        f"gradient (mean of {len(gradients)})             {gradient:8.3f} s",
        f"product (mean of {products})              {product:8.3f} s"
        f"  = {product / gradient:.3f} gradients",
        f"of the run's first measurement    {first:8.3f} s  = {first / gradient:.3f} gradients, "
        f"{spectrum.cost.gradients_per_product:.3f} evaluated",
        *(
            f"of a later one                    {one:8.3f} s  = {one / gradient:.3f} gradients, "
            f"{s.cost.gradients_per_product:.3f} evaluated"
            for one, s in zip(others, spectra[1:], strict=True)
        ),
        f"a step, from the third on         {fmean(later):8.3f} s"
        f"  = {fmean(later) / gradient:.3f} gradients",
        "Lanczos' own part                 "
        f"{100 * (sum(steps) / (products * product) - 1):8.2f} % of the products",
        "outside of products               "
        f"{100 * fmean(s.cost.lanczos_overhead for s in spectra):8.2f} %",
        f"peak memory in training           {trained:8.0f} MB per rank",
        f"more in the measurement           {extra:8.0f} MB = {vectors:.1f} fp32 vectors",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
