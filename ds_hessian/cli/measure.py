"""`ds-hessian measure`: the curvature of checkpoints, one after the other, into one run folder.

The heavy imports are inside of functions: the command line has to start fast.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from ds_hessian.errors import ConfigError

if TYPE_CHECKING:
    from ds_hessian.checkpoints import Checkpoint, Loading, Sequences
    from ds_hessian.config import HessianConfig
    from ds_hessian.hessian import Hessian

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command was asked for.

    Attributes:
        checkpoints: The paths.
        data: A file, or `module:function` that returns the micro-batches of all ranks.
        model: `module:function` that makes the module; None for that of the checkpoint.
        loss: `module:function`, the loss; None for the model's own.
        tokenizer: Folder of a tokenizer; None for that of the checkpoint.
        sequences: The part of the file.
        analysis: What is measured.
        settings: Arguments of the analysis, and values of the configuration.
        config: The configuration file whose "hessian" section counts; None without one.
        dtype: Of the passes.
        stage: Of ZeRO.
        output: Folder of the run.
        resume: Whether to keep the state of what is unfinished, and to continue from it.
        only_plan: Whether to stop after saying what it costs.
    """

    checkpoints: tuple[Path, ...]
    data: str
    model: str | None
    loss: str | None
    tokenizer: Path | None
    sequences: Sequences
    analysis: str
    settings: dict[str, object]
    config: Path | None
    dtype: Literal["fp32", "bf16", "fp16"]
    stage: Literal[0, 3]
    output: Path
    resume: bool
    only_plan: bool


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
@click.option("--analysis", default="spectrum", show_default=True, help="What is measured.")
@click.option(
    "--set",
    "-s",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting of the hessian section, or an argument of the analysis, such as k=4.",
)
@click.option("--config", type=PATH, help='A DeepSpeed configuration, for its "hessian" section.')
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True
)
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
def measure(ranks: int, settings: tuple[str, ...], stage: str, **given: Any) -> None:
    """Measure CHECKPOINTs: folders of transformers, checkpoints of DeepSpeed, state dicts.

    The records of a series lie in one run folder, one subfolder for each step. More ranks than
    those of this machine are started by torchrun or deepspeed, with -m ds_hessian.cli measure ...
    """
    from ds_hessian.checkpoints import Sequences
    from ds_hessian.cli.plan import assignments

    sequences = Sequences(
        samples=given.pop("samples"),
        micro_batch_size=given.pop("micro_batch_size"),
        length=given.pop("length"),
        column=given.pop("column"),
    )
    parsed = assignments(settings)
    whole: Literal[0, 3] = 3 if stage == "3" else 0
    request = Request(sequences=sequences, settings=parsed, stage=whole, **given)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or launched > 1:
        work(request)
        return
    _check(request)  # before processes are started
    _launch(ranks)


def _check(request: Request) -> tuple[list[Checkpoint], HessianConfig]:
    """Return the checkpoints and the settings; refuse what can be refused without loading.

    Raises:
        ConfigError: a setting is wrong, or there is no such data.
        ResultError: something is no checkpoint.
    """
    from ds_hessian.checkpoints import series_of
    from ds_hessian.checkpoints.measuring import offered
    from ds_hessian.cli.plan import settings_of

    series = series_of(request.checkpoints)
    if request.analysis not in offered():
        raise ConfigError(
            f"there is no measurement {request.analysis!r}; there are {', '.join(offered())}"
        )
    texts = [f"{name}={json.dumps(value)}" for name, value in request.settings.items()]
    config, _ = settings_of(request.config, request.analysis, texts)
    if not _is_function(request.data) and not Path(request.data).exists():
        raise ConfigError(f"no such data: {request.data}")
    return series, config


def _is_function(text: str) -> bool:
    return ":" in text and not Path(text).exists()


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

    series, config = _check(request)
    loading = Loading(
        factory=None if request.model is None else named(request.model),
        dtype=request.dtype,
        stage=request.stage,
    )
    with _progress_shown(), _process_group(request.stage):
        for number, checkpoint in enumerate(series, start=1):
            place = f"{checkpoint.path} ({number} of {len(series)})"
            _one(request, checkpoint, loading, config, place, announce=number == 1)
            if request.only_plan:
                break


