"""Counter-based random numbers: Philox4x32-10, and Gaussian and Rademacher variates from it.

A variate is a pure function of (key, stream, index): no state, any order, any device. Only IEEE
operations that every implementation rounds alike are used (integers; fp64 + - * / sqrt without
contraction), so the torch twin here, the C++ and the CUDA kernels return the same bits.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers and key increments of the published generator
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low words of the 64-bit product a * b of 32-bit words held in int64."""
    low_part, high_part = b & 0xFFFF, b >> 16
    first, second = a * low_part, a * high_part  # below 2^48: exact in int64
    total = first + ((second & 0xFFFF) << 16)
    return ((second >> 16) + (total >> 32)) & _MASK, total & _MASK


def philox(
    key: int, stream: int, lane: int, block: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words (int64 tensors) for each 64-bit `block` number.

    Args:
        key: 64-bit key.
        stream: 64-bit number; its words are counter words 2 and 3.
        lane: added to `stream`, so that one key serves several purposes.
        block: int64 tensor, counter words 0 and 1.
    """
    stream = (stream + lane) & 0xFFFFFFFFFFFFFFFF
    c0, c1 = block & _MASK, (block >> 32) & _MASK
    c2 = torch.full_like(c0, stream & _MASK)
    c3 = torch.full_like(c0, stream >> 32)
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _mulhilo(_M0, c0)
        high1, low1 = _mulhilo(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def rademacher(key: int, stream: int, index: Tensor) -> Tensor:
    """Return +1 or -1 (fp32) for each int64 `index`: bit `index % 128` of block `index // 128`."""
    words = torch.stack(philox(key, stream, 0, index >> 7), -1)
    word = words.gather(-1, ((index >> 5) & 3)[:, None]).squeeze(-1)
    return (1 - 2 * ((word >> (index & 31)) & 1)).float()


def gaussian(key: int, stream: int, index: Tensor) -> Tensor:
    """Return a standard normal variate (fp32) for each int64 `index`, by Box and Muller in fp64.

    Block `index // 4` gives words x0..x3; the pair (x0, x1) gives variates 0 (cosine) and 1 (sine),
    the pair (x2, x3) variates 2 and 3. The radius comes from (word + 0.5) / 2^32, so |z| < 6.7.
    """
    x0, x1, x2, x3 = philox(key, stream, 0, index >> 2)
    second = (index & 2) != 0
    u = (torch.where(second, x2, x0).double() + 0.5) * 2.0**-32
    angle = torch.where(second, x3, x1)
    radius = torch.sqrt(-2.0 * _log(u))
    return (radius * _cos_or_sin(angle, (index & 1) != 0)).float()


FILL_CHUNK = 1 << 18  # indices at a time: the temporaries of one variate take some 200 bytes


def fill(kind: str, out: Tensor, key: int, stream: int, start: int) -> Tensor:
    """`out[i] <- ` variate number `start + i` of `kind` ("gaussian" or "rademacher")."""
    variate = {"gaussian": gaussian, "rademacher": rademacher}[kind]
    for first in range(0, out.numel(), FILL_CHUNK):
        part = out[first : first + FILL_CHUNK]
        at = start + first
        part.copy_(variate(key, stream, torch.arange(at, at + part.numel(), device=out.device)))
    return out


# ln(x) = e ln2 + 2 artanh((m-1)/(m+1)), m in [sqrt(1/2), sqrt(2)): series to z^21, error < 2e-16
_LN2 = math.log(2.0)


def _log(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)  # exact: mantissa in [0.5, 1)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.double() - small.double()
    z = (mantissa - 1.0) / (mantissa + 1.0)
    z2 = z * z
    series = torch.full_like(z, 1.0 / 21.0)
    for k in range(19, 0, -2):
        series = series * z2 + 1.0 / k
    return exponent * _LN2 + 2.0 * (z * series)


_SIN = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]
_COS = [(-1.0) ** k / math.factorial(2 * k) for k in range(10)]


def _horner(coefficients: list[float], x2: Tensor) -> Tensor:
    total = torch.full_like(x2, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x2 + c
    return total


def _cos_or_sin(word: Tensor, sine: Tensor) -> Tensor:
    """Return cosine or sine of 2 pi (word + 0.5) / 2^32, by octant reduction in exact integers."""
    quarter = ((word >> 30) + 3 * sine.to(torch.int64)) & 3  # sin(t) = cos(t + 3/4 turn)
    offset = (word & 0x3FFFFFFF).double() + 0.5  # within the quarter turn, [0, 2^30)
    t = offset * (math.pi / 2.0 * 2.0**-30)
    upper = offset > 2.0**29
    t = torch.where(upper, math.pi / 2.0 - t, t)  # now in [0, pi/4]
    t2 = t * t
    s, c = t * _horner(_SIN, t2), _horner(_COS, t2)
    sin_t, cos_t = torch.where(upper, c, s), torch.where(upper, s, c)
    value = torch.where((quarter & 1) != 0, sin_t, cos_t)
    negative = (quarter == 1) | (quarter == 2)
    return torch.where(negative, -value, value)
