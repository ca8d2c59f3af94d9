"""DeepSpeed configurations as DeepSpeed itself reads them: dictionaries, files, base64 text."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_hessian.config.messages import shown
from ds_hessian.errors import ConfigError


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
            return Path(config).read_bytes().decode("utf-8"), str(config)
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
