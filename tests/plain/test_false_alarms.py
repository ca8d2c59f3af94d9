"""Spectra that are right bring no warning, however unusual the Hessian."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ds_hessian

N = 40
QUIET = {"progress": False, "plot": False}
_GENERATOR = torch.Generator().manual_seed(0)
U, A = torch.randn(N, generator=_GENERATOR), torch.randn(N, N, generator=_GENERATOR)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "rank one": (lambda w: 0.5 * (U @ w) ** 2, float(U @ U)),
    "zero": (lambda w: (U * w).sum(), 0.0),
    "quadratic": (lambda w: 0.5 * w @ (A + A.T) @ w, float(torch.linalg.eigvalsh(A + A.T)[-1])),
}


class Weights(nn.Module):
    """A bare vector of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(N, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("name", LOSSES)
def test_no_warning_where_nothing_is_wrong(name: str, count: int) -> None:
    loss, largest = LOSSES[name]
    hessian = ds_hessian.attach(Weights(), config=QUIET)
    hessian.use([None] * count, lambda module, _: loss(module.w))
    spectrum = hessian.spectrum(num_matvecs=12)
    assert spectrum.warnings == ()
    assert not np.isinf(spectrum.nonlinearities).any()
    if name != "quadratic":  # its Ritz values have not converged after 12 products
        assert abs(spectrum.eigenvalue_max.value - largest) < 2e-3 * max(largest, 1.0)
