"""Whom requests bring up, and who makes room."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.problem import Reason
from llmgw.domain.shard import ShardId, ShardSpec
from llmgw.domain.status import (
    Activity,
    ActivitySeen,
    ConditionKind,
    ConditionSet,
    Failed,
    GaveUp,
    Launched,
    RetryScheduled,
    ShardState,
    Stopped,
    Unplaced,
    Wish,
)
from llmgw.gateway.on_demand.decide import LOOK_AGAIN, PATIENCE, TURN_MIN, Decision, Traffic, decide
from tests.gateway.on_demand.world import World, config_of, spec


def test_a_model_that_requests_wait_for_is_loaded_and_others_are_left_alone() -> None:
    world = World((spec("a", 0), spec("b", 1)))
    assert world.asked() == []
    world.want("b", waiting=2)
    made = world.decide()
    assert [(one.id.name, one.wish, one.why) for one in made.wishes] == [("b", Wish.START, "2 requests waiting")]
    world.step(0.1)
    assert world.asked() == []


def test_a_shard_without_idle_timeout_is_not_loaded_by_requests() -> None:
    world = World((spec("a", 0, idle=None), spec("b", 1)))
    world.want("a")
    assert world.asked() == []


def test_without_a_gateway_or_without_a_shard_on_demand_nothing_is_decided() -> None:
    world = World((spec("a", 0),))
    world.want("a")
    traffic = Traffic(dict(world.wanted))
    config = evolve(config_of(*world.specs), gateway=None)
    assert decide(world.board.snapshot, config, traffic, world.now, world.fits) == Decision()
    staying = World((spec("a", 0, idle=None),))
    staying.want("a")
    assert staying.decide() == Decision()


def test_a_life_of_another_model_is_left_to_the_reload_that_replaces_it() -> None:
    world = World((spec("a", 0),))
    world.up("a", for_=5000.0)
    world.specs = (spec("a", 0, model="other"),)
    assert world.asked() == []


def test_what_an_operator_stopped_is_not_loaded_and_what_was_unloaded_is() -> None:
    world = World((spec("a", 0),))
    world.board.ask(ShardId("a"), Wish.STOP, "uid 0 (root)", operator=True)
    world.want("a")
    assert world.asked() == []
    world.board.ask(ShardId("a"), Wish.STOP, "uid 0 (root)")
    assert world.asked() == [("start", "a")]


def test_what_failed_for_good_is_not_loaded_until_told() -> None:
    world = World((spec("a", 0),))
    cell = world.engines[ShardId("a")].cell
    world.board.ask(ShardId("a"), Wish.START, "gateway, 1 request waiting")
    cell.report(Failed(Reason("usage", "wrong option")))
    cell.report(GaveUp("will not restart"))
    world.want("a")
    assert world.asked() == []


def test_an_idle_model_is_unloaded_after_its_time_and_one_in_use_is_not() -> None:
    world = World((spec("a", 0, idle=100.0), spec("b", 1, idle=100.0), spec("c", 2, idle=100.0)))
    for name in ("a", "b", "c"):
        world.up(name, for_=500.0, used=99.0)
    world.running[ShardId("b")] = 1
    world.use("c")
    made = world.decide()
    assert not made.wishes
    assert made.again_in == 1.0
    world.step(1.0)
    assert world.asked() == [("stop", "a")]


def test_requests_that_go_to_the_engine_directly_count_once_its_counters_can_tell_them_apart() -> None:
    world = World((spec("a", 0, idle=10.0),))
    world.up("a", for_=500.0, used=12.0)
    world.engines[ShardId("a")].cell.report(ActivitySeen(Activity(running=1)))
    assert world.asked() == [("stop", "a")]
    other = World((spec("a", 0, idle=10.0),))
    other.up("a", for_=500.0, used=60.0)
    other.engines[ShardId("a")].cell.report(ActivitySeen(Activity(running=1)))
    assert other.asked() == []


def test_an_idle_model_with_sleep_mode_sleeps_and_a_request_wakes_it() -> None:
    world = World((spec("a", 0, idle=10.0, idle_action="sleep"),))
    world.up("a", for_=20.0)
    assert world.asked() == [("sleep", "a")]
    world.step(1.0)
    assert world.asked() == []
    world.want("a")
    assert world.asked() == [("start", "a")]


def test_an_idle_model_makes_room_and_the_next_one_starts_when_its_cards_are_free() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=500.0, used=200.0)
    world.want("b")
    assert world.asked() == [("stop", "a")]
    world.step(0.1)
    assert world.asked() == []
    world.step(3.0)
    assert world.state("a") is ShardState.STOPPED
    assert world.asked() == [("start", "b")]


def test_a_sleeper_makes_room_at_once() -> None:
    world = World((spec("a", 0, idle_action="sleep"), spec("b", 0)))
    world.up("a", wish=Wish.SLEEP)
    world.engines[ShardId("a")].cell.report(ConditionSet(ConditionKind.SLEEPING, "asleep"))
    world.want("b")
    assert world.asked() == [("stop", "a")]


def test_a_model_just_woken_stays_until_it_has_served() -> None:
    world = World((spec("a", 0, idle_action="sleep"), spec("b", 0)))
    world.up("a", for_=500.0, used=100.0)
    world.board.ask(ShardId("a"), Wish.SLEEP, "gateway, idle for 60 s")
    world.step(1.0)
    world.want("a")
    assert world.asked() == [("start", "a")]
    world.step(1.0)
    world.wanted.clear()
    world.want("b")
    assert world.asked() == []
    world.use("a")
    assert world.asked() == [("stop", "a")]


def test_a_model_just_loaded_stays_until_it_has_served_or_its_least_time_is_over() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=1.0)
    world.want("b")
    assert world.asked() == []
    world.use("a")
    assert world.asked() == [("stop", "a")]
    other = World((spec("a", 0), spec("b", 0)))
    other.up("a", for_=1.0)
    other.want("b")
    other.step(TURN_MIN - 1.5)
    assert other.asked() == []
    other.step(1.0)
    assert other.asked() == [("stop", "a")]


def test_one_that_had_its_turn_lately_waits_until_the_present_one_was_worth_its_load() -> None:
    world = World((spec("a", 0), spec("b", 0)), load={"a": 80.0})
    world.up("b", for_=300.0, used=100.0)
    world.want("a")
    assert world.asked() == [("stop", "b")]
    world.step(0.1)
    world.step(3.0)
    assert world.asked() == [("start", "a")]
    world.step(0.1)
    world.step(81.0)
    assert world.state("a") is ShardState.READY
    world.wanted.clear()
    world.use("a")
    world.want("b")
    world.step(78.0)
    made = world.decide()
    assert not made.wishes
    assert made.again_in == LOOK_AGAIN
    world.step(3.0)
    assert world.asked() == [("stop", "a")]


def test_a_busy_model_is_drained_after_some_patience_and_unloaded_when_nothing_runs() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=500.0, used=0.0)
    world.running[ShardId("a")] = 2
    world.want("b")
    assert world.asked() == []
    world.step(PATIENCE)
    assert world.asked() == [("drain", "a")]
    world.step(0.1)
    assert world.asked() == []
    world.running[ShardId("a")] = 0
    assert world.asked() == [("stop", "a")]


def test_a_drain_that_nobody_needs_any_more_is_taken_back() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=500.0, used=0.0)
    world.running[ShardId("a")] = 1
    world.want("b", since=world.now - PATIENCE)
    assert world.asked() == [("drain", "a")]
    world.step(0.1)
    world.wanted.clear()
    assert world.asked() == [("start", "a")]


def test_an_operators_drain_is_the_operators_to_end() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=500.0)
    world.board.ask(ShardId("a"), Wish.DRAIN, "uid 0 (root)", operator=True)
    world.step(0.1)
    assert world.asked() == []
    world.want("b")
    assert world.asked() == []


def test_the_victim_is_the_one_that_is_needed_then_the_cheapest_for_its_idle_time() -> None:
    world = World((spec("far", 3), spec("dear", 0, 1), spec("wide", 0, 1)), load={"far": 1.0, "dear": 200.0})
    world.up("far", for_=900.0)
    world.up("dear", for_=900.0, used=400.0)
    world.want("wide")
    assert world.asked() == [("stop", "dear")]
    choice = World((spec("a", 0), spec("b", 1), spec("c", 0, 1)), load={"a": 300.0, "b": 10.0})
    choice.up("a", for_=900.0, used=600.0)
    choice.up("b", for_=900.0, used=600.0)
    choice.want("c")
    assert sorted(choice.asked()) == [("stop", "a"), ("stop", "b")]


def test_of_two_copies_the_one_whose_cards_are_free_is_loaded_and_else_the_cheaper_victim_goes() -> None:
    world = World((spec("a", 0), spec("b0", 0, model="b"), spec("b1", 1, model="b")))
    world.up("a", for_=900.0, used=600.0)
    world.want("b")
    assert world.asked() == [("start", "b1")]


def number(name: str, count: int) -> ShardSpec:
    """A shard that wants so many of the node's four cards, whichever they are."""
    return evolve(spec(name), gpus=count)


