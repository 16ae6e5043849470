"""The nodes of one instance get variables of one network, or the reason why they cannot have it."""

from __future__ import annotations

from attrs import evolve

from llmgw.domain.fabric import Fabric, FabricInventory, PortKind
from llmgw.domain.hardware import HostHardware, Inventory, InventoryStatus, NodeInventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.placement.network import group_environments

SPEC = ShardSpec("big", "m", EngineKind.SGLANG, ("sglang",), "h", gpus=16, nodes=2)
IB = Fabric(PortKind.INFINIBAND, ("mlx5_0:1",), "mlx5_core", 400.0, "fe80:0000:0000:0000", 1, ("0xffff",), (0,))
ROCE = Fabric(PortKind.ROCE, ("mlx5_1:1",), networks=("10.1.0.0/24",))
SOCKETS = FabricInventory(sockets=True, sockets_island="lan")


def node(name: str, found: FabricInventory) -> NodeInventory:
    host = HostHardware(nccl_config_files=("/etc/nccl.conf",))
    return NodeInventory(name, Inventory(InventoryStatus.OK), found, host, "10.0.0.5", "eth0")


def test_of_two_common_fabrics_all_nodes_use_the_same() -> None:
    a, b = FabricInventory(fabrics=(IB, ROCE)), FabricInventory(fabrics=(ROCE, evolve(IB, ports=("x:1",))))
    found = group_environments(SPEC, [node("a", a), node("b", b), node("c", a)])
    assert not isinstance(found, Problem)
    assert [env.values["NCCL_IB_HCA"] for env in found.values()] == ["=mlx5_0:1", "=x:1", "=mlx5_0:1"]
    assert all("/etc/nccl.conf" in env.notes[0] for env in found.values())


def test_sockets_are_used_only_when_all_nodes_chose_them() -> None:
    found = group_environments(SPEC, [node("a", SOCKETS), node("b", SOCKETS)])
    assert not isinstance(found, Problem) and found["b"].values["NCCL_IB_DISABLE"] == "1"
    mixed = group_environments(SPEC, [node("a", SOCKETS), node("b", FabricInventory(fabrics=(IB,)))])
    assert isinstance(mixed, Problem) and mixed.code == "no-common-fabric"


def test_the_node_that_nobody_can_reach_is_in_the_way_of_all() -> None:
    found = FabricInventory(fabrics=(IB,))
    refused = group_environments(SPEC, [node("a", found), evolve(node("b", found), address=None)])
    assert isinstance(refused, Problem) and refused.code == "no-address"


def test_different_partitions_for_each_pair_do_not_help_a_group_of_three() -> None:
    keys = {"a": ("0x8001", "0x8003"), "b": ("0x8001", "0x8002"), "c": ("0x8002", "0x8003")}
    nodes = [node(n, FabricInventory(fabrics=(evolve(IB, pkeys=k, pkey_indexes=(0, 1)),))) for n, k in keys.items()]
    refused = group_environments(evolve(SPEC, nodes=3), nodes)
    assert isinstance(refused, Problem) and "partition" in refused.message
    pair = group_environments(SPEC, nodes[1:])
    assert not isinstance(pair, Problem)
    assert (pair["b"].values["NCCL_IB_PKEY"], pair["c"].values.get("NCCL_IB_PKEY")) == ("1", None)
