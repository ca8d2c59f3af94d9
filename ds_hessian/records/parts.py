"""The density's sampling error: from spectra of several parts of the data, with the same probes.

The density depends on all moments of H. From the second one on, a moment of the mean over
micro-batches is no mean over micro-batches, so that one spectrum does not tell what others would
change. K spectra, each of a K-th of the micro-batches, do, and evaluate as many gradients as one of
all. They have the same probes, so that what differs between them is due to the data alone.

A part's spectrum is that of fewer micro-batches, in which extreme eigenvalues lie farther out
(docs/numerics.md): the mean over parts is a density of parts, not of all the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ds_hessian.errors import ResultError
from ds_hessian.records.density import Density, automatic_widths, default_grid
from ds_hessian.records.spectrum import HessianSpectrum

SAME = ("step", "seed", "probe", "num_micro_batches")


def density_of_parts(
    parts: Sequence[HessianSpectrum], grid: ArrayLike | None = None, width: float | None = None
) -> Density:
    """Return the mean density of several parts of the data, and its standard error of sampling.

    Args:
        parts: Spectra of disjoint micro-batches, equally many, at the same weights and with the
            same probes: at least 2; from about 4 on the band is worth looking at.
        grid: Ascending eigenvalues `(k,)`; None for one that resolves every kernel.
        width: Standard deviation of every Gaussian; None for the automatic ones of each part.

    Returns:
        A `Density` whose `errors` and `band()` are over the parts. Rows of `width` are parts.

    Raises:
        ResultError: there is one part, or the parts differ in more than their data, or not in it.
        ValueError: as `HessianSpectrum.density`.
    """
    if len(parts) < 2:
        raise ResultError(f"the error of sampling needs at least 2 parts, got {len(parts)}")
    same = [tuple(getattr(p.provenance, name) for name in SAME) for p in parts]
    if len({(p.n, p.alphas.shape, *known) for p, known in zip(parts, same, strict=True)}) > 1:
        raise ResultError(
            "parts must be spectra of one model, with the same number of micro-batches, probes and "
            f"products; got (n, probes and products, {', '.join(SAME)}) = "
            f"{[(p.n, p.alphas.shape, *known) for p, known in zip(parts, same, strict=True)]}"
        )
    if len({p.provenance.data_fingerprint for p in parts}) < len(parts):
        raise ResultError("two of the parts are of the same micro-batches: take others for each")
    if grid is None:
        values = np.concatenate([p.ritz_values for p in parts])
        errors = np.concatenate([p.ritz_errors for p in parts])
        widths = automatic_widths(values, errors) if width is None else np.full_like(values, width)
        grid = default_grid(values, widths)
    found = [p.density(grid, width) for p in parts]
    rows = np.array([density.values for density in found])
    return Density(
        grid=found[0].grid,
        values=rows.mean(0),
        errors=rows.std(0, ddof=1) / math.sqrt(len(rows)),
        width=np.stack([density.width.ravel() for density in found]),
        mass=float(np.mean([density.mass for density in found])),
    )
