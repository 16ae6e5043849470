"""`llmgw upgrade`: the running llmgw re-executes itself in place; engines, locks and sockets stay."""

from __future__ import annotations

import time

from llmgw.cli.errors import DONE, FAILED, TIME_IS_UP, CommandError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from llmgw.cli.asking import Asker

USAGE = "llmgw upgrade [--timeout TIME] [--json]"
DETAILS = """\
First the new code checks the configuration, in a process of its own; if it refuses, the old llmgw runs on.
Exit code: 0 the new llmgw answers, 6 it did not in time, 78 the new code refuses the configuration.
"""
PATIENCE = 90.0
"""Seconds for the check by the new code: more than llmgw gives it, so that its refusal arrives."""


def configure(parser: argparse.ArgumentParser) -> None:
    from llmgw.cli.wishes import span

    parser.add_argument("--timeout", type=span, default=60.0, metavar="TIME", help="for the new llmgw (60s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    import json

    from llmgw.cli.asking import Asker

    ask = Asker.of(args)
    before = ask.status()
    ask.post("/v1/upgrade", timeout=PATIENCE)
    after = wait_new(ask, before["started"], args.timeout)
    if after["pid"] != before["pid"]:
        raise CommandError(
            FAILED,
            f"cannot upgrade in place: pid {after['pid']} answers now, pid {before['pid']} did before",
            "llmgw died on the way and was started again; see: journalctl -u llmgw -e",
        )
    if args.json:
        print(json.dumps({"api": 1, "pid": after["pid"], "before": before["llmgw"], "after": after["llmgw"]}))
    elif not args.quiet:
        print(f"llmgw {before['llmgw']} -> {after['llmgw']}, pid {after['pid']} as before; engines run on")
    return DONE


def wait_new(ask: Asker, started: float, timeout: float) -> dict[str, Any]:
    """The first answer of a llmgw that was started later. Raises CommandError when time is up."""
    from llmgw.control.client import ClientError

    deadline = time.monotonic() + timeout
    while True:
        try:
            answer = ask.status()
        except ClientError as error:
            answer, lost = None, error.message
        else:
            lost = "the old one still answers"
        if answer is not None and answer["started"] != started:
            return answer
        if time.monotonic() >= deadline:
            raise CommandError(
                TIME_IS_UP, f"cannot see the new llmgw: {lost}", "see: llmgw status, journalctl -u llmgw -e"
            )
        time.sleep(0.1)
