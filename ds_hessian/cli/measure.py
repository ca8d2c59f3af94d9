"""`ds-hessian measure`: the curvature of checkpoints, one after the other, into one run folder.

The heavy imports are inside of functions: the command line has to start fast.
"""

from __future__ import annotations

import logging
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from ds_hessian.cli.finished import Source, is_finished, note_finished, require_writable, source_of
from ds_hessian.cli.options import ANALYSIS, COUNT, DTYPE, PATH, SETTINGS
from ds_hessian.cli.request import Request, Work, checked
from ds_hessian.errors import ConfigError
from ds_hessian.table import echo, on_terminal

if TYPE_CHECKING:
    from ds_hessian.checkpoints import Checkpoint, Loading
    from ds_hessian.hessian import Hessian


@click.command()
@click.argument("checkpoints", nargs=-1, required=True, type=PATH, metavar="CHECKPOINT...")
@click.option(
    "--data",
    required=True,
    help="A file: .txt, .jsonl, .json, .parquet, .arrow, .csv; or module:function, which returns "
    "the micro-batches.",
)
@click.option("--model", metavar="MODULE:FUNCTION", help="Makes the module of the weights.")
@click.option("--loss", metavar="MODULE:FUNCTION", help="loss_fn(model, batch), if not its own.")
@click.option("--tokenizer", type=PATH, help="A folder; that of the checkpoint if left.")
@click.option("--column", default="text", show_default=True, help="Of the text in the file.")
@click.option("--samples", type=COUNT, default=32, show_default=True, help="Sequences in all.")
@click.option("--micro-batch-size", type=COUNT, default=4, show_default=True)
@click.option("--length", type=click.IntRange(min=2), help="Tokens of a sequence, at most.")
@ANALYSIS
@SETTINGS
@click.option("--config", type=PATH, help='A DeepSpeed configuration, for its "hessian" section.')
@click.option("--dtype", type=DTYPE, default="fp32", show_default=True)
@click.option("--ranks", "-r", type=COUNT, default=1, show_default=True, help="On this machine.")
@click.option(
    "--stage",
    type=click.Choice(["0", "3"]),
    default="0",
    show_default=True,
    help="0: every rank has the whole model; 3: ZeRO-3 shards it.",
)
@click.option("--output", "-o", type=PATH, default="hessian_out", show_default=True)
@click.option("--resume", is_flag=True, help="Keep what is unfinished, and continue from it.")
@click.option("--plan", "only_plan", is_flag=True, help="Say what it would cost, and stop.")
def measure(ranks: int, stage: str, **given: Any) -> None:
    """Measure CHECKPOINTs: folders of transformers, checkpoints of DeepSpeed, state dicts.

    The records of a series lie in one run folder, one subfolder for each step. More ranks than
    those of this machine are started by torchrun or deepspeed, with -m ds_hessian.cli measure ...
    """
    from ds_hessian.checkpoints import Sequences

    sequences = Sequences(
        samples=given.pop("samples"),
        micro_batch_size=given.pop("micro_batch_size"),
        length=given.pop("length"),
        column=given.pop("column"),
    )
    whole: Literal[0, 3] = 3 if stage == "3" else 0
    request = Request(sequences=sequences, stage=whole, **given)
    if ranks == 1 or _launched() > 1:
        work(request)
        return
    checked(request)  # before processes are started
    _launch(ranks)


def _launched() -> int:
    """Return how many ranks a launcher has started.

    Raises:
        ConfigError: the environment says no number.
    """
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal():
        raise ConfigError(
            f"the environment has WORLD_SIZE = {said!r}, which is no number of ranks: unset it, or "
            "start the ranks by torchrun or deepspeed"
        )
    return int(said)


def _launch(ranks: int) -> None:
    """Run the same command in so many processes, and end with their status."""
    import torch.multiprocessing as multiprocessing

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Where one rank refuses the input, its warning that it ends the others is no news.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        multiprocessing.start_processes(
            _rank, (ranks, port, sys.argv), nprocs=ranks, start_method="spawn"
        )
    except multiprocessing.ProcessExitedException as error:  # it has said why
        sys.exit(error.exit_code)


