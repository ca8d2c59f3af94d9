"""Every analysis, record, resume, the self-test and the schedule on a plain module."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ds_hessian
from ds_hessian.backends.objective import Call
from ds_hessian.errors import ConfigError, MeasurementError, ResultError
from ds_hessian.records import HessianEigenpairs, HessianSpectrum
from ds_hessian.records.safetensors import Reader
from tests.nets import TinyGPT, batch
from tests.operators.nets import Exact, batches, loss_of, mlp, preempted, train
from tests.plain import jobs
from tests.ranks import RankPool

QUIET = {"progress": False, "plot": False}
Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return train(mlp(), batches(), 40)


@pytest.fixture(scope="module")
def matrix(net: nn.Module) -> Tensor:
    """The exact Hessian."""
    return Exact(net, batches()).matrix()


@pytest.fixture
def hessian(net: nn.Module) -> Any:
    return ds_hessian.attach(net, config=QUIET).use(batches(), loss_of)


def test_spectra_and_eigenpairs_are_those_of_the_dense_hessian(
    hessian: Any, matrix: Tensor
) -> None:
    values = torch.linalg.eigvalsh(matrix).numpy()
    spectrum = hessian.spectrum(num_matvecs=20, num_probes=2)
    assert abs(spectrum.eigenvalue_max.value - values[-1]) < 1e-3 * values[-1]
    assert spectrum.provenance.layout == "torch, 1 rank"
    pairs = hessian.eigenpairs(k=2, which="LA")
    assert np.allclose(sorted(pairs.values), values[-2:], rtol=1e-3)


@pytest.mark.full
def test_near_an_eigenvector_that_is_not_extreme_the_extreme_one_is_found(
    hessian: Any, matrix: Tensor
) -> None:
    values, vectors = torch.linalg.eigh(matrix)
    for i, most in ((-1, 10), (-2, 40), (len(values) // 2, 40)):
        pairs = hessian.eigenpairs(1, which="LA", start=vectors[:, i].float())
        assert pairs.converged.all() and pairs.num_matvecs <= most
        assert abs(pairs.values[0] - values[-1]) < 2e-3 * values[-1], i


def test_traces_solves_and_tests_of_blocks_are_those_of_the_dense_hessian(
    hessian: Any, matrix: Tensor
) -> None:
    trace = hessian.trace("hutch++", num_matvecs=60)
    assert abs(trace.value - float(matrix.trace())) < 4 * trace.error
    b = hessian.random_vector(seed=3)
    solution = hessian.solve(b, [2.0], method="minres", num_matvecs=80)
    damped = matrix + 2.0 * torch.eye(len(b), dtype=torch.float64)
    exact = torch.linalg.solve(damped, b.double())
    assert (solution.x[0].double() - exact).norm() < 1e-2 * exact.norm()
    off_diagonal = hessian.off_block_share("parameters", num_probes=8)
    blocks, begin = torch.zeros_like(matrix), 0
    for _, shape in hessian.backend.parameters:
        part = slice(begin, begin + shape.numel())
        blocks[part, part], begin = matrix[part, part], part.stop
    exact_share = float((matrix - blocks).square().sum() / matrix.square().sum())
    assert abs(off_diagonal.value - exact_share) < 4 * off_diagonal.error
    assert len(hessian.block_coupling("parameters").names) == 6


def test_influence_and_sharpness_with_the_optimizers_adam() -> None:
    torch.manual_seed(0)
    net = TinyGPT(dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    hessian: Any = ds_hessian.attach(net, optimizer, QUIET)
    hessian.use([batch(i, 0) for i in range(2)])
    with pytest.raises(ConfigError, match="make an optimizer step"):
        hessian.sharpness()
    for i in range(3):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
        hessian.step()
    sharpness = hessian.sharpness()
    assert sharpness.preconditioned is not None and sharpness.provenance.step == 3
    query, examples = [batch(9, 0)], [batch(i, 0) for i in range(3)]
    found = hessian.influence(query, examples, [5.0], num_matvecs=30)
    assert found.scores.shape == (1, 3) and np.isfinite(found.scores).all()


def test_records_vectors_and_the_self_test(hessian: Any, tmp_path: Path) -> None:
    spectrum = hessian.spectrum(num_matvecs=6)
    assert HessianSpectrum.load(hessian.save(spectrum, tmp_path)) == spectrum
    v = hessian.random_vector(seed=1)
    assert torch.equal(hessian.scatter(hessian.gather(v)), v)
    path = hessian.save_vectors(v[None], tmp_path / "v.safetensors")
    assert torch.equal(hessian.load_vectors(path)[0], v)
    assert hessian.self_test().passed
    assert "weights for the passes" in hessian.memory_plan().table()


def test_vectors_that_an_earlier_version_wrote_are_read(hessian: Any, tmp_path: Path) -> None:
    """Its files know fewer facts of their record, as the record itself does; others are refused."""
    pairs = hessian.eigenpairs(k=1, which="LA")
    hessian.save(pairs, tmp_path)
    path = tmp_path / "eigenpairs.safetensors"
    tensors, metadata = load_file(path), Reader(path).metadata
    source = json.loads(metadata["provenance"])
    later = ("operator", "parameters", "batch_statistics", "held_choices", "flipped_choices")
    later += ("kinks", "kinks_reason", "held_sides", "crossed_sides")
    old = {key: value for key, value in source.items() if key not in later}
    assert len(old) == len(source) - len(later)

    def written(**changes: object) -> None:
        said = {key: json.dumps(value) for key, value in changes.items()}
        save_file(tensors, path, {**metadata, **said})

    written(provenance=old)
    assert torch.equal(hessian.load(HessianEigenpairs, tmp_path).vectors, pairs.vectors)
    for changes in (
        {"provenance": old | {"seed": 5}},
        {"provenance": old | {"operator": "ggn"}},
        {"provenance": {}},
        {"provenance": [old]},
        {"record": "HessianSolution"},
    ):
        written(**changes)
        with pytest.raises(ResultError, match="belongs to another eigenpairs"):
            hessian.load(HessianEigenpairs, tmp_path)
    for text in ("{", "[" * 10**5):
        save_file(tensors, path, {**metadata, "provenance": text})
        with pytest.raises(ResultError, match="belongs to another eigenpairs"):
            hessian.load(HessianEigenpairs, tmp_path)


def test_an_interrupted_spectrum_is_resumed_to_the_same_bits(
    hessian: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"num_matvecs": 8, "num_probes": 2}
    whole = hessian.spectrum(**settings)
    interrupted = ds_hessian.attach(hessian.modules[0], config=QUIET).use(batches(), preempted(200))
    with pytest.raises(ds_hessian.MeasurementError, match="preempted"):
        interrupted.spectrum(**settings, resume=str(tmp_path))
    assert any(tmp_path.rglob("*.safetensors"))
    resumed = hessian.spectrum(**settings, resume=str(tmp_path))
    assert np.array_equal(resumed.alphas, whole.alphas)
    assert np.array_equal(resumed.betas, whole.betas)


def test_the_schedule_measures_on_captured_micro_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = TinyGPT()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {**QUIET, "interval": 2, "num_matvecs": 4, "num_micro_batches": 3}
    hessian: Any = ds_hessian.attach(net, optimizer, {**settings, "output_path": str(tmp_path)})
    for i in range(4):
        optimizer.zero_grad()
        net(*batch(i, 0)).backward()
        optimizer.step()
        hessian.step()
    assert hessian.step == 4
    found = [HessianSpectrum.load(tmp_path / f"step_{step:06d}") for step in (2, 4)]
    assert [s.provenance.step for s in found] == [2, 4]
    # At step 2 two micro-batches had been seen, which are those of the run from then on.
    assert [s.provenance.num_micro_batches for s in found] == [2, 2]


@pytest.mark.full
def test_ddp_has_records_adam_resume_and_a_schedule_too(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(jobs.whole_run, str(tmp_path))
    assert first == second
    assert first["steps"] == [2] and first["layout"] == "DDP, 2 ranks" and first["passed"]
    assert first["resumed"] and first["gathered"]


def test_another_measurement_of_displaced_weights_is_refused() -> None:
    """By another Hessian of the job, or of a part of its model; another model's is not."""
    whole, other = nn.Sequential(mlp(), nn.Linear(3, 3)), mlp()

    def attached(module: nn.Module) -> Any:
        return ds_hessian.attach(module).use(batches(2), loss_of)

    hessians = [attached(module) for module in (whole, whole, whole[0], other)]
    v = hessians[0].random_vector()
    expected = hessians[1].matvec(v).vector
    with hessians[0].measuring():
        hessians[0].matvec(v)
        for hessian in hessians[1:3]:
            with pytest.raises(MeasurementError, match="a measurement of the same weights"):
                hessian.spectrum(num_matvecs=1)
        hessians[3].spectrum(num_matvecs=1)
    assert torch.equal(hessians[1].matvec(v).vector, expected)


