"""The board: one writer per cell, snapshots that never change, readers that may be slow."""

from __future__ import annotations

from itertools import count

import pytest
import trio
from attrs import evolve

from llmgw.board import HISTORY, Board, Cell, StatusCell
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    ConditionKind,
    DrainEnded,
    IllegalTransition,
    Intent,
    Launched,
    Noticed,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    ShardState,
    ShardStatus,
    Wish,
)

LAUNCHED = Launched(10, 10, 1, "127.0.0.1:8101", "hash")


def a_board(*, strict: bool = True) -> tuple[Board, StatusCell]:
    ticks = count(1)
    board = Board(now=lambda: float(next(ticks)), strict=strict)
    cell = board.add(ShardStatus(ShardId("a"), "a", "m", "vllm"), Intent(Wish.START))
    return board, cell


def test_a_snapshot_does_not_change_under_its_reader() -> None:
    board, cell = a_board()
    before = board.snapshot
    cell.report(LAUNCHED)
    assert before.shards[ShardId("a")].status.state is ShardState.PENDING
    assert board.snapshot.shards[ShardId("a")].status.state is ShardState.STARTING
    assert board.snapshot.revision > before.revision


def test_progress_is_news_only_where_it_changes_the_state() -> None:
    board, cell = a_board()
    cell.report(LAUNCHED)
    for percent in (10, 20):
        cell.report(ProgressSeen(Progress("loading weights", percent / 100)))
    _, lines = board.history(0)
    assert [(line.before, line.after, line.text) for line in lines[1:]] == [("starting", "loading", "loading weights")]


def test_an_illegal_transition_raises_in_tests() -> None:
    _, cell = a_board(strict=True)
    with pytest.raises(IllegalTransition):
        cell.report(DrainEnded())


def test_an_illegal_transition_in_production_is_a_condition_and_changes_no_state() -> None:
    _, cell = a_board(strict=False)
    cell.report(LAUNCHED)
    cell.report(ReadyConfirmed())
    after = cell.report(DrainEnded())
    assert after.state is ShardState.READY
    bug = after.condition(ConditionKind.BUG)
    assert bug is not None and "DrainEnded while ready" in bug.text


def test_the_same_wish_again_is_news() -> None:
    board, _ = a_board()
    first = board.ask(ShardId("a"), Wish.START, "ada")
    assert board.ask(ShardId("a"), Wish.START, "ada") != first


def test_a_restart_is_counted_and_a_start_is_not() -> None:
    board, _ = a_board()
    assert board.ask(ShardId("a"), Wish.START, "ada", restart=True).restarts == 1
    assert board.ask(ShardId("a"), Wish.STOP, "ada").restarts == 1


def test_history_holds_wishes_and_transitions_but_not_what_is_no_news() -> None:
    board, cell = a_board()
    cell.report(LAUNCHED)
    cell.report(Noticed("not listening yet"))
    board.ask(ShardId("a"), Wish.STOP, "ada")
    dropped, lines = board.history(0)
    assert dropped == 0
    assert [(line.kind, line.text) for line in lines] == [
        ("state", "launched, pid 10, generation 1"),
        ("wish", "stop by ada"),
    ]


def test_history_is_bounded_and_says_how_much_a_slow_reader_missed() -> None:
    board, _ = a_board()
    for _ in range(HISTORY + 5):
        board.note("again")
    dropped, lines = board.history(0)
    assert dropped == 5
    assert len(tuple(lines)) == HISTORY


async def test_a_reader_that_comes_late_sees_the_present_value() -> None:
    cell = Cell(1)
    cell.set(2)
    assert await cell.wait_value(lambda value: value == 2) == 2


async def test_readers_wake_at_a_change_and_may_skip_values(autojump_clock: trio.testing.MockClock) -> None:
    cell = Cell(0)
    seen: list[int] = []

    async def read() -> None:
        known = 0
        while known < 3:
            known = await cell.wait_change(known)
            seen.append(known)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        cell.set(1)
        cell.set(2)
        await trio.testing.wait_all_tasks_blocked()
        cell.set(3)
    assert seen == [2, 3]


def test_a_restart_of_llmgws_own_leaves_the_wish_and_whose_it_is() -> None:
    board, _ = a_board()
    asked = board.ask(ShardId("a"), Wish.DRAIN, "uid 1000 (ada)", operator=True)
    again = board.ask_again(ShardId("a"), "reload by SIGHUP")
    assert again == evolve(asked, restarts=1, restarted_by="reload by SIGHUP")
    assert again.operator
    assert board.snapshot.shards[ShardId("a")].intent == again
