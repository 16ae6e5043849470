"""The state machine: every pair of state and event is either in the table or refused."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.problem import Reason
from llmgw.domain.shard import Secret, ShardId
from llmgw.domain.status import (
    EVENT_TYPES,
    LIVE,
    TRANSITIONS,
    Activity,
    ActivitySeen,
    Adopted,
    Awoken,
    ConditionCleared,
    ConditionKind,
    ConditionSet,
    DrainBegan,
    DrainEnded,
    Event,
    Failed,
    GaveUp,
    IllegalTransition,
    Instance,
    Intent,
    Launched,
    LoadingSeen,
    Noticed,
    Progress,
    ProgressSeen,
    ReadyConfirmed,
    Requeued,
    Retitled,
    RetryScheduled,
    ShardState,
    ShardStatus,
    SlotsFound,
    Steadied,
    StopBegan,
    Stopped,
    Unplaced,
    WaitEnded,
    Wish,
    advance,
    describe,
    is_coming,
    is_loadable,
    is_news,
)

REASON = Reason("D1", "GPU memory ran out", "use more GPUs", ("torch.OutOfMemoryError",))
SAMPLES: dict[type, Event] = {
    Launched: Launched(10, 10, 1, "127.0.0.1:8101", "hash"),
    Adopted: Adopted(10, 10, 1, "127.0.0.1:8101", "hash", (), 5.0),
    LoadingSeen: LoadingSeen("process VLLM::EngineCor"),
    ProgressSeen: ProgressSeen(Progress("weights", 0.5, 1, 2, 3.0)),
    ReadyConfirmed: ReadyConfirmed(),
    DrainBegan: DrainBegan("ada"),
    DrainEnded: DrainEnded(),
    StopBegan: StopBegan("stop wished by ada"),
    WaitEnded: WaitEnded(2),
    Stopped: Stopped("SIGTERM, 0.1 s"),
    Failed: Failed(REASON),
    Unplaced: Unplaced("needs 2 GPUs: 8 held by pid 4411 python"),
    RetryScheduled: RetryScheduled(100.0, 1, 5),
    GaveUp: GaveUp("will not restart"),
    Requeued: Requeued(),
    Steadied: Steadied(),
    ConditionSet: ConditionSet(ConditionKind.UNHEALTHY, "health answers 503"),
    ConditionCleared: ConditionCleared(ConditionKind.UNHEALTHY),
    Awoken: Awoken(1.5),
    Noticed: Noticed("not listening yet"),
    ActivitySeen: ActivitySeen(Activity(1, 0, 5.0)),
    Retitled: Retitled("a/0", "m", "vllm"),
    SlotsFound: SlotsFound(8, "props"),
}


def fresh(state: ShardState = ShardState.PENDING) -> ShardStatus:
    return ShardStatus(ShardId("a"), "a", "m", "vllm", state, since=1.0)


def walk(*events: Event, start: ShardStatus | None = None) -> ShardStatus:
    status = start or fresh()
    for step, event in enumerate(events):
        status = advance(status, event, 10.0 + step)
    return status


def test_there_is_a_sample_for_every_event() -> None:
    assert set(SAMPLES) == set(EVENT_TYPES)


@pytest.mark.parametrize("state", ShardState)
@pytest.mark.parametrize("event", EVENT_TYPES)
def test_every_pair_is_in_the_table_or_refused(state: ShardState, event: type) -> None:
    before = fresh(state)
    wanted = TRANSITIONS.get((state, event))
    if wanted is None:
        with pytest.raises(IllegalTransition, match=f"{event.__name__} while {state}"):
            advance(before, SAMPLES[event], 2.0)
    else:
        after = advance(before, SAMPLES[event], 2.0)
        assert after.state is wanted
        assert after.since == (1.0 if wanted is state else 2.0)
        assert describe(before, SAMPLES[event], after)


def test_live_and_terminal_states_do_not_overlap_and_leave_only_pending() -> None:
    assert set(ShardState) - LIVE == {ShardState.PENDING, ShardState.STOPPED, ShardState.FAILED}


def test_a_failure_forgets_what_only_a_living_engine_has() -> None:
    status = walk(
        SAMPLES[Launched], SAMPLES[LoadingSeen], SAMPLES[ProgressSeen], SAMPLES[ConditionSet], SAMPLES[Failed]
    )
    assert (status.pid, status.progress, status.conditions) == (None, None, ())
    assert status.reason == REASON and status.failures == 1


def test_a_refused_launch_is_no_failure_in_a_row() -> None:
    assert walk(Failed(REASON, counted=False)).failures == 0


def test_failures_in_a_row_are_forgotten_by_a_stop_and_by_being_stable() -> None:
    twice = walk(Failed(REASON), Failed(REASON))
    assert twice.failures == 2
    assert walk(Stopped("by ada"), start=twice).failures == 0
    steady = walk(SAMPLES[Launched], SAMPLES[ReadyConfirmed], Steadied(), start=twice)
    assert (steady.failures, steady.restarts) == (0, 1)


def test_a_held_gpu_is_remembered_over_the_end_of_its_engine() -> None:
    held = ConditionSet(ConditionKind.GPU_HELD, "GPU 0: 41000 MiB used")
    status = walk(SAMPLES[Launched], held, SAMPLES[Failed])
    assert status.condition(ConditionKind.GPU_HELD) is not None


def test_the_load_time_of_an_adopted_engine_is_not_invented() -> None:
    known = evolve(fresh(), load_seconds=99.0)
    assert walk(SAMPLES[Adopted], ReadyConfirmed(), start=known).load_seconds == 99.0
    assert walk(SAMPLES[Launched], ReadyConfirmed(), start=known).load_seconds == 1.0


def test_the_history_does_not_tell_an_old_load_as_one_of_now() -> None:
    adopted = evolve(walk(SAMPLES[Adopted]), load_seconds=60.0)
    assert describe(adopted, ReadyConfirmed(), walk(ReadyConfirmed(), start=adopted)) == "ready (taken over)"


def test_an_adopted_engine_says_so_until_it_is_launched_anew() -> None:
    adopted = walk(SAMPLES[Adopted])
    assert adopted.adopted and adopted.condition(ConditionKind.ADOPTED)
    again = walk(SAMPLES[StopBegan], SAMPLES[Stopped], SAMPLES[Launched], start=adopted)
    assert not again.adopted and again.condition(ConditionKind.ADOPTED) is None


def test_only_a_healthy_ready_shard_is_routable() -> None:
    ready = walk(SAMPLES[Launched], ReadyConfirmed())
    assert ready.routable
    assert not walk(SAMPLES[ConditionSet], start=ready).routable
    assert walk(SAMPLES[ConditionSet], SAMPLES[ConditionCleared], start=ready).routable
    assert not walk(DrainBegan("ada"), start=ready).routable


def test_a_condition_that_is_renewed_keeps_its_time() -> None:
    first = walk(SAMPLES[Launched], ConditionSet(ConditionKind.STALLED, "30 s"))
    again = advance(first, ConditionSet(ConditionKind.STALLED, "60 s"), 99.0)
    condition = again.condition(ConditionKind.STALLED)
    assert condition is not None and (condition.text, condition.since) == ("60 s", 11.0)


@given(st.lists(st.sampled_from([*SAMPLES.values()])))
def test_no_sequence_of_events_leads_to_a_living_state_without_a_process(events: list[Event]) -> None:
    status = fresh()
    for event in events:
        try:
            status = advance(status, event, 5.0)
        except IllegalTransition:
            continue
        assert (status.pid is not None) == status.state.is_live
        assert status.next_attempt is None or status.state is ShardState.FAILED


def test_an_instance_without_gpus_waits_in_pending_and_its_failures_are_neither_counted_nor_forgotten() -> None:
    status = walk(Failed(REASON), RetryScheduled(100.0, 1, 5), SAMPLES[Unplaced])
    assert (status.state, status.failures, status.reason) == (ShardState.PENDING, 1, None)
    assert [(c.kind, c.text) for c in status.conditions] == [
        (ConditionKind.UNPLACED, "needs 2 GPUs: 8 held by pid 4411 python")
    ]


def test_a_check_that_says_no_again_is_no_news_and_another_reason_is() -> None:
    refused = Failed(REASON, counted=False)
    first = walk(refused, RetryScheduled(100.0, 1, 0))
    again = advance(first, refused, 3.0)
    assert not is_news(first, refused, again)
    assert again.condition(ConditionKind.BACKOFF) is not None
    later = advance(again, RetryScheduled(200.0, 2, 0), 4.0)
    assert not is_news(again, RetryScheduled(200.0, 2, 0), later) and later.next_attempt == 200.0
    other = Failed(evolve(REASON, cause="another one"), counted=False)
    assert is_news(later, other, advance(later, other, 5.0))
    # A failure of the engine itself always is.
    counted = Failed(REASON)
    assert is_news(later, counted, advance(later, counted, 6.0))


def test_what_only_a_living_engine_has_is_gone_with_it_and_its_key_is_never_shown() -> None:
    status = ShardStatus(ShardId("a"), "a", "m", "vllm")
    key = Secret("s3cr3t-of-this-start", "record")
    status = advance(status, Launched(1, 1, 1, "127.0.0.1:8101", "hash", (), key), 1.0)
    assert status.api_key is not None and status.api_key.reveal() == "s3cr3t-of-this-start"
    assert "s3cr3t" not in repr(status)
    status = advance(evolve(status, slots=7, slots_from="args"), Stopped("SIGTERM"), 2.0)
    assert (status.api_key, status.slots, status.slots_from) == (None, None, "")


def test_what_runs_in_an_engine_may_finish_until_a_stop_waits_no_longer() -> None:
    ready = advance(fresh(ShardState.LOADING), ReadyConfirmed(), 1.0)
    assert ready.may_finish
    assert walk(DrainBegan("ada"), start=ready).may_finish
    waiting = walk(StopBegan("stop wished by ada", waits=True), start=ready)
    assert waiting.may_finish and not waiting.routable
    waiting = walk(StopBegan("draining, 2 requests left", waits=True), ActivitySeen(Activity(2)), start=waiting)
    assert waiting.may_finish
    over = walk(WaitEnded(2), start=waiting)
    assert not over.may_finish
    assert describe(waiting, WaitEnded(2), over) == "2 requests still running, waited long enough"
    assert is_news(waiting, WaitEnded(2), over) and not is_news(waiting, WaitEnded(0), over)
    # Its process is gone: nobody can finish anything there.
    assert not walk(StopBegan("its main process is gone (exit code 1)"), start=ready).may_finish
    assert not walk(StopBegan("its main process is gone (exit code 1)"), start=waiting).may_finish


def instance(status: ShardStatus, wish: Wish = Wish.STOP, *, by: str = "file", operator: bool = False) -> Instance:
    return Instance(status, Intent(wish, by=by, operator=operator))


def test_a_request_loads_what_has_an_idle_timeout_unless_an_operator_or_too_many_failures_say_no() -> None:
    pending = fresh()
    assert is_loadable(instance(pending), on_demand=True)
    assert not is_loadable(instance(pending), on_demand=False)
    for wish in (Wish.STOP, Wish.DRAIN):
        assert is_loadable(instance(pending, wish, by="gateway, for b"), on_demand=True)
        assert not is_loadable(instance(pending, wish, by="ada", operator=True), on_demand=True)
    failed = walk(Failed(REASON), RetryScheduled(60.0, 1, 5))
    assert is_loadable(instance(failed, Wish.START), on_demand=True)
    assert not is_loadable(instance(walk(Failed(REASON), GaveUp("will not restart"))), on_demand=True)


def test_what_failed_is_coming_until_it_was_decided_that_it_is_not() -> None:
    undecided = walk(Launched(1, 1, 1, "127.0.0.1:1", "h"), Failed(REASON))
    assert is_coming(instance(undecided, Wish.START))
    assert is_coming(instance(walk(RetryScheduled(60.0, 1, 5), start=undecided), Wish.START))
    assert not is_coming(instance(walk(GaveUp("will not restart"), start=undecided), Wish.START))


def test_what_sleeps_can_be_woken_without_an_idle_timeout_too() -> None:
    ready = advance(fresh(ShardState.LOADING), ReadyConfirmed(), 1.0)
    assert not is_loadable(instance(ready, Wish.START), on_demand=False)
    assert is_loadable(instance(ready, Wish.SLEEP, by="ada"), on_demand=False)
    asleep = advance(ready, ConditionSet(ConditionKind.SLEEPING, "asleep"), 2.0)
    assert not asleep.routable and not is_coming(instance(asleep, Wish.START))
    assert is_loadable(instance(asleep, Wish.START), on_demand=False)
    awake = advance(asleep, Awoken(1.6), 3.0)
    assert awake.routable and awake.wake_seconds == 1.6
    assert describe(asleep, Awoken(1.6), awake) == "awake after 1.6 s"


def test_the_last_unload_is_remembered_until_another_one_was_measured() -> None:
    stopping = walk(StopBegan("stop"), start=fresh(ShardState.READY))
    stopped = advance(stopping, Stopped("SIGTERM, 4.2 s", 4.4), 9.0)
    assert stopped.unload_seconds == 4.4
    again = walk(Requeued(), Stopped("stop wished by ada"), start=stopped)
    assert again.unload_seconds == 4.4
