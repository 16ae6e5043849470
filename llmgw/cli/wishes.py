"""start, stop, restart, drain: tell the running llmgw, then follow until the shards are where they should be."""

from __future__ import annotations

import sys
import time

from llmgw.cli import status_view as view
from llmgw.cli.errors import DONE, FAILED, TIME_IS_UP, CommandError
from llmgw.cli.errors import USAGE as WRONG_LINE
from llmgw.cli.words import counted, duration, gpu_ranges, seconds_of
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from llmgw.cli.asking import Asker

    Shard = Mapping[str, Any]
    Judge = Callable[[Shard, float], "str | None"]

LOOK_INTERVAL = 0.2
"""Seconds between two looks: short beside any start or stop, and cheap for the daemon."""
LIVE = ("starting", "loading", "ready", "draining")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shards", nargs="*", metavar="SHARD", help="which; NAME stands for all its replicas")
    parser.add_argument("--all", action="store_true", help="every shard")
    parser.add_argument(
        "--wait", action="store_true", default=None, dest="wait", help="until it is done (default on a terminal)"
    )
    parser.add_argument("--no-wait", action="store_false", dest="wait", help="return as soon as llmgw knows")
    parser.add_argument(
        "--timeout", type=span, metavar="TIME", help="wait no longer than this (90s, 10m); the wish stays"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with the shards as they are at the end")


def span(text: str) -> float:
    """A duration as an option's value."""
    import argparse

    try:
        return seconds_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace, verb: str) -> int:
    """Ask for `verb` of the chosen shards and, where wanted, wait for its end."""
    from llmgw.cli.asking import Asker, shard_path
    from llmgw.cli.screen import look

    ask = Asker.of(args)
    names = targets(ask, args)
    for name in names:
        ask.post(shard_path(name, f"/{verb}"))
    screen = look(args.color)
    waiting = args.wait if args.wait is not None else screen.terminal or args.timeout is not None
    if not waiting:
        if args.json:
            print_json(ask, names)
        elif not args.quiet:
            for name in names:
                print(f"{name}: {verb} is asked for")
        return DONE
    told = wished(ask, names)
    code = follow(
        ask, names, JUDGES[verb], told=told, timeout=args.timeout, quiet=args.quiet or args.json, color=args.color
    )
    if args.json:
        print_json(ask, names)
    return code


def targets(ask: Asker, args: argparse.Namespace) -> list[str]:
    """The names asked for, all known; raises CommandError for none, for an unknown one, and for both forms."""
    from llmgw.cli.status import pick

    if bool(args.shards) == bool(args.all):
        what = "both names and --all were given" if args.all else "no shard was named"
        raise CommandError(WRONG_LINE, f"cannot tell which shards: {what}", "name them, or write --all")
    shards = pick(ask.status(), args.shards)
    if args.all:
        return list(dict.fromkeys(shard["shard"] for shard in shards))
    return list(dict.fromkeys(args.shards))


def wished(ask: Asker, names: Sequence[str]) -> dict[str, float]:
    """Instance -> when its present wish was made: ours, since it has just been accepted."""
    return {shard["name"]: shard["intent"]["at"] for shard in view.chosen(ask.status(), names)[0]}


def print_json(ask: Asker, names: Sequence[str]) -> None:
    import json

    answer = ask.status()
    print(json.dumps({"api": answer["api"], "shards": view.chosen(answer, names)[0]}))


class Done(Exception):
    """What was waited for cannot happen any more; the text says why."""


def for_ready(shard: Shard, asked: float) -> str | None:
    """How it ended when it is ready, None while that may still come; raises Done when it cannot."""
    if shard["state"] == "ready":
        load = shard.get("load_seconds")
        return f"ready after {duration(load)}" if load and shard["since"] >= asked else "ready"
    if shard["state"] == "failed" and shard.get("next_attempt") is None and shard["since"] >= asked:
        raise Done(told_reason(shard))
    return None


def for_restarted(shard: Shard, asked: float) -> str | None:
    """As for_ready, but an engine that was launched before the wish does not count."""
    if shard["state"] == "ready" and (shard.get("launched_at") or 0) < asked:
        return None
    return for_ready(shard, asked)


