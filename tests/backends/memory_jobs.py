"""What runs on the ranks for the memory plans: peaks of real spectra, and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_hessian
from ds_hessian.memory import Item, MemoryPlan
from ds_hessian.ops import async_io
from ds_hessian.planning import free_memory
from tests.backends.peaks import peaks

WIDTH, DEPTH, CLASSES = 512, 4, 2048

ATTEMPTS = 4
"""Measurements of a model whose largest weight takes 1.6 vectors, which a thread of gloo keeps
until it gets to run."""


class Tower(nn.Module):
    """A million weights whose passes need little: layers are gathered and reduced one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of the last activations."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.pow(2).mean()


class Words(nn.Module):
    """A cross entropy of more outputs than a rank has weights, or of fewer."""

    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.smoothing = smoothing

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean over tokens."""
        logits = self.head(torch.tanh(self.body(x)))
        return nn.functional.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)


class Gates(nn.Module):
    """A million ReLUs for each of 40 pairs of rows, which are recomputed: their sides take over
    two vectors, and their activations, one pair's at a time, about as much.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    @staticmethod
    def pair(x: Tensor, y: Tensor) -> Tensor:
        """The means of ReLUs of all products."""
        return torch.relu(torch.outer(x, y)).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square."""
        rows = self.body(x)
        pairs = [checkpoint(self.pair, a, b, use_reentrant=False) for a in rows for b in rows[:5]]
        return self.out(torch.stack(pairs)).pow(2).mean()


def make_engine(
    stage: int,
    dtype: str = "fp32",
    tokens: int = 0,
    gates: bool = False,
    smoothing: float = 0.0,
) -> Any:
    """An engine that has made a training step, so that training's own memory is there."""
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": WIDTH * (WIDTH + 1),
            "allgather_bucket_size": WIDTH * (WIDTH + 1),
            "stage3_max_live_parameters": WIDTH * (WIDTH + 1),
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "hessian": {"progress": False, "plot": False},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    model = Words(smoothing) if tokens else Gates() if gates else Tower()
    engine = ds_hessian.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]
    engine.backward(engine(*batches(dtype_of(engine), tokens, gates)[0]))
    engine.step()
    return engine


def batches(
    dtype: torch.dtype, tokens: int = 0, gates: bool = False, count: int = 2
) -> list[tuple[Tensor, ...]]:
    """Micro-batches of `Tower`, of `Words` with so many tokens, or of `Gates`."""
    generator, rows = torch.Generator().manual_seed(3), 8 if gates else tokens or 2
    found = [torch.randn(rows, WIDTH, generator=generator).to(dtype) for _ in range(count)]
    labels = torch.arange(tokens) % CLASSES
    return [(x, labels) if tokens else (x,) for x in found]


def dtype_of(engine: Any) -> torch.dtype:
    """Of the weights in the passes."""
    dtype: torch.dtype = next(engine.module.parameters()).dtype
    return dtype


def measured_and_planned(
    stage: int,
    dtype: str,
    cases: list[tuple[str, dict[str, Any]]],
    tokens: int = 0,
    gates: bool = False,
    smoothing: float = 0.0,
    count: int = 1,
) -> list[tuple[list[int], list[int], float]]:
    """For each case ([measured host, disk, resume], the same planned, bytes of a vector), of so
    many micro-batches.

    What forward and backward need in training is measured too, and added to the plan's passes:
    twice that where training's are in 16 bits and those of the measurement in fp32.
    """
    engine = make_engine(stage, dtype, tokens, gates, smoothing)
    data = batches(dtype_of(engine), tokens, gates, max(count, 2))
    hessian = engine.hessian.use(data[:count])
    hessian.spectrum(num_matvecs=2, mode="selective")  # modules are imported, kernels loaded
    hessian.trace("hutchinson", 2)
    hessian.eigenpairs(1, max_matvecs=2)
    with peaks() as training:
        engine.backward(engine(*data[0]))
    engine.step()
    needed = training[0] * (1 if dtype == "fp32" else 2)
    passes = Item("a training pass", "host", needed, ("passes",))
    found = []
    b = hessian.random_vector()
    for analysis, settings in cases:
        given: dict[str, Any] = dict(settings)
        os.environ[async_io.SETTING] = given.pop("way", "auto")
        folder = Path(given["resume"]) if "resume" in given else None
        hessian.use(data if "sampling" in given else data[:count])
        plan = MemoryPlan.of(hessian.memory_plan(analysis, **given).items, [passes])
        if analysis == "solve":
            given["b"] = b
        elif analysis == "influence":
            given |= {"query": data[:1], "examples": data}
        elif analysis == "sharpness":  # from Lanczos it may converge before its basis is full
            hessian.sharpness(preconditioned=given["preconditioned"])
            del given["warm"]
        attempts = []
        for _ in range(ATTEMPTS if tokens else 1):
            hessian._lessons.clear()  # with them no trial may be compared with another
            with peaks(folder) as attempt:
                getattr(hessian, analysis)(**given)
            attempts.append(list(attempt))
        measured = min(attempts)
        planned = [plan.peak("host"), plan.peak("disk"), plan.peak("resume")]
        found.append((measured, planned, 4.0 * hessian.backend.space.n_local))
    engine.destroy()
    return found


def ritz_values(
    settings: list[dict[str, Any]],
) -> list[tuple[np.ndarray, tuple[float, float], tuple[float, float]]]:
    """Ritz values, and (value, error) of the extreme eigenvalues, of spectra of one engine."""
    engine = make_engine(3)
    hessian = engine.hessian.use(batches(torch.float32))
    found = []
    for overrides in settings:
        spectrum = hessian.spectrum(**overrides)
        largest, smallest = spectrum.eigenvalue_max, spectrum.eigenvalue_min
        found.append(
            (
                spectrum.ritz_values,
                (largest.value, largest.error),
                (smallest.value, smallest.error),
            )
        )
    engine.destroy()
    return found


def refusals(shares: list[float]) -> list[tuple[str, int]]:
    """What `spectrum` and `eigenpairs` say where the basis would need so many times the host memory
    that is free now, and how many reductions of vectors they made before.
    """
    engine = make_engine(3)
    hessian = engine.hessian.use(batches(torch.float32))
    said = []
    for share in shares:
        free = free_memory(None, hessian.backend.device)["host"]
        rows = torch.tensor(int(share * free / (4 * hessian.backend.space.n_local)))
        dist.broadcast(rows, 0)
        before = hessian.backend.space.all_reduces
        for refused in (
            lambda m=int(rows): hessian.spectrum(num_matvecs=m),
            lambda m=int(rows): hessian.eigenpairs(1, basis_size=m),
        ):
            try:
                refused()
            except ds_hessian.ConfigError as error:
                said.append((str(error), hessian.backend.space.all_reduces - before))
    engine.destroy()
    return said
