"""A rank that fails between collectives takes part in those of the others, until all raise."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce as taken_by_name

from ds_hessian.backends.zero.host import communication
from ds_hessian.errors import ConfigError, HessianError
from ds_hessian.ranks import agree, collective, reduce
from ds_hessian.ranks import lockstep as lockstep_module
from ds_hessian.ranks.interrupts import Interrupts
from ds_hessian.ranks.lockstep import Lockstep, LockstepError
from ds_hessian.ranks.log import Log
from ds_hessian.ranks.passes import ABSENT
from tests.backends.exchange_jobs import counted
from tests.ranks import RankPool, context, free_port
from tests.tiers import cells

Ranks = Callable[[int], RankPool]


def operations() -> list[Callable[[], Any]]:
    """One collective of each kind that ZeRO makes, blocking and not, and an uneven exchange."""
    from deepspeed import comm

    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [rank + 2 * other for other in range(world)]
    received = [other + 2 * rank for other in range(world)]

    def x(n: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(3 * n, dtype=dtype)

    return [
        lambda: comm.all_reduce(x()),
        lambda: comm.all_reduce(x(2), op=comm.ReduceOp.MAX, group=comm.get_world_group()),
        lambda: comm.all_reduce(x(dtype=torch.bfloat16), op=dist.ReduceOp.MAX, async_op=True),
        lambda: comm.broadcast(x(dtype=torch.int64), 0),
        lambda: comm.allgather_fn(x(world), x(), async_op=True).wait(),
        lambda: comm.all_gather([x() for _ in range(world)], x()),
        lambda: comm.reduce_scatter_fn(x(), x(world)),
        lambda: comm.reduce(x(), 0),
        lambda: comm.barrier(),
        lambda: taken_by_name(x()),
        lambda: dist.all_to_all_single(
            torch.ones(sum(received), 2), torch.ones(sum(sent), 2), received, sent
        ),
        lambda: dist.scatter(x(2), [x(2)] * world if rank == 1 else None, src=1),
        lambda: dist.gather(x(), [x() for _ in range(world)] if rank == 0 else None, dst=0),
        lambda: dist.scatter(x(), [x()] * world if rank == 2 % world else None, src=2 % world),
    ]


def operations_of_a_mesh() -> list[Callable[[], Any]]:
    """Of rows and columns of 2 x 2 ranks, by DeepSpeed and by torch.distributed itself."""
    from deepspeed import comm

    groups = [[dist.new_group(ranks) for ranks in axis] for axis in MESH]
    row, column = (
        next(g for g in axis if g is not dist.GroupMember.NON_GROUP_MEMBER) for axis in groups
    )
    first, last = dist.get_global_rank(row, 0), dist.get_global_rank(column, 1)
    x = torch.ones
    return [
        lambda: dist.all_reduce(x(3), group=row),
        lambda: comm.all_reduce(x(4), group=column),
        lambda: dist.broadcast(x(5), first, group=row),
        lambda: comm.reduce(x(2), last, group=column),
        lambda: dist.all_gather_into_tensor(x(4), x(2), group=row, async_op=True).wait(),
        lambda: comm.reduce_scatter_fn(x(2), x(4), group=column),
        lambda: dist.reduce(x(1), dst=first, group=row),
        lambda: dist.all_reduce(x(2), dist.ReduceOp.MAX),
    ]


MESH = [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]


def leave_at(
    places: list[int | None], repeats: int = 2, meshed: bool = False
) -> tuple[str, int, int]:
    """Make all operations `repeats` times, but leave before number `places[rank]`.

    Returns the error, the keys left on the store by the pass and the sum of a later all-reduce.
    """
    from deepspeed import comm

    place, backend = places[dist.get_rank()], comm.comm.cdb
    error, made = "no error", operations_of_a_mesh() if meshed else operations()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    with Lockstep(torch.device("cpu"), communication()) as lockstep:
        for _ in range(2):  # the pass after a failed one works as well
            try:
                with lockstep.together("trying"):
                    for number, operation in enumerate(made * repeats):
                        if number == place:
                            raise ValueError(f"left at {number}")
                        operation()
                    if place == -1:
                        raise ValueError("left at the end")
            except HessianError as caught:
                error = str(caught)
            assert comm.comm.cdb is backend
    dist.barrier()
    left = store.num_keys() - keys
    dist.barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    return error, left, int(total)


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([None, None, None], None),
        ([0, None, None], 0),  # before the first collective
        pytest.param([None, 7, None], 1, marks=pytest.mark.full),
        ([None, None, -1], 2),  # after the last
        ([3, 11, None], 0),
        pytest.param([None, 11, 3], 2, marks=pytest.mark.full),
        ([2, 9, 5], 0),  # none finishes
        pytest.param([9, 9, 4], 2, marks=pytest.mark.full),
        pytest.param([5, 5, 5], 0, marks=pytest.mark.full),
        pytest.param([-1, 0, -1], 1, marks=pytest.mark.full),
    ],
)
def test_ranks_that_leave_at_different_places_raise_together_and_meet_again(
    ranks: Ranks, places: list[int | None], first: int | None
) -> None:
    results = ranks(3).run(leave_at, places, timeout=120)
    errors, left, totals = zip(*results, strict=True)
    assert totals == (3, 3, 3)
    assert len(set(errors)) == 1
    if first is None:
        assert errors[0] == "no error"
    else:
        where = "the end" if places[first] == -1 else places[first]
        assert errors[0] == f"while trying, rank {first}: ValueError: left at {where}"
    assert left[0] in (0, 3)  # the first measurement of the job leaves a counter for each rank


def leave_in_a_segment(places: list[int]) -> str:
    """Leave one segment of a pass after so many of its collectives."""
    try:
        with (
            Lockstep(torch.device("cpu"), communication()) as lockstep,
            lockstep.together("trying"),
            lockstep.segment(0),
        ):
            for _ in range(places[dist.get_rank()]):
                dist.all_reduce(torch.ones(1))
            raise ValueError(f"left at {places[dist.get_rank()]}")
    except HessianError as caught:
        return str(caught)
    return "no error"


def test_of_ranks_that_leave_one_segment_the_first_to_leave_is_named(ranks: Ranks) -> None:
    """By the collectives that each had made: the later failure may follow from zeros."""
    said = ranks(2).run(leave_in_a_segment, [3, 1], timeout=60)
    assert said == ["while trying, rank 1: ValueError: left at 1"] * 2


def leave_before_segments() -> str:
    """Leave a pass on one rank, in whose segments the others begin reductions for which they wait
    after the meeting.
    """
    works = list[Any]()
    try:
        with Lockstep(torch.device("cpu"), communication()) as lockstep:
            with lockstep.together("trying"):
                if dist.get_rank() == 1:
                    raise ValueError("left")
                for step in range(3):
                    with lockstep.segment(step):
                        works.append(dist.all_reduce(torch.ones(1), async_op=True))
    except HessianError as caught:
        for work in works:
            work.wait()
        return str(caught)
    return "no error"


def test_all_segments_are_followed_of_ranks_that_meet_before_their_collectives_end(
    ranks: Ranks,
) -> None:
    said = ranks(2).run(leave_before_segments, timeout=60)
    assert said == ["while trying, rank 1: ValueError: left"] * 2


def leave_one_after_the_other() -> tuple[str, int]:
    """Rank 1 leaves with a collective on its way that rank 0, which leaves after it, has not begun.

    Returns the error and the sum of a later all-reduce.
    """
    said = "no error"
    try:
        with (
            Lockstep(torch.device("cpu"), communication()) as lockstep,
            lockstep.together("trying"),
        ):
            assert lockstep._log is not None
            if dist.get_rank() == 1:
                dist.all_reduce(torch.ones(1), async_op=True)
            else:
                while lockstep._log.read(lockstep._pass, 1, 0, "end") is ABSENT:
                    time.sleep(1e-3)
            raise ValueError("left")
    except HessianError as caught:
        said = str(caught)
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, int(total)


def test_a_rank_that_fails_after_another_one_asks_for_its_log(ranks: Ranks) -> None:
    """It read that the other had left, asked for nothing, and read that for ever."""
    found = ranks(2).run(leave_one_after_the_other, timeout=60)
    assert found == [("while trying, rank 0: ValueError: left", 2)] * 2


def leave_between(failing: int, places: list[int]) -> list[str]:
    """Exchange with another stage, between segments, sizes and what has them; rank `failing` leaves
    after so many sends, receipts and waits. Returns the error for each of `places`.
    """
    return [_leave_between(dist.get_rank() == failing, place) for place in places]


def _leave_between(fails: bool, place: int) -> str:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    passed = segments = 0

    def reach(result: Any) -> Any:
        nonlocal passed
        passed += 1
        if fails and passed == place:
            raise ValueError(f"left at {place}")
        return result

    def exchange(sent: Tensor, received: Tensor) -> Tensor:
        works = [reach(dist.isend(sent, other)), reach(dist.irecv(received, other))]
        for work in works:
            reach(work.wait())
        return received

    def schedule() -> None:
        nonlocal segments
        for step in range(3):
            if step == segments:
                segments += 1
                with lockstep.segment(step):
                    lockstep.raise_if_failed()
            size = exchange(torch.tensor([2 + rank + step]), torch.zeros(1, dtype=torch.int64))
            assert int(size) == 2 + other + step
            exchange(torch.ones(2 + rank + step), torch.empty(int(size)))

    try:
        with (
            Lockstep(torch.device("cpu"), peers=[rank]) as lockstep,
            lockstep.together("trying"),
            lockstep.between_segments(),
        ):
            lockstep.again(schedule, lambda: (0,))
    except HessianError as caught:
        return str(caught)
    return "no error"


@pytest.mark.parametrize("failing", cells([0, 1], [1]))
def test_a_rank_that_fails_amid_what_stages_exchange_sends_and_receives_the_rest(
    ranks: Ranks, failing: int
) -> None:
    """Whatever it has sent before, and whatever is in flight: here at every fifth place."""
    places = [*range(1, 25, 5), 25]
    expected = [f"while trying, rank {failing}: ValueError: left at {p}" for p in places[:-1]]
    said = ranks(2).run(leave_between, failing, places, timeout=60)
    assert said == [[*expected, "no error"]] * 2


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([None, None, None, 0], 3),
        pytest.param([None, 5, None, None], 1, marks=pytest.mark.full),
        pytest.param([3, None, None, None], 0, marks=pytest.mark.full),
        ([None, 9, 7, None], 2),  # in both of its groups others wait, and one of them fails too
        ([7, 12, 2, -1], 2),
    ],
)
def test_ranks_of_a_mesh_are_followed_in_ones_own_groups(
    ranks: Ranks, places: list[int | None], first: int
) -> None:
    results = ranks(4).run(leave_at, places, meshed=True)
    errors, _, totals = zip(*results, strict=True)
    assert totals == (4, 4, 4, 4)
    assert set(errors) == {f"while trying, rank {first}: ValueError: left at {places[first]}"}


def leave_a_stage(places: list[int | None]) -> tuple[str, int]:
    """Make collectives of a pipeline, but leave before number `places[rank]`; returns the error and
    the sum of a later all-reduce.

    Ranks 0 and 1 are a stage, and ranks 2 and 3. The stages differ in their own collectives; both
    share those of their first and of their second ranks, and those of all.
    """
    stages, across = MESH
    groups = [dist.new_group(list(ranks)) for ranks in (*stages, *across)]
    rank, x = dist.get_rank(), torch.ones
    own, both = groups[rank // 2], groups[2 + rank % 2]
    steps: list[Callable[[], Any]] = [
        *[lambda: dist.all_reduce(x(7), group=own)] * (1 + rank // 2),
        lambda: dist.all_reduce(x(5), group=both),
        lambda: dist.all_reduce(x(3), group=own),
        lambda: dist.gather(x(2), [x(2), x(2)] if rank < 2 else None, rank % 2, group=both),
        lambda: dist.all_reduce(x(4)),
        lambda: dist.all_reduce(x(6), group=both),
    ]
    error = "no error"
    try:
        with Lockstep(torch.device("cpu"), peers=stages[rank // 2]) as lockstep:
            with lockstep.together("trying"):
                for number, step in enumerate(steps):
                    if number == places[rank]:
                        raise ValueError(f"left at {number}")
                    step()
    except HessianError as caught:
        error = str(caught)
    total = torch.ones(1)
    dist.all_reduce(total)
    return error, int(total)


@pytest.mark.parametrize(
    ("places", "first"),
    cells(
        [
            ([None, None, 2, None], 2),
            (A_STAGE := ([None, None, 2, 2], 2)),
            ([None, None, 4, 1], 3),
            ([0, 0, None, None], 0),
            (ALL_BUT_ONE := ([1, None, 0, 0], 2)),  # rank 0 follows it for ranks 2 and 3
            ([1, 4, 3, 0], 3),
            ([3, None, None, 2], 3),
        ],
        [A_STAGE, ALL_BUT_ONE],
    ),
)
def test_ranks_follow_other_stages_where_all_of_their_own_have_failed(
    ranks: Ranks, places: list[int | None], first: int
) -> None:
    said = f"while trying, rank {first}: ValueError: left at {places[first]}"
    assert ranks(4).run(leave_a_stage, places, timeout=60) == [(said, 4)] * 4


def left_inside() -> str:
    """Rank 0 runs out of memory once inside its second collective, before that is made."""
    from deepspeed import comm

    backend, sizes = comm.comm.cdb, []

    def all_reduce(tensor: torch.Tensor, *args: Any) -> Any:
        sizes.append(len(tensor))
        if len(sizes) == 2 and dist.get_rank() == 0:
            raise MemoryError("full")
        return type(backend).all_reduce(backend, tensor, *args)

    backend.all_reduce = all_reduce
    try:
        with (
            Lockstep(torch.device("cpu"), communication()) as lockstep,
            lockstep.together("trying"),
        ):
            for n in (3, 2, 1):
                comm.all_reduce(torch.ones(n))
    except HessianError as caught:
        return f"{caught}, {sizes}"
    finally:
        del backend.all_reduce
    return "no error"


def test_a_collective_that_raises_is_made_up_for(ranks: Ranks) -> None:
    message = "while trying, rank 0: MemoryError: full, "
    results = ranks(2).run(left_inside, timeout=120)
    assert results == [message + "[3, 2]", message + "[3, 2, 1]"]


def beside_a_killed_rank(rank: int, port: int, said: str) -> None:
    """Rank 1, which does not have the store, is killed; rank 0 writes what it is told."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        with Lockstep(torch.device("cpu")) as lockstep, lockstep.together("trying"):
            dist.all_reduce(torch.ones(3))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(2))
    except LockstepError as error:
        Path(said).write_text(str(error))
    os._exit(0)


