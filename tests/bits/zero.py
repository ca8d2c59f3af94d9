"""Measurements of DeepSpeed engines: every stage and dtype, every analysis, a resumed one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian

from .figures import Figures, figures

VOCABULARY, TIME, WIDTH = 7, 5, 6
CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
MODEL = {"finite_difference": {"precision": "model"}}
TORCH_ADAM = {"zero_force_ds_cpu_optimizer": False}


class Net(nn.Module):
    """A small language model with tied embeddings, normalisation and dropout; returns its loss.

    No parameter divides evenly by two ranks in all of its dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Parameter(torch.eye(TIME).tril() + 0.3 * torch.randn(TIME, TIME))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.mix @ self.embed(tokens)
        x = x + functional.dropout(
            self.down(functional.gelu(self.up(self.norm(x)))), 0.1, self.training
        )
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def batch(number: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of three sequences."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (3, TIME + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def batches(first: int, count: int = 2) -> list[Any]:
    """This rank's of so many for each rank."""
    return [batch(first + i * dist.get_world_size() + dist.get_rank()) for i in range(count)]


@contextmanager
def trained(stage: int, **config: Any) -> Iterator[Any]:
    """The Hessian of an engine after two optimizer steps."""
    torch.manual_seed(0)
    module = Net()
    zero = {"stage": stage, **config.pop("zero", {})}
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero,
        "hessian": {"progress": False, "plot": False, **config.pop("hessian", {})},
        **config,
    }
    torch.manual_seed(100 + dist.get_rank())
    engine = ds_hessian.initialize(
        model=module, model_parameters=list(module.parameters()), config=settings
    )[0]
    for number in range(2 * engine.gradient_accumulation_steps()):
        engine.backward(engine(*batches(number, 1)[0]))
        engine.step()
    try:
        yield engine.hessian.use(batches(50))
    finally:
        engine.destroy()


def spectra(stage: int, **config: Any) -> Figures:
    """A product with its diagnostics, and a spectrum of two probes."""
    with trained(stage, **config) as hessian:
        v = hessian.random_vector(seed=5)
        found = {"product": hessian.matvec(v), "spectrum": hessian.spectrum(**SHORT)}
        return figures({"v": v, **found}, hessian)


SHORT: dict[str, Any] = {"num_matvecs": 5, "num_probes": 2}
ENGINES: dict[str, Callable[[], Figures]] = {
    "ZeRO-0": lambda: spectra(0),
    "ZeRO-1": lambda: spectra(1),
    "ZeRO-2": lambda: spectra(2),
    "ZeRO-3": lambda: spectra(3),
    "ZeRO-3, accumulation": lambda: spectra(
        3, gradient_accumulation_steps=2, zero={"stage3_param_persistence_threshold": 0}
    ),
    "ZeRO-2, optimizer on the CPU": lambda: spectra(
        2, zero={"offload_optimizer": CPU}, **TORCH_ADAM
    ),
    "ZeRO-3, all on the CPU": lambda: spectra(
        3, zero={"offload_param": CPU, "offload_optimizer": CPU}, **TORCH_ADAM
    ),
    "ZeRO-2, bf16": lambda: spectra(2, hessian=MODEL, **BF16),
    "ZeRO-3, bf16": lambda: spectra(3, hessian=MODEL, **BF16),
    "ZeRO-1, bf16, passes in fp32": lambda: spectra(1, **BF16),
}

SPECTRA: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "sampling": {"sampling": True},
    "forward differences": {"scheme": "forward"},
    "fourth order": {"scheme": "fourth_order"},
    "a given displacement": {"displacement": 1e-2, "probe": "rademacher", "seed": 3},
    "selective, bf16": {"mode": "selective", "dtype": "bf16"},
    "window on disk": {"mode": "window", "window": 3, "device": "disk"},
}

Analysis = Callable[[Any], Any]
ANALYSES: dict[str, Analysis] = {
    "eigenpairs": lambda h: h.eigenpairs(2, max_matvecs=20, basis_size=8),
    "eigenpairs, smallest": lambda h: h.eigenpairs(1, "SA", max_matvecs=12, sampling=True),
    "trace, Hutchinson": lambda h: h.trace("hutchinson", 6, blocks="parameters"),
    "trace, Hutch++": lambda h: h.trace("hutch++", 9),
    "trace, XTrace": lambda h: h.trace("xtrace", 8),
    "solve, CG": lambda h: h.solve(h.random_vector(9), [20.0, 0.1], num_matvecs=8),
    "solve, MINRES and Adam": lambda h: h.solve(
        h.random_vector(9), [1e3], "minres", num_matvecs=6, preconditioner="adam"
    ),
    "sharpness": lambda h: [h.sharpness(tolerance=0.1), h.sharpness(tolerance=0.1)],
    "block_coupling": lambda h: h.block_coupling("layers"),
    "off_block_share": lambda h: h.off_block_share("layers", num_probes=2),
    "displacement_sweep": lambda h: h.displacement_sweep(displacements=[1e-3, 1e-2, 1e-1]),
    "influence": lambda h: h.influence([batch(90)], [batch(91), batch(92)], [5.0], num_matvecs=8),
}


def interrupted() -> Figures:
    """A spectrum that an error ends after some products, resumed by a second call."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, src=0)
        with trained(3, hessian={"resume": shared[0]}) as hessian:
            calls = 0

            def loss_fn(model: Any, micro_batch: Any) -> Tensor:
                nonlocal calls
                calls += 1
                if calls == 30:
                    raise RuntimeError("on purpose")
                return model(*micro_batch)

            try:
                hessian.spectrum(batches(50), loss_fn, **SHORT)
            except ds_hessian.MeasurementError:
                spectrum = hessian.spectrum(batches(50), loss_fn, **SHORT)
            else:
                raise AssertionError("it was to be interrupted")
            dist.barrier()  # before the folder goes
            return figures({"spectrum": spectrum, "calls": calls}, hessian)


def measure() -> dict[str, Figures]:
    """All of them, by name; on every rank of the job."""
    found = {name: engine() for name, engine in ENGINES.items()}
    with trained(3) as hessian:
        for name, settings in SPECTRA.items():
            found[f"spectrum, {name}"] = figures(hessian.spectrum(**SHORT, **settings), hessian)
        for name, analysis in ANALYSES.items():
            found[name] = figures(analysis(hessian), hessian)
    found["spectrum, resumed"] = interrupted()
    return found
