from __future__ import annotations

import pytest

from llmgw.board import Board, StatusCell
from llmgw.control.operations import VERBS, Operation, is_done
from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    Activity,
    ActivitySeen,
    DrainBegan,
    DrainEnded,
    Event,
    Failed,
    GaveUp,
    Intent,
    Launched,
    LoadingSeen,
    Noticed,
    ReadyConfirmed,
    Requeued,
    RetryScheduled,
    ShardStatus,
    StopBegan,
    Stopped,
    Wish,
)

ID = ShardId("llama")
CRASH = Reason("D4", "out of memory")


class Shard:
    """A board with one shard; `wish` asks as the API does."""

    def __init__(self, *history: Event) -> None:
        self.time = 100.0
        self.board = Board(now=lambda: self.time, strict=True)
        self.cell: StatusCell = self.board.add(ShardStatus(ID, "llama", "m", "vllm"), Intent(Wish.START))
        self.generation = 0
        self.report(*history)

    def report(self, *events: Event) -> None:
        for event in events:
            self.time += 1.0
            self.cell.report(event)

    def launch(self, *events: Event) -> None:
        self.generation += 1
        self.report(Launched(7, 7, self.generation, "127.0.0.1:8100", "hash"), *events)

    def wish(self, verb: str) -> None:
        self.verb = verb
        self.board.ask(ID, VERBS[verb], "ada", restart=verb == "restart", operator=True)
        self.before = self.board.snapshot.shards[ID]

    @property
    def done(self) -> str | None:
        return is_done(self.verb, self.before, self.board.snapshot.shards[ID])


def ready() -> Shard:
    shard = Shard()
    shard.launch(LoadingSeen("x"), ReadyConfirmed())
    return shard


def test_a_start_is_done_when_it_is_ready_and_not_before() -> None:
    shard = Shard()
    shard.wish("start")
    assert shard.done is None
    shard.launch(LoadingSeen("x"))
    assert shard.done is None
    shard.report(ReadyConfirmed())
    assert shard.done == "done"


def test_a_start_of_what_is_ready_is_done() -> None:
    shard = ready()
    shard.wish("start")
    assert shard.done == "done"


def test_an_old_failure_is_not_the_failure_of_a_new_start() -> None:
    shard = Shard(Failed(CRASH), GaveUp("will not restart"))
    shard.wish("start")
    assert shard.done is None
    shard.report(Requeued())
    shard.launch(Failed(CRASH))
    assert shard.done is None, "whether it is tried again is not decided yet"
    shard.report(RetryScheduled(200.0, 1, 5))
    assert shard.done is None
    shard.launch(Failed(CRASH), GaveUp("failed 5 times in a row"))
    assert shard.done == "failed"


def test_an_old_stop_is_not_the_end_of_a_new_start() -> None:
    shard = ready()
    shard.report(StopBegan("x"), Stopped("x"))
    shard.wish("start")
    assert shard.done is None


def test_a_plain_command_that_ended_well_has_been_started() -> None:
    shard = Shard()
    shard.wish("start")
    shard.launch(Stopped("ended by itself with code 0"))
    assert shard.done == "done"


def test_a_restart_needs_a_new_launch() -> None:
    shard = ready()
    shard.wish("restart")
    assert shard.done is None
    shard.report(StopBegan("x"), Stopped("x"))
    assert shard.done is None
    shard.report(Requeued())
    shard.launch(LoadingSeen("x"), ReadyConfirmed())
    assert shard.done == "done"


def test_a_stop_is_done_when_it_is_gone() -> None:
    shard = ready()
    shard.wish("stop")
    shard.report(StopBegan("x"), Noticed("SIGTERM sent"))
    assert shard.done is None
    shard.report(Stopped("SIGTERM, 4.2 s"))
    assert shard.done == "done"


def test_a_stop_that_ends_in_a_failure_has_failed() -> None:
    shard = ready()
    shard.wish("stop")
    shard.report(Failed(Reason("unkillable", "it does not die", retry=False)), GaveUp("will not restart"))
    assert shard.done == "failed"


def test_a_drain_is_done_when_nothing_runs_any_more() -> None:
    shard = ready()
    shard.report(ActivitySeen(Activity(running=3)))
    shard.wish("drain")
    shard.report(DrainBegan("ada"))
    assert shard.done is None
    shard.report(ActivitySeen(Activity(running=0)))
    assert shard.done == "done"
    shard.wish("start")
    assert shard.done is None
    shard.report(DrainEnded())
    assert shard.done == "done"


def test_a_drain_is_not_done_while_the_gateway_has_a_request_under_way() -> None:
    shard = ready()
    shard.report(ActivitySeen(Activity(running=0)))
    shard.wish("drain")
    shard.report(DrainBegan("ada"))
    now = shard.board.snapshot.shards[ID]
    assert is_done("drain", shard.before, now, in_gateway=1) is None
    assert is_done("drain", shard.before, now, in_gateway=0) == "done"
    operation = Operation("op-1", "drain", "llama", "ada", 1.0, {ID: shard.before})
    assert operation.state(shard.board.snapshot, {ID: 2}) == "running"
    assert operation.state(shard.board.snapshot, {ShardId("another"): 2}) == "done"


@pytest.mark.parametrize("verb", list(VERBS))
def test_a_later_wish_ends_the_earlier_one(verb: str) -> None:
    shard = ready()
    shard.report(ActivitySeen(Activity(running=3)))
    shard.wish(verb)
    shard.board.ask(ID, Wish.STOP, "eve")
    assert shard.done == "failed"


def test_an_operation_on_several_instances_ends_with_the_last() -> None:
    board = Board(strict=True)
    ids = (ShardId("m", 0), ShardId("m", 1))
    cells = [board.add(ShardStatus(id_, str(id_), "m", "vllm"), Intent(Wish.START)) for id_ in ids]
    for id_ in ids:
        board.ask(id_, Wish.STOP, "ada")
    operation = Operation("op-1", "stop", "m", "ada", 1.0, {id_: board.snapshot.shards[id_] for id_ in ids})
    cells[0].report(Stopped("x"))
    assert operation.state(board.snapshot, {}) == "running"
    cells[1].report(Stopped("x"))
    assert operation.state(board.snapshot, {}) == "done"


@pytest.mark.parametrize(("verb", "state"), [("stop", "done"), ("drain", "done"), ("start", "failed")])
def test_a_shard_that_was_removed_meanwhile(verb: str, state: str) -> None:
    shard = Shard()
    shard.wish(verb)
    operation = Operation("op-1", verb, "llama", "ada", 1.0, {ID: shard.before})
    shard.board.remove(ID)
    assert operation.state(shard.board.snapshot, {}) == state