def for_stopped(shard: Shard, asked: float) -> str | None:
    if shard["state"] in LIVE:
        return None
    if shard["state"] == "failed":
        if shard.get("next_attempt") is not None:
            return None
        return "not running (it had failed)"
    detail = shard.get("detail")
    text = f"stopped ({detail})" if detail and shard["since"] >= asked else "stopped"
    gpus = shard.get("gpus") or ()
    held = next((c["text"] for c in shard.get("conditions") or () if c["kind"] == "gpu-held"), None)
    if held:
        return f"{text}; {held}"
    return f"{text}; GPU {gpu_ranges(gpus)} free" if gpus else text


def for_drained(shard: Shard, asked: float) -> str | None:
    if shard["state"] not in LIVE:
        return f"not loaded ({shard['state']})"
    running = (shard.get("activity") or {}).get("running")
    if shard["state"] != "draining" or running:
        return None
    return "drained; it stays loaded until llmgw start or llmgw stop"


JUDGES: Mapping[str, Judge] = {
    "start": for_ready,
    "restart": for_restarted,
    "stop": for_stopped,
    "drain": for_drained,
}


def same_wish(shard: Shard, asked: float) -> None:
    """Raises Done when somebody has wished something else since."""
    intent = shard["intent"]
    if intent["at"] > asked:
        raise Done(f"another wish came in between: {intent['wish']} by {intent['by']}")


def told_reason(shard: Shard) -> str:
    reason = shard.get("reason") or {}
    return reason.get("cause") or shard.get("detail") or "failed"


def follow(
    ask: Asker,
    names: Sequence[str],
    judge: Judge,
    *,
    told: Mapping[str, float] | None,
    timeout: float | None,
    quiet: bool,
    color: str,
) -> int:
    """Look until `judge` has an answer for every shard. 0 done, 1 some cannot get there, 6 time is up.

    `told` holds when each instance got the wish that is waited for; a later one of somebody else ends the wait.
    """
    from llmgw.cli.screen import look
    from llmgw.cli.watching import Follower

    deadline = None if timeout is None else time.monotonic() + timeout
    ended: dict[str, str] = {}
    broken: dict[str, tuple[str, Shard]] = {}
    with Follower(look(color), quiet=quiet) as follower:
        while True:
            answer = ask.status()
            shards = view.chosen(answer, names)[0]
            open_ones = []
            for shard in shards:
                if shard["name"] in ended or shard["name"] in broken:
                    continue
                asked = 0.0 if told is None else told.get(shard["name"], 0.0)
                try:
                    if told is not None:
                        same_wish(shard, asked)
                    text = judge(shard, asked)
                except Done as reason:
                    broken[shard["name"]] = (str(reason), shard)
                    continue
                if text is None:
                    open_ones.append(shard)
                    continue
                ended[shard["name"]] = text
                follower.say(neutralise(f"{shard['name']}: {text}"))
            if not open_ones:
                break
            follower.show(open_ones, answer["now"])
            if deadline is not None and time.monotonic() >= deadline:
                break
            time.sleep(LOOK_INTERVAL)
    report(broken)
    if broken:
        return FAILED
    if open_ones:
        states = ", ".join(f"{shard['name']} is {shard['state']}" for shard in open_ones)
        raise CommandError(
            TIME_IS_UP,
            f"cannot wait longer for {counted(len(open_ones), 'shard')}: time is up after "
            f"{duration(timeout or 0)} ({states})",
            "llmgw goes on with it; see: llmgw status",
        )
    return DONE


def report(broken: Mapping[str, tuple[str, Shard]]) -> None:
    """What went wrong, with proof and remedy, on stderr."""
    from llmgw.cli.errors import error_text

    for name, (why, shard) in broken.items():
        reason = shard.get("reason") or {}
        hints = [f"| {line}" for line in (reason.get("evidence") or ())[: view.EVIDENCE_LINES]]
        if reason.get("remedy"):
            hints.append(reason["remedy"])
        hints.append(f"see: llmgw logs {name}")
        text = error_text(f"{name}: {why}", "\n".join(neutralise(hint) for hint in hints))
        print(text, file=sys.stderr)
