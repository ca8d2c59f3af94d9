"""What the kernel tests share: devices, dtypes, operands, and bounds derived from rounding."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

U32, U64 = 2.0**-24, 2.0**-53  # unit roundoffs

DTYPES = [torch.float32, torch.bfloat16]  # of the rows of a basis
WEIGHTS = [*DTYPES, torch.float16]
# Around the lane count, tiles and blocks of the kernels; the largest takes many blocks.
LENGTHS = [0, 1, 2, 7, 8, 9, 511, 513, 4097, 32768, 100_003]

relaxed = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def vector(n: int, seed: int, device: str = "cpu", offset: int = 0, scale: float = 1.0) -> Tensor:
    """`(n,)` fp32 normal variates, `offset` elements into their storage."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.empty(n + offset, device=device)
    storage[offset:].copy_(torch.randn(n, generator=generator) * scale)
    return storage[offset:]


def matrix(rows: int, n: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """`(rows, n)` normal variates in `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator).to(dtype).to(device)


def dot(a: Tensor, b: Tensor) -> float:
    """Inner product of the fp64 values."""
    return float(torch.dot(a.double().cpu(), b.double().cpu()))


def dot_bound(a: Tensor, b: Tensor) -> float:
    """Rounding of a blocked fp64 sum: tiles of 4096 in 8 lanes, then compensated additions.

    The reference adds up by BLAS, whose own bound is of the same size: hence the factor 2.
    """
    absolute = float(torch.dot(a.double().abs().cpu(), b.double().abs().cpu()))
    return 2 * (4096 / 8 + 8) * U64 * absolute + 1e-300


def chain_bound(dtype: torch.dtype, terms: Tensor | float) -> Tensor | float:
    """Rounding of products with rows of `dtype` whose absolute values add up to `terms`.

    Of bf16 rows: a coefficient rounded to fp32, and chains of eight fp32 operations.
    """
    return 9 * U32 * terms if dtype == torch.bfloat16 else 0.0 * terms


def ulp(x: Tensor) -> Tensor:
    """Spacing of fp32 numbers at x."""
    return 2 * U32 * x.abs().double() + 2.0**-149
