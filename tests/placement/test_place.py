"""Which cards an instance gets: worlds by chance for what must hold always, tables for what is preferred."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.domain.shard import ShardId
from llmgw.placement.model import Assignment, Card, NodeView, Placement, Request, Slot
from llmgw.placement.place import place

H100, A100, L40S = "h100-80g", "a100-80g", "l40s-45g"
SLICE = "a100-mig-3g.40gb"
CAPABILITY = {H100: (9, 0), A100: (8, 0), L40S: (8, 9), SLICE: (8, 0), "l40s-vgpu-45g": (8, 9)}
HELD = "held by pid 4411 python"


def cards(
    node: str, count: int, gpu_class: str = H100, *, cliques: int = 0, first: int = 0, **keys: object
) -> tuple[Card, ...]:
    """So many cards of one class; `cliques` of equal size have NVLink among them, 0 is none."""
    return tuple(
        Card(
            f"{node}-{index}",
            index,
            gpu_class,
            CAPABILITY[gpu_class],
            clique=(index - first) * cliques // count if cliques else None,
            **{"usable_memory": 80000, **keys},  # type: ignore[arg-type]
        )
        for index in range(first, first + count)
    )


def with_reason(group: Sequence[Card], why_not: str, *indexes: int) -> tuple[Card, ...]:
    return tuple(evolve(card, why_not=why_not) if card.index in indexes else card for card in group)


def shard(name: str, gpus: int, *, replica: int = 0, **keys: object) -> Request:
    return Request(ShardId(name, replica), gpus, **keys)  # type: ignore[arg-type]


def got(placement: Placement, name: str, replica: int = 0) -> tuple[str, ...]:
    found = placement.assignments.get(ShardId(name, replica))
    assert found is not None, placement.reasons
    return found.uuids


def had(name: str, *slots: tuple[str, Sequence[str]], replica: int = 0) -> dict[ShardId, Assignment]:
    id_ = ShardId(name, replica)
    return {id_: Assignment(id_, tuple(Slot(node, tuple(uuids)) for node, uuids in slots))}


# -- what must hold in every world -----------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[NodeView, ...]:
    nodes = []
    for number in range(draw(st.integers(1, 4))):
        name = f"n{number}"
        kinds = draw(
            st.lists(st.sampled_from([H100, H100, A100, L40S, SLICE, "l40s-vgpu-45g", None]), min_size=2, max_size=8)
        )
        if draw(st.booleans()):
            kinds = kinds[:1] * len(kinds)
        found = []
        for index, kind in enumerate(kinds):
            card = Card(
                f"{name}-{index}",
                None if kind == SLICE else index,
                kind,
                CAPABILITY.get(kind or ""),
                usable_memory=draw(st.sampled_from([80000, 80000, 80000, 40000, None])),
                why_not=draw(st.sampled_from([*[None] * 7, HELD])),
                clique=None if kind == SLICE else draw(st.sampled_from([None, 0, 0, 1])),
                is_slice=kind == SLICE,
                is_virtual="vgpu" in (kind or ""),
            )
            found.append(card)
        labels = {"rack": draw(st.sampled_from(["a", "b"]))}
        islands = frozenset(draw(st.lists(st.sampled_from(["ib0", "ib1"]), max_size=2)))
        why_not = draw(st.sampled_from([*[None] * 7, "cordoned"]))
        nodes.append(NodeView(name, tuple(found), labels, islands, why_not))
    return tuple(nodes)


@st.composite
def asked(draw: st.DrawFn, nodes: Sequence[NodeView], id_: ShardId) -> Request:
    uuids = [[card.uuid for card in node.cards] for node in nodes]
    pinned: tuple[str, ...] = ()
    if draw(st.integers(0, 7)) == 7:
        pool = draw(st.sampled_from([[*some, "gone"] for some in uuids]))
        pinned = tuple(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True)))
    spread = 1 if pinned else draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    memory = draw(st.sampled_from([None, None, None, None, 20000, 50000]))
    classes = st.sampled_from(
        [(), (), (), (), (), (H100,), (A100, H100), (SLICE,), (SLICE, A100), ("l40s-vgpu-45g", L40S)]
    )
    return Request(
        id_,
        len(pinned) or draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4])) * spread,
        nodes=spread,
        classes=draw(classes),
        pinned=pinned,
        one_class=draw(st.booleans()),
        memory=memory,
        share=memory is not None and draw(st.booleans()),
        priority=draw(st.integers(0, 1)),
        where=draw(st.sampled_from([{}, {}, {}, {"rack": ("a",)}, {"rack": ("a", "b")}])),
    )


World = tuple[tuple[NodeView, ...], tuple[Request, ...], dict[ShardId, Assignment]]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Nodes, requests, and what was before: a placement of a similar world, part of which runs, and nonsense."""
    nodes = draw(views())
    ids = [ShardId(name, replica) for name in "abcde" for replica in range(2)]
    chosen = draw(st.lists(st.sampled_from(ids), min_size=3, max_size=8, unique=True))
    before = [draw(asked(nodes, id_)) for id_ in chosen]
    healthy = [
        evolve(node, why_not=None, cards=tuple(evolve(card, why_not=None) for card in node.cards)) for node in nodes
    ]
    current = dict(place(healthy, before, {}).assignments)
    requests = []
    for request in before:
        fate = draw(st.integers(0, 4))
        if fate == 0 and request.id in current:
            requests.append(evolve(request, running=True))
        elif fate == 1:
            requests.append(draw(asked(nodes, request.id)))
        elif fate > 1:
            requests.append(request)
    if draw(st.booleans()):
        # A cold start, as far as nothing runs: all have to be found a place.
        current = {request.id: current[request.id] for request in requests if request.running}
    elif requests:
        every = [card.uuid for node in nodes for card in node.cards] + ["gone"]
        wrong = draw(st.sampled_from([request for request in requests])).id
        if not any(request.running for request in requests if request.id == wrong):
            uuids = tuple(draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)))
            current[wrong] = Assignment(wrong, (Slot("n0", uuids),))
    return nodes, tuple(requests), current


