"""The analyses on a real ZeRO engine, against the dense fp64 Hessian."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_hessian.errors import ResultError
from ds_hessian.records.safetensors import Reader, Writer
from tests.backends import jobs
from tests.krylov.test_eigenpairs import participation_bound
from tests.nets import DenseHessian, TinyGPT, batch, merged
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module", params=cells([1, 3], [1]))
def run(
    request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What rank 0 of 2 found, the dense Hessian, and the file of vectors."""
    path = tmp_path_factory.mktemp("vectors") / "top.safetensors"
    results = ranks(2).run(jobs.analyse, str(path), request.param)
    weights, figures, *rest = results[0]
    dense = DenseHessian(TinyGPT(), weights, merged([batch(500 + i, 0) for i in range(jobs.TOTAL)]))
    for ours, theirs in zip(figures, results[1][1], strict=True):
        assert repr({**ours, "cost": 0}) == repr({**theirs, "cost": 0})  # the same on every rank
    assert all(r[-1] for r in results)
    return figures, dense, dense.matrix(), path, rest


def test_eigenpairs(run: Any) -> None:
    (pairs, *_), dense, matrix, _, (vectors, *_) = run
    exact = torch.linalg.eigvalsh(matrix).numpy()
    wanted = exact[np.argsort(-abs(exact))][:3]
    assert pairs["converged"].all()
    assert (abs(pairs["values"] - wanted) <= pairs["errors"]).all()
    for value, error, v in zip(pairs["values"], pairs["errors"], vectors, strict=True):
        y = dense.flat(v)
        assert abs(float(y.norm()) - 1) < 1e-5
        assert float((matrix @ y - value * y).norm()) <= error
    values, exact_vectors = torch.linalg.eigh(matrix)
    for value, error, ratio in zip(
        pairs["values"], pairs["errors"], pairs["participation"], strict=True
    ):
        distances = abs(values - value)
        y, gap = exact_vectors[:, distances.argmin()], distances.sort().values[1]
        angle = float(error / gap)  # Davis and Kahan
        assert angle < 0.1
        assert abs(ratio - float((y**4).sum())) <= participation_bound(y, angle)
    shares = pairs["concentrations"]
    assert np.allclose(sum(shares.values()), 1, atol=1e-5)
    name = max(shares, key=lambda n: shares[n][0])
    assert shares[name][0] == pytest.approx(float((vectors[0][name] ** 2).sum()), rel=1e-4)


def test_traces(run: Any) -> None:
    (_, hutchinson, xtrace, *_), dense, matrix, *_ = run
    exact = float(matrix.trace())
    assert abs(hutchinson["value"] - exact) <= hutchinson["bound"]
    assert abs(xtrace["value"] - exact) <= xtrace["bound"]
    norm, error = hutchinson["frobenius"]
    assert abs(norm - float(matrix.norm())) <= 4 * error
    diagonal, start = matrix.diag(), 0
    blocks = zip(
        hutchinson["blocks"], hutchinson["block_values"], hutchinson["block_errors"], strict=True
    )
    for (name, p), (block, value, error) in zip(dense.named.items(), blocks, strict=True):
        assert name == block
        truth = float(diagonal[start : start + p.numel()].sum())
        assert abs(value - truth) <= 5 * error
        start += p.numel()


def test_solves(run: Any) -> None:
    (*_, solution, indefinite, _, _), dense, matrix, _, (_, b, solved, *_) = run
    right = dense.flat(b)
    assert solution["converged"].all() and not solution["negative_curvature"].any()
    for damping, x, error in zip(solution["dampings"], solved, solution["errors"], strict=True):
        exact = torch.linalg.solve(matrix + damping * torch.eye(len(matrix)), right)
        off = float((dense.flat(x) - exact).norm())
        assert off <= max(error, 2e-4 * float(exact.norm())) and off < 2e-3 * float(exact.norm())
    assert indefinite["negative_curvature"].all() and indefinite["curvature"][0] < -1


