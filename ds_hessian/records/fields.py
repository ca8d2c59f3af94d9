"""Fields of records: which of them are arrays and of what shape, and how each is stored.

A record class states its arrays with `Axes`, one entry for each. Every other field is stored as a
JSON value of its annotated type: numbers, text, tuples, mappings of text, and dataclasses of these.
Scalars survive exactly (Python writes the shortest decimal that reads back as the same double);
NaN and infinities, which JSON lacks, are stored as text. Sharded vectors `(k, n_local)` are not
stored here, only their number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ds_hessian.errors import NumericsError, ResultError

Array = np.ndarray[Any, Any]
"""An array of any shape and type of entries."""
Json = dict[str, Any]
"""A JSON object as it was read: its values have types only once they have been checked."""

LARGEST_INTEGER = 2**63 - 1
"""Integers of a record are counts, which fit 64 bits."""
LARGEST = 1e100
"""Entries of an array are at most this large, so that their squares and sums are numbers."""
MOST_VECTORS = 2**20
"""Sharded vectors of one record."""
GIVEN = {"f": (np.floating, np.integer), "i": (np.integer,), "b": (np.bool_,)}
"""Types of entries that an array of each kind may be made from."""
STORED = {"f": np.float64, "i": np.int64, "b": np.bool_}


class Axes:
    """The names of the axes of an array field: `Axes("P", "m")` is an array of shape `(P, m)`.

    An axis of one name has the same length in all arrays of a record. The array is made fp64
    (kind "f"), int64 ("i") or boolean ("b"), contiguous and read-only.

    Args:
        axes: Their names.
        kind: Type of the entries.
        finite: Whether every entry must be finite.
        least: What every entry must reach; 0 for errors.
        optional: Whether the array may be empty instead.
        named: Whether the field is a mapping of names to arrays of this shape.
    """

    def __init__(
        self,
        *axes: str,
        kind: Literal["f", "i", "b"] = "f",
        finite: bool = False,
        least: float = -math.inf,
        optional: bool = False,
        named: bool = False,
    ) -> None:
        self.axes, self.kind, self.finite, self.named = axes, kind, finite, named
        self.least, self.optional = least, optional

    def __str__(self) -> str:
        return f"({', '.join(self.axes)})"


def settled(record: Any) -> dict[str, Array | dict[str, Array]]:
    """Return the record's array fields, checked and read-only, by name.

    Raises:
        ResultError: an array has another type or shape than the record states, or a field that
            labels an axis, or holds a vector for each of its entries, another length.
        NumericsError: an array that must be finite is not, or an error is negative.
    """
    sizes: dict[str, int] = {}
    found: dict[str, Array | dict[str, Array]] = {}
    for name, axes in record.arrays.items():
        value = getattr(record, name)
        if axes.named:
            named = {key: _settle(f"{name}[{key!r}]", value[key], axes, sizes) for key in value}
            found[name] = named
        else:
            found[name] = _settle(name, value, axes, sizes)
    for name, error in _errors(record):
        if error < 0:
            raise NumericsError(f"{name} must be at least 0, got {error:g}")
    for name, axis in (record.labels | record.sharded).items():
        if len(getattr(record, name)) != sizes[axis]:
            raise ResultError(
                f"{name} must have {sizes[axis]} entries, got {len(getattr(record, name))}"
            )
    return found


def _errors(record: Any) -> Iterator[tuple[str, float]]:
    """The fields that are an error, and the errors of those that are a pair of value and error."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name.split("_")[-1] == "error" and isinstance(value, (int, float)):
            yield field.name, value
        elif field.name in record.pairs and value is not None:
            yield f"the error of {field.name}", value[1]


def _settle(name: str, value: object, axes: Axes, sizes: dict[str, int]) -> Array:
    given = np.asarray(value)
    if not issubclass(given.dtype.type, GIVEN[axes.kind]):
        raise ResultError(f"{name} must hold {STORED[axes.kind].__name__}, got {given.dtype}")
    array: Array = np.array(given, dtype=STORED[axes.kind], order="C")
    empty = axes.optional and array.size == 0
    if array.ndim == len(axes.axes) and not empty:
        for axis, size in zip(axes.axes, array.shape, strict=True):
            sizes.setdefault(axis, size)
    wanted = tuple(sizes.get(axis, -1) for axis in axes.axes)
    if array.shape != wanted and not (empty and array.ndim == len(wanted)):
        raise ResultError(f"{name} must be {wanted}, its {axes}, got {array.shape}")
    if axes.kind == "f":
        _check_size(name, array, axes)
    array.setflags(write=False)
    return array


