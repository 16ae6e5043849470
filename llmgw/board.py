"""The board: every cell of every shard, one immutable snapshot, one revision, the last 1000 events.

`ask` is the only way a wish is made, a `StatusCell` the only way a fact is published, and each shard's task holds
the only one of its shard. There is no callback and no queue per reader: observers wait for "changed", take a
snapshot and act; a slow one skips.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import trio
from attrs import evolve, frozen

from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    ConditionKind,
    ConditionSet,
    Event,
    IllegalTransition,
    Instance,
    Intent,
    ShardStatus,
    Snapshot,
    Transition,
    Want,
    Wish,
    advance,
    describe,
    is_news,
)

T = TypeVar("T")

HISTORY = 1000
"""Transitions and wishes kept: hours of a quiet node, some minutes of a crash loop of 100 shards."""


class Cell(Generic[T]):
    """The latest value of something, with a way to wait for the next. One writer, many readers."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed = trio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
        # A fresh event per change: who waits wakes once, who comes later waits for the next.
        self._changed.set()
        self._changed = trio.Event()

    async def wait_change(self, known: T) -> T:
        """Return the value as soon as it is not `known`."""
        await trio.lowlevel.checkpoint()
        while self._value == known:
            await self._changed.wait()
        return self._value

    async def wait_value(self, predicate: Callable[[T], bool]) -> T:
        """Return the first value that satisfies `predicate`, the present one included."""
        await trio.lowlevel.checkpoint()
        while not predicate(self._value):
            await self._changed.wait()
        return self._value


@frozen
class Leaving:
    """llmgw is on its way out. `engines_stay` says what that means for engines whose on_stop is auto."""

    why: str
    engines_stay: bool
    all_stay: bool = False
    """An upgrade in place: also engines whose on_stop is `stop` stay, since llmgw is back in a moment."""


class StatusCell:
    """The writer's end of one shard's status. Held by the shard's task alone."""

    def __init__(self, board: Board, status: ShardStatus, *, strict: bool) -> None:
        self._board = board
        self._status = status
        self._strict = strict

    @property
    def status(self) -> ShardStatus:
        return self._status

    def report(self, event: Event) -> ShardStatus:
        """Apply one event and publish. An illegal one raises where `strict`, else becomes condition `bug`."""
        now = self._board.now()
        before = self._status
        try:
            after = advance(before, event, now)
        except IllegalTransition as error:
            if self._strict:
                raise
            event = ConditionSet(ConditionKind.BUG, f"illegal transition: {error}")
            after = advance(before, event, now)
        if after == before:
            return after
        self._status = after
        self._board._publish(before, event, after)
        return after


