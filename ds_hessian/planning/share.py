"""One rank's share of a job, in plain figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ds_hessian.backends.protocol import Precision
from ds_hessian.memory import FP32, Item, Moment, Tier
from ds_hessian.operators import Outputs


@dataclass(frozen=True)
class Share:
    """One rank's share of a job.

    Attributes:
        n: Parameters of the whole model.
        n_local: Coordinates in this rank's vectors.
        tier: Where its vectors are: the accelerator, or the host for a job on the CPU.
        backend: What the backend says that it holds, by the precision of the passes.
        precisions: The precisions that the host supports.
        compute_dtype: The dtype in which training's passes compute.
        whole: Coordinates of all parameters on this rank, if the job is restricted to some; else 0.
        outputs: What is foreseen of the model's outputs.
        sides: Bytes of the sides of kinks, as of the last measurement; 0 before.
    """

    n: int
    n_local: int
    tier: Tier
    backend: Callable[[Precision], Iterable[Item]]
    precisions: tuple[Precision, ...] = ("model",)
    compute_dtype: torch.dtype = torch.float32
    whole: int = 0
    outputs: Outputs = Outputs()
    sides: int = 0

    def vectors(
        self, name: str, count: int, moments: tuple[Moment, ...] = (), stage: str = ""
    ) -> Item:
        """Return an item of `count` vectors; without moments or a stage it is held throughout."""
        return Item(name, self.tier, count * FP32 * self.n_local, moments, stage)

    def within(self, n: int, n_local: int, *items: Item) -> Share:
        """Return the share of the job restricted to a block of `n` coordinates, `n_local` on this
        rank, where the items are held beside what the backend holds.
        """
        vector = self.vectors("direction or gradient over all parameters", 1, ("passes",))
        return replace(
            self, n=n, n_local=n_local, backend=lambda p: [*self.backend(p), *items, vector]
        )

    def returned(self, count: int) -> Item:
        """Return the vectors of a record of a restricted job, as they are and over all
        parameters.
        """
        size = count * FP32 * (self.n_local + self.whole) if self.whole else 0
        return Item(f"results over all parameters, {count}", self.tier, size, stage="returning")
