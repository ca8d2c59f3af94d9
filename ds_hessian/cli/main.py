"""The commands, and how they fail: `ds-hessian: <one line>` on stderr and exit status 2.

What imports torch is imported in the commands: help, schema and wrong calls take no seconds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ds_hessian.cli.measure import measure
from ds_hessian.cli.options import ANALYSIS, AXES, COUNT, DTYPE, MODEL, PATH, SETTINGS
from ds_hessian.errors import HessianError
from ds_hessian.table import echo
from ds_hessian.version import __version__

if TYPE_CHECKING:
    from ds_hessian.memory import Tier

BROKEN_INPUT = 2

FOLDER = click.argument("folder", type=PATH)


def main() -> NoReturn:
    """Run the command line; ends the process."""
    call: dict[str, str | None] = {}
    try:
        status = commands.main(standalone_mode=False, obj=call)
    except click.ClickException as error:
        _refuse(call, error.format_message())
    except (HessianError, OSError, ImportError) as error:
        _refuse(call, str(error))
    except MemoryError:
        _refuse(call, "the files are larger than this machine's memory")
    except click.Abort:
        sys.exit(130)
    sys.exit(status or 0)


def _refuse(call: Mapping[str, str | None], message: str) -> NoReturn:
    # Ranks of a measurement have the same to say; other commands may run where a job left a RANK.
    if os.environ.get("RANK", "0") == "0" or call.get("command") != measure.name:
        echo("ds-hessian: " + " ".join(message.split()), error=True)
    sys.exit(BROKEN_INPUT)


@click.group(no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ds-hessian")
@click.option("--local_rank", hidden=True, expose_value=False)  # of the deepspeed launcher
@click.pass_context
def commands(context: click.Context) -> None:
    """Measure checkpoints, look at Hessian spectra, check this machine, test a training script.

    A FOLDER is that of one spectrum (with spectrum.json), or of a run, with one such folder for
    each measured step.
    """
    context.ensure_object(dict)["command"] = context.invoked_subcommand


commands.add_command(measure)


@commands.command()
@FOLDER
def table(folder: Path) -> None:
    """Print the table of every spectrum in FOLDER."""
    from ds_hessian.cli.folders import spectra_in

    for path, spectrum in spectra_in(folder).items():
        echo(click.format_filename(path), spectrum.table(), "")


@commands.command(hidden=True)
@FOLDER
@click.pass_context
def report(context: click.Context, folder: Path) -> None:
    """Print the table of every spectrum in FOLDER: the former name of `table`."""
    context.invoke(table, folder=folder)


@commands.command()
@FOLDER
@click.option(
    "--format",
    "kind",
    type=click.Choice(["png", "svg", "pdf"]),
    default="png",
    show_default=True,
    help="Of the picture.",
)
def plot(folder: Path, kind: str) -> None:
    """Draw every spectrum in FOLDER, beside its files."""
    from ds_hessian.cli.folders import spectra_in

    for path, spectrum in spectra_in(folder).items():
        echo(click.format_filename(spectrum.plot(path / f"spectrum.{kind}")))


@commands.command()
@click.argument("folders", nargs=-1, required=True, type=PATH)
@click.option(
    "--output",
    "-o",
    default="comparison.png",
    show_default=True,
    type=PATH,
    help="Where the picture goes; .png, .svg or .pdf.",
)
def compare(folders: tuple[Path, ...], output: Path) -> None:
    """Put the spectra of FOLDERS side by side: runs, or training steps of one run."""
    from ds_hessian.cli.folders import named_spectra
    from ds_hessian.records import Comparison

    _require_end(output, ".png", ".svg", ".pdf")
    comparison = Comparison(named_spectra(folders))
    echo(comparison.table())
    echo(f"picture: {click.format_filename(comparison.plot(output))}")


@commands.command()
@FOLDER
@click.option(
    "--output",
    "-o",
    type=PATH,
    help="Where the page goes, .html or .htm; FOLDER/<name of FOLDER>.html if left.",
)
def page(folder: Path, output: Path | None) -> None:
    """Make one HTML file of everything in FOLDER, to open in a browser, with or without network."""
    from ds_hessian.show.page import page_of, run_in, write_page

    if output is not None:
        _require_end(output, ".html", ".htm")
    written = write_page(run_in(folder), output or page_of(folder))
    echo(click.format_filename(written))


@commands.command()
@click.option(
    "--config",
    type=PATH,
    help='A DeepSpeed configuration whose "hessian" section is to be checked too.',
)
def doctor(config: Path | None) -> int:
    """Say what runs on this machine and what does not: versions, kernels, dtypes, determinism."""
    from ds_hessian.cli.doctor import examine

    diagnosis = examine(config)
    echo(*diagnosis.tables())
    return 0 if diagnosis.healthy else 1


@commands.command()
def schema() -> None:
    """Print the JSON schema of the "hessian" section, for editors that complete and check it."""
    from ds_hessian.config import schema

    echo(json.dumps(schema(), indent=2))


def _require_end(output: Path, *ends: str) -> None:
    """Refuse another file, such as a record or a device, in whose place the output would be."""
    if output.suffix not in ends:
        *others, last = ends
        text = f"{', '.join(others)} or {last}"
        raise click.UsageError(f"--output must end in {text}, got {click.format_filename(output)}")


LARGEST = 1e15
"""No figure of a machine is larger, or smaller than its inverse."""


class Figure(click.FloatRange):
    """A number in a range, which NaN is not, although it is not outside of it either."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: Any) -> float:
        """The number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


POSITIVE = Figure(min=1 / LARGEST, max=LARGEST)


class Number(click.ParamType):
    """A count as people write it: 7000000000, 7e9 or 7B."""

    name = "number"
    UNITS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}

    def convert(self, value: object, param: click.Parameter | None, ctx: object) -> int:
        """The integer."""
        text = str(value)
        unit = self.UNITS.get(text[-1:], None)
        try:
            number = float(text[:-1] if unit else text) * (unit or 1)
        except ValueError:
            number = 0.0
        if not (math.isfinite(number) and number >= 1):
            self.fail(f"{text!r} is not a number of at least 1, such as 7e9 or 7B", param)
        return round(number)


class Tiered(click.ParamType):
    """A figure of one tier: accelerator=40."""

    name = "tier=number"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: object
    ) -> tuple[str, float]:
        """The tier and the figure."""
        from ds_hessian.memory import TIERS

        tier, _, text = str(value).partition("=")
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if tier not in TIERS or not 1 / LARGEST <= number <= LARGEST:
            self.fail(f"{value!r} is not one of {', '.join(TIERS)} and a number: host=64", param)
        return tier, number


@commands.command()
@click.option("--parameters", "-n", type=Number(), help="Trainable ones: 7e9, 7B.")
@MODEL
@click.option("--ranks", "-r", type=COUNT, required=True, help="Of the job.")
@click.option(
    "--config",
    type=PATH,
    help='A DeepSpeed configuration, whose stage, dtype, offload and "hessian" section count.',
)
@click.option("--stage", type=click.IntRange(0, 3), help="Of ZeRO; 3 if nothing says so.")
@click.option("--dtype", type=DTYPE, help="Of the passes; bf16.")
@click.option("--offload-optimizer", is_flag=True, default=None, help="To the CPU.")
@click.option("--offload-parameters", is_flag=True, default=None, help="To the CPU.")
@click.option("--hpz", "secondary", type=COUNT, help="Ranks of a secondary copy (ZeRO++).")
@AXES
@click.option(
    "--recompute",
    type=click.Choice(["none", "selective", "full"]),
    help="Activations that backward computes anew: of attention, of all layers.",
)
@click.option("--cpu", is_flag=True, help="A job without accelerators.")
@ANALYSIS
@SETTINGS
@click.option("--products", type=COUNT, help="Their number, where it is not that of the settings.")
@click.option(
    "--seconds-per-micro-batch",
    type=POSITIVE,
    help="Of forward and backward, on one stage of a pipeline; measured.",
)
@click.option("--tokens", type=COUNT, help="Of a micro-batch, where no time is measured.")
@click.option("--tflops", type=POSITIVE, help="That a rank reaches (not its peak).")
@click.option("--network", type=POSITIVE, help="GB/s that a rank sends to other nodes.")
@click.option("--node-network", type=POSITIVE, help="GB/s that it sends inside of its node.")
@click.option("--latency", type=POSITIVE, help="Of a small message, in microseconds.")
@click.option(
    "--overlap",
    type=Figure(0, 1),
    default=0.0,
    show_default=True,
    help="Share of a micro-batch's communication that operations hide.",
)
@click.option(
    "--bandwidth", type=Tiered(), multiple=True, help="TIER=GB/s from a tier to a rank's compute."
)
@click.option(
    "--free", type=Tiered(), multiple=True, help="TIER=GiB free for each rank beside training."
)
@click.option("--price", type=POSITIVE, help="Of a rank for an hour.")
def plan(
    parameters: int | None,
    ranks: int,
    config: Path | None,
    megatron: Path | None,
    cpu: bool,
    analysis: str,
    settings: dict[str, object],
    products: int | None,
    seconds_per_micro_batch: float | None,
    tokens: int | None,
    tflops: float | None,
    network: float | None,
    node_network: float | None,
    latency: float | None,
    overlap: float,
    bandwidth: tuple[tuple[Tier, float], ...],
    free: tuple[tuple[Tier, float], ...],
    price: float | None,
    **sizes: Any,
) -> int:
    """Say what a measurement takes in memory, time and money, before there is a job.

    A TIER is accelerator, host or disk; vectors of a job on the CPU are on the host. Ends with 1
    where it would not fit.
    """
    from ds_hessian.cli.jobs import job_of
    from ds_hessian.cli.plan import Passes, forecast, machine_of, settings_of

    job = job_of(
        {**sizes, "accelerator": not cpu},
        ranks=ranks,
        parameters=parameters,
        config=config,
        arguments=megatron,
    )
    section, planned = settings_of(config, analysis, settings)
    machine = machine_of(
        job, dict(bandwidth), network=network, node_network=node_network, latency=latency
    )
    found = forecast(
        job,
        section,
        planned,
        Passes(seconds_per_micro_batch, tokens, tflops, overlap),
        machine,
        products=products,
        price_per_hour=price,
        free=dict(free),
    )
    echo(*found.tables())
    return 0 if found.missing is None else 1


@commands.command(
    "self-test",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--ranks", type=COUNT, help="On this machine; all there are if left.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=29500,
    show_default=True,
    help="Of the job's store.",
)
@click.argument("script", type=PATH)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def self_test(ranks: int | None, port: int, script: Path, arguments: tuple[str, ...]) -> int:
    """Run SCRIPT to its first steps under the deepspeed launcher, and test its Hessian there.

    SCRIPT is left unmodified and gets the ARGUMENTS. See `ds_hessian.self_test`.
    """
    if not script.is_file():
        raise click.UsageError(f"no such script: {script}")
    if importlib.util.find_spec("deepspeed") is None:
        raise click.UsageError(
            "self-test starts SCRIPT by the launcher of DeepSpeed, which is not installed: pip "
            "install deepspeed; in plain torch call hessian.self_test()"
        )
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", str(port)]
    if ranks is not None:
        launcher += ["--num_accelerators", str(ranks)]
    job = ["--module", "ds_hessian.self_test", str(script), *arguments]
    return subprocess.run(launcher + job).returncode
