"""Block coupling of matrices whose blocks are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ds_hessian.errors import ConfigError, NumericsError
from ds_hessian.krylov import BlockCoupling, OffBlockShare, block_coupling, off_block_share
from ds_hessian.vectors import Partition, by_layer, by_pattern
from tests.krylov.matrices import Matrix
from tests.ranks import RankPool

BLOCKS, SIZE = 7, 40


def symmetric(coupling: float, noise: float = 0.0) -> tuple[Matrix, Partition, float]:
    """A GOE matrix whose off-diagonal blocks are scaled, and its true off-block share."""
    n = BLOCKS * SIZE
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    block = torch.arange(n) // SIZE
    same = (block[:, None] == block).double()
    a = (a + a.T) * (same + (1 - same) * coupling)
    sizes = {f"layers.{i}.weight": SIZE for i in range(BLOCKS)}
    operator = Matrix(a, sizes, noise)
    share = float(((1 - same) * a**2).sum() / (a**2).sum())
    return operator, Partition(operator.layout, operator.space, by_layer(sizes)), share


def measure(coupling: float, noise: float = 0.0) -> tuple[BlockCoupling, OffBlockShare, float]:
    operator, partition, share = symmetric(coupling, noise)
    table = block_coupling(operator, partition, operator.fresh(1)(0))
    return table, off_block_share(operator, partition, operator.fresh(2), 8), share


def test_a_block_diagonal_matrix_has_no_coupling() -> None:
    table, signs, _ = measure(0.0)
    assert table.names == tuple(f"layers.{i}" for i in range(BLOCKS))
    # fp32 products: differences of a few roundoffs.
    assert table.relative_errors.max() < 1e-6 and table.cosines.min() > 1 - 1e-6
    assert table.share < 1e-12 and signs.value < 1e-12


def test_a_structureless_matrix_gives_the_null() -> None:
    table, signs, share = measure(1.0)
    assert np.allclose(table.null_cosines, 1 / np.sqrt(BLOCKS))
    # 40 coordinates a block: figures of one probe scatter by about 1/sqrt(40).
    assert abs(table.cosines.mean() - table.null_cosines.mean()) < 4 / np.sqrt(SIZE * BLOCKS)
    assert abs(table.relative_errors.mean() - table.null_relative_errors.mean()) < 0.05
    assert signs.null == pytest.approx(1 - 1 / BLOCKS)
    assert abs(signs.value - share) < 4 * signs.error
    assert abs(table.share - share) < 0.05


@pytest.mark.parametrize("coupling", [0.1, 0.3, 3.0])
def test_known_intermediate_cases(coupling: float) -> None:
    table, signs, share = measure(coupling)
    assert abs(signs.value - share) < 4 * signs.error
    assert table.share == pytest.approx(share, rel=0.25)
    assert table.num_matvecs == BLOCKS + 1 and signs.num_matvecs == 16


def test_noise_of_the_products_is_stated() -> None:
    table, signs, _ = measure(0.0, noise=1e-3)
    assert (table.relative_errors <= 2 * table.noises).all()
    assert 0 < signs.value <= signs.noise


def test_figures_do_not_depend_on_the_number_of_ranks(ranks: Callable[[int], RankPool]) -> None:
    one, signs, _ = measure(0.3)
    for table, other, _ in ranks(3).run(measure, 0.3):
        assert np.allclose(table.relative_errors, one.relative_errors, rtol=1e-5)
        assert np.allclose(table.cosines, one.cosines, rtol=1e-5)
        assert other.value == pytest.approx(signs.value, rel=1e-5)


def test_blocks_by_layer_and_by_pattern() -> None:
    names = ["embed.weight", "h.0.mlp.up.weight", "h.0.norm.bias", "h.11.mlp.up.weight", "position"]
    assert list(by_layer(names).values()) == ["embed", "h.0", "h.0", "h.11", "position"]
    found = by_pattern(names, {"mlp": r"\.mlp\.", "norm": "norm"})
    assert list(found.values()) == ["other", "mlp", "norm", "mlp", "other"]
    with pytest.raises(ConfigError, match="'attention' of block 'a' matches no parameter"):
        by_pattern(names, {"a": "attention"})
    with pytest.raises(ConfigError, match=r"blocks: '\[' is no regular expression: unterminated"):
        by_pattern(names, {"a": "["})
    assert set(by_pattern(names, {"other": "."}).values()) == {"other"}
    with pytest.raises(ConfigError, match="'other' is the block of parameters that no pattern"):
        by_pattern(names, {"other": "norm"})


def test_a_single_block_is_refused() -> None:
    operator, _, _ = symmetric(1.0)
    single = Partition(operator.layout, operator.space, dict.fromkeys(operator.sizes, "all"))
    with pytest.raises(NumericsError, match="at least 2 blocks"):
        off_block_share(operator, single, operator.fresh())
