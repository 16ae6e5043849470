"""Tables: the plain form for pipes, and the drawn one through rich. Both show the same cells."""

from __future__ import annotations

from collections.abc import Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from llmgw.cli.screen import Screen

GAP = 2
LEAST_LAST = 12
"""Characters below which the last column is no use."""
STYLES = {
    "ready": "green",
    "starting": "yellow",
    "loading": "yellow",
    "draining": "cyan",
    "failed": "red",
    "pending": "bright_black",
    "stopped": "bright_black",
}
"""Colour of a state's word."""


def plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Padded columns, no blanks at the end of a line, nothing cut."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    return [
        (" " * GAP).join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]


def without_spare(columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int) -> list[int]:
    """The columns to show: all of them, or as many of `spare` fewer, in their order, as the last one needs to fit."""
    kept = list(range(len(columns)))
    for name in spare:
        taken = sum(max(len(row[i]) for row in (columns, *rows)) + GAP for i in kept[:-1])
        if taken + LEAST_LAST <= width:
            break
        kept.remove(columns.index(name))
    return kept


def room_for_last(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """Characters that the last column may have so that every row keeps to one line."""
    taken = sum(max(len(row[i]) for row in (columns, *rows)) + GAP for i in range(len(columns) - 1))
    return max(LEAST_LAST, width - taken)


def shortened(text: str, room: int, *, unicode: bool) -> str:
    mark = "…" if unicode else "..."
    return text if len(text) <= room else text[: max(0, room - len(mark))].rstrip() + mark


def console(screen: Screen) -> Console:
    """A console that takes text as it is: names and engine output are data, never markup."""
    from rich.console import Console

    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
        width=screen.width,
        force_terminal=screen.colour,
        no_color=not screen.colour,
        color_system="auto" if screen.colour else None,
    )


def rich_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], state_column: int | None, screen: Screen
) -> RichTable:
    """The last column must have been shortened already: where no column may shrink, rich drops a whole one."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold" if screen.colour else ""
    )
    for name, width in zip(columns, [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))],
                           strict=True):  # fmt: skip
        table.add_column(name, no_wrap=True, min_width=width)
    for row in rows:
        cells = [Text(cell) for cell in row]
        if screen.colour and state_column is not None:
            cells[state_column].stylize(STYLES.get(row[state_column], ""))
        table.add_row(*cells)
    return table
