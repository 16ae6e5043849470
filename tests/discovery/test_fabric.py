"""From a sysfs tree on disk to ports and fabrics: recorded nodes, trees of single faults, and garbage."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.discovery.fabric import RawDevice, RawGid, RawPort, chosen_fabrics, port_hindrance, read_devices
from llmgw.discovery.fabric_sysfs import host_addresses, read_fabric
from llmgw.discovery.inventory_json import fabric_json
from llmgw.domain.fabric import FabricInventory, PortKind

DATA = Path(__file__).parent / "data"
CASES = sorted(path.parent.name for path in (DATA / "fabric").glob("*/tree.json"))
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def builder() -> Any:
    spec = spec_from_file_location("build_sysfs", DATA / "tools" / "build_sysfs.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = builder().build


def lay_out(folder: Path, tree: Mapping[str, Any], einval: str = "auto") -> str:
    case = folder / "case"
    case.mkdir()
    (case / "tree.json").write_text(json.dumps(tree))
    return str(BUILD(case, folder / "sys", einval))


def port(link: str = "InfiniBand", state: str | None = "4: ACTIVE", **more: Any) -> dict[str, Any]:
    files = {
        "state": state,
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": link,
        "lid": "0x30",
        "sm_lid": "0x1",
        **more.pop("files", {}),
    }
    gids = {"0": "fe80:0000:0000:0000:58a2:e103:4755:61f6", "1": EMPTY}
    ib = {"gids": gids, "types": {"0": "IB/RoCE v1", "1": None}, "pkeys": {"0": "0xffff"}}
    return {"files": files, **(ib if link == "InfiniBand" else {}), **more}


def roce(gids: Mapping[str, tuple[str, str | None]], netdev: str = "eth2", **more: Any) -> dict[str, Any]:
    return port(
        "Ethernet",
        gids={k: gid for k, (gid, _) in gids.items()},
        types={k: kind for k, (_, kind) in gids.items()},
        ndevs={k: netdev if kind else None for k, (_, kind) in gids.items()},
        **more,
    )


def device(name: str = "mlx5_0", pci: str | None = "0000:18:00.0", **ports: Any) -> dict[str, Any]:
    found = {"name": name, "driver": "mlx5_core", "numa_node": "0", "ports": {k[1:]: v for k, v in ports.items()}}
    return {**found, "pci": pci} if pci else found


def found_in(
    folder: Path, *devices: Mapping[str, Any], addresses: Mapping[str, Sequence[str]] | None = None
) -> FabricInventory:
    return read_fabric(lay_out(folder, {"devices": list(devices)}), addresses or {})


def mapped(address: str) -> str:
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def agrees(expected: Any, found: Any, at: str = "") -> None:
    """Every key that is expected is there with that value; lists of objects by position."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), at
        for key, value in expected.items():
            if key not in ("note", "notes"):
                assert key in found, f"{at}.{key}"
                agrees(value, found[key], f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(found), (at, expected, found)
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            agrees(one, other, f"{at}[{index}]")
    else:
        assert found == expected and isinstance(found, bool) == isinstance(expected, bool), at


@pytest.mark.parametrize("einval", ["auto", "dir"])
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_node_is_read_as_its_expectation_says(case: str, einval: str, tmp_path: Path) -> None:
    tree = json.loads((DATA / "fabric" / case / "tree.json").read_text())
    expected = json.loads((DATA / "fabric" / case / "expected.json").read_text())
    found = read_fabric(str(BUILD(DATA / "fabric" / case, tmp_path / "sys", einval)), tree.get("addresses", {}))
    agrees(expected, fabric_json(found))
    for one in found.ports:
        assert (one.reason is None) == one.usable
    allowed = {
        "infiniband": {"subnet_prefix", "sm_lid", "lid"},
        "roce": {"ipv4", "ipv6", "gid_index_roce_v2", "netdev"},
    }
    for printed in fabric_json(found)["ports"]:
        of_others = {key for kind, keys in allowed.items() if kind != printed["kind"] for key in keys}
        assert not of_others & printed.keys()


def test_recorded_nodes_are_there_at_all() -> None:
    assert len(CASES) == 9


# -- single faults --------------------------------------------------------------------------------------------


def test_a_dangling_device_is_named_and_loses_no_other(tmp_path: Path) -> None:
    found = found_in(tmp_path, {"name": "mlx5_0", "dangling": True}, device("mlx5_1", _1=port()))
    assert found.unreadable_devices == ("mlx5_0",)
    assert found.preferred is not None and found.preferred.nccl_hca == "=mlx5_1:1"


@pytest.mark.parametrize("einval", ["auto", "dir"])
def test_a_state_that_cannot_be_read_is_null_and_the_port_is_left_out(einval: str, tmp_path: Path) -> None:
    tree = {"devices": [device("mlx5_0", _1=port(state=None)), device("mlx5_1", "0000:19:00.0", _1=port())]}
    found = read_fabric(lay_out(tmp_path, tree, einval), {})
    assert [(one.label, one.state, one.usable) for one in found.ports] == [
        ("mlx5_0:1", None, False),
        ("mlx5_1:1", "ACTIVE", True),
    ]
    assert found.ports[0].reason == "its state cannot be read"


@pytest.mark.parametrize(
    ("state", "words"),
    [("1: DOWN", "down"), ("2: INIT", "subnet manager"), ("3: ARMED", "not finished"), ("5: ACTIVE_DEFER", "DEFER")],
)
def test_each_state_that_is_not_active_has_its_reason(state: str, words: str, tmp_path: Path) -> None:
    only = found_in(tmp_path, device(_1=port(state=state))).ports[0]
    assert not only.usable and words in str(only.reason)


@pytest.mark.parametrize("state", ["ACTIVE", "4:ACTIVE and more", "4: ACTIVE 1: DOWN", "4 ACTIVE", "", "\x00"])
def test_only_the_form_of_the_kernel_says_active(state: str, tmp_path: Path) -> None:
    assert not found_in(tmp_path, device(_1=port(state=state))).ports[0].usable


def test_soft_roce_is_listed_as_roce_without_an_adapter(tmp_path: Path) -> None:
    gid = {"1": (mapped("10.0.0.5"), "RoCE v2")}
    found = found_in(tmp_path, device("rxe0", None, _1=roce(gid)), addresses={"eth2": ["10.0.0.5/24"]})
    assert found.ports[0].kind is PortKind.ROCE and found.ports[0].pci is None
    assert not found.fabrics and "software" in str(found.ports[0].reason)


def test_soft_roce_on_a_pci_card_is_still_software(tmp_path: Path) -> None:
    soft = device("rxe0", _1=roce({"1": (mapped("10.0.0.5"), "RoCE v2")}))
    assert not found_in(tmp_path, {**soft, "files": {"parent": "eth2"}}).fabrics


def test_a_device_whose_home_is_not_on_pci_is_no_adapter(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"devices": [device(_1=port())]})
    link = Path(root, "class/infiniband/mlx5_0/device")
    link.unlink()
    link.symlink_to(root)
    assert not read_fabric(root, {}).ports[0].usable


