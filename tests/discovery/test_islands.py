"""Which nodes reach each other: composed cases, the rules of partitions and names, and what holds for any nodes."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.discovery.islands import can_talk, common_island, island_names, islands, named_islands
from llmgw.domain.fabric import Fabric, FabricInventory, PortKind

CASES = sorted((Path(__file__).parent / "data" / "islands").glob("*.json"))
PREFIX = "fe80:0000:0000:0000"


def ib(sm_lid: int | None = 1, *pkeys: str, prefix: str | None = PREFIX, **more: Any) -> Fabric:
    return Fabric(PortKind.INFINIBAND, ("mlx5_0:1",), "mlx5_core", 400.0, prefix, sm_lid, pkeys or ("0xffff",), **more)


def roce(*networks: str, **more: Any) -> Fabric:
    return Fabric(PortKind.ROCE, ("mlx5_bond_0:1",), networks=networks, **more)


def nodes(**fabrics: Fabric | tuple[Fabric, ...]) -> list[tuple[str, FabricInventory]]:
    return [
        (name, FabricInventory(fabrics=found if isinstance(found, tuple) else (found,)))
        for name, found in fabrics.items()
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_a_composed_case_has_the_islands_that_it_expects(case: Path) -> None:
    told = json.loads(case.read_text())
    given_nodes = []
    for node in told["nodes"]:
        fabrics = tuple(
            Fabric(
                PortKind(one["kind"]),
                tuple(one["ports"]),
                one.get("driver"),
                subnet_prefix=one.get("subnet_prefix"),
                sm_lid=one.get("sm_lid"),
                pkeys=tuple(one.get("pkeys", ())),
                networks=tuple(one.get("networks", ())),
            )
            for one in node["fabrics"]
        )
        given_nodes.append((node["node"], FabricInventory(fabrics=fabrics)))
    assert {frozenset(one) for one in islands(given_nodes)} == {frozenset(one) for one in told["expected_islands"]}


def test_the_composed_cases_are_there() -> None:
    assert len(CASES) == 3


@pytest.mark.parametrize(
    "other",
    [ib(2), ib(prefix="fec0:0000:0000:0001"), evolve(ib(), driver="hfi1"), ib(1, "0x8001")],
    ids=["manager", "prefix", "driver", "partition"],
)
def test_infiniband_with_one_difference_is_another_fabric(other: Fabric) -> None:
    assert islands(nodes(a=ib(), b=ib(), c=other)) == (("a", "b"), ("c",))


@pytest.mark.parametrize("unknown", [roce(), ib(None), ib(prefix=None)], ids=["networks", "manager", "prefix"])
def test_what_is_unknown_matches_nothing(unknown: Fabric) -> None:
    assert islands(nodes(a=unknown, b=unknown)) == (("a",), ("b",))


def test_limited_members_reach_the_full_one_and_not_each_other() -> None:
    found = islands(nodes(store=ib(1, "0x8001"), a=ib(1, "0x0001"), b=ib(1, "0x0001")))
    assert found == (("a", "store"), ("b", "store"))


def test_each_pair_of_an_island_may_have_a_partition_of_its_own() -> None:
    found = islands(nodes(a=ib(1, "0x8001", "0x8003"), b=ib(1, "0x8001", "0x8002"), c=ib(1, "0x8002", "0x8003")))
    assert found == (("a", "b", "c"),)


def test_a_name_replaces_the_identity_of_the_preferred_fabric_alone() -> None:
    named = (ib(7, island="x"), roce("10.0.0.0/24"))
    found = nodes(a=named, b=(ib(9, island="x"),), c=ib(7), d=roce("10.0.0.0/24"))
    assert islands(found) == (("a", "b"), ("a", "d"), ("c",))
    assert island_names(found)["a"] == {"x", "roce 10.0.0.0/24"}


def test_one_name_never_mixes_infiniband_with_roce_or_sockets() -> None:
    found = [
        *nodes(a=ib(island="x"), b=roce("10.0.0.0/24", island="x")),
        ("c", FabricInventory(sockets=True, sockets_island="x")),
    ]
    assert islands(found) == (("a",), ("b",), ("c",))
    assert {one.name for one in named_islands(found)} == {"x over infiniband", "x over roce", "x over sockets"}


def test_nodes_on_sockets_reach_those_of_their_name_and_are_alone_without_one() -> None:
    lan = FabricInventory(sockets=True, sockets_island="lan")
    found = [("a", lan), ("b", lan), ("c", FabricInventory(sockets=True)), ("d", FabricInventory(sockets=True))]
    assert islands(found) == (("a", "b"), ("c",), ("d",))
    shared = common_island(found, ["a", "b"])
    assert shared is not None and shared.fabrics == {} and shared.of("a", lan) is None


def test_a_node_with_the_same_networks_at_two_rates_is_in_the_island_once() -> None:
    found = nodes(a=(roce("10.0.0.0/24"), evolve(roce("10.0.0.0/24"), ports=("x:1",))), b=roce("10.0.0.0/24"))
    assert [one.nodes for one in named_islands(found)] == [("a", "b")]
    assert named_islands(found)[0].fabrics == {"a": 0, "b": 0}


def test_a_node_in_two_partitions_by_two_fabrics_is_in_both_islands() -> None:
    found = islands(nodes(a=(ib(1, "0x8001"), ib(1, "0x8002")), b=ib(1, "0x8001"), c=ib(1, "0x8002")))
    assert found == (("a", "b"), ("a", "c"))


def test_the_common_fabric_of_a_group_is_the_one_that_its_nodes_prefer() -> None:
    both = (ib(), roce("10.0.0.0/24"))
    found = nodes(a=both, b=both, c=(roce("10.0.0.0/24"),))
    ab, ac = common_island(found, ["b", "a"]), common_island(found, ["a", "c"])
    assert ab is not None and ab.fabrics == {"a": 0, "b": 0} and ab.of("a", found[0][1]) == both[0]
    assert ac is not None and ac.fabrics["a"] == 1 and ac.fabrics["c"] == 0
    assert common_island(nodes(b=ib(), c=roce("10.0.0.0/24")), ["b", "c"]) is None


FABRICS = st.one_of(
    st.builds(
        lambda sm, keys, name: ib(sm, *keys, island=name),
        st.sampled_from([None, 1, 2]),
        st.lists(st.sampled_from(["0xffff", "0x7fff", "0x8001", "0x0001", "0x8002"]), max_size=3, unique=True),
        st.sampled_from([None, "x"]),
    ),
    st.builds(
        lambda networks, name: roce(*networks, island=name),
        st.lists(st.sampled_from(["10.0.0.0/24", "10.1.0.0/24"]), max_size=2, unique=True),
        st.sampled_from([None, "x"]),
    ),
)
INVENTORIES = st.one_of(
    st.lists(FABRICS, max_size=3).map(lambda found: FabricInventory(fabrics=tuple(found))),
    st.builds(FabricInventory, sockets=st.just(True), sockets_island=st.sampled_from([None, "x"])),
)
NODES = st.dictionaries(st.sampled_from("abcdefgh"), INVENTORIES, max_size=7)


def pair_can_talk(one: FabricInventory, other: FabricInventory) -> bool:
    """The rule for two nodes, written down a second time and plainly."""
    if one.sockets and other.sockets:
        return one.sockets_island is not None and one.sockets_island == other.sockets_island
    for a in one.fabrics:
        for b in other.fabrics:
            if a.kind is not b.kind or a.island != b.island:
                continue
            if a.kind is PortKind.ROCE:
                same = a.island is not None or (a.networks == b.networks and bool(a.networks))
            else:
                key = (a.driver, a.subnet_prefix, a.sm_lid)
                same = a.island is not None or (key == (b.driver, b.subnet_prefix, b.sm_lid) and a.sm_lid is not None)
                keys = [frozenset(int(key, 16) for key in c.pkeys or ("0xffff",)) for c in (a, b)]
                same = same and can_talk(*keys)
            if same:
                return True
    return False


@given(NODES, st.randoms(use_true_random=False))
def test_islands_hold_everybody_in_any_order_and_only_pairs_that_can_talk(
    given_nodes: dict[str, FabricInventory], chance: random.Random
) -> None:
    listed = list(given_nodes.items())
    found = islands(listed)
    chance.shuffle(listed)
    assert islands(listed) == found
    assert {node for one in found for node in one} == set(given_nodes)
    for one in found:
        assert len(set(one)) == len(one)
        for a, b in combinations(one, 2):
            assert pair_can_talk(given_nodes[a], given_nodes[b]) and pair_can_talk(given_nodes[b], given_nodes[a])


@given(NODES)
def test_two_nodes_with_one_fabric_each_that_can_talk_are_in_one_island(
    given_nodes: dict[str, FabricInventory],
) -> None:
    listed = [(node, evolve(found, fabrics=found.fabrics[:1])) for node, found in given_nodes.items()]
    together = {pair for one in islands(listed) for pair in combinations(sorted(one), 2)}
    for (a, one), (b, other) in combinations(sorted(listed, key=lambda entry: entry[0]), 2):
        assert ((a, b) in together) == pair_can_talk(one, other)


@given(NODES)
def test_the_names_of_two_nodes_meet_exactly_when_an_island_has_both(given_nodes: dict[str, FabricInventory]) -> None:
    listed = list(given_nodes.items())
    names = island_names(listed)
    assert set(names) == set(given_nodes) and all(names.values())
    assert len({one.name for one in named_islands(listed)}) == len(named_islands(listed))
    for a, b in combinations(given_nodes, 2):
        assert bool(names[a] & names[b]) == (common_island(listed, [a, b]) is not None)
