"""What a Krylov basis and Lanczos hold, counted from their own tensors, beside the operator.

In arguments `n_local` are the coordinates on this rank, `place` is where vectors are that are
computed with, and `storage` that of a basis. Vectors that the caller has and keeps are not counted.
"""

from __future__ import annotations

import torch

from ds_hessian.config import HessianConfig
from ds_hessian.krylov import LanczosOptions, Storage
from ds_hessian.krylov.rows import block_bytes, division
from ds_hessian.memory import FP32, Item, Moment, Place

PRODUCT: tuple[Moment, ...] = ("passes", "trials")
GRAM_SCHMIDT: tuple[Moment, ...] = ("orthogonalization",)

SPACE, RESIDUALS = "Krylov space", "residuals"
"""Stages: Lanczos, and the products that measure what came of it, when the basis is gone."""

FORMED = 2
"""Ritz vectors that one step of mode `selective` forms at a time, as a rule: one at each end."""


def storage_of(config: HessianConfig) -> Storage:
    """Where and how a basis is kept, as configured."""
    basis = config.basis
    dtype = torch.bfloat16 if basis.dtype == "bf16" else torch.float32
    return Storage(dtype, basis.device, basis.folder)


def lanczos_options(config: HessianConfig) -> LanczosOptions:
    """How Lanczos keeps its basis, as configured."""
    mode, window = config.reorthogonalization.mode, config.reorthogonalization.window
    return LanczosOptions(mode, window, storage_of(config))


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
