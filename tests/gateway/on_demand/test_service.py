"""The service acts on what the board shows, and sleeps until something may have changed."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from llmgw.board import Cell, Leaving
from llmgw.config.model import Config
from llmgw.domain.shard import ShardId
from llmgw.domain.status import Want, Wish
from llmgw.gateway.on_demand.service import OnDemand
from tests.gateway.on_demand.world import World, config_of, spec


async def test_a_want_is_answered_at_once_and_the_asker_is_told(nursery: trio.Nursery) -> None:
    world = World((spec("a", 0),))
    config: Cell[Config] = Cell(config_of(*world.specs))
    nursery.start_soon(OnDemand(world.board, config, world.fits).run)
    await wait_all_tasks_blocked()
    assert world.wish("a") is Wish.STOP
    world.board.wanted.set({"a": Want("a", 1, world.now, "normal")})
    await wait_all_tasks_blocked()
    intent = world.board.intent_cell(ShardId("a")).value
    assert (intent.wish, intent.by, intent.operator) == (Wish.START, "gateway, 1 request waiting", False)


async def test_idleness_is_noticed_without_news_of_the_board(nursery: trio.Nursery, autojump_clock: MockClock) -> None:
    world = World((spec("a", 0, idle=100.0),))
    world.up("a", for_=500.0)
    world.board.last_used.set({ShardId("a"): world.now - 1.0})
    start, began = trio.current_time(), world.now
    world.board.now = lambda: began + trio.current_time() - start
    config: Cell[Config] = Cell(config_of(*world.specs))
    nursery.start_soon(OnDemand(world.board, config, world.fits).run)
    with trio.fail_after(200):
        await world.board.intent_cell(ShardId("a")).wait_value(lambda intent: intent.wish is Wish.STOP)
    assert 98.0 < trio.current_time() - start < 101.0


async def test_it_ends_when_llmgw_leaves_and_wishes_nothing_more(nursery: trio.Nursery) -> None:
    world = World((spec("a", 0),))
    config: Cell[Config] = Cell(config_of(*world.specs))
    service = OnDemand(world.board, config, world.fits)
    done = trio.Event()

    async def run() -> None:
        await service.run()
        done.set()

    nursery.start_soon(run)
    await wait_all_tasks_blocked()
    world.board.leaving.set(Leaving("SIGTERM", engines_stay=False))
    with trio.fail_after(5):
        await done.wait()
    world.board.wanted.set({"a": Want("a", 1, world.now, "normal")})
    await wait_all_tasks_blocked()
    assert world.wish("a") is Wish.STOP
