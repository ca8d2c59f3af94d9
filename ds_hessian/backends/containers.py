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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                changed = mapped(getattr(value, field.name), function)
                object.__setattr__(made, field.name, changed)  # also of a frozen one
        return made
    return value


def copied(value: Any) -> Any:
    """Copy tensors, into which their maker may write the next batch, and rebuild containers."""
    return mapped(value, lambda tensor: tensor.detach().clone())


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
