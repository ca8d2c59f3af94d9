"""Torch twins of the fused kernels: their definition, their reference and their fallback.

Conventions shared by every kernel (`csrc/contracts.h`):

* A vector is a flat contiguous tensor of `n_local` elements. Its first `owned` elements are the
  coordinates that this rank *owns*; the rest are replicas of coordinates that another rank owns.
  Updates touch all elements, sums run over the owned prefix only, so that summed over ranks every
  coordinate counts once.
* All sums are accumulated in fp64 from the exact products of the fp32 inputs, and returned as an
  fp64 tensor on the vector's device: partial sums, to be reduced over ranks by the caller.
* The kernels form products with bf16 rows in fp32, in chains of eight; the twins in fp64.
* A basis is a `(capacity, n_local)` tensor in its storage dtype, fp32 or bf16; a row is widened to
  fp32 before use.

Cost is given as the number of times each operand is read (R) and written (W) by the fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 16  # elements per fp64 temporary: the twins must not double the memory of a vector
TILE = 1 << 20  # elements of a basis' fp64 temporary, all rows together


def _dot(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for start in range(0, a.numel(), CHUNK):
        total += torch.dot(a[start : start + CHUNK].double(), b[start : start + CHUNK].double())
    return total


def dots(pairs: Sequence[tuple[Tensor, Tensor]], owned: int) -> Tensor:
    """Compute inner products `<a, b>` of pairs of fp32 vectors. Returns `(len(pairs),)`. R each
    operand.
    """
    if not pairs:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([_dot(a[:owned], b[:owned]) for a, b in pairs])


def displace(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    v: Tensor | None,
    h: float,
    owned: int,
) -> Tensor:
    """Write `w = cast(master + h * v)` shard by shard; never accumulates. `h = 0` restores.

    `weights` and `masters` are matching lists of flat shards whose lengths add up to `n_local`, in
    the vector's order; each may be fp32, bf16 or fp16. They may be the same. The sum is formed in
    fp32 and rounded once, to nearest even.

    With `h = 0`, `w = cast(master)` bit for bit: `v`, which may then be None, takes no part in it
    (0 * Inf is not 0, -0 + 0 is not -0).

    Returns:
        `(2,)`: `<change, v>` (0 without v) and `<change, change>` over the owned prefix, where
        `change` is what this call did to the stored weights (new minus old). Going from +h to -h,
        these give the fidelity of the realised displacement. R weights, masters, v; W weights.
    """
    device = v.device if v is not None else weights[0].device if weights else None
    products = torch.zeros(2, dtype=torch.float64, device=device)
    offset = 0
    for w, m in zip(weights, masters, strict=True):
        for start in range(0, w.numel(), CHUNK):
            w_part, m_part = w[start : start + CHUNK], m[start : start + CHUNK]
            at = offset + start
            count = max(0, min(owned - at, w_part.numel()))
            old = w_part[:count].double()
            new = m_part.float()
            if h != 0 and v is not None:
                new = new + v[at : at + w_part.numel()] * h
            w_part.copy_(new)
            change = w_part[:count].double() - old
            products[1] += torch.dot(change, change)
            if v is not None:
                products[0] += torch.dot(change, v[at : at + count].double())
        offset += w.numel()
    return products


def difference(
    g_plus: Tensor, g_minus: Tensor, h: float, g_zero: Tensor | None, owned: int
) -> Tensor:
    """Form the central difference in place: `g_plus <- (g_plus - g_minus) / 2h`.

    Returns:
        `(2,)`: `<p, p>` with `p` the result, and `<s, s>` with `s = g_plus + g_minus - 2 g_zero`
        (0 without g_zero). R g_plus, g_minus, g_zero; W g_plus.
    """
    products = torch.zeros(2, dtype=torch.float64, device=g_plus.device)
    for start in range(0, g_plus.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        plus, minus = g_plus[part], g_minus[part]
        count = max(0, min(owned - start, plus.numel()))
        if g_zero is not None:
            second = (plus.double() + minus.double() - 2 * g_zero[part].double())[:count]
            products[1] += torch.dot(second, second)
        plus.sub_(minus).mul_(1 / (2 * h))
        p = plus[:count].double()
        products[0] += torch.dot(p, p)
    return products


def curvature_ratio(g_plus: Tensor, g_minus: Tensor, g_zero: Tensor, owned: int) -> Tensor:
    """`(2,)`: `<d, d>` and `<s, s>` with `d = g_plus - g_minus`, `s = g_plus + g_minus - 2 g_zero`.

    `sqrt(<s, s> / <d, d>)` is the nonlinearity ratio of a trial displacement. R g_plus, g_minus,
    g_zero; nothing is written.
    """
    products = torch.zeros(2, dtype=torch.float64, device=g_plus.device)
    for start in range(0, owned, CHUNK):
        part = slice(start, min(start + CHUNK, owned))
        plus, minus = g_plus[part].double(), g_minus[part].double()
        d, s = plus - minus, plus + minus - 2 * g_zero[part].double()
        products += torch.stack([torch.dot(d, d), torch.dot(s, s)])
    return products


def _chunk(rows: int) -> int:
    """Return how many columns to take at a time, so that all rows in fp64 are one moderate
    temporary.
    """
    return min(CHUNK, max(256, TILE // max(rows, 1)))


def project(basis: Tensor, w: Tensor, owned: int) -> Tensor:
    """Return `(m,)`: the dot products of the rows of `basis` with `w`. R basis, w."""
    products = torch.zeros(basis.shape[0], dtype=torch.float64, device=w.device)
    chunk = _chunk(basis.shape[0])
    for start in range(0, owned, chunk):
        stop = min(start + chunk, owned)
        products += basis[:, start:stop].double() @ w[start:stop].double()
    return products


def subtract(basis: Tensor, w: Tensor, coefficients: Tensor, owned: int) -> Tensor:
    """`w <- w - basis' c` in place, with `c` `(m,)` fp64. Returns `(1,)`: `<w, w>`.

    The sum over rows is formed in fp64 and rounded to fp32 once. R basis, w; W w.
    """
    chunk = _chunk(basis.shape[0])
    for start in range(0, w.numel(), chunk):
        part = slice(start, start + chunk)
        w[part].copy_(w[part].double() - coefficients @ basis[:, part].double())
    return _dot(w[:owned], w[:owned]).reshape(1)


def subtract_project(basis: Tensor, w: Tensor, coefficients: Tensor, owned: int) -> Tensor:
    """`subtract`, then `project` of the result, reading the basis once: the middle of CGS2.

    Returns `(m,)`: the products of `project`. R basis, w; W w.
    """
    subtract(basis, w, coefficients, owned)
    return project(basis, w, owned)


def normalize_store(w: Tensor, scale: float, v: Tensor, row: Tensor | None, owned: int) -> Tensor:
    """`v <- scale * w`, and its copy rounded to the basis' dtype into `row` (if given).

    With a bf16 `row`, `v` receives the *rounded* values, so that the vector that is
    multiplied next is the vector that is stored. `v` may be `w` itself.

    Returns `(1,)`: `<v, v>` of what was written. R w; W v, row.
    """
    torch.mul(w, scale, out=v)
    if row is not None:
        row.copy_(v)
        if row.dtype != torch.float32:
            v.copy_(row)
    return _dot(v[:owned], v[:owned]).reshape(1)


def combine(basis: Tensor, coefficients: Tensor, out: Tensor) -> None:
    """`out <- coefficients @ basis`: `(k, m) x (m, n_local) -> (k, n_local)` fp32, summed in fp64.

    R basis once, whatever k; W out.
    """
    chunk = _chunk(basis.shape[0])
    for start in range(0, basis.shape[1], chunk):
        part = slice(start, start + chunk)
        out[:, part] = coefficients.double() @ basis[:, part].double()


def add_square(pieces: Tensor, columns: int, x: Tensor, alpha: float) -> None:
    """`s <- s + alpha x' x` with x `(T, n)` fp32, on and below the diagonal of s `(n, n)`.

    `pieces` has its columns, `columns` at a time, in the rows from the first of them on. A matrix
    product of each also writes what is above the diagonal there.
    """
    n, at = x.shape[1], 0
    for start in range(0, n, columns):
        rows, width = n - start, min(columns, n - start)
        piece = pieces[at : at + rows * width].view(rows, width)
        piece.addmm_(x[:, start:].T, x[:, start : start + width], alpha=alpha)
        at += rows * width
