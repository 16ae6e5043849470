"""The state machine of a shard: one enum, one table, one function that moves.

`advance(status, event, now)` is the only way a status changes. A pair that TRANSITIONS does not list is a bug in
llmgw and raises `IllegalTransition`; the names, the diagram and the documentation are generated from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from attrs import evolve, field, frozen

from llmgw.domain.problem import Reason
from llmgw.domain.shard import Secret, ShardId


class ShardState(StrEnum):
    """Shown to users, in this order."""

    PENDING = "pending"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_live(self) -> bool:
        """A process should exist."""
        return self in LIVE


LIVE = frozenset({ShardState.STARTING, ShardState.LOADING, ShardState.READY, ShardState.DRAINING})

MEANING: Mapping[ShardState, str] = {
    ShardState.PENDING: "known, not started",
    ShardState.STARTING: "launched, no sign of loading yet",
    ShardState.LOADING: "a sign of loading was seen",
    ShardState.READY: "it is up and lists its model",
    ShardState.DRAINING: "no new work; what runs may finish",
    ShardState.STOPPED: "exited as intended",
    ShardState.FAILED: "exited unexpectedly or never became ready",
}


class ConditionKind(StrEnum):
    """What is true beside the state, with a text and a time of its own."""

    BACKOFF = "backoff"
    STALLED = "stalled"
    UNHEALTHY = "unhealthy"
    LISTENER_UNVERIFIED = "listener-unverified"
    MEMBER_LOST = "member-lost"
    UNPLACED = "unplaced"
    SLEEPING = "sleeping"
    ADOPTED = "adopted"
    STOPPING = "stopping"
    GPU_HELD = "gpu-held"
    GPU_UNHEALTHY = "gpu-unhealthy"
    ALLOWED = "allowed"
    HELD = "held"
    BUG = "bug"


CONDITION_MEANING: Mapping[ConditionKind, str] = {
    ConditionKind.BACKOFF: "failed before; the next attempt is set",
    ConditionKind.STALLED: "requests run, but the engine makes no step",
    ConditionKind.UNHEALTHY: "health says no: not routable",
    ConditionKind.LISTENER_UNVERIFIED: "whose the listening socket is cannot be seen",
    ConditionKind.MEMBER_LOST: "a process that was there at Ready is gone",
    ConditionKind.UNPLACED: "no GPUs for it",
    ConditionKind.SLEEPING: "loaded, weights off the GPU",
    ConditionKind.ADOPTED: "taken over from an earlier supervisor",
    ConditionKind.STOPPING: "being stopped",
    ConditionKind.GPU_HELD: "its GPU memory or a process has not gone",
    ConditionKind.GPU_UNHEALTHY: "one of its GPUs has gone bad while it runs",
    ConditionKind.ALLOWED: "a check said no, and the file allows it",
    ConditionKind.HELD: "its replacement waits, since another one of this model failed",
    ConditionKind.BUG: "an error in llmgw itself",
}

SURVIVES_LAUNCH = frozenset({ConditionKind.BUG, ConditionKind.HELD})
"""Conditions that a new launch does not wipe; all others belong to one life of the engine."""


class Wish(StrEnum):
    START = "start"
    STOP = "stop"
    DRAIN = "drain"
    SLEEP = "sleep"
    """Loaded, in the engine's own sleep mode."""


GATEWAY = "gateway"
"""How the name of who wished begins where the gateway did, for requests or for want of them."""


@frozen
class Intent:
    """What is wanted and who wanted it. `restarts` counts the wishes to restart: a change is one restart.

    `by` names the asker for people: `file` (autostart), `uid 1000 (ada)`, `reload`, `gateway, idle for 5m`.
    `operator` marks wishes that hold over reload and over llmgw's own restart; a stop or a drain without it leaves the
    shard to be loaded by a request (`unload`), one with it does not (`stop`).
    """

    wish: Wish
    by: str = "file"
    at: float = 0.0
    restarts: int = 0
    operator: bool = False
    serial: int = 0
    """Counts the wishes of this shard, so that the same wish made again is news."""
    restarted_by: str = ""
    """Who wanted the last restart: a reload restarts without touching what an operator wished."""

    @property
    def by_gateway(self) -> bool:
        return self.by.startswith(GATEWAY)

    @property
    def is_kept(self) -> bool:
        """It holds over llmgw's own restart: an operator's, and that the engine is unloaded or asleep, whoever said
        so; a file that starts it would bring back what nobody uses."""
        unloaded = self.wish in (Wish.STOP, Wish.SLEEP) and self.by != "file"
        return self.operator or unloaded


