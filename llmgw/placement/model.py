"""What placement sees and what it decides. Values alone: nodes with their cards, what is asked for, what is given.

The same words serve one node and many; a node by itself is a list of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from llmgw.domain.shard import ShardId


@frozen
class Card:
    """A GPU, or a MIG slice. Memory in MiB, None is unknown."""

    uuid: str
    index: int | None
    """None: a slice."""
    gpu_class: str | None
    capability: tuple[int, int] | None = None
    usable_memory: int | None = None
    """What engines of ours can use together: the total without what the driver reserves and small strangers have."""
    why_not: str | None = None
    """Why it may not be given to anybody now (held, unhealthy, quarantined, unknown); None: it may."""
    clique: int | None = None
    """Cards of one node with the same number have NVLink to each other; None: no NVLink."""
    is_slice: bool = False
    is_virtual: bool = False


@frozen
class NodeView:
    """A node as placement sees it."""

    name: str
    cards: tuple[Card, ...]
    labels: Mapping[str, str] = field(factory=dict)
    islands: frozenset[str] = frozenset()
    """Names of the fabric islands it is in; those of nodes that can reach each other are equal."""
    why_not: str | None = None
    """Why nothing new may go there (cordoned, silent); None: it may."""


@frozen
class Request:
    """One instance that wants GPUs."""

    id: ShardId
    gpus: int
    """In all, over all of its nodes."""
    nodes: int = 1
    classes: tuple[str, ...] = ()
    """Allowed classes; empty is any whole card."""
    pinned: tuple[str, ...] = ()
    """UUIDs of exactly the cards it must have, on one node; `gpus` is their number then."""
    one_class: bool = True
    """Its cards must be of one class and capability (tensor parallel). Pinned cards are not judged here."""
    memory: int | None = None
    """MiB that it needs on each card; None: the whole card."""
    share: bool = False
    """May be on a card with others that share; needs `memory`."""
    takes_turns: bool = False
    """It has its pinned cards only while its model is asked for: others that take turns may name the same, and get
    them while it does not run."""
    priority: int = 0
    where: Mapping[str, tuple[str, ...]] = field(factory=dict)
    running: bool = False
    """Its engine runs: what it has is its own until it ends, whatever became of the cards."""


def by_turns(one: Request, other: Request) -> bool:
    """Whether neither keeps the other from the cards that both name. Who runs has its turn and keeps them."""
    return all(request.takes_turns and bool(request.pinned) and not request.running for request in (one, other))


@frozen
class Slot:
    """Cards of one node, by UUID in the order of their indexes."""

    node: str
    uuids: tuple[str, ...]


@frozen
class Assignment:
    """What one instance gets. Rank 0 is on the first slot."""

    id: ShardId
    slots: tuple[Slot, ...]
    gpu_class: str | None = None

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(uuid for slot in self.slots for uuid in slot.uuids)


@frozen
class Placement:
    """The decision: every request is in exactly one of the two mappings."""

    assignments: Mapping[ShardId, Assignment]
    reasons: Mapping[ShardId, str]
    """Why an instance got nothing, counted per GPU or per node."""
    moved: frozenset[ShardId] = frozenset()
    """Instances that had an assignment and now have another one, or none."""
