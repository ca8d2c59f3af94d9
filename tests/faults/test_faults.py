"""Any call that fails on one of two ranks while they measure ends the measurement on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ds_hessian.backends.zero.host import WRITES_WEIGHTS
from tests.faults import jobs
from tests.faults.hosts import HOSTS
from tests.faults.sweep import Fault, plan, sweep
from tests.ranks import RankPool, pools_of_ranks
from tests.tiers import cells

Ranks = Callable[[int], RankPool]
SLICE, LARGER_SLICE = 4, 4
"""Faults in the two tiers, of each host; in the larger one, of each phase. All of them, 2,400 of a
host, are a program: `python -m tests.faults`."""


@pytest.fixture(scope="module")
def megatron_pools(built: None) -> Iterator[Ranks]:
    """The shim of a process that runs Megatron on CPU is not undone."""
    yield from pools_of_ranks()


@pytest.fixture(scope="module")
def ranks_of(ranks: Ranks, megatron_pools: Ranks) -> Callable[[str], Ranks]:
    """The pools of a host."""

    def get(host: str) -> Ranks:
        if not host.startswith("Megatron"):
            return ranks
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
        return megatron_pools

    return get


@pytest.mark.parametrize("host", cells(["ZeRO-3", "torch DDP"], ["torch DDP"]))
def test_a_slice_of_the_calls(ranks_of: Callable[[str], Ranks], host: str) -> None:
    faults = plan(ranks_of(host), host)
    counts, wrong = sweep(ranks_of(host), host, faults[:: len(faults) // SLICE])
    print(host, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["inside", "raised"] + counts["around", "raised"] > SLICE // 2


@pytest.mark.full
@pytest.mark.parametrize("host", HOSTS)
def test_a_larger_slice_of_the_calls(ranks_of: Callable[[str], Ranks], host: str) -> None:
    by_phase: dict[str, list[Fault]] = {}
    for fault in plan(ranks_of(host), host):
        by_phase.setdefault(fault[1].phase, []).append(fault)
    faults = [f for part in by_phase.values() for f in part[1 :: max(1, len(part) // LARGER_SLICE)]]
    counts, wrong = sweep(ranks_of(host), host, faults)
    print(host, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["inside", "raised"] > 2 and counts["around", "raised"] > 2


@pytest.mark.full
def test_a_failure_in_the_last_meeting_leaves_no_rank_behind(ranks: Ranks) -> None:
    """The others have left it where its results are read, and are on their way."""
    faults = [
        fault
        for fault in plan(ranks, "ZeRO-1")
        if fault[1].phase == "restoring" and fault[1].file == "/ranks/agreement.py"
    ]
    counts, wrong = sweep(ranks, "ZeRO-1", faults)
    assert not wrong, "\n".join(wrong)
    assert counts["restoring", "held"] >= 2


@pytest.fixture(scope="module")
def engine(ranks: Ranks) -> Ranks:
    """A ZeRO-3 engine on two ranks."""
    ranks(2).run(jobs.begin, "ZeRO-3")
    return ranks


@pytest.mark.parametrize("what", cells(jobs.POINTS, ["attaching"]))
def test_a_failure_before_or_after_the_passes_ends_on_all_ranks(engine: Ranks, what: str) -> None:
    for error, kept, right in engine(2).run(jobs.around, what, timeout=120):
        assert "rank 1: MemoryError: full" in error
        assert kept and right


@pytest.mark.full
@pytest.mark.parametrize("host", HOSTS)
def test_training_and_checkpoints_are_refused_where_weights_are_displaced(
    ranks_of: Callable[[str], Ranks], host: str
) -> None:
    ranks = ranks_of(host)(2)
    ranks.run(jobs.begin, host)
    methods = ["state_dict", "optimizer.step"]
    if host.startswith("ZeRO"):
        methods = [name for name in WRITES_WEIGHTS if name not in OF_SOME_VERSIONS]
    if host.startswith("Megatron"):
        methods.append("sharded_state_dict")
    for method in methods:
        for error, kept, possible in ranks.run(jobs.train_inside, method):
            assert "was called inside of measuring(), where the weights are displaced" in error
            assert kept and possible, method


OF_SOME_VERSIONS = {"save_fp16_model", "_consolidated_16bit_state_dict"}


@pytest.mark.full
@pytest.mark.parametrize("host", ["torch DDP", "ZeRO-0", "Megatron DP"])
@pytest.mark.parametrize("action", ["save", "exit"])
def test_a_signal_ends_the_measurement_before_its_handler_saves(
    ranks_of: Callable[[str], Ranks], host: str, action: str
) -> None:
    ranks_of(host)(2).run(jobs.begin, host)
    other, own = ranks_of(host)(2).run(jobs.preempted, action, timeout=120)
    assert (other[1], own[1]) == ([], [True])
    assert other[2] and own[2]
    if action == "save":  # the job continues, and a schedule with it
        assert all(e.startswith("MeasurementError: ended by a signal") for e in (other[0], own[0]))
        assert all("received SIGTERM" in e for e in (other[0], own[0])) and "rank 1" in other[0]
    else:
        assert own[0] == "SystemExit: 3"
        assert other[0].startswith("KeyboardInterrupt") and "rank 1" in other[0]
