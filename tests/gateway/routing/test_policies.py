"""Every policy chooses among what is offered; affinity keeps within the bound and moves little."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.config.schema import GATEWAY
from llmgw.domain.shard import ShardId
from llmgw.gateway.routing.policies import HEADROOM, NO_HINT, SPREAD, Chooser, Hint, Load, bound
from llmgw.gateway.routing.prefix import block_hashes

POLICIES = ("least_load", "power_of_two", "round_robin", "random", "prefix", "consistent_hashing")
JUST_BELOW_ONE = 1 - 2**-53


def loads_of(*inflight: int) -> list[Load]:
    return [Load((ShardId("qwen", i), 1), count, 256) for i, count in enumerate(inflight)]


def chooser(policy: str, seed: int = 7) -> Chooser:
    return Chooser(policy, random.Random(seed).random)


chances = st.floats(0, JUST_BELOW_ONE)
counts = st.lists(st.integers(0, 300), min_size=1, max_size=70)
hints = st.builds(
    Hint,
    prefix=st.none() | st.lists(st.binary(min_size=8, max_size=8), max_size=6).map(tuple),
    session=st.none() | st.text(max_size=20),
)


def test_there_is_a_policy_for_every_value_that_the_file_may_have() -> None:
    assert sorted(GATEWAY.by_name["routing"].kind.words) == sorted(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data(), hint=hints)
def test_the_choice_is_always_one_of_those_offered(policy: str, data: st.DataObject, hint: Hint) -> None:
    drawn = data.draw(st.lists(chances, min_size=2, max_size=2))
    chances_left = iter(drawn * 10)
    subject = Chooser(policy, lambda: next(chances_left))
    for _ in range(4):
        loads = loads_of(*data.draw(counts))
        assert subject.choose("qwen", loads, hint) in range(len(loads))


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_to_choose_from_is_an_error(policy: str) -> None:
    with pytest.raises(ValueError, match="no endpoint of qwen was offered"):
        chooser(policy).choose("qwen", [], NO_HINT)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_try_goes_to_another_endpoint_when_the_failed_one_is_left_out(policy: str) -> None:
    subject = chooser(policy)
    loads = loads_of(0, 0, 0)
    hint = Hint(prefix=(b"block-01",), session="a chat")
    failed = loads[subject.choose("qwen", loads, hint)].key
    others = [load for load in loads if load.key != failed]
    for _ in range(20):
        assert others[subject.choose("qwen", others, hint)].key != failed


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(KeyError):
        chooser("fastest")


# -- least_load, power_of_two, random, round_robin ------------------------------------------------------------


@given(counts, chances)
def test_least_load_takes_one_with_the_fewest_requests_in_flight(inflight: list[int], chance: float) -> None:
    index = Chooser("least_load", lambda: chance).choose("qwen", loads_of(*inflight))
    assert inflight[index] == min(inflight)


def test_least_load_breaks_ties_by_chance_and_reaches_each_of_them() -> None:
    loads = loads_of(2, 1, 5, 1, 1)
    found = {Chooser("least_load", lambda c=c: c).choose("qwen", loads) for c in (0.0, 0.4, JUST_BELOW_ONE)}
    assert found == {1, 3, 4}


def test_power_of_two_takes_the_less_loaded_of_two_different_ones() -> None:
    subject = chooser("power_of_two")
    seen = Counter(subject.choose("qwen", loads_of(9, 0, 5)) for _ in range(300))
    assert seen[0] == 0
    assert seen[1] > seen[2] > 0


def test_random_reaches_everybody_whatever_the_load() -> None:
    subject = chooser("random")
    assert {subject.choose("qwen", loads_of(100, 0, 0)) for _ in range(100)} == {0, 1, 2}


def test_round_robin_gives_everybody_the_same_number_of_turns() -> None:
    subject = chooser("round_robin")
    loads = loads_of(9, 0, 3)
    assert [subject.choose("qwen", loads) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_round_robin_gives_its_turn_first_to_who_was_full_when_it_came() -> None:
    subject = chooser("round_robin")
    loads = loads_of(0, 0, 0)
    assert subject.choose("qwen", loads) == 0
    assert loads[1:][subject.choose("qwen", loads[1:])] is loads[1]
    without_last = loads[:2]
    assert without_last[subject.choose("qwen", without_last)] is loads[0]
    assert subject.choose("qwen", loads) == 2


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=40))
def test_round_robin_never_serves_one_twice_while_another_that_is_offered_waits(offers: list[set[int]]) -> None:
    subject = chooser("round_robin")
    loads = loads_of(0, 0, 0, 0, 0)
    last: dict[int, int] = {}
    for turn, offered in enumerate(offers):
        indexes = sorted(offered)
        chosen = indexes[subject.choose("qwen", [loads[i] for i in indexes])]
        assert last.get(chosen, -1) == min(last.get(i, -1) for i in indexes)
        last[chosen] = turn


def test_models_that_share_a_chooser_do_not_take_turns_from_each_other() -> None:
    subject = chooser("round_robin")
    qwen, llama = loads_of(0, 0), [Load((ShardId("llama", i), 1), 0, 8) for i in range(2)]
    chosen = [(subject.choose("qwen", qwen), subject.choose("llama", llama)) for _ in range(4)]
    assert chosen == [(0, 0), (1, 1), (0, 0), (1, 1)]


# -- prefix -----------------------------------------------------------------------------------------------


def hashes(*texts: str) -> tuple[bytes, ...]:
    """One block for each text."""
    return block_hashes([text.ljust(512, ".").encode() for text in texts])


def test_a_conversation_stays_with_the_endpoint_that_knows_its_beginning() -> None:
    subject = chooser("prefix")
    first = subject.choose("qwen", loads_of(0, 0, 0, 0), Hint(hashes("system", "turn 1")))
    busy = loads_of(0, 0, 0, 0)
    busy[first].inflight = HEADROOM
    assert subject.choose("qwen", busy, Hint(hashes("system", "turn 1", "turn 2"))) == first


def test_the_longest_beginning_counts() -> None:
    subject = chooser("prefix")
    for home, words in ((0, ("system",)), (2, ("system", "ada")), (1, ("system", "bob"))):
        loads = loads_of(50, 50, 50)
        loads[home].inflight = 0
        assert subject.choose("qwen", loads, Hint(hashes(*words))) == home
    even = loads_of(0, 0, 0)
    assert subject.choose("qwen", even, Hint(hashes("system", "ada", "more"))) == 2
    assert subject.choose("qwen", even, Hint(hashes("system", "bob", "more"))) == 1


def test_an_overloaded_holder_gives_way_and_the_new_one_holds_the_beginning_from_then_on() -> None:
    subject = chooser("prefix")
    hint = Hint(hashes("system"))
    first = subject.choose("qwen", loads_of(0, 0), hint)
    loads = loads_of(0, 0)
    loads[first].inflight = HEADROOM + 1
    second = subject.choose("qwen", loads, hint)
    assert second != first
    assert subject.choose("qwen", loads_of(0, 0), hint) == second


def test_a_holder_that_is_not_offered_gives_way_to_one_that_knows_less_of_it() -> None:
    subject = chooser("prefix")
    loads = loads_of(0, 0, 0)
    subject.choose("qwen", loads[2:], Hint(hashes("system")))
    subject.choose("qwen", loads[:1], Hint(hashes("system", "ada")))
    # The first block is the first one's too, now. A third request brings it back.
    subject.choose("qwen", loads[2:], Hint(hashes("system")))
    offered = loads[1:]
    assert offered[subject.choose("qwen", offered, Hint(hashes("system", "ada")))] is loads[2]


def test_an_engine_that_was_started_anew_has_forgotten_its_beginnings() -> None:
    subject = chooser("prefix")
    hint = Hint(hashes("system"))
    subject.choose("qwen", [Load((ShardId("qwen", 0), 1), 0, 8)], hint)
    anew = [Load((ShardId("qwen", 0), 2), 3, 8), Load((ShardId("qwen", 1), 1), 0, 8)]
    assert subject.choose("qwen", anew, hint) == 1


def test_models_do_not_know_each_others_beginnings() -> None:
    subject = chooser("prefix")
    hint = Hint(hashes("system"))
    subject.choose("qwen", loads_of(0), hint)
    assert subject.choose("llama", loads_of(1, 0), hint) == 1


def test_without_whole_blocks_prefix_is_least_load() -> None:
    subject = chooser("prefix")
    assert subject.choose("qwen", loads_of(3, 0, 3), Hint(())) == 1
    assert subject.choose("qwen", loads_of(3, 3, 0), NO_HINT) == 2


# -- consistent_hashing -----------------------------------------------------------------------------------


def homes(loads: list[Load], sessions: range) -> dict[int, ShardId]:
    subject = chooser("consistent_hashing")
    return {n: loads[subject.choose("qwen", loads, Hint(session=f"chat-{n}"))].key[0] for n in sessions}


def test_a_session_goes_to_the_same_endpoint_from_every_gateway_in_any_order_and_after_a_restart() -> None:
    loads = loads_of(0, 0, 0, 0, 0)
    anew = [Load((load.key[0], 9), 0, 8) for load in reversed(loads)]
    assert homes(loads, range(100)) == homes(anew, range(100))


def test_sessions_spread_evenly() -> None:
    spread = Counter(homes(loads_of(*[0] * 8), range(4000)).values())
    assert len(spread) == 8
    assert 400 < min(spread.values()) <= max(spread.values()) < 600


@given(st.integers(2, 12), st.data())
def test_an_endpoint_that_goes_moves_its_own_sessions_alone(count: int, data: st.DataObject) -> None:
    loads = loads_of(*[0] * count)
    gone = data.draw(st.integers(0, count - 1))
    before = homes(loads, range(60))
    after = homes(loads[:gone] + loads[gone + 1 :], range(60))
    moved = {n for n in before if before[n] != after[n]}
    assert moved == {n for n in before if before[n] == loads[gone].key[0]}


@given(st.integers(1, 12))
def test_an_endpoint_that_comes_takes_sessions_and_shuffles_none_between_the_others(count: int) -> None:
    loads = loads_of(*[0] * (count + 1))
    before, after = homes(loads[:-1], range(60)), homes(loads, range(60))
    assert {after[n] for n in before if before[n] != after[n]} <= {loads[-1].key[0]}


def test_a_session_leaves_an_overloaded_endpoint_and_comes_back() -> None:
    subject = chooser("consistent_hashing")
    hint = Hint(session="chat-1")
    loads = loads_of(0, 0, 0)
    home = subject.choose("qwen", loads, hint)
    loads[home].inflight = HEADROOM + 1
    away = subject.choose("qwen", loads, hint)
    assert away != home
    assert subject.choose("qwen", loads, hint) == away
    loads[home].inflight = 0
    assert subject.choose("qwen", loads, hint) == home


def test_without_a_session_consistent_hashing_is_least_load() -> None:
    subject = chooser("consistent_hashing")
    assert subject.choose("qwen", loads_of(3, 0, 3), NO_HINT) == 1
    assert subject.choose("qwen", loads_of(3, 3, 0), Hint(session="")) == 2


# -- the bound ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["prefix", "consistent_hashing"])
@given(st.lists(st.tuples(counts, st.integers(0, 3)), min_size=1, max_size=8))
def test_affinity_never_chooses_an_endpoint_beyond_the_bound(policy: str, steps: list[tuple[list[int], int]]) -> None:
    subject = chooser(policy)
    for inflight, which in steps:
        hint = Hint(prefix=hashes("system", f"user {which}"), session=f"chat-{which}")
        chosen = inflight[subject.choose("qwen", loads_of(*inflight), hint)]
        assert chosen <= max(SPREAD * sum(inflight) / len(inflight), min(inflight) + HEADROOM)


@pytest.mark.parametrize("policy", ["prefix", "consistent_hashing"])
def test_one_hot_conversation_fills_all_endpoints_within_the_bound(policy: str) -> None:
    subject = chooser(policy)
    loads = loads_of(0, 0, 0, 0)
    hint = Hint(prefix=hashes("system"), session="chat-1")
    for _ in range(400):
        loads[subject.choose("qwen", loads, hint)].inflight += 1
        assert max(load.inflight for load in loads) <= bound(loads) + 1
    assert min(load.inflight for load in loads) > 0


# -- what is kept ------------------------------------------------------------------------------------------


def test_what_is_no_longer_there_is_forgotten() -> None:
    subject = chooser("prefix")
    hint = Hint(hashes("system"), "chat-1")
    subject.choose("qwen", loads_of(0), hint)
    subject.choose("llama", [Load((ShardId("llama"), 1), 0, 8)], hint)
    subject.keep({"llama"}, {(ShardId("llama"), 1)})
    assert subject.choose("qwen", loads_of(1, 0), hint) == 1, "qwen's beginnings were kept"
    there = [Load((ShardId("llama"), 1), 1, 8), Load((ShardId("llama", 1), 1), 0, 8)]
    assert subject.choose("llama", there, hint) == 0, "llama's beginnings were lost"


def test_turns_are_kept_for_endpoints_that_stay() -> None:
    subject = chooser("round_robin")
    loads = loads_of(0, 0, 0)
    assert [subject.choose("qwen", loads) for _ in range(2)] == [0, 1]
    subject.keep({"qwen"}, {load.key for load in loads[:2]})
    assert subject.choose("qwen", loads[:2]) == 0


def test_another_policy_counts_from_the_next_request_on() -> None:
    subject = chooser("least_load")
    assert subject.choose("qwen", loads_of(5, 0)) == 1
    subject.set_policy("round_robin")
    assert subject.policy == "round_robin"
    assert [subject.choose("qwen", loads_of(5, 0)) for _ in range(2)] == [0, 1]


def test_a_load_shows_its_endpoint_and_how_full_it_is() -> None:
    assert repr(Load((ShardId("qwen", 1), 3), 2, 8)) == "Load(qwen/1, generation 3, 2/8)"
