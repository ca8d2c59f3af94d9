"""Where a basis lies: the same bits from every place and way, and what a failing disk makes."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ds_hessian.errors import MeasurementError
from ds_hessian.krylov import LanczosOptions, LanczosState, Storage, eigenpairs, rows, xtrace
from ds_hessian.krylov.basis import Basis
from ds_hessian.krylov.lanczos import Mode
from ds_hessian.krylov.rows import DiskRows
from ds_hessian.ops import async_io
from ds_hessian.vectors import VectorSpace
from tests.krylov.matrices import SPECTRA, Matrix
from tests.ranks import RankPool
from tests.tiers import cells

N = len(SPECTRA["spiked"])
DTYPES = [torch.float32, torch.bfloat16]
LANES = 256  # coordinates: 512 bytes of bf16, the least that direct IO takes


def skip_unless_built() -> None:
    """Skip where DeepSpeed's asynchronous IO is not."""
    module, reason = async_io.find()
    if module is None:
        pytest.skip(f"DeepSpeed's asynchronous IO: {reason}")


@pytest.fixture(params=["threads", "asynchronous"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the file is read and written, for the test's whole duration."""
    if request.param == "asynchronous":
        skip_unless_built()
    monkeypatch.setenv(async_io.SETTING, "on" if request.param == "asynchronous" else "off")
    return str(request.param)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or more blocks for the 304 coordinates of a spiked matrix."""
    monkeypatch.setattr(rows, "COLUMNS", LANES)
    monkeypatch.setattr(rows, "BLOCK_BYTES", 1)


def figures(storage: Storage, mode: str = "full") -> dict[str, Any]:
    """What Lanczos, restarted Lanczos and XTrace make of a basis in this storage."""
    operator = Matrix.of(SPECTRA["spiked"])
    fresh = operator.fresh()
    options = LanczosOptions(cast(Mode, mode), 4, storage)
    state = LanczosState(operator, fresh(0), 20, fresh, options)
    while not state.done:
        state.step()
    run = state.run()
    found = {"alphas": run.alphas, "betas": run.betas, "rounding": run.rounding_errors}
    if mode == "full":
        found["combined"] = state.combine(np.eye(20)[:3] + 1e-3).numpy()
        top = eigenpairs(operator, fresh(0), 2, fresh, "LA", 1e-5, basis_size=6, storage=storage)
        found |= {"values": top.values, "vectors": top.vectors.numpy(), "restarts": top.restarts}
        found["samples"] = xtrace(operator, fresh, 12, storage).samples
    return found


@pytest.mark.parametrize("mode", ["selective", "window"])
def test_a_window_longer_than_the_run_is_the_run(mode: Mode) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    fresh = operator.fresh()
    states = [
        LanczosState(operator, fresh(0), 4, fresh, LanczosOptions(mode, window))
        for window in (4, 2**40)
    ]
    for state in states:
        while not state.done:
            state.step()
    assert np.array_equal(states[0].run().alphas, states[1].run().alphas)


@pytest.mark.parametrize("mode", ["full", "selective", "window"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_basis_on_disk_gives_the_same_bits(dtype: torch.dtype, mode: str, way: str) -> None:
    near, far = figures(Storage(dtype), mode), figures(Storage(dtype, "disk"), mode)
    assert all(np.array_equal(near[name], far[name]) for name in near)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_basis_in_several_blocks_gives_the_same_bits_on_disk(
    dtype: torch.dtype, way: str
) -> None:
    assert rows.division(N, 20, dtype) == (2, LANES)
    near, far = figures(Storage(dtype)), figures(Storage(dtype, "disk"))
    assert all(np.array_equal(near[name], far[name]) for name in near)
    assert near["restarts"] > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_division_into_blocks_changes_last_digits_only(
    dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    whole = figures(Storage(dtype))
    request.getfixturevalue("small_blocks")
    parts = figures(Storage(dtype))
    # Sums of fp64 in another order, and what fp32 vectors make of their last bit in 20 steps.
    roundoff = torch.finfo(dtype).eps
    for name in ("alphas", "betas"):
        assert np.allclose(parts[name], whole[name], rtol=0, atol=64 * roundoff * 50)
    assert np.allclose(parts["values"], whole["values"], rtol=64 * roundoff)


def test_the_host_of_a_job_on_the_cpu_gives_the_same_bits() -> None:
    near, host = figures(Storage()), figures(Storage(tier="host"))
    assert all(np.array_equal(near[name], host[name]) for name in near)


@pytest.mark.parametrize("capacity", [1, 7])
@pytest.mark.parametrize("n_local", [0, 1, LANES, 3 * LANES + 5, 10 * LANES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_blocks")
def test_rows_come_back_as_they_were_written(
    dtype: torch.dtype, n_local: int, capacity: int, way: str
) -> None:
    cpu = torch.device("cpu")
    stored = DiskRows(n_local, capacity, dtype, cpu, None)
    assert ("asynchronous IO" in stored.way) == (way == "asynchronous")
    wanted = torch.randn(capacity, n_local).to(dtype)
    for i, row in enumerate(wanted):
        stored.write(i, row)
    for count in range(1, capacity + 1):
        seen = torch.zeros(count, n_local, dtype=dtype)
        for columns, block in stored.blocks(count):
            seen[:, columns] = block
        assert torch.equal(seen, wanted[:count])
    for columns, block in stored.blocks(capacity):  # in place, while the next block is on its way
        stored.replace(columns, -block[:1])
    wanted[0] *= -1
    for i in reversed(range(capacity)):
        assert torch.equal(stored.read(i), wanted[i])


def test_nothing_is_left_of_a_file(tmp_path: Path, way: str) -> None:
    stored = DiskRows(10_000, 3, torch.float32, torch.device("cpu"), str(tmp_path))
    stored.write(0, torch.ones(10_000))
    assert list(tmp_path.iterdir()) == []  # it has no name even now
    before = len(os.listdir("/proc/self/fd"))
    del stored
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Make the kernel refuse to write beyond so many bytes of any file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the error, and not the signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_row_that_was_not_written_is_an_error(way: str) -> None:
    stored = DiskRows(1 << 20, 3, torch.float32, torch.device("cpu"), None)
    stored.write(0, torch.ones(1 << 20))
    for _ in stored.blocks(1):
        pass
    with files_end_at(4096):
        stored.write(1, torch.ones(1 << 20))  # DeepSpeed ignores that it failed
        with pytest.raises(OSError, match="too large|should have been written"):
            for _ in stored.blocks(2):
                pass


def test_a_rotated_block_that_was_not_written_is_an_error(way: str) -> None:
    """Also where the block ends in columns that have no coordinate and stay as they were."""
    stored = DiskRows(100, 2, torch.float32, torch.device("cpu"), None)
    for row in (0, 1):
        stored.write(row, torch.ones(100))
    ((columns, block),) = stored.blocks(2)
    with files_end_at(512):
        stored.replace(columns, 2 * block)
        with pytest.raises(OSError, match="too large|should have been written"):
            for _ in stored.blocks(2):
                pass


def full_disk(way: str, where: str, mode: str) -> tuple[str, int]:
    """What Lanczos says on a rank when rank 1's disk is full, at the start or from step 3 on, and
    how many steps were made.
    """
    os.environ[async_io.SETTING] = "on" if way == "asynchronous" else "off"
    storage, rank_1 = Storage(tier="disk"), torch.distributed.get_rank() == 1
    operator = Matrix.of(SPECTRA["spiked"])
    fresh, products = operator.fresh(), 0
    try:
        with ExitStack() as stack:
            if rank_1 and where == "start":
                stack.enter_context(files_end_at(4096))
            options = LanczosOptions(cast(Mode, mode), 4, storage)
            state = LanczosState(operator, fresh(0), 6, fresh, options)
            while not state.done:
                if rank_1 and products == 3:
                    stack.enter_context(files_end_at(4096))
                state.step()
                products += 1
    except MeasurementError as error:
        return str(error), products
    finally:
        del os.environ[async_io.SETTING]
    return "", products


@pytest.mark.parametrize("mode", ["full", "window"])
@pytest.mark.parametrize("where", ["start", "step 3"])
def test_a_full_disk_of_one_rank_is_an_error_on_all(
    mode: str, where: str, way: str, ranks: Callable[[int], RankPool]
) -> None:
    (first, made), (second, _) = ranks(2).run(full_disk, way, where, mode)
    assert first == second
    assert "a basis on disk in the temporary folder, rank 1: OSError" in first
    # What step 2 writes in the background may come late enough to fail too.
    assert made in ((0,) if where == "start" else (3, 4))


def test_after_an_error_no_number_comes_out(way: str) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    basis = Basis(operator.space, 3, Storage(tier="disk"))
    with files_end_at(1):
        basis.store(0, operator.fresh()(0), 1.0)
        basis.store(1, operator.fresh()(1), 1.0)  # threads: waits for the one before
        basis.project(operator.fresh()(2), 2)
    assert basis.project(operator.fresh()(2), 1).isnan().all()
    assert basis.combine(np.ones((1, 1))).isnan().all()
    assert basis.vector(0).isfinite().all()  # so that the product before the reduction is made
    with pytest.raises(OSError):
        basis.read(0)
    with pytest.raises(MeasurementError, match="while keeping a basis on disk"):
        basis.orthogonalize(operator.fresh()(2), 1)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    storage = Storage(tier="disk", folder=str(tmp_path / "nowhere"))
    with pytest.raises(MeasurementError, match="making room for a basis on disk in .*nowhere"):
        Basis(VectorSpace(10), 3, storage)


def collectives_of_steps(place: str, mode: str) -> list[list[int]]:
    """Sizes of all tensors that each Lanczos step reduces or gathers, whoever asks."""
    distributed, sizes = torch.distributed, list[int]()

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(distributed, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            sizes.append(max(x.numel() if isinstance(x, torch.Tensor) else 1 for x in args))
            return call(*args, **kwargs)

        return counted

    names = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "reduce_scatter")
    operator = Matrix.of(SPECTRA["spiked"])
    fresh, product = operator.fresh(), operator.matvec
    options = LanczosOptions(cast(Mode, mode), 4, Storage(torch.bfloat16, cast(Any, place)))
    state = LanczosState(operator, fresh(0), 40, fresh, options)

    def matvec(v: torch.Tensor) -> Any:
        before, found = len(sizes), product(v)
        del sizes[before:]  # those of the product
        return found

    operator.matvec = matvec  # type: ignore[method-assign]
    before, found = {name: getattr(distributed, name) for name in names}, []
    for name in names:
        setattr(distributed, name, counting(name))
    try:
        while not state.done:
            sizes.clear()
            state.step()
            found.append(list(sizes))
    finally:
        for name in names:
            setattr(distributed, name, before[name])
    return found


@pytest.mark.parametrize("mode", cells(["full", "selective", "window", "none"], ["selective"]))
@pytest.mark.parametrize("place", ["accelerator", "disk"])
def test_a_step_makes_three_small_collectives_of_any_kind(
    place: str, mode: str, ranks: Callable[[int], RankPool]
) -> None:
    for found in ranks(2).run(collectives_of_steps, place, mode):
        assert [len(sizes) for sizes in found] == [3] * 40
        assert max(max(sizes) for sizes in found) <= 40 + 3 < N / 6
