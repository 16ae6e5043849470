"""Why an instance got no GPUs, as people read it in status."""

from __future__ import annotations

import pytest
from attrs import evolve

from llmgw.domain.shard import ShardId
from llmgw.placement.model import Assignment, Card, NodeView, Request, Slot
from llmgw.placement.place import place

HELD = "held by pid 4411 python"


def cards(node: str, count: int, gpu_class: str, why_not: str | None = None, *, first: int = 0) -> tuple[Card, ...]:
    indexes = range(first, first + count)
    return tuple(Card(f"GPU-{node}{index}", index, gpu_class, (9, 0), 45000, why_not) for index in indexes)


def why(nodes: list[NodeView], request: Request) -> str:
    placement = place(nodes, [request], {})
    assert not placement.assignments
    return placement.reasons[request.id]


def shard(gpus: int, **keys: object) -> Request:
    return Request(ShardId("big"), gpus, **keys)  # type: ignore[arg-type]


MIXED = NodeView(
    "n",
    (
        *cards("n", 3, "l40s-45g"),
        *cards("n", 4, "h100-80g", HELD, first=3),
        *cards("n", 1, "h100-80g", "uncorrected ECC", first=7),
    ),
)


def test_on_one_node_every_gpu_is_counted_with_what_is_wrong_with_it() -> None:
    assert why([MIXED], shard(4, classes=("h100-80g",))) == (
        "needs 4 GPUs of class h100-80g: 4 held by pid 4411 python, 3 of class l40s-45g, 1 uncorrected ECC"
    )


def test_the_numbers_of_a_reason_add_up_to_the_gpus_of_the_node() -> None:
    text = why([MIXED], shard(4)).split(": ", 1)[1]
    assert sum(int(part.split()[0]) for part in text.split(", ")) == len(MIXED.cards)


def test_many_kinds_of_reasons_are_cut_and_the_rest_counted() -> None:
    group = cards("n", 7, "h100-80g")
    node = NodeView("n", tuple(evolve(card, why_not=f"held by pid {card.index}") for card in group))
    assert why([node], shard(1)).endswith("1 held by pid 3, 3 more")


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (NodeView("n", ()), "needs 1 GPU: this node has no GPU; gpus = 0 runs it on the CPU"),
        (
            NodeView("n", (), why_not="GPUs not known, nvidia-smi failed (timeout)"),
            "needs 1 GPU: GPUs not known, nvidia-smi failed (timeout)",
        ),
        (NodeView("n", cards("n", 1, "h100-80g"), why_not="cordoned"), "needs 1 GPU: cordoned"),
    ],
)
def test_a_node_that_is_out_as_a_whole_says_why(node: NodeView, text: str) -> None:
    assert why([node], shard(1)) == text


def test_without_nodes_that_is_the_reason() -> None:
    assert why([], shard(1)) == "needs 1 GPU: there are no nodes"


def test_memory_that_no_card_has_is_told_with_what_they_have() -> None:
    node = NodeView("n", (*cards("n", 1, "l40s-45g"), evolve(cards("n", 1, "gb10", first=1)[0], usable_memory=None)))
    assert why([node], shard(1, memory=60 * 1024)) == (
        "needs 1 GPU with 60.0 GiB free: 1 of unknown memory, 1 with only 43.9 GiB"
    )


def test_on_several_nodes_the_nodes_are_counted() -> None:
    nodes = [
        *(NodeView(f"a{number}", cards(f"a{number}", 4, "h100-80g", HELD)) for number in range(3)),
        NodeView("b", cards("b", 4, "l40s-45g")),
        NodeView("c", cards("c", 8, "h100-80g"), why_not="cordoned"),
    ]
    assert why(nodes, shard(4, classes=("h100-80g",))) == (
        "needs 4 GPUs of class h100-80g: 3 nodes: not enough free h100-80g; 1 node: cordoned; 1 node: no h100-80g"
    )


def test_an_island_with_too_few_nodes_is_named() -> None:
    nodes = [NodeView(name, cards(name, 8, "h100-80g"), islands=frozenset({f"ib{name}"})) for name in "ab"]
    assert why(nodes, shard(16, nodes=2)) == (
        "needs 8 GPUs of one class on each of 2 nodes of one island: island iba has too few nodes with enough free; "
        "island ibb has too few nodes with enough free; 2 nodes: enough free"
    )


def test_nodes_of_one_island_with_different_classes_are_too_few_of_each() -> None:
    nodes = [
        NodeView("a", cards("a", 8, "h100-80g"), islands=frozenset({"ib0"})),
        NodeView("b", cards("b", 8, "a100-80g"), islands=frozenset({"ib0"})),
    ]
    assert "island ib0 has too few nodes" in why(nodes, shard(16, nodes=2))


def test_many_islands_are_counted() -> None:
    nodes = [NodeView(str(n), cards(str(n), 8, "h100-80g"), islands=frozenset({f"ib{n}"})) for n in range(9)]
    assert "9 islands have too few nodes with enough free" in why(nodes, shard(16, nodes=2))


@pytest.mark.parametrize(
    ("nodes", "request_", "text"),
    [
        ([MIXED], shard(16, nodes=2), "there is 1 node"),
        ([NodeView(name, cards(name, 8, "h100-80g")) for name in "ab"], shard(16, nodes=2), "no node is on a fabric"),
        ([MIXED, NodeView("b", ())], shard(3, nodes=2), "3 GPUs are no equal shares for 2 nodes"),
    ],
)
def test_what_never_can_be_placed_over_several_nodes_says_so(
    nodes: list[NodeView], request_: Request, text: str
) -> None:
    assert text in why(nodes, request_)


def test_named_cards_are_told_one_by_one() -> None:
    request = shard(3, pinned=("GPU-n0", "GPU-n4", "GPU-x"))
    assert why([MIXED], request) == "GPU 4: held by pid 4411 python; GPU GPU-x is not there"


def test_named_cards_of_two_nodes_are_told() -> None:
    nodes = [NodeView(name, cards(name, 1, "h100-80g")) for name in "ab"]
    assert why(nodes, shard(2, pinned=("GPU-a0", "GPU-b0"))) == "the GPUs that it names are on several nodes"


def test_a_card_that_a_running_engine_has_is_used_and_not_reserved() -> None:
    runs = Request(ShardId("chat"), 1, pinned=("GPU-n0",), running=True)
    current = {runs.id: Assignment(runs.id, (Slot("n", ("GPU-n0",)),))}
    placement = place([NodeView("n", cards("n", 1, "h100-80g"))], [runs, shard(1)], current)
    assert placement.reasons == {ShardId("big"): "needs 1 GPU: 1 used by chat"}


def test_replicas_that_ask_for_the_same_have_the_same_reason() -> None:
    requests = [Request(ShardId("big", replica), 4, classes=("h100-80g",)) for replica in range(3)]
    assert len(set(place([MIXED], requests, {}).reasons.values())) == 1