class Board:
    """All cells. `now` gives seconds since the epoch and is injected for tests."""

    def __init__(self, *, now: Callable[[], float] = time.time, strict: bool = False) -> None:
        self.now = now
        self._strict = strict
        self._shards: dict[ShardId, Instance] = {}
        self._intents: dict[ShardId, Cell[Intent]] = {}
        self._history: deque[Transition] = deque(maxlen=HISTORY)
        self._sequence = 0
        self._snapshot = Cell(Snapshot(0))
        self.leaving: Cell[Leaving | None] = Cell(None)
        """Written once, by whoever ends llmgw; see architecture: leaving or ending."""
        self.hurry = Cell(False)
        """True after a second signal: every stop is shortened to SIGKILL."""
        self.gateway_load: Cell[Mapping[ShardId, int]] = Cell({})
        """Requests that the gateway has under way, by shard; those without any are left out. The gateway's alone."""
        self.wanted: Cell[Mapping[str, Want]] = Cell({})
        """What requests wait for that no endpoint can serve now, by model. The gateway's alone."""
        self.last_used: Cell[Mapping[ShardId, float]] = Cell({})
        """When each shard last had a request of the gateway under way, in seconds since the epoch. The gateway's
        alone."""

    # -- what the supervisor does ------------------------------------------------------------------------

    def add(self, status: ShardStatus, intent: Intent) -> StatusCell:
        """Register a shard; the cell that comes back is the only writer of its status."""
        if status.id in self._shards:
            raise ValueError(f"{status.id} is on the board already")
        self._intents[status.id] = Cell(intent)
        self._shards[status.id] = Instance(status, intent)
        self._bump()
        return StatusCell(self, status, strict=self._strict)

    def remove(self, id_: ShardId) -> None:
        del self._shards[id_]
        del self._intents[id_]
        self._bump()

    def intent_cell(self, id_: ShardId) -> Cell[Intent]:
        """What the shard's task obeys."""
        return self._intents[id_]

    # -- what everybody may do ---------------------------------------------------------------------------

    def ask(self, id_: ShardId, wish: Wish, by: str, *, restart: bool = False, operator: bool = False) -> Intent:
        """Make a wish. Raises KeyError for a shard that is not on the board."""
        before = self._intents[id_].value
        intent = Intent(
            wish=wish,
            by=by,
            at=self.now(),
            restarts=before.restarts + (1 if restart else 0),
            operator=operator,
            serial=before.serial + 1,
            restarted_by=by if restart else before.restarted_by,
        )
        return self._wish(id_, intent, "restart" if restart else wish.value, by)

    def ask_again(self, id_: ShardId, by: str) -> Intent:
        """A restart for a reason of llmgw's own: what is wished, and whose wish it is, stays.

        Raises KeyError for a shard that is not on the board.
        """
        before = self._intents[id_].value
        return self._wish(id_, evolve(before, restarts=before.restarts + 1, restarted_by=by), "restart", by)

    def _wish(self, id_: ShardId, intent: Intent, word: str, by: str) -> Intent:
        self._shards[id_] = evolve(self._shards[id_], intent=intent)
        self._record(self._shards[id_].status.name, "wish", f"{word} by {by}", by=by)
        self._intents[id_].set(intent)
        self._bump()
        return intent

    def note(self, text: str, *, kind: str = "llmgw", by: str | None = None, shard: str = "") -> None:
        """A line of llmgw's own in the history (reload, upgrade, shutdown)."""
        self._record(shard, kind, text, by=by)
        self._bump()

    @property
    def snapshot(self) -> Snapshot:
        return self._snapshot.value

    async def wait_newer(self, revision: int) -> Snapshot:
        """The first snapshot with a revision above `revision`."""
        return await self._snapshot.wait_value(lambda snapshot: snapshot.revision > revision)

    async def wait_shards(self, predicate: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot that satisfies `predicate`, the present one included."""
        return await self._snapshot.wait_value(predicate)

    def history(self, after: int) -> tuple[int, Iterable[Transition]]:
        """Lines with a sequence number above `after`, and how many of those have fallen out meanwhile."""
        lines = tuple(line for line in self._history if line.sequence > after)
        oldest = self._history[0].sequence if self._history else self._sequence + 1
        return max(0, oldest - after - 1), lines

    @property
    def sequence(self) -> int:
        """The number of the last line."""
        return self._sequence

    # -- inside ------------------------------------------------------------------------------------------

    def _publish(self, before: ShardStatus, event: Event, after: ShardStatus) -> None:
        self._shards[after.id] = evolve(self._shards[after.id], status=after)
        if is_news(before, event, after):
            self._record(
                after.name,
                "condition" if before.state is after.state else "state",
                describe(before, event, after),
                before=before.state.value,
                after=after.state.value,
            )
        self._bump()

    def _record(
        self,
        shard: str,
        kind: str,
        text: str,
        *,
        before: str | None = None,
        after: str | None = None,
        by: str | None = None,
    ) -> None:
        self._sequence += 1
        self._history.append(Transition(self._sequence, self.now(), shard, kind, text, before, after, by))

    def _bump(self) -> None:
        # The mapping is copied so that a snapshot never changes under its reader; 500 shards cost 5 microseconds.
        self._snapshot.set(Snapshot(self._snapshot.value.revision + 1, dict(self._shards)))
