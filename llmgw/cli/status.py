"""`llmgw status`: what every shard is doing, and for what has failed why and what to do."""

from __future__ import annotations

import sys

from llmgw.cli import status_view as view
from llmgw.cli.errors import DONE, NO_SUCH_SHARD, CommandError
from llmgw.cli.screen import Screen, look
from llmgw.cli.table import plain_lines
from llmgw.cli.words import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from rich.console import Group

USAGE = "llmgw status [SHARD ...] [-w] [--json]"
DETAILS = """\
Exit code: 0 all wanted shards are ready, 1 some shard has failed, 3 not all are ready, 4 no such shard, 5 no llmgw.
REQ shows running requests, and after a plus sign the waiting ones.

examples:
  llmgw status
  llmgw status -w llama-70b
  llmgw status --json | jq -r '.shards[] | select(.state == "failed") | .name'
"""
WATCH_INTERVAL = 0.5
"""Seconds between two looks of `-w`: a load bar moves, and the daemon answers in under a millisecond."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="only these; NAME stands for all its replicas")
    parser.add_argument("-w", "--watch", action="store_true", help="keep showing until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object; with -w one per change")


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.asking import Asker

    ask = Asker.of(args)
    if args.watch:
        return watch(ask, args)
    answer = ask.status()
    shards = pick(answer, args.shards)
    if args.json:
        import json

        print(json.dumps({**answer, "shards": shards}, ensure_ascii=not look(args.color).unicode))
    else:
        print_status(answer, shards, look(args.color))
    return view.exit_code(shards)


def pick(answer: dict[str, Any], names: list[str]) -> list[Any]:
    """The shards of these names; raises CommandError where one does not exist."""
    shards, unknown = view.chosen(answer, names)
    if unknown:
        known = sorted({shard["shard"] for shard in answer["shards"]})
        hint = f"there are: {', '.join(known)}" if known else "the configuration has no shard"
        raise CommandError(NO_SUCH_SHARD, f"cannot find {listed(repr(name) for name in unknown)}: no such shard", hint)
    return shards


def print_status(answer: dict[str, Any], shards: list[Any], screen: Screen) -> None:
    if screen.drawn:
        print_drawn(answer, shards, screen)
    else:
        sys.stdout.write("\n".join(plain(answer, shards, unicode=screen.unicode)) + "\n")


def plain(answer: dict[str, Any], shards: list[Any], *, unicode: bool) -> list[str]:
    """The whole picture as text: nothing cut, no colour."""
    now = answer["now"]
    lines = [*view.head_lines(answer), ""]
    rows = [view.row(shard, now, unicode=unicode) for shard in shards]
    lines += plain_lines(view.COLUMNS, rows) if rows else ["no shards"]
    for paragraph in view.paragraphs(shards, now):
        lines += ["", *paragraph]
    return lines


def drawn(answer: dict[str, Any], shards: list[Any], screen: Screen, *, wrapped: bool = False) -> Group:
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
    for paragraph in view.paragraphs(shards, now):
        parts += [Text(), text("\n".join(paragraph))]
    return Group(*parts)


def print_drawn(answer: dict[str, Any], shards: list[Any], screen: Screen) -> None:
    from llmgw.cli.table import console

    out = console(screen)
    with out.capture() as captured:
        out.print(drawn(answer, shards, screen))
    # rich pads every line to the width of the table.
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def watch(ask: Any, args: argparse.Namespace) -> int:
    """Until Ctrl-C. A llmgw that goes away for a while (restart, upgrade) is waited for."""
    from llmgw.cli.watching import watch_json, watch_lines, watch_live

    screen = look(args.color)
    pick(ask.status(), args.shards)  # a misspelled name, or no llmgw at all, ends it now rather than never
    if args.json:
        watch_json(ask, args.shards, WATCH_INTERVAL)
    elif screen.live:
        watch_live(ask, args.shards, screen, WATCH_INTERVAL)
    else:
        watch_lines(ask, args.shards, screen, WATCH_INTERVAL)
    return DONE
