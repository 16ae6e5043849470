"""When a model will answer, whom a failed load concerns, and what the gateway tells the board."""

from __future__ import annotations

from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    Awoken,
    ConditionKind,
    ConditionSet,
    Failed,
    GaveUp,
    Launched,
    LoadingSeen,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    Requeued,
    RetryScheduled,
    Want,
    Wish,
)
from llmgw.gateway.admission.snapshot import Queued
from llmgw.gateway.on_demand.outlook import estimate, failed_loads
from llmgw.gateway.on_demand.telling import used_by, wants_of
from llmgw.gateway.routing.table import Table, build_table
from tests.gateway.on_demand.world import World, config_of, spec


def table(world: World) -> Table:
    return build_table(world.board.snapshot, config_of(*world.specs))


def left(world: World, model: str = "a") -> float | None:
    return estimate(table(world).models[model], world.now)


def launch(world: World, name: str = "a") -> None:
    cell = world.engines[ShardId(name)].cell
    world.board.ask(ShardId(name), Wish.START, "gateway, 1 request waiting")
    cell.report(Launched(1, 1, cell.status.generation + 1, "127.0.0.1:1", "h"))


def test_the_estimate_is_the_last_load_less_what_has_passed_of_this_one() -> None:
    world = World((spec("a", 0),), load={"a": 120.0})
    assert left(world) == 120.0
    launch(world)
    world.now += 50.0
    assert left(world) == 70.0
    world.now += 500.0
    assert left(world) == 1.0


def test_what_neither_comes_nor_can_be_loaded_has_no_estimate() -> None:
    world = World((spec("a", 0, idle=None),))
    assert left(world) is None


def test_the_engines_own_forecast_counts_where_it_is_longer_or_nothing_else_is_known() -> None:
    world = World((spec("a", 0),), load={"a": 10.0})
    launch(world)
    cell = world.engines[ShardId("a")].cell
    cell.report(LoadingSeen("a bar"))
    cell.report(ProgressSeen(Progress("weights", 0.2, 2, 10, eta=400.0)))
    assert left(world) == 400.0
    unknown = World((spec("a", 0),), load={"a": None})  # type: ignore[dict-item]
    assert left(unknown) is None


def test_a_sleeper_is_as_near_as_its_last_wake_and_a_failed_one_as_its_next_attempt() -> None:
    world = World((spec("a", 0, idle_action="sleep"),), load={"a": 60.0})
    launch(world)
    cell = world.engines[ShardId("a")].cell
    cell.report(ReadyConfirmed())
    assert left(world) == 0.0
    cell.report(Awoken(1.5))
    world.board.ask(ShardId("a"), Wish.SLEEP, "gateway, idle for 10 s")
    cell.report(ConditionSet(ConditionKind.SLEEPING, "asleep"))
    assert left(world) == 1.5
    failed = World((spec("a", 0),), load={"a": 60.0})
    launch(failed)
    fail(failed, again_in=20.0)
    assert left(failed) == 80.0
    failed.engines[ShardId("a")].cell.report(GaveUp("will not restart"))
    assert left(failed) is None


def fail(world: World, name: str = "a", *, again_in: float | None = 30.0) -> None:
    cell = world.engines[ShardId(name)].cell
    cell.report(Failed(Reason("oom", "GPU memory ran out")))
    if again_in is not None:
        cell.report(RetryScheduled(world.now + again_in, 1, 5))


def test_a_failed_attempt_concerns_a_model_without_another_hope() -> None:
    world = World((spec("a", 0), spec("b0", 1, model="b"), spec("b1", 2, model="b")))
    for name in ("a", "b0", "b1"):
        launch(world, name)
    before = table(world)
    fail(world, "a")
    fail(world, "b0")
    after = table(world)
    assert failed_loads(before, after) == {"a": "a is failed: GPU memory ran out"}
    assert failed_loads(after, after) == {}
    fail(world, "b1")
    assert set(failed_loads(after, table(world))) == {"b"}