def test_of_several_that_would_do_the_cheapest_for_its_idle_time_goes() -> None:
    shards = tuple(number(name, 1) for name in ("dear", "cheap", "active", "other", "new"))
    world = World(shards, load={"dear": 300.0, "cheap": 20.0, "active": 20.0, "other": 300.0})
    for name, used in (("dear", 600.0), ("cheap", 600.0), ("active", 1.0), ("other", 500.0)):
        world.up(name, for_=900.0, used=used)
    world.want("new")
    assert world.asked() == [("stop", "cheap")]


def test_the_fewest_go_and_none_that_is_not_needed() -> None:
    world = World((number("one", 1), number("pair", 2), number("last", 1), number("new", 2)), load={"pair": 500.0})
    for name in ("one", "pair", "last"):
        world.up(name, for_=900.0, used=600.0)
    world.want("new")
    assert world.asked() == [("stop", "pair")]
    wide = World((number("a", 1), number("b", 1), number("c", 1), number("d", 1), number("new", 3)), load={"d": 900.0})
    for name in ("a", "b", "c", "d"):
        wide.up(name, for_=900.0, used=600.0)
    wide.want("new")
    assert sorted(wide.asked()) == [("stop", "a"), ("stop", "b"), ("stop", "c")]


def test_of_two_copies_the_one_whose_cards_cost_less_to_free_is_loaded() -> None:
    shards = (spec("dear", 0), spec("cheap", 1), spec("b0", 0, model="b"), spec("b1", 1, model="b"))
    world = World(shards, load={"dear": 300.0, "cheap": 20.0})
    world.up("dear", for_=900.0, used=600.0)
    world.up("cheap", for_=900.0, used=600.0)
    world.want("b")
    assert world.asked() == [("stop", "cheap")]


