"""Options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set takes name=value, got {text!r}")
        given[name] = _value(value)
    return given


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


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
