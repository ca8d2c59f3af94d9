"""Measurements of real ZeRO engines that are interrupted, by an error or by a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.resume import engines, jobs

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Any:
    """The spectrum in one go, without a state."""
    return ranks(2).run(engines.measure, None)[0][0]


def same(record: Any, whole: Any) -> bool:
    """All figures bit for bit, and the costs that are no times."""
    counts = ("products", "gradient_evaluations", "trials")
    return all(
        getattr(record, name).tobytes() == getattr(whole, name).tobytes() for name in record.arrays
    ) and all(getattr(record.cost, name) == getattr(whole.cost, name) for name in counts)


@pytest.mark.full
def test_after_an_error_in_the_loss_it_goes_on_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, whole: Any
) -> None:
    assert "on purpose" in ranks(2).run(engines.measure, str(tmp_path), 3)[0]
    for found in ranks(2).run(engines.measure, str(tmp_path), None, 7):
        record, random = found
        assert same(record, whole) and random
    assert list((tmp_path / "spectrum").iterdir()) == []


@pytest.mark.full
def test_eigenpairs_go_on_to_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    pairs, _ = ranks(2).run(engines.measure, None, kind="eigenpairs")[0]
    assert "on purpose" in ranks(2).run(engines.measure, str(tmp_path), 3, kind="eigenpairs")[0]
    for record, random in ranks(2).run(engines.measure, str(tmp_path), None, 7, "eigenpairs"):
        assert record.values.tobytes() == pairs.values.tobytes() and random
        assert record.errors.tobytes() == pairs.errors.tobytes()
        assert record.cost.products == pairs.cost.products
        assert record.cost.gradient_evaluations == pairs.cost.gradient_evaluations
    assert list((tmp_path / "eigenpairs").iterdir()) == []


def test_a_killed_job_of_engines_goes_on_to_the_same_bits(
    ranks: Ranks, tmp_path: Path, whole: Any
) -> None:
    pool, limit = RankPool(2), time.monotonic() + 120
    pool.begin(engines.measure, str(tmp_path))
    while jobs.newest(tmp_path / "spectrum")[0] < 2 and time.monotonic() < limit:
        time.sleep(0.01)
    assert time.monotonic() < limit, "\n".join(map(pool.where, range(2)))
    pool.close()  # kill -9
    assert 2 <= jobs.newest(tmp_path / "spectrum")[0] < 8
    record, _ = ranks(2).run(engines.measure, str(tmp_path), None, 7)[0]
    assert same(record, whole)


def test_dropout_masks_of_another_layout_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(engines.measure, str(tmp_path), 1)
    found = ranks(1).run(engines.measure, str(tmp_path))[0]
    assert "differs in loss" in found and "dropout masks" in found
