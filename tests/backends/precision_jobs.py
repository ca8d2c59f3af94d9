"""What runs on the ranks: engines in 16 bits that choose the precision of their passes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hessian
from ds_hessian.planning import free_memory
from tests.backends.jobs import FEW, QUIET, full_weights, make_engine, my_batches
from tests.nets import TinyGPT, batch


def spectrum(
    config: dict[str, Any], steps: int = 10, num_matvecs: int = 20, total: int = FEW
) -> Any:
    """(master weights, spectrum at the defaults) after some steps of training."""
    engine = make_engine(hessian=QUIET, **config)
    for step in range(steps):
        engine.backward(engine(*batch(step, dist.get_rank())))
        engine.step()
    found = engine.hessian_spectrum(my_batches(total), num_matvecs=num_matvecs)
    out = full_weights(engine), found
    engine.destroy()
    return out


def edited(config: dict[str, Any]) -> Any:
    """(weights, spectrum at the defaults) after weights were edited without their masters."""
    engine = make_engine(hessian=QUIET, **config)
    engine.backward(engine(*batch(0, dist.get_rank())))
    engine.step()
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0), torch.no_grad():
        for p in named.values():
            p.mul_(1.25)
        weights = {name: p.detach().float().clone() for name, p in named.items()}
    found = engine.hessian_spectrum(my_batches(FEW), num_matvecs=20)
    engine.destroy()
    return weights, found


class TwoDtypes(nn.Module):
    """A layer in bf16 and one in fp32; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 9).bfloat16(), nn.Linear(9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy."""
        hidden = torch.tanh(self.one(x.to(self.one.weight.dtype)))
        return nn.functional.cross_entropy(self.two(hidden.to(self.two.weight.dtype)), y)


def two_dtypes() -> Any:
    """(weights, v, product, its error, the micro-batches) under ZeRO-2, without a bf16 section."""
    torch.manual_seed(0)
    engine = make_engine(TwoDtypes(), zero={"stage": 2}, hessian=QUIET)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(6, 7, generator=generator), torch.arange(6) % 5)]
    hessian = engine.hessian.use(batches)
    v = hessian.random_vector(seed=5)
    product = hessian.matvec(v)
    gathered = [hessian.gather(vector) for vector in (v, product.vector)]
    out = full_weights(engine), *gathered, product.error, batches
    engine.destroy()
    return out


def with_little_memory(config: dict[str, Any]) -> Any:
    """Where rank 1 sees room for a spectrum in the model's precision alone: (the spectrum, the
    precision of a trace, which needs less, what an explicit fp32 is told).
    """
    engine = make_engine(hessian=QUIET, **config)
    hessian = engine.hessian.use(my_batches())
    peaks = [
        hessian.memory_plan(num_matvecs=4, precision=precision).peak("host")
        for precision in ("model", "fp32")
    ]

    def free(*given: Any) -> Any:
        found = free_memory(*given)
        if dist.get_rank() == 1:
            found["host"] = sum(peaks)  # for both ranks: what one needs in either
        return found

    with mock.patch("ds_hessian.analyses.base.free_memory", free):
        spectrum = hessian.spectrum(num_matvecs=4)
        trace = hessian.trace("hutchinson", 4).provenance.precision
        try:
            hessian.spectrum(num_matvecs=4, precision="fp32")
            told = "measured"
        except ds_hessian.ConfigError as error:
            told = str(error)
    engine.destroy()
    return spectrum, trace, told


class Kernel(TinyGPT):
    """Its attention has a kernel for 16 bits alone, as flash attention; on one rank only."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Those of `TinyGPT`."""
        if self.qkv.weight.dtype not in (torch.float16, torch.bfloat16) and dist.get_rank() == 1:
            raise RuntimeError("this attention only supports fp16 and bf16")
        return super().logits(tokens)


def autocast(model: Any, given: Any) -> Tensor:
    """A loss that rounds by itself."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(*given).float()


def impossible(config: dict[str, Any]) -> Any:
    """Of a model with a kernel for 16 bits, and of a loss under autocast: the provenance at the
    defaults, of a spectrum and of a product alone, and whether training ended with the same bits.
    """
    found: list[Any] = []

    def train(measured: bool) -> list[Tensor]:
        torch.manual_seed(0)
        section = {"hessian": QUIET} if measured else {}
        engine = make_engine(Kernel(), **section, **config)
        losses = []
        for step in range(4):
            loss = engine(*batch(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().clone())
            if measured and step == 1:
                spectrum = engine.hessian_spectrum(my_batches(), num_matvecs=2)
                found.append(spectrum.provenance)
                error = engine.hessian.matvec(engine.hessian.random_vector(seed=1)).error
                found.append(error)
            if measured and step == 2:
                engine.module.__class__ = TinyGPT
                spectrum = engine.hessian_spectrum(my_batches(), autocast, num_matvecs=2)
                found.append(spectrum.provenance)
                engine.module.__class__ = Kernel
        weights = [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        return [*losses, *weights, torch.get_rng_state()]

    pairs = zip(train(False), train(True), strict=True)
    return found, all(torch.equal(a, b) for a, b in pairs)


class Broken(Exception):
    """Raised on purpose."""


def broken(config: dict[str, Any]) -> str:
    """What is raised where the loss fails, on one rank, for a reason of its own."""
    engine = make_engine(hessian=QUIET, **config)

    def loss(model: Any, given: Any) -> Tensor:
        if dist.get_rank() == 0:
            raise Broken("on purpose")
        return model(*given)

    try:
        engine.hessian_spectrum(my_batches(), loss, num_matvecs=2)
        return "measured"
    except ds_hessian.HessianError as error:
        return str(error)
    finally:
        engine.destroy()