def test_what_a_measurement_would_undo_or_not_see_is_refused_inside_of_it() -> None:
    """Weights that are loaded, which it would put back, and other micro-batches."""
    module: Any = mlp()
    hessian: Any = ds_hessian.attach(module).use(batches(2), loss_of)
    weights = {name: 2 * value for name, value in module.state_dict().items()}
    with hessian.measuring():
        hessian.matvec(hessian.random_vector())
        with pytest.raises(MeasurementError, match=r"\.load_state_dict\(\) was called inside of"):
            module.load_state_dict(weights)
        with pytest.raises(ConfigError, match="a measurement is open already: leave"):
            hessian.use(batches(1), loss_of)
    module.load_state_dict(weights)
    assert len(hessian.batches) == 2


def test_two_threads_of_one_process_never_measure_at_once() -> None:
    """They would draw from, and restore, the same random states."""
    reached, go_on, found = threading.Event(), threading.Event(), list[Any]()
    data = [torch.randn(4, 3)]
    first, second = (ds_hessian.attach(nn.Linear(3, 1), None, QUIET) for _ in range(2))

    def waiting(model: Any, x: Tensor) -> Tensor:
        reached.set()
        go_on.wait(60)
        return model(x).pow(2).mean()

    thread = threading.Thread(
        target=lambda: found.append(first.spectrum(data, waiting, num_matvecs=1))
    )
    thread.start()
    try:
        assert reached.wait(60)
        with pytest.raises(ConfigError, match="another thread of this process is measuring"):
            second.spectrum(data, lambda model, x: model(x).mean(), num_matvecs=1)
    finally:
        go_on.set()
        thread.join()
    again = second.spectrum(data, lambda model, x: model(x).pow(2).mean(), num_matvecs=1)
    assert len(found) == 1 and again.num_matvecs == 1


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes a DeepSpeed engine, model .* got list"):
        ds_hessian.attach([nn.Linear(2, 2)])


