"""Which cells of a table are of the quick tier; the others are marked `full`."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cells(table: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """For `parametrize`: a table's cells, of which those outside of `quick` wait for `--all`."""
    found = list(table)
    assert all(cell in found for cell in quick), "a quick cell that is not in the table"
    return [
        cell if cell in quick else pytest.param(*_values(cell), marks=pytest.mark.full)
        for cell in found
    ]


def needs(*packages: str) -> pytest.MarkDecorator:
    """For `pytestmark`: skip where a package of an extra is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed (extra: hf)"
    return pytest.mark.skipif(bool(missing), reason=reason)


def _values(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)