def test_nobody_goes_where_it_would_not_help() -> None:
    world = World((spec("fixed", 0, idle=None), spec("a", 1), spec("both", 0, 1)))
    world.up("fixed", for_=900.0)
    world.up("a", for_=900.0, used=200.0)
    world.want("both")
    # Its start says what is in the way, and nobody loses anything for it.
    assert world.asked() == [("start", "both")]
    world.step(1.0)
    assert world.asked() == []
    world.wanted.clear()
    assert world.asked() == [("stop", "both")]


def test_a_load_under_way_is_never_cut_short_for_another() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.want("a")
    assert world.asked() == [("start", "a")]
    world.step(0.1)
    world.want("b")
    world.step(20.0)
    assert world.asked() == []
    world.wanted.pop("a")
    assert world.asked() == []


def test_who_waits_longest_in_the_highest_band_is_first() -> None:
    world = World((spec("a", 0), spec("b", 0), spec("c", 0)))
    world.want("a", since=world.now - 5.0)
    world.want("b", since=world.now - 9.0)
    world.want("c", since=world.now - 1.0, band="interactive")
    assert world.asked() == [("start", "c")]
    assert world.asked() == []


def test_a_start_by_hand_makes_room_too() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    world.up("a", for_=500.0, used=200.0)
    world.board.ask(ShardId("b"), Wish.START, "uid 0 (root)", operator=True)
    world.step(0.1)
    assert world.asked() == [("stop", "a")]
    world.step(0.1)
    world.step(3.0)
    world.step(0.1)
    assert world.state("b") is ShardState.STARTING


