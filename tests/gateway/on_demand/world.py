"""A node without processes: shards that load, serve and end in virtual time, on a real board."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field

from llmgw.board import Board, StatusCell
from llmgw.config.model import BandConfig, Config
from llmgw.domain.problem import Reason
from llmgw.domain.shard import EngineKind, ShardId, ShardSpec
from llmgw.domain.status import (
    ConditionCleared,
    ConditionKind,
    ConditionSet,
    DrainBegan,
    DrainEnded,
    Failed,
    Intent,
    Launched,
    ReadyConfirmed,
    Requeued,
    RetryScheduled,
    ShardState,
    ShardStatus,
    StopBegan,
    Stopped,
    Unplaced,
    Want,
    Wish,
)
from llmgw.gateway.on_demand.decide import Decision, Traffic, decide

BANDS = tuple(
    BandConfig(name, name == "normal", None, 0, 10, 60.0, 15.0) for name in ("interactive", "normal", "batch")
)


def spec(name: str, *gpus: int, model: str | None = None, idle: float | None = 300.0, **keys: Any) -> ShardSpec:
    made = ShardSpec(name, model or name, EngineKind.VLLM, ("vllm",), "h", gpus=gpus, autostart=False)
    return evolve(made, idle_timeout=idle, **keys)


CARDS = 4
"""Of the node, for shards that want a number of them."""


class Section:
    """What is asked of `[gateway]` here."""

    bands = BANDS


def config_of(*specs: ShardSpec) -> Config:
    return Config(None, None, specs, gateway=Section())  # type: ignore[arg-type]


@define
class Engine:
    """One shard of the node: what it does by itself and when."""

    spec: ShardSpec
    cell: StatusCell
    load: float
    unload: float
    due: float | None = None
    """When what it is at comes to its end."""
    fails: bool = False

    @property
    def id(self) -> ShardId:
        return self.spec.ids[0]

    given: set[int] = field(factory=set)
    """Cards that it got for its number of them."""

    @property
    def cards(self) -> set[int]:
        """What it has, or wants to have."""
        return self.given if isinstance(self.spec.gpus, int) else set(self.spec.pinned_gpus)  # type: ignore[arg-type]


@define
class World:
    """`step` moves the time and everything that is due; `decide` asks and carries out."""

    specs: tuple[ShardSpec, ...]
    load: dict[str, float] = field(factory=dict)
    now: float = 1_000_000.0
    running: Counter[ShardId] = field(factory=Counter)
    last_used: dict[ShardId, float] = field(factory=dict)
    wanted: dict[str, Want] = field(factory=dict)
    engines: dict[ShardId, Engine] = field(init=False, factory=dict)
    board: Board = field(init=False)
    loads: int = 0
    is_mistaken: Callable[[], bool] = lambda: False
    """Whether the facts about the cards are old just now, so that everything seems to fit."""
    log: list[tuple[float, str, str]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.board = Board(now=lambda: self.now, strict=True)
        for one in self.specs:
            (id_,) = one.ids
            load = self.load.get(one.name, 60.0)
            status = ShardStatus(id_, one.name, one.model, "vllm", since=self.now, load_seconds=load)
            cell = self.board.add(status, Intent(Wish.STOP, "file", self.now))
            self.engines[id_] = Engine(one, cell, load, 2.0)

    # -- what the test says ------------------------------------------------------------------------------

    def want(self, model: str, *, since: float | None = None, band: str = "normal", waiting: int = 1) -> None:
        self.wanted[model] = Want(model, waiting, self.now if since is None else since, band)

    def up(self, name: str, *, for_: float = 0.0, used: float | None = None, wish: Wish = Wish.START) -> None:
        """Ready since so many seconds; `used`: seconds since its last request."""
        engine = self.engines[ShardId(name)]
        now, self.now = self.now, self.now - for_ - engine.load
        self.board.ask(engine.id, wish, "file")
        engine.cell.report(Launched(1, 1, engine.cell.status.generation + 1, "127.0.0.1:1", "h"))
        self.now = now - for_
        engine.cell.report(ReadyConfirmed())
        if isinstance(engine.spec.gpus, int):
            engine.given = self._free(frozenset({engine.id}), engine.spec.gpus)
        self.now = now
        if used is not None:
            self.last_used[engine.id] = now - used

    def use(self, name: str) -> None:
        self.last_used[ShardId(name)] = self.now

    def state(self, name: str) -> ShardState:
        return self.engines[ShardId(name)].cell.status.state

    def wish(self, name: str) -> Wish:
        return self.board.intent_cell(ShardId(name)).value.wish

    # -- what happens ------------------------------------------------------------------------------------

    def holders(self) -> dict[int, list[ShardId]]:
        """Card -> engines that are on it."""
        found: dict[int, list[ShardId]] = {}
        for engine in self.engines.values():
            if engine.cell.status.state.is_live:
                for card in engine.cards:
                    found.setdefault(card, []).append(engine.id)
        return found

    def _free(self, without: frozenset[ShardId], count: int) -> set[int]:
        used = {card for card, ids in self.holders().items() if not set(ids) <= without}
        return set(sorted(set(range(CARDS)) - used)[:count])

    def fits(
        self, id_: ShardId, without: frozenset[ShardId] = frozenset(), beside: frozenset[ShardId] = frozenset()
    ) -> bool:
        if self.is_mistaken():
            return True
        wanted = self.engines[id_].spec.gpus
        if isinstance(wanted, int):
            return len(self._free(without | {id_}, wanted)) == wanted
        mine = self.engines[id_].cards
        for engine in self.engines.values():
            claims = engine.cell.status.state.is_live or engine.id in beside
            claims = claims or self.board.intent_cell(engine.id).value.wish is Wish.START
            if engine.id != id_ and engine.id not in without and claims and engine.cards & mine:
                return False
        return True

    def decide(self) -> Decision:
        """Ask, check that no running request is in danger, and make the wishes."""
        traffic = Traffic(dict(self.wanted), dict(self.last_used), dict(self.running))
        made = decide(self.board.snapshot, config_of(*self.specs), traffic, self.now, self.fits)
        for wished in made.wishes:
            if wished.wish in (Wish.STOP, Wish.SLEEP):
                assert self.running[wished.id] == 0, f"{wished} has requests running"
            self.log.append((self.now, wished.wish.value, wished.id.name))
            self.board.ask(wished.id, wished.wish, f"gateway, {wished.why}")
        return made

    def asked(self) -> list[tuple[str, str]]:
        """The wishes of one decision."""
        return [(wished.wish.value, wished.id.name) for wished in self.decide().wishes]

    def step(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines.values():
            self._obey(engine)
        for card, ids in self.holders().items():
            assert len(ids) == 1, f"card {card} has {ids}"

    def _obey(self, engine: Engine) -> None:
        status, wish = engine.cell.status, self.wish(engine.spec.name)
        report, state = engine.cell.report, status.state
        if state.is_live and status.condition(ConditionKind.STOPPING) is not None:
            if engine.due is not None and self.now >= engine.due and not self.running[engine.id]:
                report(Stopped("stopped"))
        elif state.is_live and wish is Wish.STOP:
            report(StopBegan("stop"))
            engine.due = self.now + engine.unload
        elif state is ShardState.STARTING and engine.due is not None and self.now >= engine.due:
            if engine.fails:
                report(Failed(Reason("oom", "GPU memory ran out")))
                report(RetryScheduled(self.now + 30.0, 1, 5))
            else:
                report(ReadyConfirmed())
        elif state is ShardState.READY and wish is Wish.DRAIN:
            report(DrainBegan("gateway"))
        elif state is ShardState.DRAINING and wish is Wish.START:
            report(DrainEnded())
        elif state is ShardState.READY and wish is Wish.SLEEP and status.condition(ConditionKind.SLEEPING) is None:
            report(ConditionSet(ConditionKind.SLEEPING, "asleep"))
        elif state is ShardState.READY and wish is Wish.START and status.condition(ConditionKind.SLEEPING):
            report(ConditionCleared(ConditionKind.SLEEPING))
        elif not state.is_live and wish is Wish.START:
            self._launch(engine)
        elif (
            not state.is_live
            and state is not ShardState.STOPPED
            and self.board.intent_cell(engine.id).value.by != "file"
        ):
            report(Stopped("not wanted"))

    def _launch(self, engine: Engine) -> None:
        status = engine.cell.status
        if status.next_attempt is not None and self.now < status.next_attempt:
            return
        if engine.cards & self.holders().keys():
            engine.cell.report(Unplaced("used by another"))
            return
        if status.state is ShardState.STOPPED:
            engine.cell.report(Requeued())
        self.loads += 1
        engine.cell.report(Launched(1, 1, status.generation + 1, "127.0.0.1:1", "h"))
        engine.due = self.now + engine.load
