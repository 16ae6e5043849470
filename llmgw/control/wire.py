"""What stands on the control socket: domain values to JSON objects, version 1 of the interface. Pure.

Fields may be added within a version; none is renamed or removed, and none changes its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from llmgw.domain.problem import Problem, Reason
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    DEFAULT_SLOTS,
    Activity,
    Instance,
    Progress,
    ShardState,
    ShardStatus,
    Snapshot,
    Transition,
    is_loadable,
)

API = 1

Json = dict[str, Any]


class Line(Protocol):
    """A line of an engine's output (`supervisor.logtail.LogLine`)."""

    @property
    def seq(self) -> int: ...
    @property
    def at(self) -> float: ...
    @property
    def text(self) -> str: ...
    @property
    def cut(self) -> bool: ...
    @property
    def own(self) -> bool: ...
    @property
    def progress(self) -> bool: ...


def shard(id_: ShardId, instance: Instance, log: Json | None = None, shm_bytes: int | None = None) -> Json:
    """One instance. `log` has the number of its last line, how many were skipped, and its last line. `shm_bytes` is
    what the files take that its engine had in /dev/shm when it became Ready; None without an engine.
    """
    status, intent = instance.status, instance.intent
    return {
        "name": status.name,
        "shard": id_.name,
        "replica": id_.replica,
        "model": status.model,
        "engine": status.engine,
        "state": status.state.value,
        "since": status.since,
        "conditions": [{"kind": c.kind.value, "text": c.text, "since": c.since} for c in status.conditions],
        "progress": _progress(status.progress),
        "reason": _reason(status.reason),
        "detail": status.detail,
        "pid": status.pid,
        "pgid": status.pgid,
        "adopted": status.adopted,
        "generation": status.generation,
        "launched_at": status.launched_at,
        "restarts": status.restarts,
        "failures": status.failures,
        "attempt_limit": status.attempt_limit,
        "next_attempt": status.next_attempt,
        "endpoint": status.endpoint,
        "gpus": list(status.gpus),
        "activity": _activity(status.activity),
        "routable": status.routable,
        "intent": {
            "wish": intent.wish.value,
            "by": intent.by,
            "at": intent.at,
            "operator": intent.operator,
        },
        "config_hash": status.config_hash,
        "load_seconds": status.load_seconds,
        "unload_seconds": status.unload_seconds,
        "wake_seconds": status.wake_seconds,
        "loadable": is_loadable(instance, on_demand=status.on_demand),
        **_slots(status),
        "shm_bytes": shm_bytes,
        "log": log or {"lines": 0, "skipped": 0, "last": ""},
    }


def status(header: Json, snapshot: Snapshot, shards: Sequence[Json], now: float) -> Json:
    """The answer of `GET /v1/status`: the node's header and every instance (`shard`) in order."""
    return {
        "api": API,
        **header,
        "now": now,
        "revision": snapshot.revision,
        "shards": list(shards),
    }


def event(line: Transition) -> Json:
    return {
        "seq": line.sequence,
        "time": line.at,
        "shard": line.shard,
        "kind": line.kind,
        "text": line.text,
        "before": line.before,
        "after": line.after,
        "by": line.by,
    }


def log_line(line: Line) -> Json:
    return {
        "seq": line.seq,
        "time": line.at,
        "text": line.text,
        "cut": line.cut,
        "own": line.own,
        "progress": line.progress,
    }


def dropped(count: int) -> Json:
    """Stands in a stream for what its reader was too slow to see."""
    return {"dropped": count}


def operation(id_: str, verb: str, name: str, by: str, asked: float, state: str, instances: Iterable[Json]) -> Json:
    """`state`: running, done or failed; `shards` as in the status."""
    return {
        "api": API,
        "operation": id_,
        "verb": verb,
        "shard": name,
        "by": by,
        "at": asked,
        "state": state,
        "shards": list(instances),
    }


def error(code: str, message: str, hint: str | None = None, **more: Any) -> Json:
    return {"error": {"code": code, "message": message, "hint": hint, **more}}


def refused_config(problems: Sequence[Problem]) -> Json:
    """The answer of a reload that changed nothing (422)."""
    count = sum(problem.is_error for problem in problems)
    text = "1 error" if count == 1 else f"{count} errors"
    return {
        **error("config", f"cannot reload: the configuration has {text}; nothing was changed", "see: llmgw check"),
        "errors": [problem.as_json() for problem in problems],
    }


def _progress(progress: Progress | None) -> Json | None:
    if progress is None:
        return None
    return {
        "phase": progress.phase,
        "fraction": progress.fraction,
        "done": progress.done,
        "total": progress.total,
        "eta": progress.eta,
    }


def _slots(status: ShardStatus) -> Json:
    """What counts: once it is ready, an unknown limit is the default."""
    if status.slots is None and status.state in (ShardState.READY, ShardState.DRAINING):
        return {"slots": DEFAULT_SLOTS, "slots_from": "default"}
    return {"slots": status.slots, "slots_from": status.slots_from}


def _reason(reason: Reason | None) -> Json | None:
    if reason is None:
        return None
    return {
        "code": reason.code,
        "cause": reason.cause,
        "remedy": reason.remedy,
        "evidence": list(reason.evidence),
        "retry": reason.retry,
    }


def _activity(activity: Activity | None) -> Json | None:
    if activity is None:
        return None
    return {
        "running": activity.running,
        "waiting": activity.waiting,
        "tokens_per_second": activity.tokens_per_second,
        "kv_usage": activity.kv_usage,
    }
