"""Refusals: full queues, used-up rates, time-outs, engines that do not come; and what a client is told about them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.admission.messages import Granted, Refused
from llmgw.gateway.admission.pace import RETRY_MAX, RETRY_MIN, RETRY_UNKNOWN
from llmgw.gateway.admission.rates import Bucket
from llmgw.gateway.admission.timers import Timers
from llmgw.gateway.reading import answers
from tests.gateway.admission.setting import Tickets, admission, band, key, rules, tenant


def refused(outcome: object) -> Refused:
    assert isinstance(outcome, Refused)
    return outcome


# -- full queues ----------------------------------------------------------------------------------------------


def test_beyond_the_queue_limit_of_its_band_a_request_gets_429() -> None:
    bands = (band("normal", default=True, queue_limit=2), band("batch", queue_limit=1))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 1}))
    for _ in range(3):
        desk.offer()
    full = refused(desk.ask()[1])
    assert (full.reason, answers.from_admission(full).status) == ("queue-full", 429)
    assert full.text == "cannot queue one more request of band normal for qwen: 2 wait, its limit; try again"
    assert desk.ask(band="batch")[1] is None
    assert refused(desk.ask(band="batch")[1]).reason == "queue-full"


def test_a_model_that_loads_does_not_fill_the_queue_of_another_one() -> None:
    desk = Tickets(admission(rules(bands=[band("normal", default=True, queue_limit=1)]), {"qwen": 1}))
    desk.offer(model="loads")
    assert refused(desk.ask(model="loads")[1]).reason == "queue-full"
    desk.offer(model="qwen")
    assert desk.ask(model="qwen")[1] is None


def test_a_tenant_has_a_queue_limit_of_its_own_in_each_band() -> None:
    bands = (band("normal", default=True), band("batch"))
    desk = Tickets(admission(rules(tenant("a", queue_limit=1), bands=bands), {"qwen": 1}))
    desk.offer("a")
    desk.offer("a")
    assert refused(desk.ask("a")[1]).reason == "queue-full"
    desk.offer("a", "batch")
    desk.offer("other")
    # Promoted or not, it is still one of its band.
    desk.subject.tick(15.0)
    assert refused(desk.ask("a", "batch", now=15.0)[1]).reason == "queue-full"


def test_without_a_queue_what_can_go_goes_and_the_rest_is_refused() -> None:
    desk = Tickets(admission(rules(bands=[band("normal", default=True, queue_limit=0)]), {"qwen": 1}))
    running = desk.offer()
    assert refused(desk.ask()[1]).reason == "queue-full"
    desk.finish(running)
    assert isinstance(desk.ask()[1], Granted)
    nobody = refused(desk.ask(model="llama")[1])
    assert (nobody.reason, answers.from_admission(nobody).status) == ("no-engine", 503)


def test_a_place_in_the_queue_is_free_as_soon_as_somebody_leaves() -> None:
    desk = Tickets(admission(rules(bands=[band("normal", default=True, queue_limit=1)]), {"qwen": 1}))
    desk.offer()
    waiting = desk.offer()
    assert desk.ask()[1] is not None
    desk.subject.leave(waiting, 1.0)
    assert desk.ask()[1] is None


# -- when to come again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ran", "slots", "waiting", "expected"),
    [
        (2.0, 1, 4, 10.0),
        (2.0, 4, 4, 2.5),
        (0.01, 1, 4, RETRY_MIN),
        (120.0, 1, 4, RETRY_MAX),
    ],
)
def test_retry_after_follows_from_the_queue_and_from_how_long_requests_run(
    ran: float, slots: int, waiting: int, expected: float
) -> None:
    desk = Tickets(admission(rules(bands=[band("normal", default=True, queue_limit=waiting)]), {"qwen": slots}))
    desk.finish(desk.offer(), now=ran)
    for _ in range(slots + waiting):
        desk.offer(now=ran)
    assert refused(desk.ask(now=ran)[1]).retry_after == pytest.approx(expected)


def test_who_is_refused_in_a_high_band_comes_again_sooner() -> None:
    bands = (band("interactive", queue_limit=1), band("normal", default=True, queue_limit=9))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 1}))
    desk.finish(desk.offer(), now=2.0)
    for _ in range(10):
        desk.offer(now=2.0)
    desk.offer(band="interactive", now=2.0)
    assert refused(desk.ask(band="interactive", now=2.0)[1]).retry_after == pytest.approx(4.0)
    assert refused(desk.ask(band="normal", now=2.0)[1]).retry_after == pytest.approx(22.0)


def test_before_anything_has_ended_retry_after_is_a_few_seconds() -> None:
    desk = Tickets(admission(rules(bands=[band("normal", default=True, queue_limit=0)]), {"qwen": 1}))
    desk.offer()
    assert refused(desk.ask()[1]).retry_after == RETRY_UNKNOWN


# -- rates ----------------------------------------------------------------------------------------------------


def test_requests_per_minute_beyond_which_a_tenant_gets_429_until_the_next_one_is_due() -> None:
    desk = Tickets(admission(rules(tenant("a", requests_per_minute=3)), {"qwen": 99}))
    for _ in range(3):
        desk.offer("a")
    over = refused(desk.ask("a")[1])
    assert (over.reason, over.retry_after, answers.from_admission(over).status) == ("rate", 20.0, 429)
    assert (
        over.text == "cannot let in another request of tenant a: its requests_per_minute are used up; try again later"
    )
    desk.offer("b")
    assert isinstance(desk.ask("a", now=20.0)[1], Granted)
    assert refused(desk.ask("a", now=20.0)[1]).reason == "rate"


def test_tokens_per_minute_count_what_the_engine_counted() -> None:
    desk = Tickets(admission(rules(tenant("a", tokens_per_minute=600)), {"qwen": 99}))
    ticket = desk.offer("a", estimate=100)
    desk.finish(ticket, 200, 700)
    over = refused(desk.ask("a", estimate=1)[1])
    assert "tokens_per_minute" in over.text
    assert over.retry_after == pytest.approx(30.1)
    assert refused(desk.ask("a", now=30.0)[1]).reason == "rate"
    assert isinstance(desk.ask("a", now=30.2)[1], Granted)


def test_a_request_that_never_ran_costs_no_rate() -> None:
    desk = Tickets(admission(rules(tenant("a", requests_per_minute=4, tokens_per_minute=40)), {"qwen": 1}))
    running = desk.offer("b")
    left, late = desk.offer("a", estimate=10), desk.offer("a", estimate=10)
    desk.subject.leave(left, 0.0)
    desk.subject.refuse_model("qwen", Refused("load-failed", None, "in vain"), 0.0)
    desk.finish(running)
    unwanted = desk.offer("a", estimate=10)
    desk.subject.give_back(unwanted, 0.0)
    assert late != unwanted
    for _ in range(4):
        desk.offer("a", estimate=10)
    assert refused(desk.ask("a")[1]).reason == "rate"


def test_other_rates_after_a_reload_keep_what_was_used() -> None:
    desk = Tickets(admission(rules(tenant("a", requests_per_minute=5)), {"qwen": 99}))
    for _ in range(4):
        desk.offer("a")
    desk.subject.adopt(rules(tenant("a", requests_per_minute=6)), 0.0)
    desk.offer("a")
    desk.offer("a")
    assert refused(desk.ask("a")[1]).reason == "rate"
    desk.subject.adopt(rules(tenant("a")), 0.0)
    desk.offer("a")


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), max_size=40),
)
def test_a_bucket_lets_in_no_more_than_a_minute_s_worth_beyond_its_rate(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    subject, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for seconds, amount in steps:
        now += seconds
        pause = subject.pause(now)
        if pause:
            now += pause + 1e-6
            assert subject.pause(now) == 0
        subject.take(amount, now)
        taken += amount
        assert taken <= per_minute + per_minute * now / 60 + amount + 1e-6


# -- time-outs ------------------------------------------------------------------------------------------------


def test_who_waits_longer_than_its_band_allows_gets_503() -> None:
    bands = (band("normal", default=True, queue_timeout=20.0), band("batch", queue_timeout=None))
    desk = Tickets(admission(rules(bands=bands), {"qwen": 1}))
    desk.offer()
    first, endless, second = desk.offer(), desk.offer(band="batch"), desk.offer(now=1.0)
    assert desk.subject.tick(19.9) == []
    ((ticket, outcome),) = desk.subject.tick(20.0)
    assert (ticket, refused(outcome).reason, answers.from_admission(refused(outcome)).status) == (
        first,
        "queue-timeout",
        503,
    )
    assert desk.subject.next_event() == 21.0
    assert [each for each, _ in desk.subject.tick(99.0)] == [second]
    desk.subject.tick(9999.0)
    assert desk.subject.position(endless) == 1


@pytest.mark.parametrize(("wait", "limit"), [(None, 600.0), (30.0, 30.0)])
def test_who_waits_for_an_engine_waits_as_long_as_a_load_may_take(wait: float | None, limit: float) -> None:
    desk = Tickets(admission(rules()))
    ticket = desk.offer(wait=wait)
    assert desk.subject.tick(limit - 0.1) == []
    ((late, outcome),) = desk.subject.tick(limit)
    assert (late, refused(outcome).reason) == (ticket, "load-timeout")
    assert refused(outcome).text.startswith("cannot serve qwen yet: no engine of it came up")


def test_waiting_for_a_slot_begins_when_the_engine_is_there() -> None:
    desk = Tickets(admission(rules()))
    first, second = desk.offer(), desk.offer()
    outcomes = desk.subject.set_endpoints("qwen", {key("qwen"): 1}, 500.0)
    assert [ticket for ticket, _ in outcomes] == [first]
    assert desk.subject.tick(559.0) == []
    assert [ticket for ticket, _ in desk.subject.tick(560.0)] == [second]


def test_when_the_engine_goes_who_waits_for_a_slot_waits_for_an_engine() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running, waiting = desk.offer(), desk.offer()
    desk.subject.set_endpoints("qwen", {}, 10.0)
    assert desk.subject.tick(100.0) == []
    desk.finish(running, now=100.0)
    outcomes = desk.subject.set_endpoints("qwen", {key("qwen", generation=2): 1}, 200.0)
    assert outcomes == [(waiting, Granted(waiting, key("qwen", generation=2)))]


def test_after_all_were_refused_nobody_waits_any_more() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running, waiting = desk.offer(), desk.offer()
    draining = Refused("draining", 5.0, "cannot take new requests: llmgw is going down")
    assert desk.subject.refuse_all(draining, 0.0) == [(waiting, draining)]
    assert desk.ask()[1] == draining
    desk.finish(running)
    assert isinstance(desk.ask()[1], Granted)


def test_a_load_that_failed_refuses_the_waiters_of_its_model_alone() -> None:
    desk = Tickets(admission(rules()))
    lost, kept = desk.offer(model="qwen"), desk.offer(model="llama")
    why = Refused("load-failed", None, "cannot serve qwen: GPU memory ran out")
    assert desk.subject.refuse_model("qwen", why, 0.0) == [(lost, why)]
    assert desk.subject.refuse_model("never-heard-of", why, 0.0) == []
    assert desk.subject.position(kept) == 1


def test_a_second_try_without_another_free_engine_keeps_the_first_one() -> None:
    desk = Tickets(admission(rules(), {"qwen": 2}))
    ticket, other = desk.offer(), desk.offer()
    assert refused(desk.subject.retry(ticket, key("qwen"))).reason == "no-engine"
    assert desk.ask()[1] is None
    desk.subject.set_endpoints("qwen", {key("qwen"): 2, key("qwen", 1): 1}, 0.0)
    desk.finish(other)
    with pytest.raises(KeyError):
        desk.subject.retry(other, key("qwen"))


def test_a_second_try_takes_no_slot_that_is_taken() -> None:
    desk = Tickets(admission(rules()))
    desk.subject.set_endpoints("qwen", {key("qwen"): 2, key("qwen", 1): 1}, 0.0)
    tickets = [desk.offer() for _ in range(3)]
    on_first = [each for each in tickets if desk.keys[each] == key("qwen")]
    assert refused(desk.subject.retry(on_first[0], key("qwen"))).reason == "no-engine"
    (on_other,) = set(tickets) - set(on_first)
    waiting = desk.offer()
    assert desk.finish(on_other) == [waiting]
    assert refused(desk.subject.retry(on_first[0], key("qwen"))).reason == "no-engine"
    desk.finish(waiting)
    assert desk.subject.retry(on_first[0], key("qwen")) == Granted(on_first[0], key("qwen", 1))


@given(st.lists(st.tuples(st.sampled_from(["set", "cancel", "look"]), st.sampled_from([1.0, 5.0, 30.0])), max_size=80))
def test_every_moment_comes_once_in_order_unless_it_is_cancelled(steps: list[tuple[str, float]]) -> None:
    subject, now = Timers(), 0.0
    due: dict[int, tuple[float, float]] = {}
    for ticket, (step, length) in enumerate(steps):
        now += 0.5
        if step == "set":
            subject.set(ticket, length, now)
            due[ticket] = (now + length, length)
        elif step == "cancel" and due:
            first = min(due)
            subject.cancel(first, due.pop(first)[1])
        elif step == "look":
            found = set()
            while (popped := subject.pop_due(now)) is not None:
                found.add(popped)
            assert found == {each for each, (at, _) in due.items() if at <= now}
            due = {each: when for each, when in due.items() if each not in found}
        assert subject.next == min((at for at, _ in due.values()), default=None)
