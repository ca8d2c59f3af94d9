"""Fail every call of a measurement in turn, on one rank or the other; what comes of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.faults import jobs
from tests.faults.tracer import KINDS, Site
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
Fault = tuple[int, Site, int, str, int]
"""Number in the plan, site, which of its calls, kind of error, rank."""

OUTCOMES = ("raised", "held", "ended", "not reached", "changed", "lost", "hung")


def plan(ranks: Ranks, host: str) -> list[Fault]:
    """Every call of a measurement, on either rank, with one kind of error after the other."""
    found = ranks(2).run(jobs.begin, host)
    sites = [
        (site, times, rank)
        for rank in (1, 0)
        for site, times in found[rank].items()
        if site.phase != "outside"
    ]
    kinds = list(KINDS)
    return [
        (number, site, (times + 1) // 2, kinds[number % len(kinds)], rank)
        for number, (site, times, rank) in enumerate(sites)
    ]


def sweep(
    ranks: Ranks, host: str, faults: Sequence[Fault]
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Inject the faults; returns how many there were of each (phase, outcome), and what was not as
    promised.
    """
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number, site, call, kind, rank in faults:
        try:
            results = ranks(2).run(jobs.fail, site, call, kind, rank, timeout=60)
            outcome, why = judged(site, kind, rank, results)
        except (AssertionError, EOFError) as error:  # EOFError: a process died
            outcome, why = "hung", str(error) or "a process died"
            if jobs.UNFOLLOWED in why:
                outcome, why = "ended", ""
            ranks(2).close()
        counts[site.phase, outcome] += 1
        print(number, kind, rank, *site, outcome, why[:2000], flush=True)
        if why:
            wrong.append(f"{kind} on rank {rank} at {site}: {outcome}: {why}")
        if outcome in ("hung", "ended"):
            ranks(2).run(jobs.begin, host)
    return counts, wrong


def judged(site: Site, kind: str, rank: int, results: list[Any]) -> tuple[str, str]:
    """The outcome, and what is wrong with it."""
    errors = [error for error, *_ in results]
    raised, kept, readable, right = zip(*(flags for _, *flags in results), strict=True)
    if not raised[rank]:
        good = not any(errors) and all(kept) and all(right)
        return "not reached", "" if good else str(results)
    if site.phase == "restoring":
        ended = all("end the job" in error for error in errors)
        held = all(kept) and all(right)
        return ("ended" if ended else "held"), "" if ended or held else str(results)
    if not all(readable):
        return "lost", str(results)
    if not (all(kept) and all(right)):
        return "changed", str(results)
    if not any(errors):
        return "held", ""
    named = f"rank {rank}: {kind}: injected"
    own = kind == "KeyboardInterrupt"  # which the rank itself raises as it is
    good = all(named in error or (own and r == rank) for r, error in enumerate(errors))
    alike = len({error.partition(":")[0] for error in errors}) == 1
    # Of a file that cannot be read a `ResultError` says so, as it is on the rank that reads it.
    read = errors[rank].startswith("ResultError: cannot read") and "injected" in errors[rank]
    if read and all(r == rank or f"rank {rank}: {errors[rank]}" in e for r, e in enumerate(errors)):
        good = alike = True
    return "raised", "" if good and alike and all(errors) else str(errors)