def test_roce_takes_version_2_with_ipv4_first_and_the_lowest_index(tmp_path: Path) -> None:
    gids = {
        "0": ("fe80:0000:0000:0000:42d6:ceff:fedd:6b9e", "RoCE v2"),
        "1": (mapped("10.0.0.5"), "IB/RoCE v1"),
        "2": ("2001:0db8:0000:0000:0000:0000:0000:0005", "RoCE v2"),
        "3": (EMPTY, None),
        "5": (mapped("10.0.0.5"), "RoCE v2"),
        "7": (mapped("10.0.9.5"), "RoCE v2"),
    }
    found = found_in(tmp_path, device(_1=roce(gids, "vlan100")), addresses={"vlan100": ["10.0.0.5/24"]})
    only = found.ports[0]
    assert (only.ipv4, only.ipv6, only.gid_index, only.netdev) == ("10.0.0.5", None, 5, "vlan100")
    assert only.network == "10.0.0.0/24"


def test_ipv6_is_compressed_and_nccl_is_told_the_family(tmp_path: Path) -> None:
    gids = {"1": ("2001:0db8:0000:0000:0000:0000:0000:0005", "RoCE v2")}
    found = found_in(tmp_path, device(_1=roce(gids)), addresses={"eth2": ["2001:db8::5/64"]})
    assert found.ports[0].ipv6 == "2001:db8::5" and found.fabrics[0].networks == ("2001:db8::/64",)
    assert found.fabrics[0].nccl_extra == {"NCCL_IB_ADDR_FAMILY": "AF_INET6"}


