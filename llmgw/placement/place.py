"""Which cards each instance gets, on one node or many: one pure function, greedy, without a solver.

The same input in any order gives the same output, and the output given back as `current` changes nothing. What runs is
never moved to tidy up: loading takes minutes, a perfect packing is not worth one.

Order of the work: what runs keeps its cards; cards that are named are reserved for whoever names them, also while it
cannot have them; earlier assignments that still hold are kept; the rest is placed by priority, number of nodes, GPUs
per node and name, each by the best candidate (see `_Candidate`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from operator import lt
from typing import NamedTuple

from attrs import define, evolve, field

from llmgw.domain.shard import ShardId
from llmgw.placement.model import Assignment, Card, NodeView, Placement, Request, Slot, by_turns
from llmgw.placement.reasons import explain


class Group(NamedTuple):
    """Cards that may split a layer among them."""

    gpu_class: str
    capability: tuple[int, int] | None
    virtual: bool
    slices: bool


def place(nodes: Sequence[NodeView], requests: Sequence[Request], current: Mapping[ShardId, Assignment]) -> Placement:
    """Give cards to `requests`. `current` is what they had until now; entries of others are ignored. Names of nodes,
    UUIDs of cards and ids of requests are each given once.

    The cards of a request that is `running` stay its own. Any other entry of `current` is kept while its cards are
    there, may be given, and match what is asked for.
    """
    board = _Board(nodes)
    ordered = sorted(requests, key=_order)
    given: dict[ShardId, Assignment] = {}
    for request in ordered:
        if request.running and request.id in current:
            given[request.id] = current[request.id]
            board.claim(request, current[request.id])
    for request in ordered:
        board.reserve(request)
    waiting = []
    for request in ordered:
        if request.id in given:
            continue
        kept = current.get(request.id)
        if kept is not None and board.is_valid(request, kept):
            given[request.id] = kept
            board.claim(request, kept)
        else:
            waiting.append(request)
    left = []
    if waiting:
        board.open()
    for request in waiting:
        found = board.find(request)
        if found is None:
            left.append(request)
        else:
            given[request.id] = found
            board.claim(request, found)
    # Told at the end, so that a reason speaks of the cards as they are now, not of how they were in between.
    reasons = explain(left, board.nodes, board.uses, board.fitting)
    # Most are the very same object, which is faster to see than that two are equal.
    stayed = {id_ for id_, found in given.items() if found is current.get(id_) or found == current.get(id_)}
    moved = frozenset(request.id for request in ordered if request.id in current and request.id not in stayed)
    return Placement(given, reasons, moved)


def _order(request: Request) -> tuple[bool, int, bool, int, int, str, int]:
    # What is named comes first, since it has no second choice, and what shares after what needs whole cards.
    size = request.gpus // request.nodes
    id_ = request.id
    return (not request.pinned, -request.priority, request.share, -request.nodes, -size, id_.name, id_.replica)


class _Candidate(NamedTuple):
    """A node for one share of a request; the smallest one wins."""

    penalty: int
    """1 where no NVLink clique is large enough."""
    leftover: int
    """Free cards of this group that would be left: best fit."""
    load: int
    """Cards of the node that are in use."""
    class_rank: int
    node: str
    at: int
    """The node, by its place in the list."""
    group: int


class _Picked(NamedTuple):
    """Cards of one node for a request that looks at each of them."""

    positions: tuple[int, ...]
    penalty: int
    """1 where no NVLink clique is large enough."""
    waste: int


_FRESH = 1000
"""A card that nobody uses yet weighs more than any number of cards that would be left over."""


@define
class _Node:
    view: NodeView
    free: dict[int, set[int]] = field(factory=dict)
    """Group -> cards that nobody has and that may be given."""
    cliques: dict[int, dict[int, set[int]]] = field(factory=dict)
    """Group -> clique -> its free cards."""
    used: int = 0
    version: int = 0
    """Counts changes: what was computed for an older one is void."""


class _Board:
    """The cards while they are given out."""

    def __init__(self, nodes: Sequence[NodeView]) -> None:
        ordered = sorted(nodes, key=lambda node: node.name)
        self.nodes = [_in_order(node) for node in ordered]
        self.uses: dict[str, list[Request]] = defaultdict(list)
        """UUID -> who has it, or has it reserved."""
        # Plain tuples: they are equal to a Group, and made faster, which counts for thousands of cards.
        kinds = [
            [(card.gpu_class, card.capability, card.is_virtual, card.is_slice) for card in node.cards]
            for node in self.nodes
        ]
        known = {kind for row in kinds for kind in row}
        groups = [Group(name, capability, virtual, part) for name, capability, virtual, part in known if name]
        self._names = sorted(groups, key=lambda group: (group.gpu_class, group.capability or (), *group[2:]))
        numbers: dict[tuple[object, ...], int] = {group: number for number, group in enumerate(self._names)}
        self._kinds = [[numbers.get(kind) for kind in row] for row in kinds]
        """Node -> group of each of its cards."""
        self._places = {
            card.uuid: (index, position)
            for index, node in enumerate(self.nodes)
            for position, card in enumerate(node.cards)
        }
        """UUID -> its node, its position there."""
        self._states: list[_Node] = []
        """Empty until something has to be found: where nothing changes, nobody asks what is free."""
        self._hosts: dict[int, list[int]] = defaultdict(list)
        """Group -> nodes that had free cards of it."""
        self._by_name = {node.name: index for index, node in enumerate(self.nodes)}
        self._heaps: dict[tuple[int, int], list[tuple[_Candidate, int]]] = {}
        self._homes: dict[str, Counter[int]] = defaultdict(Counter)
        """Shard -> on which nodes its instances are."""
        self._by_island: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self.nodes):
            for island in node.islands:
                self._by_island[island].append(index)

    def open(self) -> None:
        """Count what is free, once what is kept has been claimed."""
        self._states = [self._enter(index, view) for index, view in enumerate(self.nodes)]

    def _enter(self, index: int, view: NodeView) -> _Node:
        node = _Node(view)
        for position, (card, group) in enumerate(zip(view.cards, self._kinds[index], strict=True)):
            if card.why_not is not None or view.why_not is not None or group is None:
                continue
            if self.uses.get(card.uuid):
                node.used += 1
                continue
            if group not in node.free:
                self._hosts[group].append(index)
                node.free[group], node.cliques[group] = set(), defaultdict(set)
            node.free[group].add(position)
            if card.clique is not None:
                node.cliques[group][card.clique].add(position)
        return node

    def _cards_in(self, index: int, group: int) -> list[int]:
        """Cards of a node that are of this group, by position, whoever has them."""
        return [position for position, kind in enumerate(self._kinds[index]) if kind == group]

    # -- giving and keeping ------------------------------------------------------------------------------

    def claim(self, request: Request, assignment: Assignment) -> None:
        for slot in assignment.slots:
            for uuid in slot.uuids:
                self._use(request, uuid)
            index = self._by_name.get(slot.node)
            if index is not None:
                self._homes[request.id.name][index] += 1

    def reserve(self, request: Request) -> None:
        """Named cards belong to whoever names them, whether it can have them now or not."""
        for uuid in request.pinned:
            if all(user.id != request.id for user in self.uses[uuid]):
                self._use(request, uuid)

    def _use(self, request: Request, uuid: str) -> None:
        users = self.uses[uuid]
        if users and any(user.id == request.id for user in users):
            return
        users.append(request)
        if self._states and uuid in self._places:
            self._withdraw(*self._places[uuid])

    def _withdraw(self, index: int, position: int) -> None:
        """A card is not free any more."""
        node = self._states[index]
        group = self._kinds[index][position]
        if group is None or position not in node.free.get(group, ()):
            return
        node.free[group].discard(position)
        clique = node.view.cards[position].clique
        if clique is not None:
            node.cliques[group][clique].discard(position)
        node.used += 1
        node.version += 1
        # The other groups too: how loaded the node is stands in their entries.
        for heap_group, size in self._heaps:
            self._push(index, heap_group, size)

    def is_valid(self, request: Request, kept: Assignment) -> bool:
        """Whether an earlier assignment still stands: its cards are there, free, and what is asked for."""
        uuids = kept.uuids
        if len(uuids) != request.gpus or len(kept.slots) != request.nodes or len(set(uuids)) != len(uuids):
            return False
        if request.pinned:
            return uuids == request.pinned and self._pins_open(request)
        allowed = self._groups_for(request)
        groups = set()
        for slot in kept.slots:
            index = self._by_name.get(slot.node)
            if index is None or not self._may_host(request, index) or len(slot.uuids) * request.nodes != request.gpus:
                return False
            for uuid in slot.uuids:
                place = self._places.get(uuid)
                if place is None or place[0] != index:
                    return False
                group = self._kinds[index][place[1]]
                if group not in allowed or not self._is_open(request, self.nodes[index].cards[place[1]]):
                    return False
                groups.add(group)
        if len(groups) > 1 and (
            request.one_class or request.nodes > 1 or len({self._names[group].virtual for group in groups}) > 1
        ):
            return False
        indexes = [self._by_name[slot.node] for slot in kept.slots]
        return len(set(indexes)) == len(indexes) and (len(indexes) == 1 or bool(self._common_islands(indexes)))

    def _common_islands(self, indexes: Sequence[int]) -> frozenset[str]:
        return frozenset.intersection(*(self.nodes[index].islands for index in indexes))

    def _is_open(self, request: Request, card: Card) -> bool:
        """Whether this request may have that card beside its present users."""
        if card.why_not is not None:
            return False
        if request.memory is not None and (card.usable_memory is None or card.usable_memory < request.memory):
            return False
        users = self.uses.get(card.uuid)
        others = [user for user in users if user.id != request.id and not by_turns(user, request)] if users else []
        if not others:
            return True
        if request.memory is None or not all(user.share and user.memory is not None for user in (request, *others)):
            return False
        taken = sum(user.memory or 0 for user in others)
        return card.usable_memory is not None and taken + request.memory <= card.usable_memory

    def _may_host(self, request: Request, index: int) -> bool:
        view = self.nodes[index]
        if view.why_not is not None:
            return False
        return all(view.labels.get(key) in values for key, values in request.where.items())

    # -- finding -----------------------------------------------------------------------------------------

    def find(self, request: Request) -> Assignment | None:
        if request.pinned:
            return self._find_pinned(request)
        if request.gpus % request.nodes:
            return None
        if request.nodes > 1:
            return self._find_several(request)
        if request.memory is not None:
            found = self._find_by_card(request, same_group=True)
        else:
            found = self._find_by_node(request)
        if found is None and not request.one_class and request.gpus > 1:
            found = self._find_by_card(request, same_group=False)
        return found

    def _find_pinned(self, request: Request) -> Assignment | None:
        if not self._pins_open(request):
            return None
        places = [self._places[uuid] for uuid in request.pinned]
        index = places[0][0]
        cards = [self.nodes[index].cards[position] for _, position in places]
        slot = Slot(self.nodes[index].name, request.pinned)
        classes = {card.gpu_class for card in cards}
        return Assignment(request.id, (slot,), classes.pop() if len(classes) == 1 else None)

    def _pins_open(self, request: Request) -> bool:
        places = [self._places.get(uuid) for uuid in request.pinned]
        known = [place for place in places if place is not None]
        if len(known) != len(places) or len({index for index, _ in known}) != 1 or len(set(known)) != len(known):
            return False
        index = known[0][0]
        if not self._may_host(request, index):
            return False
        return all(self._is_open(request, self.nodes[index].cards[position]) for _, position in known)

    def _find_by_node(self, request: Request) -> Assignment | None:
        """One node, whole cards: the best of each group's heap, away from a node that has all of the others."""
        best: tuple[int, _Candidate] | None = None
        alone = self._only_home(request)
        for group in self._groups_for(request):
            for penalty, candidate in self._best_two(request, group, alone):
                ranked = (penalty, candidate._replace(class_rank=self._class_rank(request, group)))
                if best is None or ranked < best:
                    best = ranked
        if best is None:
            return None
        candidate = best[1]
        return self._take(request, [(candidate.at, candidate.group)])

    def _only_home(self, request: Request) -> int | None:
        """The node that would hold all instances of this shard, were this one put there too."""
        homes = self._homes.get(request.id.name)
        return next(iter(homes)) if homes is not None and len(homes) == 1 else None

    def _best_two(self, request: Request, group: int, alone: int | None) -> Iterator[tuple[int, _Candidate]]:
        """The best candidate of a group, and the best one apart from the others of the shard if that is another."""
        heap = self._heap(group, request.gpus)
        skipped: list[tuple[_Candidate, int]] = []
        together: _Candidate | None = None
        while heap:
            entry = heap[0]
            candidate, version = entry
            if self._states[candidate.at].version != version:
                heappop(heap)
                continue
            if self._may_host(request, candidate.at):
                if candidate.at != alone:
                    yield (0, candidate)
                    break
                together = candidate
            skipped.append(heappop(heap))
        for entry in skipped:
            heappush(heap, entry)
        if together is not None:
            yield (1, together)

    def _heap(self, group: int, size: int) -> list[tuple[_Candidate, int]]:
        key = (group, size)
        if key not in self._heaps:
            entries = (self._candidate(index, group, size) for index in self._hosts[group])
            self._heaps[key] = [entry for entry in entries if entry is not None]
            heapify(self._heaps[key])
        return self._heaps[key]

    def _push(self, index: int, group: int, size: int) -> None:
        entry = self._candidate(index, group, size)
        if entry is not None:
            heappush(self._heaps[group, size], entry)

    def _candidate(self, index: int, group: int, size: int) -> tuple[_Candidate, int] | None:
        node = self._states[index]
        free = node.free.get(group)
        if free is None or len(free) < size:
            return None
        penalty = 0
        if size > 1:
            cliques = node.cliques.get(group, {})
            penalty = 0 if any(len(cards) >= size for cards in cliques.values()) else 1
        candidate = _Candidate(penalty, len(free) - size, node.used, 0, node.view.name, index, group)
        return candidate, node.version

    def _groups_for(self, request: Request) -> list[int]:
        """Groups whose cards may serve a request. Slices only where their class is named, and never several."""
        groups = []
        for number, group in enumerate(self._names):
            wanted = group.gpu_class in request.classes if request.classes else not group.slices
            if wanted and not (group.slices and request.gpus > 1):
                groups.append(number)
        return groups

    def _class_rank(self, request: Request, group: int) -> int:
        # By name where no order was given: groups are numbered in the order of their names.
        return request.classes.index(self._names[group].gpu_class) if request.classes else group

    def _take(self, request: Request, shares: Sequence[tuple[int, int]]) -> Assignment:
        size = request.gpus // request.nodes
        slots = []
        for index, group in shares:
            node = self._states[index]
            if request.memory is None:
                positions = self._cards_of(node, group, size)
            else:
                positions = [
                    *self._pick(node, self._usable(request, node, self._cards_in(index, group)), size).positions
                ]
            slots.append(Slot(node.view.name, tuple(node.view.cards[at].uuid for at in positions)))
        return Assignment(request.id, tuple(slots), self._names[shares[0][1]].gpu_class)

    def _cards_of(self, node: _Node, group: int, size: int) -> list[int]:
        """`size` free cards of a group: within the smallest clique that is large enough, else loose ones first."""
        free = node.free[group]
        cliques = sorted(node.cliques.get(group, {}).items(), key=lambda entry: (len(entry[1]), entry[0]))
        ordered = sorted(free)
        if size > 1:
            for _, cards in cliques:
                if len(cards) >= size:
                    return [at for at in ordered if at in cards][:size]
        ranks = {at: rank for rank, (_, cards) in enumerate(cliques) for at in cards}
        loose_first = sorted(ordered, key=lambda at: (ranks.get(at, -1), ordered.index(at)))
        return sorted(loose_first[:size], key=ordered.index)

    # -- the slower ways ---------------------------------------------------------------------------------

    def _find_by_card(self, request: Request, *, same_group: bool) -> Assignment | None:
        """One node where single cards must be looked at: memory is asked for, or classes may be mixed."""
        alone = self._only_home(request)
        best: tuple[tuple[bool, int, int, int, int, str, int], int, tuple[int, ...]] | None = None
        allowed = self._groups_for(request)
        for index, node in enumerate(self._states):
            if not self._may_host(request, index):
                continue
            for number, positions in self._pools(request, index, allowed, same_group=same_group):
                usable = self._usable(request, node, positions)
                if len(usable) < request.gpus:
                    continue
                picked = self._pick(node, usable, request.gpus)
                rank = (index == alone, picked.penalty, picked.waste, node.used, number, node.view.name, positions[0])
                if best is None or rank < best[0]:
                    best = (rank, index, picked.positions)
        if best is None:
            return None
        _, index, chosen = best
        cards = [self._states[index].view.cards[at] for at in chosen]
        classes = {card.gpu_class for card in cards}
        slot = Slot(self.nodes[index].name, tuple(card.uuid for card in cards))
        return Assignment(request.id, (slot,), classes.pop() if len(classes) == 1 else None)

    def _pools(
        self, request: Request, index: int, allowed: Sequence[int], *, same_group: bool
    ) -> Iterator[tuple[int, list[int]]]:
        """Cards that may be chosen among, with the rank of their class."""
        if same_group:
            yield from ((self._class_rank(request, group), self._cards_in(index, group)) for group in allowed)
            return
        for virtual in (False, True):
            groups = [group for group in allowed if self._names[group].virtual is virtual]
            yield 0, sorted(at for group in groups for at in self._cards_in(index, group))

    def _usable(self, request: Request, node: _Node, positions: Sequence[int]) -> list[int]:
        return [at for at in positions if self._is_open(request, node.view.cards[at])]

    def _pick(self, node: _Node, usable: Sequence[int], size: int) -> _Picked:
        """`size` of the usable cards: those that are shared already first, then those with the least room."""
        cards = node.view.cards

        def in_use(at: int) -> bool:
            return bool(self.uses.get(cards[at].uuid))

        def left(at: int) -> int:
            return (cards[at].usable_memory or 0) - self._taken(cards[at].uuid)

        cliques: dict[int, list[int]] = defaultdict(list)
        for at in usable:
            clique = cards[at].clique
            if clique is not None:
                cliques[clique].append(at)

        def crowd(at: int) -> int:
            clique = cards[at].clique
            return 0 if clique is None else len(cliques[clique])

        ordered = sorted(usable, key=lambda at: (not in_use(at), left(at), crowd(at), at))
        fitting = [members for members in cliques.values() if len(members) >= size] if size > 1 else []
        linked = min(fitting, key=lambda members: (len(members), members[0]), default=None)
        chosen = [at for at in ordered if linked is None or at in linked][:size]
        fresh = sum(not in_use(at) for at in chosen)
        penalty = int(size > 1 and linked is None)
        return _Picked(tuple(sorted(chosen)), penalty, fresh * _FRESH + len(usable) - size)

    def _taken(self, uuid: str) -> int:
        """MiB that those who share a card have of it."""
        return sum(user.memory or 0 for user in self.uses.get(uuid, ()))

    def _find_several(self, request: Request) -> Assignment | None:
        """Several nodes of one island, equal shares, one class."""
        best: tuple[tuple[int, int, int, int, str], list[tuple[int, int]]] | None = None
        groups = self._groups_for(request)
        looked: dict[tuple[int, int], _Candidate | None] = {}
        for island, members in self._by_island.items():
            if len(members) < request.nodes:
                continue
            for group in groups:
                found = []
                for index in members:
                    if (index, group) not in looked:
                        looked[index, group] = self._share_on(request, index, group)
                    candidate = looked[index, group]
                    if candidate is not None:
                        found.append(candidate)
                if len(found) < request.nodes:
                    continue
                chosen = nsmallest(request.nodes, found)
                rank = (
                    sum(candidate.penalty for candidate in chosen),
                    sum(candidate.leftover for candidate in chosen),
                    len(found) - request.nodes,
                    self._class_rank(request, group),
                    island,
                )
                if best is None or rank < best[0]:
                    best = (rank, [(index, group) for index in sorted(candidate.at for candidate in chosen)])
        return None if best is None else self._take(request, best[1])

    def _share_on(self, request: Request, index: int, group: int) -> _Candidate | None:
        """One node's share of a request for several, from one group."""
        size = request.gpus // request.nodes
        node = self._states[index]
        if not self._may_host(request, index):
            return None
        if request.memory is None:
            entry = self._candidate(index, group, size)
            return None if entry is None else entry[0]
        usable = self._usable(request, node, self._cards_in(index, group))
        if len(usable) < size:
            return None
        picked = self._pick(node, usable, size)
        return _Candidate(picked.penalty, picked.waste, node.used, 0, node.view.name, index, group)

    def fitting(self, request: Request, name: str) -> frozenset[int]:
        """Groups of which a node has enough for its share of a request now; for reasons."""
        index = self._by_name[name]
        node = self._states[index]
        if not self._may_host(request, index):
            return frozenset()
        size = max(1, request.gpus // request.nodes)
        allowed = self._groups_for(request)
        return frozenset(
            group for group in allowed if len(self._usable(request, node, self._cards_in(index, group))) >= size
        )


def _in_order(node: NodeView) -> NodeView:
    indexes = [card.index for card in node.cards if card.index is not None]
    if len(indexes) == len(node.cards) and all(map(lt, indexes, indexes[1:])):
        return node
    return evolve(node, cards=tuple(sorted(node.cards, key=_nearest)))


def _nearest(card: Card) -> tuple[bool, int, str]:
    return (card.index is None, card.index or 0, card.uuid)
