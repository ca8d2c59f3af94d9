"""What Krylov methods hold, counted from their own tensors; all of it beside the operator.

In arguments `n_local` are the coordinates on this rank, `place` is where vectors are that are
computed with, and `storage` that of a basis. Vectors that the caller has and keeps are not counted.
"""

from __future__ import annotations

import torch

from ds_hessian.krylov.basis import Storage
from ds_hessian.krylov.lanczos import LanczosOptions
from ds_hessian.krylov.rows import block_bytes, division
from ds_hessian.krylov.traces import Method
from ds_hessian.memory import FP32, Item, Moment, Place, in_stage

PRODUCT: tuple[Moment, ...] = ("passes", "trials")
GRAM_SCHMIDT: tuple[Moment, ...] = ("orthogonalization",)

SPACE, RESIDUALS = "Krylov space", "residuals"
"""Stages: Lanczos, and the products that measure what came of it, when the basis is gone."""

FORMED = 2
"""Ritz vectors that one step of mode `selective` forms at a time, as a rule: one at each end."""


def memory_of_lanczos(
    n_local: int, place: Place, num_matvecs: int, options: LanczosOptions | None = None
) -> list[Item]:
    """Items of a `LanczosState`.

    Args:
        n_local: Coordinates on this rank.
        place: Where vectors are that are computed with.
        num_matvecs: Steps.
        options: Reorthogonalisation and storage.
    """
    options = options or LanczosOptions()
    storage, vector = options.storage, FP32 * n_local
    selective = options.mode == "selective"
    rows = num_matvecs if selective else options.capacity(num_matvecs)
    items = memory_of_basis(n_local, place, rows, storage)
    if selective:  # the last vectors and Ritz vectors are in fp32, with the other vectors
        kept = options.capacity(num_matvecs) + options.window
        formed = FORMED * vector
        items += [
            Item(f"last vectors and Ritz vectors, {kept}", place, kept * vector),
            Item("Ritz vectors being formed", place, formed, ("orthogonalization",)),
            Item("copy of the vector", place, vector, ("storing",)),
        ]
    elif not _is_row(place, storage):
        items.append(Item("vector being multiplied", place, vector, PRODUCT))
    return items


