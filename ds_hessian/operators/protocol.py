"""What Krylov methods know of a Hessian: a symmetric operator on a vector space, with errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ds_hessian.vectors import VectorSpace


@dataclass(frozen=True)
class Product:
    """One product `H v`, and how far to trust it.

    Attributes:
        vector: `H v`, `(n_local,)` fp32, in units of loss per squared parameter times those of v.
        norm: `|H v| / |v|`, over all ranks.
        displacement: h, the length of the step in parameter space to either side (not relative).
        nonlinearity: `|g(w+h) + g(w-h) - 2 g(w)| / |g(w+h) - g(w-h)|`; None with forward
            differences, which have no g(w-h).
        noise: The part of `error` that comes from rounding; None if it was not measured.
        fidelity: Cosine between the realised displacement of the stored weights and v.
        error: Estimated relative error of `vector`; None if there is nothing to base it on.
        trials: Pilot evaluations (two gradients of one micro-batch each) beyond the product's own.
    """

    vector: Tensor
    norm: float
    displacement: float
    nonlinearity: float | None
    noise: float | None
    fidelity: float
    error: float | None
    trials: int


class LinearOperator(Protocol):
    """A symmetric linear operator on a sharded vector space."""

    space: VectorSpace

    def matvec(self, v: Tensor) -> Product:
        """The product with `v` `(n_local,)`; any length but zero.

        Collective: every rank calls it with its shard of the same vector.
        """
        ...
