"""Any call that fails on one of two ranks while they measure ends the measurement on both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ds_hessian.backends.zero.refusal import REFUSED
from tests.faults import jobs
from tests.faults.tracer import KINDS, Site
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
STAGES = {"0": {"stage": 0}, "2": {"stage": 2}, "3": {"stage": 3}}
SLICE = 6
"""Faults in the quick tier, of each stage."""


def sweep(
    ranks: Ranks, zero: dict[str, Any], settings: dict[str, Any], limit: int | None = None
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Fail each site in turn, with one kind of error after the other, on one rank or the other.

    Returns how many there were of each (phase, outcome), and what was not as promised.
    """
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    found = ranks(2).run(jobs.begin, zero, settings)
    plan = [
        (site, times, rank)
        for rank in (1, 0)
        for site, times in found[rank].items()
        if site.phase != "outside"
    ]
    step = 1 if limit is None else max(1, len(plan) // limit)
    for number, (site, times, rank) in list(enumerate(plan))[::step]:
        kind = list(KINDS)[number // step % len(KINDS)]
        try:
            results = ranks(2).run(jobs.fail, site, (times + 1) // 2, kind, rank, timeout=60)
            outcome, why = judged(site, kind, rank, results)
        except (AssertionError, EOFError) as error:  # EOFError: a process died
            outcome, why = "hung", str(error) or "a process died"
            ranks(2).close()
        counts[site.phase, outcome] += 1
        print(number, kind, rank, *site, outcome, why[:2000], flush=True)
        if why:
            wrong.append(f"{kind} on rank {rank} at {site}: {outcome}: {why}")
        if outcome in ("hung", "ended"):
            ranks(2).run(jobs.begin, zero, settings)
    return counts, wrong


def judged(site: Site, kind: str, rank: int, results: list[Any]) -> tuple[str, str]:
    """The outcome, and what is wrong with it."""
    errors = [error for error, *_ in results]
    raised, kept, right = zip(*(flags for _, *flags in results), strict=True)
    if not raised[rank]:
        return "not reached", "" if not any(errors) and all(kept) and all(right) else str(results)
    if site.phase == "restoring":
        ended = all("end the job" in error for error in errors)
        held = all(kept) and all(right)
        return ("ended" if ended else "held"), "" if ended or held else str(results)
    if not (all(kept) and all(right)):
        return "changed", str(results)
    if not any(errors):
        return "held", ""
    named = f"rank {rank}: {kind}: injected"
    own = kind == "KeyboardInterrupt"  # which the rank itself raises as it is
    good = all(named in error or (own and r == rank) for r, error in enumerate(errors))
    alike = len({error.partition(":")[0] for error in errors}) == 1
    return "raised", "" if good and alike and all(errors) else str(errors)


def test_training_and_checkpoints_are_refused_where_weights_are_displaced(ranks: Ranks) -> None:
    ranks(2).run(jobs.begin, STAGES["3"], {})
    for method in REFUSED:
        for error, kept, kind in ranks(2).run(jobs.train_inside, method):
            assert f"engine.{method}() was called inside of measuring()" in error
            assert kept and kind in ("method", "function")


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_slice_of_the_calls(ranks: Ranks, stage: str) -> None:
    counts, wrong = sweep(ranks, STAGES[stage], {}, SLICE)
    print(stage, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["inside", "raised"] > SLICE // 2


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_every_call(ranks: Ranks, stage: str) -> None:
    counts, wrong = sweep(ranks, STAGES[stage], {})
    print(stage, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["inside", "raised"] > 100