@frozen
class Want:
    """Requests that wait for a model without an endpoint. `since` is when the oldest came, in seconds since the epoch;
    `band` the highest one among them."""

    model: str
    waiting: int
    since: float
    band: str


@frozen
class Condition:
    kind: ConditionKind
    text: str
    since: float


@frozen
class Progress:
    """How far a load is. `fraction` 0 to 1 or None; `done`/`total` as the engine counts; `eta` in seconds."""

    phase: str
    fraction: float | None = None
    done: int | None = None
    total: int | None = None
    eta: float | None = None


@frozen
class Activity:
    """What an engine's counters say. `steps` only ever grows while the engine works."""

    running: int | None = None
    waiting: int | None = None
    steps: float | None = None
    tokens_per_second: float | None = None
    kv_usage: float | None = None


# Events are named by what happened. Each is one row of TRANSITIONS.


@frozen
class Launched:
    pid: int
    pgid: int
    generation: int
    endpoint: str
    config_hash: str
    gpus: tuple[str, ...] = ()
    api_key: Secret | None = None


@frozen
class Adopted:
    """Taken over from an earlier supervisor, which had launched it at `launched_at`."""

    pid: int
    pgid: int
    generation: int
    endpoint: str
    config_hash: str
    gpus: tuple[str, ...] = ()
    launched_at: float | None = None
    api_key: Secret | None = None


@frozen
class LoadingSeen:
    """The first sign of loading, in words (`process VLLM::EngineCor`)."""

    sign: str


@frozen
class ProgressSeen:
    progress: Progress


@frozen
class ReadyConfirmed:
    """Both questions answered yes, of our process."""


@frozen
class DrainBegan:
    by: str


@frozen
class DrainEnded:
    """The wish to drain was taken back while the engine was still loaded."""


@frozen
class StopBegan:
    """It is to end. `waits`: without any signal so far, for the requests that run in it."""

    text: str
    waits: bool = False


@frozen
class WaitEnded:
    """A stop waits no longer for requests; `left` are ended with the engine, as far as they were counted."""

    left: int


@frozen
class Stopped:
    """Gone as intended; `text` says how (`SIGTERM, 4.2 s`), `seconds` how long that took where it was an end."""

    text: str
    seconds: float | None = None


@frozen
class Failed:
    """Gone without having been asked, or never ready, or not launched at all. Counts as a failure in a row
    unless `counted` is False (a preflight that refused)."""

    reason: Reason
    counted: bool = True


@frozen
class Unplaced:
    """There are no GPUs for it now: it waits for them, and failures in a row are neither counted nor forgotten."""

    text: str


@frozen
class RetryScheduled:
    at: float
    attempt: int
    limit: int


@frozen
class GaveUp:
    """No further attempt until told; `text` says why."""

    text: str


@frozen
class Requeued:
    """Wanted again after an end: the failures in a row are forgotten."""


@frozen
class Steadied:
    """Ready for `restart_stable`: earlier failures are forgotten."""


@frozen
class ConditionSet:
    kind: ConditionKind
    text: str


@frozen
class ConditionCleared:
    kind: ConditionKind


@frozen
class Awoken:
    """It is out of its sleep mode and answers, after so many seconds."""

    seconds: float


@frozen
class Noticed:
    """One short phrase on what is being waited for; no transition, no history."""

    detail: str


@frozen
class ActivitySeen:
    activity: Activity


@frozen
class Retitled:
    """The names under which it is shown, and whether requests load it: a new launch or a reload may change them."""

    name: str
    model: str
    engine: str
    on_demand: bool | None = None
    can_sleep: bool | None = None
    """None: as it was."""


DEFAULT_SLOTS = 256
"""Requests sent at a time to an engine whose limit is not known: vLLM's own."""


@frozen
class SlotsFound:
    """How many requests it gets at a time, by a new answer or a new file; `source` as in `ShardStatus.slots_from`."""

    slots: int | None
    source: str = ""


