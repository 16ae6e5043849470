"""Failures take an endpoint out for a while, a probation brings it back, and a model always keeps one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmgw.domain.shard import ShardId
from llmgw.gateway.routing.ejection import FAILURES, PAUSE, PAUSE_MAX, Ejections
from llmgw.gateway.routing.table import Key

A, B, C = KEYS = [(ShardId("qwen", i), 1) for i in range(3)]
SLOTS = {A: 8, B: 8, C: 8}


def eject(ejections: Ejections, key: Key, now: float) -> bool:
    return [ejections.failed(key, KEYS, now) for _ in range(FAILURES)][-1]


def test_failures_in_a_row_take_an_endpoint_out_and_fewer_do_not() -> None:
    ejections = Ejections()
    assert [ejections.failed(A, KEYS, 10.0) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert ejections.is_out(A, 10.0)
    assert ejections.allowed(SLOTS, 10.0) == {B: 8, C: 8}


def test_a_success_between_them_starts_the_count_anew() -> None:
    ejections = Ejections()
    for _ in range(FAILURES):
        for _ in range(FAILURES - 1):
            assert not ejections.failed(A, KEYS, 1.0)
        assert not ejections.succeeded(A, 1.0), "it was not on probation"
    assert ejections.allowed(SLOTS, 1.0) == SLOTS


def test_many_requests_that_fail_together_are_one_ejection() -> None:
    ejections = Ejections()
    assert sum(ejections.failed(A, KEYS, 1.0) for _ in range(50)) == 1
    assert ejections.next_return(1.0) == 1.0 + PAUSE


def test_after_its_pause_it_has_one_slot_until_a_request_goes_well() -> None:
    ejections = Ejections()
    eject(ejections, A, 0.0)
    assert ejections.allowed(SLOTS, PAUSE) == {A: 1, B: 8, C: 8}
    assert ejections.succeeded(A, PAUSE)
    assert ejections.allowed(SLOTS, PAUSE) == SLOTS
    assert ejections.next_return(PAUSE) is None


def test_a_failure_on_probation_takes_it_out_at_once_and_for_twice_as_long() -> None:
    ejections = Ejections()
    eject(ejections, A, 0.0)
    now, pauses = PAUSE, []
    for _ in range(6):
        assert ejections.failed(A, KEYS, now)
        until = ejections.next_return(now)
        assert until is not None
        pauses.append(until - now)
        now = until
    assert pauses == [PAUSE * 2, PAUSE * 4, PAUSE * 8, PAUSE_MAX, PAUSE_MAX, PAUSE_MAX]
    assert ejections.succeeded(A, now)
    eject(ejections, A, now)
    assert ejections.next_return(now) == now + PAUSE, "a success makes its pauses short again"


def test_an_old_request_that_ends_well_does_not_end_the_pause() -> None:
    ejections = Ejections()
    eject(ejections, A, 0.0)
    assert not ejections.succeeded(A, 1.0)
    assert ejections.is_out(A, 1.0)


def test_the_last_endpoint_of_a_model_is_not_taken_out() -> None:
    ejections = Ejections()
    assert not any(ejections.failed(A, [A], 1.0) for _ in range(100))
    assert ejections.allowed({A: 8}, 1.0) == {A: 8}


def test_of_several_that_all_fail_one_stays_in() -> None:
    ejections = Ejections()
    assert eject(ejections, A, 1.0)
    assert eject(ejections, B, 2.0)
    assert not eject(ejections, C, 3.0)
    assert ejections.allowed(SLOTS, 3.0) == {C: 8}


def test_the_last_one_goes_as_soon_as_another_one_is_back() -> None:
    ejections = Ejections()
    eject(ejections, A, 0.0)
    eject(ejections, B, 0.0)
    eject(ejections, C, 0.0)
    assert ejections.failed(C, KEYS, PAUSE)
    assert ejections.allowed(SLOTS, PAUSE) == {A: 1, B: 1}


def test_when_the_healthy_one_goes_away_the_one_that_failed_last_serves() -> None:
    ejections = Ejections()
    eject(ejections, A, 1.0)
    eject(ejections, B, 2.0)
    assert ejections.allowed({A: 8, B: 4}, 3.0) == {B: 4}


def test_an_engine_that_was_started_anew_is_another_endpoint() -> None:
    ejections = Ejections()
    eject(ejections, A, 1.0)
    anew = (A[0], 2)
    assert ejections.allowed({anew: 8, B: 8}, 1.0) == {anew: 8, B: 8}


def test_endpoints_that_are_gone_are_forgotten() -> None:
    ejections = Ejections()
    eject(ejections, A, 1.0)
    eject(ejections, B, 1.0)
    ejections.keep({B, C})
    assert not ejections.is_out(A, 1.0)
    assert ejections.is_out(B, 1.0)


def test_a_model_without_endpoints_stays_without() -> None:
    assert Ejections().allowed({}, 0.0) == {}


class AnyStory(RuleBasedStateMachine):
    """Whatever happens: a model with endpoints can be asked, and whoever was taken out comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.ejections = Ejections()
        self.now = 0.0
        self.there = list(KEYS)

    @rule(key=st.sampled_from(KEYS))
    def fail(self, key: Key) -> None:
        before = self.ejections.allowed(dict.fromkeys(self.there, 8), self.now)
        if self.ejections.failed(key, self.there, self.now) and key in self.there:
            assert set(before) - {key}, "it was the last"

    @rule(key=st.sampled_from(KEYS))
    def succeed(self, key: Key) -> None:
        self.ejections.succeeded(key, self.now)

    @rule(seconds=st.floats(0.1, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(there=st.sets(st.sampled_from(KEYS)))
    def change(self, there: set[Key]) -> None:
        self.there = sorted(there)

    @invariant()
    def somebody_is_left(self) -> None:
        slots = dict.fromkeys(self.there, 8)
        allowed = self.ejections.allowed(slots, self.now)
        assert bool(allowed) == bool(slots)
        assert set(allowed) <= set(slots)
        assert set(allowed.values()) <= {1, 8}

    @invariant()
    def everybody_is_back_after_the_longest_pause(self) -> None:
        slots = dict.fromkeys(self.there, 8)
        assert set(self.ejections.allowed(slots, self.now + PAUSE_MAX)) == set(slots)


TestAnyStory = AnyStory.TestCase


@given(st.floats(0, 1e6))
def test_the_next_return_is_when_somebody_new_is_allowed(now: float) -> None:
    ejections = Ejections()
    eject(ejections, A, now)
    at = ejections.next_return(now)
    assert at is not None
    assert A not in ejections.allowed(SLOTS, now)
    assert A in ejections.allowed(SLOTS, at)
