"""Tenants take turns exactly, also where requests leave at random; weights and limits bend the turns as they should."""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.admission.messages import Offer
from llmgw.gateway.admission.rotation import Rotation, Waiter
from llmgw.gateway.admission.tenants import Tenant
from tests.gateway.admission.setting import Tickets, admission, rules, tenant

NAMES = "abcd"


class ByTheBook:
    """The rotation as one would write it without a thought for its cost: a list of tenants, each with a list."""

    def __init__(self, turns: dict[str, int]) -> None:
        self.turns = turns
        self.lanes: deque[tuple[str, list[int]]] = deque()
        self.left: dict[str, int] = {}

    def add(self, name: str, ticket: int) -> None:
        for other, tickets in self.lanes:
            if other == name:
                tickets.append(ticket)
                return
        self.lanes.append((name, [ticket]))
        self.left[name] = self.turns[name]

    def remove(self, ticket: int) -> None:
        for name, tickets in list(self.lanes):
            if ticket in tickets:
                tickets.remove(ticket)
                if not tickets:
                    self.lanes.remove((name, tickets))

    def take(self) -> int:
        name, tickets = self.lanes[0]
        ticket = tickets.pop(0)
        self.left[name] -= 1
        if not tickets:
            self.lanes.popleft()
        elif not self.left[name]:
            self.left[name] = self.turns[name]
            self.lanes.rotate(-1)
        return ticket


def waiter(ticket: int, tenant: Tenant) -> Waiter:
    return Waiter(Offer(ticket, "qwen", tenant.name, "normal"), tenant, 0)


STEPS = st.lists(st.one_of(st.sampled_from(NAMES), st.just("take"), st.integers(0, 50)), max_size=120)


@settings(deadline=None)
@given(STEPS, st.tuples(*[st.integers(1, 3)] * len(NAMES)))
def test_the_order_is_the_one_of_the_book_whoever_leaves_in_between(
    steps: list[str | int], weights: tuple[int, ...]
) -> None:
    turns = dict(zip(NAMES, weights, strict=True))
    tenants = {name: Tenant(name) for name in NAMES}
    for name, each in tenants.items():
        each.turns = turns[name]
    subject, book = Rotation(), ByTheBook(turns)
    waiting: dict[int, Waiter] = {}
    for ticket, step in enumerate(steps):
        if isinstance(step, int):
            if waiting:
                left = sorted(waiting)[step % len(waiting)]
                subject.remove(waiting.pop(left))
                book.remove(left)
        elif step == "take":
            taken = subject.take()
            assert (taken is None) == (not waiting)
            if taken is not None:
                assert taken.offer.ticket == book.take()
                del waiting[taken.offer.ticket]
        else:
            waiting[ticket] = waiter(ticket, tenants[step])
            subject.add(waiting[ticket])
            book.add(step, ticket)
        assert subject.size == len(waiting)
    places = {ticket: subject.ahead(each) for ticket, each in waiting.items()}
    order = []
    while (taken := subject.take()) is not None:
        order.append(taken.offer.ticket)
    assert order == sorted(waiting, key=places.__getitem__)
    assert sorted(places.values()) == list(range(len(waiting)))


def test_a_tenant_whose_queue_runs_dry_comes_back_at_the_end() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer("first")
    (a,) = [desk.offer("a")]
    b, c = desk.offer("b"), desk.offer("c")
    assert desk.served(running, 1) == [a]
    again = desk.offer("a")
    assert desk.served(a, 9) == [b, c, again]


def test_one_tenant_with_many_requests_does_not_keep_another_waiting() -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer("greedy")
    for _ in range(100):
        desk.offer("greedy")
    modest = desk.offer("modest")
    assert desk.served(running, 2)[1] == modest


def test_served_requests_are_in_proportion_to_the_weights_at_every_moment() -> None:
    weights = {"a": 60, "b": 30, "c": 10}
    # A key for everyone: the weights count by what they have in common, 6 to 3 to 1.
    config = rules(*(tenant(name, weight=weight) for name, weight in weights.items()), allow_anonymous=False)
    desk = Tickets(admission(config, {"qwen": 1}))
    running = desk.offer("a")
    for name in weights:
        for _ in range(100):
            desk.offer(name)
    order = [desk.offers[ticket].tenant for ticket in desk.served(running, 100)]
    assert Counter(order) == weights
    for start in range(0, 100, 10):
        assert Counter(order[start : start + 10]) == {"a": 6, "b": 3, "c": 1}


def test_a_tenant_at_its_limit_is_stepped_over_and_keeps_its_turn() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1)), {"qwen": 2}))
    capped, other = desk.offer("capped"), desk.offer("x")
    waiting = desk.offer("capped")
    x, y, z = desk.offer("x"), desk.offer("y"), desk.offer("z")
    assert desk.finish(other) == [x]
    assert desk.finish(x) == [y]
    assert desk.finish(capped) == [waiting]
    assert desk.finish(y) == [z]


def test_a_tenant_below_its_limit_again_may_run_at_another_model_too() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1)), {"qwen": 1, "llama": 1}))
    running = desk.offer("capped", model="qwen")
    elsewhere = desk.offer("capped", model="llama")
    assert desk.finish(running) == [elsewhere]


def test_a_tenant_at_its_limit_does_not_keep_others_from_going_at_once() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1)), {"qwen": 8}))
    desk.offer("capped")
    assert desk.ask("capped")[1] is None
    assert desk.ask("other")[1] is not None


def test_a_tenant_that_leaves_while_it_is_stepped_over_comes_back_like_any_other() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1)), {"qwen": 2}))
    capped, other = desk.offer("capped"), desk.offer("x")
    left, x = desk.offer("capped"), desk.offer("x")
    assert desk.finish(other) == [x]
    desk.subject.leave(left, 0.0)
    again, y = desk.offer("capped"), desk.offer("x")
    assert desk.finish(x) == [y]
    assert desk.finish(capped) == [again]


def test_requests_that_come_and_leave_while_their_tenant_is_at_its_limit_leave_nothing_behind() -> None:
    capped, subject = Tenant("capped"), Rotation()
    capped.limit = capped.running = 1
    for ticket in range(100):
        each = waiter(ticket, capped)
        subject.add(each)
        assert subject.take() is None
        subject.remove(each)
    assert len(capped.parked_in) == 1
    capped.running = 0
    capped.unpark()
    assert not capped.parked_in
    last = waiter(100, capped)
    subject.add(last)
    assert subject.take() is last


def test_a_higher_limit_after_a_reload_counts_for_a_tenant_that_was_stepped_over() -> None:
    desk = Tickets(admission(rules(tenant("capped", max_inflight=1)), {"qwen": 3}))
    desk.offer("capped")
    other = desk.offer("x")
    waiting = desk.offer("capped")
    desk.finish(other)
    outcomes = desk.subject.adopt(rules(tenant("capped", max_inflight=2)), 0.0)
    assert [ticket for ticket, _ in outcomes] == [waiting]


@settings(deadline=None)
@given(st.lists(st.sampled_from(NAMES), min_size=2, max_size=60))
def test_no_tenant_is_served_twice_while_another_one_waits(names: list[str]) -> None:
    desk = Tickets(admission(rules(), {"qwen": 1}))
    running = desk.offer("first")
    waiting = Counter(desk.offers[desk.offer(name)].tenant for name in names)
    for one, two in pairwise(desk.offers[ticket].tenant for ticket in desk.served(running, len(names))):
        waiting[one] -= 1
        assert one != two or not any(count for name, count in waiting.items() if name != one)
