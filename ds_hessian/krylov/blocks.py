"""Block structure of the Hessian: the paper's masked-probe test, and an estimate from two products.

For a random unit v and blocks b, with v_b the probe that is v inside of b and zero outside:

    (H v)_b   against   (H v_b)_b = H_bb v_b

Their difference is what the other blocks contribute. A symmetric matrix without any structure (GOE)
already gives the cosine `sqrt(n_b / n)` and the relative error `sqrt(1 - n_b / n)`: the null that
stands beside the figures. Cost: B + 1 products.

Random signs for each block, S, need two products: `|H v - S H S v|^2 / 2` is an unbiased estimate
of the energy of the off-diagonal blocks, `sum_{b != c} |H_bc|_F^2 / n`.

Source: the paper, section 6 (experiment I).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ds_hessian.errors import NumericsError
from ds_hessian.krylov.lanczos import absolute_error
from ds_hessian.krylov.records import COVERAGE, Array
from ds_hessian.operators import LinearOperator
from ds_hessian.vectors import Partition


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCoupling:
    """The share of H v that is made outside of each of B blocks, for one probe.

    Attributes:
        names: Names of the blocks.
        sizes: `(B,)` coordinates.
        relative_errors: `(B,)` |(H v)_b - H_bb v_b| / |(H v)_b|: 0 for a block diagonal H; above 1
            where the other blocks cancel the block's own part. NaN where (H v)_b is 0.
        cosines: `(B,)` cosine of the two: 1 for a block diagonal H. NaN where one of them is 0.
        noises: `(B,)` part of the relative error that the products' errors can make.
        null_relative_errors: `(B,)` what a matrix without structure gives.
        null_cosines: `(B,)` the same for the cosine.
        share: Share of the off-diagonal blocks in |H v|^2, from all blocks together: an estimate of
            their share in |H|_F^2.
        num_matvecs: Products made.
    """

    names: tuple[str, ...]
    sizes: Array
    relative_errors: Array
    cosines: Array
    noises: Array
    null_relative_errors: Array
    null_cosines: Array
    share: float
    num_matvecs: int


def block_coupling(operator: LinearOperator, partition: Partition, v: Tensor) -> BlockCoupling:
    """Run the masked-probe test.

    Args:
        operator: Symmetric operator.
        partition: The blocks.
        v: Random unit probe `(n_local,)`.

    Collective.
    """
    full = operator.matvec(v)
    doubt = [absolute_error(full) ** 2]
    inside = np.zeros((len(partition.names), 4))
    for block in range(len(partition.names)):
        masked = partition.only(v, block)
        product = operator.matvec(masked)
        own = product.vector
        rest = full.vector - own
        pairs = [(full.vector, full.vector), (own, own), (full.vector, own), (rest, rest)]
        inside[block] = partition.dots(pairs)[block]
        doubt.append((absolute_error(product) * operator.space.norm(masked)) ** 2)
        del masked, product, own, rest, pairs  # their memory, before the next ones are made
    whole, own2, along, rest2 = inside.T
    fraction = partition.sizes / operator.space.n
    # The errors of the products, spread evenly over the coordinates.
    noise2 = COVERAGE**2 * (doubt[0] + np.array(doubt[1:])) * fraction
    with np.errstate(divide="ignore", invalid="ignore"):
        return BlockCoupling(
            names=tuple(partition.names),
            sizes=partition.sizes,
            relative_errors=np.sqrt(rest2 / whole),
            cosines=along / np.sqrt(whole * own2),
            noises=np.sqrt(noise2 / whole),
            null_relative_errors=np.sqrt(1 - fraction),
            null_cosines=np.sqrt(fraction),
            share=float(rest2.sum() / whole.sum()) if whole.sum() else math.nan,
            num_matvecs=1 + len(partition.names),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class OffBlockShare:
    """Share of the off-diagonal blocks in |H|_F^2, by random signs.

    Attributes:
        value: Between 0 (block diagonal) and 1, up to its error.
        error: Standard error of the ratio from the probes (2 probes or more; NaN for one).
        noise: What errors of the products add to the value, at the most that they are estimated.
        null: Share that a matrix without structure has: 1 - sum (n_b / n)^2.
        num_matvecs: Products made, two a probe.
    """

    value: float
    error: float
    noise: float
    null: float
    num_matvecs: int


def off_block_share(
    operator: LinearOperator,
    partition: Partition,
    draw: Callable[[int], Tensor],
    num_probes: int = 4,
    seed: int = 0,
) -> OffBlockShare:
    """Estimate the off-block share of the Frobenius norm, from two products a probe.

    Args:
        operator: Symmetric operator.
        partition: The blocks, at least 2.
        draw: Random unit vectors by number.
        num_probes: Pairs of products.
        seed: Seed of the signs.

    Raises:
        NumericsError: a single block, no probe, or H v is zero.

    Collective.
    """
    if len(partition.names) < 2 or num_probes < 1:
        raise NumericsError(
            f"the off-block share needs at least 2 blocks and 1 probe, got {len(partition.names)} "
            f"and {num_probes}"
        )
    energies, noise2 = [], []
    for probe in range(num_probes):
        signs = np.random.default_rng([seed, probe]).choice([-1.0, 1.0], len(partition.names))
        v = draw(probe)
        plain, signed = operator.matvec(v), operator.matvec(partition.scale(v, signs))
        w, back = plain.vector, partition.scale(signed.vector, signs)
        rest = w - back
        r2, a2, b2 = operator.space.dots([(rest, rest), (w, w), (back, back)]).tolist()
        energies.append((r2 / 2, (a2 + b2) / 2))
        noise2.append((absolute_error(plain) ** 2 + absolute_error(signed) ** 2) / 2)
        del v, plain, signed, w, back, rest  # their memory, before the next ones are made
    off, whole = np.array(energies).T
    if not whole.any():
        raise NumericsError("H v is zero for every probe: a zero Hessian has no off-block share")
    value = float(off.sum() / whole.sum())
    spread = (off - value * whole).std(ddof=1) if num_probes > 1 else math.nan
    return OffBlockShare(
        value=value,
        error=float(spread / (math.sqrt(num_probes) * whole.mean())),
        noise=float(COVERAGE**2 * sum(noise2) / whole.sum()),
        null=float(1 - ((partition.sizes / operator.space.n) ** 2).sum()),
        num_matvecs=2 * num_probes,
    )
