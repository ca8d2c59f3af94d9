"""Who owns the Kronecker factors of a layer, and their memory, from the sizes of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hessian.memory import FP32, Item, Tier

PIECES, SMALLEST = 8, 128
"""Pieces of columns in which one triangle of a symmetric product is added, each a call of a matrix
product, and the least size of a piece: 9/16 of the operations of the whole remain. On one core 256
tokens take 0.59 - 0.67 of the time at 768 to 4096 columns, 0.86 at 256; pieces of 32 columns cost
what they save."""


def spans(n: int) -> list[tuple[int, int]]:
    """Return the columns of each piece of a symmetric matrix of order n."""
    size = max(-(-n // PIECES), SMALLEST)
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
