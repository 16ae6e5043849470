"""Which nodes can reach each other over a fabric: islands over several nodes' inventories. Pure.

Equal identities are presumed to be one fabric, which sysfs cannot prove: two fabrics with the default prefix and a
manager with LID 1 look alike. `[node] island` names a fabric where that matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from attrs import frozen

from llmgw.domain.fabric import FULL_MEMBER, PARTITION, Fabric, FabricInventory, PortKind

DEFAULT_PKEYS = ("0xffff",)
"""Where no partition keys were read: the one that every fabric has."""

SOCKETS = Fabric(PortKind.OTHER, ())
"""Stands for the network of nodes that use plain sockets."""

Nodes = Sequence[tuple[str, FabricInventory]]


@frozen
class Island:
    """Nodes of which each reaches each other one over the network of that name."""

    name: str
    nodes: tuple[str, ...]
    """In order of their names."""
    fabrics: Mapping[str, int]
    """Node -> which of its fabrics, by position. Empty: sockets, or a node by itself."""

    def of(self, node: str, inventory: FabricInventory) -> Fabric | None:
        """The fabric of this node that the island is about; None: sockets, or none."""
        position = self.fabrics.get(node)
        return inventory.fabrics[position] if position is not None else None


def islands(nodes: Nodes) -> tuple[tuple[str, ...], ...]:
    """The islands as sets of node names, in order. A node may be in several; one without a fabric is alone in its
    own. What is part of a larger island is not told again.
    """
    found = {frozenset(island.nodes) for island in named_islands(nodes)}
    largest = [one for one in found if not any(one < other for other in found)]
    return tuple(sorted(tuple(sorted(one)) for one in largest))


def island_names(nodes: Nodes) -> Mapping[str, frozenset[str]]:
    """Node -> names of its islands, for placement."""
    names: dict[str, set[str]] = {node: set() for node, _ in nodes}
    for island in named_islands(nodes):
        for node in island.nodes:
            names[node].add(island.name)
    return {node: frozenset(found) for node, found in names.items()}


def common_island(nodes: Nodes, wanted: Sequence[str]) -> Island | None:
    """The island that has all of `wanted`; of several the one whose fabrics they prefer, in whatever order they are
    named. None: they share none. A node by itself is no island of several.
    """
    fitting = [island for island in named_islands(nodes) if set(wanted) <= set(island.nodes)]
    return min(
        fitting,
        key=lambda island: (sum(island.fabrics.get(node, 0) for node in set(wanted)), island.name),
        default=None,
    )


Member = tuple[str, int, Fabric]
"""A node and one of its fabrics, with its position."""


def named_islands(nodes: Nodes) -> tuple[Island, ...]:
    """Every island by its fabric's identity."""
    groups: dict[tuple[str, str], list[Member]] = defaultdict(list)
    found = []
    for node, inventory in sorted(nodes, key=lambda entry: entry[0]):
        if inventory.sockets and inventory.sockets_island is not None:
            groups[inventory.sockets_island, "sockets"].append((node, 0, SOCKETS))
        elif not inventory.fabrics:
            found.append(Island(f"node {node}", (node,), {}))
        for position, fabric in enumerate(inventory.fabrics):
            name = _identity(fabric)
            if name is None:
                found.append(Island(f"node {node} fabric {position}", (node,), {node: position}))
            # Under one name of an operator there is still no traffic between InfiniBand and RoCE.
            else:
                groups[name, fabric.kind.value].append((node, position, fabric))
    kinds = Counter(name for name, _ in groups)
    for (name, kind), members in groups.items():
        shown = name if kinds[name] == 1 else f"{name} over {kind}"
        parts = list(_talking(members))
        for number, part in enumerate(parts):
            # A node may reach it in two ways (other rates, other partitions): the first is the one it prefers.
            ways = {node: position for node, position, _ in reversed(part)}
            told = shown if len(parts) == 1 else f"{shown} partition {number + 1}"
            found.append(Island(told, tuple(sorted(ways)), ways if kind != "sockets" else {}))
    return tuple(sorted(found, key=lambda island: island.name))


def _identity(fabric: Fabric) -> str | None:
    """What must be equal on two nodes; None matches nothing."""
    if fabric.island is not None:
        return fabric.island
    if fabric.kind is PortKind.INFINIBAND and fabric.subnet_prefix is not None and fabric.sm_lid is not None:
        driver = f" {fabric.driver}" if fabric.driver is not None else ""
        return f"ib {fabric.subnet_prefix} sm {fabric.sm_lid}{driver}"
    if fabric.kind is PortKind.ROCE and fabric.networks:
        return f"roce {' '.join(fabric.networks)}"
    return None


def _talking(members: Sequence[Member]) -> Iterator[list[Member]]:
    """The largest groups in which each pair shares a partition of which one is a full member."""
    if members[0][2].kind is not PortKind.INFINIBAND:
        yield list(members)
        return
    # Nodes with the same keys are alike, so that whole fabrics are a few vertices; but where even two of them cannot
    # talk (limited members only), each stands for itself.
    alike: dict[tuple[frozenset[int], str], list[Member]] = defaultdict(list)
    for member in members:
        keys = frozenset(int(key, 16) for key in member[2].pkeys or DEFAULT_PKEYS)
        alike[keys, "" if can_talk(keys, keys) else member[0]].append(member)
    vertices = list(alike)
    neighbours = {one: {other for other in vertices if other != one and can_talk(one[0], other[0])} for one in vertices}
    cliques = sorted(_cliques(neighbours), key=lambda clique: sorted(str(vertex) for vertex in clique))
    for clique in cliques:
        yield sorted((member for vertex in clique for member in alike[vertex]), key=lambda member: member[:2])


def can_talk(one: frozenset[int], other: frozenset[int]) -> bool:
    """The InfiniBand rule: a key equal in its low 15 bits, and at least one side a full member."""
    return any((a ^ b) & PARTITION == 0 and (a | b) & FULL_MEMBER for a in one for b in other)


Vertex = tuple[frozenset[int], str]


def _cliques(neighbours: Mapping[Vertex, set[Vertex]]) -> Iterator[set[Vertex]]:
    """All maximal cliques (Bron and Kerbosch, with pivot)."""
    stack: list[tuple[set[Vertex], set[Vertex], set[Vertex]]] = [(set(), set(neighbours), set())]
    while stack:
        chosen, open_, closed = stack.pop()
        if not open_ and not closed:
            yield chosen
            continue
        pivot = max(open_ | closed, key=lambda vertex: (len(neighbours[vertex] & open_), str(vertex)))
        for vertex in sorted(open_ - neighbours[pivot], key=str):
            around = neighbours[vertex]
            stack.append((chosen | {vertex}, open_ & around, closed & around))
            open_ = open_ - {vertex}
            closed = closed | {vertex}
