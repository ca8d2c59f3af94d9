"""The kernels over a basis against fp64 and against their torch twins."""

from __future__ import annotations

import math
import mmap
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import reference
from tests.ops import emulator
from tests.ops.cases import DTYPES, U64, chain_bound, dot, dot_bound, matrix, relaxed, ulp, vector
from tests.tiers import cells

lengths = st.one_of(
    st.sampled_from([0, 1, 7, 8, 511, 512, 513, 2049, 33_000]), st.integers(0, 5000)
)
rows = st.one_of(st.integers(0, 13), st.sampled_from([50, 63]))

BITS = [(129, dtype) for dtype in DTYPES]  # of the quick tier


def coefficients(m: int, device: str) -> Tensor:
    return torch.linspace(-1.0, 1.5, m, dtype=torch.float64).to(device)


def check_products(sums: Tensor, basis: Tensor, w: Tensor) -> None:
    """m products, each to the rounding of a blocked fp64 sum and of its chains."""
    assert sums.shape == (basis.shape[0],)
    for value, row in zip(sums.tolist(), basis.float(), strict=True):
        chains = chain_bound(basis.dtype, dot(row.abs(), w.abs()))
        assert abs(value - dot(row, w)) <= dot_bound(row, w) + chains


def check_update(w: Tensor, before: Tensor, basis: Tensor, c: Tensor) -> None:
    """One rounding to fp32 of a sum whose own rounding is far below it, but for chains."""
    exact = before.double() - c @ basis.double()
    check_rounded_once(w, exact, basis, c.abs() @ basis.double().abs(), before.double().abs())


def check_rounded_once(
    w: Tensor, exact: Tensor, basis: Tensor, products: Tensor, other: Tensor
) -> None:
    """`products` and `other`: what the absolute values of the terms add up to."""
    sums = 4 * (basis.shape[0] + 1) * U64 * (products + other)
    error = (w.double() - exact).abs()
    assert (error <= 0.5 * ulp(exact) + sums + chain_bound(basis.dtype, products)).all()


@relaxed
@given(
    n=lengths, m=rows, dtype=st.sampled_from(DTYPES), skip=st.integers(0, 9), at=st.integers(0, 7)
)
def test_project_is_all_fp64_products(device, n, m, dtype, skip, at) -> None:
    basis, w, owned = matrix(m, n, 1, dtype, device), vector(n, 2, device, at), max(0, n - skip)
    sums = ops.project(basis, w, owned)
    check_products(sums, basis[:, :owned], w[:owned])
    check_products(reference.project(basis, w, owned), basis[:, :owned], w[:owned])


@relaxed
@given(
    n=lengths, m=rows, dtype=st.sampled_from(DTYPES), skip=st.integers(0, 9), at=st.integers(0, 7)
)
def test_subtract_is_rounded_once(device, n, m, dtype, skip, at) -> None:
    basis, w, owned = matrix(m, n, 1, dtype, device), vector(n, 2, device, at), max(0, n - skip)
    c, before = coefficients(m, device), w.clone()
    sums = ops.subtract(basis, w, c, owned)
    check_update(w, before, basis, c)
    check_products(sums, w[None, :owned], w[:owned])


@relaxed
@given(
    n=lengths, m=rows, dtype=st.sampled_from(DTYPES), skip=st.integers(0, 9), at=st.integers(0, 7)
)
def test_fused_is_subtract_then_project(device, n, m, dtype, skip, at) -> None:
    basis, w, owned = matrix(m, n, 1, dtype, device), vector(n, 2, device, at), max(0, n - skip)
    c, before, unfused = coefficients(m, device), w.clone(), w.clone()
    sums = ops.subtract_project(basis, w, c, owned)
    check_update(w, before, basis, c)
    check_products(sums, basis[:, :owned], w[:owned])
    ops.subtract(basis, unfused, c, owned)
    assert torch.equal(w, unfused)


@pytest.mark.parametrize(("m", "dtype"), cells(product([1, 7, 50, 129, 513], DTYPES), BITS))
def test_a_gpu_writes_the_bits_of_a_cpu(emulate, m, dtype) -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU rounds products by themselves")
    basis, w, c = matrix(m, 3001, 1, dtype), vector(3001, 2), coefficients(m, "cpu")

    def written() -> list[Tensor]:
        fused, alone, out = w.clone(), w.clone(), torch.empty(3, 3001)
        ops.subtract_project(basis, fused, c, 3001)
        ops.subtract(basis, alone, c, 3001)
        ops.combine(basis, torch.stack([c, c * c, -c]), out)
        return [fused, alone, out]

    expected = written()
    emulate()
    assert all(torch.equal(a, b) for a, b in zip(written(), expected, strict=True))


@pytest.mark.parametrize(("m", "dtype"), cells(product([1, 7, 50, 129, 400], DTYPES), BITS))
def test_all_gpus_have_the_same_bits(emulate, m, dtype) -> None:
    """Sums too, whatever the multiprocessors and their shared memory."""
    n, c = 10_007, coefficients(m, "cpu")
    basis, w = matrix(m, n, 1, dtype), vector(n, 2)

    def results() -> list[Tensor]:
        fused = w.clone()
        sums = [ops.project(basis, w, n), ops.subtract_project(basis, fused, c, n)]
        return [*sums, ops.dots([(w, w)], n), fused]

    emulate()
    expected = results()
    for number, name in enumerate(emulator.DEVICES):
        emulate(device=name, sms=3 + number)
        assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


