"""Predicted times: counted gradients beside those of real operators, and the formulas' pieces."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from ds_hessian.analyses import analysis_of
from ds_hessian.config import HessianConfig
from ds_hessian.errors import ConfigError
from ds_hessian.krylov import lanczos
from ds_hessian.operators import FiniteDifferenceHessian, expected_evaluations
from ds_hessian.planning import Job, Machine, Mesh
from ds_hessian.planning import times as timing
from ds_hessian.vectors import random_vector
from tests.operators.nets import Exact, backend_of, batches, costs, drawn, measuring, mlp, train
from tests.tiers import cells

FREE = Machine({"accelerator": 1e30, "host": 1e30, "disk": 1e30}, latency=0.0)


def products_of(title: str, config: HessianConfig, arguments: dict[str, object]) -> int:
    return analysis_of(title, arguments)[0].products(config)


def share(n: int = 1000, accelerator: bool = True):  # type: ignore[no-untyped-def]
    return Job(num_parameters=n, world_size=1, accelerator=accelerator).share


@pytest.mark.parametrize("count", cells([1, 4, 16], [4]))
@pytest.mark.parametrize(
    "scheme", cells(["central", "forward", "fourth_order"], ["central", "fourth_order"])
)
@pytest.mark.parametrize("displacement", ["auto", 1e-3])
def test_the_gradients_of_a_product_are_those_that_operators_evaluate(
    count: int, scheme: str, displacement: float | str
) -> None:
    data, products = batches(count), 12
    backend = backend_of(train(mlp(), data, 20))

    def draw(number: int) -> Tensor:
        return random_vector(backend.layout, backend.space, number)

    with measuring(backend, data) as session:
        hessian = FiniteDifferenceHessian(session, displacement, scheme)  # type: ignore[arg-type]
        lanczos(hessian, draw(0), products, draw)
    found = hessian.cost.gradient_evaluations / products
    expected = expected_evaluations(products, count, scheme, displacement)  # type: ignore[arg-type]
    # A trial more or less is much where there is one micro-batch.
    assert expected.gradients == pytest.approx(found, rel=0.3 if count == 1 else 0.2)


@pytest.mark.parametrize("count", cells([1, 4, 8, 16], [8]))
def test_a_tolerance_that_one_side_reaches_is_planned_with_about_a_gradient(count: int) -> None:
    data, products = batches(count), 30
    backend = backend_of(train(mlp(), data, 20))

    def draw(number: int) -> Tensor:
        return random_vector(backend.layout, backend.space, number)

    with measuring(backend, data) as session:
        hessian = FiniteDifferenceHessian(session, tolerance=1e-2)
        lanczos(hessian, draw(0), products, draw)
    found = hessian.cost.gradient_evaluations / products
    expected = expected_evaluations(products, count, one_sided=True)
    assert expected.gradients == pytest.approx(found, rel=0.3 if count == 1 else 0.2)


def test_time_without_vectors_and_latency_is_that_of_the_gradients() -> None:
    config = HessianConfig(num_matvecs=20, num_probes=3)
    plan = timing.plan_time(2.0, share(), FREE, config, products_of("spectrum", config, {}))
    assert plan.products == 60
    assert plan.product == pytest.approx(2.0 * expected_evaluations(60, 8).gradients)
    assert plan.total == pytest.approx(2.0 + 60 * plan.product)
    assert "measurement, 60 products" in plan.table()


def test_a_basis_is_read_twice_from_where_it_is_and_two_rows_once_more() -> None:
    machine = Machine({"accelerator": 1e30, "host": 1e9, "disk": 1e6}, latency=0.0)
    for settings, seconds in (
        ({"device": "host"}, 4 * (2 * 10.5 + 2) * 1000 / 1e9),
        ({"device": "disk", "dtype": "bf16"}, 2 * (2 * 10.5 + 2) * 1000 / 1e6),
        ({"device": "accelerator"}, 0.0),
    ):
        config = HessianConfig(num_matvecs=20).with_overrides(**settings)
        plan = timing.plan_time(1.0, share(), machine, config, 20)
        assert plan.lanczos == pytest.approx(seconds)
    on_cpu = timing.plan_time(1.0, share(accelerator=False), machine, config, 20)
    assert on_cpu.lanczos > timing.STEP_BYTES * 1000 / 1e9


@pytest.mark.parametrize("count", cells([1, 4, 16], [16]))
@pytest.mark.parametrize("scheme", cells(["central", "fourth_order"], ["central"]))
@pytest.mark.parametrize("costly", [False, True])
def test_the_runs_of_a_product_are_those_that_operators_make(
    count: int, scheme: Any, costly: bool
) -> None:
    """Where they are costly a product is two of them, four of fourth order, but for the first."""
    data, products, runs = batches(count), 12, list[range]()
    backend = backend_of(train(mlp(), data, 20))

    def draw(number: int) -> Tensor:
        return random_vector(backend.layout, backend.space, number)

    with measuring(backend, data) as session:
        add_gradient = session.add_gradient

        def counted(out: Tensor, micro_batches: range) -> None:
            runs.extend([micro_batches] if micro_batches else [])
            add_gradient(out, micro_batches)

        session.add_gradient = counted  # type: ignore[method-assign]
        session.costly_runs = costly
        hessian = FiniteDifferenceHessian(session, scheme=scheme)
        first = len(runs)
        lanczos(hessian, draw(0), products, draw)
    found = (len(runs) - first) / products
    expected = expected_evaluations(products, count, scheme, costly_runs=costly)
    assert expected.runs == pytest.approx(found, rel=0.3)
    evaluated = hessian.cost.gradient_evaluations / products
    assert expected.gradients == pytest.approx(evaluated, rel=0.3 if count == 1 else 0.2)
    later = runs[-2 * len(hessian.scheme.nodes) :]
    assert not costly or all(each == range(count) for each in later)


@pytest.mark.parametrize("count", cells([8, 16, 32], [8]))
def test_a_product_takes_a_quarter_of_a_gradient_for_its_trials(count: int) -> None:
    """The two first vectors included, but not what is made again. Trials above h, which third
    differences spare, took 0.35 in 6.8 runs with 16 micro-batches.
    """
    data, found, runs = batches(count), list[float](), 0
    for net in drawn(train(mlp(), data, 40), 3):
        backend, exact = backend_of(net), Exact(net, data)
        with measuring(backend, data) as session:
            hessian = FiniteDifferenceHessian(session)
            with mock.patch.object(
                session, "add_gradient", wraps=session.add_gradient
            ) as evaluated:
                found += costs(hessian, (v for v, _ in exact.krylov(backend, 20)))
        runs += evaluated.call_count
    once = [cost for cost in found if cost < 3.0]
    assert sum(once) <= 2.3 * len(once) and len(once) >= 0.8 * len(found), found
    assert runs <= 6.2 * len(found)


def test_every_run_of_a_product_waits_for_the_stages_of_a_pipeline() -> None:
    config = HessianConfig(num_micro_batches=8)
    job = Job(1000, 8, mesh=Mesh(pipeline=4, virtual=2, tensor=2), dtype="fp32")
    run = timing.run_of(job, FREE)
    assert run == timing.Run(0.0, 3 / 2, 4, costly=True)
    gradient = run.over(8, 2.0)
    assert gradient == (8 + 3 / 2) * 2.0
    evaluated = expected_evaluations(30, 2, costly_runs=True)  # of groups of four micro-batches
    plan = timing.plan_time(gradient, job.share, FREE, config, 30, run)
    assert plan.waiting == pytest.approx(evaluated.runs * 3 / 2 * 2.0)
    assert plan.product == pytest.approx(evaluated.gradients * 16.0 + plan.waiting)
    assert "of it, waiting for stages" in plan.table()


def test_what_every_run_sends_is_counted_for_every_run() -> None:
    machine = Machine(FREE.bandwidth, latency=0.25, network=1e3)
    job = Job(1000, 2, mesh=Mesh(), dtype="fp32")
    run = timing.run_of(job, machine)
    assert run.seconds == 2 * 0.25 + 1000 * 8 / 2 / 1e3
    config = HessianConfig(num_micro_batches=8)
    plan = timing.plan_time(run.over(8, 1.0), job.share, machine, config, 30, run)
    evaluated = expected_evaluations(30, 8, costly_runs=True)
    assert plan.running == pytest.approx(evaluated.runs * run.seconds)
    close = config.with_overrides(tolerance=1e-5)  # with which products keep their pilots
    plan = timing.plan_time(run.over(8, 1.0), job.share, machine, close, 30, run)
    evaluated = expected_evaluations(30, 8, close.finite_difference.formula)
    assert plan.running == pytest.approx(evaluated.runs * run.seconds)
    alone = timing.run_of(Job(1000, 1, mesh=Mesh(tensor=1), dtype="fp32"), machine)
    assert not alone.costly


def test_micro_batches_that_an_interleaved_pipeline_cannot_run_are_refused() -> None:
    job = Job(1000, 4, mesh=Mesh(pipeline=4, virtual=2))
    run = timing.run_of(job, FREE)
    with pytest.raises(ConfigError, match="runs groups of 4 micro-batches, got 6"):
        timing.plan_time(1.0, job.share, FREE, HessianConfig(num_micro_batches=6), 30, run)


@pytest.mark.parametrize(
    ("analysis", "arguments", "products"),
    [
        ("eigenpairs", {"k": 3, "basis_size": 20, "max_matvecs": 50}, 53),
        ("trace", {"num_matvecs": 12, "method": "xtrace"}, 12),
        ("solve", {"dampings": [1.0, 2.0]}, 32),
        ("influence", {"dampings": [1.0], "num_matvecs": 5}, 6),
        ("sharpness", {}, 5),
        ("off_block_share", {"num_probes": 2}, 4),
        ("block_spectra", {"num_blocks": 3}, 3 * 30),
        ("kronecker", {"shapes": ((3, 4), (5, 6))}, 2 * (16 + 8 + 4 * 8)),
    ],
)
def test_products_of_analyses(analysis: str, arguments: dict[str, object], products: int) -> None:
    assert products_of(analysis, HessianConfig(), arguments) == products


def test_a_number_of_products_that_depends_on_the_model_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="block_coupling takes depends on the model"):
        products_of("block_coupling", HessianConfig(), {})