CHANCE = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def by_uuid(nodes: Sequence[NodeView]) -> dict[str, tuple[NodeView, Card]]:
    return {card.uuid: (node, card) for node in nodes for card in node.cards}


def by_id(requests: Sequence[Request]) -> dict[ShardId, Request]:
    return {request.id: request for request in requests}


def group_of(card: Card) -> tuple[object, ...]:
    return (card.gpu_class, card.capability, card.is_virtual, card.is_slice)


@CHANCE
@given(worlds())
def test_no_card_is_given_twice_unless_it_is_shared_and_holds_the_sum(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    known, all_of = by_uuid(nodes), by_id(requests)
    users: dict[str, list[Request]] = defaultdict(list)
    for id_, found in placement.assignments.items():
        assert len(set(found.uuids)) == len(found.uuids)
        for uuid in found.uuids:
            users[uuid].append(all_of[id_])
    for uuid, together in users.items():
        if len(together) > 1:
            usable = known[uuid][1].usable_memory
            assert all(one.share and one.memory is not None for one in together)
            assert usable is not None and sum(one.memory or 0 for one in together) <= usable


@CHANCE
@given(worlds())
def test_every_request_is_placed_or_has_a_reason(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    assert set(placement.assignments) | set(placement.reasons) == set(by_id(requests))
    assert not set(placement.assignments) & set(placement.reasons)
    assert all(placement.reasons.values())


@CHANCE
@given(worlds())
def test_what_is_given_is_what_was_asked_for(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    known = by_uuid(nodes)
    for request in requests:
        found = placement.assignments.get(request.id)
        if found is None or request.running:
            continue
        places = [known[uuid] for uuid in found.uuids]
        assert len(found.uuids) == request.gpus
        if request.pinned:
            assert found.uuids == request.pinned
            continue
        groups = {group_of(card) for _, card in places}
        if request.one_class or request.nodes > 1:
            assert len(groups) == 1
        assert len({card.is_virtual for _, card in places}) == 1
        for node, card in places:
            assert all(node.labels.get(key) in values for key, values in request.where.items())
            assert card.gpu_class in request.classes if request.classes else not card.is_slice
            assert request.memory is None or (card.usable_memory or 0) >= request.memory
        assert request.gpus == 1 or not any(card.is_slice for _, card in places)
        assert len({slot.node for slot in found.slots}) == len(found.slots) == request.nodes
        assert {len(slot.uuids) for slot in found.slots} == {request.gpus // request.nodes}
        for slot in found.slots:
            assert {known[uuid][0].name for uuid in slot.uuids} == {slot.node}
        if request.nodes > 1:
            islands = [node.islands for node in nodes if node.name in {slot.node for slot in found.slots}]
            assert frozenset.intersection(*islands)


@CHANCE
@given(worlds())
def test_cards_that_may_not_be_given_are_never_given_to_what_does_not_run(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    known = by_uuid(nodes)
    for request in requests:
        if request.id in placement.assignments and not request.running:
            for uuid in placement.assignments[request.id].uuids:
                node, card = known[uuid]
                assert card.why_not is None and node.why_not is None


@CHANCE
@given(worlds())
def test_what_runs_keeps_its_cards_whatever_became_of_them(world: World) -> None:
    nodes, requests, current = world
    for left in (nodes, nodes[1:], ()):
        placement = place(left, requests, current)
        for request in requests:
            if request.running:
                assert placement.assignments[request.id] == current[request.id]


@CHANCE
@given(worlds())
def test_moved_are_those_that_had_something_else(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    assert placement.moved <= set(current)
    for request in requests:
        changed = request.id in current and placement.assignments.get(request.id) != current[request.id]
        assert (request.id in placement.moved) is changed


@CHANCE
@given(worlds(), st.data())
def test_the_order_of_the_input_does_not_matter(world: World, data: st.DataObject) -> None:
    nodes, requests, current = world
    first = place(nodes, requests, current)
    shuffled = [evolve(node, cards=tuple(data.draw(st.permutations(node.cards)))) for node in nodes]
    items = data.draw(st.permutations(tuple(current.items())))
    again = place(data.draw(st.permutations(shuffled)), data.draw(st.permutations(requests)), dict(items))
    assert again == first


@CHANCE
@given(worlds())
def test_the_same_call_again_changes_nothing(world: World) -> None:
    nodes, requests, current = world
    first = place(nodes, requests, current)
    again = place(nodes, requests, first.assignments)
    assert again.assignments == first.assignments
    assert again.reasons == first.reasons
    assert not again.moved


@CHANCE
@given(worlds())
def test_what_a_lost_node_did_not_host_stays(world: World) -> None:
    nodes, requests, current = world
    first = place(nodes, requests, current)
    after = place(nodes[1:], requests, first.assignments)
    affected = {
        id_ for id_, found in first.assignments.items() if any(slot.node == nodes[0].name for slot in found.slots)
    }
    assert after.moved <= affected


@CHANCE
@given(worlds(), views())
def test_a_new_node_takes_nothing_from_anybody(world: World, others: tuple[NodeView, ...]) -> None:
    nodes, requests, current = world
    first = place(nodes, requests, current)
    added = evolve(
        others[0], name="new", cards=tuple(evolve(card, uuid=f"new-{card.uuid}") for card in others[0].cards)
    )
    after = place([*nodes, added], requests, first.assignments)
    assert {id_: after.assignments[id_] for id_ in first.assignments} == first.assignments
    assert not after.moved


@CHANCE
@given(worlds())
def test_named_cards_are_kept_for_who_names_them_even_while_it_gets_nothing(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    for owner in requests:
        for other in requests:
            if other.id == owner.id or other.running or other.id not in placement.assignments:
                continue
            taken = set(owner.pinned) & set(placement.assignments[other.id].uuids)
            assert not taken or (owner.share and other.share)


def _could_have(request: Request, nodes: Sequence[NodeView], uses: Mapping[str, Sequence[Request]]) -> bool:
    """Whether there are cards for it after all, by trying every way. `uses` has what is given or reserved."""

    def is_open(card: Card) -> bool:
        if card.why_not is not None:
            return False
        if request.memory is not None and (card.usable_memory is None or card.usable_memory < request.memory):
            return False
        others = [user for user in uses[card.uuid] if user.id != request.id]
        if not others:
            return True
        if request.memory is None or not request.share or not all(user.share for user in others):
            return False
        return sum(user.memory or 0 for user in others) + request.memory <= (card.usable_memory or 0)

    hosts = [
        node
        for node in nodes
        if node.why_not is None and all(node.labels.get(key) in values for key, values in request.where.items())
    ]
    if request.pinned:
        return any(
            all(uuid in own and is_open(own[uuid]) for uuid in request.pinned)
            for node in hosts
            for own in [{card.uuid: card for card in node.cards}]
        )
    size = request.gpus // request.nodes
    room: dict[str, set[tuple[object, ...]]] = {}
    for node in hosts:
        wanted = [
            card
            for card in node.cards
            if card.gpu_class is not None
            and (card.gpu_class in request.classes if request.classes else not card.is_slice)
            and not (card.is_slice and request.gpus > 1)
            and is_open(card)
        ]
        mixed = not request.one_class and request.nodes == 1
        counts = Counter((card.is_virtual,) if mixed else group_of(card) for card in wanted)
        room[node.name] = {group for group, count in counts.items() if count >= size}
    return any(
        set.intersection(*(room[node.name] for node in some))
        and (request.nodes == 1 or frozenset.intersection(*(node.islands for node in some)))
        for some in combinations(hosts, request.nodes)
    )


@CHANCE
@given(worlds())
def test_nothing_is_refused_that_could_be_placed(world: World) -> None:
    nodes, requests, current = world
    placement = place(nodes, requests, current)
    uses: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        found = placement.assignments.get(request.id)
        for uuid in dict.fromkeys((*(found.uuids if found is not None else ()), *request.pinned)):
            uses[uuid].append(request)
    for request in requests:
        if request.id in placement.reasons:
            assert not _could_have(request, nodes, uses), placement.reasons[request.id]


# -- what is preferred -----------------------------------------------------------------------------------


def test_the_smallest_nvlink_clique_that_is_large_enough_is_preferred() -> None:
    two, four = cards("n", 2, cliques=1), tuple(evolve(card, clique=1) for card in cards("n", 4, first=2))
    placement = place([NodeView("n", four + two)], [shard("a", 2), shard("b", 4)], {})
    assert got(placement, "a") == ("n-0", "n-1")
    assert got(placement, "b") == ("n-2", "n-3", "n-4", "n-5")


@CHANCE
@given(st.lists(st.sampled_from([None, 0, 1, 2]), min_size=1, max_size=7), st.data())
def test_no_smaller_clique_would_have_been_large_enough(cliques: list[int | None], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(cliques)))
    node = NodeView(
        "n",
        tuple(
            Card(f"n-{i}", i, H100, (9, 0), 80000, data.draw(st.sampled_from([None, None, None, HELD])), clique)
            for i, clique in enumerate(cliques)
        ),
    )
    free = [card for card in node.cards if card.why_not is None]
    placement = place([node], [shard("a", size, memory=data.draw(st.sampled_from([None, 40000])))], {})
    if len(free) < size:
        assert ShardId("a") in placement.reasons
        return
    crowd: Counter[int | None] = Counter(card.clique for card in free if card.clique is not None)

    def cost(some: Sequence[Card]) -> tuple[bool, int]:
        """Whether there is no NVLink among all of them, and how large the broken clique was."""
        held_together = {card.clique for card in some}
        linked = len(held_together) == 1 and None not in held_together
        if size == 1:
            return False, crowd[some[0].clique] if linked else 0
        return not linked, crowd[some[0].clique] if linked else 0

    chosen = [card for card in node.cards if card.uuid in got(placement, "a")]
    assert cost(chosen) == min(cost(some) for some in combinations(free, size))


def test_a_node_with_nvlink_is_preferred_to_a_tighter_one_without() -> None:
    nodes = [NodeView("a", cards("a", 2)), NodeView("b", cards("b", 8, cliques=1))]
    assert got(place(nodes, [shard("m", 2)], {}), "m") == ("b-0", "b-1")


@pytest.mark.parametrize("memory", [None, 20000])
def test_nvlink_is_never_required(memory: int | None) -> None:
    placement = place([NodeView("n", cards("n", 8, cliques=4))], [shard("m", 8, memory=memory)], {})
    assert len(got(placement, "m")) == 8


@pytest.mark.parametrize("memory", [None, 20000])
def test_a_single_gpu_comes_from_outside_of_nvlink_where_there_is_one(memory: int | None) -> None:
    node = NodeView("n", (*cards("n", 4, cliques=1), *cards("n", 1, first=4)))
    assert got(place([node], [shard("m", 1, memory=memory)], {}), "m") == ("n-4",)


def test_single_gpus_break_up_one_clique_before_the_next() -> None:
    node = NodeView("n", cards("n", 8, A100, cliques=2))
    placement = place(
        [node], [shard("m", 1, replica=replica) for replica in range(3)] + [shard("z", 4, priority=-1)], {}
    )
    assert got(placement, "z") == ("n-4", "n-5", "n-6", "n-7")


def test_the_node_with_the_least_left_over_is_chosen() -> None:
    nodes = [NodeView("a", cards("a", 8)), NodeView("b", cards("b", 2)), NodeView("c", cards("c", 4))]
    assert got(place(nodes, [shard("m", 2)], {}), "m") == ("b-0", "b-1")


def test_replicas_are_on_two_nodes_at_least_and_else_fit_best() -> None:
    nodes = [NodeView("a", cards("a", 4)), NodeView("b", cards("b", 8)), NodeView("c", cards("c", 8))]
    placement = place(nodes, [shard("m", 1, replica=replica) for replica in range(4)], {})
    hosts = Counter(found.slots[0].node for found in placement.assignments.values())
    assert hosts == {"a": 3, "b": 1}


def test_replicas_share_a_node_where_there_is_no_second_one() -> None:
    placement = place([NodeView("n", cards("n", 2))], [shard("m", 1, replica=replica) for replica in range(2)], {})
    assert not placement.reasons


def test_who_has_priority_gets_the_cards() -> None:
    node = NodeView("n", cards("n", 2))
    placement = place([node], [shard("a", 2), shard("z", 2, priority=1)], {})
    assert got(placement, "z") == ("n-0", "n-1")
    assert placement.reasons == {ShardId("a"): "needs 2 GPUs of one class: 2 used by z"}


def test_priority_takes_nothing_from_what_has_its_cards() -> None:
    node = NodeView("n", cards("n", 2))
    placement = place([node], [shard("a", 2), shard("z", 2, priority=9)], had("a", ("n", ["n-0", "n-1"])))
    assert got(placement, "a") == ("n-0", "n-1") and not placement.moved


def test_large_ones_come_before_small_ones() -> None:
    node = NodeView("n", cards("n", 4))
    placement = place([node], [shard("a", 1), shard("b", 4)], {})
    assert set(placement.assignments) == {ShardId("b")}


def test_labels_choose_the_node() -> None:
    nodes = [NodeView("a", cards("a", 1), {"rack": "1"}), NodeView("b", cards("b", 8), {"rack": "2"})]
    placement = place(nodes, [shard("m", 1, where={"rack": ("2", "3")}), shard("x", 1, where={"zone": ("q",)})], {})
    assert got(placement, "m") == ("b-0",)
    assert placement.reasons[ShardId("x")] == "needs 1 GPU: 2 nodes: zone is not q"


@pytest.mark.parametrize(
    ("classes", "expected"),
    [((), "n-4"), ((L40S,), "n-4"), ((H100,), "n-0"), ((L40S, A100), "n-4"), (("gb10",), None)],
)
def test_gpu_class_lists_the_allowed_classes(classes: tuple[str, ...], expected: str | None) -> None:
    node = NodeView("n", (*cards("n", 4), *cards("n", 2, L40S, first=4)))
    placement = place([node], [shard("m", 1, classes=classes)], {})
    assert [found.uuids for found in placement.assignments.values()] == ([(expected,)] if expected else [])


def test_of_equal_nodes_the_class_that_is_listed_first_is_taken() -> None:
    nodes = [NodeView("a", cards("a", 2)), NodeView("b", cards("b", 2, A100))]
    assert got(place(nodes, [shard("m", 1, classes=(A100, H100))], {}), "m") == ("b-0",)


def test_classes_are_mixed_only_for_engines_that_may() -> None:
    node = NodeView("n", (*cards("n", 1), *cards("n", 1, L40S, first=1)))
    placement = place([node], [shard("m", 2)], {})
    assert (
        placement.reasons[ShardId("m")]
        == "needs 2 GPUs of one class: this node has only 1: 1 free h100-80g, 1 free l40s-45g"
    )
    mixed = place([node], [shard("m", 2, one_class=False)], {})
    assert got(mixed, "m") == ("n-0", "n-1") and mixed.assignments[ShardId("m")].gpu_class is None


def test_those_that_share_fill_one_card_before_the_next() -> None:
    node = NodeView("n", cards("n", 2))
    three = [shard("m", 1, replica=replica, memory=30000, share=True) for replica in range(3)]
    placement = place([node], three, {})
    assert Counter(found.uuids for found in placement.assignments.values()) == {("n-0",): 2, ("n-1",): 1}


def test_the_sum_of_those_that_share_never_exceeds_the_card() -> None:
    node = NodeView("n", cards("n", 1))
    placement = place([node], [shard(name, 1, memory=30000, share=True) for name in "abc"], {})
    assert placement.reasons == {ShardId("c"): "needs 1 GPU with 29.3 GiB free: 1 too full beside a, b"}


def test_an_earlier_share_that_is_too_much_now_goes_elsewhere() -> None:
    node = NodeView("n", cards("n", 2))
    before = {**had("a", ("n", ["n-0"])), **had("b", ("n", ["n-0"]))}
    placement = place([node], [shard(name, 1, memory=50000, share=True) for name in "ab"], before)
    assert (got(placement, "a"), got(placement, "b")) == (("n-0",), ("n-1",))
    assert placement.moved == {ShardId("b")}


def test_what_needs_less_memory_takes_the_smaller_card() -> None:
    node = NodeView("n", (*cards("n", 1), *cards("n", 1, L40S, first=1, usable_memory=45000)))
    placement = place([node], [shard("m", 1, memory=40000, share=True), shard("x", 1, memory=60000)], {})
    assert (got(placement, "m"), got(placement, "x")) == (("n-1",), ("n-0",))


def test_slices_are_used_only_by_the_name_of_their_class_and_one_at_a_time() -> None:
    slices = tuple(evolve(card, index=None, is_slice=True) for card in cards("n", 2, SLICE))
    node = NodeView("n", slices)
    placement = place([node], [shard("a", 1), shard("b", 1, classes=(SLICE,)), shard("c", 2, classes=(SLICE,))], {})
    assert got(placement, "b") == ("n-0",)
    assert placement.reasons[ShardId("a")] == "needs 1 GPU: this node has only 0: 2 MIG, given only by name"
    assert "MIG, given only one by one" in placement.reasons[ShardId("c")]
    kept = place([node], [shard("c", 2, classes=(SLICE,))], had("c", ("n", ["n-0", "n-1"])))
    assert kept.moved == {ShardId("c")} and not kept.assignments


def test_virtual_cards_are_never_mixed_with_whole_ones() -> None:
    node = NodeView("n", (*cards("n", 1, L40S), *cards("n", 1, "l40s-vgpu-45g", first=1, is_virtual=True)))
    assert not place([node], [shard("m", 2, one_class=False)], {}).assignments


ISLANDS = [
    NodeView("a", cards("a", 8), islands=frozenset({"ib0"})),
    NodeView("b", cards("b", 8), islands=frozenset({"ib0", "ib1"})),
    NodeView("c", cards("c", 8), islands=frozenset({"ib1"})),
    NodeView("d", cards("d", 8)),
]


def test_several_nodes_are_of_one_island() -> None:
    placement = place(ISLANDS, [shard("m", 16, nodes=2)], {})
    assert [slot.node for slot in placement.assignments[ShardId("m")].slots] == ["a", "b"]
    assert {len(slot.uuids) for slot in placement.assignments[ShardId("m")].slots} == {8}


def test_an_earlier_group_over_two_islands_does_not_stand() -> None:
    whole = {name: [f"{name}-{index}" for index in range(8)] for name in "abc"}
    before = had("m", ("a", whole["a"]), ("c", whole["c"]))
    placement = place(ISLANDS, [shard("m", 16, nodes=2)], before)
    assert placement.moved == {ShardId("m")}
    good = had("m", ("b", whole["b"]), ("c", whole["c"]))
    assert place(ISLANDS, [shard("m", 16, nodes=2)], good).assignments == good


def test_a_group_over_nodes_shares_cards_with_others_where_it_may() -> None:
    nodes = [NodeView(name, cards(name, 1), islands=frozenset({"ib0"})) for name in "ab"]
    requests = [shard(name, 2, nodes=2, memory=30000, share=True) for name in "xy"]
    assert not place(nodes, requests, {}).reasons


def test_an_engine_that_runs_keeps_a_card_that_went_bad_and_others_stay_off() -> None:
    node = NodeView("n", with_reason(cards("n", 2), "uncorrected ECC", 0))
    placement = place([node], [shard("a", 1, running=True), shard("b", 2)], had("a", ("n", ["n-0"])))
    assert got(placement, "a") == ("n-0",)
    assert placement.reasons[ShardId("b")] == "needs 2 GPUs of one class: 1 free h100-80g, 1 uncorrected ECC"


def test_an_assignment_that_does_not_run_leaves_a_card_that_went_bad() -> None:
    node = NodeView("n", with_reason(cards("n", 2), HELD, 0))
    placement = place([node], [shard("a", 1)], had("a", ("n", ["n-0"])))
    assert got(placement, "a") == ("n-1",) and placement.moved == {ShardId("a")}


def test_named_cards_of_what_cannot_start_are_nobody_elses() -> None:
    node = NodeView("n", with_reason(cards("n", 2), HELD, 1))
    placement = place([node], [shard("a", 1), shard("z", 2, pinned=("n-0", "n-1"))], {})
    assert placement.reasons == {
        ShardId("a"): "needs 1 GPU: 1 held by pid 4411 python, 1 reserved for z",
        ShardId("z"): "GPU 1: held by pid 4411 python",
    }


def test_named_cards_keep_the_order_in_which_they_are_named() -> None:
    placement = place([NodeView("n", cards("n", 2))], [shard("z", 2, pinned=("n-1", "n-0"))], {})
    assert got(placement, "z") == ("n-1", "n-0")


PINS = st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=5)


@given(pins=PINS, running=st.sets(st.integers(0, 4)), counted=st.integers(1, 3))
def test_shards_that_take_turns_keep_their_cards_from_all_but_each_other(
    pins: list[set[int]], running: set[int], counted: int
) -> None:
    node = NodeView("n", cards("n", 4))
    requests, current, used = [], {}, set()
    for number, group in enumerate(pins):
        uuids = tuple(f"n-{index}" for index in sorted(group))
        if number in running and not used & set(uuids):
            used |= set(uuids)
            requests.append(shard(f"s{number}", len(uuids), running=True))
            current.update(had(f"s{number}", ("n", uuids)))
        else:
            requests.append(shard(f"s{number}", len(uuids), pinned=uuids, takes_turns=True))
    staying = shard("staying", counted)
    placement = place([node], [*requests, staying], current)
    for request in requests:
        is_placed = request.id in placement.assignments
        assert is_placed == (request.running or not used & set(request.pinned))
    named = {uuid for request in requests for uuid in request.pinned} | used
    if staying.id in placement.assignments:
        assert not named & set(got(placement, "staying"))
    else:
        assert 4 - len(named) < counted


def test_one_that_stays_does_not_share_a_card_with_one_that_takes_turns() -> None:
    node = NodeView("n", cards("n", 1))
    both = [shard("stays", 1, pinned=("n-0",)), shard("turns", 1, pinned=("n-0",), takes_turns=True)]
    assert place([node], both, {}).assignments == {}
    assert got(place([node], [both[1], evolve(both[0], takes_turns=True)], {}), "stays") == ("n-0",)
