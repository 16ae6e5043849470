"""The task of one shard instance. The code's position is the state; `report(event)` is the only way it shows.

One life of an engine is one `async with launch(...)`: it is spawned or adopted, its log followed, its readiness and
progress watched, its wishes obeyed, and when the block is left it is gone, unless llmgw leaves and it stays.
"""

from __future__ import annotations

import logging

import trio
from attrs import frozen

from llmgw.board import Cell, StatusCell
from llmgw.domain.problem import Reason
from llmgw.domain.shard import EngineKind, ShardId, ShardSpec
from llmgw.domain.status import (
    Adopted,
    ConditionCleared,
    ConditionKind,
    ConditionSet,
    Event,
    Failed,
    GaveUp,
    Intent,
    Launched,
    Requeued,
    Retitled,
    RetryScheduled,
    ShardState,
    ShardStatus,
    SlotsFound,
    StopBegan,
    Stopped,
    Unplaced,
    Wish,
    describe,
    is_news,
)
from llmgw.supervisor.launch import (
    Ended,
    Engine,
    Host,
    LaunchRefused,
    LaunchUnplaced,
    LaunchUnwanted,
    Takeover,
    engine_stays,
    launch,
    unkillable,
)
from llmgw.supervisor.life import TERM_LIKE, Asked, Condemned, Ending, Exited, Left, Life, gone_in_words
from llmgw.supervisor.restart import GiveUp, Retry, backoff, decide_restart

log = logging.getLogger(__name__)

SIGNAL_GRACE = 0.2
"""Seconds that an exit which looks like an answer to SIGTERM waits for our own signals to be read: somebody who
terminates everybody at once means a stop, not a crash."""


HELD_FIRST, HELD_LONGEST = 1.0, 30.0
"""Seconds between two questions after GPU memory that did not come back; doubled, since each costs a process."""

NEWS_PAUSE = 1.0
"""Seconds at least between two tries of a shard that waits for news of the node."""

BUG_PAUSE = 5.0
"""Seconds after an error in llmgw itself until its shard is looked after again: never a busy loop."""

STILL_THERE = "not stopped: another stop tries it again"


@frozen
class Over:
    """The life ended as somebody wished; `again`: and the next one begins after `pause` seconds."""

    again: bool = False
    pause: float = 0.0


@frozen
class Broken:
    """The life ended in a failure, or could not begin."""

    reason: Reason
    counted: bool = True


@frozen
class Waiting:
    """There were no GPUs for it; `seen` is the count of news before it asked."""

    seen: int


Outcome = Over | Broken | Waiting | Left


@frozen
class Orders:
    """What the supervisor wants of a shard: its spec, and why its replacement is held back, if it is."""

    spec: ShardSpec
    held: str = ""
    retired: bool = False
    """No longer in the configuration: its task ends as soon as its engine is gone."""


