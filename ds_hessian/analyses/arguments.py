"""What is wrong with an argument of an analysis: by its annotation, and by its name."""

from __future__ import annotations

import functools
import inspect
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from ds_hessian.config.messages import shown
from ds_hessian.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LEAST: dict[str, float] = {
    **{"max_matvecs": 1, "layers_at_once": 1, "draws": 0, "extremes": 0},
    **{"tolerance": 0, "damping": 0},
}
"""The least values of numbers that nothing else checks; tolerances of 0 are never reached."""
POSITIVE = ("displacements",)
"""Lists that have to hold something, of numbers above 0."""


def refuse_impossible(arguments: DataclassInstance, title: str) -> None:
    """Raise for an argument of another type than it is annotated with, or of no possible value.

    Numbers and arrays of numpy and torch become Python's own.

    Args:
        arguments: An analysis.
        title: Its name, for the message.

    Raises:
        ConfigError: names the argument, what it must be and what it is.
    """
    hints = _hints(type(arguments))
    for field in fields(arguments):
        value, hint = getattr(arguments, field.name), hints[field.name]
        if not field.metadata and isinstance(value, np.generic | np.ndarray | Tensor):
            value = value.tolist()  # a number or list, as JSON has it
            object.__setattr__(arguments, field.name, value)
        if _is_handed_on(field) or (_accepts(hint, value) and _is_possible(field.name, value)):
            continue
        raise ConfigError(
            f"{title}: {field.name} must be {_required(field.name, hint)}, got {shown(value)}"
        )


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_handed_on(field: Field[Any]) -> bool:
    """Return whether a field is no argument that a caller gives as a value."""
    return bool(field.metadata) and field.name not in ("vectors", "earlier", "blocks")


def _accepts(hint: Any, value: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_accepts(each, value) for each in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        each = str if get_origin(inner[0]) is Literal else inner[0]  # analyses know which
        return _is_list(value) and all(_accepts(each, item) for item in _listed(value))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_accepts(inner[1], v) for v in value.values())
    return not inspect.isclass(hint) or isinstance(value, hint)


def _is_list(value: Any) -> bool:
    flat = isinstance(value, np.ndarray | Tensor) and value.ndim == 1
    return flat or (isinstance(value, Sequence) and not isinstance(value, str))


def _listed(value: Any) -> list[Any]:
    return value.tolist() if isinstance(value, np.ndarray | Tensor) else list(value)


def _is_possible(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name in POSITIVE:
        return len(value) > 0 and min(_listed(value)) > 0
    return name not in LEAST or bool(value >= LEAST[name])


def _required(name: str, hint: Any) -> str:
    """Return in words what an argument accepts."""
    least = f", at least {LEAST[name]:g}" if name in LEAST else ""
    least += " above 0, not empty" if name in POSITIVE else ""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [_in_words(each) for each in kinds if each is not NoneType]
    return " or ".join(words) + least + ", or None" * (NoneType in kinds)


_PLURALS = {float: "finite numbers", int: "integers", str: "texts"}


def _in_words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(json.dumps, inner))
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, inner))
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return f"a list of {_PLURALS.get(inner[0], 'texts')}"
    if inspect.isclass(origin):
        return "a mapping"
    simple = {bool: "true or false", int: "an integer", float: "a finite number", str: "a text"}
    return simple.get(hint, f"a {getattr(hint, '__name__', hint)}")
