"""A function on the ranks of a gloo job of its own."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _rank(
    function: Callable[[], Any], rank: int, world_size: int, port: int, pipe: Connection
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )
    import logging
    import warnings

    import deepspeed
    import torch

    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    try:
        pipe.send((True, function()))
    except BaseException:  # shown by the process that started this one
        pipe.send((False, traceback.format_exc()))


def run(function: Callable[[], Any], world_size: int) -> Any:
    """Call a function on every rank; returns what rank 0 returned.

    Raises:
        RuntimeError: it raised on some rank, with the traceback, or a rank died.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(world_size):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_rank, args=(function, rank, world_size, port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        started.append((mine, process))
    try:
        results = [pipe.recv() for pipe, _ in started]
    except EOFError:
        raise RuntimeError("a rank died") from None
    finally:
        for _, process in started:
            process.kill()
            process.join()
        for left in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):  # of its shared-memory op
            left.unlink()
    for good, value in results:
        if not good:
            raise RuntimeError(value)
    return results[0][1]
