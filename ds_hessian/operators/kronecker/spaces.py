"""The block of one layer: its sharded vectors, and whole ones `(m, n)` on the layer's owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_hessian.backends.restricted import Restricted
from ds_hessian.operators.kronecker.layers import Layer
from ds_hessian.vectors import collected, distribute


class LayerSpace:
    """Vectors of one layer's weight.

    Args:
        restricted: The job restricted to the weight.
        layer: The layer.

    Attributes:
        owns: Whether this rank is the layer's owner.

    Collective: every method.
    """

    def __init__(self, restricted: Restricted, layer: Layer) -> None:
        self.restricted, self.layer = restricted, layer
        self.space, self.layout = restricted.space, restricted.layout
        ((self._name, self._stored),) = restricted.parameters
        self.owns = self.space.rank == layer.owner

    def gather(self, v: Tensor) -> Tensor | None:
        """Return a vector `(n_local,)` as `(m, n)` on the owner, None elsewhere."""
        owner = self.layer.owner
        whole = collected(self.layout, self.space, v, self._name, self._stored, owner)
        return self.layer.oriented(whole).contiguous() if self.owns else None

    def scatter(self, x: Tensor | None) -> Tensor:
        """Return the owner's `(m, n)` as a vector `(n_local,)` on every rank."""
        whole = torch.empty(self._stored, dtype=torch.float32, device=self.space.device)
        if x is not None:
            whole.copy_(self.layer.oriented(x))
        v = self.space.zeros()
        distribute(self.layout, self.space, v, self._name, whole, self.layer.owner)
        return v

    def known(self, figures: Sequence[float]) -> list[float]:
        """Return the owner's figures on every rank; of the others only the number counts."""
        mine = figures if self.owns else [0.0] * len(figures)
        return list(self.space.reduce(torch.tensor(mine, dtype=torch.float64)).tolist())