@pytest.mark.parametrize(
    "gids",
    [
        {"0": ("fe80:0000:0000:0000:42d6:ceff:fedd:6b9e", "RoCE v2")},
        {"0": (mapped("10.0.0.5"), "IB/RoCE v1")},
        {"0": (mapped("0.0.0.0"), "RoCE v2")},
        {"0": (mapped("10.0.0.5"), None)},
        {},
    ],
)
def test_an_active_ethernet_port_without_a_routable_version_2_address_is_unusable(
    gids: Mapping[str, tuple[str, str | None]], tmp_path: Path
) -> None:
    only = found_in(tmp_path, device(_1=roce(gids))).ports[0]
    assert not only.usable and "no RoCE v2 address" in str(only.reason)


def test_an_address_without_a_known_prefix_is_usable_here_on_unknown_networks(tmp_path: Path) -> None:
    found = found_in(tmp_path, device(_1=roce({"3": (mapped("10.0.0.5"), "RoCE v2")})))
    assert found.ports[0].usable and found.fabrics[0].networks == ()


def test_the_link_local_network_of_ipv4_tells_nothing_about_other_nodes(tmp_path: Path) -> None:
    gids = {"3": (mapped("169.254.7.5"), "RoCE v2")}
    found = found_in(tmp_path, device(_1=roce(gids)), addresses={"eth2": ["169.254.7.5/16"]})
    assert found.ports[0].usable and found.fabrics[0].networks == ()


def test_devices_stand_in_the_order_in_which_people_count(tmp_path: Path) -> None:
    names = ["mlx5_10", "mlx5_2", "mlx5_1", "ibp9s0"]
    found = found_in(tmp_path, *(device(name, f"0000:{10 + i}:00.0", _1=port()) for i, name in enumerate(names)))
    assert [one.device for one in found.ports] == ["ibp9s0", "mlx5_1", "mlx5_2", "mlx5_10"]


def test_a_name_that_a_list_of_nccl_cannot_hold_is_left_out(tmp_path: Path) -> None:
    found = found_in(tmp_path, device("mlx5_0,mlx5_1", _1=port()))
    assert not found.fabrics and "name" in str(found.ports[0].reason)


def test_infiniband_comes_before_roce_only_at_equal_rates(tmp_path: Path) -> None:
    both = [
        device("a0", "0000:01:00.0", _1=roce({"3": (mapped("10.0.0.5"), "RoCE v2")})),
        device("b0", "0000:02:00.0", _1=port()),
    ]
    assert [one.kind for one in found_in(tmp_path, *both).fabrics] == [PortKind.INFINIBAND, PortKind.ROCE]


def test_ports_that_are_in_no_partition_together_are_two_fabrics(tmp_path: Path) -> None:
    found = found_in(
        tmp_path,
        device("a0", "0000:01:00.0", _1=port(pkeys={"0": "0x8001"})),
        device("b0", "0000:02:00.0", _1=port(pkeys={"0": "0x8002", "1": "0x0001"})),
        device("c0", "0000:03:00.0", _1=port(pkeys={"0": "0x8002"})),
    )
    assert [one.ports for one in found.fabrics] == [("a0:1", "b0:1"), ("c0:1",)]
    # b0 is only a limited member of it, so the two together are no more; and no one index serves both.
    assert found.fabrics[0].pkeys == ("0x0001",) and found.fabrics[0].pkey_indexes == (None,)