Event = (
    Launched
    | Adopted
    | LoadingSeen
    | ProgressSeen
    | ReadyConfirmed
    | DrainBegan
    | DrainEnded
    | StopBegan
    | WaitEnded
    | Stopped
    | Failed
    | Unplaced
    | RetryScheduled
    | GaveUp
    | Requeued
    | Steadied
    | ConditionSet
    | ConditionCleared
    | Awoken
    | Noticed
    | ActivitySeen
    | Retitled
    | SlotsFound
)
EVENT_TYPES: tuple[type, ...] = (
    Launched,
    Adopted,
    LoadingSeen,
    ProgressSeen,
    ReadyConfirmed,
    DrainBegan,
    DrainEnded,
    StopBegan,
    WaitEnded,
    Stopped,
    Failed,
    Unplaced,
    RetryScheduled,
    GaveUp,
    Requeued,
    Steadied,
    ConditionSet,
    ConditionCleared,
    Awoken,
    Noticed,
    ActivitySeen,
    Retitled,
    SlotsFound,
)

_P, _S, _L, _R, _D, _X, _F = ShardState
_ANYWHERE: dict[tuple[ShardState, type], ShardState] = {
    (state, event): state for state in ShardState for event in (ConditionSet, ConditionCleared, Noticed, Retitled)
}

TRANSITIONS: Mapping[tuple[ShardState, type], ShardState] = {
    **_ANYWHERE,
    (_P, Launched): _S,
    (_P, Adopted): _S,
    (_P, Stopped): _X,
    (_P, Failed): _F,
    (_P, Requeued): _P,
    (_P, Unplaced): _P,
    **{(state, SlotsFound): state for state in (_S, _L, _R, _D)},
    (_S, LoadingSeen): _L,
    (_S, ProgressSeen): _L,
    (_S, ReadyConfirmed): _R,
    (_S, StopBegan): _D,
    (_S, Stopped): _X,
    (_S, Failed): _F,
    (_L, LoadingSeen): _L,
    (_L, ProgressSeen): _L,
    (_L, ReadyConfirmed): _R,
    (_L, StopBegan): _D,
    (_L, Stopped): _X,
    (_L, Failed): _F,
    (_R, ReadyConfirmed): _R,
    (_R, ActivitySeen): _R,
    (_R, Steadied): _R,
    (_R, Awoken): _R,
    (_R, DrainBegan): _D,
    (_R, StopBegan): _D,
    (_R, Stopped): _X,
    (_R, Failed): _F,
    (_D, ActivitySeen): _D,
    (_D, DrainBegan): _D,
    (_D, DrainEnded): _R,
    (_D, StopBegan): _D,
    (_D, WaitEnded): _D,
    (_D, Stopped): _X,
    (_D, Failed): _F,
    (_X, Launched): _S,
    (_X, Failed): _F,
    (_X, Requeued): _P,
    (_X, Unplaced): _P,
    (_F, Launched): _S,
    (_F, Failed): _F,
    (_F, Stopped): _X,
    (_F, RetryScheduled): _F,
    (_F, GaveUp): _F,
    (_F, Requeued): _P,
    (_F, Unplaced): _P,
}


class IllegalTransition(Exception):
    """A pair of state and event that the table does not know: a bug in llmgw."""


