"""What placement would do with a whole configuration, before anything runs: for `check` and `plan`. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
    running: frozenset[ShardId] = frozenset()
    kept: frozenset[ShardId] = frozenset()
    """Instances that get the cards again that they had."""

    def chosen(self, id_: ShardId) -> Assignment | None:
        return self.placement.assignments.get(id_)

    def why_not(self, id_: ShardId) -> str | None:
        """Why an instance gets no GPUs, in words; None for one that gets some or wants none."""
        problem = self.problems.get(id_)
        return problem.message if problem is not None else self.placement.reasons.get(id_)

    def why(self, id_: ShardId, spec: ShardSpec) -> str:
        """The reason for a choice, in a few words."""
        found = self.placement.assignments[id_]
        if isinstance(spec.gpus, tuple):
            return "named in the file"
        if id_ in self.running:
            return "it runs there"
        if id_ in self.kept:
            return "it had these before"
        parts = []
        if len(found.slots) > 1:
            parts.append(f"{len(found.slots)} nodes of one island")
        slot = found.slots[0]
        if len(slot.uuids) > 1:
            parts.append(self._links(slot))
        inventory = self.sites[slot.node].node.gpu
        of_class = [gpu for gpu in inventory.gpus if gpu.gpu_class == found.gpu_class]
        if of_class:
            parts.append(f"best fit among {len(of_class)} {found.gpu_class}")
        return ", ".join(part for part in parts if part)

    def _links(self, slot: Slot) -> str:
        topology = self.sites[slot.node].node.gpu.topology
        if topology is None:
            return "NVLink not known"
        indexes = {int(label) for label in self.labels(slot) if label.isdecimal()}
        group = next((members for members in topology.nvlink_sets if indexes <= set(members)), None)
        return f"one NVLink group of {len(group)}" if group is not None else "without NVLink: no group is free"

    def labels(self, slot: Slot) -> tuple[str, ...]:
        """What people call the cards of a slot: indexes, and whole ids of slices."""
        inventory = self.sites[slot.node].node.gpu
        found = ((uuid, inventory.by_uuid(uuid)) for uuid in slot.uuids)
        return tuple(str(card.index) if isinstance(card, Gpu) else uuid for uuid, card in found)


def propose(
    specs: Iterable[ShardSpec],
    sites: Sequence[Site],
    current: Mapping[ShardId, Assignment] | None = None,
    running: Collection[ShardId] = (),
) -> Proposal:
    """Place every instance on `sites`. `current` is what they have; those that are `running` keep it whatever becomes
    of the cards, the others where it still fits."""
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
    requests: list[Request] = []
    problems: dict[ShardId, Problem] = {}
    for spec in specs:
        for id_ in spec.ids:
            asked = _ask(id_, spec, sites, running=id_ in running)
            if isinstance(asked, Problem):
                problems[id_] = asked
            elif asked is not None:
                requests.append(asked)
    had = current or {}
    placement = place(views, requests, had)
    kept = {id_ for id_, found in placement.assignments.items() if id_ in had and found.slots == had[id_].slots}
    return Proposal(placement, problems, {site.node.node: site for site in sites}, frozenset(running), frozenset(kept))


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
