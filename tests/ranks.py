"""Run functions on several ranks of a real gloo job, without paying for imports every time.

Ranks are forked from one process that has imported torch, DeepSpeed and Megatron (`imported.py`),
and take calls until their pool is closed.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import io
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

READY = "ready"  # what a rank sends when it has joined the job
STARTS = 3  # attempts to start the ranks of a pool
PORTS = set[int]()  # that jobs of this process were given


def free_port() -> int:
    """A TCP port that is free now, below those that connections are given."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            PORTS.add(port)
            return port


def remove_buffers() -> None:
    """Remove the shared memory of jobs that have ended: DeepSpeed leaves 69 MiB for each rank."""
    for port in PORTS:
        for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            path.unlink(missing_ok=True)


def context() -> Any:
    """How processes of tests are started: forked from one that has imported everything."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.imported"])
    return found


class _Pickler(ForkingPickler):
    """Of tensors it has their bytes: torch opens a file and a socket for each, which takes 1 ms."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (content, value.dtype, value.shape)


def _tensor(content: bytes, dtype: Any, shape: Any) -> Any:
    import torch

    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _send(pipe: Connection, message: Any) -> None:
    content = io.BytesIO()
    _Pickler(content, 5).dump(message)
    pipe.send_bytes(content.getbuffer())


def run_alone(
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    environment: dict[str, str],
    timeout: float = 300.0,
) -> None:
    """Call `function` in a process of its own, in a folder; it must end without an error.

    Raises:
        AssertionError: It raised, with the end of what it printed, or did not come back.
    """
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        process = context().Process(
            target=_alone, args=(function, args, str(folder), environment, output.name)
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
        process.join()
        assert process.exitcode == 0, f"{process.exitcode}: {output.read()[-4000:]}"


def _alone(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    environment: dict[str, str],
    output: str,
) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    with open(output, "ab", buffering=0) as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*args)


