"""Who owns the Kronecker factors of a layer, and their memory, from the sizes of the layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ds_hessian.memory import FP32, FP64, Item, Tier, in_stage

PIECES, COLUMNS = 16, 96
"""Pieces of columns in which one triangle of a symmetric matrix is kept, at most, and the unit of
their size, a multiple of that of `ops.add_square`. Where each piece is a matrix product, as on a
GPU, p pieces make (p + 1) / 2 p of the operations of the whole.
"""


def columns(n: int) -> int:
    """Return the number of columns of the pieces of a symmetric matrix of order n."""
    return COLUMNS * max(1, -(-n // (PIECES * COLUMNS)))


def spans(n: int) -> list[tuple[int, int]]:
    """Return the columns of each piece of a symmetric matrix of order n."""
    size = columns(n)
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


PACKED = 256
"""Tokens, or rows of a gradient, of which the kernel of `ops.add_square` has a copy on a CPU
(csrc/cpu/squares.cpp)."""

STAGE = "factors"
"""The stage of an analysis in which factors are estimated."""

WORK = 2
"""Matrices of the order of a factor, in fp64, that its decomposition takes beside it and its
eigenvectors (LAPACK's dsyevd: 1 + 6 n + 2 n^2 numbers)."""


def memory_of_factors(
    shapes: Sequence[tuple[int, int]],
    tier: Tier,
    kinds: Collection[str],
    at_once: int | None = None,
    ranks: int = 1,
    rank: int | None = None,
) -> list[Item]:
    """Return the sums of one pass, what is decomposed after it, and eigenvectors and eigenvalues
    that a rank owns.

    Args:
        shapes: Outputs and inputs of each layer.
        tier: Where the vectors are.
        kinds: Curvatures of each layer.
        at_once: Layers of one pass, the largest of them; None for all.
        ranks: Ranks that share the layers.
        rank: The rank; None for the one that owns most.
    """
    if not shapes:
        return []
    first, second = bool({"kfac", "ekfac"} & {*kinds}), bool({"shampoo", "klshampoo"} & {*kinds})
    in_rounds = bool({"ekfac", "klshampoo"} & {*kinds})  # with eigenvectors, or roots, on all ranks
    # EK-FAC has K-FAC's eigenvectors, Adam none.
    bases = first + len({"shampoo", "klshampoo", "optimizer"} & {*kinds})
    sums, packed = list[int](), 0
    owned, most, kept, pieces = ([0] * ranks for _ in range(4))
    for owner, (m, n) in zip(owners(shapes, ranks), shapes, strict=True):
        triangles, squares, own = size_of_square(m) + size_of_square(n), m * m + n * n, m * n
        once = (first + second) * triangles + second * own
        again = in_rounds * (squares + own + ("klshampoo" in kinds) * triangles)
        sums.append(max(once, again))
        owned[owner] += FP64 * (len(kinds) * own + bases * squares)
        kept[owner] += FP64 * second * squares
        pieces[owner] += FP32 * first * triangles
        if bases:
            most[owner] = max(most[owner], FP64 * (first * squares + WORK * max(m, n) ** 2))
        if (first or second) and tier == "host":
            packed = max(packed, FP32 * PACKED * max(m, n))
    mine = max(range(ranks), key=owned.__getitem__) if rank is None else rank
    passes = FP32 * sum(sorted(sums, reverse=True)[:at_once])
    estimated = [
        Item("Kronecker sums of a pass", tier, passes, ("passes",)),
        Item("tokens being squared", tier, packed, ("passes",)),
        Item("sums to be decomposed", tier, pieces[mine], ("figures",)),
        Item("a Kronecker factor being decomposed", tier, most[mine], ("figures",)),
        Item("Shampoo's factors", tier, kept[mine]),
    ]
    return [*in_stage(STAGE, estimated), Item("Kronecker factors", tier, owned[mine])]
