"""The address by which others reach this node: never the host's name, never loopback, never a guess among many."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.discovery.addresses import Reach, Routes, interface_of, reach
from llmgw.discovery.fabric_sysfs import host_routes
from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind

HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
ADDRESSES = {
    "lo": ["127.0.0.1/8", "::1/128"],
    "docker0": ["172.17.0.1/16"],
    "eno1": [],
    "bond0": ["fe80::1/64", "2001:db8::5/64", "10.0.0.5/24"],
    "eth9": ["10.9.0.5/24"],
}
ROCE = FabricInventory(
    ports=(FabricPort("mlx5_0", 1, PortKind.ROCE, "ACTIVE", 100.0, True, netdev="eth9", pci="0000:01:00.0"),),
    fabrics=(Fabric(PortKind.ROCE, ("mlx5_0:1",)),),
)


def route(name: str, metric: int = 100, flags: str = "0003", to: str = "00000000") -> str:
    return f"{name}\t{to}\t0100000A\t{flags}\t0\t0\t{metric}\t{to}\t0\t0\t0\n"


def route6(name: str, flags: str = "00000003", metric: str = "00000400") -> str:
    nothing = "0" * 32
    return f"{nothing} 00 {nothing} 00 fe80{'0' * 27}1 {metric} 00000001 00000000 {flags}     {name}\n"


def found(text: str = "", text6: str = "", written: str | None = None, fabric: FabricInventory | None = None) -> Reach:
    return reach(ADDRESSES, Routes(HEAD + text, text6), written, fabric)


def test_the_interface_of_the_default_route_gives_the_address() -> None:
    told = found(route("docker0", to="000011AC") + route("bond0"))
    assert (told.address, told.interface) == ("10.0.0.5", "bond0") and "default route" in told.why


def test_the_smallest_metric_wins_and_a_slave_without_an_address_is_passed_over() -> None:
    assert found(route("eth9", 200) + route("bond0", 100) + route("eno1", 50)).interface == "bond0"


@pytest.mark.parametrize("flags", ["0002", "0203", "zz"])
def test_a_default_route_that_is_down_or_rejects_leads_nowhere(flags: str) -> None:
    assert found(route("bond0", flags=flags)).address is None


def test_a_host_with_ipv6_alone_is_reached_by_that() -> None:
    only = {"eth0": ["fe80::1/64", "2001:db8::9/64"]}
    told = reach(only, Routes(HEAD, route6("lo", "00200200") + route6("eth0")), None)
    assert (told.address, told.interface) == ("2001:db8::9", "eth0")


def test_without_a_default_route_the_adapter_of_the_fabric_gives_it() -> None:
    told = found(fabric=ROCE)
    assert (told.address, told.interface) == ("10.9.0.5", "eth9") and "mlx5_0:1" in told.why
    assert found(fabric=FabricInventory(ports=ROCE.ports)).address is None


def test_with_nothing_to_go_by_it_says_what_to_write() -> None:
    told = found()
    assert told == Reach(None, None, told.why) and "[node] address" in told.why


def test_a_written_address_wins_and_its_interface_is_found_however_it_is_spelled() -> None:
    assert found(route("bond0"), written="10.9.0.5").interface == "eth9"
    assert found(written="2001:DB8:0::5").interface == "bond0"
    assert found(written="192.0.2.1") == Reach("192.0.2.1", None, "[node] address")
    assert interface_of(ADDRESSES, "not an address") is None


@pytest.mark.parametrize("garbage", ["", "x", "\x00\n" * 5, "a b c d e f g h i j k\n"])
def test_garbage_in_the_tables_is_no_route(garbage: str) -> None:
    assert found(garbage, garbage).address is None


def test_tables_are_read_from_files_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "route").write_text(HEAD + route("bond0"))
    assert host_routes(str(tmp_path)) == Routes(HEAD + route("bond0"), "")
