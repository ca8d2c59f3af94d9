"""How many kernels a call starts on a GPU: small shards and few rows cost nothing but launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from ds_hessian import ops
from tests.ops.cases import WEIGHTS, matrix, vector


@pytest.fixture
def launches(emulated, emulate) -> Callable[[Callable[[], object]], int]:
    """`launches(call)`: the kernels that a call starts on the emulated device."""
    emulate()
    counter = ctypes.c_long.in_dll(ctypes.CDLL(emulated.__file__), "cudasim_launches")

    def count(call: Callable[[], object]) -> int:
        before = counter.value
        call()
        return counter.value - before

    return count


def test_four_pairs_share_a_pass_and_the_sum_of_its_blocks(launches) -> None:
    a, b = vector(5000, 1), vector(5000, 2)
    assert launches(lambda: ops.dots([(a, b)], 5000)) == 2
    assert launches(lambda: ops.dots([(a, b), (a, a), (b, b), (b, a)], 5000)) == 2


@pytest.mark.parametrize("rows", [1, 50, 256])
def test_all_rows_share_a_pass_and_the_sum_of_its_blocks(launches, rows) -> None:
    basis, w = matrix(rows, 3000, 1, torch.bfloat16), vector(3000, 2)
    c = torch.zeros(rows, dtype=torch.float64)
    assert launches(lambda: ops.project(basis, w, 3000)) == 2
    assert launches(lambda: ops.subtract(basis, w, c, 3000)) == 2
    assert launches(lambda: ops.subtract_project(basis, w, c, 3000)) == 2


def test_shards_of_one_kind_share_launches_wherever_they_lie(launches) -> None:
    """Weights of three dtypes in turn, as a model of bf16 layers and fp32 norms has two."""
    weights = [vector(60, i).to(WEIGHTS[i % 3]) for i in range(30)]
    masters = [vector(60, 50 + i) for i in range(30)]
    v = vector(1800, 99)
    assert launches(lambda: ops.displace(weights, masters, v, 0.1, 1800)) == 2 * 3


def test_small_shards_are_spread_over_the_blocks(launches, emulated) -> None:
    """Sixteen shards of a block each, on a device of sixteen blocks: each block has one."""
    weights, masters = [torch.zeros(60) for _ in range(16)], [torch.ones(60) for _ in range(16)]
    table = [(w.data_ptr(), m.data_ptr(), 60, 0, 0) for w, m in zip(weights, masters, strict=True)]
    out = torch.empty(2, dtype=torch.float64)
    workspace = torch.full((emulated.workspace_size(2),), torch.nan, dtype=torch.float64)
    place = (1, 0, 0, workspace.data_ptr())
    emulated.displace(table, 0, 0.0, 960, out.data_ptr(), place)
    assert out.tolist() == [0.0, 960.0]
    assert workspace.view(-1, 2)[:, 1].tolist() == [60.0] * 16
