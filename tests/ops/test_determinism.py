"""The same bits on every run and number of threads; accuracy of very long sums."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_hessian import ops
from ds_hessian.ops import native, toolchain
from tests.ops.cases import U64, matrix, vector


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def everything(device: str) -> list[Tensor]:
    """All results and all sums of all kernels, on fixed operands of several blocks."""
    n, owned, m = 200_003, 199_990, 9
    a, b, c, d, e = (vector(n, s, device) for s in range(5))
    basis, k = matrix(m, n, 9, torch.bfloat16, device), torch.ones(m, dtype=torch.float64)
    w, row, out = a.bfloat16(), torch.empty_like(basis[0]), torch.empty(3, n, device=device)
    weights = torch.ones(3, m, dtype=torch.float64)
    results = [
        ops.dots([(a, b), (c, d)], owned),
        ops.curvature_ratio(a, b, c, owned),
        ops.displace([w[:7], w[7:]], [a[:7], a[7:]], b, 0.1, owned),
        ops.difference(a, b, 0.5, e, owned),
        ops.project(basis, a, owned),
        ops.subtract_project(basis, a, k, owned),
        ops.subtract(basis, a, k, owned),
        ops.normalize_store(a, 0.7, e, row, owned),
    ]
    ops.combine(basis, weights, out)
    square = torch.zeros(200 * 96 + 104 * 96 + 8 * 8, device=device)
    ops.add_square(square, 96, a[:180_000].view(900, 200))
    probes = [ops.fill_gaussian(c, 1, 2, 3), ops.fill_rademacher(d, 1, 2, 3)]
    return [*results, a, e, w, row, out, square, *probes]


def test_the_bits_depend_on_neither_the_run_nor_the_threads(device, threads) -> None:
    torch.set_num_threads(1)
    first = everything(device)
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        again = everything(device)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def long_product(n: int, kernel: str, device: str) -> float:
    """<a, a> over n elements, of which the first 2^14 are 1 and the others 2^-27."""
    a = torch.full((n,), 2.0**-27, device=device)
    a[: 1 << 14] = 1.0
    if kernel == "dots":
        return float(ops.dots([(a, a)], n)[0])
    if kernel == "difference":
        return float(ops.difference(a, torch.zeros_like(a), 0.5, None, n)[0])
    if kernel == "displace":
        return float(ops.displace([torch.zeros_like(a)], [a], None, 0.0, n)[1])
    basis, none = a[None], torch.zeros(1, dtype=torch.float64, device=device)
    if kernel == "project":
        return float(ops.project(basis, a, n)[0])
    return float(ops.subtract_project(basis, a.clone(), none, n)[0])


@pytest.mark.parametrize(
    "kernel", ["dots", "difference", "displace", "project", "subtract_project"]
)
def test_sums_do_not_lose_small_terms_to_many_large_ones(device, kernel) -> None:
    """A term of 2^-54 added to 1 is lost. Each thread of a GPU would lose thousands of them; the
    error of a sum may not grow with its length."""
    n = (8 if kernel == "subtract_project" else 40) << 20
    exact = (1 << 14) + (n - (1 << 14)) * 2.0**-54
    assert abs(long_product(n, kernel, device) - exact) <= 100 * U64 * exact


def test_calls_from_several_python_threads_do_not_mix(threads) -> None:
    torch.set_num_threads(2)
    expected = everything("cpu")
    wrong: list[str] = []

    def work() -> None:
        for _ in range(3):
            got = everything("cpu")
            if not all(torch.equal(x, y) for x, y in zip(expected, got, strict=True)):
                wrong.append("differs")

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_child_has_threads_of_its_own(threads) -> None:
    """The pool's threads do not survive a fork; a child that waited for them would hang."""
    torch.set_num_threads(2)
    a = vector(300_000, 1)
    before = ops.dots([(a, a)], 300_000)
    child = os.fork()
    if child == 0:
        with ops.implementation("auto"):
            same = torch.equal(ops.dots([(a, a)], 300_000), before)
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.full
def test_the_product_of_a_hundred_million_elements_is_accurate() -> None:
    """400 MB. The reference is exact: integers, whose products are added up in int64.

    The eight lanes of a tile of 4096 add up to 2^49 on average, exactly; the sum of the tiles
    passes 2^66, so that all the rounding is that of the compensated sums: u each for the tiles of
    a block, the blocks, and the result.
    """
    n = 100_000_000
    a = ops.fill_gaussian(torch.empty(n + 1), 1, 2)
    exact = 0
    for start in range(0, n + 1, 1 << 20):
        a[start : start + (1 << 20)].mul_(2.0**20).round_().abs_()
    for start in range(0, n, 1 << 20):
        part = a[start : min(start + (1 << 20), n) + 1].to(torch.int64)
        exact += int((part[:-1] * part[1:]).sum())
    assert exact > 2**64
    assert abs(int(ops.dots([(a[:-1], a[1:])], n)[0]) - exact) <= 3 * U64 * exact


def test_indices_of_elements_are_64_bit_in_every_source() -> None:
    """A vector of 10^9 elements has byte offsets, and a basis element offsets, beyond 2^31."""
    names = "n|at|begin|end|first|last|stop|owned|offset|start|stride|length|bytes|columns"
    narrow = re.compile(rf"\b(?:int|unsigned|u?int32_t|size_t)\s+(?:{names})\b(?!\()")
    # Within a tile, which has at most 512 columns and rows, int is enough on a GPU.
    tile_only = {"columns", "first"}
    for path in sorted(toolchain.source_root().rglob("*.c*")):
        for match in narrow.finditer(path.read_text()):
            name = match.group(0).split()[-1]
            assert path.suffix != ".cpp" and name in tile_only, f"{path.name}: {match.group(0)}"


def test_native_kernels_are_what_is_tested() -> None:
    found = native.find("cpu")
    if found.name != "native":
        pytest.skip(f"the torch twins run here: {found.reason}")
    assert Path(found.module.__file__).is_file()
