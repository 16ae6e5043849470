"""What an engine that is being ended may still do for the requests in it, as the table shows it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmgw.board import Board
from llmgw.domain.shard import EngineKind, ShardId
from llmgw.domain.status import (
    ConditionKind,
    ConditionSet,
    DrainBegan,
    Event,
    Intent,
    Launched,
    LoadingSeen,
    ReadyConfirmed,
    ShardStatus,
    StopBegan,
    WaitEnded,
    Wish,
)
from llmgw.gateway.routing.table import Table, build_table
from tests.engines.plans import make_plan

ID = ShardId("chat")
KEY = (ID, 1)


def table_after(*events: Event, wish: Wish = Wish.START) -> Table:
    board = Board(strict=True)
    cell = board.add(ShardStatus(ID, "chat", "llama-8b", "vllm"), Intent(Wish.START))
    for event in (Launched(7, 7, 1, "127.0.0.1:8101", "0"), LoadingSeen("x"), ReadyConfirmed()):
        cell.report(event)
    board.ask(ID, wish, "ada", operator=True)
    for event in events:
        cell.report(event)
    # Of the configuration a table needs the shards alone.
    return build_table(board.snapshot, SimpleNamespace(shards=(make_plan(EngineKind.VLLM).spec,)))


@pytest.mark.parametrize(
    ("wish", "events"),
    [
        (Wish.STOP, ()),
        (Wish.STOP, (StopBegan("stop wished by ada", waits=True),)),
        (Wish.STOP, (StopBegan("draining, 2 requests left", waits=True),)),
        (Wish.DRAIN, (DrainBegan("ada"),)),
    ],
)
def test_it_gets_nothing_new_and_finishes_what_it_runs(wish: Wish, events: tuple[Event, ...]) -> None:
    table = table_after(*events, wish=wish)
    assert not table.endpoints
    assert table.draining == {KEY}


@pytest.mark.parametrize(
    "events",
    [
        (StopBegan("its main process is gone (exit code 1)"),),
        (StopBegan("stop wished by ada", waits=True), WaitEnded(2)),
        (StopBegan("stop wished by ada", waits=True), WaitEnded(0), ConditionSet(ConditionKind.STOPPING, "SIGTERM")),
    ],
)
def test_what_still_runs_in_it_is_ended(events: tuple[Event, ...]) -> None:
    table = table_after(*events, wish=Wish.STOP)
    assert not table.endpoints
    assert not table.draining
