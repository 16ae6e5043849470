"""The reported failures of adapters and interfaces between nodes (F30 to F32), from trees and tables on disk to the
variables that an engine gets."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from llmgw.discovery.addresses import Routes, reach
from llmgw.discovery.fabric import chosen_fabrics
from llmgw.discovery.fabric_sysfs import read_fabric
from llmgw.domain.fabric import FabricInventory
from llmgw.domain.hardware import HostHardware, Inventory, InventoryStatus, NodeInventory
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.engines.nccl import NcclEnvironment, multi_node_env
from llmgw.placement.network import group_environments

TOOLS = Path(__file__).parents[1] / "discovery" / "data" / "tools"
SPEC = ShardSpec("big", "m", EngineKind.VLLM, ("vllm", "serve"), "h", gpus=16, nodes=2)
PREFIX = "fe80:0000:0000:0000:58a2:e103:4755:"


def sysfs(folder: Path, *devices: Mapping[str, Any]) -> str:
    spec = spec_from_file_location("build_sysfs", TOOLS / "build_sysfs.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    case = folder / "case"
    case.mkdir(parents=True)
    (case / "tree.json").write_text(json.dumps({"devices": list(devices)}))
    return str(module.build(case, folder / "sys"))


def infiniband(number: int, state: str | None = "4: ACTIVE", sm_lid: str = "0x1") -> dict[str, Any]:
    files = {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand", "lid": "0x9", "sm_lid": sm_lid}
    port = {"files": files, "gids": {"0": f"{PREFIX}{number:04x}"}, "pkeys": {"0": "0xffff"}}
    return {"name": f"mlx5_{number}", "pci": f"0000:{number:02x}:00.0", "driver": "mlx5_core", "ports": {"1": port}}


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def ethernet(number: int, rows: Mapping[int, tuple[str, str]], size: int = 12) -> dict[str, Any]:
    """`rows`: index -> GID and type; the other rows are empty, and reading their type fails."""
    files = {"state": "4: ACTIVE", "rate": "100 Gb/sec (4X EDR)", "link_layer": "Ethernet"}
    empty = "0000:0000:0000:0000:0000:0000:0000:0000"
    port = {
        "files": files,
        "gids": {str(n): rows[n][0] if n in rows else empty for n in range(size)},
        "types": {str(n): rows[n][1] if n in rows else None for n in range(size)},
        "ndevs": {str(n): f"eth{number}" if n in rows else None for n in range(size)},
    }
    return {"name": f"mlx5_{number}", "pci": f"0000:{number:02x}:00.0", "driver": "mlx5_core", "ports": {"1": port}}


def node(name: str, fabric: FabricInventory, **more: Any) -> NodeInventory:
    known = {"address": f"10.0.0.{ord(name) - 90}", "interface": "bond0", **more}
    return NodeInventory(name, Inventory(InventoryStatus.OK), fabric, HostHardware(), **known)


def told(spec: ShardSpec, *nodes: NodeInventory) -> Mapping[str, NcclEnvironment]:
    found = group_environments(spec, nodes)
    assert not isinstance(found, Problem), found
    return found


# -- F30: NCCL_IB_HCA is a list of prefixes


def test_mlx5_1_beside_10_and_11_is_named_exactly_and_without_them(tmp_path: Path) -> None:
    rows = {3: (mapped("10.1.0.5"), "RoCE v2")}
    root = sysfs(tmp_path, infiniband(1), ethernet(10, rows), ethernet(11, {3: (mapped("10.1.0.6"), "RoCE v2")}))
    found = read_fabric(root, {"eth10": ["10.1.0.5/24"], "eth11": ["10.1.0.6/24"]})
    assert told(SPEC, node("a", found), node("b", found))["a"].values["NCCL_IB_HCA"] == "=mlx5_1:1"


def test_ports_that_are_down_unmanaged_or_unreadable_are_left_out_and_said(tmp_path: Path) -> None:
    root = sysfs(
        tmp_path,
        infiniband(10),
        infiniband(2),
        infiniband(3, "1: DOWN"),
        infiniband(4, "2: INIT"),
        infiniband(5, None),
        {"name": "mlx5_6", "dangling": True},
    )
    found = read_fabric(root, {})
    assert told(SPEC, node("a", found), node("b", found))["a"].values["NCCL_IB_HCA"] == "=mlx5_2:1,mlx5_10:1"
    assert [port.label for port in found.ports if port.reason] == ["mlx5_3:1", "mlx5_4:1", "mlx5_5:1"]
    assert found.unreadable_devices == ("mlx5_6",)


def test_nodes_that_share_no_fabric_are_refused_and_sockets_are_only_used_when_chosen(tmp_path: Path) -> None:
    one = read_fabric(sysfs(tmp_path / "a", infiniband(1)), {})
    other = read_fabric(sysfs(tmp_path / "b", infiniband(1, sm_lid="0x24")), {})
    refused = group_environments(SPEC, [node("a", one), node("b", other)])
    assert isinstance(refused, Problem) and refused.code == "no-common-fabric"
    chosen = [node(name, chosen_fabrics(fabric, "none")) for name, fabric in (("a", one), ("b", other))]
    values = told(SPEC, *chosen)["a"].values
    assert values["NCCL_IB_DISABLE"] == "1" and "NCCL_IB_HCA" not in values


def test_each_node_gets_its_own_names_of_the_fabric_that_both_have(tmp_path: Path) -> None:
    both = read_fabric(sysfs(tmp_path / "a", infiniband(1), infiniband(2, sm_lid="0x24")), {})
    other = read_fabric(sysfs(tmp_path / "b", infiniband(7, sm_lid="0x24")), {})
    found = told(SPEC, node("a", both), node("b", other))
    assert {name: env.values["NCCL_IB_HCA"] for name, env in found.items()} == {"a": "=mlx5_2:1", "b": "=mlx5_7:1"}


def test_an_instance_on_one_node_is_left_alone(tmp_path: Path) -> None:
    found = read_fabric(sysfs(tmp_path, infiniband(1)), {})
    assert told(evolve(SPEC, nodes=1), node("a", found))["a"].values == {}


# -- F31: the wrong interface, and loopback

INTERFACES: Mapping[str, Sequence[str]] = {
    "lo": ["127.0.0.1/8", "127.0.1.1/8", "::1/128"],
    "docker0": ["172.17.0.1/16"],
    "ens3": [],
    "ens4": [],
    "ens5": ["10.9.0.5/24"],
    "bond0": ["10.0.0.5/24"],
}
HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
ROUTES = Routes(
    HEAD
    # ens5 is down, and its better metric is worth nothing.
    + "ens5\t00000000\t0100090A\t0002\t0\t0\t50\t00000000\t0\t0\t0\n"
    + "bond0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    + "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
)


def of(written: str | None, spec: ShardSpec = SPEC) -> NcclEnvironment | Problem:
    found = reach(INTERFACES, ROUTES, written)
    return multi_node_env(spec, None, address=found.address, interface=found.interface, transport="sockets")


@pytest.mark.parametrize("written", [None, "10.0.0.5"])
def test_all_that_name_an_interface_name_the_one_by_which_others_come(
    written: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the host's name leads to loopback on many hosts")

    for name in ("gethostbyname", "getaddrinfo", "gethostname", "getfqdn"):
        monkeypatch.setattr(socket, name, asked)
    found = of(written)
    assert isinstance(found, NcclEnvironment)
    assert found.values == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "VLLM_HOST_IP": "10.0.0.5",
    }


@pytest.mark.parametrize("written", ["127.0.0.1", "127.0.1.1", "::1"])
def test_loopback_between_nodes_is_refused(written: str) -> None:
    found = of(written)
    assert isinstance(found, Problem) and found.code == "no-address"
    assert of(written, evolve(SPEC, nodes=1)) == NcclEnvironment()


# -- F32: the GID index

LINK_LOCAL = "fe80:0000:0000:0000:42d6:ceff:fedd:6b9e"


def two_adapters(folder: Path) -> FabricInventory:
    first = {0: (LINK_LOCAL, "IB/RoCE v1"), 1: (LINK_LOCAL, "RoCE v2"), 3: (mapped("10.1.0.5"), "RoCE v2")}
    second = {4: (LINK_LOCAL, "RoCE v2"), 6: (mapped("10.2.0.5"), "IB/RoCE v1"), 7: (mapped("10.2.0.5"), "RoCE v2")}
    return read_fabric(
        sysfs(folder, ethernet(1, first), ethernet(2, second)), {"eth1": ["10.1.0.5/24"], "eth2": ["10.2.0.5/24"]}
    )


def test_the_index_differs_between_adapters_and_is_never_told_to_nccl(tmp_path: Path) -> None:
    found = two_adapters(tmp_path)
    assert [(port.gid_index, port.ipv4, port.network) for port in found.ports] == [
        (3, "10.1.0.5", "10.1.0.0/24"),
        (7, "10.2.0.5", "10.2.0.0/24"),
    ]
    for environment in told(SPEC, node("a", found), node("b", found)).values():
        assert environment.values["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_2:1"
        assert not {"NCCL_IB_GID_INDEX", "NCCL_IB_ADDR_FAMILY"} & environment.values.keys()


def test_tables_with_ipv6_only_are_told_by_the_family(tmp_path: Path) -> None:
    rows = {1: (LINK_LOCAL, "RoCE v2"), 5: ("2001:0db8:0000:0000:0000:0000:0000:0005", "RoCE v2")}
    found = read_fabric(sysfs(tmp_path, ethernet(1, rows)), {"eth1": ["2001:db8::5/64"]})
    assert told(SPEC, node("a", found), node("b", found))["a"].values["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"


def test_an_index_of_the_operator_wins_and_is_shown(tmp_path: Path) -> None:
    found = two_adapters(tmp_path)
    spec = evolve(SPEC, env={"NCCL_IB_GID_INDEX": "3"})
    assert told(spec, node("a", found), node("b", found))["a"].overrides == ("NCCL_IB_GID_INDEX",)
