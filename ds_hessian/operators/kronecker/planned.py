"""The memory of Kronecker factors on one rank, from the sizes of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hessian.memory import FP32, Item, Place


def memory_of_factors(
    shapes: Sequence[tuple[int, int]],
    place: Place,
    kinds: int,
    at_once: int | None = None,
    ranks: int = 1,
) -> list[Item]:
    """Return the sums of one pass, and the eigenvectors and eigenvalues that a rank owns.

    Args:
        shapes: Outputs and inputs of each layer.
        place: Where the vectors are.
        kinds: Curvatures of each layer.
        at_once: Layers of one pass, the largest of them; None for all.
        ranks: Ranks that share the layers.
    """
    sums = sorted((2 * (m * m + n * n + m * n) for m, n in shapes), reverse=True)[:at_once]
    owned = shapes[::ranks]  # of layers in a row: each rank has every so manyth
    factors = sum(2 * kinds * (m * m + n * n + m * n) for m, n in owned)  # fp64
    return [
        Item("Kronecker sums of a pass", place, FP32 * sum(sums), ("passes",)),
        Item("Kronecker factors", place, FP32 * factors),
    ]