class Shard:
    """One instance. Orders are written by the supervisor, `intent` by Board.ask, the status by this task alone."""

    def __init__(self, host: Host, id_: ShardId, cell: StatusCell, intent: Cell[Intent], orders: Cell[Orders]) -> None:
        self.id = id_
        self.tail = host.new_tail(orders.value.spec)
        self.orders = orders
        self._host = host
        self._cell = cell
        self._intent = intent
        self._answered = intent.value
        """The wish that the last life answered: an older one starts nothing. At first the one it was born with, so
        that a restart which was wished before this task ran is not lost on an adopted engine."""
        self._cards: tuple[str, ...] = ()
        """UUIDs of the GPUs of the last life."""
        self._held = Cell(False)
        """Whether GPU memory of the last life is not confirmed free."""
        self._refusals = 0
        """Launches in a row that a check refused. They are no failures, but the pauses grow with them."""

    @property
    def status(self) -> ShardStatus:
        return self._cell.status

    @property
    def spec(self) -> ShardSpec:
        """The spec in force. A running engine may have been launched with an older one."""
        return self.orders.value.spec

    @property
    def is_retired(self) -> bool:
        """It is no longer in the configuration: every wish but its end is void."""
        return self.orders.value.retired

    def report(self, event: Event) -> None:
        before = self._cell.status
        after = self._cell.report(event)
        if isinstance(event, Stopped | GaveUp) and after is not before:
            # It wants no GPUs any more.
            self._host.node.wake()
        if after is before or not is_news(before, event, after):
            return
        told = describe(before, event, after)
        # "ready: ready after 2 s" would say it twice.
        text = told if told.startswith(after.state.value) else f"{after.state}: {told}"
        if isinstance(event, Failed):
            remedy = f"; {event.reason.remedy}" if event.reason.remedy else ""
            log.warning("%s: %s%s", after.name, text, remedy)
        else:
            log.info("%s: %s", after.name, text)

    def show_slots(self, engine: Engine) -> None:
        """How many requests the engine gets at a time: what the file says, else its own limit."""
        written = self.spec.max_inflight
        self.report(SlotsFound(written, "max_inflight") if written is not None else SlotsFound(*engine.slots))

    async def run(self, takeover: Takeover | None = None) -> None:
        """Live until llmgw leaves or it is retired. An error in this task fails this shard and never leaves it."""
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._show_orders)
                    nursery.start_soon(self._watch_held)
                    await self._live(takeover)
                    nursery.cancel_scope.cancel(reason="the shard has ended")
                return
            except Exception:
                # The outer one of two broad catches: whatever it is, the other shards live on. A launch that was cut
                # short has taken its engine down.
                log.exception("%s: an error in llmgw itself, outside of an engine's life", self.status.name)
                self._confess()
            takeover = None
            await trio.sleep(BUG_PAUSE)

    async def clear_remains(self, engine: Engine) -> bool:
        """End what a leader left that died while llmgw was away, before anything new is launched. False: an error in
        llmgw itself came between, and something may still be there."""
        self._cards = engine.gpu_uuids
        try:
            ended = await engine.take_down()
        except Exception:
            log.exception("%s: an error in llmgw itself while old processes were ended", self.status.name)
            self._confess()
            await trio.sleep(BUG_PAUSE)
            return False
        if ended.unkillable:
            self._fail(unkillable(ended.unkillable), counted=False)
        self._after_end(ended.held)
        return True

    async def _show_orders(self) -> None:
        """Take up what a reload changes without touching the engine."""
        orders = self.orders.value
        while True:
            orders = await self.orders.wait_change(orders)
            name = self.id.shown(orders.spec.replicas)
            spec = orders.spec
            on_demand, sleeps = spec.idle_timeout is not None, spec.idle_action == "sleep"
            self.report(Retitled(name, self.status.model, self.status.engine, on_demand, sleeps))
            if orders.held:
                self.report(ConditionSet(ConditionKind.HELD, orders.held))
            elif self.status.condition(ConditionKind.HELD):
                self.report(ConditionCleared(ConditionKind.HELD))
            engine = self._host.engines.get(self.id)
            if engine is not None and self.status.state.is_live:
                self.show_slots(engine)

    async def _live(self, takeover: Takeover | None) -> None:
        again = takeover is not None
        while again or await self._wait_wanted():
            if takeover is None:
                self._answered = self._intent.value
            outcome = await self._one_life(takeover)
            takeover = None
            match outcome:
                case Left():
                    return
                case Over(again=again, pause=pause):
                    again = again and (pause == 0.0 or await self._wait_undisturbed(pause))
                    if again:
                        self.report(Requeued())
                case Waiting(seen=seen):
                    again = await self._wait_undisturbed(None, seen)
                case Broken():
                    again = await self._wait_retry(outcome)

    # -- between two lives -------------------------------------------------------------------------------

    async def _wait_wanted(self) -> bool:
        """Wait for a wish to start that is newer than the last life; False when llmgw leaves or it is retired."""
        while self._leaving is None:
            intent = self._intent.value
            state = self.status.state
            wanted = intent.wish is Wish.START and not self.orders.value.retired
            if wanted and (state is ShardState.PENDING or intent != self._answered):
                if state is not ShardState.PENDING:
                    self.report(Requeued())
                self._refusals = 0
                return True
            if intent.wish is not Wish.START and state is not ShardState.STOPPED and intent.by != "file":
                if intent != self._answered:
                    self._answered = intent
                    await self._try_undead_again()
                if self.id not in self._host.undead:
                    self.report(Stopped(f"{intent.wish} wished by {intent.by}"))
            if self.orders.value.retired:
                return False
            await self._wait_news(intent)
        return False

    async def _try_undead_again(self) -> None:
        """Another stop of what did not die: a shard of which something lives is not Stopped."""
        undead = self._host.undead.get(self.id)
        if undead is not None:
            self.report(Requeued())
            await self.clear_remains(undead)
            if self.id in self._host.undead:
                self.report(GaveUp(STILL_THERE))

    async def _wait_retry(self, broken: Broken) -> bool:
        """After a failure: pause, then True for another try. False: wait for a wish (or llmgw leaves)."""
        policy = self.spec.restart
        decision: Retry | GiveUp
        if self.id in self._host.undead and self._intent.value.wish is not Wish.START:
            self._answered = self._intent.value
            decision = GiveUp(STILL_THERE)
        elif self._intent.value.wish is Wish.SLEEP:
            # It would be loaded only to be put to sleep: the next request does that.
            self._answered = self._intent.value
            self.report(Stopped(f"it ended while it slept: {broken.reason.cause}"))
            return False
        elif broken.counted:
            self._refusals = 0
            decision = decide_restart(policy, broken.reason, self.status.failures, self._host.chance())
        else:
            # Nothing was started, so this is no restart: it is tried again whatever the policy says.
            self._refusals += 1
            # A check that said no is asked again soon: nobody tells llmgw that a file was mended.
            interval = self._host.config.value.node.inventory_interval
            pause = min(backoff(policy, self._refusals, self._host.chance()), interval)
            decision = Retry(pause, self._refusals)
        if isinstance(decision, GiveUp):
            self.report(GaveUp(decision.text))
            return False
        limit = policy.limit if broken.counted else 0
        self.report(RetryScheduled(self._host.board.now() + decision.delay, decision.attempt, limit))
        seen = self._host.node.news.value if not broken.counted else None
        return await self._wait_undisturbed(decision.delay, seen)

    async def _wait_undisturbed(self, seconds: float | None, seen: int | None = None) -> bool:
        """Pause before another life, None for without end; False when a wish or the end of llmgw comes first.

        With `seen` news of the node end the pause too: what was in the way may be gone.
        """
        with trio.CancelScope() as pause:
            if seconds is not None:
                pause.deadline = trio.current_time() + seconds
            async with trio.open_nursery() as nursery:
                if seen is not None:
                    nursery.start_soon(self._cancel_on_news, seen, pause)
                # A wish that came while the last life was ended is news too.
                await self._wait_news(self._answered)
                nursery.cancel_scope.cancel(reason="another wish")
        return pause.cancelled_caught and self._leaving is None

    async def _cancel_on_news(self, seen: int, pause: trio.CancelScope) -> None:
        # Each try looks at the node, and what it sees may be news again: never back to back.
        await trio.sleep(NEWS_PAUSE)
        await self._host.node.news.wait_change(seen)
        pause.cancel(reason="the node has changed")

    async def _wait_news(self, known: Intent) -> None:
        """Until there is another wish, or llmgw leaves."""
        async with trio.open_nursery() as nursery:

            async def wait_leaving() -> None:
                await self._host.board.leaving.wait_value(lambda leaving: leaving is not None)
                nursery.cancel_scope.cancel(reason="llmgw leaves")

            nursery.start_soon(wait_leaving)
            await self._intent.wait_change(known)
            nursery.cancel_scope.cancel(reason="another wish")

    @property
    def _leaving(self) -> object | None:
        return self._host.board.leaving.value

    # -- one life ----------------------------------------------------------------------------------------

    async def _one_life(self, takeover: Takeover | None) -> Outcome:
        seen = self._host.node.news.value
        try:
            return await self._launch_and_watch(takeover)
        except LaunchUnplaced as error:
            self.report(Unplaced(str(error)))
            return Waiting(seen)
        except LaunchUnwanted:
            return Over()
        except LaunchRefused as refused:
            self._fail(refused.reason, counted=refused.counted)
            return Broken(refused.reason, counted=refused.counted)
        except Exception:
            log.exception("%s: an error in llmgw itself ended this shard's engine", self.status.name)
            return Broken(self._confess())

    def _confess(self) -> Reason:
        """Say that llmgw itself failed, and where to look."""
        remedy = "please report it; the traceback is in llmgw's log"
        reason = Reason("bug", "an error in llmgw itself ended it", remedy)
        self.report(ConditionSet(ConditionKind.BUG, reason.cause))
        if self.status.state is not ShardState.STOPPED:
            self._fail(reason)
        return reason

    async def _launch_and_watch(self, takeover: Takeover | None) -> Outcome:
        spec = self.spec
        self.report(Retitled(self.id.shown(spec.replicas), spec.model, spec.engine.value))
        self.tail.begin()
        async with launch(self._host, self.id, spec, self.tail, takeover) as engine:
            facts = (engine.pid, engine.pgid, engine.generation, str(engine.endpoint), engine.config_hash, engine.gpus)
            if takeover is None:
                self.report(Launched(*facts, engine.key))
            else:
                self.report(Adopted(*facts, engine.launched_at, engine.key))
            self.show_slots(engine)
            self._held.set(False)
            self._cards = engine.gpu_uuids
            if engine.allowed:
                self.report(ConditionSet(ConditionKind.ALLOWED, "; ".join(engine.allowed)))
            if takeover is None and engine.config_hash != self.spec.config_hash:
                # What a reload replaces must be live; this one was only about to be.
                return await self._stop(engine, "a reload that came while it was launched", again=True)
            async with trio.open_nursery() as nursery:
                life = Life(self, self._host, engine, spec, self._intent, self._answered)
                nursery.start_soon(engine.follow_output, life.on_lines)
                ending = await life.watch()
                self._answered = life.obeyed
                outcome = await self._end(engine, life, ending)
                nursery.cancel_scope.cancel(reason="the engine's life is over")
        return outcome

    async def _end(self, engine: Engine, life: Life, ending: Ending) -> Outcome:
        """Carry out how the life ends; afterwards the engine is gone, or was left running on purpose."""
        if isinstance(ending, Exited):
            ending = await self._judge_exit(engine)
        match ending:
            case Left():
                await engine.leave()
                return ending
            case Asked(by=by, again=again):
                await life.drain(f"{'restart' if again else 'stop'} wished by {by}")
                return await self._stop(engine, by, again=again)
            case Condemned(reason=reason, stalled=stalled):
                self.report(StopBegan(reason.cause))
                ended = await engine.take_down(self._on_step, at_once=stalled)
                return self._broken(reason, ended)
            case Exited():
                return await self._bury(engine)

    async def _judge_exit(self, engine: Engine) -> Exited | Asked:
        """A leader that exits is judged after pending signals have been read."""
        if engine.exit_code in TERM_LIKE or engine.exit_code is None:
            with trio.move_on_after(SIGNAL_GRACE):
                await self._wait_news(self._intent.value)
        leaving = self._host.board.leaving.value
        if leaving is not None and not engine_stays(self._host.settings.on_stop, leaving):
            return Asked(leaving.why)
        if self._intent.value.wish is Wish.STOP:
            return Asked(self._intent.value.by)
        return Exited()

    async def _stop(self, engine: Engine, by: str, *, again: bool) -> Outcome:
        began = trio.current_time()
        ended = await engine.take_down(self._on_step)
        if ended.unkillable:
            return self._broken(unkillable(ended.unkillable), ended)
        self.report(Stopped(f"stopped by {by} ({ended.how})", round(trio.current_time() - began, 1)))
        self._after_end(ended.held)
        # One that is drained was loaded, and is again: it leaves routing as soon as it is Ready.
        return Over(again=again and self._intent.value.wish is not Wish.STOP and self._leaving is None)

    async def _bury(self, engine: Engine) -> Outcome:
        """The leader is gone and nobody asked: end what is left, then say why."""
        code = engine.exit_code
        if self.status.condition(ConditionKind.STOPPING) is None:
            self.report(StopBegan(gone_in_words(code)))
        await engine.hear_last_words()
        ended = await engine.take_down(self._on_step)
        if engine.kind is EngineKind.COMMAND and code == 0 and not ended.unkillable:
            policy = self.spec.restart
            again = policy.mode == "always" and self._intent.value.wish is Wish.START
            follows = f"; starting it again in {policy.delay:g} s" if again else ""
            self.report(Stopped(f"ended by itself with code 0{follows}"))
            self._after_end(ended.held)
            # Never at once: a program that has nothing to do would be started as fast as the machine can.
            return Over(again, policy.delay)
        return self._broken(await engine.diagnose(), ended)

    def _broken(self, reason: Reason, ended: Ended) -> Broken:
        """A failure, or the worse one that something of it does not die: then nothing new is launched beside it."""
        counted = not ended.unkillable
        if ended.unkillable:
            reason = unkillable(ended.unkillable)
        self._fail(reason, counted=counted)
        self._after_end(ended.held)
        return Broken(reason, counted)

    def _fail(self, reason: Reason, *, counted: bool = True) -> None:
        self.report(Failed(reason, counted))

    def _on_step(self, text: str) -> None:
        """A step of the stop sequence, for status."""
        if self.status.state.is_live:
            self.report(ConditionSet(ConditionKind.STOPPING, text))

    def _after_end(self, held: str) -> None:
        if held:
            self.report(ConditionSet(ConditionKind.GPU_HELD, held))
        elif self.status.condition(ConditionKind.GPU_HELD):
            self.report(ConditionCleared(ConditionKind.GPU_HELD))
        self._held.set(bool(held))
        self._host.node.wake()

    async def _watch_held(self) -> None:
        """Ask on after GPU memory that did not come back in time: also the status of a shard that is not started
        again must not tell for ever what was true once."""
        pause = HELD_FIRST
        while True:
            await self._held.wait_value(bool)
            await trio.sleep(pause)
            pause = min(2 * pause, HELD_LONGEST)
            await self._host.node.refresh()
            entries = (entry for entry in self._host.quarantine.entries if entry.uuid in self._cards)
            texts = [f"GPU {entry.label}: {entry.holder}" for entry in entries]
            if not self._held.value:
                # Launched meanwhile: what was held is of an earlier life.
                pause = HELD_FIRST
            elif texts:
                self.report(ConditionSet(ConditionKind.GPU_HELD, "; ".join(texts)))
            else:
                self._after_end("")
                pause = HELD_FIRST
