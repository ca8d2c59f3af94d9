"""Pilots that say little of the other micro-batches, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import ds_hessian
from ds_hessian.errors import NumericsError
from ds_hessian.operators import FiniteDifferenceHessian
from ds_hessian.operators.displacement.control import MAX_TRIALS
from ds_hessian.operators.displacement.line import Line
from ds_hessian.operators.gradients import Gradients
from ds_hessian.operators.protocol import Product
from tests.operators.nets import Batch, Exact, backend_of, batches, measuring, mlp, relative, train
from tests.operators.nets import loss_of as plain
from tests.tiers import cells

Weighted = tuple[float, Batch]
"""A factor of the loss, and data."""


def loss_of(net: nn.Module, given: Weighted) -> Tensor:
    """Cross entropy times the factor."""
    factor, batch = given
    return factor * plain(net, batch)


PILOTS: dict[str, Callable[[Batch], Weighted]] = {
    "masked": lambda batch: (0.0, batch),
    "1000 times smaller": lambda batch: (1e-3, batch),
    "1e8 times smaller": lambda batch: (1e-8, batch),
    "1000 times larger": lambda batch: (1e3, batch),
    "without inputs": lambda batch: (1.0, (0 * batch[0], batch[1])),
}


def unlike(name: str, count: int) -> tuple[nn.Module, list[Weighted], Exact]:
    """A trained net, micro-batches the first eighth of which is unlike the others, and products."""
    data = batches(count)
    net, first = train(mlp(), data, 60), -(-count // 8)
    given = [PILOTS[name](b) if i < first else (1.0, b) for i, b in enumerate(data)]
    return net, given, Exact(net, given, loss_of)


@pytest.mark.parametrize(
    ("name", "count"),
    cells(
        [(name, count) for name in PILOTS for count in (2, 8, 16)],
        [("masked", 8), ("1000 times smaller", 8), ("without inputs", 8)],
    ),
)
def test_what_the_pilot_does_not_tell_all_micro_batches_do(name: str, count: int) -> None:
    net, data, exact = unlike(name, count)
    backend = backend_of(net)
    with measuring(backend, data, loss_of) as session:
        operator = FiniteDifferenceHessian(session)
        for i, (v, truth) in enumerate(exact.krylov(backend, 6)):
            product, size = operator.matvec(v), float(truth.norm())
            error = relative(product.vector, truth)
            assert product.error is not None, i
            assert product.error * product.norm > error * size / 5, (i, product.error, error)
            assert error < 1e-3, i
    wasted = 2 * MAX_TRIALS / min(count, 8)  # a search with the pilot
    # With a third difference of all for every second product.
    assert operator.cost.gradient_evaluations < 6 * (2 + 2.5 + 0.5) + wasted, operator.cost


def test_a_displacement_at_which_only_others_than_the_pilot_are_not_finite_is_given_up() -> None:
    """The losses of all micro-batches but the first end at a distance of 1e-3."""
    net = train(mlp(), data := batches(4), 60)
    weights = parameters_to_vector(net.parameters()).detach()

    def bounded(net: nn.Module, given: Weighted) -> Tensor:
        edge, batch = given
        off = (parameters_to_vector(net.parameters()) - weights).square().sum()
        return plain(net, batch) + (1e-4 * (edge**2 - off).sqrt() if edge else 0.0)

    given = [(1e-3 * (i > 0), batch) for i, batch in enumerate(data)]
    exact, backend = Exact(net, given, bounded), backend_of(net)
    with measuring(backend, given, bounded) as session:
        operator = FiniteDifferenceHessian(session)
        for v, truth in exact.krylov(backend, 3):
            product = operator.matvec(v)
            error = relative(product.vector, truth)
            assert product.error is not None
            assert error < 0.03 and error < 3 * product.error, (error, product)
        with pytest.raises(NumericsError, match=r"use a smaller displacement, or \"auto\""):
            FiniteDifferenceHessian(session, 1e-2).matvec(v)


def test_where_runs_are_costly_products_are_of_one_at_each_point_after_two() -> None:
    """They are exact, say so, and go on in a state; the next measurement begins with pilots."""
    data = batches(16)
    backend, given = backend_of(net := train(mlp(), data, 40)), Exact(net, data)
    vectors = list(given.krylov(backend, 8))
    with measuring(backend, data) as session:
        session.costly_runs = True
        operator = FiniteDifferenceHessian(session)
        for v, truth in vectors[:-1]:
            product = operator.matvec(v)
            error = relative(product.vector, truth)
            assert product.error is not None
            assert error < 2e-4 and 1 / 3 < product.error / error < 5
        state, lessons = (
            json.loads(json.dumps(f)) for f in (operator.state_dict(), operator.lessons())
        )
        resumed = FiniteDifferenceHessian(session)
        resumed.load_state_dict(state)
        last = vectors[-1][0]
        assert resumed.matvec(last).vector.equal(operator.matvec(last).vector)
        next_one, before = FiniteDifferenceHessian(session), operator.cost.gradient_evaluations
        next_one.begin(lessons)
        next_one.matvec(vectors[0][0])
    assert before < 8 * 3.0 + 1
    assert next_one.cost.gradient_evaluations < 2 * 1.5, next_one.cost


def test_trials_of_all_micro_batches_are_kept_by_states_and_lessons() -> None:
    net, data, exact = unlike("masked", 8)
    backend = backend_of(net)
    vectors = [v for v, _ in exact.krylov(backend, 4)]
    with measuring(backend, data, loss_of) as session:
        operator = FiniteDifferenceHessian(session)
        for v in vectors[:3]:
            operator.matvec(v)
        state, lessons = (
            json.loads(json.dumps(f)) for f in (operator.state_dict(), operator.lessons())
        )
        resumed = FiniteDifferenceHessian(session)
        resumed.load_state_dict(state)
        assert resumed.matvec(vectors[3]).vector.equal(operator.matvec(vectors[3]).vector)
        next_one = FiniteDifferenceHessian(session)
        next_one.begin(lessons)
        next_one.matvec(vectors[0])
    assert next_one.cost.gradient_evaluations < 2 * 2 + 1, next_one.cost


def louder(count: int) -> tuple[nn.Module, list[Weighted], Exact]:
    """A trained net, the last of whose micro-batches has ten times the loss of each other one."""
    data = batches(count)
    net = train(mlp(), data, 60)
    given = [(10.0 if i == count - 1 else 1.0, batch) for i, batch in enumerate(data)]
    return net, given, Exact(net, given, loss_of)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("count", cells([4, 8, 16], [4]))
def test_the_noise_of_micro_batches_that_are_louder_than_their_pilot_is_measured(
    count: int, bf16: bool
) -> None:
    """It was told as 0.2 of what it is, with estimates of a third of the error."""
    net, data, exact = louder(count)
    backend = backend_of(net, bf16)
    with measuring(backend, data, loss_of) as session:
        operator, told = FiniteDifferenceHessian(session), list[float]()
        for v, truth in exact.krylov(backend, 6):
            product, size = operator.matvec(v), float(truth.norm())
            assert product.noise is not None and product.error is not None
            error = relative(product.vector, truth) * size
            assert product.error * product.norm > error / 3
            # Of which the error is noise alone.
            h = product.displacement / (2 if bf16 else 8)
            true = relative(operator.product_at(v, h).vector, truth) * size * h
            told.append(product.noise * product.norm * product.displacement / true)
    assert 0.5 < float(np.exp(np.mean(np.log(told)))) < 3, told


def test_lessons_tell_how_loud_micro_batches_are_and_of_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, data, _ = louder(4)
    hessian = ds_hessian.attach(net, config={"progress": False})
    heard, nearer = list[int](), Gradients.nearer

    def noted(self: Gradients, line: Line, product: Product) -> float:
        heard.append(hessian.step)
        return nearer(self, line, product)

    monkeypatch.setattr(Gradients, "nearer", noted)
    others = [*data[:-1], (20.0, data[-1][1])]
    for step, given in enumerate((data, data, others)):
        hessian.step = step
        with hessian.use(given, loss_of).measuring() as operator:
            for number in range(2):
                operator.matvec(hessian.random_vector(seed=number))
    assert heard == [0, 2]
