"""Block coupling before and after fine-tuning with masked prompts (section 6.2, tables 6 and 7).

    OMP_NUM_THREADS=1 python benchmarks/experiments/fine_tuning.py

The spectra before and after are a page of the gallery, whose task this is: answers to sums, prompts
masked. Here the masked-probe test is made of text and of answers, with what a matrix without any
structure gives in blocks of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import QUIET, micro_batches, size_of, table
from torch import Tensor
from train_gpt import GPT

import ds_hessian

WIDTH, LAYERS, LENGTH = 32, 6, 32
MASKED = -100
"""The label that cross entropy ignores."""


def answers(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of `17+25=42`, and spaces; only the answer has labels."""
    rows = torch.full((size, 17), ord(" "))
    labels = torch.full((size, 17), MASKED)
    for row in range(size):
        a, b = torch.randint(100, (2,), generator=generator).tolist()
        prompt, answer = f"{a}+{b}=".encode(), f"{a + b}\n".encode()
        full, start = torch.tensor(list(prompt + answer)), len(prompt)
        rows[row, : len(full)] = full
        labels[row, start : len(full)] = full[start:]
    return rows[:, :-1], labels[:, 1:]


def train(model: GPT, batches: list[Any], rate: float) -> None:
    """One step for each micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()


def counted(model: Callable[..., Tensor], batch: Any) -> tuple[Tensor, int]:
    """Sum over the labelled tokens, and their number: micro-batches differ in it."""
    count = int((batch[1] != MASKED).sum())
    return model(*batch) * count, count


def row(name: str, hessian: Any, batches: list[Any]) -> list[Any]:
    """Means and standard deviations over the layers, as the paper's tables."""
    hessian.use(batches, counted)
    found = hessian.block_coupling()
    layers = np.array([block.startswith("blocks.") for block in found.names])
    last = found.names.index(f"blocks.{LAYERS - 1}")
    cells: list[Any] = [name]
    for values, null in (
        (found.relative_errors, found.null_relative_errors),
        (found.cosines, found.null_cosines),
    ):
        inside = values[layers]
        cells += [f"{inside.mean():.3f} ± {inside.std():.3f}", f"{values[last]:.3f}"]
        cells.append(f"{null[layers].mean():.3f}")
    return [*cells, f"{found.share:.2f}"]


def main() -> None:
    """Train, measure, fine-tune, measure."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT(WIDTH, LAYERS, 4, LENGTH, 0.0)
    text = micro_batches(600, 1, LENGTH)
    tasks = {
        "text": micro_batches(8, 2, LENGTH),
        "masked prompts": [answers(32, generator) for _ in range(4)],
    }
    train(model, text, 3e-3)
    hessian = ds_hessian.attach(model, config=QUIET)
    rows = [row(f"{name}, before", hessian, batches) for name, batches in tasks.items()]
    train(model, [answers(32, generator) for _ in range(200)], 1e-3)
    rows += [row(f"{name}, after", hessian, batches) for name, batches in tasks.items()]
    print(f"GPT of {size_of(model):,} parameters, {LAYERS} layers\n")
    head = ["loss", "relative error", "last layer", "null", "cosine", "last layer", "null"]
    print(table([*head, "share of off-diagonal blocks"], rows))


if __name__ == "__main__":
    main()