def _check_size(name: str, array: Array, axes: Axes) -> None:
    finite = np.isfinite(array)
    if axes.finite and not finite.all():
        raise NumericsError(f"{name} must be finite, got {array}")
    largest = max(np.max(array, where=finite, initial=0), -np.min(array, where=finite, initial=0))
    if (array < axes.least).any():  # not NaN, which says that a figure is not known
        raise NumericsError(f"{name} must be at least {axes.least:g}, got {array}")
    if largest > LARGEST:
        raise NumericsError(f"{name} must be at most {LARGEST:g} in size, got {largest:g}")


# ---- to and from what is stored


def packed(record: Any) -> tuple[Json, dict[str, Array]]:
    """Return a record's fields as JSON values, and its arrays by the name of their field."""
    content: Json = {}
    arrays: dict[str, Array] = {}
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        if name not in record.arrays:
            content[name] = len(value) if name in record.sharded else plain(value)
        elif record.arrays[name].named:
            content[name], arrays[name] = list(value), np.array([*value.values()])
        else:
            arrays[name] = value
    return content, arrays


def plain(value: object) -> object:
    """Return a value as JSON; numbers that JSON lacks become text, which `float` reads."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def unpacked(kind: type[Any], content: Json, arrays: Mapping[str, Array]) -> Any:
    """Make a record of what `packed` returned; its sharded vectors are `(k, 0)`.

    Raises:
        ResultError: a field is missing, or of another type than the record states.
    """
    values = dict[str, object]()
    for name, hint in _hints(kind, content, arrays):
        if name in kind.sharded:
            count = read_value(hint, content[name], name)
            values[name] = torch.zeros(min(max(count, 0), MOST_VECTORS), 0)
        elif name not in kind.arrays:
            values[name] = read_value(hint, content[name], name)
        elif kind.arrays[name].named:
            keys = read_value(tuple[str, ...], content.get(name), name)
            if arrays[name].ndim == 0 or len(keys) != len(arrays[name]):
                raise ResultError(f"{name} has {len(keys)} names for {arrays[name].shape} values")
            values[name] = dict(zip(keys, arrays[name], strict=True))
        else:
            values[name] = arrays[name]
    return kind(**values)


def _hints(
    kind: type[Any], content: Json, stored: Mapping[str, Array] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that can be read, with their types: those with a default may be absent."""
    hints, arrays = get_type_hints(kind), getattr(kind, "arrays", {})
    for field in dataclasses.fields(kind):
        place = (stored or {}) if field.name in arrays else content
        default = field.default, field.default_factory
        if field.name in place:
            yield field.name, int if hints[field.name] is Tensor else hints[field.name]
        elif default == (dataclasses.MISSING, dataclasses.MISSING):
            if field.name in arrays:
                raise ResultError(f"its arrays lack {field.name}")
            raise ResultError(f"it lacks {field.name!r}")


def read_value(hint: Any, stored: object, name: str) -> Any:
    """Return the value of this type that is stored as a JSON value, as `plain` makes it.

    Fields of a dataclass that have a default may be absent, which an earlier version did not know.

    Raises:
        ResultError: it is of another type.
    """
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _read_any(hint, stored, name)
    if origin is Literal and stored in options:
        return stored
    if hint is type(None) and stored is None:
        return None
    if origin is tuple and isinstance(stored, list):
        kinds = options[:1] * len(stored) if options[-1] is Ellipsis else options
        if len(kinds) == len(stored):
            return tuple(read_value(k, s, name) for k, s in zip(kinds, stored, strict=True))
    if origin in (dict, Mapping) and isinstance(stored, dict):
        keys = (read_value(options[0], key, name) for key in stored)
        return {key: read_value(options[1], stored[key], f"{name}.{key}") for key in keys}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and isinstance(stored, dict):
        return hint(**{n: read_value(h, stored[n], f"{name}.{n}") for n, h in _hints(hint, stored)})
    if hint is bool and type(stored) is bool:
        return stored
    if hint is str and type(stored) is str:
        if not stored.isprintable():
            raise ResultError(f"{name} must be printable text, got {stored!a:.60}")
        return stored
    if hint is int and type(stored) is int and abs(stored) <= LARGEST_INTEGER:
        return stored
    if hint is float:
        return _number(stored, name)
    raise _mistyped(hint, stored, name)


def _number(stored: object, name: str) -> float:
    if type(stored) is float and math.isfinite(stored):
        return stored
    if type(stored) is int and abs(stored) <= LARGEST_INTEGER:
        return float(stored)
    if isinstance(stored, str) and stored in ("nan", "inf", "-inf"):
        return float(stored)
    raise _mistyped(float, stored, name)


def _read_any(hint: Any, stored: object, name: str) -> Any:
    for option in get_args(hint):
        try:
            return read_value(option, stored, name)
        except ResultError:
            continue
    raise _mistyped(hint, stored, name)


def _mistyped(hint: object, stored: object, name: str) -> ResultError:
    return ResultError(f"{name} must be {_in_words(hint)}, got {stored!a:.60}")


def _in_words(hint: object) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return str(getattr(hint, "__name__", hint))
