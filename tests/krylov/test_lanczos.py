"""Lanczos on matrices with a chosen spectrum, in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch

from ds_hessian.errors import NumericsError
from ds_hessian.krylov import (
    LanczosOptions,
    LanczosState,
    Storage,
    eigenpairs,
    hutch_plus_plus,
    hutchinson,
    lanczos,
    ritz,
    slq,
    solve,
    trace_estimate,
    xtrace,
)
from ds_hessian.krylov.lanczos import Mode
from ds_hessian.operators import Product
from ds_hessian.vectors import VectorSpace
from tests.krylov.matrices import SPECTRA, Matrix
from tests.ranks import RankPool
from tests.tiers import cells

ROUNDOFF = 2.0**-24
BF16 = Storage(torch.bfloat16)


def decompose(name: str, m: int = 25, options: LanczosOptions | None = None) -> dict[str, Any]:
    """Figures of a run: |Q Q' - 1|, |H Q - Q T - r e'|, T's ends, what the run says."""
    operator = Matrix.of(SPECTRA[name])
    fresh = operator.fresh()
    state = LanczosState(operator, fresh(0), m, fresh, options)
    while not state.done:
        state.step()
    run = state.run()
    unit = np.sqrt(state.basis.inverse_squares)
    rows = [state.basis.vector(i) * float(unit[i]) for i in range(state.basis.rows.capacity)]
    q = torch.stack([operator.full(row) for row in rows])
    t = torch.tensor(state.tridiagonal)
    residual = operator.matrix @ q.T - q.T @ t
    return {
        "m": run.num_matvecs,
        "fresh": state.restarts,
        "orthogonality": float((q @ q.T - torch.eye(len(q))).abs().max()),
        "columns": residual.norm(dim=0).numpy(),
        "run": run,
        "finite": all(np.isfinite(a).all() for a in (run.alphas, run.betas, run.rounding_errors)),
    }


@pytest.mark.parametrize("world_size", cells([0, 1, 2, 3], [0, 2]))
@pytest.mark.parametrize("name", SPECTRA)
def test_decomposition_identity_orthogonality_and_no_nan(
    name: str, world_size: int, ranks: Callable[[int], RankPool]
) -> None:
    found = ranks(world_size).run(decompose, name)[0] if world_size else decompose(name)
    n, m = len(SPECTRA[name]), min(25, len(SPECTRA[name]))
    assert found["m"] == m and found["finite"]
    # Where the Krylov space is exhausted: the length of a random vector, and to make it orthogonal.
    assert found["run"].all_reduces == 3 * m + 4 * found["fresh"]
    scale = max(abs(SPECTRA[name]).max(), 1e-30)
    # fp32 vectors: each entry of Q'Q and of the residual carries a few roundoffs of its scale.
    assert found["orthogonality"] < 32 * ROUNDOFF
    assert found["columns"][:-1].max() < 64 * ROUNDOFF * scale
    if n > m:
        assert abs(found["columns"][-1] - found["run"].betas[-1]) < 64 * ROUNDOFF * scale


@pytest.mark.parametrize("world_size", [2, 3])
def test_alphas_and_betas_are_the_same_on_any_number_of_ranks(
    world_size: int, ranks: Callable[[int], RankPool]
) -> None:
    one = decompose("spiked")["run"]
    for result in ranks(world_size).run(decompose, "spiked"):
        assert np.allclose(result["run"].alphas, one.alphas, rtol=0, atol=64 * ROUNDOFF * 50)
        assert np.allclose(result["run"].betas, one.betas, rtol=0, atol=64 * ROUNDOFF * 50)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_outliers_are_found_once_with_bars_that_hold(noise: float) -> None:
    operator = Matrix.of(SPECTRA["spiked"], noise)
    run = slq(operator, operator.layout, 60, 1, seed=0)[0]
    pairs = ritz(run)
    for truth in (10.0, 20.0, 50.0, -5.0):
        near = abs(pairs.values - truth) < 0.5
        assert near.sum() == 1
        assert abs(pairs.values[near][0] - truth) <= pairs.errors[near][0]
    if not noise:
        assert run.asymmetry < 64 * ROUNDOFF * 50


def test_without_reorthogonalisation_ghosts_appear_and_the_density_stays() -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    start = operator.fresh()(0)
    runs = {
        mode: lanczos(operator, start, 60, operator.fresh(), None, LanczosOptions(mode, 10))
        for mode in ("full", "window", "none")
    }
    copies = {mode: (abs(ritz(run).values - 50) < 0.5).sum() for mode, run in runs.items()}
    assert copies["full"] == 1 and copies["none"] >= 2
    first = {
        mode: [pairs.weights @ pairs.values**k for k in range(6)]
        for mode, pairs in ((mode, ritz(run)) for mode, run in runs.items())
    }
    for mode in ("window", "none"):
        assert np.allclose(first[mode], first["full"], rtol=1e-4)


