"""Inner products of sharded vectors: the only arithmetic of Krylov methods that crosses ranks.

A global scalar is the sum over all ranks of fp64 partial sums over the coordinates that each rank
owns; several scalars travel in one all-reduce. Every rank receives the same bits, so every rank
takes the same branches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import ConfigError
from ds_hessian.ranks import reduce

CHUNK = 2**20
"""Coordinates that are widened to fp64 at a time: 8 MiB."""


class VectorSpace:
    """R^n, split over the ranks of a process group.

    Args:
        n_local: Number of coordinates that this rank stores.
        n_owned: How many of them (a prefix) count in sums.
        device: The device that stores the vectors.
        group: Process group of all ranks that share the space; None for the default group, or for
            a single process where torch.distributed is not initialised.
        n: The dimension, where it is known; else the owned coordinates are counted.

    Attributes:
        n: Dimension of the space: the owned coordinates of all ranks.
        all_reduces: Number of all-reduces made so far, for cost accounting.

    Collective: the constructor without `n`, and every method that returns a global scalar.
    """

    def __init__(
        self,
        n_local: int,
        n_owned: int | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        n: int | None = None,
    ) -> None:
        self.n_local = n_local
        self.n_owned = n_local if n_owned is None else n_owned
        self.device = torch.device(device)
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.world_size = dist.get_world_size(group) if self.distributed else 1
        self.all_reduces = 0
        owned = torch.tensor([float(self.n_owned)], dtype=torch.float64)
        self.n = int(self.reduce(owned)[0]) if n is None else n
        self.all_reduces = 0

    def reduce(self, partials: Tensor) -> Tensor:
        """Sum fp64 `partials` `(k,)` over all ranks in one all-reduce; return them on the CPU."""
        self.all_reduces += 1
        partials = partials.to(self.device)
        return reduce(partials, self.group) if self.distributed else partials.cpu()

    def of_all_ranks(self, *figures: float) -> Tensor:
        """Return every rank's k figures, `(k, world size)` fp64, in one all-reduce."""
        mine = torch.zeros(len(figures), self.world_size, dtype=torch.float64)
        mine[:, self.rank] = torch.tensor(figures, dtype=torch.float64)
        return self.reduce(mine.view(-1)).view_as(mine)

    def of_rank_0(self, *figures: float) -> list[float]:
        """Return rank 0's figures on every rank, in one all-reduce: for figures that must have the
        same bits although the ranks' processors may round the preceding arithmetic differently.
        """
        mine = figures if self.rank == 0 else [0.0] * len(figures)
        return list(self.reduce(torch.tensor(mine, dtype=torch.float64)).tolist())

    def everywhere(self, holds: bool) -> bool:
        """Return whether something holds on every rank. Collective: one all-reduce."""
        ranks = self.reduce(torch.tensor([holds], dtype=torch.float64))
        return bool(ranks[0] == self.world_size)

    def dots(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return global inner products of pairs, `(len(pairs),)` fp64, in one all-reduce."""
        return self.reduce(ops.dots(pairs, self.n_owned))

    def dot(self, a: Tensor, b: Tensor) -> float:
        """Return the global inner product `<a, b>`."""
        return float(self.dots([(a, b)])[0])

    def norm(self, a: Tensor) -> float:
        """Return the global Euclidean norm."""
        return self.dot(a, a) ** 0.5

    def participations(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the inverse participation ratio of each vector, `(len(vectors),)` fp64, in one
        all-reduce: `sum v_i^4 / (sum v_i^2)^2`.
        """
        sums = torch.zeros(2, len(vectors), dtype=torch.float64, device=self.device)
        for i, v in enumerate(vectors):
            for part in v[: self.n_owned].split(CHUNK):
                squares = part.double().square_()
                sums[0, i] += squares.sum()
                sums[1, i] += squares.dot(squares)
        second, fourth = self.reduce(sums.view(-1)).view(sums.shape)
        return fourth / second**2

    def vector(self, v: object, what: str = "the vector") -> Tensor:
        """Return a caller's `(n_local,)` as a vector of this rank: fp32, contiguous, on its device.

        Raises:
            ConfigError: it is none; says what `what` must be and is.
        """
        if not isinstance(v, Tensor):
            given = f"a {type(v).__name__}"
        elif tuple(v.shape) != (self.n_local,) or not v.is_floating_point():
            given = f"a tensor of shape {tuple(v.shape)} and {v.dtype}"
        else:
            return v.detach().to(self.device, torch.float32).contiguous()
        raise ConfigError(
            f"{what} must be a vector of this rank, a tensor of shape ({self.n_local},) and "
            f"torch.float32 such as random_vector and scatter return, got {given}"
        )

    def zeros(self) -> Tensor:
        """Return a new zero vector, `(n_local,)` fp32."""
        return torch.zeros(self.n_local, dtype=torch.float32, device=self.device)
