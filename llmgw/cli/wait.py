"""`llmgw wait`: for scripts and deployment tools."""

from __future__ import annotations

from llmgw.cli import status_view as view
from llmgw.cli import wishes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

USAGE = "llmgw wait (SHARD ... | --all) [--for ready|stopped] [--timeout TIME]"
DETAILS = """\
Exit code: 0 all are there, 1 one has failed and is not tried again, 4 no such shard, 5 no llmgw, 6 time is up.

examples:
  llmgw wait --all --timeout 10m && run-the-tests    (without those that only requests load)
  llmgw wait embed --for stopped
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="which; NAME stands for all its replicas")
    parser.add_argument("--all", action="store_true", help="every shard")
    parser.add_argument("--for", choices=("ready", "stopped"), default="ready", dest="goal", help="default: ready")
    parser.add_argument("--timeout", type=wishes.span, metavar="TIME", help="give up after this (90s, 10m)")


def run(args: argparse.Namespace) -> int:
    from llmgw.cli.asking import Asker
    from llmgw.cli.screen import look
    from llmgw.cli.watching import Follower

    ask = Asker.of(args)
    names = wishes.targets(ask, args)

    def ask_status() -> dict[str, Any]:
        answer = ask.status()
        shards = view.chosen(answer, names)[0]
        if args.all and args.goal == "ready":
            # What waits for its first request is as ready as it will be.
            shards = [shard for shard in shards if not loads_on_request(shard)]
        return as_operation(args.goal, shards, answer["now"])

    return wishes.follow([ask_status], args.timeout, Follower(look(args.color), quiet=args.quiet))


def loads_on_request(shard: Any) -> bool:
    return bool(shard.get("loadable")) and shard["intent"]["wish"] != "start"


def as_operation(goal: str, shards: list[Any], now: float) -> dict[str, Any]:
    """How the wait stands, in the form of an operation that began long ago."""
    verb = "start" if goal == "ready" else "stop"
    states = [standing(goal, shard) for shard in shards]
    state = "failed" if "failed" in states else "running" if "running" in states else "done"
    return {"verb": verb, "what": "wait for", "at": 0.0, "now": now, "state": state, "shards": shards}


def standing(goal: str, shard: dict[str, Any]) -> str:
    state = shard["state"]
    if goal == "ready":
        given_up = state == "failed" and shard["next_attempt"] is None and shard["reason"] is not None
        asleep = any(condition["kind"] == "sleeping" for condition in shard["conditions"])
        return "done" if state == "ready" and not asleep else "failed" if given_up else "running"
    gone = state in ("stopped", "pending") or (state == "failed" and shard["next_attempt"] is None)
    return "done" if gone else "running"