@pytest.mark.parametrize(("mode", "stored"), [("window", 7), ("none", 2)])
def test_short_recurrences_store_only_their_window(mode: Any, stored: int) -> None:
    operator = Matrix.of(SPECTRA["semicircle"])
    state = LanczosState(
        operator, operator.fresh()(0), 20, operator.fresh(), LanczosOptions(mode, 7)
    )
    while not state.done:
        state.step()
    assert state.basis.rows.capacity == stored
    full = lanczos(operator, operator.fresh()(0), 20, operator.fresh())
    assert np.allclose(state.run().alphas, full.alphas, atol=1e-4)


OUTLIERS = (50.0, 20.0, 10.0, -5.0)  # of the spiked spectrum
INACCURATE = {"exact": (0.0, Storage()), "noisy": (1e-3, Storage()), "bf16 basis": (0.0, BF16)}


@pytest.mark.parametrize(
    ("kind", "steps"),
    cells(product(INACCURATE, [40, 100, 200]), [("exact", 100), ("noisy", 100)]),
)
def test_selective_has_no_ghosts_where_none_has_ten(kind: str, steps: int) -> None:
    noise, storage = INACCURATE[kind]
    copies, runs = {}, {}
    for mode in ("full", "selective", "none"):
        operator = Matrix.of(SPECTRA["spiked"], noise)
        options = LanczosOptions(cast(Mode, mode), 10, storage)
        runs[mode] = lanczos(operator, operator.fresh()(0), steps, operator.fresh(), None, options)
        values = ritz(runs[mode]).values
        copies[mode] = [int((abs(values - truth) < 0.5).sum()) for truth in OUTLIERS]
    assert copies["selective"] == copies["full"] == [1, 1, 1, 1]
    assert max(copies["none"]) >= steps // 20
    pairs = ritz(runs["selective"])
    for truth in OUTLIERS:
        i = int(abs(pairs.values - truth).argmin())
        assert abs(pairs.values[i] - truth) <= pairs.errors[i]


def test_selective_keeps_outliers_within_its_room_and_t_as_good_as_full() -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    states = {}
    for mode, window in (("full", 10), ("selective", 4)):
        options = LanczosOptions(cast(Mode, mode), window)
        state = LanczosState(operator, operator.fresh()(0), 60, operator.fresh(), options)
        while not state.done:
            state.step()
        states[mode] = state
    kept = sorted(value for value, _ in states["selective"]._converged)
    assert np.allclose(kept, sorted(OUTLIERS), rtol=1e-4)
    assert states["selective"].basis.rows.capacity == 2 + 4
    # Semiorthogonal vectors, to sqrt(eps), project H as well as orthogonal ones (Simon, 1984).
    full, selective = (ritz(states[mode].run()) for mode in ("full", "selective"))
    assert np.allclose(selective.values, full.values, rtol=0, atol=1e-3)
    assert states["selective"].asymmetry < 2 * ROUNDOFF**0.5 * 50


@pytest.mark.parametrize("name", ["repeated", "two-valued", "rank-deficient", "n < m", "zero"])
def test_selective_counts_no_eigenvalue_more_often_than_it_is_there(name: str) -> None:
    operator = Matrix.of(SPECTRA[name])
    options = LanczosOptions("selective", 10)
    run = lanczos(operator, operator.fresh()(0), 40, operator.fresh(), None, options)
    values = ritz(run).values
    for truth, copies in zip(*np.unique(SPECTRA[name], return_counts=True), strict=True):
        if abs(truth) > 1.5:  # an outlier
            assert (abs(values - truth) < 1e-3).sum() <= copies


@pytest.mark.parametrize("mode", ["full", "selective", "window", "none"])
@pytest.mark.parametrize("storage", [Storage(), BF16], ids=["fp32", "bf16"])
def test_three_all_reduces_a_step(mode: Any, storage: Storage) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    options = LanczosOptions(mode, storage=storage)
    run = slq(operator, operator.layout, 20, 1, seed=0, options=options)[0]
    assert run.all_reduces == 3 * 20


