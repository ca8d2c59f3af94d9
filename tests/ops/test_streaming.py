"""The one-pass kernels against their torch twins, bit for bit, and against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import reference
from tests.ops.cases import (
    DEVICES,
    DTYPES,
    LENGTHS,
    dot,
    dot_bound,
    relaxed,
    vector,
)

lengths = st.one_of(st.sampled_from(LENGTHS), st.integers(0, 20_000))
offsets = st.integers(0, 7)
pytestmark = pytest.mark.parametrize("device", DEVICES)


def close(sums: Tensor, expected: list[tuple[Tensor, Tensor]]) -> None:
    """Each sum is the product of its pair, to the rounding of a blocked fp64 sum."""
    for value, (a, b) in zip(sums.tolist(), expected, strict=True):
        assert abs(value - dot(a, b)) <= dot_bound(a, b)


@relaxed
@given(n=lengths, skip=st.integers(0, 9), a_at=offsets, b_at=offsets)
def test_dots_are_fp64_products_of_the_owned_prefix(device, n, skip, a_at, b_at) -> None:
    a, b = vector(n, 1, device, a_at), vector(n, 2, device, b_at)
    owned = max(0, n - skip)
    sums = ops.dots([(a, b), (b, b), (a, a)], owned)
    assert sums.dtype == torch.float64 and sums.device == a.device
    a, b = a[:owned], b[:owned]
    close(sums, [(a, b), (b, b), (a, a)])


def displaced(weights, masters, v, h, owned, seed) -> tuple[list[Tensor], Tensor]:
    """What the twin makes of copies of the weights."""
    copies = [w.clone() for w in weights]
    return copies, reference.displace(copies, masters, v, h, owned, seed)


@relaxed
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 9000)), max_size=5),
    weight=st.sampled_from(DTYPES),
    master=st.sampled_from(DTYPES),
    h=st.sampled_from([0.0, 1e-3, -0.25]),
    seed=st.sampled_from([None, 0, 2**64 - 1]),
    skip=st.integers(0, 50),
    at=offsets,
    v_at=offsets,
)
def test_displaced_weights_have_the_twins_bits(
    device, sizes, weight, master, h, seed, skip, at, v_at
) -> None:
    n = sum(sizes)
    owned = max(0, n - skip)
    weights = [vector(k + at, i, device).to(weight)[at:] for i, k in enumerate(sizes)]
    masters = [vector(k + at, 50 + i, device).to(master)[at:] for i, k in enumerate(sizes)]
    v = vector(n, 99, device, v_at)
    before = torch.cat([w.double() for w in weights]) if weights else v.double()
    expected, sums = displaced(weights, masters, v, h, owned, seed)
    got = ops.displace(weights, masters, v, h, owned, seed)
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    change = (torch.cat([w.double() for w in weights]) if weights else v.double()) - before
    change, v = change[:owned], v[:owned].double()
    close(got, [(change, v), (change, change)])
    assert torch.allclose(got, sums, rtol=1e-11, atol=float(dot_bound(change, v)))


@pytest.mark.parametrize("weight", DTYPES)
def test_restoring_is_exact_whatever_v_holds(device, weight) -> None:
    master = vector(5000, 1, device)
    master[::7] = -0.0
    v = vector(5000, 2, device)
    w = master.to(weight, copy=True)
    kept = w.clone()
    ops.displace([w], [master], v, 0.5, 5000, 3)
    assert not torch.equal(w, kept)
    v[3], v[4] = math.inf, math.nan
    ops.displace([w], [master], v, 0.0, 5000, 3)
    assert torch.equal(w.view(torch.uint8), kept.view(torch.uint8))
    ops.displace([w], [master], vector(5000, 5, device), -0.5, 5000)
    sums = ops.displace([w], [master], None, 0.0, 5000)
    assert torch.equal(w.view(torch.uint8), kept.view(torch.uint8))
    assert sums[0] == 0 and sums[1] > 0


def rounded_stochastically(x: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """`x` in `dtype`: displaced by -0, which changes no number."""
    w = torch.empty(x.numel(), dtype=dtype, device=x.device)
    ops.displace([w], [x], torch.full_like(x, -0.0), 1.0, x.numel(), seed)
    return w


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fraction", [2.0**-7, 0.3, 0.5, 0.96])
def test_stochastic_rounding_is_unbiased_at_every_place(device, weight, fraction) -> None:
    """Rounds up as often as x is far from the lower number, at each place of a Philox block, and
    as often next to an element that was rounded up as elsewhere."""
    n = 400_000
    step = float(torch.finfo(weight).eps)
    x = torch.full((n,), 1 + fraction * step, device=device)
    fraction = float((x[0].double() - 1) / step)  # as rounded to fp32
    x[1::3] *= -1
    up = (rounded_stochastically(x, weight, 11).double().abs() - 1).div(step).cpu()
    assert set(up.unique().tolist()) == {0.0, 1.0}
    variance = fraction * (1 - fraction)
    for part in (up, *up.view(-1, 8).unbind(1)):
        assert abs(float(part.mean()) - fraction) < 5 * math.sqrt(variance / part.numel())
    centred = up - fraction
    for lag in (*range(1, 9), 64):
        assert abs(float((centred[lag:] * centred[:-lag]).mean())) < 5 * variance / math.sqrt(n)


@pytest.mark.parametrize(("weight", "drop"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_stochastic_rounding_adds_half_a_published_word(device, weight, drop) -> None:
    """Philox block 0 under key 0 (Random123's kat_vectors) rounds elements 0 to 7 of seed 0."""
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    halves = torch.tensor([half for word in words for half in (word & 0xFFFF, word >> 16)])
    one, step = 0x3F800000, 1 << drop
    enough = one + step - (halves & (step - 1))  # the least that reaches the next number
    for raw, number in ((enough, one + step), (enough - 1, one)):
        x = raw.to(torch.int32).view(torch.float32).to(device)
        expected = torch.tensor([number], dtype=torch.int32).view(torch.float32).to(weight)
        assert (rounded_stochastically(x, weight, 0).cpu() == expected).all()


@pytest.mark.parametrize(("weight", "drop"), [(torch.bfloat16, 16), (torch.float16, 13)])
def test_stochastic_rounding_gives_a_neighbour_of_any_number(device, weight, drop) -> None:
    """Over all exponents, with subnormal and infinite results, and bit for bit as the twin."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32)
    bits[:4] = torch.tensor([0x7F800000, -0x800000, 0x7F800001, -1])  # Inf, -Inf and two NaN
    x = bits.view(torch.float32)
    got = rounded_stochastically(x.to(device), weight, 3).cpu()
    with ops.implementation("torch"):
        twin = rounded_stochastically(x, weight, 3)
    cut = bits & ~((1 << drop) - 1)
    towards, away = (b.view(torch.float32).to(weight) for b in (cut, cut + (1 << drop)))
    nan, finite = x.isnan(), x.isfinite()
    assert torch.equal(got.isnan(), nan) and torch.equal(got[x.isinf()].float(), x[x.isinf()])
    assert torch.equal(got[~nan].view(torch.int16), twin[~nan].view(torch.int16))
    assert ((got == towards) | (got == away))[finite].all()
    assert (got == towards)[finite].any() and (got == away)[finite].any()


def test_stochastic_rounding_depends_on_the_global_index_only(device) -> None:
    n, v, master = 9001, vector(9001, 1, device), vector(9001, 2, device)
    whole = torch.empty(n, dtype=torch.bfloat16, device=device)
    ops.displace([whole], [master], v, 0.1, n, 5)
    parts = torch.empty(n, dtype=torch.bfloat16, device=device)
    cuts = [0, 3, 130, 4099, n]
    shards = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    ops.displace([parts[s] for s in shards], [master[s] for s in shards], v, 0.1, n, 5)
    assert torch.equal(whole, parts)


@relaxed
@given(
    n=lengths,
    skip=st.integers(0, 9),
    at=offsets,
    previous=st.booleans(),
    zero=st.booleans(),
    h=st.sampled_from([1e-3, -2.0, 0.3]),
)
def test_difference_has_the_twins_bits(device, n, skip, at, previous, zero, h) -> None:
    plus, minus, v = vector(n, 1, device, at), vector(n, 2, device), vector(n, 3, device)
    before = vector(n, 4, device, at) if previous else None
    g0 = vector(n, 5, device) if zero else None
    owned, expected = max(0, n - skip), plus.clone()
    second = plus.double() + minus.double() - 2 * (g0 if g0 is not None else plus).double()
    twin = reference.difference(expected, minus, h, v, before, g0, owned)
    sums = ops.difference(plus, minus, h, v, before, g0, owned)
    assert torch.equal(plus, expected)
    p, s = plus[:owned], second[:owned]
    nothing = torch.zeros_like(p)
    middle = (p, before[:owned]) if before is not None else (nothing, nothing)
    seconds = [(s, s), (s, p)] if zero else [(nothing, nothing)] * 2
    close(sums, [(p, v[:owned]), middle, (p, p), *seconds])
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
@given(n=lengths, skip=st.integers(0, 9), at=offsets, previous=st.booleans())
def test_lanczos_update_is_rounded_once(device, n, skip, at, previous) -> None:
    w, v = vector(n, 1, device, at), vector(n, 2, device)
    before = vector(n, 3, device) if previous else None
    owned, twin = max(0, n - skip), w.clone()
    exact = w.double() - 0.37 * v.double()
    if before is not None:
        exact = exact - 1.25 * before.double()
    reference.lanczos_update(twin, v, before, 0.37, 1.25, owned)
    sums = ops.lanczos_update(w, v, before, 0.37, 1.25, owned)
    assert torch.equal(w, twin) and torch.equal(w, exact.float())
    close(sums, [(w[:owned], w[:owned])])


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
    assert not ops.difference(g, b, 1.0, b, None, None, n)[[0, 2]].isfinite().any()
    assert g[place].isnan() or g[place].isinf()


@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_do_not_count_even_where_they_are_not_finite(device, dtype) -> None:
    n, owned = 5003, 4099
    a, w = vector(n, 1, device), vector(n, 2, device).to(dtype)
    a[owned:] = math.nan
    assert ops.dots([(a, a)], owned).isfinite().all()
    assert ops.displace([w], [w.clone()], a, 0.1, owned).isfinite().all()
    assert w[owned:].isnan().all() and w[:owned].isfinite().all()
    assert ops.normalize_store(a, 1.0, a, w, owned).isfinite().all()


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
