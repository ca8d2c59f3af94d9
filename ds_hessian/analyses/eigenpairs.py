"""The k extreme eigenpairs, with true residuals, by Lanczos with thick restarts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ds_hessian import krylov
from ds_hessian.analyses.base import Journaled, partition, transient
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.config import HessianConfig
from ds_hessian.krylov import LanczosOptions
from ds_hessian.krylov.rows import division
from ds_hessian.memory import FP32, Item, in_stage
from ds_hessian.operators import LinearOperator
from ds_hessian.operators.sampling import micro_batch_curvatures, standard_error
from ds_hessian.planning import (
    ELSEWHERE,
    FEWEST,
    Settings,
    Share,
    halves,
    memory_of_lanczos,
    storage_of,
)
from ds_hessian.planning.basis import GRAM_SCHMIDT, RESIDUALS, SPACE
from ds_hessian.records import HessianEigenpairs
from ds_hessian.vectors import VectorSpace

RANDOM = 0.3
"""Length of a random vector that is added to a guess: from an eigenvector alone, of whatever
eigenvalue, every residual is small before the ends of the spectrum have been seen. It is that of
the error that eigenvectors of an earlier step have anyway, and costs one or two products."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Eigenpairs(Journaled[HessianEigenpairs]):
    """The arguments of a search for extreme eigenpairs.

    Attributes:
        k: Pairs wanted.
        which: `LM` largest magnitude, `LA` largest, `SA` smallest.
        tolerance: Bound on the residuals, relative to the largest eigenvalue in magnitude.
        max_matvecs: Products at most, before one for each pair's residual.
        basis_size: Vectors kept; None for 2 k + 20.
        start: Unit vector `(n_local,)` near which to begin, such as an eigenvector of an earlier
            step; None for a random one.
    """

    title = "eigenpairs"
    summary = "the k extreme eigenpairs, with true residuals"
    record = HessianEigenpairs

    k: int = 1
    which: krylov.Which = "LM"
    tolerance: float = 1e-3
    max_matvecs: int = 300
    basis_size: int | None = None
    start: Tensor | None = transient(None)

    @property
    def size(self) -> int:
        """The number of vectors in the basis."""
        return 2 * self.k + 20 if self.basis_size is None else self.basis_size

    def products(self, config: HessianConfig) -> int:
        """Return the number of Lanczos' products, and one for each pair's residual."""
        return self.max_matvecs + self.k

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return the basis, then the eigenvectors, of which `start` is none."""
        search = memory_of_eigenpairs(share, config, self.k, self.size)
        return [*search, share.returned(self.k)]

    def with_less(self, config: HessianConfig) -> list[Settings]:
        """Return another basis, a smaller one, and fewer products for `resume` to keep."""
        smaller = halves("basis_size", self.basis_size or 2 * self.k + 20, self.k + 2)
        fewer = halves("max_matvecs", self.max_matvecs, FEWEST) if config.resume else []
        return [*ELSEWHERE, *smaller, *fewer]

    def _first(self, drawn: Tensor, space: VectorSpace) -> Tensor:
        """Return the random vector, with the guess in the direction of which the search begins."""
        if self.start is None:
            return drawn
        drawn.mul_(RANDOM).add_(self.start.to(drawn))
        return drawn.mul_(1 / space.norm(drawn))

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Compute the pairs, and how each vector spreads over the parameters."""
        subject = run.subject
        # By name: a packed argument list would keep the start vector until the end.
        found = krylov.eigenpairs(
            operator,
            self._first(subject.draw(0), operator.space),
            self.k,
            subject.draw,
            which=self.which,
            tolerance=self.tolerance,
            max_matvecs=self.max_matvecs,
            basis_size=self.basis_size,
            storage=storage_of(subject.config),
        )
        names = partition(subject.backend, "parameters")
        shares = names.dots([(v, v) for v in found.vectors])
        errors = [
            standard_error(micro_batch_curvatures(run.curvature, y, float(h)))
            for y, h in zip(found.vectors, found.displacements, strict=True)
            if subject.config.sampling
        ]
        return {
            **vars(found),
            "concentrations": dict(zip(names.names, shares, strict=True)),
            "sampling_errors": np.array(errors, dtype=np.float64),
        }


def memory_of_eigenpairs(share: Share, config: HessianConfig, k: int, size: int) -> list[Item]:
    """Return the items of `krylov.eigenpairs` with a basis of `size` vectors."""
    n_local, tier, storage = share.n_local, share.tier, storage_of(config)
    size, vector = min(share.n, size), FP32 * n_local
    kept = min(size - 1, (k + size) // 2)
    width = min(division(n_local, size, storage.dtype)[1], n_local)
    rounded = 0 if storage.dtype == torch.float32 else storage.dtype.itemsize * kept + FP32
    restart = width * (FP32 * kept + rounded)
    formed = Item("Ritz vectors being formed", tier, max(restart, k * vector), GRAM_SCHMIDT)
    results = [
        share.vectors("eigenvectors", k),
        share.vectors("eigenvectors, put in order", k, ("storing",)),
    ]
    return [
        *in_stage(SPACE, memory_of_lanczos(n_local, tier, size, LanczosOptions(storage=storage))),
        *in_stage(SPACE, [formed]),
        *in_stage(RESIDUALS, results),
    ]
