"""What answers mean: before Ready, afterwards, and against the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import Limits
from llmgw.domain.status import Activity, ShardState
from llmgw.supervisor.readiness import (
    Answer,
    Answered,
    Health,
    Listed,
    ListenerFact,
    ModelsAnswer,
    Refused,
    StallWatch,
    TimedOut,
    Unknown,
    Verdict,
    deadline_of,
    judge,
    judge_health,
)

LISTED = Listed(("m",))
OURS = ListenerFact("ours")
YES = Answered(200)


def verdict(
    health: Answer = YES,
    models: ModelsAnswer | None = LISTED,
    listener: ListenerFact | None = OURS,
    *,
    on_503: bool = False,
    unix: bool = False,
    ask_models: bool = True,
) -> Verdict:
    return judge(health, models, ("m", "alias"), listener, loading_on_503=on_503, unix=unix, ask_models=ask_models)


def test_ready_takes_both_questions_and_our_own_socket() -> None:
    assert verdict() == Verdict(True)


def test_an_alias_in_the_list_counts_as_the_model() -> None:
    assert verdict(models=Listed(("alias",))).ready


@pytest.mark.parametrize(
    ("models", "detail"),
    [
        (Listed(("other",)), "it lists other, not m"),
        (Listed(()), "it lists nothing, not m"),
        (Answered(401), "the list of models answers 401: it asks for a key; set api_key to the engine's key"),
        (Answered(503), "the list of models answers 503"),
        (Refused(), "the list of models: connection refused"),
        (TimedOut(5.0), "no list of models within 5 s"),
        (Unknown("no HTTP"), "no valid list of models yet: no HTTP"),
        (None, "the list of models was not asked yet"),
    ],
)
def test_a_list_that_does_not_name_our_model_is_not_yet(models: ModelsAnswer | None, detail: str) -> None:
    assert verdict(models=models) == Verdict(False, detail)


def test_a_plain_command_may_leave_out_the_second_question() -> None:
    assert verdict(models=None, ask_models=False).ready


def test_another_process_on_the_port_blocks_ready_and_is_named() -> None:
    found = verdict(listener=ListenerFact("anothers", "pid 4411 (python, uid 1000)"))
    assert not found.ready and found.blocked
    assert "pid 4411 (python, uid 1000)" in found.detail


def test_a_holder_that_cannot_be_seen_is_ready_with_a_remark() -> None:
    assert verdict(listener=ListenerFact("not-visible")) == Verdict(True, listener_unverified=True)


@pytest.mark.parametrize("listener", [None, ListenerFact("none")])
def test_an_answer_from_nobody_knows_whom_is_not_yet(listener: ListenerFact | None) -> None:
    assert not verdict(listener=listener).ready


def test_a_503_means_loading_only_for_engines_that_say_so() -> None:
    assert verdict(Answered(503), on_503=True).loading == "health answers 503"
    assert verdict(Answered(503)).loading is None


def test_a_socket_file_that_refuses_means_loading() -> None:
    assert verdict(Refused(absent=False), unix=True).loading == "socket file exists"
    assert verdict(Refused(absent=True), unix=True).loading is None
    assert verdict(Refused()).loading is None


@given(
    st.one_of(
        st.builds(Refused, st.booleans()),
        st.builds(TimedOut, st.floats(0, 100)),
        st.builds(Unknown, st.text()),
        st.builds(Answered, st.integers(100, 599), st.text()),
    ),
    st.booleans(),
    st.booleans(),
)
def test_no_answer_to_the_first_question_but_yes_is_ever_ready(health: Answer, on_503: bool, unix: bool) -> None:
    ready = verdict(health, on_503=on_503, unix=unix).ready
    assert ready == (isinstance(health, Answered) and 200 <= health.status < 300)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Answered(200), "yes"),
        (Answered(401), "yes"),
        (Answered(503), "no"),
        (Answered(500), "no"),
        (Refused(), "gone"),
        (TimedOut(5.0), "busy"),
        (Unknown("garbage"), "busy"),
    ],
)
def test_after_ready_refused_is_gone_and_a_timeout_is_busy(answer: Answer, kind: str) -> None:
    found = judge_health(answer)
    assert isinstance(found, Health) and found.kind == kind


LIMITS = Limits(start_timeout=5.0, load_timeout=60.0, load_timeout_max=600.0)


def test_starting_has_its_own_limit() -> None:
    found = deadline_of(LIMITS, ShardState.STARTING, 100.0, 100.0)
    assert found is not None and (found.at, found.key) == (105.0, "start_timeout")


def test_progress_moves_the_limit_of_loading_until_the_hard_one() -> None:
    early = deadline_of(LIMITS, ShardState.LOADING, 100.0, 130.0)
    late = deadline_of(LIMITS, ShardState.LOADING, 100.0, 690.0)
    assert early is not None and (early.at, early.key) == (190.0, "load_timeout")
    assert late is not None and (late.at, late.key) == (700.0, "load_timeout_max")


def test_without_a_hard_limit_progress_alone_counts() -> None:
    found = deadline_of(Limits(load_timeout_max=None, load_timeout=60.0), ShardState.LOADING, 0.0, 1e6)
    assert found is not None and found.at == 1e6 + 60.0


@pytest.mark.parametrize("state", [ShardState.READY, ShardState.DRAINING, ShardState.FAILED])
def test_other_states_have_no_such_limit(state: ShardState) -> None:
    assert deadline_of(LIMITS, state, 0.0, 0.0) is None


def test_a_stall_is_requests_without_steps() -> None:
    watch = StallWatch().seen(Activity(running=2, steps=10.0), 0.0)
    watch = watch.seen(Activity(running=2, steps=10.0), 15.0).seen(Activity(running=1, steps=10.0), 40.0)
    assert watch.stalled_for(45.0) == 45.0


def test_a_step_or_idleness_ends_a_stall() -> None:
    stalled = StallWatch(10.0, 0.0)
    assert stalled.seen(Activity(running=2, steps=11.0), 40.0).stalled_for(50.0) == 10.0
    assert stalled.seen(Activity(running=0, steps=10.0), 40.0).stalled_for(50.0) == 0.0


def test_a_reading_without_counters_learns_nothing() -> None:
    stalled = StallWatch(10.0, 0.0)
    assert stalled.seen(Activity(), 40.0) == stalled


@pytest.mark.parametrize("answer", [Answered(401), Answered(404), Answered(503), TimedOut(5.0), Unknown("no HTTP")])
def test_whatever_a_stranger_answers_it_is_told_as_a_stranger(answer: Answer) -> None:
    stranger = ListenerFact("anothers", "pid 7 (python)")
    found = judge(answer, None, ("m",), stranger, loading_on_503=True, unix=False, ask_models=True)
    assert (found.ready, found.blocked, found.loading) == (False, True, None)
    assert "pid 7 (python)" in found.detail
