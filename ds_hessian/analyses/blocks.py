"""Tests of block structure: the masked-probe test, and the off-diagonal blocks' share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ds_hessian import krylov
from ds_hessian.analyses.base import Blocks, Journaled, partition
from ds_hessian.analyses.measurement import Measurement
from ds_hessian.backends.protocol import Backend
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.memory import Item
from ds_hessian.operators import LinearOperator
from ds_hessian.planning import Share
from ds_hessian.planning.basis import GRAM_SCHMIDT
from ds_hessian.records import HessianBlockCoupling, HessianOffBlockShare


def _memory(share: Share) -> list[Item]:
    return [
        share.vectors("probe and its product", 2),
        share.vectors("probe of a block, or with signs", 1),
        share.vectors("difference of the products", 1, GRAM_SCHMIDT),
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCoupling(Journaled[HessianBlockCoupling]):
    """The arguments of the paper's masked-probe test.

    Attributes:
        blocks: `layers`, `parameters`, or {block: regular expression of names}.
        num_blocks: Their number, where the model is not known.
    """

    title = "block_coupling"
    summary = "the masked-probe test of block-diagonal structure"
    record = HessianBlockCoupling

    blocks: Blocks = "layers"
    num_blocks: int | None = None

    def products(self, config: HessianConfig) -> int:
        """Return one product for each block, and one for all."""
        if self.num_blocks is None:
            raise ConfigError(
                "how many products block_coupling takes depends on the model: give --products"
            )
        return self.num_blocks + 1

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return two probes and their products."""
        return _memory(share)

    def prepared(self, backend: Backend, config: HessianConfig) -> Self:
        """Fill in the number of blocks."""
        return replace(self, num_blocks=len(partition(backend, self.blocks).names))

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Measure the couplings."""
        blocks = partition(run.subject.backend, self.blocks)
        return vars(krylov.block_coupling(operator, blocks, run.subject.draw(0)))


@dataclass(frozen=True, kw_only=True, eq=False)
class OffBlockShare(Journaled[HessianOffBlockShare]):
    """The arguments of the share of the off-diagonal blocks in |H|_F^2.

    Attributes:
        blocks: `layers`, `parameters`, or {block: regular expression of names}.
        num_probes: Pairs of products.
    """

    title = "off_block_share"
    summary = "share of the off-diagonal blocks in the squared norm of H"
    record = HessianOffBlockShare

    blocks: Blocks = "layers"
    num_probes: int = 4

    def products(self, config: HessianConfig) -> int:
        """Return two products for each probe."""
        return 2 * self.num_probes

    def memory(self, share: Share, config: HessianConfig) -> list[Item]:
        """Return two probes and their products."""
        return _memory(share)

    def figures(self, run: Measurement, operator: LinearOperator) -> dict[str, object]:
        """Measure the share."""
        subject = run.subject
        blocks, seed = partition(subject.backend, self.blocks), subject.config.seed
        return vars(krylov.off_block_share(operator, blocks, subject.draw, self.num_probes, seed))