def test_the_index_of_a_partition_counts_empty_rows(tmp_path: Path) -> None:
    found = found_in(tmp_path, device(_1=port(pkeys={"0": "0x7fff", "1": "0x0000", "2": "0x8005", "3": None})))
    assert found.fabrics[0].pkeys == ("0x7fff", "0x8005") and found.fabrics[0].pkey_indexes == (0, 2)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = lay_out(tmp_path, {"devices": [device(_1=port())]})
    state = Path(root, "class/infiniband/mlx5_0/ports/1/state")
    state.unlink()
    os.mkfifo(state)
    assert read_fabric(root, {}).ports[0].state is None


@pytest.mark.parametrize("make", ["missing", "file", "empty", "loop"])
def test_no_class_folder_in_any_form_is_no_error(make: str, tmp_path: Path) -> None:
    folder = tmp_path / "class" / "infiniband"
    folder.parent.mkdir()
    if make == "file":
        folder.write_text("x")
    elif make == "empty":
        folder.mkdir()
    elif make == "loop":
        folder.symlink_to(folder)
    assert read_fabric(str(tmp_path), {}) == FabricInventory()


def test_the_addresses_of_this_host_have_prefixes_and_no_scope() -> None:
    found = [text for texts in host_addresses().values() for text in texts]
    assert any(text == "127.0.0.1/8" for text in found)
    assert not any("%" in text for text in found)


# -- what [node] makes of it ----------------------------------------------------------------------------------


@pytest.fixture
def two_kinds(tmp_path: Path) -> FabricInventory:
    return found_in(
        tmp_path,
        device("mlx5_0", "0000:01:00.0", _1=port(), _2=port(state="1: DOWN")),
        device("mlx5_1", "0000:02:00.0", _1=port()),
        device("mlx5_2", "0000:03:00.0", _1=roce({"3": (mapped("10.0.0.5"), "RoCE v2")})),
        {"name": "mlx5_3", "dangling": True},
        addresses={"eth2": ["10.0.0.5/24"]},
    )


def test_a_list_leaves_only_what_it_names_as_device_or_port(two_kinds: FabricInventory) -> None:
    chosen = chosen_fabrics(two_kinds, ("mlx5_2", "mlx5_1:1"))
    assert [one.ports for one in chosen.fabrics] == [("mlx5_1:1",), ("mlx5_2:1",)]
    assert chosen.ports == two_kinds.ports


def test_none_leaves_sockets_and_auto_everything(two_kinds: FabricInventory) -> None:
    assert chosen_fabrics(two_kinds, "auto") == two_kinds
    none = chosen_fabrics(two_kinds, "none", "lan")
    assert none.preferred is None and none.sockets and none.sockets_island == "lan"


def test_an_island_names_the_preferred_fabric_alone(two_kinds: FabricInventory) -> None:
    assert [one.island for one in chosen_fabrics(two_kinds, "auto", "ib-1").fabrics] == ["ib-1", None]
    assert chosen_fabrics(FabricInventory(), "auto", "ib-1") == FabricInventory()


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("mlx5_0", None),
        ("mlx5_0:1", None),
        ("mlx5_0:2", "the port is down: no cable, or the other end is off"),
        ("mlx5_0:3", "the device has mlx5_0:1, mlx5_0:2"),
        ("mlx5_3", "the device is listed, but it cannot be read"),
        ("mlx5", "there is no such device"),
    ],
)
def test_what_is_wrong_with_an_entry_of_the_list_is_said(
    wanted: str, why: str | None, two_kinds: FabricInventory
) -> None:
    assert port_hindrance(two_kinds, wanted) == why


# -- garbage --------------------------------------------------------------------------------------------------

