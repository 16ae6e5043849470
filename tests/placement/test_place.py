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
        kinds = draw(st.lists(st.sampled_from([H100, A100, L40S, SLICE, "l40s-vgpu-45g", None]), max_size=6))
        if draw(st.booleans()):
            kinds = kinds[:1] * len(kinds)
        found = []
        for index, kind in enumerate(kinds):
            card = Card(
                f"{name}-{index}",
                None if kind == SLICE else index,
                kind,
                CAPABILITY.get(kind or "", None),
                usable_memory=draw(st.sampled_from([None, 40000, 80000, 80000])),
                why_not=draw(st.sampled_from([None, None, None, HELD])),
                clique=None if kind == SLICE else draw(st.sampled_from([None, 0, 0, 1])),
                is_slice=kind == SLICE,
                is_virtual="vgpu" in (kind or ""),
            )
            found.append(card)
        labels = {"rack": draw(st.sampled_from(["a", "b"]))}
        islands = frozenset(draw(st.lists(st.sampled_from(["ib0", "ib1"]), max_size=2)))
        why_not = draw(st.sampled_from([None, None, None, "cordoned"]))
        nodes.append(NodeView(name, tuple(found), labels, islands, why_not))
    return tuple(nodes)


@st.composite
def asked(draw: st.DrawFn, nodes: Sequence[NodeView], id_: ShardId) -> Request:
    uuids = [[card.uuid for card in node.cards] for node in nodes]
    pinned: tuple[str, ...] = ()
    if draw(st.integers(0, 4)) == 0:
        pool = draw(st.sampled_from([[*some, "gone"] for some in uuids]))
        pinned = tuple(draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True)))
    spread = 1 if pinned else draw(st.sampled_from([1, 1, 1, 2, 3]))
    memory = draw(st.sampled_from([None, None, 20000, 50000]))
    classes = st.sampled_from([(), (), (H100,), (A100, H100), (SLICE,), (SLICE, A100), ("l40s-vgpu-45g", L40S)])
    return Request(
        id_,
        len(pinned) or draw(st.sampled_from([1, 1, 2, 3, 4])) * spread,
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
    chosen = draw(st.lists(st.sampled_from(ids), max_size=7, unique=True))
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
    if draw(st.booleans()) and requests:
        every = [card.uuid for node in nodes for card in node.cards] + ["gone"]
        wrong = draw(st.sampled_from([request for request in requests])).id
        if not any(request.running for request in requests if request.id == wrong):
            uuids = tuple(draw(st.lists(st.sampled_from(every), min_size=1, max_size=3)))
            current[wrong] = Assignment(wrong, (Slot("n0", uuids),))
    return nodes, tuple(requests), current


CHANCE = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


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
