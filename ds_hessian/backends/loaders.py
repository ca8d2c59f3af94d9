"""Loaders of the user's that micro-batches are read from: training reads on from where it was.

What a loader, its samplers and its data have as attributes is where training is in them: the epoch
of a sampler, the position in a stream, the iterator of persistent workers, the generators from
which they draw. Reading micro-batches moves all of them, and so what training would see next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any

from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_hessian.errors import ConfigError

ITERATOR = "_iterator"
"""The attribute in which torch's `DataLoader` has the iterator of its persistent workers, which it
begins anew instead of making another."""

REPEATING = "RepeatingLoader"
"""The name of loaders that begin anew after their last micro-batch, as DeepSpeed's does."""


def require_end(batches: Iterable[object]) -> None:
    """Raise where an iterable is known to have no end.

    Raises:
        ConfigError: it has none.
    """
    endless = isinstance(batches, (itertools.cycle, itertools.count))
    endless |= isinstance(batches, itertools.repeat) and length_hint(batches, -1) < 0
    if endless or type(batches).__name__ == REPEATING:
        raise ConfigError(
            f"batches has no end: it is a {type(batches).__name__}; pass a list of the "
            "micro-batches that are to be measured, or the loader that is repeated"
        )


def parts_of(loader: Any) -> list[Any]:
    """Return a loader and what is inside of it: loaders, samplers and data, which are iterated or
    indexed, but no iterators: what is read from one is gone.
    """
    found, given = dict[int, Any](), [loader]
    while given:
        part = given.pop()
        read = hasattr(type(part), "__iter__") or hasattr(type(part), "__getitem__")
        inside = part is loader or not hasattr(type(part), "__next__")
        if id(part) in found or not (read and inside and hasattr(part, "__dict__")):
            continue
        if not isinstance(part, (Tensor, nn.Module, type, _BaseDataLoaderIter)):
            found[id(part)] = part
            given += vars(part).values()
    return list(found.values())


@contextmanager
def kept_positions(parts: Iterable[Any]) -> Iterator[None]:
    """Run the body, which reads a loader of these parts, and put their attributes back after it."""
    kept = [(vars(part), dict(vars(part))) for part in parts]
    for attributes, _ in kept:
        if ITERATOR in attributes:
            attributes[ITERATOR] = None
    try:
        yield
    finally:
        for attributes, before in kept:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)
