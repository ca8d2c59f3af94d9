"""Products of nets with kinks on the ranks of an engine, of DDP, and in training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ds_hessian

QUIET = {"progress": False, "plot": False}
WIDTH = 12


class Blocks(nn.Module):
    """Blocks of ReLU, ReLU squared and max pooling, with recomputed activations if asked for."""

    def __init__(self, recompute: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.recompute = recompute

    def block(self, i: int, x: Tensor) -> Tensor:
        """One of them."""
        hidden = functional.relu(self.up[i](self.norms[i](x)))
        hidden = hidden.square() if i == 1 else hidden
        pooled = functional.max_pool1d(hidden.unsqueeze(1), 2).squeeze(1)
        return x + self.down[i](pooled)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The cross entropy."""
        for i in range(len(self.up)):
            if self.recompute:
                again = self.recompute == "reentrant"
                x = checkpoint(self.block, i, x, use_reentrant=again)  # type: ignore[assignment]
            else:
                x = self.block(i, x)
        return functional.cross_entropy(self.head(self.norms[-1](x)).float(), labels)


def batches(dtype: torch.dtype = torch.float32, total: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of all ranks; inputs need gradients, for reentrant checkpoints."""
    generator = torch.Generator().manual_seed(5)
    found = [torch.randn(16, WIDTH, generator=generator) for _ in range(total)]
    return [(x.to(dtype).requires_grad_(), torch.arange(16) % 5) for x in found]


def product(kind: str, recompute: str = "", dtype: str = "fp32", **config: Any) -> Any:
    """v, its product, the estimated error and the provenance, by name of the parameters.

    Args:
        kind: `torch`, `DDP`, or a stage of ZeRO.
        recompute: Of `Blocks`.
        dtype: Of the weights.
        config: More of the engine's settings.
    """
    net: nn.Module = Blocks(recompute)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    engine: Any = None
    settings = {**QUIET, **config.pop("hessian", {})}
    if kind in ("torch", "DDP"):
        hessian = ds_hessian.attach(
            DistributedDataParallel(net) if kind == "DDP" else net, config=settings
        )
    else:
        from tests.backends.jobs import make_engine

        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        engine = make_engine(net, zero={"stage": int(kind)}, hessian=settings, **config)
        hessian = engine.hessian
    data = batches(torch.bfloat16 if dtype == "bf16" else torch.float32)
    hessian.use(data[rank::size])
    v = hessian.random_vector(seed=1)
    with hessian.measuring():
        found = hessian.matvec(v)
    source = hessian.spectrum(num_matvecs=2).provenance
    vectors = hessian.gather(v), hessian.gather(found.vector)
    if engine is not None:
        engine.destroy()
    return (*vectors, found.error, found.displacement, source)


def exact(v: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """`H v` by double backward in fp64, at weights of a type."""
    wide = Blocks().to(dtype).double()
    named = dict(wide.named_parameters())
    data = [(x.detach().to(dtype).double(), y) for x, y in batches()]
    value = torch.stack([wide(*batch) for batch in data]).mean()
    gradients = torch.autograd.grad(value, list(named.values()), create_graph=True)
    along = sum((g * v[name].double()).sum() for name, g in zip(named, gradients, strict=True))
    assert isinstance(along, Tensor)
    products = torch.autograd.grad(along, list(named.values()))
    return dict(zip(named, products, strict=True))