def _references() -> dict[Any, int]:
    """The process groups beside the default one, and how often each is referred to."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    found = {}
    for group in list(_world.pg_map):
        if group is not dist.group.WORLD:
            found[group] = sys.getrefcount(group)
    return found


def _end_groups(alone: int) -> None:
    """End the process groups to which nothing refers, whose threads poll 100 times a second.

    Args:
        alone: Number of references to a group that only torch.distributed keeps.
    """
    import torch.distributed as dist

    for group, references in _references().items():
        if references <= alone:
            dist.destroy_process_group(group)


def _serve(
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
    stacks: str,
    environment: dict[str, str],
) -> None:
    import tests.imported  # noqa: F401  # where the rank is not forked

    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"))  # noqa: SIM115  # until the end
    os.environ.update(
        environment,  # of the test process now: it is forked from an older one
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # As in a job of a terminal: a background process of a shell begins with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import logging

    import deepspeed
    import torch
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    name = "_PartitionedParameterCoordinator__params_to_release"
    traced = getattr(PartitionedParameterCoordinator, name)
    released = inspect.getclosurevars(traced).nonlocals["func"]  # an unlimited cache
    # DeepSpeed refuses fp16 on processors without fast fp16 matrix products; torch has slow ones.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Its shared-memory op serves inference alone: loading it asks ninja, and takes 66 MiB.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    made = [torch.distributed.new_group(list(range(world_size)))]
    alone = _references()[made[0]] - 1
    torch.distributed.destroy_process_group(made.pop())
    pipe.send(READY)
    modules = 0
    while True:
        call = pipe.recv()
        if call is None:
            return
        function, args, kwargs = call
        if function is None:
            _end_groups(alone)
            continue
        try:
            _send(pipe, (True, function(*args, **kwargs)))
        except BaseException:  # the test process shows it
            _send(pipe, (False, traceback.format_exc()))
        # Engines that are alive keep gloo's process groups, whose threads poll all the time; they
        # are by cycles, and because DeepSpeed keeps all that it has made under ZeRO-3.
        FWD_MODULE_STACK.clear()
        released.cache_clear()
        gc.collect()
        # What was imported is not looked at again.
        if len(sys.modules) > modules + 50:
            modules = len(sys.modules)
            gc.freeze()


class RankPool:
    """`world_size` processes of one job, kept for many calls.

    A call that raises leaves the pool usable only if it raised on every rank; a call that hangs
    kills it. `starter`: the context of multiprocessing; forked from `context()` unless given.
    """

    def __init__(self, world_size: int, starter: Any = None) -> None:
        self.stacks = tempfile.TemporaryDirectory(prefix="ds_hessian_ranks")
        for _ in range(STARTS):
            self._start(world_size, starter or context())
            if self._ready():
                return
            self._kill()
        self.stacks.cleanup()
        raise AssertionError(f"{world_size} ranks did not start in {STARTS} attempts")

    def _start(self, world_size: int, starter: Any) -> None:
        port = free_port()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            mine, theirs = starter.Pipe()
            process = starter.Process(
                target=_serve,
                args=(rank, world_size, port, theirs, self._stack_file(rank), dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()  # so that the end of the rank is the end of the pipe
            self.pipes.append(mine)
            self.processes.append(process)

    def _ready(self) -> bool:
        """Whether every rank has joined the job: gloo now and then loses a connection there."""
        missing: list[Any] = list(self.pipes)
        try:
            while missing:
                for pipe in wait(missing):
                    assert isinstance(pipe, Connection) and pipe.recv() == READY
                    missing.remove(pipe)
        except (EOFError, ConnectionError):
            return False
        return True

    def _stack_file(self, rank: int) -> str:
        return str(Path(self.stacks.name) / f"{rank}")

    def where(self, rank: int) -> str:
        """The stacks of all threads of a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        return Path(self._stack_file(rank)).read_text()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 600.0, **kwargs: Any
    ) -> list[Any]:
        """Call `function` on every rank; returns the results by rank.

        Raises:
            AssertionError: it raised somewhere (with the remote traceback), or hung (with the
                stacks of the ranks that did not come back, and what the others raised).
        """
        self.begin(function, *args, **kwargs)
        results: dict[Connection, tuple[bool, Any]] = {}
        while len(results) < len(self.pipes):
            ready = wait([p for p in self.pipes if p not in results], timeout=timeout)
            if not ready:
                found = [
                    f"rank {r} hangs:\n{self.where(r)}"
                    if p not in results
                    else f"rank {r} came back"
                    if results[p][0]
                    else f"rank {r} raised:\n{results[p][1]}"
                    for r, p in enumerate(self.pipes)
                ]
                self.close()
                raise AssertionError("\n".join([f"{function.__name__} hung", *found]))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                results[pipe] = pipe.recv()
        for pipe in self.pipes:  # no rank is in a collective any more
            pipe.send((None, (), {}))
        for rank, pipe in enumerate(self.pipes):
            good, value = results[pipe]
            if not good:
                raise AssertionError(f"rank {rank} raised:\n{value}")
        return [results[pipe][1] for pipe in self.pipes]

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Call `function` on every rank without waiting, in a pool that is closed meanwhile."""
        for pipe in self.pipes:
            _send(pipe, (function, args, kwargs))

    def threads(self) -> int:
        """The number of threads of the first rank; 0 where the system does not say."""
        tasks = Path(f"/proc/{self.processes[0].pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def close(self) -> None:
        """End the processes."""
        self._kill()
        self.stacks.cleanup()


def pools_of_ranks(threads: int | None = None) -> Iterator[Callable[[int], RankPool]]:
    """For a fixture: `get(n)`, a pool of n ranks, started at first use and again after a hang.

    Args:
        threads: A pool whose ranks have more is started anew; None for any number. It must not
            keep anything between calls.
    """
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        for size, pool in list(pools.items()):
            busy = threads is not None and pool.threads() > threads
            if busy or not all(p.is_alive() for p in pool.processes):
                pools.pop(size).close()
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()
