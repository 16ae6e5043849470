"""Inventories that `llmgw inventory --json` printed on some nodes and somebody kept."""

from __future__ import annotations

import json
from collections.abc import Sequence

from llmgw.cli.errors import FAILED, CommandError
from llmgw.discovery.inventory_json import read_node
from llmgw.domain.hardware import NodeInventory

INVENTORY_MAX = 16 << 20
"""Bytes of one file that are read."""


def saved_nodes(paths: Sequence[str]) -> tuple[NodeInventory, ...]:
    """One node of each file. Raises CommandError for a file that is none, and for a node that comes twice."""
    nodes: dict[str, tuple[str, NodeInventory]] = {}
    for path in paths:
        node = saved_node(path)
        if node.node in nodes:
            raise CommandError(
                FAILED,
                f"cannot use {path}: it is of node {node.node}, and so is {nodes[node.node][0]}",
                "give each node's newest inventory once",
            )
        nodes[node.node] = (path, node)
    return tuple(node for _, node in nodes.values())


def saved_node(path: str) -> NodeInventory:
    """Raises CommandError."""
    try:
        with open(path, "rb") as file:
            # A larger one is cut, and so no JSON any more.
            return read_node(json.loads(file.read(INVENTORY_MAX)))
    except OSError as error:
        raise CommandError(FAILED, f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CommandError(
            FAILED, f"cannot use {path}: {error}", "make one with: llmgw inventory --json > FILE"
        ) from error
