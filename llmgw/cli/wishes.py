"""Wishes for shards: tell the running llmgw, then follow until they are where they should be."""

from __future__ import annotations

import sys
import time

from llmgw.cli import status_view as view
from llmgw.cli.errors import DONE, FAILED, TIME_IS_UP, CommandError, error_text
from llmgw.cli.errors import USAGE as WRONG_LINE
from llmgw.cli.words import duration, gpu_ranges, seconds_of
from llmgw.domain.display import neutralise

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from llmgw.cli.asking import Asker
    from llmgw.cli.watching import Follower

    Shard = Mapping[str, Any]
    Look = Callable[[], "dict[str, Any]"]

LOOK_INTERVAL = 0.2
"""Seconds between two looks: short beside any start or stop, and cheap for the daemon."""


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
    import json
    from functools import partial

    from llmgw.cli.asking import Asker, shard_path
    from llmgw.cli.screen import look
    from llmgw.cli.watching import Follower

    ask = Asker.of(args)
    names = targets(ask, args)
    operations = [ask.post(shard_path(name, f"/{verb}"))["operation"] for name in names]
    screen = look(args.color)
    waiting = args.wait if args.wait is not None else screen.terminal or args.timeout is not None
    code = DONE
    if waiting:
        look_at = [partial(ask.get, f"/v1/operations/{operation}") for operation in operations]
        code = follow(look_at, args.timeout, Follower(screen, quiet=args.quiet or args.json))
    elif not args.json and not args.quiet:
        for name in names:
            print(f"{name}: {verb} is asked for")
    if args.json:
        answer = ask.status()
        print(json.dumps({"api": answer["api"], "shards": view.chosen(answer, names)[0]}))
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


def follow(looks: Sequence[Look], timeout: float | None, follower: Follower) -> int:
    """Look again and again until no question is open. 0 done, 1 some cannot get there; raises CommandError (6) when
    time is up. Each look gives the form of `/v1/operations/{id}`: what is wished, how it stands, the shards.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    failed: list[dict[str, Any]] = []
    open_looks = list(looks)
    told: set[str] = set()
    with follower:
        while True:
            running = []
            waiting: list[Shard] = []
            now = time.time()
            for look in open_looks:
                operation = look()
                now = operation.get("now", now)
                verb, since, state = operation["verb"], operation["at"], operation["state"]
                # A shard does not show what the gateway has under way in it, which a drain waits for too.
                is_told = state == "done" if verb == "drain" else state != "failed"
                for shard in operation["shards"]:
                    text = outcome(verb, shard, since) if is_told else None
                    if text is None:
                        waiting.append(shard)
                    elif shard["name"] not in told:
                        told.add(shard["name"])
                        follower.say(neutralise(f"{shard['name']}: {text}"))
                if operation["state"] == "running":
                    running.append(look)
                elif operation["state"] == "failed":
                    failed.append(operation)
            open_looks = running
            if not running:
                break
            follower.show(waiting, now)
            if deadline is not None and time.monotonic() >= deadline:
                raise CommandError(TIME_IS_UP, *out_of_time(waiting, timeout or 0))
            time.sleep(LOOK_INTERVAL)
    for operation in failed:
        report(operation)
    return FAILED if failed else DONE


def outcome(verb: str, shard: Shard, asked: float) -> str | None:
    """How it ended, for people; None while the shard is not where it should be."""
    state, since = shard["state"], shard["since"]
    asleep = any(condition["kind"] == "sleeping" for condition in shard.get("conditions") or ())
    if verb in ("start", "restart", "load", "wake") and state == "ready":
        if asleep:
            return None
        if verb == "wake" and shard.get("wake_seconds") is not None:
            return f"awake after {duration(shard['wake_seconds'])}"
        if since < asked:
            return None if verb == "restart" else "is ready already"
        load = shard.get("load_seconds")
        loaded_since = (shard.get("launched_at") or 0) >= asked
        return f"ready after {duration(load)}" if load and loaded_since else "ready"
    if verb == "sleep" and asleep:
        return "asleep"
    if verb in ("stop", "unload") and state in ("stopped", "pending"):
        return stopped_text(shard)
    if verb in ("stop", "unload") and state == "failed" and shard.get("next_attempt") is None:
        return "not running (it has failed)"
    if verb == "drain" and state == "draining" and not (shard.get("activity") or {}).get("running"):
        return "drained; it stays loaded until llmgw start or llmgw stop"
    if verb == "drain" and state in ("stopped", "pending"):
        return f"not loaded ({state})"
    return None


def stopped_text(shard: Shard) -> str:
    told = shard.get("detail") or "stopped"
    text = told if told.startswith("stopped") else f"stopped ({told})"
    held = next((c["text"] for c in shard.get("conditions") or () if c["kind"] == "gpu-held"), None)
    if held:
        return f"{text}; {held}"
    gpus = shard.get("gpus") or ()
    return f"{text}; GPU {gpu_ranges(gpus)} free" if gpus else text


def out_of_time(waiting: Sequence[Shard], timeout: float) -> tuple[str, str]:
    states = ", ".join(f"{shard['name']} is {shard['state']}" for shard in waiting)
    return f"cannot wait longer than {duration(timeout)}: {states}", "llmgw goes on with it; see: llmgw status"


def report(operation: dict[str, Any]) -> None:
    """What went wrong, with proof and remedy, on stderr."""
    verb = operation["verb"]
    what = operation.get("what", verb)
    for shard in operation["shards"]:
        if shard["state"] != "failed" and outcome(verb, shard, operation["at"]) is not None:
            continue
        reason = shard.get("reason") or {}
        intent = shard["intent"]
        if shard["state"] == "failed":
            why = reason.get("cause") or shard.get("detail") or "it has failed"
        else:
            why = f"{intent['wish']} was wished by {intent['by']} in the meantime"
        hints = [f"| {line}" for line in (reason.get("evidence") or ())[: view.EVIDENCE_LINES]]
        if reason.get("remedy"):
            hints.append(reason["remedy"])
        hints.append(f"see: llmgw logs {shard['name']}")
        text = error_text(f"cannot {what} {shard['name']}: {neutralise(why)}", "\n".join(map(neutralise, hints)))
        print(text, file=sys.stderr)
