"""`llmgw events`: what happened, and who asked for it."""

from __future__ import annotations

import sys

from llmgw.cli import wishes
from llmgw.cli.errors import DONE
from llmgw.cli.words import since_of
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

USAGE = "llmgw events [-f] [--since TIME] [--json]"
DETAILS = """\
The running llmgw keeps the last 1000. With --json each line is one object with its number in `seq`.

examples:
  llmgw events --since 1h
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="go on with new ones")
    parser.add_argument("--since", type=wishes.span, metavar="TIME", help="not older than this (90s, 10m)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")


def run(args: argparse.Namespace) -> int:
    import json

    from llmgw.cli.asking import Asker

    since = "0" if args.since is None else since_of(args.since)
    for event in Asker.of(args).stream(f"/v1/events?since={since}&follow={args.follow:d}"):
        sys.stdout.write((json.dumps({"api": 1, **event}) if args.json else line(event)) + "\n")
        if args.follow:
            sys.stdout.flush()
    return DONE


def line(event: dict[str, Any]) -> str:
    from llmgw.cli.logs import stamp

    if "dropped" in event:
        return f"-- llmgw: {event['dropped']} events skipped, this reader is too slow --"
    parts = [stamp(event["time"])[:19].replace("T", " "), event.get("shard") or "llmgw"]
    before, after = event.get("before"), event.get("after")
    if before != after:
        parts.append(f"{before} -> {after}")
    parts.append(event["text"])
    by = event.get("by")
    if by and by not in event["text"]:
        parts.append(f"(by {by})")
    return neutralise("  ".join(parts))
