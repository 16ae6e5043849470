"""Inventories that `llmgw inventory --json` printed on some nodes and somebody kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from attrs import frozen

from llmgw.cli.errors import FAILED, CommandError
from llmgw.discovery.availability import availability
from llmgw.discovery.inventory_json import read_holders, read_node, read_quarantined
from llmgw.domain.hardware import Availability, GpuHolder, NodeInventory

INVENTORY_MAX = 16 << 20
"""Bytes of one file that are read."""


@frozen
class SavedNode:
    """One file: the node, who was on its cards (by UUID), and which of them were in quarantine, with the reason."""

    node: NodeInventory
    holders: Mapping[str, tuple[GpuHolder, ...]]
    quarantined: Mapping[str, str]

    def availability(self, allowed: Literal["all"] | tuple[int | str, ...] = "all") -> Mapping[str, Availability]:
        """What might have been handed out then, by UUID; engines of that node's llmgw are no strangers."""
        processes = {holder.pid: holder for found in self.holders.values() for holder in found}
        engines = {
            uuid: [holder for holder in found if holder.shard is not None] for uuid, found in self.holders.items()
        }
        return availability(self.node.gpu, processes, quarantined=self.quarantined, engines=engines, allowed=allowed)

    def uuids(self, labels: Sequence[str]) -> tuple[str, ...]:
        """The cards that people call so; those that are not there are left out."""
        inventory = self.node.gpu
        found = (inventory.gpu(int(label)) if label.isdecimal() else inventory.by_uuid(label) for label in labels)
        return tuple(card.uuid for card in found if card is not None)


def saved_nodes(paths: Sequence[str]) -> tuple[NodeInventory, ...]:
    """The nodes alone, for who asks nothing about what is free there."""
    return tuple(saved.node for saved in read_saved(paths))


def read_saved(paths: Sequence[str]) -> tuple[SavedNode, ...]:
    """One node of each file. Raises CommandError for a file that is none, and for a node that comes twice."""
    nodes: dict[str, tuple[str, SavedNode]] = {}
    for path in paths:
        saved = _read(path)
        name = saved.node.node
        if name in nodes:
            raise CommandError(
                FAILED,
                f"cannot use {path}: it is of node {name}, and so is {nodes[name][0]}",
                "give each node's newest inventory once",
            )
        nodes[name] = (path, saved)
    return tuple(saved for _, saved in nodes.values())


def saved_answer(answer: object) -> SavedNode:
    """What a running llmgw said of its node. Raises CommandError for an answer that is none."""
    try:
        return SavedNode(read_node(answer), read_holders(answer), read_quarantined(answer))
    except ValueError as error:
        raise CommandError(
            FAILED, f"cannot use the answer of llmgw: {error}", "llmgw upgrade brings it up to date"
        ) from error


def _read(path: str) -> SavedNode:
    try:
        with open(path, "rb") as file:
            # A larger one is cut, and so no JSON any more.
            answer = json.loads(file.read(INVENTORY_MAX))
        return SavedNode(read_node(answer), read_holders(answer), read_quarantined(answer))
    except OSError as error:
        raise CommandError(FAILED, f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(
            FAILED, f"cannot use {path}: {error}", "make one with: llmgw inventory --json > FILE"
        ) from error
