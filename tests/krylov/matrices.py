"""Symmetric matrices with a chosen spectrum, as operators on real sharded vectors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ds_hessian.operators import Product
from ds_hessian.vectors import Fragment, Layout, VectorSpace, random_vector

Array = NDArray[np.float64]


def _marchenko_pastur(n: int, ratio: float = 0.25) -> Array:
    """Quantiles of the Marchenko-Pastur law of the given aspect ratio."""
    low, high = (1 - ratio**0.5) ** 2, (1 + ratio**0.5) ** 2
    x = np.linspace(low, high, 200_001)[1:-1]
    mass = np.cumsum(np.sqrt((high - x) * (x - low)) / x)
    return np.asarray(np.interp((np.arange(n) + 0.5) / n, mass / mass[-1], x))


SPECTRA: dict[str, Array] = {
    "spiked": np.r_[np.linspace(0, 1, 300), 10.0, 20.0, 50.0, -5.0],
    "semicircle": 2 * np.cos(np.pi * (np.arange(400) + 0.5) / 400),
    "marchenko-pastur": _marchenko_pastur(300),
    "repeated": np.r_[np.linspace(-1, 1, 150), 5.0, 5.0, 5.0, -4.0, -4.0],
    "two-valued": np.r_[np.ones(60), 2 * np.ones(40)],
    "rank-deficient": np.r_[np.zeros(200), np.arange(1.0, 6.0)],
    "zero": np.zeros(50),
    "n < m": np.array([-1.0, 0.5, 3.0]),
    "huge": 1e8 * np.r_[np.linspace(0, 1, 100), 10.0, -3.0],
    "tiny": 1e-8 * np.r_[np.linspace(0, 1, 100), 10.0, -3.0],
}


def rotation(n: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix `(n, n)` fp64: row i is eigenvector i."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def layout_of(sizes: dict[str, int]) -> Layout:
    """This rank's part of parameters of the given sizes; the last one is replicated.

    Parameters are split unevenly; the replica belongs to rank 0. One process holds everything.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    fragments = []
    for i, (name, size) in enumerate(sizes.items()):
        if i == len(sizes) - 1:
            fragments.append(Fragment(name, 0, size, torch.Size([size]), owned=rank == 0))
            continue
        start, stop = size * rank // world, size * (rank + 1) // world
        fragments.append(Fragment(name, start, stop - start, torch.Size([size])))
    return Layout(fragments)


class Matrix:
    """A dense symmetric matrix, split over the ranks of the job.

    Args:
        matrix: `(n, n)` fp64, in the order of `sizes`.
        sizes: {parameter name: number of coordinates}; None for four unequal ones.
        noise: Relative error of each product, random, of just this size, which it also states.
        seed: Of the noise.
    """

    def __init__(
        self,
        matrix: Tensor,
        sizes: dict[str, int] | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        n = len(matrix)
        first = max(1, n // 3)
        self.matrix, self.noise = matrix, noise
        self.sizes = sizes or {"a": first, "b": n - first - max(0, n - first - 1) // 2, "c": 0}
        if sizes is None:
            self.sizes["c"] = n - first - self.sizes["b"]
        self.layout = layout_of(self.sizes)
        self.space = VectorSpace(self.layout.n_local, self.layout.n_owned)
        self.generator = torch.Generator().manual_seed(seed)
        self.products = 0
        starts = dict(zip(self.sizes, np.cumsum([0, *self.sizes.values()]), strict=False))
        self.places = [
            (slice(starts[f.name] + f.start, starts[f.name] + f.start + f.numel), part, f.owned)
            for f, part in self.layout
        ]

    @classmethod
    def of(cls, eigenvalues: Array, noise: float = 0.0, seed: int = 0, basis: int = 0) -> Matrix:
        """With these eigenvalues, in the random eigenbasis number `basis`."""
        q = rotation(len(eigenvalues), basis)
        return cls(q.T @ torch.diag(torch.tensor(eigenvalues)) @ q, noise=noise, seed=seed)

    def full(self, v: Tensor) -> Tensor:
        """The whole vector `(n,)` fp64, on every rank."""
        whole = torch.zeros(len(self.matrix), dtype=torch.float64)
        for place, part, owned in self.places:
            if owned:
                whole[place] = v[part].double()
        if dist.is_initialized():
            dist.all_reduce(whole)
        return whole

    def shard(self, whole: Tensor) -> Tensor:
        """This rank's part of it, `(n_local,)` fp32."""
        v = self.space.zeros()
        for place, part, _ in self.places:
            v[part] = whole[place].float()
        return v

    def matvec(self, v: Tensor) -> Product:
        """See `LinearOperator`; the same noise on every rank."""
        self.products += 1
        x = self.full(v)
        w = self.matrix @ x
        norm = float(w.norm())
        if self.noise:
            error = torch.randn(len(w), generator=self.generator, dtype=torch.float64)
            w = w + self.noise * norm * error / error.norm()
        relative = max(self.noise, 1e-7)  # fp32 rounding of the product
        return Product(self.shard(w), norm / float(x.norm()), 1.0, None, None, 1.0, relative, 0)

    def fresh(self, seed: int = 0) -> Callable[[int], Tensor]:
        """Random unit vectors by number."""
        return lambda k: random_vector(self.layout, self.space, seed, k)
