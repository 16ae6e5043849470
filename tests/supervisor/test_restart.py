"""Whether and when a failed shard is tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.problem import Reason
from llmgw.domain.shard import RestartPolicy
from llmgw.supervisor.restart import JITTER, GiveUp, Retry, backoff, decide_restart

CAN_HEAL = Reason("D9", "port in use")
CANNOT_HEAL = Reason("D34", "unknown option", retry=False)
POLICY = RestartPolicy(delay=5.0, delay_max=300.0, limit=5)


def test_pauses_double_up_to_the_cap() -> None:
    assert [backoff(POLICY, attempt, 0.5) for attempt in range(1, 9)] == [5, 10, 20, 40, 80, 160, 300, 300]


@given(st.integers(-3, 10_000), st.floats(0, 1))
def test_a_pause_is_never_above_the_cap_nor_below_its_share_of_the_first(attempt: int, chance: float) -> None:
    pause = backoff(POLICY, attempt, chance)
    assert POLICY.delay * (1 - JITTER) <= pause <= POLICY.delay_max


def test_so_many_failures_in_a_row_end_the_attempts() -> None:
    decisions = [decide_restart(POLICY, CAN_HEAL, failures, 0.5) for failures in range(1, 6)]
    assert [type(decision) for decision in decisions] == [Retry, Retry, Retry, Retry, GiveUp]
    assert decisions[-1] == GiveUp("will not restart: failed 5 times in a row")


def test_a_limit_of_zero_never_ends_them() -> None:
    assert isinstance(decide_restart(RestartPolicy(limit=0), CAN_HEAL, 1000, 0.5), Retry)


def test_a_cause_that_cannot_heal_is_not_retried() -> None:
    assert decide_restart(POLICY, CANNOT_HEAL, 1, 0.5) == GiveUp("will not restart: trying again cannot help")


def test_restart_no_is_obeyed_before_anything_else() -> None:
    assert decide_restart(RestartPolicy(mode="no"), CAN_HEAL, 1, 0.5) == GiveUp('will not restart: restart = "no"')
