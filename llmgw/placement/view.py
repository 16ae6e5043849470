"""From facts and files to what placement sees: a node's cards, and what one instance asks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from llmgw.discovery.availability import NOT_ALLOWED, allowed_uuids
from llmgw.discovery.pins import Refused, resolve_pins
from llmgw.domain.hardware import Availability, Gpu, Inventory, InventoryError, MigInstance, NodeInventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardId, ShardSpec
from llmgw.placement.model import Card, NodeView, Request

MIB = 1 << 20

SPLITTING = frozenset({EngineKind.VLLM, EngineKind.SGLANG})
"""Engines that split each layer evenly over their GPUs, which must be of one class then."""


def node_view(
    node: NodeInventory,
    availability: Mapping[str, Availability],
    *,
    labels: Mapping[str, str] | None = None,
    islands: frozenset[str] = frozenset(),
    allowed: Literal["all"] | tuple[int | str, ...] = "all",
) -> NodeView:
    """The node's cards and MIG slices. A card that `availability` does not know may not be given to anybody, and one
    that is not among `allowed` (`[node] gpus`) is left to other programs. The label `node` is its name.
    """
    inventory = node.gpu
    usable = allowed_uuids(inventory, allowed)
    cliques = _cliques(inventory)
    cards = [
        Card(
            uuid=gpu.uuid,
            index=gpu.index,
            gpu_class=gpu.gpu_class,
            capability=gpu.compute_capability,
            usable_memory=_usable_memory(gpu, availability.get(gpu.uuid)),
            why_not=_why_not(gpu.uuid, availability, usable),
            clique=cliques.get(gpu.index),
            is_virtual=gpu.virtual,
        )
        for gpu in inventory.gpus
        if gpu.uuid
    ]
    cards += [_slice(instance, inventory, availability, usable) for instance in inventory.mig_instances]
    why_not = None
    if not cards and inventory.error not in (None, InventoryError.COMMAND_MISSING):
        # No cards seen is not "no cards"; where nvidia-smi was never installed it is.
        why_not = f"GPUs not known, nvidia-smi failed ({inventory.error})"
    return NodeView(node.node, tuple(cards), {**(labels or {}), "node": node.node}, islands, why_not)


def request_of(
    id_: ShardId, spec: ShardSpec, inventory: Inventory, *, running: bool = False
) -> Request | Problem | None:
    """What one instance asks for; None for one that runs without GPUs, a Problem where a GPU that it names is none."""
    if spec.gpus in (0, ()):
        return None
    pinned: tuple[str, ...] = ()
    if isinstance(spec.gpus, tuple):
        pins = resolve_pins(spec, inventory)
        if isinstance(pins, Refused):
            return Problem(pins.code, f'shard "{spec.name}" gpus: {pins.message}', pins.hint, spec.written_at("gpus"))
        pinned = tuple(pin.uuid for pin in pins if pin.uuid is not None)
        if len(pinned) < len(pins):
            # Taken on trust: nobody can say what stands behind these, so nobody else is kept from it either.
            return None
    return Request(
        id=id_,
        gpus=spec.gpus if isinstance(spec.gpus, int) else len(spec.gpus),
        nodes=spec.nodes,
        classes=spec.gpu_class,
        pinned=pinned,
        one_class=spec.engine in SPLITTING,
        memory=memory_of(spec),
        share=spec.share_gpus,
        takes_turns=spec.idle_timeout is not None,
        priority=spec.placement_priority,
        where=spec.where,
        running=running,
    )


def memory_of(spec: ShardSpec) -> int | None:
    """MiB that it needs on each of its cards, rounded up; None: the whole card."""
    return None if spec.gpu_memory is None else (spec.gpu_memory + MIB - 1) // MIB


def _usable_memory(gpu: Gpu, known: Availability | None) -> int | None:
    """MiB for engines of ours together, those that are on it already included; None is unknown."""
    holders = known.holders if known is not None else ()
    if gpu.unified_memory:
        # Only what is free is known there, and what our own engines have of it is missing from that.
        ours = sum(holder.memory or 0 for holder in holders if holder.shard is not None)
        return None if gpu.memory_free is None else gpu.memory_free + ours
    strangers = sum(holder.memory or 0 for holder in holders if holder.shard is None)
    return None if gpu.usable_memory is None else max(0, gpu.usable_memory - strangers)


def _slice(
    instance: MigInstance, inventory: Inventory, availability: Mapping[str, Availability], usable: frozenset[str] | None
) -> Card:
    parent = inventory.gpu(instance.parent_index)
    return Card(
        uuid=instance.uuid,
        index=None,
        gpu_class=instance.gpu_class,
        capability=parent.compute_capability if parent is not None else None,
        usable_memory=instance.memory_total,
        why_not=_why_not(instance.uuid, availability, usable),
        is_slice=True,
    )


def _why_not(uuid: str, availability: Mapping[str, Availability], usable: frozenset[str] | None) -> str | None:
    if usable is not None and uuid not in usable:
        return NOT_ALLOWED
    known = availability.get(uuid)
    return "not known" if known is None else known.why_not


def _cliques(inventory: Inventory) -> dict[int, int]:
    sets = inventory.topology.nvlink_sets if inventory.topology is not None else ()
    return {index: number for number, members in enumerate(sets) for index in members}
