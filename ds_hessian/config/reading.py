"""DeepSpeed configurations as DeepSpeed itself reads them: dictionaries, files, base64 text."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_hessian.config.messages import shown
from ds_hessian.errors import ConfigError

LARGEST = 2**24
"""Bytes of the largest file of settings."""


def text_in(path: str | Path) -> str:
    """Return the UTF-8 text in a file of settings, or in a pipe to which a process writes.

    Raises:
        ConfigError: nothing is written to the pipe, or the file is larger than such files are: a
            device that does not end, say.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no such text.
    """
    with open(path, "rb", opener=_at_once) as file:
        os.set_blocking(file.fileno(), True)
        data = file.read(LARGEST + 1)
        if not data and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise ConfigError(f"{path} is a pipe to which nothing is written")
    if len(data) > LARGEST:
        raise ConfigError(f"{path} is no file of settings: it has more than {LARGEST} bytes")
    return data.decode("utf-8")


def _at_once(path: str, flags: int) -> int:
    """Open a file; a pipe too that no process has opened to write to."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_deepspeed(config: str | Path) -> Mapping[str, Any]:
    """Return what `DeepSpeedConfig` (deepspeed/runtime/config.py) reads from the same argument.

    Raises:
        ConfigError: it cannot be read, is not an object, or repeats a key.
    """
    import hjson  # type: ignore[import-untyped]

    if not isinstance(config, str | Path):
        raise ConfigError(
            f"the DeepSpeed configuration must be a dictionary or a path, got {shown(config)}"
        )
    text, source = _text_of(config)
    try:
        settings = hjson.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply for a configuration") from None
    except (ValueError, OverflowError) as error:  # hjson's own, or a number out of range
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{source} must hold a JSON object, got {shown(settings)}")
    return settings


def _text_of(config: str | Path) -> tuple[str, str]:
    """Return the text of a configuration, and where it is from."""
    try:
        if os.path.exists(config):
            return text_in(config), str(config)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the DeepSpeed configuration {config} is not UTF-8 text ({error}): save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read the DeepSpeed configuration {config}: {error}") from error
    try:
        return base64.urlsafe_b64decode(str(config)).decode(), "base64 text"
    except ValueError:  # not base64, or not the base64 of text
        raise ConfigError(
            "the DeepSpeed configuration must be a path of a JSON file, got "
            f"{shown(str(config))}: no such file, and not base64 text either"
        ) from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise ConfigError(
            f"the DeepSpeed configuration repeats {', '.join(map(shown, repeated))} within one "
            "object: keep one of each"
        )
    return dict(pairs)


def value_of(text: str) -> object:
    """Return the JSON value of a text, or the text where it has none that can be read."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value
