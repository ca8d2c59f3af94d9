"""Figures of parameters, summed over the layers of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ds_hessian.records.analyses import HessianEigenpairs
from ds_hessian.vectors import by_layer


def layer_shares(pairs: HessianEigenpairs) -> dict[str, NDArray[np.float64]]:
    """Return {layer: `(k,)` shares of the eigenvectors' squared norms}, in the model's order."""
    found: dict[str, NDArray[np.float64]] = {}
    groups = by_layer(pairs.concentrations)
    for name, shares in pairs.concentrations.items():
        found[groups[name]] = found.get(groups[name], np.zeros_like(shares)) + shares
    return found
