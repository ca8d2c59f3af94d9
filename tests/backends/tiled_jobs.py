"""What runs on the ranks: DeepSpeed's tiled layers and losses (ALST), and its cross entropies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from deepspeed.sequence.cross_entropy import vocab_parallel_cross_entropy
from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian
from tests.backends.jobs import full_weights, make_engine

VOCABULARY, WIDTH, LENGTH, TILES = 11, 8, 6, 3
QUIET = {"progress": False, "plot": False}


class MLP(nn.Module):
    """Two layers with SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading dims."""
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out


class Net(nn.Module):
    """A language model with an MLP and a loss, in one piece or as `way` says."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mlp = nn.Embedding(VOCABULARY, WIDTH), MLP()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.way = way

    def hidden(self, tokens: Tensor) -> Tensor:
        """`(batch, time, width)`."""
        h = self.embed(tokens).cumsum(1)
        parameters = list(self.mlp.parameters())
        if self.way == "tiled MLP":
            tiled = TiledMLP.apply(lambda mlp, x: MLP.forward(mlp, x), self.mlp, h, 2, parameters)
        elif self.way == "tiled layer":
            tiled = sequence_tiled_compute(
                self.mlp, LENGTH, TILES, {"x": h}, {}, "x", parameters,
                output_unshard_dimension=1, output_reduction=None,
            )  # fmt: skip
        else:
            tiled = self.mlp(h)
        out: Tensor = self.norm(h + tiled)
        return out

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        """Mean cross entropy, of the tiles' means where they are tiles of the sequence."""
        h, flat = self.hidden(tokens), labels.flatten()
        if self.way == "linear":
            return vocab_parallel_linear_cross_entropy(h, self.head.weight, labels, chunk_size=4)
        if self.way == "tiled loss":
            return sequence_tiled_compute(
                self.loss, LENGTH, TILES, {"h": h, "labels": labels}, {}, "h", [self.head.weight],
                output_unshard_dimension=0, output_reduction="mean",
            )  # fmt: skip
        if self.way == "gradients in the forward":
            return TiledFusedLogitsLoss.apply(
                lambda net, h, labels: net.loss(h, labels),
                *(self, h, labels, None, 2, [self.head.weight], "mean"),
            )
        logits = self.head(h)
        if self.way == "chunked":
            return chunked_cross_entropy(logits.flatten(0, 1), flat, block_rows=5)
        if self.way == "vocabulary":
            return vocab_parallel_cross_entropy(logits, labels)
        return functional.cross_entropy(logits.flatten(0, 1), flat)

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        """Of a tile."""
        return functional.cross_entropy(self.head(h).flatten(0, -2), labels.flatten())


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches of a rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator)
    return [(t, (t + 3) % VOCABULARY) for t in tokens]


def products(stage: int, way: str, operators: tuple[str, ...]) -> Any:
    """(weights, v, {operator: (product, error) or the message of a refusal})."""
    engine = make_engine(Net(way), zero={"stage": stage}, hessian=QUIET)
    hessian = engine.hessian.use(data(dist.get_rank()))
    v, found = hessian.random_vector(seed=5), dict[str, Any]()
    for name in operators:
        try:
            with hessian.measuring(operator=name):
                product = hessian.matvec(v)
            found[name] = hessian.gather(product.vector), product.error
        except ds_hessian.UnsupportedError as error:
            found[name] = str(error)
    out = full_weights(engine), hessian.gather(v), found
    engine.destroy()
    return out


def training(stage: int, way: str, measured: bool) -> list[Tensor]:
    """Losses, weights and random state after three steps, with products in between if asked."""
    engine = make_engine(Net(way), zero={"stage": stage}, hessian=QUIET)
    losses = []
    for step in range(3):
        loss = engine(*data(10 + 2 * step + dist.get_rank())[0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
        if measured:
            engine.hessian_spectrum(data(dist.get_rank()), num_matvecs=2)
    shards = engine.hessian.backend.shards
    weights = [shards.weight(piece).clone() for piece in engine.hessian.backend.pieces]
    engine.destroy()
    return [*losses, *weights, torch.get_rng_state()]


def same_with_and_without(stage: int, way: str) -> bool:
    """Whether training ends with the same bits."""
    pairs = zip(training(stage, way, False), training(stage, way, True), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
