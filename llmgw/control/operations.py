"""Wishes that take time: when one is done, and the few that are remembered. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from llmgw.domain.shard import ShardId
from llmgw.domain.status import ConditionKind, Instance, ShardState, Snapshot, Wish, has_given_up

VERBS: Mapping[str, Wish] = {
    "start": Wish.START,
    "stop": Wish.STOP,
    "restart": Wish.START,
    "drain": Wish.DRAIN,
    "load": Wish.START,
    "unload": Wish.STOP,
    "sleep": Wish.SLEEP,
    "wake": Wish.START,
}

HELD = frozenset({"start", "stop", "restart", "drain"})
"""Verbs whose wish holds against requests and over a restart of llmgw; the others do now what requests and idleness do
sooner or later."""

State = Literal["running", "done", "failed"]

REMEMBERED = 256
"""Operations that can be asked about; running ones are never forgotten before finished ones."""


def is_done(verb: str, before: Instance, now: Instance, in_gateway: int = 0) -> Literal["done", "failed"] | None:
    """Whether a wish is fulfilled, by the board alone. `before` is the instance right after the wish was made,
    `in_gateway` the number of its requests that the gateway has under way.

    A later wish of somebody else ends it as failed. None: not yet.
    """
    if now.intent.serial != before.intent.serial:
        return "failed"
    status = now.status
    launched_since = status.generation > before.status.generation
    is_asleep = status.condition(ConditionKind.SLEEPING) is not None
    match verb:
        case "stop" | "unload":
            done = status.state is ShardState.STOPPED
        case "sleep":
            done = is_asleep
        case "drain":
            running = status.activity.running if status.activity else None
            idle = not running and not in_gateway
            done = status.state is ShardState.STOPPED or (status.state is ShardState.DRAINING and idle)
        case "restart":
            done = status.state is ShardState.READY and launched_since
        case _:
            done = status.state is ShardState.READY and not is_asleep
    # A plain command may end well before anybody has seen it ready.
    done = done or (verb in ("start", "restart", "load") and status.state is ShardState.STOPPED and launched_since)
    if done:
        return "done"
    return "failed" if _gave_up(before, now) else None


def _gave_up(before: Instance, now: Instance) -> bool:
    """It failed after the wish, and what follows was decided: no further attempt."""
    if not has_given_up(now.status):
        return False
    status = now.status
    return before.status.state is not ShardState.FAILED or status.since != before.status.since


def why_not(verb: str, instance: Instance) -> tuple[str, str] | None:
    """Why a shard cannot be told this now, and what to do instead; None when it can."""
    status, name = instance.status, instance.status.name
    is_asleep = status.condition(ConditionKind.SLEEPING) is not None
    match verb:
        case "load" | "unload" if not status.on_demand:
            instead = "start" if verb == "load" else "stop"
            return "no request would load it again: it has no idle_timeout", f"use: llmgw {instead} {name}"
        case "sleep" if not status.can_sleep:
            return "it has no sleep mode", 'write idle_action = "sleep"; it takes vllm on loopback'
        case "sleep" if not status.state.is_live:
            return f"it is {status.state}", f"load it first: llmgw load {name}"
        case "wake" if not (is_asleep or instance.intent.wish is Wish.SLEEP or status.state is ShardState.READY):
            return f"it is {status.state} and not asleep", f"use: llmgw load {name}"
    return None


@frozen
class Operation:
    """One wish for one name, with all its replicas. `at` is seconds since the epoch."""

    id: str
    verb: str
    name: str
    by: str
    at: float
    before: Mapping[ShardId, Instance]

    def state(self, snapshot: Snapshot, load: Mapping[ShardId, int]) -> State:
        """`failed` as soon as one instance has failed; a shard that was removed meanwhile counts as stopped.
        `load`: requests that the gateway has under way, by shard.
        """
        results: list[Literal["done", "failed"] | None] = []
        for id_, before in self.before.items():
            now = snapshot.shards.get(id_)
            if now is None:
                results.append("done" if self.verb in ("stop", "drain", "unload") else "failed")
            else:
                results.append(is_done(self.verb, before, now, load.get(id_, 0)))
        if "failed" in results:
            return "failed"
        return "running" if None in results else "done"
