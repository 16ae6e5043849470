"""`llmgw top` as it is drawn on a terminal. Imported only where something is drawn."""

from __future__ import annotations

from llmgw.cli import top_view as view
from llmgw.cli.table import rich_table, room_for_last, shortened, without_spare
from llmgw.cli.top import left_out

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rich.console import Group
    from rich.table import Table as RichTable

    from llmgw.cli.screen import Screen


def drawn(history: view.History, screen: Screen, *, lost: str | None = None) -> Group:
    """Every line fits the width: what a narrow terminal has no room for is left out, cut, or (the head) wrapped."""
    from rich.console import Group
    from rich.text import Text

    def text(line: str, style: str = "") -> Text:
        cut = shortened(line, screen.width, unicode=screen.unicode)
        return Text(cut, style=style if screen.colour else "", no_wrap=True, overflow="ignore")

    def wrapped(line: str, style: str = "") -> Text:
        return Text(line, style=style if screen.colour else "", no_wrap=False, overflow="fold")

    parts: list[Any] = [wrapped(lost, "red")] if lost is not None else []
    head, *rest = view.head_lines(history)
    parts.append(wrapped(head))
    parts += [wrapped(line, "" if line.startswith("gateway ") else "yellow") for line in rest]
    for table in view.tables(history, unicode=screen.unicode):
        parts += [Text(), _fitted(table, screen), *map(text, left_out(table))]
    failures = view.failure_lines(history)
    if failures:
        parts += [Text(), text("last failures", "red"), *map(text, failures)]
    return Group(*parts)


def _fitted(table: view.Table, screen: Screen) -> RichTable:
    kept = without_spare(table.columns, table.rows, table.spare, screen.width)
    columns = [table.columns[i] for i in kept]
    rows = [tuple(cells[i] for i in kept) for cells in table.rows]
    room = room_for_last(columns, rows, screen.width)
    cut = [(*cells[:-1], shortened(cells[-1], room, unicode=screen.unicode)) for cells in rows]
    return rich_table(columns, cut, columns.index(table.state) if table.state else None, screen)
