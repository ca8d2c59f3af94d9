"""Micro-batches: nested containers of tensors, of the kinds that data loaders and collators make.

Mappings (also `BatchEncoding`, `ModelOutput`), tuples, named tuples and lists, also of classes of
their own, dataclasses, packed sequences, and calls of a model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Call:
    """Arguments of one call of the model, captured from training."""

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, kwargs


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return containers of the same kinds with what `function` makes of their tensors.

    The containers are new; whatever else they hold is the same object.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):  # whose sizes torch wants on the CPU
        order = [None if t is None else function(t) for t in value[2:]]
        return PackedSequence(function(value.data), function(value.batch_sizes).cpu(), *order)
    if isinstance(value, Call):
        return Call(mapped(value.args, function), mapped(value.kwargs, function))
    if isinstance(value, Mapping):
        items = {k: mapped(v, function) for k, v in value.items()}
        return items if type(value) is dict else _mapping_like(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, function) for v in value))
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(v, function) for v in value)
    if _has_fields(value):
        return _with_fields(value, {k: mapped(v, function) for k, v in _fields(value).items()})
    return value


def copied(value: Any) -> Any:
    """Copy tensors, into which their maker may write the next batch, and rebuild containers."""
    return mapped(value, lambda tensor: tensor.detach().clone())


CALL = "arguments of a call"
"""The key under which `plain` has those of a `Call`."""


def plain(value: Any) -> Any:
    """Return containers as dictionaries, lists and tuples, which a file can hold without naming a
    class; whatever else they hold is the same object.
    """
    if isinstance(value, Call):
        return {CALL: [plain(value.args), plain(value.kwargs)]}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return (tuple if isinstance(value, tuple) else list)(map(plain, value))
    if _has_fields(value):
        return {name: plain(v) for name, v in _fields(value).items()}
    return value


def formed(value: Any, like: Any) -> Any:
    """Return what `plain` made of a container in containers of the kinds that another one has in
    its places; plain ones where that has none.
    """
    if isinstance(value, dict) and CALL in value:
        call = like if isinstance(like, Call) else Call((), {})
        args, kwargs = value[CALL]
        return Call(formed(args, call.args), formed(kwargs, call.kwargs))
    if isinstance(value, dict):
        return _formed_mapping(value, like)
    if isinstance(value, (tuple, list)):
        parts = like if isinstance(like, (tuple, list)) else type(value)()
        last = parts[-1] if parts else None
        items = [formed(v, parts[i] if i < len(parts) else last) for i, v in enumerate(value)]
        named = isinstance(parts, tuple) and hasattr(parts, "_fields")
        return type(parts)(*items) if named else type(parts)(items)
    return value


def _formed_mapping(value: dict[Any, Any], like: Any) -> Any:
    of_fields = _has_fields(like) and not isinstance(like, Mapping)
    parts = _fields(like) if of_fields else like if isinstance(like, Mapping) else {}
    items = {k: formed(v, parts.get(k)) for k, v in value.items()}
    if of_fields:
        return _with_fields(like, items)
    return items if type(parts) is dict else _mapping_like(parts, items)


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields, as far as it has them."""
    names = [field.name for field in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _with_fields(value: Any, items: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass with other values of its fields."""
    made = copy.copy(value)
    for name, item in items.items():
        object.__setattr__(made, name, item)  # also of a frozen one
    return made


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with other values, which has its class's methods too; a plain
    dictionary where it cannot be written.
    """
    try:
        made: Any = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        separate = made is not value and dict(made.items()).keys() == items.keys()
    except Exception:  # whatever the class raises
        return items
    return made if separate else items


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in nested containers, in their order: tensors, numbers, strings and others."""
    if isinstance(value, Call):
        yield from leaves((value.args, value.kwargs))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name, None))
    else:
        yield value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a micro-batch, or in nested containers of them."""
    return (each for each in leaves(value) if isinstance(each, Tensor))
