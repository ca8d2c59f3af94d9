"""Philox and the probes: known answers, the same bits everywhere, moments, independence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import random
from tests.ops.cases import relaxed

FILLS = {"gaussian": ops.fill_gaussian, "rademacher": ops.fill_rademacher}
words = st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, result) -> None:
    signed = torch.tensor([counter[0], counter[1]], dtype=torch.int64)
    block = (signed[0] | (signed[1] << 32)).reshape(1)
    stream = counter[2] | counter[3] << 32
    got = random.philox(key[0] | key[1] << 32, stream, 0, block)
    assert tuple(int(x) for x in got) == result


def test_kernels_use_the_published_generator(device) -> None:
    signs = ops.fill_rademacher(torch.empty(128, device=device), 0, 0).cpu()
    bits = (signs < 0).to(torch.int64).view(4, 32)
    got = (bits << torch.arange(32)).sum(1).tolist()
    assert tuple(got) == KNOWN[0][2]


@pytest.mark.parametrize("kind", FILLS)
@relaxed
@given(
    key=words,
    stream=words,
    start=st.one_of(
        st.integers(0, 2**10), st.integers(2**31 - 200, 2**31 + 200), st.integers(2**33 - 9, 2**61)
    ),
    n=st.one_of(st.integers(0, 300), st.integers(0, 9000)),
    at=st.integers(0, 7),
)
def test_ranges_have_the_bits_of_single_variates(device, kind, key, stream, start, n, at) -> None:
    out = torch.full((n + at + 1,), 9.0, device=device)
    FILLS[kind](out[at : at + n], key, stream, start)
    index = torch.arange(start, start + n)
    variate = {"gaussian": random.gaussian, "rademacher": random.rademacher}[kind]
    assert torch.equal(out[at : at + n].cpu(), variate(key, stream, index))
    assert (out[:at] == 9.0).all() and out[at + n] == 9.0


@pytest.mark.parametrize("kind", FILLS)
def test_a_layout_does_not_change_a_probe(device, kind) -> None:
    n = 100_000
    whole = FILLS[kind](torch.empty(n, device=device), 1, 2)
    parts = torch.empty(n, device=device)
    for a, b in ((0, 1), (1, 77), (77, 40_001), (40_001, n)):
        FILLS[kind](parts[a:b], 1, 2, a)
    assert torch.equal(whole, parts)


@pytest.fixture(scope="module")
def sample() -> Tensor:
    return ops.fill_gaussian(torch.empty(4_000_000), 123, 456).double()


def test_gaussian_moments(sample) -> None:
    n = sample.numel()
    # moment k of N(0, 1), and the variance of x^k: m_2k - m_k^2
    for k, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        deviation = math.sqrt(variance / n)
        assert abs(float(sample.pow(k).mean()) - moment) < 5 * deviation
    assert 4.5 < float(sample.abs().max()) < 6.7


def test_gaussian_distribution(sample) -> None:
    """Kolmogorov and Smirnov at a probability of 1e-6."""
    n = sample.numel()
    ordered = sample.sort().values
    cdf = 0.5 * torch.special.erfc(-ordered / math.sqrt(2))
    steps = torch.arange(n, dtype=torch.float64) / n
    distance = max(float((cdf - steps).max()), float((steps + 1 / n - cdf).max()))
    assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2)) / math.sqrt(n)


def test_neighbours_and_pairs_are_independent(sample) -> None:
    n = sample.numel()
    for lag in (1, 2, 3, 4, 5, 128):
        product = float((sample[:-lag] * sample[lag:]).mean())
        squares = float(((sample[:-lag] ** 2 - 1) * (sample[lag:] ** 2 - 1)).mean())
        assert abs(product) < 5 / math.sqrt(n - lag)
        assert abs(squares) < 5 * 2 / math.sqrt(n - lag)


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize(
    "other", [(124, 456), (123, 457), (123 ^ 1 << 40, 456), (123, 456 ^ 1 << 63)]
)
def test_keys_and_streams_are_independent(kind, other) -> None:
    n = 1_000_000
    a = FILLS[kind](torch.empty(n), 123, 456).double()
    b = FILLS[kind](torch.empty(n), *other).double()
    assert abs(float((a * b).mean())) < 5 / math.sqrt(n)


def test_rademacher_is_fair_and_uncorrelated() -> None:
    n = 2_000_000
    signs = ops.fill_rademacher(torch.empty(n), 5, 6).double()
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 5 / math.sqrt(n)
    for lag in (1, 32, 64, 128):
        assert abs(float((signs[:-lag] * signs[lag:]).mean())) < 5 / math.sqrt(n - lag)
