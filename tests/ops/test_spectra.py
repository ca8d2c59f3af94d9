"""A whole spectrum does not depend on which implementation of the kernels runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_hessian import ops
from ds_hessian.backends.plain import ModuleBackend
from ds_hessian.krylov import LanczosOptions, LanczosRun, Storage, slq
from ds_hessian.operators import FiniteDifferenceHessian
from tests.nets import TinyGPT, batch
from tests.tiers import cells

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8}
"""Of the coefficients, in units of the largest. They agree to 1e-15 until the last bit of a sum
moves an element of a vector, and so the rounding of gradients: 1e-5 of a product at h = 0.01. The
products of bf16 rows are fp32's in the kernels and fp64's in the twins, and a last bit moves the
rounding of an element of a row by 2^-8 of it, whose difference moves more of them in the rows that
follow: at the end all of them."""


def spectrum(implementation: str, dtype: torch.dtype) -> list[LanczosRun]:
    torch.manual_seed(0)
    batches = [batch(i, 0) for i in range(2)]
    backend = ModuleBackend(TinyGPT(dropout=0.0))
    objective = backend.objective(batches)
    with ops.implementation(implementation), backend.measuring(objective) as session:
        operator = FiniteDifferenceHessian(session, displacement=1e-2)
        options = LanczosOptions(storage=Storage(dtype))
        return slq(operator, backend.layout, 12, 2, seed=0, options=options)


@pytest.mark.parametrize(
    "dtype", cells([torch.float32, torch.bfloat16], [torch.bfloat16]), ids=["fp32", "bf16"]
)
def test_kernels_and_twins_give_the_same_coefficients(dtype: torch.dtype) -> None:
    for native, twin in zip(spectrum("native", dtype), spectrum("torch", dtype), strict=True):
        scale = abs(twin.alphas).max()
        assert len(native.alphas) == 12 and scale > 0.1
        assert np.abs(native.alphas - twin.alphas).max() < ROUNDING[dtype] * scale
        assert np.abs(native.betas - twin.betas).max() < ROUNDING[dtype] * scale