def test_a_micro_batch_is_a_call_of_the_model_too() -> None:
    net = TinyGPT(dropout=0.0)
    tokens, targets = batch(0, 0)
    given = [Call((tokens,), {"targets": targets}), Call((tokens, targets), {})]
    hessian = ds_hessian.attach(net, config=QUIET).use(given)
    assert hessian.matvec(hessian.random_vector()).norm > 0


class Normed(nn.Module):
    """A layer whose weight has its length apart, as torch has it or as one writes it."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.v = nn.Parameter(torch.randn(16, 10, generator=generator))
        self.g = nn.Parameter(torch.rand(16, 1, generator=generator) + 0.5)
        self.head = nn.Parameter(torch.randn(4, 16, generator=generator) / 4)
        self.by_torch = by_torch

    def forward(self, x: Tensor) -> Tensor:
        """`(b, 10)` to `(b, 4)`."""
        plain = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        weight = torch._weight_norm(self.v, self.g, 0) if self.by_torch else plain
        return torch.tanh(x @ weight.T) @ self.head.T


def test_weight_norm_has_its_hessian_whatever_its_double_backward_says() -> None:
    """That of torch 2.13's fused function, of which other tools make their products, is 9 % off."""
    exact = Exact(Normed(False), batches())
    hessian = ds_hessian.attach(Normed(True), config=QUIET).use(batches(), loss_of)
    v = hessian.random_vector(seed=1)
    product, truth = hessian.matvec(v), exact(v)
    assert (product.vector.double() - truth).norm() < 1e-4 * truth.norm()
    assert (product.vector.double() - truth).norm() < 3 * product.error * truth.norm()


class _Heads(nn.Module):
    """A mean and a scale, and the loss in both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.scale = nn.Linear(5, 8), nn.Linear(8, 300), nn.Linear(8, 200)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """`(b, 300)` and `(b, 200)`."""
        h = torch.tanh(self.body(x))
        return {"mean": self.mean(h), "scale": self.scale(h)}


def test_a_plan_has_all_outputs_that_the_loss_takes() -> None:
    """It had those of one head."""

    def loss(net: Any, x: Tensor) -> Tensor:
        found = net(x)
        return found["mean"].tanh().square().mean() + found["scale"].cos().mean()

    def planned(**settings: Any) -> dict[str, int]:
        plan = hessian.memory_plan("spectrum", operator="ggn", **settings)
        return {item.name: item.size for item in plan.items}

    model, data = nn.Sequential(_Heads()), [torch.randn(6, 5) for _ in range(4)]
    hessian = ds_hessian.attach(model).use(data, loss)
    size = 4 * 6 * (300 + 200)
    # In fp64, half of them: the loss may be known.
    assert planned(outputs="0")["samples of the cotangents"] == 4 * size
    assert planned()["samples of the cotangents"] == 4 * 4 * 6 * 200
    hessian.trace("hutchinson", 2, operator="ggn")
    found = planned()
    assert found["samples of the cotangents"] == 2 * 4 * size
    vector = 4 * sum(p.numel() for p in model.parameters())
    assert found["trial before, or outputs"] == vector + (8 + 1) * size
    hessian.use([x[:3] for x in data[:2]], loss)
    assert planned()["samples of the cotangents"] == 2 * 2 * size // 2
