"""Ranks leave `measuring()` together, or all learn of the one that has left, or goes on, alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ds_hessian.errors import HessianError
from tests.backends.jobs import nested
from tests.faults import jobs
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
GOES_ON = "rank {}: LeftAlone: this rank has left measuring(), rank {} goes on in it"


def left(what: str, alone: int) -> tuple[str, bool, bool, int]:
    """One rank does something else than the others in `measuring()`.

    Returns the error, whether training goes on with the same state, whether the next product is the
    right one, and how many keys are left on the store.
    """
    host, error = jobs.here(), ""
    before, hessian = host.state(), host.attach()
    v = hessian.random_vector()
    expected = hessian.matvec(v).vector
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys = store.num_keys()
    try:
        leave(hessian, v, what, dist.get_rank() == alone)
    except HessianError as caught:
        error = f"{caught}"
    dist.barrier()
    made = store.num_keys() - keys
    again = bool((hessian.matvec(v).vector == expected).all())
    return error, jobs.same(before, host.state()), again, made


def leave(hessian: Any, v: Any, what: str, alone: bool) -> None:
    """Make two products; the rank that is alone does something else after the first."""
    with hessian.measuring():
        for number in range(2):
            hessian.matvec(v)
            if number or not alone:
                continue
            if what == "break":
                break
            if what == "return":
                return
            if what == "raise":
                raise ValueError("not here")
            if what == "late":
                time.sleep(0.5)
            if what == "further":
                for _ in range(2):
                    hessian.matvec(v)
            if what == "dot":
                hessian.dot(v, v)
        if what == "raise at the end" and alone:
            time.sleep(0.3)
            raise ValueError("not here")


SAID = {
    "break": GOES_ON,
    "return": GOES_ON,
    "further": GOES_ON,
    "raise": "rank {}: ValueError: not here",
    "raise at the end": "rank {}: ValueError: not here",
    "late": "",
}


@pytest.fixture(scope="module", params=cells(["torch DDP", "ZeRO-3"], ["torch DDP"]))
def job(ranks: Ranks, request: pytest.FixtureRequest) -> Ranks:
    """A job on two ranks."""
    ranks(2).run(jobs.begin, request.param)
    return ranks


@pytest.mark.parametrize(
    ("what", "alone"),
    cells(
        [(what, alone) for what in SAID for alone in (0, 1)],
        [("break", 0), ("raise at the end", 1)],
    ),
)
def test_a_rank_that_leaves_a_measurement_alone_ends_it_on_all(
    job: Ranks, what: str, alone: int
) -> None:
    results = job(2).run(left, what, alone, timeout=60)
    first = 1 - alone if what == "further" else alone  # the rank that has left
    said = SAID[what].format(first, 1 - first)
    for rank, (error, kept, right, keys) in enumerate(results):
        told = said.split(": ")[-1] if rank == first else said
        assert bool(error) == bool(said) and told in error
        assert kept and right and keys == 0


@pytest.mark.full
@pytest.mark.parametrize("alone", [0, 1, 2])
@pytest.mark.parametrize("what", ["break", "further", "raise at the end"])
def test_it_ends_on_three_ranks_too(ranks: Ranks, what: str, alone: int) -> None:
    ranks(3).run(jobs.begin, "ZeRO-3")
    for error, kept, right, keys in ranks(3).run(left, what, alone, timeout=60):
        assert "measuring()" in error or "not here" in error
        assert kept and right and keys == 0


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
def test_a_measurement_in_the_loss_of_another_is_refused_on_all_ranks(
    ranks: Ranks, stage: int
) -> None:
    for message, same, left in ranks(2).run(nested, {"zero_optimization": {"stage": stage}}):
        assert "MeasurementError" in message and "a measurement of the same weights" in message
        assert same and left


def after_its_end() -> tuple[str, bool, bool]:
    """The error of a product that is made after the end of its measurement, whether training has
    the same state after it, and whether the next product is the right one.
    """
    host, error = jobs.here(), ""
    before, hessian = host.state(), host.attach()
    v = hessian.random_vector()
    expected = hessian.matvec(v).vector
    with hessian.measuring() as ended:
        ended.matvec(v)
    try:
        ended.matvec(v)
    except HessianError as caught:
        error = f"{caught}"
    again = bool((hessian.matvec(v).vector == expected).all())
    return error, jobs.same(before, host.state()), again


@pytest.mark.full
@pytest.mark.parametrize("host", ["torch DDP", "ZeRO-3"])
def test_a_product_after_the_end_of_its_measurement_is_refused(ranks: Ranks, host: str) -> None:
    """It left weights displaced, and training went on with them."""
    ranks(2).run(jobs.begin, host)
    for error, kept, right in ranks(2).run(after_its_end, timeout=60):
        assert "the measurement of this operator has ended" in error and kept and right
