"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ds_hessian.errors import ConfigError

COUNT = click.IntRange(min=1)
PATH = click.Path(path_type=Path)
DTYPE = click.Choice(["fp32", "bf16", "fp16"])


def assignments(texts: Sequence[str]) -> dict[str, object]:
    """Return `{name: value}` of texts `name=value`, whose values are JSON or else strings.

    Raises:
        ConfigError: one is not of this form.
    """
    from ds_hessian.config import value_of

    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, got {text!r}")
        given[name] = value_of(value)
    return given


ANALYSIS = click.option(
    "--analysis", default="spectrum", show_default=True, help="What is measured."
)
SETTINGS = click.option(
    "--set",
    "-s",
    "settings",
    multiple=True,
    callback=lambda context, option, texts: assignments(texts),
    metavar="NAME=VALUE",
    help="A setting of the hessian section, or an argument of the analysis, such as k=4.",
)

STYLES = ("gpt", "llama")


def _all(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds all of the options, in their order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


MODEL = _all(
    click.option("--layers", type=COUNT, help="Of the model, whose sizes replace --parameters."),
    click.option("--hidden", type=COUNT, help="Its width."),
    click.option("--heads", type=COUNT, help="Of attention."),
    click.option("--vocabulary", type=COUNT, help="Rows of the embedding, padded."),
    click.option("--sequence", type=COUNT, help="Tokens of a sequence."),
    click.option("--groups", type=COUNT, help="Heads of keys and values."),
    click.option("--head-width", type=COUNT, help="Where it is not hidden / heads."),
    click.option("--ffn", type=COUNT, help="Width of the MLP; 4 hidden."),
    click.option("--experts", type=COUNT, help="Of each layer."),
    click.option("--active", type=COUNT, help="Experts that a token meets; 2."),
    click.option("--expert-ffn", type=COUNT, help="Width of an expert; that of the MLP."),
    click.option(
        "--style",
        type=click.Choice(STYLES),
        help="gpt (the default): biases, LayerNorm, GELU, a tied embedding. llama: no biases, "
        "RMSNorm, a gated MLP, an output layer of its own.",
    ),
)
"""Sizes of a model, by the names of the fields of `ds_hessian.planning.Shape`."""

AXES = _all(
    click.option(
        "--megatron",
        type=PATH,
        help="Megatron's arguments, as JSON or as on its command line: axes, model, dtype.",
    ),
    click.option("--tensor", type=COUNT, help="Tensor-parallel size, of a Megatron job."),
    click.option("--pipeline", type=COUNT, help="Pipeline stages."),
    click.option("--virtual", type=COUNT, help="Virtual stages of each."),
    click.option("--context", type=COUNT, help="Context-parallel size."),
    click.option("--expert", type=COUNT, help="Expert-parallel size."),
    click.option("--expert-tensor", type=COUNT, help="Tensor-parallel size of experts."),
    click.option("--sequence-parallel", is_flag=True, default=None, help="With --tensor."),
    click.option(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Whether data-parallel ranks of a Megatron job share out the optimizer; they do.",
    ),
)
"""Axes of a Megatron job, by the names of the fields of `ds_hessian.planning.Mesh`."""
