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

USAGE = "llmgw status [SHARD ...] [-w] [--json]"
DETAILS = """\
Exit code: 0 all wanted shards are ready, 1 some shard has failed, 3 not all are ready, 4 no such shard, 5 no llmgw.
REQ shows running requests, and after a plus sign the waiting ones. With SHARD also how many the gateway sends it
at a time, and by whose word.

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
        print_status(answer, shards, look(args.color), named=bool(args.shards))
    return view.exit_code(shards)


def pick(answer: dict[str, Any], names: list[str]) -> list[Any]:
    """The shards of these names; raises CommandError where one does not exist."""
    shards, unknown = view.chosen(answer, names)
    if unknown:
        known = sorted({shard["shard"] for shard in answer["shards"]})
        hint = f"there are: {', '.join(known)}" if known else "the configuration has no shard"
        raise CommandError(NO_SUCH_SHARD, f"cannot find {listed(repr(name) for name in unknown)}: no such shard", hint)
    return shards


def print_status(answer: dict[str, Any], shards: list[Any], screen: Screen, *, named: bool = False) -> None:
    """`named`: these were asked for by name, so more is told of them."""
    if screen.drawn:
        from llmgw.cli.status_picture import print_drawn

        print_drawn(answer, shards, screen, named=named)
    else:
        sys.stdout.write("\n".join(plain(answer, shards, unicode=screen.unicode, named=named)) + "\n")


def plain(answer: dict[str, Any], shards: list[Any], *, unicode: bool, named: bool = False) -> list[str]:
    """The whole picture as text: nothing cut, no colour."""
    now = answer["now"]
    lines = [*view.head_lines(answer), ""]
    rows = [view.row(shard, now, unicode=unicode) for shard in shards]
    lines += plain_lines(view.COLUMNS, rows) if rows else ["no shards"]
    for paragraph in [*(view.facts(shards) if named else ()), *view.paragraphs(shards, now)]:
        lines += ["", *paragraph]
    return lines


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