def _rank(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    """Be one of the ranks of this machine."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.argv = arguments
    runpy.run_module("ds_hessian.cli", run_name="__main__")


def work(request: Request) -> None:
    """Measure the checkpoints in this process, which may be one of several ranks. Collective.

    Raises:
        HessianError: what was given cannot be measured.
    """
    from ds_hessian.checkpoints import Loading
    from ds_hessian.checkpoints.models import named

    found = checked(request)
    loading = Loading(
        factory=None if request.model is None else named(request.model),
        dtype=request.dtype,
        stage=request.stage,
    )
    with _progress_shown(), _process_group(request.stage):
        states = _states(found)
        announced = False
        for number, (checkpoint, state) in enumerate(zip(found.series, states, strict=True), 1):
            place = f"{checkpoint.path} ({number} of {len(states)})"
            if state.finished:
                _say(f"{place}: done before")
                continue
            if announced and request.only_plan:
                break
            _one(found, checkpoint, loading, state.source, place, announce=not announced)
            announced = True


class _State(NamedTuple):
    """What a checkpoint's record is made of, and whether it is finished."""

    source: Source
    finished: bool


def _states(work: Work) -> list[_State]:
    """Return the state of each checkpoint, the same on every rank, before any is loaded.

    Raises:
        ConfigError: a folder holds the record of another checkpoint, or cannot be written; on
            other ranks MeasurementError.

    Collective.
    """
    from ds_hessian.checkpoints.measuring import this_device
    from ds_hessian.ranks import from_rank, together

    found, series = list[_State](), [checkpoint.path for checkpoint in work.series]
    with together(f"looking for what is in {work.request.output}", device=this_device()):
        if _first() and not work.request.only_plan:
            require_writable(work.request.output)
        for checkpoint in work.series if _first() else ():
            source = source_of(work, checkpoint)
            there = is_finished(work.folder(checkpoint), source, series)
            found.append(_State(source, work.request.resume and there))
    return from_rank(found, 0, this_device())


@contextmanager
def _progress_shown() -> Iterator[None]:
    """Show the lines of progress, and warnings, on stderr."""
    handler: logging.Handler = logging.StreamHandler()
    if on_terminal(sys.stderr):
        from rich.console import Console
        from rich.logging import RichHandler

        console = Console(stderr=True)
        handler = RichHandler(console=console, show_time=False, show_path=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
    ours, progress = (logging.getLogger(f"ds_hessian{part}") for part in ("", ".show.progress"))
    before = ours.propagate, progress.level
    ours.addHandler(handler)
    ours.propagate = False
    progress.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.propagate = before[0]
        progress.setLevel(before[1])


@contextmanager
def _process_group(stage: int) -> Iterator[None]:
    """Be a rank of the launcher's job, if there is one."""
    import torch
    import torch.distributed as dist

    if _launched() == 1 or dist.is_initialized():
        yield
        return
    if stage == 3:
        import deepspeed

        deepspeed.init_distributed(verbose=False)
    else:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _one(
    work: Work,
    checkpoint: Checkpoint,
    loading: Loading,
    source: Source,
    place: str,
    announce: bool,
) -> None:
    from ds_hessian.checkpoints.measuring import close, keep, opened, run
    from ds_hessian.ranks import together
    from ds_hessian.records import Savable

    request, folder, config = work.request, work.folder(checkpoint), work.config
    if request.resume:
        config = config.with_overrides(resume=folder / "unfinished")
    hessian = opened(checkpoint, loading, config)
    try:
        _use(hessian, request, checkpoint)
        if announce:
            _announce(work, hessian)
        if request.only_plan:
            return
        _say(f"{place}: {request.analysis}")
        record = run(hessian, request.analysis, **work.arguments)
        if isinstance(record, Savable):
            keep(hessian, record, request.output)
            with together(f"noting what is in {folder}", device=hessian.backend.space.device):
                if hessian.rank == 0:
                    note_finished(folder, source, record.kind)
        if hessian.rank == 0:
            echo(click.format_filename(folder), record.table(), "")
    finally:
        close(hessian)


def _use(hessian: Hessian, request: Request, checkpoint: Checkpoint) -> None:
    from ds_hessian.checkpoints.measuring import use_file
    from ds_hessian.checkpoints.models import named
    from ds_hessian.ranks import together

    loss = None if request.loss is None else named(request.loss)
    if request.data_file is not None:
        use_file(hessian, request.data_file, checkpoint, request.sequences, loss, request.tokenizer)
        return
    space = hessian.backend.space
    with together(f"making the micro-batches of {request.data}", device=space.device):
        batches = list(named(request.data)())
        mine = batches[space.rank :: space.world_size]
    hessian.use(mine, loss)


def _announce(work: Work, hessian: Hessian) -> None:
    """Say what a measurement costs: memory by plan, time by that of one gradient. Collective."""
    from ds_hessian.analyses import plan_here, share_of
    from ds_hessian.backends.restricted import restricted
    from ds_hessian.planning import ACCELERATOR, CPU, times

    config = hessian.config
    backend = restricted(hessian.backend, config.parameters)
    analysis, share = work.analysis.prepared(backend, config), share_of(backend)
    for _ in range(2):  # the first one in a process is slow, and would be off by much
        with hessian.measuring() as operator:
            gradient = operator.cost.gradient_seconds
    parts: list[str] = [plan_here(analysis, backend, config).table()]
    machine = CPU if share.tier == "host" else ACCELERATOR
    try:
        count = analysis.products(config)
        parts.append(times.plan_time(gradient, share, machine, config, count).table())
    except ConfigError:  # the number of products depends on the model
        parts.append(
            f"time: {times.spelled(gradient)} for one gradient; two and more for a product"
        )
    number = len(work.series)
    _say(*parts, *([f"each of {number} checkpoints"] if number > 1 else []))


def _say(*texts: str) -> None:
    if _first():
        echo(*texts, error=True)


def _first() -> bool:
    """Return whether this process is the first rank, of those that there are now."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
