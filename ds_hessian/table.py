"""Tables for people: plain text, which a terminal shows in colours and wrapped to its width."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

ALARMS = {
    "note": "yellow",
    "warning": "yellow",
    "FAILED": "bold red",
    "WILL NOT WORK": "bold red",
}
"""Styles of rows with a cell that begins with such a word."""


class Table(str):
    """The text of a table, which still knows its cells.

    Attributes:
        headline: The line above; empty for none.
        rows: The cells of each row.
        head: The names of the columns, whose figures are then aligned; empty for names and texts.
        notes: The lines below.
        width: The letters of the longest row.
    """

    headline: str
    rows: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    notes: tuple[str, ...]
    width: int

    def __new__(
        cls,
        headline: str,
        rows: Sequence[tuple[str, ...]] = (),
        *,
        head: tuple[str, ...] = (),
        notes: Sequence[str] = (),
        first: int = 0,
        gap: int = 2,
    ) -> Table:
        """Return the text; its first column has `first` letters, or `gap` more than its cells."""
        cells = [head, *rows] if head else rows
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for name, *others in cells:
            place = str.rjust if head else str.ljust
            line = "  ".join(map(place, others, widths[1:]))
            line = name.ljust(max(first, widths[0] + gap)) + line.rstrip()
            lines.append(line if head else f"  {line}")
        table = super().__new__(cls, "\n".join([*filter(None, [headline]), *lines, *notes]))
        table.headline, table.head, table.width = headline, head, max(map(len, lines), default=0)
        table.rows, table.notes = tuple(rows), tuple(notes)
        return table

    def fitted(self, width: int) -> Group:
        """Return what rich draws in so many columns: a cell that is too long goes on below.

        Where columns of figures do not fit, each row becomes a list, so that no figure is broken.
        """
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text

        parts: list[RenderableType] = [Text(self.headline, "bold")] if self.headline else []
        if self.head and self.width > width:
            for name, *figures in self.rows:
                pairs = zip(self.head[1:], figures, strict=True)
                shown = [(column.strip(), figure) for column, figure in pairs if figure]
                parts.append(Table(name, shown).fitted(width))
        elif self.rows:
            grid = Grid(box=None, show_header=bool(self.head), pad_edge=False)
            for number, name in enumerate(self.head or self.rows[0]):
                style = "" if number else "cyan"
                grid.add_column(Text(name), style=style, overflow="fold")
                grid.columns[-1].justify = "right" if self.head and number else "left"
            for row in self.rows:
                alarms = (ALARMS[word] for word in ALARMS for cell in row if cell.startswith(word))
                grid.add_row(*map(Text, row), style=next(alarms, ""))
            parts.append(Padding(grid, (0, 0, 0, 0 if self.head else 2)))
        notes = [Text(note, ALARMS.get(note.split(":")[0], "")) for note in self.notes]
        return Group(*parts, *notes)


def on_terminal(stream: TextIO | None) -> bool:
    """Return whether people see a standard stream, which the shell may have closed (None), or a job
    closed or replaced.
    """
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def echo(*texts: str, error: bool = False) -> None:
    """Print texts as they are; tables, on a terminal, in colours and as wide as that.

    Args:
        texts: The texts.
        error: Whether they go to stderr.
    """
    stream = sys.stderr if error else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # of a locale without ±
    for text in texts:
        if isinstance(text, Table) and on_terminal(stream):
            from rich.console import Console

            console = Console(file=stream)
            console.print(text.fitted(console.width))
        else:
            print(text, file=stream, flush=True)
