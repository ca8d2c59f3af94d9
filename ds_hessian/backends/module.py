"""A plain `torch.nn.Module`, the same on every rank or alone in one process, without any engine.

The smallest whole backend: for studies of numerics on small nets, and the pattern for new ones.
Every rank stores everything; rank 0 owns it. Micro-batches are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hessian import ops
from ds_hessian.memory import Item, place_of
from ds_hessian.vectors import Fragment, Layout, VectorSpace


class ModuleBackend:
    """Backend of one replicated module; see `ShardBackend`.

    Args:
        module: Its trainable parameters define the space. Weights may be fp32, bf16 or fp16.
        micro_batches: What `loss_fn` takes.
        loss_fn: Mean loss of one micro-batch, `loss_fn(module, batch)`.
        unit_roundoff: Of the passes; 2^-9 where they run in bf16.
        masters: One tensor for each trainable parameter, from which displacements are written, as
            training with fp32 masters has them; None for a copy of the weights. Leaving
            `measuring` puts back the weights themselves in any case.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batches: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], Tensor],
        unit_roundoff: float = 2.0**-24,
        masters: Sequence[Tensor] | None = None,
    ) -> None:
        self.module, self.micro_batches, self.loss_fn = module, micro_batches, loss_fn
        self.named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.layout = Layout([Fragment(n, 0, p.numel(), p.shape) for n, p in self.named])
        device = self.named[0][1].device if self.named else torch.device("cpu")
        owned = self.layout.n_local
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            owned = 0
        self.space = VectorSpace(self.layout.n_local, owned, device)
        self.num_micro_batches = len(micro_batches)
        self.gradient_scale: float | None = 1.0 / len(micro_batches)
        self.loss = float("nan")
        self.unit_roundoff = unit_roundoff
        self._losses: dict[int, float] = {}
        self._given, self._masters = masters, list[Tensor]()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keep the weights, and put them back."""
        kept = [p.detach().clone().view(-1) for _, p in self.named]
        self._masters = kept if self._given is None else [m.view(-1) for m in self._given]
        gradients = [p.grad for _, p in self.named]
        rng = torch.get_rng_state()
        self._losses.clear()
        try:
            yield
        finally:
            for (_, p), weight, gradient in zip(self.named, kept, gradients, strict=True):
                p.data.view(-1).copy_(weight)
                p.grad = gradient
            torch.set_rng_state(rng)
            self._masters = []

    def displace(self, v: Tensor | None, h: float) -> Tensor:
        """See `ShardBackend.displace`."""
        weights = [p.data.view(-1) for _, p in self.named]
        direction = self.space.zeros() if v is None else v
        return ops.displace(weights, self._masters, direction, h, self.space.n_owned)

    def add_gradient(self, out: Tensor, micro_batches: range) -> None:
        """See `ShardBackend.add_gradient`."""
        for i in micro_batches:
            for _, p in self.named:
                p.grad = None
            torch.manual_seed(i)  # the masks of micro-batch i are the same on every evaluation
            loss = self.loss_fn(self.module, self.micro_batches[i])
            self._losses.setdefault(i, float(loss.detach()))  # the first evaluation is at w
            loss.backward()
            for (_, p), (_, part) in zip(self.named, self.layout, strict=True):
                if p.grad is not None:
                    out[part].add_(p.grad.view(-1))
        if len(self._losses) == self.num_micro_batches:
            self.loss = sum(self._losses.values()) / self.num_micro_batches

    def memory(self, precision: Literal["model", "fp32"] = "model") -> list[Item]:
        """See `ShardBackend.memory`."""
        place, size = place_of(self.space.device), sum(p.nbytes for _, p in self.named)
        return [
            Item("weights as they were", place, size),
            Item("gradients of a pass", place, size),
        ]

    def weight_norm(self) -> float:
        """See `ShardBackend.weight_norm`."""
        w = torch.cat([m.float() for m in self._masters])
        return self.space.norm(w)