# 429 rows of fp32 are the most of which a tile fits; then warps have all the rows that they can.
@pytest.mark.parametrize("m", cells([1, 4, 5, 129, 400, 429, 430, 700], [1, 5, 129]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_rows(device, m, dtype) -> None:
    n, owned = 3001, 2990
    basis, w, c = matrix(m, n, 1, dtype, device), vector(n, 2, device), coefficients(m, device)
    check_products(ops.project(basis, w, owned), basis[:, :owned], w[:owned])
    before = w.clone()
    sums = ops.subtract_project(basis, w, c, owned)
    check_update(w, before, basis, c)
    check_products(sums, basis[:, :owned], w[:owned])


def test_chains_of_16_bit_products_are_short(device) -> None:
    """2^-24 added to 1 in fp32 is lost. A chain that begins with 1 may lose the seven products
    that follow in it; the bound has no room for the fifteen of a chain of sixteen."""
    n, m = 4096, 257
    along = torch.full((1, n), 2.0**-12, device=device)
    along[:, ::512] = 1.0
    basis, w = along.bfloat16(), along[0]
    check_products(ops.project(basis, w, n), basis, w)
    none = torch.zeros(1, dtype=torch.float64, device=device)
    check_products(ops.subtract_project(basis, w.clone(), none, n), basis, w)
    c = torch.full((m,), 2.0**-12, dtype=torch.float64, device=device)
    c[::128] = 1.0
    basis, zero = c.bfloat16()[:, None].repeat(1, n), torch.zeros(n, device=device)
    w, out = zero.clone(), torch.empty(1, n, device=device)
    ops.subtract(basis, w, c, n)
    check_update(w, zero, basis, c)
    ops.combine(basis, -c[None], out)
    check_update(out[0], zero, basis, c)


@relaxed
@given(n=lengths, m=rows, k=st.integers(0, 9), dtype=st.sampled_from(DTYPES), pad=st.integers(0, 3))
def test_combinations_are_rounded_once(device, n, m, k, dtype, pad) -> None:
    basis = matrix(m, n + pad, 1, dtype, device)[:, :n]
    weights = matrix(k, m, 3, torch.float32, device).double()
    out = torch.full((k, n + pad), 7.0, device=device)
    ops.combine(basis, weights, out[:, :n])
    exact = weights @ basis.double()
    products = weights.abs() @ basis.double().abs()
    check_rounded_once(out[:, :n], exact, basis, products, torch.zeros_like(products))
    assert (out[:, n:] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cgs2_orthogonalises_to_rounding(device, dtype) -> None:
    """The three passes of a Lanczos step against a basis that is orthonormal in its dtype."""
    n, m = 20_000, 20
    q = torch.linalg.qr(matrix(n, m, 1, torch.float32).double())[0].t().contiguous()
    basis, w = q.to(dtype).to(device), vector(n, 2, device)
    first = ops.project(basis, w, n)
    second = ops.subtract_project(basis, w, first, n)
    square = ops.subtract(basis, w, second, n)
    left = ops.project(basis, w, n).abs().max() / square.sqrt()
    # The basis' own departure from orthonormality (its rounding, sqrt(m) columns) enters twice.
    departure = (basis.double() @ basis.double().t() - torch.eye(m, device=device)).norm()
    assert left <= 2 * float(departure) ** 2 + 4 * 2.0**-24


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows(device, bad) -> None:
    n, m = 3000, 6
    basis, w, c = (
        matrix(m, n, 1, torch.float32, device),
        vector(n, 2, device),
        coefficients(m, device),
    )
    basis[2, 2999] = bad
    assert not ops.project(basis, w, n)[2].isfinite()
    assert ops.project(basis, w, 2999).isfinite().all()
    fused, sums = w.clone(), ops.subtract_project(basis, w.clone(), c, n)
    assert not sums.isfinite().any()
    assert ops.subtract_project(basis, fused, c, 2999).isfinite().all()
    assert not fused[2999].isfinite() and fused[:2999].isfinite().all()
    out = torch.empty(2, n, device=device)
    ops.combine(basis, torch.ones(2, m, dtype=torch.float64, device=device), out)
    assert not out[:, 2999].isfinite().any() and out[:, :2999].isfinite().all()


def test_row_offsets_beyond_2_to_the_31_elements() -> None:
    """Rows 2^31 + 5 elements apart in memory that is reserved, and touched in two places only."""
    stride, n = 2**31 + 5, 3000
    try:
        memory = mmap.mmap(-1, 2 * (stride + n), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        pytest.skip(f"this machine does not reserve 4 GB of address space: {error}")
    storage = torch.from_numpy(np.frombuffer(memory, dtype=np.int16)).view(torch.bfloat16)
    basis = storage.as_strided((2, n), (stride, 1))
    filled = matrix(2, n, 1, torch.bfloat16)
    basis.copy_(filled)
    w, c = vector(n, 2), coefficients(2, "cpu")
    expected, got = w.clone(), w.clone()
    assert torch.equal(ops.project(basis, w, n), ops.project(filled, w, n))
    sums = ops.subtract_project(basis, got, c, n)
    assert torch.equal(sums, ops.subtract_project(filled, expected, c, n))
    assert torch.equal(got, expected)
