"""Fairness by tokens: who waits all the time gets as many as the others, whatever sizes its requests have."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.admission.counters import OUTPUT_COST, Lowest, TokenCounters, cost
from llmgw.gateway.admission.messages import Granted
from tests.gateway.admission.setting import Tickets, admission, band, rules, tenant

LARGEST = 100
"""Tokens of a prompt, and of an answer, at the most in these tests."""

sizes = st.lists(st.integers(1, LARGEST), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.tuples(sizes, sizes, sizes),
    answers=st.tuples(sizes, sizes, sizes),
    weights=st.tuples(*[st.integers(1, 4)] * 3),
    slots=st.integers(1, 4),
    lie=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)
def test_the_shares_of_tenants_that_always_wait_keep_within_the_bound(
    prompts: tuple[list[int], ...],
    answers: tuple[list[int], ...],
    weights: tuple[int, ...],
    slots: int,
    lie: float,
) -> None:
    """The paper's bound: twice what all slots together can hold, since all of them may have been one tenant's before
    its counter could tell. `lie` times the real prompt is the estimate.
    """
    names = "abc"
    config = rules(*(tenant(n, weight=w) for n, w in zip(names, weights, strict=True)), fairness="tokens")
    desk = Tickets(admission(config, {"qwen": slots}))
    sent: Counter[str] = Counter()

    def offer(name: str) -> int:
        prompt = prompts[names.index(name)]
        size = prompt[sent[name] % len(prompt)]
        sent[name] += 1
        return desk.offer(name, estimate=max(1, int(size * lie)))

    real: dict[int, tuple[int, int]] = {}
    running = [desk.offer("a") for _ in range(slots)]
    for name in names * 2 * slots:
        offer(name)
    served: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    most = slots * cost(2 * LARGEST, LARGEST) + cost(2 * LARGEST, 0)
    for _ in range(150):
        ticket = running.pop(0)
        name = desk.offers[ticket].tenant
        index = counted[name]
        counted[name] += 1
        whose = names.index(name)
        real[ticket] = (prompts[whose][index % len(prompts[whose])], answers[whose][index % len(answers[whose])])
        served[name] += cost(*real[ticket])
        granted = desk.finish(ticket, *real[ticket])
        assert len(granted) == 1
        running += granted
        # Whoever was let in comes again, so that everyone always waits.
        offer(desk.offers[granted[0]].tenant)
        shares = [served[n] / w for n, w in zip(names, weights, strict=True)]
        assert max(shares) - min(shares) <= 2 * most


def test_a_tenant_with_requests_a_hundred_times_as_long_gets_no_more_than_the_others() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    running = desk.offer("short", estimate=10)
    for _ in range(300):
        desk.offer("short", estimate=10)
        desk.offer("long", estimate=1000)
    order = [desk.offers[ticket].tenant for ticket in desk.served(running, 303)]
    assert Counter(order) == {"short": 300, "long": 3}


def test_what_was_generated_counts_beside_what_was_read() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    ticket = desk.offer("talks", estimate=10)
    for _ in range(20):
        desk.offer("talks", estimate=10)
        desk.offer("brief", estimate=10)
    order = []
    for _ in range(12):
        name = desk.offers[ticket].tenant
        (ticket,) = desk.finish(ticket, 10, 45 if name == "talks" else 0)
        order.append(desk.offers[ticket].tenant)
    # One that talks costs 10 + 2 * 45, ten times as much.
    assert OUTPUT_COST == 2
    assert Counter(order) == {"brief": 11, "talks": 1}


def test_an_estimate_that_was_too_high_is_given_back() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 2}))
    wrong, other = desk.offer("a", estimate=10_000), desk.offer("b", estimate=100)
    for _ in range(5):
        desk.offer("b", estimate=100)
    waiting = desk.offer("a", estimate=10)
    assert waiting not in desk.finish(other, 100, 0)
    assert desk.finish(wrong, 10, 0) == [waiting]


def test_who_comes_back_has_saved_up_no_claim() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    ticket = desk.offer("new", estimate=1)
    for _ in range(60):
        desk.offer("busy", estimate=100)
    (ticket, *_) = desk.served(ticket, 40)[-1:]
    for _ in range(10):
        desk.offer("new", estimate=100)
    order = [desk.offers[each].tenant for each in desk.served(ticket, 10)]
    assert Counter(order) == {"busy": 5, "new": 5}


def test_who_comes_back_while_nobody_waits_has_saved_up_no_claim_either() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    for _ in range(50):
        desk.finish(desk.offer("busy", estimate=100), 100, 0)
    ticket = desk.offer("other", estimate=100)
    for _ in range(20):
        desk.offer("new", estimate=100)
        desk.offer("busy", estimate=100)
    order = [desk.offers[each].tenant for each in desk.served(ticket, 10)]
    assert abs(order.count("busy") - order.count("new")) <= 2


def test_who_waited_once_and_comes_back_much_later_has_saved_up_no_claim() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    ticket = desk.offer("busy", estimate=100)
    for name in ["new"] + ["busy"] * 60:
        desk.offer(name, estimate=100)
    ticket = desk.served(ticket, 40)[-1]
    for _ in range(10):
        desk.offer("new", estimate=100)
    order = [desk.offers[each].tenant for each in desk.served(ticket, 10)]
    assert Counter(order) == {"busy": 5, "new": 5}


def test_who_comes_after_all_have_left_begins_where_they_were() -> None:
    desk = Tickets(admission(rules(fairness="tokens"), {"qwen": 1}))
    ticket = desk.offer("busy", estimate=100)
    for _ in range(50):
        desk.offer("busy", estimate=100)
    ticket = desk.served(ticket, 50)[-1]
    for _ in range(10):
        desk.offer("new", estimate=100)
        desk.offer("busy", estimate=100)
    order = [desk.offers[each].tenant for each in desk.served(ticket, 10)]
    assert abs(order.count("busy") - order.count("new")) <= 2


def test_weights_divide_the_tokens() -> None:
    config = rules(tenant("heavy", weight=3), tenant("light", weight=1), fairness="tokens")
    desk = Tickets(admission(config, {"qwen": 1}))
    ticket = desk.offer("other", estimate=1)
    for _ in range(100):
        desk.offer("heavy", estimate=100)
        desk.offer("light", estimate=100)
    order = [desk.offers[each].tenant for each in desk.served(ticket, 80)]
    assert Counter(order) == {"heavy": 60, "light": 20}


def test_a_tenant_at_its_limit_is_stepped_over_here_too() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1), fairness="tokens"), {"qwen": 2}))
    capped, other = desk.offer("capped"), desk.offer("other", estimate=500)
    waiting, next_ = desk.offer("capped"), desk.offer("other")
    assert desk.finish(other) == [next_]
    assert desk.finish(capped) == [waiting]


def test_who_waits_in_one_band_and_runs_in_another_is_charged_for_both() -> None:
    bands = (band("normal", default=True), band("batch", max_inflight=1))
    desk = Tickets(admission(rules(bands=bands, fairness="tokens"), {"qwen": 3}))
    batch = desk.offer("a", "batch", estimate=10)
    waiting = desk.offer("a", "batch", estimate=10)
    other = desk.offer("b", "batch", estimate=10)
    # It goes at once, and costs what the next of its batch requests is stepped over for.
    assert isinstance(desk.ask("a", "normal", estimate=500)[1], Granted)
    assert desk.finish(batch, 10, 0) == [other]
    assert desk.finish(other, 10, 0) == [waiting]


@pytest.mark.parametrize("fairness", ["requests", "tokens"])
def test_counting_may_change_with_a_reload(fairness: str) -> None:
    other = "tokens" if fairness == "requests" else "requests"
    desk = Tickets(admission(rules(fairness=fairness), {"qwen": 1}))
    running = desk.offer("long", estimate=1000)
    waiting = [desk.offer(name, estimate=10) for name in ("long", "long", "short", "short")]
    desk.subject.adopt(rules(fairness=other), 1.0)
    desk.subject.adopt(rules(fairness=fairness), 2.0)
    assert sorted(desk.served(running, 9)) == waiting


# -- its parts ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(-5, 20) | st.just("gone")), max_size=200))
def test_the_lowest_is_always_one_with_the_lowest_number(steps: list[tuple[str, int | str]]) -> None:
    values: dict[str, float] = {}
    subject = Lowest(values.__getitem__)
    there: set[str] = set()
    for name, change in steps:
        if isinstance(change, str):
            subject.discard(name)
            there.discard(name)
            continue
        values[name] = values.get(name, 0) + change
        if name not in there:
            there.add(name)
            subject.add(name)
        elif change < 0:
            subject.fell(name)
        lowest = subject.lowest()
        assert lowest in there
        assert values[lowest] == min(values[each] for each in there)
    assert (subject.lowest() is None) == (not there)


def test_tenants_that_only_come_and_leave_take_no_memory() -> None:
    counters = TokenCounters()
    for _ in range(10_000):
        counters.enter("a")
        counters.exit("a")
    assert len(counters._lowest._heap) < 100


def test_counters_of_tenants_that_are_not_in_the_file_any_more_are_forgotten_unless_they_wait() -> None:
    counters = TokenCounters()
    for name in ("kept", "waits", "gone"):
        counters.charge(name, 10)
    counters.enter("waits")
    counters.keep({"kept"})
    assert [counters[name] for name in ("kept", "waits", "gone")] == [10, 10, 0]
