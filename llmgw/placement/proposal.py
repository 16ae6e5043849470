"""What placement would do with a whole configuration, before anything runs: for `check` and `plan`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from attrs import evolve, field, frozen

from llmgw.discovery.islands import island_names
from llmgw.domain.hardware import Availability, Gpu, NodeInventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardId, ShardSpec
from llmgw.placement.model import Assignment, Placement, Request, Slot
from llmgw.placement.place import place
from llmgw.placement.view import node_view, request_of


@frozen
class Site:
    """One node: what it has and what may be handed out. `labels` and `allowed` are what `[node]` says there."""

    node: NodeInventory
    availability: Mapping[str, Availability]
    labels: Mapping[str, str] = field(factory=dict)
    allowed: Literal["all"] | tuple[int | str, ...] = "all"


@frozen
class Proposal:
    """The placement, and what stood in the way before it was asked for."""

    placement: Placement
    problems: Mapping[ShardId, Problem]
    sites: Mapping[str, Site]

    def chosen(self, id_: ShardId) -> Assignment | None:
        return self.placement.assignments.get(id_)

    def why_not(self, id_: ShardId) -> str | None:
        """Why an instance gets no GPUs, in words; None for one that gets some or wants none."""
        problem = self.problems.get(id_)
        return problem.message if problem is not None else self.placement.reasons.get(id_)

    def labels(self, slot: Slot) -> tuple[str, ...]:
        """What people call the cards of a slot: indexes, and whole ids of slices."""
        inventory = self.sites[slot.node].node.gpu
        found = ((uuid, inventory.by_uuid(uuid)) for uuid in slot.uuids)
        return tuple(str(card.index) if isinstance(card, Gpu) else uuid for uuid, card in found)


def propose(
    specs: Iterable[ShardSpec], sites: Sequence[Site], running: Mapping[ShardId, Assignment] | None = None
) -> Proposal:
    """Place every instance on `sites`. `running` are engines that keep what they have."""
    names = island_names([(site.node.node, site.node.fabric) for site in sites])
    views = [
        node_view(
            site.node,
            site.availability,
            labels={**site.labels, "node": site.node.node},
            islands=names[site.node.node],
            allowed=site.allowed,
        )
        for site in sites
    ]
    current = dict(running or {})
    requests: list[Request] = []
    problems: dict[ShardId, Problem] = {}
    for spec in specs:
        for id_ in spec.ids:
            asked = _ask(id_, spec, sites, running=id_ in current)
            if isinstance(asked, Problem):
                problems[id_] = asked
            elif asked is not None:
                requests.append(asked)
    return Proposal(place(views, requests, current), problems, {site.node.node: site for site in sites})


def with_chosen(spec: ShardSpec, proposal: Proposal, node: str) -> ShardSpec:
    """The spec as rules judge it on one node: with the cards that its first instance there would get, by UUID."""
    for id_ in spec.ids:
        found = proposal.chosen(id_)
        slots = [slot for slot in found.slots if slot.node == node] if found is not None else []
        if slots and isinstance(spec.gpus, int):
            return evolve(spec, gpus=slots[0].uuids)
    return spec


def _ask(id_: ShardId, spec: ShardSpec, sites: Sequence[Site], *, running: bool) -> Request | Problem | None:
    """The request of one instance. Cards that are named are looked for on every node: a name is of one."""
    refused: Problem | None = None
    for site in sites:
        asked = request_of(id_, spec, site.node.gpu, running=running)
        if not isinstance(asked, Problem):
            return asked
        refused = refused or asked
    return refused
