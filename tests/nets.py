"""Small nets and data for the host tests, and their dense fp64 Hessians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, CONTEXT = 11, 6


class TinyGPT(nn.Module):
    """One causal transformer block with tied embeddings; returns its loss; about 1300 parameters.

    Sizes are such that most parameters do not divide evenly by 2 ranks.
    """

    def __init__(self, width: int = 9, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(CONTEXT, width) * 0.3)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.dropout = dropout  # no module: ZeRO-3 hooks each of them
        self.register_buffer("calls", torch.zeros(()))

    def drop(self, x: Tensor) -> Tensor:
        """Dropout, in train mode."""
        return functional.dropout(x, self.dropout, self.training)

    def logits(self, tokens: Tensor) -> Tensor:
        """`(batch, time, vocabulary)`."""
        self.calls += 1
        x = self.drop(self.embed(tokens) + self.position[: tokens.shape[1]])
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        mask = torch.full((x.shape[1],) * 2, -torch.inf, device=x.device, dtype=x.dtype).triu(1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        x = x + self.drop(self.out(scores.softmax(-1) @ v))
        x = x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy."""
        logits = self.logits(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(number: int, rank: int, size: int = 2) -> tuple[Tensor, Tensor]:
    """Micro-batch `number` of a rank: noisy periodic text, something to learn."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    tokens = (start + 3 * torch.arange(CONTEXT + 1)) % VOCABULARY
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(
        noise, torch.randint(0, VOCABULARY, tokens.shape, generator=generator), tokens
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


Named = dict[str, Tensor]


def merged(micro_batches: Sequence[Any]) -> list[Any]:
    """Micro-batches of equal shapes as one, of the same mean loss, in a sixth of the time."""
    return [tuple(torch.cat(parts) for parts in zip(*micro_batches, strict=True))]


def forward_hooks(*models: nn.Module) -> int:
    """How many there are on all modules, of which ZeRO-3 has its own."""
    return sum(len(m._forward_hooks) for model in models for m in model.modules())


class DenseHessian:
    """Loss, gradient and Hessian of a module in fp64 by double backward, in one process.

    Args:
        module: A module of the architecture.
        weights: `{name: tensor}` at which to take them.
        micro_batches: All ranks' micro-batches; the loss is the mean of their losses.
        loss_fn: `loss_fn(module, batch)`; None where the module returns its loss.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Named,
        micro_batches: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    ) -> None:
        module = module.double().eval()
        named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(weights[name].double().reshape(p.shape))
        self.named = named
        call = loss_fn or (lambda m, b: m(*b))
        self.loss = torch.stack([call(module, b) for b in micro_batches]).mean()
        gradient = torch.autograd.grad(
            self.loss, list(named.values()), create_graph=True, allow_unused=True
        )
        self.gradient = torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for g, p in zip(gradient, named.values(), strict=True)
            ]
        )

    def flat(self, full: Named) -> Tensor:
        """`{name: tensor}` as one fp64 vector in this class' order."""
        return torch.cat([full[name].double().reshape(-1) for name in self.named])

    def matvec(self, v: Tensor) -> Tensor:
        """H v, `(n,)` fp64."""
        product = torch.autograd.grad(
            self.gradient @ v, list(self.named.values()), retain_graph=True, allow_unused=True
        )
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for g, p in zip(product, self.named.values(), strict=True)
            ]
        )

    def matrix(self) -> Tensor:
        """H, `(n, n)` fp64, a hundred rows at a time."""
        blocks = []
        for directions in torch.eye(self.gradient.numel(), dtype=torch.float64).split(100):
            rows = torch.autograd.grad(
                self.gradient,
                list(self.named.values()),
                directions,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            blocks.append(
                torch.cat(
                    [
                        (p.new_zeros(len(directions), *p.shape) if r is None else r).flatten(1)
                        for r, p in zip(rows, self.named.values(), strict=True)
                    ],
                    1,
                )
            )
        h = torch.cat(blocks).detach()
        return (h + h.T) / 2


def of_scaled_loss(session: Any) -> tuple[float, float]:
    """Of a session in fp32: how far its gradient is from that of the loss times 1.3, relative to
    it, and the ratio of `cotangent_scale` after both.
    """
    gradient, other = session.space.zeros(), session.space.zeros()
    every = range(session.num_micro_batches)
    session.add_gradient(gradient, every)
    session.add_gradient(other, every, 1.3)
    scaled = session.cotangent_scale
    session.add_gradient(gradient.zero_(), every)
    apart = session.space.norm(other - gradient) / session.space.norm(gradient)
    return apart, scaled / session.cotangent_scale