@frozen
class ShardStatus:
    """The fact about one instance. Times are seconds since the epoch."""

    id: ShardId
    name: str
    model: str
    engine: str
    state: ShardState = ShardState.PENDING
    since: float = 0.0
    conditions: tuple[Condition, ...] = ()
    progress: Progress | None = None
    reason: Reason | None = None
    detail: str = ""
    pid: int | None = None
    pgid: int | None = None
    adopted: bool = False
    generation: int = 0
    launched_at: float | None = None
    was_ready: bool = False
    """Its last life came as far as Ready: what ended it then was no failed load."""
    restarts: int = 0
    """Attempts after a failure since the shard was last wanted anew."""
    failures: int = 0
    """Failures in a row."""
    next_attempt: float | None = None
    attempt_limit: int = 0
    endpoint: str | None = None
    gpus: tuple[str, ...] = ()
    activity: Activity | None = None
    stop_waits: bool = False
    """A stop has begun, and waits for the requests that run in it."""
    config_hash: str = ""
    load_seconds: float | None = None
    """How long the last load took, from launch to Ready."""
    unload_seconds: float | None = None
    """How long the last stop took, from the first signal to its GPUs being free; without the requests that finished."""
    wake_seconds: float | None = None
    """How long it last took to wake it."""
    on_demand: bool = False
    """Requests load it and idleness unloads it (`idle_timeout`)."""
    can_sleep: bool = False
    """It has, or will be launched with, the engine's own sleep mode (`idle_action = "sleep"`)."""
    api_key: Secret | None = None
    """What the engine asks for, for those who send it requests. Never shown."""
    slots: int | None = None
    """Requests that it gets at a time, as far as that is known."""
    slots_from: str = ""
    """Where `slots` was read: `max_inflight` of the file, else the engine's `args`, `props` or `server_info`."""

    def condition(self, kind: ConditionKind) -> Condition | None:
        return next((c for c in self.conditions if c.kind is kind), None)

    @property
    def routable(self) -> bool:
        """May new requests be sent to it?"""
        blocking = {ConditionKind.UNHEALTHY, ConditionKind.SLEEPING, ConditionKind.STOPPING}
        return self.state is ShardState.READY and not any(c.kind in blocking for c in self.conditions)

    @property
    def may_finish(self) -> bool:
        """May what runs in it go on? Not from the moment on in which nobody waits for it any more."""
        is_up = self.state in (ShardState.READY, ShardState.DRAINING)
        return is_up and (self.stop_waits or self.condition(ConditionKind.STOPPING) is None)


def with_condition(
    conditions: tuple[Condition, ...], kind: ConditionKind, text: str, now: float
) -> tuple[Condition, ...]:
    """Set or renew a condition; the time of one that already holds is kept."""
    old = next((c for c in conditions if c.kind is kind), None)
    if old is None:
        return (*conditions, Condition(kind, text, now))
    # In its place: the same condition set again with the same text changes nothing, and so is no news.
    return tuple(evolve(c, text=text) if c is old else c for c in conditions)


def without_condition(conditions: tuple[Condition, ...], *kinds: ConditionKind) -> tuple[Condition, ...]:
    return tuple(c for c in conditions if c.kind not in kinds)


def advance(status: ShardStatus, event: Event, now: float) -> ShardStatus:
    """The status after `event` at time `now` (seconds since the epoch).

    Raises IllegalTransition for a pair that TRANSITIONS does not list.
    """
    state = TRANSITIONS.get((status.state, type(event)))
    if state is None:
        raise IllegalTransition(f"{type(event).__name__} while {status.state}")
    moved = evolve(status, state=state, since=status.since if state is status.state else now)
    return _apply(moved, event, now, was=status.state)