def test_a_rank_that_is_killed_ends_the_others_at_once(tmp_path: Path) -> None:
    """They waited ten minutes for its log."""
    port, said = free_port(), tmp_path / "said"
    processes = [
        context().Process(target=beside_a_killed_rank, args=(rank, port, str(said)))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert "a collective has failed under way" in said.read_text()
    assert "end the job" in said.read_text()


def beside_a_thread() -> tuple[str, int]:
    """A thread of rank 1 all-reduces on a group of its own, with one of rank 0, while rank 0 fails
    in a measurement that rank 1 goes on with."""
    import threading

    own, error = dist.new_group([0, 1]), "no error"
    sums: list[int] = []
    may_begin = threading.Event()

    def asynchronous() -> None:
        may_begin.wait()
        for _ in range(5):
            x = torch.ones(1)
            dist.all_reduce(x, group=own)
            sums.append(int(x))

    thread = threading.Thread(target=asynchronous)
    thread.start()
    try:
        with (
            Lockstep(torch.device("cpu"), communication()) as lockstep,
            lockstep.together("trying"),
        ):
            may_begin.set()
            if dist.get_rank() == 0:
                raise ValueError("left")
            thread.join()
            dist.all_reduce(torch.ones(2))
    except HessianError as caught:
        error = str(caught)
    thread.join()
    return error, sum(sums)


def test_collectives_of_another_thread_are_not_followed(ranks: Ranks) -> None:
    for result in ranks(2).run(beside_a_thread, timeout=120):
        assert result == ("while trying, rank 0: ValueError: left", 10)


def be_late_or_interrupted() -> None:
    """Rank 0 comes a second late to what is next; rank 1 gets SIGINT while it waits for it."""
    import os
    import signal
    import threading
    import time

    if dist.get_rank() == 0:
        time.sleep(1.0)
    else:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def interrupted() -> str:
    """Rank 1 gets SIGINT while it waits for rank 0, which is late, in a measurement."""
    import time

    try:
        with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
            be_late_or_interrupted()
            for _ in range(20):
                dist.all_reduce(torch.ones(2))
                reduce(torch.ones(2, dtype=torch.float64))
                time.sleep(0.1)
    except KeyboardInterrupt as caught:
        return str(caught)
    return "no error"


def test_an_interrupt_of_one_rank_interrupts_all(ranks: Ranks) -> None:
    other, mine = ranks(2).run(interrupted, timeout=120)
    assert other == "while measuring, rank 1: Signalled: received SIGINT" and mine == ""


def interrupted_entering() -> str:
    """Rank 1 gets SIGINT while it waits for rank 0, which is late, to enter a measurement."""
    import time

    try:
        with collective("calling", "cpu"):
            be_late_or_interrupted()
            with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
                dist.all_reduce(torch.ones(2))
                with lockstep.together("working"):
                    time.sleep(0.01)
    except KeyboardInterrupt as caught:
        return str(caught)
    return "no error"


def test_an_interrupt_while_ranks_enter_a_measurement_ends_it_on_all(ranks: Ranks) -> None:
    other, mine = ranks(2).run(interrupted_entering, timeout=120)
    assert other == "while measuring, rank 1: Signalled: received SIGINT" and mine == ""


def interrupted_leaving() -> tuple[str, str]:
    """Rank 1 gets SIGINT while it waits for rank 0, which is late, to leave a call; returns what
    it raises, and a sum of both ranks in the next one.
    """
    error = "no error"
    try:
        with collective("calling", "cpu"):
            be_late_or_interrupted()
    except KeyboardInterrupt as caught:
        error = f"KeyboardInterrupt {caught}"
    with collective("calling", "cpu"):
        return error, f"{reduce(torch.ones(3, dtype=torch.float64)).tolist()}"


def test_an_interrupt_while_ranks_leave_a_call_is_raised_once_they_have(ranks: Ranks) -> None:
    """As one that comes just after: rank 0 has left the call without an error."""
    said = ranks(2).run(interrupted_leaving, timeout=60)
    assert said == [("no error", "[2.0, 2.0, 2.0]"), ("KeyboardInterrupt ", "[2.0, 2.0, 2.0]")]


def forked_inside(held: bool) -> int:
    """The status with which a process ends that is forked in a measurement, and gets SIGTERM."""
    old = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    try:
        with Interrupts() as interrupts, interrupts.held() if held else contextlib.nullcontext():
            process = os.fork()
            if process == 0:
                with contextlib.suppress(BaseException):
                    signal.raise_signal(signal.SIGTERM)
                os._exit(1)
            return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.parametrize("held", [False, True])
def test_a_process_forked_in_a_measurement_has_the_handlers_of_the_script(
    ranks: Ranks, held: bool
) -> None:
    """A process of the loss's own, say, which is then terminated, and waited for."""
    assert ranks(1).run(forked_inside, held, timeout=60) == [7]


class Unprintable(ValueError):
    """An error that cannot say what it is."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def __str__(self) -> str:
        raise self.kind("what")


def unprintable(kind: type[BaseException]) -> list[str]:
    """Rank 1 fails with an error that cannot be printed, in a call and in a measurement."""
    errors = []
    for entered in (lambda: collective("calling", "cpu"), whole_measurement):
        try:
            with entered():
                if dist.get_rank() == 1:
                    raise Unprintable(kind)
                dist.all_reduce(torch.ones(1))
        except HessianError as caught:
            errors.append(str(caught))
    return errors


@contextlib.contextmanager
def whole_measurement() -> Iterator[None]:
    """A measurement that saves and restores nothing."""
    with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
        yield


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_an_error_that_cannot_be_printed_is_named_on_all_ranks(
    ranks: Ranks, kind: type[BaseException]
) -> None:
    said = f"rank 1: Unprintable, which raises {kind.__name__} when it is printed"
    found = ranks(2).run(unprintable, kind, timeout=60)
    assert found == [[f"while calling, {said}", f"while measuring, {said}"]] * 2


def exhausted() -> list[str]:
    """Rank 1 fails with a StopIteration in a measurement that is in a call."""
    try:
        with collective("calling", "cpu"), whole_measurement():
            if dist.get_rank() == 1:
                next(iter(()))
            dist.all_reduce(torch.ones(1))
    except Exception as caught:
        origin = caught.__cause__ and caught.__cause__.__cause__
        return [type(caught).__name__, str(caught), type(origin).__name__]
    return []


def test_a_stop_iteration_is_an_error_like_others(ranks: Ranks) -> None:
    """`contextlib` has ideas of its own of these, by which the ranks would raise two kinds."""
    other, own = ranks(2).run(exhausted, timeout=60)
    assert other[:2] == own[:2]
    assert own == ["MeasurementError", "while measuring, rank 1: StopIteration: ", "StopIteration"]


def failing_to_meet() -> list[str]:
    """Rank 1 fails on its way to the meeting at the end of a call, and of a measurement."""
    errors = []
    for entered in (lambda: collective("calling", "cpu"), whole_measurement):
        try:
            with contextlib.ExitStack() as fault, entered():
                dist.all_reduce(torch.ones(1))
                if dist.get_rank() == 1:
                    first = [MemoryError("full"), *[DEFAULT] * 9]
                    full = MagicMock(wraps=torch.tensor, side_effect=first)
                    fault.enter_context(patch.object(torch, "tensor", full))
            errors.append("no error")
        except HessianError as caught:
            errors.append(str(caught))
    return errors


def test_a_failure_on_the_way_to_the_last_meeting_is_raised_in_it(ranks: Ranks) -> None:
    said = "rank 1: MemoryError: full"
    found = ranks(2).run(failing_to_meet, timeout=60)
    assert found == [[f"while calling, {said}", f"while measuring, {said}"]] * 2


def open_files(count: int) -> tuple[list[int], list[int]]:
    """Open files and threads of this rank after each lockstep, with Python's collector off; some
    of them fail."""
    import gc
    import os

    files, threads = list[int](), list[int]()
    gc.collect()
    gc.disable()
    try:
        for number in range(count):
            with contextlib.suppress(HessianError), collective("trying", "cpu"):
                with Lockstep(torch.device("cpu"), communication()) as lockstep:
                    with lockstep.guarded():
                        dist.all_reduce(torch.ones(2))
                        if number % 4 == 3 and dist.get_rank() == 1:
                            raise MemoryError("full")
            agree(None, "counting")
            files.append(len(os.listdir("/proc/self/fd")))
            threads.append(len(os.listdir("/proc/self/task")))
    finally:
        gc.enable()
    return files, threads


def test_no_lockstep_leaves_files_or_threads_to_the_garbage_collector(ranks: Ranks) -> None:
    for files, threads in ranks(2).run(open_files, 24, timeout=120):
        # A client's connection ends on rank 0 when its server has noticed: some may still be there.
        assert min(files[12:]) <= max(files[:12]), files
        assert min(threads[12:]) <= max(threads[:12]), threads


def swallowed(wrapped: bool) -> list[str]:
    """Rank 1 leaves a measurement; the code of rank 0 catches what it then gets, and goes on."""
    errors = []
    for _ in range(2):
        try:
            with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
                if dist.get_rank() == 1 and not errors:
                    raise MemoryError("full")
                for _ in range(3):
                    try:
                        dist.all_reduce(torch.ones(1))
                        with lockstep.together("reducing"):
                            reduce(torch.ones(1, dtype=torch.float64))
                    except HessianError as caught:
                        if wrapped:
                            raise OSError("wrapped") from caught
            errors.append("no error")
        except (HessianError, OSError) as caught:
            errors.append(f"{type(caught).__name__}: {caught}")
    return errors


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_measurement_that_a_rank_has_left_is_over_even_where_its_error_is_caught(
    ranks: Ranks, wrapped: bool
) -> None:
    message = "MeasurementError: while measuring, rank 1: MemoryError: full"
    other, failed = ranks(2).run(swallowed, wrapped, timeout=120)
    assert failed == [message, "no error"]
    assert other == ["OSError: wrapped" if wrapped else message, "no error"]


def early(inside: bool) -> str:
    """Rank 1 fails in a call before the measurement in it that the others enter."""
    try:
        with collective("calling", "cpu"):
            if dist.get_rank() == 1 and not inside:
                raise ValueError("early")
            with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
                if dist.get_rank() == 1:
                    raise ValueError("early")
                dist.all_reduce(torch.ones(1))
    except HessianError as caught:
        return str(caught)
    return "no error"


@pytest.mark.parametrize("inside", [False, True])
def test_a_rank_that_fails_before_a_measurement_ends_it_as_one_that_fails_in_it(
    ranks: Ranks, inside: bool
) -> None:
    doing = "measuring" if inside else "calling"
    said = ranks(3).run(early, inside, timeout=120)
    assert said == [f"while {doing}, rank 1: ValueError: early"] * 3


def entering(what: str, nested: bool) -> list[str]:
    """Rank 1 fails once the ranks have met to enter a measurement; then they enter another."""
    full, errors = MagicMock(side_effect=MemoryError("full")), []
    for failing in (True, False):
        fault: Any = contextlib.nullcontext()
        if failing and dist.get_rank() == 1:
            fault = patch.object(*ENTERED[what], full)
        try:
            with collective("calling", "cpu") if nested else contextlib.nullcontext():
                lockstep = Lockstep(torch.device("cpu"), communication())
                with fault, lockstep:
                    dist.all_reduce(torch.ones(1))
                    with lockstep.guarded():
                        dist.all_reduce(torch.ones(1))
            errors.append("no error")
        except HessianError as caught:
            errors.append(str(caught))
    return errors


ENTERED = {
    "thread": (Log, "start"),
    "record": (Lockstep, "_recording"),
    "signals": (Interrupts, "__enter__"),
    "node": (lockstep_module, "node_of"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("what", ENTERED)
def test_a_failure_once_ranks_have_met_to_enter_is_of_the_measurement(
    ranks: Ranks, what: str, nested: bool
) -> None:
    said = ranks(3).run(entering, what, nested, timeout=120)
    assert said == [["while measuring, rank 1: MemoryError: full", "no error"]] * 3


def unfollowed(subgroup: bool) -> str:
    """Rank 0 fails where a collective of the others cannot be followed, and cannot log it."""
    from deepspeed import comm

    group = dist.new_group([1, 2])
    full = patch.object(lockstep_module.logger, "error", side_effect=RuntimeError("full"))

    def impossible() -> None:
        if subgroup:
            comm.all_reduce(torch.ones(1), group=group)
        else:
            dist.monitored_barrier()

    try:
        with (
            full,
            Lockstep(torch.device("cpu"), communication()) as lockstep,
            lockstep.together("trying"),
        ):
            if dist.get_rank() == 0:
                raise ValueError("first")
            impossible()
    except LockstepError as caught:
        # Here the job would end; the test lets the other ranks go on.
        if not subgroup:
            impossible()
        with pytest.raises(HessianError):
            agree(ValueError("first"), "trying")
        agree(None, "leaving")
        return str(caught)
    except HessianError:
        return ""
    return "no error"


@pytest.mark.parametrize(
    ("subgroup", "reason"),
    [
        (False, "monitored_barrier, number 0 of the step"),
        (True, "a group of 2 ranks, and the job's groups"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_reason(
    ranks: Ranks, subgroup: bool, reason: str
) -> None:
    message, *others = ranks(3).run(unfollowed, subgroup, timeout=120)
    assert others == ["", ""]
    assert message.startswith("rank 0 failed (ValueError: first) and cannot take part")
    assert reason in message and message.endswith("end the job")


def reduced(place: int | None, own_group: bool = False) -> tuple[list[str], int]:
    """Sums with a collective of the model between, of which rank 1 leaves before one or amid them.

    Returns the errors of three measurements, the second of which fails, and a later sum.
    """
    errors, numbers = [], torch.arange(3, dtype=torch.float64)
    for measurement in range(3):
        error = "no error"
        try:
            with Lockstep(torch.device("cpu"), communication()) as lockstep, lockstep.guarded():
                for number in range(4):
                    if (measurement, number, dist.get_rank()) == (1, place, 1):
                        raise MemoryError("full")
                    dist.all_reduce(torch.ones(5 + number))
                    total = reduce(numbers[: 1 + number % 3].clone())
                    assert total.tolist() == (2 * numbers[: 1 + number % 3]).tolist()
        except HessianError as caught:
            error = str(caught)
        errors.append(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    return errors, int(total)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_rank_that_fails_before_a_reduction_raises_on_all_in_it(ranks: Ranks, place: int) -> None:
    message = "while measuring, rank 1: MemoryError: full"
    for errors, total in ranks(2).run(reduced, place, timeout=60):
        assert errors == ["no error", message, "no error"] and total == 2


def signalled_in_a_failing_meeting() -> tuple[str, int]:
    """Rank 1 fails in a body; a signal comes to rank 0 while that is agreed on.

    Returns the error, and the sum of a later all-reduce.
    """
    import os

    from ds_hessian.ranks import agreement

    inner, error = agreement.gather_objects, ""

    def gathered(*args: Any) -> Any:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args)

    old = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with patch.object(agreement, "gather_objects", gathered), collective("measuring", "cpu"):
            with agreement.together("outer"):
                if dist.get_rank() == 1:
                    raise ValueError("first")
                with agreement.together("inner"):
                    pass
            dist.all_reduce(torch.ones(1))
    except BaseException as caught:
        error = str(caught)
    finally:
        signal.signal(signal.SIGTERM, old)
    total = torch.ones(1)
    dist.all_reduce(total)
    return error, int(total)


def test_a_signal_amid_the_meeting_that_tells_of_a_failure_leaves_no_rank_behind(
    ranks: Ranks,
) -> None:
    for error, total in ranks(2).run(signalled_in_a_failing_meeting, timeout=30):
        assert error and total == 2


def signalled_between(number: int, place: str) -> tuple[str, int]:
    """A signal whose handler raises comes to rank 1 amid the meeting before the guarded body, or
    amid one in it.

    Returns the error, and the sum of a later all-reduce.
    """

    def handler(*_: object) -> None:
        raise RuntimeError("time is up")

    inner, error = dist.all_reduce, ""

    def reduced(*args: Any, **kwargs: Any) -> Any:
        made = inner(*args, **kwargs)
        if dist.get_rank() == 1:
            signal.raise_signal(number)
        return made

    old = signal.signal(number, handler)
    try:
        with Lockstep(torch.device("cpu")) as lockstep:
            with patch.object(dist, "all_reduce", reduced if place == "before" else inner):
                with lockstep.together("saving the training state"):
                    pass
            with lockstep.guarded():
                with patch.object(dist, "all_reduce", reduced if place == "in" else inner):
                    agree(None, "measuring")
                dist.broadcast(torch.ones(1), 0)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        signal.signal(number, old)
    total = torch.ones(1)
    dist.all_reduce(total)
    return error, int(total)


@pytest.mark.parametrize("place", ["before", "in"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM", "SIGCHLD"])
def test_a_signal_amid_a_meeting_ends_the_measurement_on_all_ranks(
    ranks: Ranks, name: str, place: str
) -> None:
    found = ranks(2).run(signalled_between, getattr(signal, name), place, timeout=30)
    for error, total in found:
        assert error and total == 2, found
    assert any("time is up" in error for error, _ in found), found


def in_another_thread() -> str:
    """A measurement is entered while another thread measures."""
    errors = list[str]()

    def second() -> None:
        try:
            with Lockstep(torch.device("cpu")):
                pass
        except ConfigError as error:
            errors.append(str(error))

    with collective("measuring", "cpu"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    return errors[0]


def test_one_thread_measures_at_a_time(ranks: Ranks) -> None:
    for error in ranks(2).run(in_another_thread, timeout=30):
        assert "another thread of this process is measuring" in error


def left_to_the_collector() -> list[str]:
    """Types of the library's objects that a call of several meetings leaves in cycles."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with collective("measuring", "cpu"):
                agree(None, "measuring")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(thing) for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return [t.__qualname__ for t in found if t.__module__.startswith("ds_hessian")]


def test_a_call_leaves_no_cycles(ranks: Ranks) -> None:
    """Jobs run without Python's collector, or freeze what there is: memory grew with each call."""
    assert ranks(2).run(left_to_the_collector, timeout=30) == [[], []]


def _meetings_of_one() -> tuple[dict[str, int], list[float]]:
    """Collectives of meetings of a group of one rank, and the figures reduced over it."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with counted() as calls:
        agree(None, "trying", alone)
        figures = reduce(torch.tensor([1.0, 2.0], dtype=torch.float64), alone)
    with pytest.raises(HessianError, match="on purpose"):
        agree(HessianError("on purpose"), "trying", alone)
    return dict(calls), figures.tolist()


def test_a_rank_alone_meets_nobody(ranks: Ranks) -> None:
    """As every product of a job of one process would, once for each micro-batch and each sum."""
    for calls, figures in ranks(2).run(_meetings_of_one):
        assert not calls and figures == [1.0, 2.0]
