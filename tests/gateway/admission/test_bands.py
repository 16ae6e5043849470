"""Bands are served by strict priority, nobody starves for it, and what is limited or reserved is so for a band."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.admission.messages import Granted, Refused
from llmgw.gateway.admission.queues import IN_A_ROW
from tests.gateway.admission.setting import DEFAULT_BANDS, Tickets, admission, band, key, rules


def test_a_band_is_served_before_the_ones_after_it() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    batch, normal, interactive = desk.offer(band="batch"), desk.offer(band="normal"), desk.offer(band="interactive")
    unknown = desk.offer(band="no-such-band")
    assert desk.served(running, 9) == [interactive, normal, unknown, batch]


# -- nobody starves -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(
    tenants=st.sampled_from([1, 7]),
    depth=st.sampled_from([1, 20, 900]),
    seconds=st.sampled_from([0.05, 0.5, 2.0]),
    slots=st.sampled_from([1, 4]),
    which=st.sampled_from(["normal", "batch"]),
    same=st.booleans(),
)
def test_with_the_defaults_a_low_band_gets_through_any_flood_above_it(
    tenants: int, depth: int, seconds: float, slots: int, which: str, same: bool
) -> None:
    """There are always `depth` interactive requests waiting, and one request ends every `seconds`."""
    desk = Tickets(admission(rules(), {"qwen": slots}))
    running = [desk.offer("t0", "interactive") for _ in range(slots)]
    for number in range(depth):
        desk.offer(f"t{number % tenants}", "interactive")
    low = desk.offer("t0" if same else "low", which)
    now = 0.0
    while low not in running:
        now += seconds
        assert all(isinstance(outcome, Refused) and ticket != low for ticket, outcome in desk.subject.tick(now))
        running += desk.finish(running.pop(0), now=now)
        while desk.subject.snapshot(now).queues[0].waiting < depth:
            desk.offer(f"t{desk.last % tenants}", "interactive", now=now)
    # One promotion for each band that is above, and a few turns.
    assert now <= 15.0 * (1 if which == "normal" else 2) + (IN_A_ROW + 2) * seconds


def test_who_waits_for_promote_after_is_served_like_one_of_the_next_higher_band() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    old = desk.offer("a", "batch")
    desk.subject.tick(14.9)
    normal = [desk.offer("b", "normal", now=14.9) for _ in range(5)]
    young = desk.offer("a", "batch", now=14.9)
    desk.subject.tick(15.0)
    order = desk.served(running, 9, now=15.0)
    assert sorted(order) == sorted([old, *normal, young])
    assert order.index(old) == IN_A_ROW
    assert order[-1] == young


def test_a_flood_that_was_promoted_does_not_bury_the_band_above() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    for _ in range(500):
        desk.offer("a", "batch")
    desk.subject.tick(15.0)
    desk.subject.tick(30.0)
    for turn in range(20):
        interactive = desk.offer("a", "interactive", now=30.0)
        order = desk.served(running, 2, now=30.0)
        assert interactive in order, turn
        running = order[-1]


def test_promotions_from_two_bands_share_the_turns_of_those_who_were_promoted() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    for _ in range(20):
        desk.offer("a", "normal")
        desk.offer("a", "batch")
    desk.subject.tick(15.0)
    desk.subject.tick(30.0)
    for _ in range(30):
        desk.offer("a", "interactive", now=30.0)
    bands = [desk.offers[ticket].band for ticket in desk.served(running, 16, now=30.0)]
    assert [bands.count(name) for name in ("interactive", "normal", "batch")] == [12, 2, 2]


def test_one_whose_own_band_is_at_its_limit_stands_in_nobody_s_way_after_its_promotion() -> None:
    bands = (band("normal", default=True), band("batch", max_inflight=1))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 2}))
    batch, other = desk.offer("a", "batch"), desk.offer("a", "normal")
    stuck = desk.offer("a", "batch")
    desk.subject.tick(15.0)
    normal = desk.offer("a", "normal", now=15.0)
    assert desk.finish(other, now=15.0) == [normal]
    assert desk.finish(batch, now=15.0) == [stuck]


def test_a_turn_of_those_who_were_promoted_is_not_lost_when_none_of_them_may_go() -> None:
    bands = (band("normal", default=True), band("batch", max_inflight=1))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 2}))
    batch, running = desk.offer("a", "batch"), desk.offer("a", "normal")
    stuck = desk.offer("a", "batch")
    desk.subject.tick(15.0)
    normal = [desk.offer("a", "normal", now=15.0) for _ in range(2 * IN_A_ROW)]
    assert desk.served(running, 9, now=15.0) == normal
    assert desk.finish(batch, now=15.0) == [stuck]


def test_promotion_can_be_switched_off() -> None:
    bands = [band(row.name, default=row.default, promote_after=None) for row in DEFAULT_BANDS]
    desk = Tickets(admission(rules(bands=bands), {"qwen": 1}))
    running = desk.offer()
    batch = desk.offer(band="batch")
    desk.subject.tick(59.0)
    normal = desk.offer(band="normal", now=59.0)
    assert desk.served(running, 2, now=59.0) == [normal, batch]


def test_a_long_load_promotes_nobody() -> None:
    desk = Tickets(admission(rules()))
    batch = [desk.offer("a", "batch") for _ in range(5)]
    desk.subject.tick(300.0)
    interactive = desk.offer("a", "interactive", now=300.0)
    outcomes = desk.subject.set_endpoints("qwen", {key("qwen"): 1}, 300.0)
    assert [ticket for ticket, _ in outcomes] == [interactive]
    desk.subject.tick(315.0)
    assert desk.served(interactive, 9, now=315.0) == batch


def test_a_reload_during_a_load_promotes_nobody_either() -> None:
    desk = Tickets(admission(rules()))
    batch = desk.offer("a", "batch")
    other = [band(row.name, default=row.default, queue_limit=7) for row in DEFAULT_BANDS]
    desk.subject.adopt(rules(bands=other), 1.0)
    desk.subject.tick(100.0)
    desk.subject.tick(300.0)
    normal = desk.offer("a", "normal", now=300.0)
    outcomes = desk.subject.set_endpoints("qwen", {key("qwen"): 1}, 300.0)
    assert [ticket for ticket, _ in outcomes] == [normal]
    assert desk.served(normal, 9, now=300.0) == [batch]


# -- limits ---------------------------------------------------------------------------------------------------


def test_a_band_at_its_limit_waits_while_others_run() -> None:
    bands = (band("normal", default=True), band("batch", max_inflight=2))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 8}))
    first = [desk.offer(band="batch") for _ in range(2)]
    ticket, outcome = desk.ask(band="batch")
    assert outcome is None
    assert isinstance(desk.ask(band="normal")[1], Granted)
    assert desk.finish(first[0]) == [ticket]


def test_the_limit_of_a_band_counts_over_all_models() -> None:
    bands = (band("normal", default=True), band("batch", max_inflight=1))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 8, "llama": 8}))
    running = desk.offer(band="batch", model="qwen")
    waiting = desk.offer(band="batch", model="llama")
    assert desk.finish(running) == [waiting]


def test_the_limit_of_the_gateway_lets_the_highest_band_of_all_models_go_first() -> None:
    desk = Tickets(admission(rules(max_inflight=1), {"qwen": 8, "llama": 8}))
    running = desk.offer(model="qwen")
    batch = desk.offer(band="batch", model="qwen")
    normal = desk.offer(band="normal", model="llama")
    assert desk.served(running, 9) == [normal, batch]


def test_models_that_share_the_limit_of_the_gateway_take_turns() -> None:
    desk = Tickets(admission(rules(max_inflight=1), {"qwen": 8, "llama": 8}))
    running = desk.offer(model="qwen")
    for model in ("qwen", "llama"):
        for _ in range(4):
            desk.offer(model=model)
    models = [desk.offers[ticket].model for ticket in desk.served(running, 8)]
    assert models in (["qwen", "llama"] * 4, ["llama", "qwen"] * 4)


@pytest.mark.parametrize("limit", [None, 4])
def test_what_is_reserved_stays_free_for_its_band(limit: int | None) -> None:
    bands = (band("interactive", reserved=2), band("normal", default=True))
    desk = Tickets(admission(rules(bands=bands, max_inflight=limit), {"qwen": 4}))
    running = [desk.offer(band="normal") for _ in range(2)]
    assert desk.ask(band="normal")[1] is None
    for _ in range(2):
        assert isinstance(desk.ask(band="interactive")[1], Granted)
    # Its band uses it: nothing is kept beyond.
    assert len(desk.finish(running[0])) == 1


def test_a_small_engine_does_not_belong_to_the_band_with_a_reserve_alone() -> None:
    bands = (band("interactive", reserved=8), band("normal", default=True))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 2}))
    first, _ = [desk.offer(band="interactive") for _ in range(2)]
    normal, other = [desk.offer(band="normal") for _ in range(2)]
    for _ in range(20):
        desk.offer(band="interactive")
    desk.subject.tick(15.0)
    order = desk.served(first, 20, now=15.0)
    assert order.index(normal) <= IN_A_ROW
    assert other in order


def test_what_still_runs_on_a_draining_engine_takes_no_slot_of_its_successor() -> None:
    desk = Tickets(admission(rules(), {"qwen": 4}))
    for _ in range(4):
        desk.offer()
    desk.subject.set_endpoints("qwen", {key("qwen", generation=2): 2}, 0.0)
    outcomes = [desk.ask()[1] for _ in range(3)]
    assert outcomes[:2] == [Granted(5, key("qwen", generation=2)), Granted(6, key("qwen", generation=2))]
    assert outcomes[2] is None


# -- reload ---------------------------------------------------------------------------------------------------


def test_a_reload_of_bands_keeps_everyone_in_the_order_of_coming() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    batch, normal = desk.offer(band="batch"), desk.offer(band="normal")
    later = desk.offer(band="batch")
    other = (band("batch"), band("rest", default=True))
    assert desk.subject.adopt(rules(bands=other), 1.0) == []
    assert desk.served(running, 9) == [batch, later, normal]


def test_a_reload_that_changes_nothing_for_the_queue_keeps_promotions() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer()
    batch = desk.offer("a", "batch")
    desk.subject.tick(15.0)
    desk.subject.tick(30.0)
    desk.subject.adopt(rules(load_wait=5.0), 30.0)
    desk.offer("b", "normal", now=30.0)
    assert desk.served(running, 1, now=30.0) == [batch]


def test_a_higher_limit_after_a_reload_lets_in_at_once_who_waits() -> None:
    desk = Tickets(admission(rules(max_inflight=1), {"qwen": 4}))
    desk.offer()
    waiting = [desk.offer() for _ in range(2)]
    assert [ticket for ticket, _ in desk.subject.adopt(rules(max_inflight=3), 0.0)] == waiting