def _apply(status: ShardStatus, event: Event, now: float, *, was: ShardState) -> ShardStatus:
    conditions = status.conditions
    match event:
        case Launched() | Adopted():
            adopted = isinstance(event, Adopted)
            kept = tuple(c for c in conditions if c.kind in SURVIVES_LAUNCH)
            if adopted:
                kept = with_condition(kept, ConditionKind.ADOPTED, "taken over", now)
            return evolve(
                status,
                pid=event.pid,
                pgid=event.pgid,
                generation=event.generation,
                endpoint=event.endpoint,
                config_hash=event.config_hash,
                gpus=event.gpus,
                api_key=event.api_key,
                slots=None,
                slots_from="",
                adopted=adopted,
                was_ready=False,
                launched_at=event.launched_at if isinstance(event, Adopted) else now,
                conditions=kept,
                progress=None,
                next_attempt=None,
                activity=None,
                detail="",
                restarts=status.restarts + (1 if status.failures and not adopted else 0),
            )
        case LoadingSeen(sign=sign):
            return evolve(status, detail=sign)
        case ProgressSeen(progress=progress):
            return evolve(status, progress=progress)
        case ReadyConfirmed():
            # How long an adopted engine had loaded is not known here; a renewed confirmation is no load.
            load = status.load_seconds
            if was is not ShardState.READY and not status.adopted and status.launched_at is not None:
                load = now - status.launched_at
            gone = (ConditionKind.UNHEALTHY,)
            return evolve(
                status,
                progress=None,
                detail="",
                reason=None,
                was_ready=True,
                load_seconds=load,
                conditions=without_condition(conditions, *gone),
            )
        case DrainBegan(by=by):
            return evolve(status, detail=f"drained by {by}")
        case DrainEnded():
            return evolve(status, detail="")
        case StopBegan(text=text, waits=waits):
            return evolve(
                status,
                detail=text,
                stop_waits=waits,
                conditions=with_condition(conditions, ConditionKind.STOPPING, text, now),
            )
        case WaitEnded():
            return evolve(status, stop_waits=False)
        case Stopped(text=text, seconds=seconds):
            took = status.unload_seconds if seconds is None else seconds
            ended = _ended(status)
            return evolve(ended, detail=text, reason=None, failures=0, next_attempt=None, unload_seconds=took)
        case Failed(reason=reason, counted=counted):
            failures = status.failures + (1 if counted else 0)
            ended = _ended(status)
            if not counted and (again := status.condition(ConditionKind.BACKOFF)) is not None:
                # The same check said no again: it goes on waiting, which is no news.
                ended = evolve(ended, conditions=(*ended.conditions, again))
            return evolve(ended, detail="", reason=reason, failures=failures, next_attempt=None)
        case Unplaced(text=text):
            kept = without_condition(conditions, ConditionKind.BACKOFF)
            return evolve(
                status,
                reason=None,
                detail="",
                next_attempt=None,
                conditions=with_condition(kept, ConditionKind.UNPLACED, text, now),
            )
        case RetryScheduled(at=at, attempt=attempt, limit=limit):
            text = f"retry {attempt}/{limit}" if limit else f"retry {attempt}"
            return evolve(
                status,
                next_attempt=at,
                attempt_limit=limit,
                conditions=with_condition(conditions, ConditionKind.BACKOFF, text, now),
            )
        case GaveUp(text=text):
            return evolve(
                status,
                detail=text,
                next_attempt=None,
                conditions=without_condition(conditions, ConditionKind.BACKOFF),
            )
        case Requeued():
            return evolve(
                status,
                failures=0,
                restarts=0,
                reason=None,
                detail="",
                next_attempt=None,
                conditions=without_condition(conditions, ConditionKind.BACKOFF, ConditionKind.UNPLACED),
            )
        case Steadied():
            return evolve(status, failures=0)
        case ConditionSet(kind=kind, text=text):
            return evolve(status, conditions=with_condition(conditions, kind, text, now))
        case ConditionCleared(kind=kind):
            return evolve(status, conditions=without_condition(conditions, kind))
        case Awoken(seconds=seconds):
            awake = without_condition(conditions, ConditionKind.SLEEPING)
            return evolve(status, wake_seconds=seconds, detail="", conditions=awake)
        case Noticed(detail=detail):
            return evolve(status, detail=detail)
        case ActivitySeen(activity=activity):
            return evolve(status, activity=activity)
        case Retitled(name=name, model=model, engine=engine, on_demand=on_demand, can_sleep=can_sleep):
            loads = status.on_demand if on_demand is None else on_demand
            sleeps = status.can_sleep if can_sleep is None else can_sleep
            return evolve(status, name=name, model=model, engine=engine, on_demand=loads, can_sleep=sleeps)
        case SlotsFound(slots=slots, source=source):
            return evolve(status, slots=slots, slots_from=source)


def _ended(status: ShardStatus) -> ShardStatus:
    """Without what only a living engine has. GPU_HELD, HELD and BUG outlive it."""
    kept = {ConditionKind.GPU_HELD, ConditionKind.HELD, ConditionKind.BUG}
    return evolve(
        status,
        pid=None,
        pgid=None,
        progress=None,
        activity=None,
        stop_waits=False,
        api_key=None,
        slots=None,
        slots_from="",
        conditions=tuple(c for c in status.conditions if c.kind in kept),
    )


@frozen
class Transition:
    """One line of the board's history: a transition, a wish, or a condition that came or went."""

    sequence: int
    at: float
    shard: str
    kind: str
    text: str
    before: str | None = None
    after: str | None = None
    by: str | None = None


QUIET_EVENTS = (Noticed, ActivitySeen, ProgressSeen, Retitled, SlotsFound)
"""Events that change the status but are no news by themselves."""