def test_block_coupling(run: Any) -> None:
    (*_, coupling, share), dense, matrix, _, (*_, v0, _) = run
    v, start, off = dense.flat(v0), 0, float((matrix**2).sum())
    product = matrix @ v
    for i, p in enumerate(dense.named.values()):
        part = slice(start, start + p.numel())
        own = matrix[part, part] @ v[part]
        error = float((product[part] - own).norm() / product[part].norm())
        slack = coupling["noises"][i] + 1e-3
        assert abs(coupling["relative_errors"][i] - error) <= slack
        cosine = float(own @ product[part] / own.norm() / product[part].norm())
        assert abs(coupling["cosines"][i] - cosine) <= slack
        off -= float((matrix[part, part] ** 2).sum())
        start += p.numel()
    assert abs(share["value"] - off / float((matrix**2).sum())) <= 5 * share["error"]


@pytest.mark.full
def test_settings_of_the_basis_reach_lanczos(ranks: Ranks, tmp_path: Path) -> None:
    (folder := tmp_path / "basis").mkdir()
    plain, host, rounded, selective, none = ranks(2).run(
        jobs.spectra_of_settings,
        [
            {},
            {"basis": {"device": "host"}},
            {"basis": {"dtype": "bf16", "device": "disk", "folder": str(folder)}},
            {"reorthogonalization": {"mode": "selective", "window": 3}},
            {"reorthogonalization": {"mode": "none"}},
        ],
    )[0]
    assert np.array_equal(plain.alphas, host.alphas) and np.array_equal(plain.betas, host.betas)
    assert not np.array_equal(plain.alphas, rounded.alphas)
    for other in (rounded, selective, none):  # eight steps: before the first ghost
        error = plain.eigenvalue_max.error + other.eigenvalue_max.error
        assert abs(plain.eigenvalue_max.value - other.eigenvalue_max.value) <= error
    assert selective.cost.all_reduces == plain.cost.all_reduces


@pytest.mark.full
def test_errors_of_sampling_are_those_of_the_micro_batches(ranks: Ranks) -> None:
    weights, top, probe, (error,), spectrum = ranks(2).run(jobs.sampled)[0]
    hessians = [  # micro-batch i of both ranks
        DenseHessian(TinyGPT(), weights, [batch(500 + 2 * i + rank, 0) for rank in (0, 1)])
        for i in range(jobs.TOTAL // 2)
    ]
    exact = []
    for vector, scale in ((top, 1), (probe, spectrum.n)):
        v = hessians[0].flat(vector)
        forms = [scale * float(v @ h.matvec(h.flat(vector))) for h in hessians]
        exact.append(np.std(forms, ddof=1) / len(forms) ** 0.5)
    found = spectrum.sampling
    assert found.micro_batches == len(hessians)
    # fp32 gradients: slopes to 1e-3; the last Ritz vector is near the eigenvector.
    assert error == pytest.approx(exact[0], rel=1e-2)
    assert found.eigenvalue_max == pytest.approx(exact[0], rel=5e-2)
    assert found.trace == pytest.approx(exact[1], rel=1e-2)
    assert found.eigenvalue_min > 0 and "sampling errors" in spectrum.table()


@pytest.mark.parametrize("world_size", [1, 3])
def test_vectors_load_on_another_layout(run: Any, ranks: Ranks, world_size: int) -> None:
    *_, path, (vectors, *_) = run
    loaded, same, error = ranks(world_size).run(jobs.load_elsewhere, str(path))[0]
    assert same and "solution.safetensors belongs to another solution" in error
    for v, other in zip(vectors, loaded, strict=True):
        assert v.keys() == other.keys() and all(torch.equal(v[n], other[n]) for n in v)


def test_the_file_is_what_the_safetensors_package_reads(run: Any) -> None:
    package = pytest.importorskip("safetensors.torch")
    *_, path, (vectors, *_) = run
    found = package.load_file(str(path))
    for name, whole in found.items():
        assert torch.equal(whole, torch.stack([v[name] for v in vectors]))


def test_damaged_files_are_refused_and_failed_writes_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    with Writer(path, {"a": (2, 3), "b": (2, 0)}, {"k": "1"}) as writer:
        writer.append(torch.arange(6.0).reshape(2, 3))
        writer.append(torch.zeros(2, 0))
    reader = Reader(path)
    assert reader.metadata == {"k": "1"} and reader.shapes == {"a": (2, 3), "b": (2, 0)}
    assert torch.equal(reader.read("a"), torch.arange(6.0).reshape(2, 3))
    with pytest.raises(ResultError, match="'c': missing"):
        reader.read("c")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ResultError, match="truncated"):
        Reader(path)
    path.unlink()
    with pytest.raises(ZeroDivisionError), Writer(path, {"a": (1,)}, {}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
