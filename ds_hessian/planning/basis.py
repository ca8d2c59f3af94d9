"""Memory of a Krylov basis and of Lanczos, counted from their own tensors.

In arguments `n_local` are the coordinates on this rank, `tier` is where vectors are that are
computed with, and `storage` that of a basis. Vectors that the caller has and keeps are not counted.
"""

from __future__ import annotations

import torch

from ds_hessian.config import HessianConfig
from ds_hessian.krylov import LanczosOptions, Storage
from ds_hessian.krylov.rows import block_bytes, division
from ds_hessian.memory import FP32, Item, Moment, Tier

PRODUCT: tuple[Moment, ...] = ("passes", "trials")
GRAM_SCHMIDT: tuple[Moment, ...] = ("orthogonalization",)

SPACE, RESIDUALS = "Krylov space", "residuals"
"""Stages: Lanczos, and the products that measure what came of it, when the basis is gone."""

FORMED = 2
"""Ritz vectors that one step of mode `selective` forms at a time, as a rule: one at each end."""


def storage_of(config: HessianConfig) -> Storage:
    """Return dtype and location of a basis, as configured."""
    basis = config.basis
    dtype = torch.bfloat16 if basis.dtype == "bf16" else torch.float32
    return Storage(dtype, basis.device, basis.folder)


def lanczos_options(config: HessianConfig) -> LanczosOptions:
    """Return reorthogonalisation and storage of Lanczos' basis, as configured."""
    mode, window = config.reorthogonalization.mode, config.reorthogonalization.window
    return LanczosOptions(mode, window, storage_of(config))


def memory_of_lanczos(
    n_local: int, tier: Tier, num_matvecs: int, options: LanczosOptions | None = None
) -> list[Item]:
    """Return the items of a `LanczosState`.

    Args:
        n_local: Coordinates on this rank.
        tier: Where vectors are that are computed with.
        num_matvecs: Steps.
        options: Reorthogonalisation and storage.
    """
    options = options or LanczosOptions()
    storage, vector = options.storage, FP32 * n_local
    selective = options.mode == "selective"
    rows = num_matvecs if selective else options.capacity(num_matvecs)
    items = memory_of_basis(n_local, tier, rows, storage)
    if selective:  # the last vectors and Ritz vectors are in fp32, with the other vectors
        kept = options.capacity(num_matvecs) + options.ritz_vectors(num_matvecs)
        formed = FORMED * vector
        items += [
            Item(f"last vectors and Ritz vectors, {kept}", tier, kept * vector),
            Item("Ritz vectors being formed", tier, formed, ("orthogonalization",)),
            Item("copy of the vector", tier, vector, ("storing",)),
        ]
    elif not _is_row(tier, storage):
        items.append(Item("vector being multiplied", tier, vector, PRODUCT))
    return items


def memory_of_basis(n_local: int, tier: Tier, rows: int, storage: Storage) -> list[Item]:
    """Return the items of a `Basis`, and of one new row at a time."""
    if not rows:
        return []
    stored, exact = storage.dtype.itemsize * n_local, storage.dtype == torch.float32
    name, rounded = f"basis, {rows} vectors in {'fp32' if exact else 'bf16'}", FP32 * n_local
    items = [Item("vector before rounding", tier, 0 if exact else rounded, ("storing",))]
    if not _far(tier, storage):
        return [Item(name, tier, rows * stored), *items]
    number, _ = division(n_local, rows, storage.dtype)
    block = block_bytes(n_local, rows, storage.dtype)
    whole, blocks = number * block, min(number, 2) * block
    items.append(Item("row on its way", tier, 0 if exact else stored, ("storing",)))
    if storage.tier == "disk":
        each = [*[block] * min(number, 2), whole // rows]
        buffers = sum(map(_pinned, each)) if tier == "accelerator" else sum(each)
        items += [Item(name, "disk", whole), Item("blocks and row on their way", "host", buffers)]
    else:
        items.append(Item(name, "host", _pinned(whole)))
    if tier == "accelerator":
        items.append(Item("blocks of the basis", tier, blocks, GRAM_SCHMIDT))
    return items


def _pinned(size: int) -> int:
    """Return the bytes that torch pins for so many: a power of two (CachingHostAllocator.h)."""
    return 1 << (size - 1).bit_length()


def _far(tier: Tier, storage: Storage) -> bool:
    """Return whether rows are copied to be used; on the CPU the host is near."""
    return storage.tier == "disk" or tier == "accelerator" and storage.tier == "host"


def _is_row(tier: Tier, storage: Storage) -> bool:
    """Return whether a row can be multiplied without a copy."""
    return storage.dtype == torch.float32 and not _far(tier, storage)
