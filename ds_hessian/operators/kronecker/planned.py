"""Who owns the Kronecker factors of a layer, and their memory, from the sizes of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hessian.memory import FP32, Item, Tier

PIECES, COLUMNS = 16, 96
"""Pieces of columns in which one triangle of a symmetric product is added, each a call of a matrix
product, at most, and the unit of their size: with p pieces (p + 1) / 2 p of the operations of the
whole remain. Kernels of AVX-512 take 48 columns at a time: on one core 256 tokens take 0.71 of the
time of the whole at 256 columns, 0.54 at 768, 0.59 at 1024, where pieces of 128 take 0.74, 0.58 and
0.61, and pieces of 64 more than these."""


def spans(n: int) -> list[tuple[int, int]]:
    """Return the columns of each piece of a symmetric matrix of order n."""
    size = COLUMNS * -(-n // (PIECES * COLUMNS))
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def size_of_square(n: int) -> int:
    """Return the numbers in the pieces, each from the diagonal downward."""
    return sum((n - start) * (end - start) for start, end in spans(n))


def owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Return the rank that decomposes the factors of each layer: the largest first, each to the
    rank that has least to do (Graham, SIAM J. Appl. Math. 1969), by m^3 + n^3.

    Args:
        shapes: Outputs and inputs of each layer.
        ranks: Ranks that share the layers.
    """
    found, loads = [0] * len(shapes), [0] * ranks
    cost = [m**3 + n**3 for m, n in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: -cost[i]):
        found[i] = min(range(ranks), key=loads.__getitem__)
        loads[found[i]] += cost[i]
    return found


def memory_of_factors(
    shapes: Sequence[tuple[int, int]],
    tier: Tier,
    kinds: int,
    at_once: int | None = None,
    ranks: int = 1,
) -> list[Item]:
    """Return the sums of one pass, and the eigenvectors and eigenvalues that a rank owns.

    Args:
        shapes: Outputs and inputs of each layer.
        tier: Where the vectors are.
        kinds: Curvatures of each layer.
        at_once: Layers of one pass, the largest of them; None for all.
        ranks: Ranks that share the layers.
    """
    each = [2 * (size_of_square(m) + size_of_square(n)) + m * n for m, n in shapes]
    sums = sorted(each, reverse=True)[:at_once]
    owned = [0] * ranks
    for owner, (m, n) in zip(owners(shapes, ranks), shapes, strict=True):
        owned[owner] += 2 * kinds * (m * m + n * n + m * n)  # fp64
    return [
        Item("Kronecker sums of a pass", tier, FP32 * sum(sums), ("passes",)),
        Item("Kronecker factors", tier, FP32 * max(owned)),
    ]
