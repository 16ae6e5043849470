"""Puts a ready engine to sleep and wakes it, as is wished. The process stays; whoever routes keeps away meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from llmgw.board import Cell
from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardSpec
from llmgw.domain.status import Awoken, ConditionKind, ConditionSet, Event, Intent, Noticed, ShardStatus, Wish
from llmgw.engines.profile import Call, SleepMode
from llmgw.supervisor.probes import Probes
from llmgw.supervisor.readiness import Answered, Refused

SLEEP_TIMEOUT = 600.0
"""Seconds for one call: a level 1 sleep copies all weights to host memory, which takes a second for some 10 GB."""

ANSWER_TIMEOUT = 30.0
"""Seconds for the question whether it sleeps: while weights are copied it answers late."""

ASLEEP = "its GPU memory is given back; the next request wakes it"


class Sleeper(Protocol):
    """The shard whose engine it is."""

    @property
    def status(self) -> ShardStatus: ...
    @property
    def spec(self) -> ShardSpec: ...
    def report(self, event: Event) -> None: ...


class Sleeping:
    """One engine's sleep. `wait_idle` returns when no request is left in it, and is told how to say how many are;
    `is_ready` asks what is asked before Ready; `condemn` ends the engine.
    """

    def __init__(
        self,
        shard: Sleeper,
        mode: SleepMode,
        intent: Cell[Intent],
        *,
        wait_idle: Callable[[Callable[[int], None]], Awaitable[None]],
        is_ready: Callable[[Probes], Awaitable[bool]],
        condemn: Callable[[Reason], None],
    ) -> None:
        self._shard = shard
        self._mode = mode
        self._level = mode.deepest
        """Of its sleep. That of one which slept before this life is not known: then what may be lost is read again."""
        self._intent = intent
        self._wait_idle = wait_idle
        self._is_ready = is_ready
        self._condemn = condemn

    async def look(self, probes: Probes) -> bool:
        """Whether it sleeps, by its own words; one that was taken over may. Shown before it counts as ready."""
        asleep = await self._is_asleep(probes)
        if asleep:
            self._shard.report(ConditionSet(ConditionKind.SLEEPING, ASLEEP))
        return asleep

    async def run(self, probes: Probes) -> None:
        """Obey until cancelled. `probes` is for this alone: a call may take minutes, and the other questions go on."""
        while True:
            intent = self._intent.value
            if intent.wish is Wish.SLEEP and not self._sleeps:
                await self._fall_asleep(probes, intent)
            elif intent.wish is Wish.START and self._sleeps:
                await self._wake(probes)
            await self._intent.wait_change(intent)

    @property
    def _sleeps(self) -> bool:
        return self._shard.status.condition(ConditionKind.SLEEPING) is not None

    async def _fall_asleep(self, probes: Probes, intent: Intent) -> None:
        """Out of routing it is by the wish. Requests end first: a sleeping engine has dropped them."""
        async with trio.open_nursery() as nursery:

            async def until_taken_back() -> None:
                await self._intent.wait_change(intent)
                nursery.cancel_scope.cancel(reason="another wish")

            nursery.start_soon(until_taken_back)
            await self._wait_idle(self._tell_left)
            nursery.cancel_scope.cancel(reason="nothing runs")
        if self._intent.value != intent:
            return
        self._level = self._shard.spec.sleep_level
        why = await self._call(probes, self._mode.fall_asleep(self._level))
        if why and not await self._is_asleep(probes):
            remedy = 'look at its log; idle_action = "stop" unloads it instead'
            self._condemn(Reason("sleep-failed", f"it could not be put to sleep: {why}", remedy))
            return
        self._shard.report(Noticed(""))
        self._shard.report(ConditionSet(ConditionKind.SLEEPING, ASLEEP))

    def _tell_left(self, left: int) -> None:
        what = f", {left} request{'s' * (left != 1)} left" if left else ""
        self._shard.report(Noticed(f"falling asleep{what}"))

    async def _wake(self, probes: Probes) -> None:
        began = trio.current_time()
        self._shard.report(Noticed("waking up"))
        why = await self._call(probes, self._mode.wake(self._level))
        limits = self._shard.spec.limits
        with trio.move_on_after(limits.load_timeout) as waiting:
            while not why:
                if not await self._is_asleep(probes) and await self._is_ready(probes):
                    break
                await trio.sleep(limits.probe_interval)
        if waiting.cancelled_caught:
            why = f"not ready in {limits.load_timeout:g} s (load_timeout)"
        if why:
            self._condemn(Reason("wake-failed", f"it could not be woken: {why}", "it is loaded anew"))
            return
        self._shard.report(Awoken(round(trio.current_time() - began, 1)))

    async def _call(self, probes: Probes, calls: tuple[Call, ...]) -> str:
        """Why one of these did not succeed, in words; empty when all did."""
        for call in calls:
            answer = await probes.tell(call.method, call.path, SLEEP_TIMEOUT, call.body)
            if isinstance(answer, Refused):
                return "its port is closed"
            if not isinstance(answer, Answered):
                return f"no answer to {call.path}"
            if not answer.is_yes:
                return f"{call.path} answers {answer.status}"
        return ""

    async def _is_asleep(self, probes: Probes) -> bool:
        return await probes.ask_is_sleeping(self._mode.is_sleeping_path, ANSWER_TIMEOUT)