def test_nobody_is_told_of_a_failure_before_it_is_decided_what_follows() -> None:
    world = World((spec("a", 0),))
    launch(world)
    before = table(world)
    fail(world, again_in=None)
    undecided = table(world)
    assert failed_loads(before, undecided) == {}
    world.engines[ShardId("a")].cell.report(GaveUp("will not restart"))
    assert list(failed_loads(undecided, table(world))) == ["a"]


def test_a_check_that_says_no_once_more_is_told_to_those_who_came_since() -> None:
    world = World((spec("a", 0),))
    launch(world)
    fail(world)
    before = table(world)
    world.engines[ShardId("a")].cell.report(Failed(Reason("gpu-held", "GPU 0 is held by pid 1"), counted=False))
    world.engines[ShardId("a")].cell.report(RetryScheduled(world.now + 60.0, 2, 0))
    assert failed_loads(before, table(world)) == {"a": "a is failed: GPU 0 is held by pid 1"}


def test_a_failure_is_noticed_also_when_the_next_attempt_is_under_way_already() -> None:
    world = World((spec("a", 0),))
    launch(world)
    before = table(world)
    fail(world, again_in=None)
    undecided = table(world)
    launch(world)
    assert list(failed_loads(before, table(world))) == ["a"]
    assert list(failed_loads(undecided, table(world))) == ["a"]


def test_a_ready_copy_keeps_a_failure_of_another_from_anybody() -> None:
    world = World((spec("b0", 1, model="b"), spec("b1", 2, model="b")))
    for name in ("b0", "b1"):
        launch(world, name)
    world.engines[ShardId("b0")].cell.report(ReadyConfirmed())
    before = table(world)
    fail(world, "b1")
    assert failed_loads(before, table(world)) == {}


def test_who_waits_for_an_engine_that_died_while_it_served_waits_for_its_restart() -> None:
    world = World((spec("a", 0),))
    launch(world)
    world.engines[ShardId("a")].cell.report(ReadyConfirmed())
    ready = table(world)
    fail(world)
    crashed = table(world)
    assert failed_loads(ready, crashed) == {}
    launch(world)
    loading = table(world)
    assert failed_loads(crashed, loading) == {} and failed_loads(ready, loading) == {}
    fail(world)
    assert list(failed_loads(loading, table(world))) == ["a"]


def test_what_was_stopped_and_wanted_again_is_no_failure() -> None:
    world = World((spec("a", 0),))
    launch(world)
    fail(world)
    before = table(world)
    world.engines[ShardId("a")].cell.report(Requeued())
    assert failed_loads(before, table(world)) == {}


BANDS = ("interactive", "normal", "batch")


def test_wants_are_the_waiters_of_models_without_an_endpoint_in_their_highest_band() -> None:
    rows = (
        Queued("a", "batch", 3, 40.0, 0),
        Queued("a", "normal", 1, 2.0, 0),
        Queued("ready", "normal", 5, 1.0, 8),
        Queued("b", "normal", 0, 0.0, 2),
    )
    found = wants_of(rows, {"a", "b"}, BANDS, 1000.0, {})
    assert found == {"a": Want("a", 4, 960.0, "normal")}


def test_a_want_keeps_its_time_while_the_oldest_is_the_same_so_that_nobody_is_woken_for_nothing() -> None:
    first = wants_of([Queued("a", "normal", 1, 1.0, 0)], {"a"}, BANDS, 1000.0, {})
    again = wants_of([Queued("a", "normal", 1, 1.26, 0)], {"a"}, BANDS, 1000.25, first)
    assert again == first
    other = wants_of([Queued("a", "normal", 1, 0.1, 0)], {"a"}, BANDS, 1030.0, first)
    assert other["a"].since == 1029.9


def test_the_last_use_is_kept_until_its_shard_is_gone_and_nothing_changes_where_nothing_was_used() -> None:
    a, b = ShardId("a"), ShardId("b")
    told = used_by({}, {a, b}, {a, b}, 5.0)
    assert told == {a: 5.0, b: 5.0}
    assert used_by(told, set(), {a, b}, 9.0) is told
    assert used_by(told, {a}, {a}, 9.0) == {a: 9.0}