@contextmanager
def _progress_shown() -> Iterator[None]:
    """Show the lines of progress, and warnings, on stderr."""
    handler = logging.StreamHandler()
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

    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
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
    request: Request,
    checkpoint: Checkpoint,
    loading: Loading,
    config: HessianConfig,
    place: str,
    announce: bool,
) -> None:
    from ds_hessian.checkpoints.measuring import close, opened

    folder = request.output / f"step_{checkpoint.step or 0:06d}"
    if request.resume:
        config = config.with_overrides(resume=str(folder / "unfinished"))
    hessian = opened(checkpoint, loading, config)
    try:
        _measure(request, checkpoint, hessian, folder, place, announce)
    finally:
        close(hessian)


def _measure(
    request: Request,
    checkpoint: Checkpoint,
    hessian: Hessian,
    folder: Path,
    place: str,
    announce: bool,
) -> None:
    from ds_hessian.checkpoints.measuring import run
    from ds_hessian.ranks import gather_objects, together
    from ds_hessian.records import Measured

    first, device = hessian.rank == 0, hessian.backend.space.device
    _use(hessian, request, checkpoint)
    source = _source(request, checkpoint, hessian)
    kept = folder / f"{request.analysis}.source.json"
    with together("looking for what is done", device=device):
        done = request.resume and kept.is_file() and kept.read_text(encoding="utf-8") == source
    if gather_objects(done)[0]:
        _say(first, f"{place}: done before")
        return
    if announce:
        _announce(request, hessian, first)
    if request.only_plan:
        return
    _say(first, f"{place}: {request.analysis}")
    record = run(hessian, request.analysis, **request.settings)
    if isinstance(record, Measured):
        hessian.save(record, folder)
        with together(f"writing {kept}", device=device):
            if first:
                kept.write_text(source, encoding="utf-8")
    if first:
        click.echo(f"{click.format_filename(folder)}\n{record.table()}\n")


def _use(hessian: Hessian, request: Request, checkpoint: Checkpoint) -> None:
    from ds_hessian.checkpoints.measuring import use_file
    from ds_hessian.checkpoints.models import named
    from ds_hessian.ranks import together

    loss = None if request.loss is None else named(request.loss)
    if not _is_function(request.data):
        use_file(hessian, request.data, checkpoint, request.sequences, loss, request.tokenizer)
        return
    space = hessian.backend.space
    with together(f"making the micro-batches of {request.data}", device=space.device):
        batches = list(named(request.data)())
        mine = batches[space.rank :: space.world_size]
    hessian.use(mine, loss)


def _source(request: Request, checkpoint: Checkpoint, hessian: Hessian) -> str:
    """Return what a finished record is recognised by, as JSON text."""
    files = [checkpoint.folder, *checkpoint.folder.rglob("*")]
    newest = max(path.stat().st_mtime_ns for path in files if path.is_file())
    found = {
        "checkpoint": str(checkpoint.path.resolve()),
        "modified": newest,
        "analysis": request.analysis,
        "settings": request.settings,
        "configuration": hessian.config.model_dump(mode="json"),
        "data": request.data,
        "sequences": vars(request.sequences),
        "dtype": request.dtype,
        "loss": request.loss,
    }
    return json.dumps(found, indent=1, default=str)


def _announce(request: Request, hessian: Hessian, first: bool) -> None:
    """Say what a measurement costs: memory by plan, time by that of one gradient. Collective."""
    from ds_hessian.analyses import analysis_of, share_of
    from ds_hessian.planning import times

    analysis, overrides = analysis_of(request.analysis, request.settings)
    config = hessian.config.with_overrides(**overrides)
    share = share_of(hessian.backend)
    with hessian.measuring(**overrides) as operator:
        gradient = operator.cost.gradient_seconds
    lines = [hessian.memory_plan(request.analysis, **request.settings).table()]
    machine = times.CPU if share.tier == "host" else times.ACCELERATOR
    try:
        count = analysis.products(config)
        lines.append(times.plan_time(gradient, share, machine, config, count).table())
    except ConfigError:  # the number of products depends on the model
        lines.append(
            f"time: {times.spelled(gradient)} for one gradient; two and more for a product"
        )
    number = len(request.checkpoints)
    lines.append(f"each of {number} checkpoints" if number > 1 else "")
    _say(first, "\n".join(filter(None, lines)))


def _say(first: bool, text: str) -> None:
    if first:
        click.echo(text, err=True)
