"""The joint between records and what draws them, so that neither file imports the other.

A record offers `table()` and `plot(path)`, and imports nothing that makes them. The package's root
provides the display (`ds_hessian.show`), which is imported when the first record is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Display(Protocol):
    """The interface of a module that shows records, such as `ds_hessian.show`."""

    def table(self, record: Any) -> str:
        """Return the record as lines of text."""

    def picture(self, record: Any, path: Path) -> Path:
        """Draw the record to a file and return its path."""


def _none() -> Display:
    raise LookupError("no display was provided: import ds_hessian before its parts")


_load: Callable[[], Display] = _none


def provide(load: Callable[[], Display]) -> None:
    """Set the function that imports the display and returns it."""
    global _load
    _load = load


def display() -> Display:
    """Return the display that was provided."""
    return _load()
