"""Who gets which GPUs of this node: decided at once for all, and never one card for two."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve, field, frozen
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.availability import availability
from llmgw.domain.hardware import Gpu, GpuProcess, Inventory, InventoryError, InventoryStatus, NodeInventory, Stale
from llmgw.domain.shard import EngineKind, ShardId, ShardSpec
from llmgw.supervisor.assigner import Assigner, Claim, Holding, Refused, Unplaced
from llmgw.supervisor.node_look import NodeFacts


@frozen
class NodeSection:
    labels: Any = field(factory=dict)
    gpus: Any = "all"


@frozen
class Section:
    node: NodeSection = field(factory=NodeSection)


@frozen
class Holds:
    """What the assigner asks of a cell with the configuration."""

    value: Section = field(factory=Section)


@frozen
class Known:
    """A cell with what was seen last."""

    value: NodeFacts


@frozen
class Nothing:
    value: None = None


@frozen
class NeverLooked:
    """A node of which nothing is known yet."""

    facts: Nothing = field(factory=Nothing)


class Node:
    """A watched node as far as the assigner uses one."""

    def __init__(self, facts: NodeFacts) -> None:
        self.facts = Known(facts)
        self.woken = 0

    async def refresh(self) -> NodeFacts:
        return self.facts.value

    def wake(self) -> None:
        self.woken += 1


def card(index: int, *, used: int = 0) -> Gpu:
    processes = (GpuProcess(4190001, used),) if used else ()
    return Gpu(index, f"GPU-{index}", "0", "NVIDIA L4", 23034, used, 22000, (8, 9), processes, gpu_class="l4-22g")


def facts(*cards: Gpu, **keys: Any) -> NodeFacts:
    inventory = evolve(Inventory(InventoryStatus.OK, cards), **keys)
    return NodeFacts(NodeInventory("n", inventory), availability(inventory, {}))


def spec(name: str, gpus: Any, **keys: Any) -> ShardSpec:
    return ShardSpec(name, "m", EngineKind.VLLM, ("vllm",), "h", gpus=gpus, **keys)


def assigner(*claims: Claim, node: NodeFacts | None = None) -> Assigner:
    made = Assigner(Holds(), Node(node or facts()))  # type: ignore[arg-type]
    made.claims = lambda: claims
    return made


def claim(name: str, gpus: Any, uuids: tuple[str, ...] | None = None, *, wanted: bool = True, **keys: Any) -> Claim:
    holds = Holding(uuids) if uuids is not None else None
    return Claim(ShardId(name), spec(name, gpus, **keys), wanted, holds)


def decide(made: Assigner, node: NodeFacts, one: Claim) -> tuple[str, ...]:
    return made.decide(node, one.id, one.spec)


def test_what_one_gets_does_not_depend_on_who_asks_first() -> None:
    claims = [claim("pair", 2), claim("one", 1), claim("two", 1)]
    node = facts(*(card(index) for index in range(4)))
    outcomes = []
    for order in (claims, claims[::-1]):
        made = assigner(*order)
        outcomes.append({one.id.name: decide(made, node, one) for one in order})
    assert outcomes[0] == outcomes[1]
    taken = [uuid for uuids in outcomes[0].values() for uuid in uuids]
    assert len(set(taken)) == len(taken) == 4


def test_cards_of_running_engines_are_theirs_whatever_else_is_wanted() -> None:
    running = claim("old", 1, ("GPU-0",), wanted=False)
    new = claim("new", 1)
    assert decide(assigner(running, new), facts(card(0), card(1)), new) == ("GPU-1",)
    with pytest.raises(Unplaced, match="1 used by old"):
        decide(assigner(running, new), facts(card(0)), new)


def test_cards_that_a_stopped_shard_names_are_kept_for_it() -> None:
    named = claim("named", (0,), wanted=False)
    new = claim("new", 1)
    with pytest.raises(Unplaced, match="reserved for named"):
        decide(assigner(named, new), facts(card(0)), new)


def test_a_named_card_that_a_stranger_holds_goes_on_to_preflight_but_to_one_shard_alone() -> None:
    node = facts(card(0, used=9000))
    one, two = claim("one", (0,)), claim("two", ("GPU-0",))
    made = assigner(one, two)
    assert decide(made, node, one) == ("GPU-0",)
    with pytest.raises(Unplaced):
        decide(made, node, two)
    assert decide(made, node, one) == ("GPU-0",)


def test_a_card_that_is_none_is_refused_and_one_that_nobody_can_see_waits() -> None:
    with pytest.raises(Refused) as refused:
        decide(assigner(), facts(card(0)), claim("a", (7,)))
    assert refused.value.reason.code == "gpu-missing"
    broken = facts(stale=Stale(InventoryError.TIMEOUT, "nvidia-smi did not end within 20 s", 1.0))
    with pytest.raises(Unplaced, match="did not end within 20 s"):
        decide(assigner(), broken, claim("a", 1))
    none = facts(status=InventoryStatus.ERROR, error=InventoryError.COMMAND_MISSING, detail="not on PATH")
    with pytest.raises(Unplaced, match="gpus = 0"):
        decide(assigner(), none, claim("a", 1))


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=7)


@given(sizes=SIZES, cards=st.integers(1, 8), held=st.sets(st.integers(0, 7)), order=st.randoms())
def test_no_order_of_questions_gives_one_card_to_two(sizes: list[int], cards: int, held: set[int], order: Any) -> None:
    node = facts(*(card(index, used=9000 if index in held else 0) for index in range(cards)))
    claims = [claim(f"s{number}", size) for number, size in enumerate(sizes)]
    made = assigner(*claims)
    given_out: dict[str, tuple[str, ...]] = {}
    for _ in range(12):
        one = order.choice(claims)
        try:
            uuids = decide(made, node, one)
        except Unplaced:
            uuids = ()
        # What was given once stays: nobody is moved by another one's question.
        assert given_out.setdefault(one.id.name, uuids) == uuids
        flat = [uuid for found in given_out.values() for uuid in found]
        assert len(set(flat)) == len(flat)
        assert not {f"GPU-{index}" for index in held} & set(uuids)


GIB = 1 << 30


def test_a_running_engine_is_what_it_was_launched_as_whatever_the_file_says_by_now() -> None:
    share: dict[str, Any] = {"share_gpus": True, "gpu_memory": 5 * GIB}
    whole = evolve(claim("old", 1, ("GPU-0",), **share), holds=Holding(("GPU-0",)))
    new = claim("new", 1, **share)
    with pytest.raises(Unplaced, match="used by old"):
        decide(assigner(whole, new), facts(card(0)), new)
    sharing = evolve(whole, holds=Holding(("GPU-0",), 5 * 1024))
    assert decide(assigner(sharing, new), facts(card(0)), new) == ("GPU-0",)


def test_sharers_that_name_a_card_do_not_get_more_of_it_than_there_is() -> None:
    running = evolve(claim("old", (0,)), holds=Holding(("GPU-0",), 15 * 1024))
    large = claim("large", (0,), share_gpus=True, gpu_memory=12 * GIB)
    with pytest.raises(Unplaced):
        decide(assigner(running, large), facts(card(0)), large)
    small = claim("small", (0,), share_gpus=True, gpu_memory=5 * GIB)
    assert decide(assigner(running, small), facts(card(0)), small) == ("GPU-0",)


def test_a_class_that_the_node_can_never_have_enough_of_is_told_so() -> None:
    with pytest.raises(Unplaced, match="this node has only 2"):
        decide(assigner(), facts(card(0), card(1)), claim("big", 3))


def by_turns(name: str, *, holds: bool = False, wanted: bool = False, gpus: Any = (0,)) -> Claim:
    return claim(name, gpus, ("GPU-0",) if holds else None, wanted=wanted or holds, idle_timeout=60.0)


def test_shards_that_take_turns_get_a_card_that_both_name_one_after_another() -> None:
    node = facts(card(0))
    one, two = by_turns("one", wanted=True), by_turns("two")
    assert decide(assigner(one, two), node, one) == ("GPU-0",)
    running = by_turns("one", holds=True)
    with pytest.raises(Unplaced, match="GPU 0: used by one"):
        decide(assigner(running, two), node, two)
    assert decide(assigner(by_turns("one"), two), node, two) == ("GPU-0",)


def test_cards_of_shards_that_take_turns_are_kept_from_those_that_stay() -> None:
    node = facts(card(0))
    staying = claim("staying", 1)
    with pytest.raises(Unplaced, match="reserved for one, two"):
        decide(assigner(by_turns("one"), by_turns("two"), staying), node, staying)


def test_whether_one_fits_is_told_as_if_others_had_gone_and_nothing_is_given_away() -> None:
    node = facts(card(0), card(1))
    running, counted = by_turns("running", holds=True), claim("counted", 1, idle_timeout=60.0)
    both = by_turns("both", gpus=(0, 1))
    made = assigner(running, counted, both, node=node)
    assert not made.fits(both.id)
    assert made.fits(both.id, frozenset({running.id}))
    assert not made.fits(counted.id, frozenset({running.id}))
    assert not made.fits(ShardId("unknown"))
    assert decide(assigner(running, counted), node, counted) == ("GPU-1",)


def test_who_is_about_to_run_has_its_cards_for_those_that_would_be_next() -> None:
    node = facts(card(0))
    made = assigner(by_turns("first", wanted=True), by_turns("second"), node=node)
    assert not made.fits(ShardId("second"))
    assert made.fits(ShardId("first"))


def test_before_the_first_look_one_goes_first_and_finds_out() -> None:
    made = assigner(by_turns("one"), by_turns("two"))
    made._node = NeverLooked()  # type: ignore[assignment]
    assert made.fits(ShardId("one")) and made.fits(ShardId("two"))
    made.claims = lambda: (by_turns("one", wanted=True), by_turns("two"))
    assert made.fits(ShardId("one")) and not made.fits(ShardId("two"))


def test_a_card_with_a_strangers_memory_fits_so_that_the_launch_can_say_what_is_wrong() -> None:
    made = assigner(by_turns("one"), node=facts(card(0, used=9000)))
    assert made.fits(ShardId("one"))