TEXT = st.one_of(
    st.none(),
    st.sampled_from(
        ["4: ACTIVE", "1: DOWN", "InfiniBand", "Ethernet", "Unknown", "RoCE v2", "0xffff", "0x1", "400 Gb/sec (4X NDR)"]
    ),
    st.text(max_size=30),
)
GID = st.one_of(st.sampled_from([EMPTY, mapped("10.0.0.5"), "fe80:0000:0000:0000:58a2:e103:4755:61f6"]), st.text())
PORTS = st.builds(
    RawPort,
    number=st.integers(-1, 5),
    state=TEXT,
    rate=TEXT,
    link_layer=TEXT,
    lid=TEXT,
    sm_lid=TEXT,
    gids=st.lists(st.builds(RawGid, st.integers(0, 9), GID, TEXT, TEXT), max_size=4).map(tuple),
    pkeys=st.lists(st.tuples(st.integers(0, 9), TEXT.map(str)), max_size=3).map(tuple),
)
DEVICES = st.builds(
    RawDevice,
    name=st.one_of(st.sampled_from(["mlx5_1", "mlx5_10", "rxe0"]), st.text(max_size=12)),
    readable=st.booleans(),
    home=st.one_of(st.none(), st.just("0000:18:00.0"), st.text(max_size=12)),
    software=st.booleans(),
    driver=st.one_of(st.none(), st.text(max_size=8)),
    numa_node=TEXT,
    netdevs=st.lists(st.text(max_size=5), max_size=2).map(tuple),
    ports=st.lists(PORTS, max_size=3).map(tuple),
)


def is_sound(found: FabricInventory) -> None:
    usable = {one.label for one in found.ports if one.usable}
    for one in found.ports:
        assert (one.reason is None) == one.usable
        if one.usable:
            assert one.state == "ACTIVE" and one.pci and one.kind is not PortKind.OTHER
    for fabric in found.fabrics:
        assert fabric.ports and set(fabric.ports) <= usable
        hca = fabric.nccl_hca
        assert hca is not None and hca.startswith("=") and len(hca) > 1 and not set("^= ") & set(hca[1:])
    json.dumps(fabric_json(found)).encode()


@given(st.lists(DEVICES, max_size=4), st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=12), max_size=2)))
def test_no_content_raises_or_makes_a_port_usable_without_state_and_adapter(
    devices: list[RawDevice], addresses: dict[str, list[str]]
) -> None:
    is_sound(read_devices(devices, addresses))


BYTES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"4: ACTIVE\n", b"InfiniBand\n", b"Ethernet\n", b"RoCE v2\n"])
)
PLACES = st.sampled_from(
    [
        "state", "rate", "link_layer", "lid", "sm_lid", "gids", "gids/0", "gids/x", "gid_attrs", "gid_attrs/types/0",
        "pkeys", "pkeys/0", "../1", "../01", "../x", "../../ports", "../../device", "../../device/driver",
    ]
)  # fmt: skip
FAULTS = st.lists(
    st.tuples(PLACES, st.sampled_from(["write", "remove", "folder", "dangling", "loop", "pipe"]), BYTES), max_size=6
)


def spoil(path: Path, how: str, content: bytes) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            path.rename(path.with_name(path.name + "-away"))
        elif os.path.lexists(path):
            path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        if how == "write":
            path.write_bytes(content)
        elif how == "folder":
            path.mkdir()
        elif how == "dangling":
            path.symlink_to("/nowhere/at/all")
        elif how == "loop":
            path.symlink_to(path)
        elif how == "pipe":
            os.mkfifo(path)
    except OSError:
        # An earlier fault took the place away, which is one more kind of broken tree.
        pass


@settings(max_examples=60, deadline=None)
@given(FAULTS)
def test_no_broken_tree_raises_hangs_or_loses_the_other_device(faults: list[tuple[str, str, bytes]]) -> None:
    with TemporaryDirectory() as folder:
        root = lay_out(Path(folder), {"devices": [device(_1=port()), device("mlx5_9", "0000:19:00.0", _1=port())]})
        for place, how, content in faults:
            spoil(Path(root, "class/infiniband/mlx5_0/ports/1", *place.split("/")), how, content)
        found = read_fabric(root, {})
        is_sound(found)
        assert any(one.label == "mlx5_9:1" and one.usable for one in found.ports)


def test_a_fabric_without_ports_has_no_list(two_kinds: FabricInventory) -> None:
    assert evolve(two_kinds.fabrics[0], ports=()).nccl_hca is None
