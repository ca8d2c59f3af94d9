"""Train a byte-level GPT under DeepSpeed ZeRO-3 and watch its Hessian spectrum.

The text is the source of Python's own standard library, bytes as tokens, so that nothing need be
downloaded. All that concerns ds_hessian is `ds_hessian.initialize` in place of
`deepspeed.initialize`, and the "hessian" section of ds_config.json.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed_config examples/ds_config.json

With `--save FOLDER` it leaves checkpoints, which `ds-hessian measure` measures with the functions
`gpt` and `micro_batches`.
"""

from __future__ import annotations

import argparse
import logging
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import ds_hessian


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, time, width)` to the same."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A byte-level language model; `forward` returns the mean cross entropy in nats per byte."""

    def __init__(self, width: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """`(batch, time)` token and target bytes to a scalar."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library(limit: int = 4_000_000) -> Tensor:
    """The first `limit` bytes of the standard library's sources, in the order of their names."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)[:limit]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def sample(text: Tensor, size: int, context: int, generator: torch.Generator) -> list[Tensor]:
    """Tokens and targets, `(size, context)` each, at random places of the text."""
    starts = torch.randint(len(text) - context - 1, (size,), generator=generator)
    rows = torch.stack([text[s : s + context + 1] for s in starts]).long()
    return [rows[:, :-1].contiguous(), rows[:, 1:].contiguous()]


WIDTH, LAYERS, HEADS, CONTEXT, DROPOUT = 96, 3, 4, 96, 0.1


def gpt() -> GPT:
    """Return the model that the options make if they are left."""
    return GPT(WIDTH, LAYERS, HEADS, CONTEXT, DROPOUT)


def micro_batches() -> list[list[Tensor]]:
    """Return micro-batches on which to measure checkpoints."""
    text, generator = standard_library(), torch.Generator().manual_seed(0)
    return [sample(text, 4, CONTEXT, generator) for _ in range(8)]


def main() -> None:
    """Train; with the given config, spectra are taken and written on the way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--dropout", type=float, default=DROPOUT)
    parser.add_argument("--save", help="A folder for a checkpoint after every 40th step.")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    deepspeed.utils.logger.setLevel(logging.WARNING)
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, HEADS, args.context, args.dropout)
    engine, *_ = ds_hessian.initialize(args=args, model=model, model_parameters=model.parameters())

    text = standard_library()
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = engine.train_micro_batch_size_per_gpu()
    for step in range(args.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = sample(text, size, args.context, generator)
            loss = engine(tokens.to(engine.device), targets.to(engine.device))
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            logging.info("step %4d  loss %.3f", step + 1, loss.item())
        if args.save and (step + 1) % 40 == 0:
            engine.save_checkpoint(args.save)
    if dist.get_rank() == 0:
        folder = engine.hessian.config.output_path if hasattr(engine, "hessian") else None
        logging.info(
            "spectra (figures, pictures, and a page to open in a browser) are in %s", folder
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