def test_two_that_wait_for_gpus_are_not_in_each_others_way() -> None:
    world = World((spec("a", 0), spec("side", 1), spec("b", 0), spec("both", 0, 1)))
    for name in ("a", "side"):
        world.up(name, for_=100.0, used=50.0)
    for name in ("b", "both"):
        world.board.ask(ShardId(name), Wish.START, "gateway, 1 request waiting")
        world.engines[ShardId(name)].cell.report(Unplaced("used by a"))
    world.want("both", since=world.now - 5.0)
    world.want("b", since=world.now - 4.0)
    assert sorted(world.asked()) == [("stop", "a"), ("stop", "side")]
    # Once they are free they go to the first, and nobody else is started beside it.
    world.step(0.1)
    for name in ("a", "side"):
        world.engines[ShardId(name)].cell.report(Stopped("stopped"))
    world.want("a", since=world.now - 1.0)
    assert world.asked() == [("stop", "b")]
    assert world.asked() == []


def test_a_load_that_waits_for_gpus_is_given_up_when_its_requests_are_gone() -> None:
    world = World((spec("a", 0),))
    world.board.ask(ShardId("a"), Wish.START, "gateway, 1 request waiting")
    world.engines[ShardId("a")].cell.report(Unplaced("held by pid 1"))
    world.want("a")
    assert world.asked() == []
    world.wanted.clear()
    assert world.asked() == [("stop", "a")]


def test_one_that_waits_for_its_next_attempt_without_anybody_asking_lets_another_load() -> None:
    world = World((spec("a", 0), spec("b", 0)))
    cell = world.engines[ShardId("a")].cell
    world.board.ask(ShardId("a"), Wish.START, "gateway, 1 request waiting")
    cell.report(Launched(1, 1, 1, "127.0.0.1:1", "h"))
    cell.report(Failed(Reason("oom", "GPU memory ran out")))
    cell.report(RetryScheduled(world.now + 60.0, 1, 5))
    world.want("b")
    assert world.asked() == [("stop", "a")]
    world.step(0.1)
    assert world.asked() == [("start", "b")]


NAMES = ("a", "b", "c", "d")


@given(
    cards=st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=4, max_size=4),
    up=st.lists(st.sampled_from(NAMES), max_size=4, unique=True),
    busy=st.sets(st.sampled_from(NAMES)),
    wanted=st.sets(st.sampled_from(NAMES)),
    ages=st.lists(st.floats(0.0, 2000.0), min_size=4, max_size=4),
)
def test_whatever_is_up_only_what_helps_goes_and_nothing_that_runs_is_stopped(
    cards: list[set[int]], up: list[str], busy: set[str], wanted: set[str], ages: list[float]
) -> None:
    world = World(tuple(spec(name, *sorted(on), idle=1e6) for name, on in zip(NAMES, cards, strict=True)))
    for name in up:
        if world.fits(ShardId(name)):
            world.up(name, for_=ages[NAMES.index(name)], used=ages[NAMES.index(name)] / 2)
    is_up = {name for name in NAMES if world.state(name) is ShardState.READY}
    for name in busy & is_up:
        world.running[ShardId(name)] = 1
    for name in wanted - is_up:
        world.want(name, since=world.now - 20.0)
    before = dict(world.holders())
    made = world.decide().wishes
    gone = {one.id for one in made if one.wish in (Wish.STOP, Wish.DRAIN)}
    started = [one.id for one in made if one.wish is Wish.START]
    assert len(started) + bool(gone) <= 1
    assert all(one.id.name in wanted - is_up for one in made if one.wish is Wish.START)
    if gone:
        # The whole set frees somebody's cards, and none of it goes for nothing.
        helped = [
            name
            for name in wanted - is_up
            if all(set(before.get(card, ())) <= gone for card in world.engines[ShardId(name)].cards)
        ]
        # Of a set with busy ones only these are drained first, so that it may not be whole yet.
        assert helped or any(one.wish is Wish.DRAIN for one in made)
        for name in gone:
            wanting = [world.engines[ShardId(other)].cards for other in wanted - is_up]
            assert any(world.engines[name].cards & theirs for theirs in wanting)


def test_while_one_copy_wakes_no_other_is_loaded() -> None:
    world = World((spec("b0", 0, model="b", idle_action="sleep"), spec("b1", 1, model="b")))
    world.up("b0", wish=Wish.SLEEP)
    world.engines[ShardId("b0")].cell.report(ConditionSet(ConditionKind.SLEEPING, "asleep"))
    world.want("b")
    assert world.asked() == [("start", "b0")]
    assert world.asked() == []
