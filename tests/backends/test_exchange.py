"""What ranks tell each other: exact, named where they differ, and no more for more ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from ds_hessian.memory import TIERS
from ds_hessian.planning import Needs, shortage
from ds_hessian.ranks import Shared, balanced, imbalance
from ds_hessian.ranks.collectives import shared_of_mesh
from ds_hessian.ranks.exchange import ranks_of_node
from tests.backends import exchange_jobs
from tests.ranks import RankPool
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


# ---- the union


UNIONS = {
    "alike": ([{"a", "b"}] * 3, 1),
    "of stages": ([{"a"}, {"b"}, {"c", "a"}], 3),
    "one has nothing": ([set(), {"a"}, {"a"}], 1),
    "none has anything": ([set(), set(), set()], 0),
    "contained": ([{"a", "b", "c"}, {"a"}, {"c"}], 1),
}


@pytest.mark.parametrize("name", cells(UNIONS, ("of stages", "one has nothing")))
def test_a_union_is_told_once_by_each_rank_that_adds_to_it(ranks: Ranks, name: str) -> None:
    sets, speakers = UNIONS[name]
    for found, calls in ranks(3).run(exchange_jobs.united, sets):
        assert found == set().union(*sets)
        expected = {"allreduce": speakers + 1, "broadcast": 2 * speakers}
        assert calls == {name: count for name, count in expected.items() if count}


def test_a_rank_that_cannot_tell_what_it_has_ends_the_question_on_all(ranks: Ranks) -> None:
    for speaker in range(3):
        said = ranks(3).run(exchange_jobs.unsent, speaker, timeout=60)
        message = f"MeasurementError: while asking, rank {speaker}: MemoryError: full"
        assert said == [message] * 3


def test_integers_of_64_bits_come_as_they_were(ranks: Ranks) -> None:
    rows = [[2**63 - 1, -(2**63)], [0, -1], [5, 7]]
    assert ranks(3).run(exchange_jobs.integers, rows) == [rows] * 3


# ---- groups that are a mesh, against their definition


Groups = dict[int, list[tuple[int, ...]]]


def is_mesh(groups: Groups, stages: dict[int, Sequence[int]]) -> bool:
    """The definition, from every rank's groups."""
    return all(
        len({tuple(map(len, groups[r])) for r in stages[rank]}) == 1
        and all(
            groups[r][k] == group
            for k, group in enumerate(mine)
            for r in group
            if r in stages[rank]
        )
        for rank, mine in groups.items()
    )


def says_mesh(groups: Groups, stages: dict[int, Sequence[int]]) -> bool:
    """The sums of all ranks."""
    terms = [imbalance(shared_of_mesh(r, groups[r], stages[r])) for r in groups]
    return balanced(torch.stack(terms).sum(0))


def mesh(rows: int, columns: int, stages: int) -> tuple[Groups, dict[int, Sequence[int]]]:
    """World, rows, columns and pipelines of a mesh, with the ranks of each rank's stage."""
    size = rows * columns
    groups, stage_of = Groups(), dict[int, Sequence[int]]()
    for rank in range(size * stages):
        stage, place = divmod(rank, size)
        row, column = divmod(place, columns)
        stage_of[rank] = range(stage * size, (stage + 1) * size)
        groups[rank] = [
            tuple(range(size * stages)),
            tuple(stage * size + row * columns + j for j in range(columns)),
            tuple(stage * size + i * columns + column for i in range(rows)),
            tuple(s * size + place for s in range(stages)),
        ]
    return groups, stage_of


def test_hashes_tell_a_mesh_from_what_is_none() -> None:
    source, told = random.Random(0), []
    for _ in range(200):
        sizes = [source.choice((1, 2, 3)) for _ in range(3)]
        groups, stages = mesh(*sizes)
        for _ in range(source.choice((0, 1, 1, 2))):  # another order, or a group fewer, or another
            rank, kind = source.choice(list(groups)), source.randrange(4)
            if kind == 0:
                source.shuffle(groups[rank])
            elif kind == 1:
                groups[rank].pop()
            elif kind == 2:
                groups[rank].append((rank,))
            else:  # the same on all ranks of a stage: a mesh again
                for peer in stages[rank]:
                    groups[peer] = groups[peer][::-1]
        told.append(is_mesh(groups, stages))
        assert says_mesh(groups, stages) == told[-1], (sizes, groups)
    assert 20 < sum(told) < 180


