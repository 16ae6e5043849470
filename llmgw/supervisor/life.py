"""One life of an engine, watched from launch to the decision how it ends: the first decision stands.

It reports through its shard and asks the engine; what the answers mean is decided in `readiness`. Carrying out the end
is the shard's.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import trio
from attrs import frozen

from llmgw.board import Cell
from llmgw.discovery.availability import unhealthy
from llmgw.domain.hardware import Gpu, Inventory
from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardSpec, UnixEndpoint
from llmgw.domain.status import (
    ActivitySeen,
    ConditionCleared,
    ConditionKind,
    ConditionSet,
    DrainBegan,
    DrainEnded,
    Event,
    Intent,
    LoadingSeen,
    Noticed,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    ShardState,
    ShardStatus,
    Steadied,
    StopBegan,
    WaitEnded,
    Wish,
)
from llmgw.engines.adapter import profile
from llmgw.engines.metrics import read_activity
from llmgw.engines.progress import ProgressReader
from llmgw.engines.slots import slots_in_answer
from llmgw.supervisor.follow import FollowedTail
from llmgw.supervisor.launch import (
    Engine,
    Host,
    engine_stays,
)
from llmgw.supervisor.logtail import LogLine
from llmgw.supervisor.members import Member
from llmgw.supervisor.probes import Probes
from llmgw.supervisor.readiness import (
    STALL_NOTICE,
    Answered,
    Health,
    ListenerFact,
    Refused,
    StallWatch,
    Verdict,
    deadline_of,
    judge,
    judge_health,
)
from llmgw.supervisor.sleeping import Sleeping

log = logging.getLogger(__name__)

TERM_LIKE = (0, -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT, 128 + signal.SIGINT)

REFUSED_LIMIT = 15.0
"""Seconds of nothing but refused connections, with the process alive, until a Ready engine counts as dead. Engines
that close their port on their own account are gone within 5 s (vLLM's watchdog)."""

BLOCKED_LIMIT = 5.0
"""Seconds that another process may answer in the place of an engine that is not Ready, until that counts as a failed
start. vLLM binds its port early and listens late: when another listens first it says nothing, reports a complete
start, and keeps its GPU memory for ever (measured with two of them)."""

METRICS_EVERY = 3
"""Counters are read with every third health question: a stall shows after 30 s at the earliest anyway."""

DRAIN_POLL = 0.5
"""Seconds between two looks at the running requests while draining. The gateway tells its count twice as often."""

CUT_PAUSE = 0.05
"""Seconds for the gateway to end what is left in an engine, before a signal comes: it hears of it a moment later."""

QUIET_LOOKS = 2
"""Looks in a row without a request until an engine behind the gateway counts as idle."""

SLOTS_TIMEOUT = 2.0
"""Seconds at most that the question for an engine's slots may hold up Ready; asked again later, it matters less."""


@frozen
class Exited:
    """The leader is gone and nobody asked for it."""


@frozen
class Asked:
    """Somebody wished it: a stop, a restart (`again`), or the end of llmgw."""

    by: str
    again: bool = False


@frozen
class Condemned:
    """llmgw ends it itself: a limit was passed, or it is stalled, ill or deaf."""

    reason: Reason
    stalled: bool = False
    """It would answer SIGTERM by waiting for requests that never end: SIGKILL at once (vLLM: measured)."""


@frozen
class Left:
    """llmgw leaves, the engine stays."""


Ending = Exited | Asked | Condemned | Left


class Reporter(Protocol):
    """What a life needs of its shard: the status, its only way to change, and the orders in force."""

    @property
    def status(self) -> ShardStatus: ...
    @property
    def spec(self) -> ShardSpec: ...
    @property
    def tail(self) -> FollowedTail: ...
    @property
    def is_retired(self) -> bool: ...
    def report(self, event: Event) -> None: ...
    def show_slots(self, engine: Engine) -> None: ...


def gone_bad(inventory: Inventory, uuids: Sequence[str], labels: Sequence[str]) -> str:
    """What is wrong with the GPUs of a running engine by a current inventory; empty when nothing is."""
    found = []
    for uuid, label in zip(uuids, labels, strict=False):
        card = inventory.by_uuid(uuid)
        wrong = "has dropped off" if card is None else unhealthy(card) if isinstance(card, Gpu) else None
        if wrong is not None:
            found.append(f"GPU {label}: {wrong}")
    return "; ".join(found)


def _in_words(left: int) -> str:
    return f"{left} request{'s' * (left != 1)}"


def gone_in_words(code: int | None) -> str:
    return f"its main process is gone (exit code {'unknown' if code is None else code})"


class Life:
    """What watches one life of an engine, from launch to the decision how it ends."""

    def __init__(
        self, shard: Reporter, host: Host, engine: Engine, spec: ShardSpec, intent: Cell[Intent], answered: Intent
    ) -> None:
        """`answered` is the wish that this life answers: it was carried out by launching."""
        self._shard = shard
        self._host = host
        self._intent = intent
        self._engine = engine
        self._spec = spec
        """The keys that the engine was started with; limits are read from `shard.spec`, where a reload changes them."""
        self._profile = profile(engine.kind)
        self._reader = ProgressReader(engine.kind)
        self._launched = trio.current_time()
        self._progressed = self._launched
        self._ask_now = Cell(0)
        """Counts reasons to ask at once instead of at the next interval."""
        self._left = 0
        """Requests that a stop still waits for, by the last look."""
        self._drained_by = Cell("")
        """Who wished the drain that is in force; empty for none."""
        self._moved = Cell(0)
        """Counts what moves the limits of loading: signs, progress, a reload."""
        self.obeyed = answered
        """The last wish that was carried out in this life."""
        self._workers: tuple[Member, ...] = ()
        """Processes beside the leader that were there at Ready."""
        self._ending: Ending | None = None
        self._scope = trio.CancelScope()
        self._health_path = spec.ready_path or self._profile.ready_path
        self._models_path = spec.models_path
        self._asks_slots = self._profile.slots_path is not None and engine.slots[0] is None
        self._sleeping = self._make_sleeping()
        """None where it was not launched with sleep mode."""

    async def watch(self) -> Ending:
        """Watch until one of the watchers decides how it ends; returns the first decision."""
        with self._scope:
            async with self._probes() as probes, self._probes() as callers, trio.open_nursery() as nursery:
                nursery.start_soon(self._wait_exit)
                nursery.start_soon(self._obey)
                nursery.start_soon(self._obey_leaving)
                nursery.start_soon(self._keep_limits)
                if self._engine.gpu_uuids:
                    nursery.start_soon(self._watch_gpus)
                await self._until_ready(probes)
                if self._sleeping is not None:
                    nursery.start_soon(self._sleeping.run, callers)
                nursery.start_soon(self._watch_members)
                nursery.start_soon(self._grow_steady)
                nursery.start_soon(self._follow_drain)
                await self._stay_ready(probes)
        assert self._ending is not None
        return self._ending

    def _probes(self) -> Probes:
        return Probes(self._engine.endpoint, self._engine.key)

    def _make_sleeping(self) -> Sleeping | None:
        mode = self._profile.sleep
        if mode is None or self._spec.idle_action != "sleep":
            return None

        async def is_ready(probes: Probes) -> bool:
            return (await self._ask_both(probes, self._shard.spec.limits.probe_timeout)).ready

        return Sleeping(
            self._shard,
            mode,
            self._intent,
            wait_idle=self._wait_idle,
            is_ready=is_ready,
            condemn=lambda reason: self._decide(Condemned(reason)),
        )

    def _decide(self, ending: Ending) -> None:
        """The first decision stands."""
        if self._ending is None:
            self._ending = ending
            self._scope.cancel(reason=type(ending).__name__)

    # -- what comes from outside -------------------------------------------------------------------------

    async def _wait_exit(self) -> None:
        await self._engine.wait_exit()
        code = self._engine.exit_code
        if code is not None and code not in TERM_LIKE:
            # No stop looks like this. Whoever routes must know before anything is cleaned up.
            self._shard.report(StopBegan(gone_in_words(code)))
        self._decide(Exited())

    async def _watch_gpus(self) -> None:
        """Say when one of its GPUs goes bad. The engine is left alone: it may well go on, and it knows better."""
        facts = self._host.node.facts.value
        while True:
            if facts is not None and facts.inventory.is_current:
                text = gone_bad(facts.inventory, self._engine.gpu_uuids, self._engine.gpus)
                known = self._shard.status.condition(ConditionKind.GPU_UNHEALTHY)
                if text and (known is None or known.text != text):
                    self._shard.report(ConditionSet(ConditionKind.GPU_UNHEALTHY, text))
                elif known is not None and not text:
                    self._shard.report(ConditionCleared(ConditionKind.GPU_UNHEALTHY))
            facts = await self._host.node.facts.wait_change(facts)

    async def _obey_leaving(self) -> None:
        board = self._host.board
        leaving = await board.leaving.wait_value(lambda value: value is not None)
        assert leaving is not None
        if engine_stays(self._host.settings.on_stop, leaving):
            self._decide(Left())
        else:
            self._decide(Asked(leaving.why))

    async def _obey(self) -> None:
        """Carry out wishes. The one that this life answers was carried out by launching."""
        cell, restarts = self._intent, self.obeyed.restarts
        while True:
            intent = cell.value
            if intent.wish is Wish.STOP or self._shard.is_retired:
                self._decide(Asked(intent.by))
            elif intent.restarts != restarts:
                self._decide(Asked(intent.restarted_by, again=True))
            else:
                self._settle_drain(intent)
            self.obeyed = intent
            await cell.wait_change(intent)

    def _settle_drain(self, intent: Intent) -> None:
        """Out of routing or back in; while it loads, Ready comes first."""
        state = self._shard.status.state
        if intent.wish is Wish.DRAIN and state is ShardState.READY:
            self._shard.report(DrainBegan(intent.by))
            self._drained_by.set(intent.by)
        elif intent.wish in (Wish.START, Wish.SLEEP) and state is ShardState.DRAINING:
            self._shard.report(DrainEnded())
            self._drained_by.set("")

    # -- the log -----------------------------------------------------------------------------------------

    def on_lines(self, lines: Sequence[LogLine]) -> None:
        """Signs of loading and progress in new output. Called between two awaits; must be quick and never raise."""
        if self._shard.status.state not in (ShardState.STARTING, ShardState.LOADING):
            return
        for line in lines:
            if line.own:
                continue
            for event in self._reader.feed(line.text):
                if isinstance(event, ProgressSeen):
                    self._on_progress(event.progress)
                else:
                    self._on_sign(event.sign)
            if self._reader.ready_hint:
                self._ask_now.set(self._ask_now.value + 1)

    def _on_sign(self, sign: str) -> None:
        if self._shard.status.state is ShardState.STARTING:
            self._progressed = trio.current_time()
            self._shard.report(LoadingSeen(sign))
            self._moved.set(self._moved.value + 1)

    def _on_progress(self, progress: Progress) -> None:
        status = self._shard.status
        if status.state not in (ShardState.STARTING, ShardState.LOADING):
            return
        before = status.progress
        key = (progress.phase, progress.fraction, progress.done)
        if before is None or key != (before.phase, before.fraction, before.done):
            self._progressed = trio.current_time()
            self._moved.set(self._moved.value + 1)
        self._shard.report(ProgressSeen(progress))

    # -- starting and loading ----------------------------------------------------------------------------

    async def _keep_limits(self) -> None:
        """End a start or load that takes too long; a load that moves is never ended by `load_timeout`."""
        while True:
            moved = self._moved.value
            state = self._shard.status.state
            deadline = deadline_of(self._shard.spec.limits, state, self._launched, self._progressed)
            if deadline is None:
                return
            if trio.current_time() >= deadline.at:
                self._decide(Condemned(self._too_slow(deadline.key, deadline.limit)))
            # A reload may change the limits meanwhile, hence a look at least each second.
            with trio.move_on_at(min(deadline.at, trio.current_time() + 1.0)):
                await self._moved.wait_change(moved)

    def _too_slow(self, key: str, limit: float) -> Reason:
        last = self._shard.tail.last_shown
        waiting = self._shard.status.detail
        what = {
            "start_timeout": "no sign of loading",
            "load_timeout": "no progress of the load",
            "load_timeout_max": "not ready",
        }[key]
        cause = f"{what} in {limit:g} s ({key})"
        if waiting:
            cause += f"; {waiting}"
        return Reason(
            key.replace("_", "-"),
            cause,
            f"look at llmgw logs {self._shard.status.name}; if it only needs longer, raise {key}",
            (last,) if last else (),
        )

    async def _until_ready(self, probes: Probes) -> None:
        warmed = not self._spec.warmup
        blocked_since: float | None = None
        while True:
            asked = self._ask_now.value
            limits = self._shard.spec.limits
            verdict = await self._ask_both(probes, limits.probe_timeout)
            # One that was taken over may be asleep.
            asleep = verdict.ready and self._sleeping is not None and await self._sleeping.look(probes)
            if verdict.ready and not warmed and not asleep:
                verdict, warmed = await self._warm_up(probes, verdict)
            if verdict.ready:
                await self._find_slots(probes)
                await self._become_ready(verdict)
                return
            now = trio.current_time()
            blocked_since = (blocked_since or now) if verdict.blocked else None
            if blocked_since is not None and now - blocked_since >= BLOCKED_LIMIT:
                self._decide(Condemned(self._blocked(verdict.detail)))
            sign = verdict.loading or self._engine.loading_title(self._profile.loading_titles)
            if sign is not None:
                self._on_sign(sign)
            if verdict.detail != self._shard.status.detail:
                self._shard.report(Noticed(verdict.detail))
            await self._pause(limits.probe_interval, asked)

    async def _ask_both(self, probes: Probes, timeout: float) -> Verdict:
        health = await probes.ask_health(self._health_path, timeout)
        models = None
        listener: ListenerFact | None = None
        if isinstance(health, Answered) and health.is_yes and self._models_path:
            models = await probes.ask_models(self._models_path, timeout)
        if not isinstance(health, Refused):
            # Whatever was answered, or not answered at all: it may be another who did.
            listener = await self._engine.listener()
        return judge(
            health,
            models,
            self._engine.served_names,
            listener,
            loading_on_503=self._profile.loading_on_503,
            unix=self._profile.socket_before_ready and isinstance(self._engine.endpoint, UnixEndpoint),
            ask_models=bool(self._models_path),
        )

    async def _warm_up(self, probes: Probes, verdict: Verdict) -> tuple[Verdict, bool]:
        """One token before the first request of a client. An engine that refuses it is served all the same."""
        self._shard.report(Noticed("warming up: waiting for one token"))
        answer = await probes.ask_one_token(self._engine.served_names[0])
        if isinstance(answer, Answered) and answer.status < 500:
            if not answer.is_yes:
                log.warning("%s: the warm-up request was answered %d", self._shard.status.name, answer.status)
            return verdict, True
        return Verdict(False, "the warm-up request failed; asking again"), False

    async def _find_slots(self, probes: Probes) -> None:
        """How many requests it works on at a time, by its own words. Who routes wants to know it at Ready; an engine
        that has not said so by then is asked again, and one that has no such page is not."""
        path = self._profile.slots_path
        if not self._asks_slots or path is None:
            return
        answer = await probes.ask_slots(path, min(self._shard.spec.limits.probe_timeout, SLOTS_TIMEOUT))
        if not isinstance(answer, Answered):
            return
        self._asks_slots = False
        found = slots_in_answer(self._profile.kind, answer.body) if answer.is_yes else None
        if found is not None:
            self._engine.note_slots(found)
            self._shard.show_slots(self._engine)

    async def _become_ready(self, verdict: Verdict) -> None:
        shard = self._shard
        # Seen before Ready is told: from then on the end of one must be noticed, however busy the machine is.
        self._workers = tuple(one for one in await self._engine.members() if one.pid != self._engine.pid)
        shard.report(ReadyConfirmed())
        if verdict.listener_unverified:
            shard.report(ConditionSet(ConditionKind.LISTENER_UNVERIFIED, "who holds its port cannot be seen from here"))
        self._settle_drain(self._intent.value)
        await self._engine.note_ready(shard.status.load_seconds)

    async def _pause(self, seconds: float, asked: int) -> None:
        with trio.move_on_after(seconds):
            await self._ask_now.wait_change(asked)

    # -- ready -------------------------------------------------------------------------------------------

    async def _grow_steady(self) -> None:
        """Ready long enough: earlier failures are forgotten."""
        await trio.sleep(self._shard.spec.restart.stable)
        if self._shard.status.failures and self._shard.status.state in (ShardState.READY,):
            self._shard.report(Steadied())

    async def _watch_members(self) -> None:
        """The end of a process that was there at Ready is news: the API may live on with a dead engine behind it."""
        members = list(self._workers)
        while members:
            gone = await self._engine.wait_member(members)
            members.remove(gone)
            self._shard.report(ConditionSet(ConditionKind.MEMBER_LOST, f"{gone.comm} (pid {gone.pid}) ended"))
            self._ask_now.set(self._ask_now.value + 1)

    async def _stay_ready(self, probes: Probes) -> None:
        """Ask on at a lower pace: refused acts at once, no makes it unroutable, a time-out changes nothing."""
        ill_since: float | None = None
        refused_since: float | None = None
        deep_at = trio.current_time() + self._profile.deep_health_interval
        stall = StallWatch()
        rounds = 0
        another = ""
        asked = self._ask_now.value
        while True:
            limits = self._shard.spec.limits
            interval = limits.probe_interval_ready if refused_since is None else limits.probe_interval
            await self._pause(interval, asked)
            if self._ask_now.value != asked or refused_since is not None:
                asked = self._ask_now.value
                another = await self._ask_for_another()
            if another:
                health = Health("gone", another)
            else:
                health = judge_health(await probes.ask_health(self._health_path, limits.probe_timeout))
            now = trio.current_time()
            if health.kind == "yes" and self._profile.deep_health_path and now >= deep_at:
                answer = await probes.ask_health(self._profile.deep_health_path, self._profile.deep_health_timeout)
                health = judge_health(answer)
                now = trio.current_time()
                deep_at = now + self._profile.deep_health_interval
            refused_since = (refused_since or now) if health.kind == "gone" else None
            if refused_since is not None and now - refused_since >= REFUSED_LIMIT:
                self._decide(Condemned(self._deaf(another)))
            ill_since = self._show_health(health, ill_since, now)
            ill_for = now - ill_since if ill_since is not None else 0.0
            if limits.unhealthy_timeout is not None and ill_for >= limits.unhealthy_timeout:
                self._decide(Condemned(self._ill(health.text or "a process of it is gone", ill_for)))
            rounds += 1
            if rounds % METRICS_EVERY == 0:
                await self._find_slots(probes)
            if rounds % METRICS_EVERY == 0 and self._profile.metrics is not None:
                stall = await self._look_at_counters(probes, limits.probe_timeout, stall)
                self._judge_stall(stall, limits.stall_timeout)

    def _show_health(self, health: Health, ill_since: float | None, now: float) -> float | None:
        """Set or take away `unhealthy`; returns since when it is ill. A lost member counts until the next launch."""
        status = self._shard.status
        ill = health.kind in ("no", "gone")
        if ill:
            unhealthy = status.condition(ConditionKind.UNHEALTHY)
            if unhealthy is None or unhealthy.text != health.text:
                self._shard.report(ConditionSet(ConditionKind.UNHEALTHY, health.text))
        elif health.kind == "yes" and status.condition(ConditionKind.UNHEALTHY):
            self._shard.report(ConditionCleared(ConditionKind.UNHEALTHY))
        if ill or status.condition(ConditionKind.MEMBER_LOST) is not None:
            return ill_since if ill_since is not None else now
        return ill_since if health.kind == "busy" else None

    async def _ask_for_another(self) -> str:
        """Who listens in the place of this engine, in words; empty when it does so itself, or nobody does."""
        fact = await self._engine.listener()
        return f"another process answers on its port: {fact.holder}" if fact.kind == "anothers" else ""

    async def _look_at_counters(self, probes: Probes, timeout: float, stall: StallWatch) -> StallWatch:
        text = await probes.ask_metrics(timeout)
        if text is None:
            return stall
        activity = read_activity(self._profile.kind, text)
        self._shard.report(ActivitySeen(activity))
        return stall.seen(activity, trio.current_time())

    def _judge_stall(self, stall: StallWatch, limit: float | None) -> None:
        still = stall.stalled_for(trio.current_time())
        status = self._shard.status
        if still >= STALL_NOTICE:
            running = status.activity.running if status.activity else None
            text = f"{running} requests running, but no step is made"
            known = status.condition(ConditionKind.STALLED)
            # Its duration is the condition's own time: one line of history, not one for each look.
            if known is None or known.text != text:
                self._shard.report(ConditionSet(ConditionKind.STALLED, text))
            if limit is not None and still >= limit:
                reason = Reason(
                    "stalled",
                    f"{running} requests running, no step for {still:.0f} s (stall_timeout {limit:g} s)",
                    f"it is restarted; look at llmgw logs {status.name} for what it did last",
                )
                self._decide(Condemned(reason, stalled=True))
        elif status.condition(ConditionKind.STALLED):
            self._shard.report(ConditionCleared(ConditionKind.STALLED))

    def _blocked(self, text: str) -> Reason:
        return Reason(
            "port-taken",
            f"{text} ({self._engine.endpoint})",
            'stop that process, choose another port, or write port = "auto"',
        )

    def _deaf(self, another: str) -> Reason:
        return Reason(
            "port-closed",
            f"{another or 'its port has refused connections'} for {REFUSED_LIMIT:g} s while its process lives",
            f"it is restarted; look at llmgw logs {self._shard.status.name}",
        )

    def _ill(self, text: str, seconds: float) -> Reason:
        return Reason(
            "unhealthy",
            f"{text} for {seconds:.0f} s (unhealthy_timeout)",
            f"it is restarted; look at llmgw logs {self._shard.status.name}",
        )

    # -- draining ----------------------------------------------------------------------------------------

    async def drain(self, why: str) -> None:
        """Before any signal: out of routing, then wait until nothing runs, `drain_timeout` or a second signal."""
        shard = self._shard
        was = shard.status.state
        waits = was in (ShardState.READY, ShardState.DRAINING) and self._can_count
        shard.report(StopBegan(why, waits))
        if not waits:
            return
        host = self._host
        self._left = self._in_gateway
        with trio.move_on_after(shard.spec.limits.drain_timeout):
            async with trio.open_nursery() as nursery:

                async def until(wait: Callable[[], Awaitable[object]]) -> None:
                    await wait()
                    nursery.cancel_scope.cancel(reason="draining is over")

                nursery.start_soon(until, self._engine.wait_exit)
                nursery.start_soon(until, lambda: host.board.hurry.wait_value(bool))
                await self._wait_idle(self._tell_stopping)
                nursery.cancel_scope.cancel(reason="nothing runs any more")
        shard.report(WaitEnded(self._left))
        if self._left and self._is_served:
            await trio.sleep(CUT_PAUSE)

    async def _follow_drain(self) -> None:
        """Tell how many requests are left in an engine that is drained and stays loaded: somebody waits for the last
        of them, who would not see it at the pace of the other questions."""
        while True:
            by = await self._drained_by.wait_value(bool)
            async with trio.open_nursery() as nursery:

                async def until_taken_back(cancel: Callable[[], None], known: str) -> None:
                    await self._drained_by.wait_change(known)
                    cancel()

                nursery.start_soon(until_taken_back, nursery.cancel_scope.cancel, by)
                await self._wait_idle(partial(self._tell_drained, by))

    def _tell_stopping(self, left: int) -> None:
        self._left = left
        if left:
            self._shard.report(StopBegan(f"draining, {_in_words(left)} left", waits=True))

    def _tell_drained(self, by: str, left: int) -> None:
        self._shard.report(Noticed(f"drained by {by}, {_in_words(left)} left" if left else f"drained by {by}"))

    @property
    def _is_served(self) -> bool:
        return self._host.config.value.gateway is not None

    @property
    def _in_gateway(self) -> int:
        """Requests that the gateway has under way in it."""
        load = self._host.board.gateway_load.value if self._is_served else {}
        return load.get(self._shard.status.id, 0)

    @property
    def _can_count(self) -> bool:
        """Whether anybody knows of its requests."""
        return self._profile.metrics is not None or self._is_served

    async def _wait_idle(self, tell: Callable[[int], None]) -> None:
        """Return when neither the engine nor the gateway knows of a request in it; `tell` gets how many are left.

        Where there is a gateway two looks must agree: it tells its count a moment later, and a request that is on its
        way from there is counted by nobody.
        """
        quiet = 0
        async with self._probes() as probes:
            while True:
                left = await self._count_left(probes)
                quiet = quiet + 1 if left == 0 else 0
                if left is not None:
                    tell(left)
                if quiet >= (QUIET_LOOKS if self._is_served else 1):
                    return
                await trio.sleep(DRAIN_POLL)

    async def _count_left(self, probes: Probes) -> int | None:
        """Requests in it by its own counters or by the gateway's, whichever are more. None: it did not answer, which
        is no 0; a closed port and a page without counters are."""
        own = 0
        if self._profile.metrics is not None:
            answer = await probes.ask_health("/metrics", self._shard.spec.limits.probe_timeout)
            if not isinstance(answer, Answered):
                return 0 if judge_health(answer).kind == "gone" else None
            if answer.is_yes:
                activity = read_activity(self._profile.kind, answer.body)
                self._shard.report(ActivitySeen(activity))
                own = (activity.running or 0) + (activity.waiting or 0)
        return max(own, self._in_gateway)
