"""An inventory as JSON and back: nothing is lost on the way, and what is wrong in a file is told with its key."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.inventory_json import node_json, read_holders, read_node, read_quarantined
from llmgw.domain.fabric import Fabric, FabricInventory, FabricPort, PortKind
from llmgw.domain.hardware import (
    Availability,
    Gpu,
    GpuFlag,
    GpuHolder,
    GpuProcess,
    Hindrance,
    HostHardware,
    Inventory,
    InventoryError,
    InventoryStatus,
    LostGpu,
    MigInstance,
    NodeInventory,
    OtherGpu,
    Stale,
    Topology,
)

text = st.text(max_size=12)
some_text = st.none() | text
number = st.integers(0, 1 << 40)
some_number = st.none() | number
some_switch = st.none() | st.booleans()
some_float = st.none() | st.floats(0, 1e9)
index = st.integers(0, 999)
pkeys = st.lists(st.sampled_from(["0xffff", "0x7fff", "0x8001"]), max_size=2).map(tuple)
port_names = st.builds("{}:{}".format, st.from_regex(r"[a-z]{1,6}_[0-9]{1,2}", fullmatch=True), st.integers(1, 2))

gpus = st.builds(
    Gpu,
    index=index,
    uuid=text,
    bus_id=text,
    name=text,
    memory_total=some_number,
    memory_used=some_number,
    memory_free=some_number,
    compute_capability=st.none() | st.tuples(st.integers(1, 99), st.integers(0, 9)),
    processes=st.lists(st.builds(GpuProcess, number, some_number), max_size=3).map(tuple),
    memory_reserved=some_number,
    gpu_class=some_text,
    unified_memory=st.booleans(),
    ecc_enabled=some_switch,
    mig_enabled=some_switch,
    uncorrected_ecc=some_number,
    flags=st.sets(st.sampled_from(GpuFlag)).map(lambda flags: tuple(flag for flag in GpuFlag if flag in flags)),
    virtual=st.booleans(),
    persistence_mode=some_switch,
    recovery_action=some_text,
    temperature=some_number,
    power=some_float,
    power_limit=some_float,
)
topologies = st.builds(
    Topology,
    st.dictionaries(st.tuples(index, index), st.sampled_from(["NV18", "SYS"]), max_size=3),
    st.dictionaries(index, text, max_size=3),
    st.sampled_from(["nvidia-smi", "sysfs"]),
)
good = st.builds(
    Inventory,
    status=st.sampled_from([InventoryStatus.OK, InventoryStatus.PARTIAL]),
    gpus=st.lists(gpus, max_size=3).map(tuple),
    detail=some_text,
    driver_version=some_text,
    read_at=some_float,
    lost=st.lists(st.builds(LostGpu, st.none() | index, text), max_size=2).map(tuple),
    processes_known=st.booleans(),
    mig_instances=st.lists(st.builds(MigInstance, index, index, text, text, text, some_number), max_size=2).map(tuple),
    topology=st.none() | topologies,
    other_gpus=st.lists(st.builds(OtherGpu, text, index, text, text), max_size=2).map(tuple),
    stale=st.none() | st.builds(Stale, st.sampled_from(InventoryError), some_text, st.floats(0, 1e9)),
)
failed = st.builds(Inventory, st.just(InventoryStatus.ERROR), error=st.sampled_from(InventoryError), detail=some_text)
ports = st.builds(
    FabricPort,
    device=text,
    port=st.integers(1, 9),
    kind=st.sampled_from(PortKind),
    state=some_text,
    rate_gbps=some_float,
    usable=st.booleans(),
    reason=some_text,
    subnet_prefix=some_text,
    sm_lid=some_number,
    lid=some_number,
    ipv4=some_text,
    ipv6=some_text,
    gid_index=some_number,
    network=some_text,
    netdev=some_text,
    pci=some_text,
    numa=some_number,
    driver=some_text,
    pkeys=pkeys,
)
names = st.lists(port_names, min_size=1, max_size=3).map(tuple)
infiniband = st.builds(
    Fabric,
    st.just(PortKind.INFINIBAND),
    names,
    driver=st.none() | st.just("mlx5_core"),
    rate_gbps=some_float,
    subnet_prefix=some_text,
    sm_lid=some_number,
    pkeys=pkeys,
    island=some_text,
)
roce = st.builds(
    Fabric,
    st.just(PortKind.ROCE),
    names,
    networks=st.lists(text, max_size=2).map(tuple),
    ipv6_only=st.booleans(),
    island=some_text,
)
fabrics = st.builds(
    FabricInventory,
    st.lists(ports, max_size=2).map(tuple),
    st.lists(infiniband | roce, max_size=2).map(tuple),
    st.lists(text, max_size=2).map(tuple),
    sockets=st.booleans(),
    sockets_island=some_text,
)
hosts = st.builds(
    HostHardware,
    some_number,
    some_number,
    some_number,
    some_number,
    st.none() | st.integers(-1, 1 << 40),
    some_number,
    some_switch,
    st.lists(text, max_size=2).map(tuple),
)
nodes = st.builds(NodeInventory, text, good | failed, fabrics, hosts, some_text, some_text)


@given(nodes, st.sampled_from(["local", "daemon"]))
def test_what_was_printed_reads_back_as_it_was(node: NodeInventory, source: str) -> None:
    assert read_node(json.loads(json.dumps(node_json(node, source=source)))) == node


def a_node() -> NodeInventory:
    gpu = Gpu(0, "GPU-0", "00000000:01:00.0", "X", 10, 5, 5, (9, 0), (GpuProcess(7, None), GpuProcess(8, 3)))
    inventory = Inventory(
        InventoryStatus.OK,
        (gpu, evolve(gpu, index=1, uuid="GPU-1", processes=())),
        lost=(LostGpu(None, "0000:04:00.0"),),
        mig_instances=(MigInstance(0, 0, "MIG-a", "3g.40gb", "x-mig-3g.40gb", None),),
        topology=Topology({(0, 1): "NV18"}, {0: "mlx5_0"}),
    )
    port = FabricPort("mlx5_0", 1, PortKind.INFINIBAND, "ACTIVE", 400.0, True, pkeys=("0xffff",))
    return NodeInventory("n", inventory, FabricInventory((port,), (Fabric(PortKind.INFINIBAND, ("mlx5_0:1",)),)))


def printed(**availability: Availability) -> dict[str, Any]:
    known = {entry.uuid: entry for entry in availability.values()}
    answer: dict[str, Any] = json.loads(json.dumps(node_json(a_node(), source="local", availability=known)))
    return answer


def test_every_key_of_gpus_and_fabric_is_there_where_nothing_is() -> None:
    nothing = node_json(NodeInventory("n", Inventory(InventoryStatus.OK)), source="local")
    assert {key: nothing["gpu"][key] for key in ("error_kind", "driver_version", "topology")} == {
        "error_kind": None,
        "driver_version": None,
        "topology": None,
    }
    assert [nothing["gpu"][key] for key in ("gpus", "lost", "mig_instances", "other_gpus")] == [[], [], [], []]
    assert nothing["fabric"] == {
        "ports": [],
        "unreadable_devices": [],
        "fabrics": [],
        "preferred_fabric": None,
        "nccl_ib_hca": None,
        "nccl_extra": {},
        "multi_node": False,
        "identities": [],
        "port_details": [],
        "sockets": False,
        "sockets_island": None,
    }


def test_nearness_by_pci_paths_is_no_topology() -> None:
    node = a_node()
    near = evolve(node, gpu=evolve(node.gpu, topology=Topology({(0, 1): "PIX"}, {}, "sysfs")))
    gpu = node_json(near, source="local")["gpu"]
    assert gpu["topology"] is None and gpu["nearness"]["gpu_gpu"] == "PIX"


def test_pairs_that_differ_have_no_common_link_but_sets() -> None:
    node = a_node()
    links = {(0, 1): "NV4", (2, 3): "NV4", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"}
    topology = node_json(evolve(node, gpu=evolve(node.gpu, topology=Topology(links))), source="local")["gpu"][
        "topology"
    ]
    assert topology["gpu_gpu"] is None and topology["nvlink_sets"] == [[0, 1], [2, 3]]


def test_holders_and_reasons_stand_beside_the_bare_list_of_processes() -> None:
    ours, unknown = GpuHolder(7, None, "llmgw", "VLLM::Worker", "llama"), GpuHolder(8, 3, is_unknown=True)
    answer = printed(card=Availability("GPU-0", "held by pid 8 (not visible)", 5, (ours, unknown)))
    first, second = answer["gpu"]["gpus"]
    assert first["processes"] == [[7, None], [8, 3]]
    assert [(holder["shard"], holder["ours"]) for holder in first["holders"]] == [("llama", True), (None, None)]
    assert (first["assignable"], first["why_not"]) == (False, "held by pid 8 (not visible)")
    assert (second["assignable"], second["why_not"]) == (None, None)
    assert read_holders(answer) == {"GPU-0": (ours, unknown), "GPU-1": (), "MIG-a": ()}


def test_a_quarantine_is_kept_with_its_words() -> None:
    why = "not released after llama ended"
    answer = printed(
        card=Availability("GPU-0", why, 5, hindrance=Hindrance.QUARANTINED),
        slice=Availability("MIG-a", "uncorrected ECC", None, hindrance=Hindrance.UNHEALTHY),
    )
    assert read_quarantined(answer) == {"GPU-0": why}
    assert answer["gpu"]["mig_assignable"]["MIG-a"]["hindrance"] == "unhealthy"


def test_a_hand_written_fabric_may_have_all_in_one_place() -> None:
    answer = printed()
    answer["fabric"] = {
        "fabrics": [{"kind": "infiniband", "ports": ["a_0:1"], "driver": "hfi1", "pkeys": ["0x7fff"]}],
        "identities": [{}, {}],
    }
    (fabric,) = read_node(answer).fabric.fabrics
    assert (fabric.driver, fabric.pkeys) == ("hfi1", ("0x7fff",))


def changed(answer: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    found: Any = answer
    *way, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    for part in way:
        found = found[part]
    found[last] = value
    return answer


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("api", 2, '"api": 1'),
        ("node", None, "node is missing"),
        ("node", 3, "node is '3', not a text"),
        ("gpu", [], "gpu is no object"),
        ("gpu", None, "gpu is missing"),
        ("gpu.status", "fine", "gpu.status is 'fine', not one of ok, partial, error"),
        ("gpu.status", "error", "gpu.error_kind does not go with status 'error'"),
        ("gpu.gpus", {}, "gpu.gpus is no list"),
        ("gpu.gpus.1", "x", "gpu.gpus[1] is no object"),
        ("gpu.gpus.1.index", True, "gpu.gpus[1].index is 'True', not a whole number"),
        ("gpu.gpus.0.memory_total_mib", "80 GiB", "gpu.gpus[0].memory_total_mib is '80 GiB', not a whole number"),
        ("gpu.gpus.0.memory_total_mib", 1 << 70, "gpu.gpus[0].memory_total_mib is "),
        ("gpu.gpus.0.compute_cap", "nine", "gpu.gpus[0].compute_cap is 'nine'"),
        ("gpu.gpus.0.processes", [[1]], "gpu.gpus[0].processes holds '[1]'"),
        ("gpu.gpus.0.processes", [[-1, 3]], "gpu.gpus[0].processes holds '[-1, 3]'"),
        ("gpu.gpus.0.health_flags", ["tired"], "gpu.gpus[0].health_flags holds 'tired'"),
        ("gpu.lost.0.bus_id", None, "gpu.lost[0].bus_id is missing"),
        ("gpu.mig_instances.0.uuid", None, "gpu.mig_instances[0].uuid is missing"),
        ("gpu.topology.links", {"0": "SYS"}, "gpu.topology.links holds '0'"),
        ("gpu.topology.nearest_nic", {"zero": "a"}, "gpu.topology.nearest_nic holds 'zero'"),
        ("gpu.stale", {"since": 1}, "gpu.stale.error_kind is missing"),
        ("fabric.ports.0.kind", "token ring", "fabric.ports[0].kind is 'token ring'"),
        ("fabric.ports.0.rate_gbps", float("nan"), "fabric.ports[0].rate_gbps is 'nan', not a number"),
        ("fabric.fabrics.0.ports", ["mlx5_0"], "fabric.fabrics[0].ports holds 'mlx5_0'"),
        ("fabric.identities.0.pkeys", ["all"], "fabric.identities[0].pkeys holds 'all'"),
        ("host.memory_total_mib", 1.5, "host.memory_total_mib is '1.5', not a whole number"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(place: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match="not an inventory: ") as caught:
        read_node(changed(printed(), place, value))
    assert said in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, entry in pairs for found in ((*way, key), *places(entry, (*way, key)))]


PRINTED = printed(card=Availability("GPU-0", None, 5, (GpuHolder(7, 3, shard="llama"),)))


@given(st.sampled_from(places(PRINTED)), json_values)
def test_no_file_does_more_than_be_refused(place: tuple[Any, ...], value: Any) -> None:
    answer = copy.deepcopy(PRINTED)
    found: Any = answer
    for part in place[:-1]:
        found = found[part]
    found[place[-1]] = value
    for read in (read_node, read_holders, read_quarantined):
        assert refusal(read, answer).startswith("not an inventory: ")


def refusal(read: Callable[[object], object], answer: object) -> str:
    try:
        read(answer)
    except ValueError as error:
        return str(error)
    return "not an inventory: it is one"
