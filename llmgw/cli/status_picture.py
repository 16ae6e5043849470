"""The status as it is drawn on a terminal: colours, and one line per shard. Imported only where something is drawn."""

from __future__ import annotations

import sys

from llmgw.cli import status_view as view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rich.console import Group

    from llmgw.cli.screen import Screen


def drawn(
    answer: dict[str, Any], shards: list[Any], screen: Screen, *, wrapped: bool = False, named: bool = False
) -> Group:
    """The same with colours and one line per shard; a detail that had to be cut stands below in full.

    `wrapped` breaks long lines here, for a picture that is drawn again and again: its lines would be cut off instead.
    """
    from rich.console import Group
    from rich.text import Text

    from llmgw.cli.table import rich_table, room_for_last, shortened, without_spare

    def text(line: str, style: str = "") -> Text:
        return Text(line, style=style, no_wrap=not wrapped, overflow="fold" if wrapped else "ignore")

    now = answer["now"]
    head, *trouble = view.head_lines(answer)
    parts: list[Any] = [text(head), *(text(line, "yellow" if screen.colour else "") for line in trouble), Text()]
    rows = [view.row(shard, now, unicode=screen.unicode) for shard in shards]
    kept = without_spare(view.COLUMNS, rows, view.SPARE_COLUMNS, screen.width)
    columns = [view.COLUMNS[i] for i in kept]
    rows = [tuple(cells[i] for i in kept) for cells in rows]
    room = room_for_last(columns, rows, screen.width)
    cut = [(*cells[:-1], shortened(cells[-1], room, unicode=screen.unicode)) for cells in rows]
    parts.append(rich_table(columns, cut, columns.index("STATE"), screen) if rows else Text("no shards"))
    told = {shard["name"] for shard in shards if shard.get("reason")}
    for cells in rows:
        if len(cells[-1]) > room and cells[0] not in told:
            parts += [Text(), text(f"{cells[0]}: {cells[-1]}")]
    for paragraph in [*(view.facts(shards) if named else ()), *view.paragraphs(shards, now)]:
        parts += [Text(), text("\n".join(paragraph))]
    return Group(*parts)


def print_drawn(answer: dict[str, Any], shards: list[Any], screen: Screen, *, named: bool) -> None:
    from llmgw.cli.table import console

    out = console(screen)
    with out.capture() as captured:
        out.print(drawn(answer, shards, screen, named=named))
    # rich pads every line to the width of the table.
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")