def memory_of_basis(n_local: int, place: Place, rows: int, storage: Storage) -> list[Item]:
    """Items of a `Basis`, and of one new row at a time."""
    if not rows:
        return []
    stored, exact = storage.dtype.itemsize * n_local, storage.dtype == torch.float32
    name, rounded = f"basis, {rows} vectors in {'fp32' if exact else 'bf16'}", FP32 * n_local
    items = [Item("vector before rounding", place, 0 if exact else rounded, ("storing",))]
    if not _far(place, storage):
        return [Item(name, place, rows * stored), *items]
    number, _ = division(n_local, rows, storage.dtype)
    block = block_bytes(n_local, rows, storage.dtype)
    whole, blocks = number * block, min(number, 2) * block
    items.append(Item("row on its way", place, 0 if exact else stored, ("storing",)))
    if storage.place == "disk":
        each = [*[block] * min(number, 2), whole // rows]
        buffers = sum(map(_pinned, each)) if place == "accelerator" else sum(each)
        items += [Item(name, "disk", whole), Item("blocks and row on their way", "host", buffers)]
    else:
        items.append(Item(name, "host", _pinned(whole)))
    if place == "accelerator":
        items.append(Item("blocks of the basis", place, blocks, GRAM_SCHMIDT))
    return items


def _pinned(size: int) -> int:
    """Bytes that torch takes for pinned memory: a power of two (CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


def _far(place: Place, storage: Storage) -> bool:
    """Whether rows travel; on the CPU the host is near."""
    return storage.place == "disk" or place == "accelerator" and storage.place == "host"


def _is_row(place: Place, storage: Storage) -> bool:
    """Whether a row can be multiplied where it is."""
    return storage.dtype == torch.float32 and not _far(place, storage)


def memory_of_eigenpairs(
    n: int, n_local: int, place: Place, storage: Storage, k: int, basis_size: int | None = None
) -> list[Item]:
    """Items of `eigenpairs`; see there. `n` is the dimension."""
    size, vector = min(n, 2 * k + 20 if basis_size is None else basis_size), FP32 * n_local
    kept = min(size - 1, (k + size) // 2)
    width = min(division(n_local, size, storage.dtype)[1], n_local)
    rounded = 0 if storage.dtype == torch.float32 else storage.dtype.itemsize * kept + FP32
    restart = width * (FP32 * kept + rounded)
    formed = Item("Ritz vectors being formed", place, max(restart, k * vector), GRAM_SCHMIDT)
    results = [
        Item("eigenvectors", place, k * vector),
        Item("eigenvectors, put in order", place, k * vector, ("storing",)),
    ]
    return [
        *in_stage(SPACE, memory_of_lanczos(n_local, place, size, LanczosOptions(storage=storage))),
        *in_stage(SPACE, [formed]),
        *in_stage(RESIDUALS, results),
    ]


def memory_of_trace(
    n: int, n_local: int, place: Place, storage: Storage, method: Method, num_matvecs: int
) -> list[Item]:
    """Items of `hutchinson`, `hutch_plus_plus` and `xtrace`."""
    rows = {"hutchinson": 0, "hutch++": num_matvecs // 3, "xtrace": num_matvecs // 2}[method]
    probe = Item("probe", place, FP32 * n_local)
    return [*memory_of_basis(n_local, place, min(rows, n), storage), probe]


def memory_of_solve(
    n: int,
    n_local: int,
    place: Place,
    storage: Storage,
    num_matvecs: int,
    num_dampings: int,
    preconditioned: bool = False,
) -> list[Item]:
    """Items of `solve`, without the right-hand side and the preconditioner themselves."""
    vector, d = FP32 * n_local, num_dampings
    options = LanczosOptions(storage=storage)
    krylov = memory_of_lanczos(n_local, place, min(num_matvecs, n), options)
    results = [
        Item(f"solutions, {d}", place, d * vector),
        Item("residual", place, vector, PRODUCT),
    ]
    always = []
    if preconditioned:
        krylov += [
            Item("right-hand side, scaled", place, vector),
            Item("vector, scaled", place, vector, PRODUCT),
            Item("solutions so far", place, max(d - 1, 0) * vector),
            Item("solution being formed", place, vector, GRAM_SCHMIDT),
        ]
        always = [Item(f"roots of the preconditioner, {d}", place, d * vector)]
    else:
        krylov.append(Item("solutions being formed", place, d * vector, GRAM_SCHMIDT))
    return [*always, *in_stage(SPACE, krylov), *in_stage(RESIDUALS, results)]


def memory_of_sharpness(
    n: int,
    n_local: int,
    place: Place,
    storage: Storage,
    max_matvecs: int,
    num_metrics: int,
    warm: bool = False,
) -> list[Item]:
    """Items of a `Subspace` and its `refine`, beside the metrics themselves.

    Unless `warm`, also of the starts and of Lanczos, from which they come, with its `storage`.
    """
    vector, pairs = FP32 * n_local, 2 * num_metrics
    subspace = [
        # The last product is counted with the products.
        Item(f"vectors and products, {max_matvecs}", place, (2 * max_matvecs - 1) * vector),
        Item("direction of the last one", place, vector, PRODUCT),
        Item(
            "Ritz vectors and residuals", place, (pairs + (num_metrics > 1)) * vector, GRAM_SCHMIDT
        ),
    ]
    if warm:
        return subspace
    start = memory_of_eigenpairs(n, n_local, place, storage, 1)
    if num_metrics > 1:  # in the products of the second problem
        scaled = [
            Item("root of the metric", place, vector),
            Item("vector, scaled", place, vector, PRODUCT),
        ]
        start += [item for stage in (SPACE, RESIDUALS) for item in in_stage(stage, scaled)]
    starts = Item(f"starts, kept for the next, {num_metrics}", place, num_metrics * vector)
    return [starts, *start, *in_stage("subspace", subspace)]


def memory_of_blocks(n_local: int, place: Place) -> list[Item]:
    """Items of `block_coupling` and of `off_block_share`."""
    vector = FP32 * n_local
    return [
        Item("probe and its product", place, 2 * vector),
        Item("probe of a block, or with signs", place, vector),
        Item("difference of the products", place, vector, GRAM_SCHMIDT),
    ]