def is_news(before: ShardStatus, event: Event, after: ShardStatus) -> bool:
    """Whether it gets a line in the history. A change of state always does, whatever brought it about; a check that
    says no once more, every half minute and for hours, does not.
    """
    if before.state is not after.state:
        return True
    waits = before.condition(ConditionKind.BACKOFF) is not None and before.failures == after.failures
    if waits and isinstance(event, Failed | RetryScheduled):
        return before.reason != after.reason
    if isinstance(event, WaitEnded):
        return event.left > 0
    return not isinstance(event, QUIET_EVENTS)


def describe(before: ShardStatus, event: Event, after: ShardStatus) -> str:
    """The sentence that history, journal and log show for a committed event."""
    match event:
        case Launched(pid=pid, generation=generation):
            return f"launched, pid {pid}, generation {generation}"
        case Adopted(pid=pid, generation=generation):
            return f"adopted, pid {pid}, generation {generation}"
        case LoadingSeen(sign=sign):
            return sign
        case ProgressSeen(progress=progress):
            return progress.phase
        case ReadyConfirmed():
            if after.adopted:
                return "ready (taken over)"
            seconds = after.load_seconds
            return f"ready after {seconds:.1f} s" if seconds is not None else "ready"
        case DrainBegan(by=by):
            return f"drained by {by}"
        case DrainEnded():
            return "back to ready"
        case StopBegan(text=text) | Stopped(text=text) | GaveUp(text=text):
            return text
        case WaitEnded(left=left):
            return f"{left} request{'s' * (left != 1)} still running, waited long enough"
        case Failed(reason=reason):
            return reason.cause
        case Unplaced(text=text):
            return f"no GPUs: {text}"
        case RetryScheduled(attempt=attempt, limit=limit):
            return f"retry {attempt}/{limit}" if limit else f"retry {attempt}"
        case Requeued():
            return "wanted again"
        case Steadied():
            return "stable; earlier failures are forgotten"
        case ConditionSet(kind=kind, text=text):
            return f"{kind}: {text}"
        case ConditionCleared(kind=kind):
            return f"{kind}: over"
        case Awoken(seconds=seconds):
            return f"awake after {seconds:.1f} s"
        case _:
            return type(event).__name__


Snapshots = Mapping[ShardId, ShardStatus]


@frozen
class Instance:
    """One line of a snapshot: the fact and the wish."""

    status: ShardStatus
    intent: Intent


def is_loadable(instance: Instance, *, on_demand: bool) -> bool:
    """A request may bring it up (again): it has an `idle_timeout` (`on_demand`), or sleeps and can be woken. Not what
    an operator has stopped or drained, nor what failed so often that it is not tried again. True also while it is up.
    """
    intent, status = instance.intent, instance.status
    if (intent.operator and intent.wish in (Wish.STOP, Wish.DRAIN)) or has_given_up(status):
        return False
    return on_demand or intent.wish is Wish.SLEEP or status.condition(ConditionKind.SLEEPING) is not None


def is_coming(instance: Instance) -> bool:
    """It comes without anybody's asking: under way, waiting for its next attempt or its GPUs, or ill for the moment."""
    status = instance.status
    if instance.intent.wish is not Wish.START or status.condition(ConditionKind.SLEEPING) is not None:
        return False
    if status.state is ShardState.FAILED:
        # Until it is decided what follows there is hope.
        return not has_given_up(status)
    # Stopped although it is wanted: it ended by itself and stays down. A restart passes through in no time.
    return status.state is not ShardState.STOPPED


def has_given_up(status: ShardStatus) -> bool:
    """It failed, and it was decided that there is no further attempt until told."""
    # The detail is the decision's text: between a failure and the decision it is empty.
    return status.state is ShardState.FAILED and status.next_attempt is None and bool(status.detail)


@frozen
class Snapshot:
    """Everything at one revision; immutable."""

    revision: int
    shards: Mapping[ShardId, Instance] = field(factory=dict)

    def named(self, name: str) -> tuple[Instance, ...]:
        """Instances of a shard or the one instance that is shown under this name, in order."""
        return tuple(
            instance
            for id_, instance in sorted(self.shards.items())
            if name in (id_.name, str(id_), instance.status.name)
        )
