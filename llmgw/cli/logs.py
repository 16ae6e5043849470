"""`llmgw logs`: an engine's output, as it wrote it but for control characters."""

from __future__ import annotations

import sys
import time

from llmgw.cli import wishes
from llmgw.cli.errors import DONE, NO_SUCH_SHARD, UNREACHABLE, CommandError
from llmgw.cli.errors import USAGE as WRONG_LINE
from llmgw.cli.words import since_of
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from typing import Any

    from llmgw.cli.asking import Asker

    Line = dict[str, Any]

USAGE = "llmgw logs (SHARD | --all) [-f] [-n LINES] [--since TIME] [-t] [--json]"
DETAILS = """\
Lines of llmgw itself begin with `-- llmgw:`. With --all each line begins with the name of its shard.

examples:
  llmgw logs llama-70b -f
  llmgw logs --all --since 10m
"""
LINES = 100
CATCH_UP = 1000
"""Lines asked for after a lost connection: what was shown already is left out."""
RECONNECT_FOR = 60.0
"""Seconds that `-f` waits for a llmgw that is being restarted."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shard", nargs="?", metavar="SHARD", help="whose output")
    parser.add_argument("--all", action="store_true", help="of every shard")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new lines, also over restarts")
    parser.add_argument("-n", "--lines", type=lines, default=None, metavar="LINES", help="the last LINES (100)")
    parser.add_argument("--since", type=wishes.span, metavar="TIME", help="not older than this (90s, 10m)")
    parser.add_argument("-t", "--timestamps", action="store_true", help="with the time of arrival")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def lines(text: str) -> int:
    import argparse

    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.asking import Asker
    from llmgw.cli.status import pick

    if bool(args.shard) == args.all:
        raise CommandError(WRONG_LINE, "cannot tell whose output: name one shard, or write --all")
    ask = Asker.of(args)
    shards = pick(ask.status(), [args.shard] if args.shard else [])
    names = [shard["name"] for shard in shards]
    prefixed = len(names) > 1
    if args.follow and prefixed:
        return follow_all(ask, names, args)
    for name in names:
        show(ask, name, args, prefixed=prefixed)
    return DONE


def follow_all(ask: Asker, names: list[str], args: argparse.Namespace) -> int:
    """One thread per shard reads; whole lines are written, so they do not mix."""
    import queue
    import threading

    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def read(name: str) -> None:
        try:
            show(ask, name, args, prefixed=True)
            ends.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised again in the main thread
            ends.put(error)

    for name in names:
        threading.Thread(target=read, args=(name,), daemon=True).start()
    for _ in names:
        error = ends.get()
        if error is not None:
            raise error
    return DONE


def show(ask: Asker, name: str, args: argparse.Namespace, *, prefixed: bool) -> None:
    shape = as_json if args.json else as_text
    for line in read_lines(ask, name, args):
        sys.stdout.write(shape(line, name, prefixed=prefixed, times=args.timestamps) + "\n")
        if args.follow:
            sys.stdout.flush()


def read_lines(ask: Asker, name: str, args: argparse.Namespace) -> Iterator[Line]:
    """Lines of one shard; in follow mode a lost llmgw is waited for, and what was shown is not shown again."""
    from llmgw.cli.asking import shard_path
    from llmgw.control.client import ClientError

    query = first_query(ask, name, args)
    last: float | None = None
    lost_at: float | None = None
    while True:
        try:
            for line in ask.stream(shard_path(name, f"/logs?follow={args.follow:d}&{query}")):
                at = line.get("time")
                if lost_at is not None and last is not None and at is not None and at <= last:
                    continue  # the tail of a llmgw that has come back begins before what was shown
                lost_at = None
                last = at or last
                yield line
        except ClientError as error:
            # While llmgw comes back it may have no output yet; a shard that the file no longer has is the end.
            if lost_at is None or error.exit_code == NO_SUCH_SHARD:
                raise
        if not args.follow:
            return
        if lost_at is None:
            lost_at = time.monotonic()
            query = f"tail={CATCH_UP}"
            print("-- llmgw: connection lost, waiting for llmgw to come back", file=sys.stderr)
        elif time.monotonic() - lost_at > RECONNECT_FOR:
            raise CommandError(UNREACHABLE, f"cannot follow the output of {name}: llmgw has gone")
        time.sleep(0.5)


def first_query(ask: Asker, name: str, args: argparse.Namespace) -> str:
    """How far back to begin. The server takes a tail of 0 as everything, -n 0 means nothing old."""
    if args.lines == 0:
        shard = next(shard for shard in ask.status()["shards"] if shard["name"] == name)
        return f"after={shard['log']['lines']}"
    parts = [] if args.since is None else [f"since={since_of(args.since)}"]
    if args.lines is not None or args.since is None:
        parts.append(f"tail={args.lines or LINES}")
    return "&".join(parts)


def as_json(line: Line, name: str, *, prefixed: bool, times: bool) -> str:
    import json

    del prefixed, times  # every object carries both
    return json.dumps({"api": 1, "shard": name, **line})


def as_text(line: Line, name: str, *, prefixed: bool, times: bool) -> str:
    if "dropped" in line:
        text = f"-- llmgw: {line['dropped']} lines skipped, this reader is too slow --"
    else:
        text = neutralise(line["text"])
        if line.get("cut"):
            text += " -- llmgw: line cut --"
        if times:
            text = f"{stamp(line['time'])} {text}"
    return f"{name}  {text}" if prefixed else text


def stamp(at: float) -> str:
    """Local time, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
    return f"{whole}.{int(at % 1 * 1000):03}"
