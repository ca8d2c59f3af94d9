"""The one-pass kernels against their torch twins, bit for bit, and against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hessian import ops
from ds_hessian.errors import KernelError
from ds_hessian.ops import reference
from tests.ops.cases import (
    DTYPES,
    LENGTHS,
    WEIGHTS,
    dot,
    dot_bound,
    relaxed,
    vector,
)

lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 20_000))
offsets = st.integers(0, 7)


def close(sums: Tensor, expected: list[tuple[Tensor, Tensor]]) -> None:
    """Each sum is the product of its pair, to the rounding of a blocked fp64 sum."""
    for value, (a, b) in zip(sums.tolist(), expected, strict=True):
        assert abs(value - dot(a, b)) <= dot_bound(a, b)


@relaxed
@given(n=lengths, skip=st.integers(0, 9), a_at=offsets, b_at=offsets)
def test_dots_are_fp64_products_of_the_owned_prefix(device, n, skip, a_at, b_at) -> None:
    a, b = vector(n, 1, device, a_at), vector(n, 2, device, b_at)
    owned = max(0, n - skip)
    pairs = [(a, b), (b, b), (a, a), (a, b), (b, a), (b, b)]
    sums = ops.dots(pairs, owned)
    assert sums.dtype == torch.float64 and sums.device == a.device
    close(sums, [(x[:owned], y[:owned]) for x, y in pairs])


def displaced(weights, masters, v, h, owned) -> tuple[list[Tensor], Tensor]:
    """What the twin makes of copies of the weights."""
    copies = [w.clone() for w in weights]
    return copies, reference.displace(copies, masters, v, h, owned)


@relaxed
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), max_size=5),
    weight=st.sampled_from(WEIGHTS),
    master=st.sampled_from(WEIGHTS),
    h=st.sampled_from([0.0, 1e-3, -0.25]),
    skip=st.integers(0, 50),
    at=offsets,
    v_at=offsets,
)
def test_displaced_weights_have_the_twins_bits(
    device, sizes, weight, master, h, skip, at, v_at
) -> None:
    n = sum(sizes)
    owned = max(0, n - skip)
    weights = [vector(k + at, i, device).to(weight)[at:] for i, k in enumerate(sizes)]
    masters = [vector(k + at, 50 + i, device).to(master)[at:] for i, k in enumerate(sizes)]
    v = vector(n, 99, device, v_at)
    before = torch.cat([w.double() for w in weights]) if weights else v.double()
    expected, sums = displaced(weights, masters, v, h, owned)
    got = ops.displace(weights, masters, v, h, owned)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    change = (torch.cat([w.double() for w in weights]) if weights else v.double()) - before
    change, v = change[:owned], v[:owned].double()
    close(got, [(change, v), (change, change)])
    assert torch.allclose(got, sums, rtol=1e-11, atol=float(dot_bound(change, v)))


@pytest.mark.parametrize("displace", [ops.displace, reference.displace])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_restoring_is_exact_whatever_v_holds(device, weight, displace) -> None:
    master = vector(5000, 1, device)
    master[::7] = -0.0
    v = vector(5000, 2, device)
    w = master.to(weight, copy=True)
    kept = w.clone()
    displace([w], [master], v, 0.5, 5000)
    assert not torch.equal(w, kept)
    v[3], v[4] = math.inf, math.nan
    displace([w], [master], v, 0.0, 5000)
    assert torch.equal(w.view(torch.uint8), kept.view(torch.uint8))
    displace([w], [master], vector(5000, 5, device), -0.5, 5000)
    sums = displace([w], [master], None, 0.0, 5000)
    assert torch.equal(w.view(torch.uint8), kept.view(torch.uint8))
    assert sums[0] == 0 and sums[1] > 0


def test_without_a_direction_nothing_is_projected_on_it(device) -> None:
    """Also where the change is not finite: 0 times Inf is not 0."""
    w = vector(5000, 1, device)
    w[17] = math.inf
    along, square = ops.displace([w], [vector(5000, 2, device)], None, 0.0, 5000).tolist()
    assert along == 0 and square == math.inf


def test_shards_of_mixed_dtypes_are_displaced_in_their_order(device) -> None:
    sizes, types = [5, 3000, 0, 17, 900, 1, 70], [*WEIGHTS, *WEIGHTS, torch.float32]
    weights = [
        vector(k, i, device).to(t) for i, (k, t) in enumerate(zip(sizes, types, strict=True))
    ]
    masters = [vector(k, 50 + i, device) for i, k in enumerate(sizes)]
    v, n = vector(sum(sizes), 99, device), sum(sizes)
    expected, sums = displaced(weights, masters, v, 0.25, n - 3)
    got = ops.displace(weights, masters, v, 0.25, n - 3)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    assert torch.allclose(got, sums, rtol=1e-11)


def test_shards_go_on_from_where_they_are_with_the_twins_bits(device) -> None:
    sizes, types = [5, 3000, 17, 900], [*WEIGHTS, torch.float32]
    weights = [
        vector(k, i, device).to(t) for i, (k, t) in enumerate(zip(sizes, types, strict=True))
    ]
    masters = [vector(k, 50 + i, device) for i, k in enumerate(sizes)]
    v, n = vector(sum(sizes), 99, device), sum(sizes)
    shards = ops.Shards(weights, masters)
    shards.displace(v, 0.25, n - 3)
    expected = [w.clone() for w in weights]
    sums = reference.displace(expected, expected, v, -0.5, n - 3)
    got = shards.displace(v, -0.5, n - 3, on=True)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    assert torch.allclose(got, sums, rtol=1e-11)
    shards.displace(v, 0.25, n - 3)
    assert torch.equal(weights[1], (masters[1] + v[5:3005] * 0.25).to(types[1]))


def test_a_rank_without_shards_has_its_sums_where_its_vector_is() -> None:
    """On a GPU; here the meta device is the other one."""
    v = torch.empty(0, device="meta")
    assert ops.displace([], [], v, 0.25, 0).device == v.device
    assert torch.equal(ops.displace([], [], None, 0.0, 0), torch.zeros(2, dtype=torch.float64))


def test_shards_are_written_where_they_are_now(device) -> None:
    """A host may give its tensors other memory between two displacements."""
    master, v = vector(5000, 1, device), vector(5000, 2, device)
    w = master.clone()
    shards = ops.Shards([w], [master])
    shards.displace(v, 0.5, 5000)
    w.data = (before := w.detach()).clone()
    kept = before.clone()
    shards.displace(v, 0.25, 5000)
    assert torch.equal(w, torch.add(master, v, alpha=0.25)) and torch.equal(before, kept)
    w.data = v
    with pytest.raises(KernelError, match="v must be apart from"):
        shards.displace(v, 0.25, 5000)


@relaxed
@given(
    n=lengths,
    skip=st.integers(0, 9),
    at=offsets,
    zero=st.booleans(),
    h=st.sampled_from([1e-3, -2.0, 0.3]),
)
def test_difference_has_the_twins_bits(device, n, skip, at, zero, h) -> None:
    plus, minus = vector(n, 1, device, at), vector(n, 2, device)
    g0 = vector(n, 3, device) if zero else None
    owned, expected = max(0, n - skip), plus.clone()
    second = plus.double() + minus.double() - 2 * (g0 if g0 is not None else plus).double()
    twin = reference.difference(expected, minus, h, g0, owned)
    sums = ops.difference(plus, minus, h, g0, owned)
    assert torch.equal(plus, expected)
    p, s = plus[:owned], second[:owned]
    nothing = torch.zeros_like(p)
    close(sums, [(p, p), (s, s) if zero else (nothing, nothing)])
    assert torch.allclose(sums, twin, rtol=1e-10, atol=1e-8)


@relaxed
@given(n=lengths, skip=st.integers(0, 9), at=offsets)
def test_curvature_ratio_is_the_fp64_ratio(device, n, skip, at) -> None:
    plus, minus, zero = vector(n, 1, device, at), vector(n, 2, device), vector(n, 3, device)
    owned = max(0, n - skip)
    d = (plus.double() - minus.double())[:owned]
    s = (plus.double() + minus.double() - 2 * zero.double())[:owned]
    close(ops.curvature_ratio(plus, minus, zero, owned), [(d, d), (s, s)])


@relaxed
@given(
    n=lengths,
    skip=st.integers(0, 9),
    at=offsets,
    dtype=st.sampled_from([None, *DTYPES]),
    in_place=st.booleans(),
)
def test_normalize_store_has_the_twins_bits(device, n, skip, at, dtype, in_place) -> None:
    w = vector(n, 1, device, at)
    v = w if in_place else torch.full_like(w, 7.0)
    row = None if dtype is None else torch.zeros(n, dtype=dtype, device=device)
    owned, source = max(0, n - skip), w.clone()
    twin_v = torch.empty_like(w)
    twin_row = None if row is None else torch.empty_like(row)
    reference.normalize_store(source, 0.77, twin_v, twin_row, owned)
    sums = ops.normalize_store(w, 0.77, v, row, owned)
    assert torch.equal(v, twin_v)
    if row is not None and twin_row is not None:
        assert torch.equal(row, twin_row) and torch.equal(row.float(), v)
    close(sums, [(v[:owned], v[:owned])])


def test_large_vectors_are_stored_past_the_caches_with_the_same_bits(device) -> None:
    """Above 16 MB the CPU kernel uses streaming stores."""
    n = (16 << 20) // 4 + 40
    w = vector(n, 1, device)
    for at in (0, 3):
        v = torch.zeros(n + at, device=device)[at:]
        row = torch.zeros(n + at, dtype=torch.bfloat16, device=device)[at:]
        ops.normalize_store(w, 0.5, v, row, n)
        assert torch.equal(row, (w * 0.5).bfloat16()) and torch.equal(v, row.float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 8, 4096, 4998])
def test_what_is_not_finite_shows_in_the_sums(device, bad, place) -> None:
    n = 5000
    a, b = vector(n, 1, device), vector(n, 2, device).abs()
    a[place] = bad
    expected = torch.tensor(bad, dtype=torch.float64)
    assert torch.equal(ops.dots([(a, b)], n).cpu()[0].nan_to_num(2.0), expected.nan_to_num(2.0))
    assert not ops.curvature_ratio(a, b, b, n).isfinite().any()
    w = vector(n, 3, device)
    assert not ops.displace([w.clone()], [w], a, 0.1, n).isfinite().any()
    assert not ops.normalize_store(a, 1.0, w, None, n).isfinite().any()
    g = a.clone()
    assert not ops.difference(g, b, 1.0, b, n).isfinite().any()
    assert g[place].isnan() or g[place].isinf()


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_replicas_do_not_count_even_where_they_are_not_finite(device, dtype) -> None:
    n, owned = 5003, 4099
    a, w = vector(n, 1, device), vector(n, 2, device).to(dtype)
    a[owned:] = math.nan
    assert ops.dots([(a, a)], owned).isfinite().all()
    assert ops.displace([w], [w.clone()], a, 0.1, owned).isfinite().all()
    assert w[owned:].isnan().all() and w[:owned].isfinite().all()
    row = None if dtype == torch.float16 else w
    assert ops.normalize_store(a, 1.0, a, row, owned).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_survives_a_round_trip(device, dtype) -> None:
    """Also subnormals, infinities and both zeros; NaN stays NaN."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers.to(device)
    w = torch.zeros_like(numbers)
    ops.displace([w], [numbers], None, 0.0, 2**16)
    finite = ~numbers.isnan()
    assert torch.equal(w[finite].view(torch.int16), numbers[finite].view(torch.int16))
    assert w[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_torchs(device, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32).to(device)
    w = torch.zeros(x.numel(), dtype=dtype, device=device)
    ops.displace([w], [x], None, 0.0, 0)
    expected = x.to(dtype)
    finite = ~x.isnan()
    assert torch.equal(w[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert w[~finite].isnan().all()
