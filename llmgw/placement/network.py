"""Over which network the nodes of one instance talk, and what NCCL is told on each of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgw.discovery.islands import common_island
from llmgw.domain.hardware import NodeInventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardSpec
from llmgw.engines.nccl import NcclEnvironment, multi_node_env


def group_environments(spec: ShardSpec, nodes: Sequence[NodeInventory]) -> Mapping[str, NcclEnvironment] | Problem:
    """Node -> its variables, for an instance that is placed on exactly these nodes; or why it cannot be there.

    Device names differ between nodes, so each gets a list of its own, of the one fabric that all of them share. The
    first thing that is in the way is told.
    """
    island = common_island([(node.node, node.fabric) for node in nodes], [node.node for node in nodes])
    fabrics = {node.node: island.of(node.node, node.fabric) if island is not None else None for node in nodes}
    uses_sockets = all(node.fabric.sockets for node in nodes)
    found: dict[str, NcclEnvironment] = {}
    for node in nodes:
        told = multi_node_env(
            spec,
            fabrics[node.node],
            address=node.address,
            interface=node.interface,
            transport="sockets" if uses_sockets else "fabric",
            peers=[fabric for name, fabric in fabrics.items() if name != node.node and fabric is not None],
            nccl_files=node.host.nccl_config_files,
        )
        if isinstance(told, Problem):
            return told
        found[node.node] = told
    return found