def test_things_that_ranks_swap_are_not_alike() -> None:
    """Two groups, each of which has one rank with what the other group has."""
    for alike, things in ((True, "xxyy"), (False, "xyyx"), (False, "xyxy")):
        terms = [
            imbalance([Shared((r // 2, thing), 2, r % 2 == 0)]) for r, thing in enumerate(things)
        ]
        assert balanced(torch.stack(terms).sum(0)) == alike


# ---- parameters


SAME, OTHER = {"a": 3, "b": 2}, "of shape (2,)"
DIFFERENT = {
    "the same": ([SAME] * 3, None),
    "another name": ([SAME, SAME, {"a": 3, "c": 2}], ("1", f"'b' {OTHER}", f"'c' {OTHER}", 2)),
    "another shape": ([SAME, {"a": 2}, SAME], ("0", "'a' of shape (3,)", f"'a' {OTHER}", 1)),
    "one fewer": ([SAME, SAME, {"a": 3}], ("1", f"'b' {OTHER}", "missing", 2)),
    "one more": ([{"a": 3}, SAME, SAME], ("1", "missing", f"'b' {OTHER}", 1)),
    "another order": (
        [SAME, {"b": 2, "a": 3}, SAME],
        ("0", "'a' of shape (3,)", f"'b' {OTHER}", 1),
    ),
}


@pytest.mark.parametrize("name", cells(DIFFERENT, ("the same", "another name", "one fewer")))
def test_parameters_that_differ_are_named_on_every_rank(ranks: Ranks, name: str) -> None:
    sizes, difference = DIFFERENT[name]
    for said in ranks(3).run(exchange_jobs.attached, sizes, [()] * 3):
        if difference is None:
            assert said == "no error"
        else:
            number, here, there, rank = difference
            assert said.endswith(
                "all ranks must train the same parameters in the same order: number "
                f"{number} is {here} on rank 0 and {there} on rank {rank}"
            )


def test_a_rank_that_trains_nothing_is_named_on_every_rank(ranks: Ranks) -> None:
    for said in ranks(3).run(exchange_jobs.attached, [SAME] * 3, [(), (), ("a", "b")]):
        assert "a module without trainable parameters" in said


@pytest.mark.full
def test_a_parameter_that_one_rank_has_frozen_is_named(ranks: Ranks) -> None:
    for said in ranks(3).run(exchange_jobs.attached, [SAME] * 3, [(), ("a",), ()]):
        assert "number 0 is 'a' of shape (3,) on rank 0 and 'b' of shape (2,) on rank 1" in said


# ---- numbers of micro-batches, and memory


NUMBERS = {
    (4, 4, 4): "4",
    (0, 3, 3): "3",  # a stage that reads no data
    (4, 4, 3): "got 3 on rank 2 and 4 on rank 0; pass",
    (5, 0, 2): "got 2 on rank 2 and 5 on rank 0; pass",
    (0, 0, 0): "got 0; pass",
}


@pytest.mark.parametrize("numbers", list(NUMBERS))
def test_ranks_agree_on_the_number_of_micro_batches(ranks: Ranks, numbers: tuple[int, ...]) -> None:
    for said in ranks(3).run(exchange_jobs.numbered, list(numbers)):
        assert said == NUMBERS[numbers] or NUMBERS[numbers] in said.partition("ConfigError: ")[2]


def test_what_surely_fits_is_not_short_anywhere(ranks: Ranks) -> None:
    """Of random needs, against the sum over the ranks of each node."""
    source, cases = random.Random(0), list[list[Needs]]()
    for _ in range(60):
        tiers = [tier for tier in TIERS if source.random() < 0.8]
        scale = source.choice((20, 100, 400))
        cases.append(
            [
                Needs(
                    source.choice("ab"),
                    {tier: source.randrange(scale) for tier in tiers},
                    [{tier: source.randrange(10) * (tier in tiers) for tier in TIERS}],
                )
                for _ in range(3)
            ]
        )
    said = ranks(3).run(exchange_jobs.fits, cases)
    assert said[0] == said[1] == said[2] and 10 < sum(said[0]) < 50
    assert all(shortage(case) is None for case, sure in zip(cases, said[0], strict=True) if sure)


def test_the_ranks_of_a_node_are_counted(ranks: Ranks) -> None:
    """Each has room for its own plan, and the node does not have it for those of all."""
    mine = Needs("a", {"host": 10}, [{tier: 6 * (tier == "host") for tier in TIERS}])
    assert ranks(2).run(exchange_jobs.fits, [[mine, mine]]) == [[False], [False]]


# ---- connections


@pytest.mark.parametrize("fails", cells((False, True), (False,)))
def test_one_rank_of_a_node_watches_the_store(fails: bool) -> None:
    fresh = RankPool(3)
    try:
        short, within, after = zip(*fresh.run(exchange_jobs.clients, fails), strict=True)
    finally:
        fresh.close()
    assert sum(short) == 0
    if fails:
        assert max(after) <= 2
    else:
        assert sum(within) == sum(after) == 1


@pytest.mark.full
def test_a_watch_whose_connection_breaks_is_taken_over() -> None:
    fresh = RankPool(3)
    try:
        first, after, errors = zip(*fresh.run(exchange_jobs.broken, timeout=120), strict=True)
    finally:
        fresh.close()
    assert sorted(first) == [0, 0, 1]
    assert all(bool(now) != bool(then) for then, now in zip(first, after, strict=True))
    assert set(errors) == {"while trying, rank 1: MemoryError: full"}


@pytest.mark.parametrize(("said", "ranks"), [("2", 2), ("two", None), ("-1", None), ("", None)])
def test_an_environment_without_a_number_says_no_ranks(
    monkeypatch: pytest.MonkeyPatch, said: str, ranks: int | None
) -> None:
    """The thread that watches for failed ranks reads it, and must not end by it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    assert ranks_of_node() == ranks