@pytest.mark.parametrize("noise", [0.0, 1e-2])
def test_a_step_reads_the_basis_twice_and_leaves_it_orthonormal(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of products with errors as well, which have parts along all stored vectors."""
    operator, read = Matrix.of(SPECTRA["spiked"], noise), list[int]()
    state = LanczosState(operator, operator.fresh()(0), 40, operator.fresh())
    blocks = state.basis.rows.blocks

    def counted(count: int, first: int = 0) -> Any:
        read.append(count - first)
        return blocks(count, first)

    monkeypatch.setattr(state.basis.rows, "blocks", counted)
    while not state.done:
        state.step()
    assert sum(read) == sum(2 * k + min(k, 2) for k in range(1, 41))
    q = torch.stack([operator.full(state.basis.vector(i)) for i in range(40)])
    assert float((q @ q.T - torch.eye(40)).abs().max()) < 32 * ROUNDOFF


@pytest.mark.parametrize("mode", ["full", "selective", "window", "none"])
@pytest.mark.parametrize("name", cells(SPECTRA, ["rank-deficient", "zero", "spiked"]))
@pytest.mark.parametrize("storage", [Storage(), BF16], ids=["fp32", "bf16"])
def test_no_mode_makes_a_nan(mode: Any, name: str, storage: Storage) -> None:
    operator = Matrix.of(SPECTRA[name])
    options = LanczosOptions(mode, 5, storage)
    pairs = ritz(slq(operator, operator.layout, 30, 1, seed=0, options=options)[0])
    assert np.isfinite(pairs.values).all() and np.isfinite(pairs.errors).all()
    low, high = SPECTRA[name].min(), SPECTRA[name].max()
    slack = 1e-2 * abs(SPECTRA[name]).max()
    assert pairs.values.min() >= low - slack and pairs.values.max() <= high + slack


CASES = {
    "exact": (0.0, Storage()),
    "noisy": (1e-3, Storage()),
    "bf16 basis": (0.0, BF16),
}


@pytest.mark.parametrize("kind", cells(CASES, []))
def test_bars_of_ritz_values_hold_in_95_of_100_cases(kind: str) -> None:
    noise, storage = CASES[kind]
    truth = np.r_[np.linspace(0, 1, 120), 4.0, 9.0, 20.0, -3.0]
    options, held, residuals = LanczosOptions(storage=storage), [], []
    for seed in range(100):
        operator = Matrix.of(truth, noise, seed, basis=seed % 5)
        state = LanczosState(operator, operator.fresh(seed)(0), 30, operator.fresh(seed), options)
        while not state.done:
            state.step()
        pairs = ritz(state.run())
        distance = abs(pairs.values[:, None] - truth).min(1)
        held += list(distance <= pairs.errors)
        # The top pair has converged: beta s is 0, and yet the true residual is not.
        y = state.basis.combine(np.linalg.eigh(state.tridiagonal)[1][:, -1:].T)[0]
        y = operator.full(y)
        true = (operator.matrix @ y - pairs.values[-1] * y).norm() / y.norm()
        residuals.append(float(true) / pairs.errors[-1])
    print(f"{kind}: held in {np.mean(held):.3f}")
    assert np.mean(held) >= 0.95
    assert np.mean(np.array(residuals) <= 1) >= 0.95
    assert np.median(residuals) > 0.1  # and the bar is not an empty one


@pytest.mark.full
@pytest.mark.parametrize("kind", ["noisy", "bf16 basis"])
def test_where_the_old_bound_says_nothing_ours_says_the_truth(kind: str) -> None:
    noise, storage = CASES[kind]
    ratios, truths = list[float](), list[float]()
    for seed in range(20):
        operator = Matrix.of(SPECTRA["spiked"], noise, seed)
        options = LanczosOptions(storage=storage)
        state = LanczosState(operator, operator.fresh(seed)(0), 40, operator.fresh(seed), options)
        while not state.done:
            state.step()
        run = state.run()
        values, vectors = np.linalg.eigh(state.tridiagonal)
        y = operator.full(state.basis.combine(vectors[:, -1:].T)[0])
        true = float((operator.matrix @ y - values[-1] * y).norm() / y.norm())
        old = run.betas[-1] * abs(vectors[-1, -1])
        assert old < 1e-9 and 0.005 < true < 0.2  # of the eigenvalue 50
        truths.append(true)
        ratios.append(float(ritz(run).errors[-1]) / true)
    print(f"{kind}: truth {min(truths):.3f} - {max(truths):.3f}", end=", ")
    print(f"bar / truth {min(ratios):.2f} - {max(ratios):.2f}")
    assert 1 <= min(ratios) and max(ratios) < 4  # COVERAGE is 3


class Noting(VectorSpace):
    """Notes how many numbers travel in each reduction."""

    sizes: list[int]

    def reduce(self, partials: torch.Tensor) -> torch.Tensor:
        """See `VectorSpace`."""
        self.sizes.append(partials.numel())
        return super().reduce(partials)


REDUCING: dict[str, Any] = {
    **{
        mode: lambda h, fresh, mode=mode: lanczos(
            h, fresh(0), 20, fresh, None, LanczosOptions(mode, 5, BF16)
        )
        for mode in ("full", "selective", "window", "none")
    },
    "eigenpairs": lambda h, fresh: eigenpairs(h, fresh(0), 2, fresh, basis_size=12, storage=BF16),
    "Hutchinson": lambda h, fresh: hutchinson(h, fresh, 10),
    "Hutch++": lambda h, fresh: hutch_plus_plus(h, fresh, 30),
    "XTrace": lambda h, fresh: xtrace(h, fresh, 20),
    "MINRES": lambda h, fresh: solve(h, fresh(1), [1.0, 9.0], fresh, "minres", num_matvecs=20),
}


@pytest.mark.parametrize("method", REDUCING)
def test_nothing_of_the_models_size_travels(method: str) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    operator.space.__class__, operator.space.sizes = Noting, []  # type: ignore[attr-defined]
    REDUCING[method](operator, operator.fresh())
    largest = max(operator.space.sizes)  # type: ignore[attr-defined]
    assert 1 < largest <= 2 * 20 + 4 < operator.space.n / 6


def test_more_probes_begin_with_the_runs_of_fewer() -> None:
    operator = Matrix.of(SPECTRA["semicircle"])
    one = slq(operator, operator.layout, 10, 1, seed=4)
    three = slq(operator, operator.layout, 10, 3, seed=4)
    assert np.array_equal(one[0].alphas, three[0].alphas)
    assert not np.array_equal(three[1].alphas, three[0].alphas)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_trace_bars_hold_for_spiked_spectra(kind: Any) -> None:
    operator = Matrix.of(SPECTRA["spiked"])
    truth = SPECTRA["spiked"].sum()
    hits = 0
    for seed in range(40):
        runs = slq(operator, operator.layout, 15, 2, seed, kind)
        trace, error = trace_estimate(runs, [ritz(r) for r in runs], operator.space.n)
        hits += abs(trace - truth) <= 2 * error
    assert hits >= 36  # two standard errors: 95 % of 40 is 38, less 1.5 of its own deviation


@pytest.mark.parametrize("kind", cells(CASES, []))
def test_bars_of_traces_hold_in_95_of_100_cases(kind: str) -> None:
    noise, storage = CASES[kind]
    truth = np.r_[np.linspace(0, 1, 120), 4.0, 9.0, 20.0, -3.0]
    options, held = LanczosOptions(storage=storage), []
    for seed in range(100):
        operator = Matrix.of(truth, noise, seed, basis=seed % 5)
        runs = slq(operator, operator.layout, 12, 2, seed, options=options)
        trace, error = trace_estimate(runs, [ritz(r) for r in runs], operator.space.n)
        held.append(abs(trace - truth.sum()) <= 2 * error)
    print(f"{kind}: held in {np.mean(held):.3f}")
    assert np.mean(held) >= 0.95


def test_the_error_of_a_trace_falls_with_the_number_of_probes() -> None:
    operator = Matrix.of(SPECTRA["semicircle"])
    errors = []
    for probes in (1, 16):
        runs = slq(operator, operator.layout, 10, probes, seed=0)
        errors.append(trace_estimate(runs, [ritz(r) for r in runs], operator.space.n)[1])
    # By four; the spread of 16 probes is known to a fifth.
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.5)


class Recorded(Matrix):
    """Keeps the vectors that it is multiplied by."""

    def matvec(self, v: torch.Tensor) -> Product:
        """See `LinearOperator`."""
        self.seen = [*getattr(self, "seen", []), self.full(v)]
        return super().matvec(v)


def test_a_probe_continues_with_no_other_probes_vector() -> None:
    operator = Recorded.of(SPECTRA["two-valued"])  # exhausted after two steps
    slq(operator, operator.layout, 6, 2, seed=0)
    first, start = torch.stack(operator.seen[:6]), operator.seen[6]
    assert abs(first @ start).max() < 0.5 * abs(start @ start)


def test_no_steps_is_refused() -> None:
    operator = Matrix.of(SPECTRA["zero"])
    with pytest.raises(NumericsError, match="at least 1"):
        slq(operator, operator.layout, 0, 1, seed=0)
    with pytest.raises(NumericsError, match="at least 2 vectors, got 1"):
        LanczosOptions("window", 1)
