"""What NCCL is told: one fabric, exact names, never an empty list, and nothing at all on one node."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.fabric import Fabric, PortKind
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec
from llmgw.engines.adapter import build_command
from llmgw.engines.nccl import NcclEnvironment, multi_node_env
from tests.engines.plans import make_plan

SPEC = ShardSpec("big", "m", EngineKind.VLLM, ("vllm", "serve"), "h", gpus=16, nodes=2)
IB = Fabric(
    PortKind.INFINIBAND,
    ("mlx5_1:1", "mlx5_4:1"),
    driver="mlx5_core",
    pkeys=("0xffff", "0x8001"),
    pkey_indexes=(0, 3),
)
ROCE6 = Fabric(PortKind.ROCE, ("mlx5_bond_0:1",), ipv6_only=True)


def env(spec: ShardSpec = SPEC, fabric: Fabric | None = IB, **keys: object) -> NcclEnvironment:
    found = multi_node_env(spec, fabric, **{"address": "10.0.0.5", "interface": "bond0", **keys})  # type: ignore[arg-type]
    assert isinstance(found, NcclEnvironment), found
    return found


def problem(fabric: Fabric | None = IB, **keys: object) -> Problem:
    found = multi_node_env(SPEC, fabric, **{"address": "10.0.0.5", "interface": "bond0", **keys})  # type: ignore[arg-type]
    assert isinstance(found, Problem), found
    return found


def test_ports_of_one_fabric_are_named_exactly_and_all_sockets_use_the_interface_of_the_address() -> None:
    assert env().values == {
        # mlx5_1 as a prefix would take mlx5_10 too.
        "NCCL_IB_HCA": "=mlx5_1:1,mlx5_4:1",
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "VLLM_HOST_IP": "10.0.0.5",
    }
    assert all(variable.why for variable in env().variables)


def test_an_instance_on_one_node_is_told_nothing() -> None:
    assert env(evolve(SPEC, nodes=1)) == NcclEnvironment()


def test_sglang_is_told_its_address_by_its_own_name() -> None:
    values = env(evolve(SPEC, engine=EngineKind.SGLANG)).values
    assert values["SGLANG_HOST_IP"] == "10.0.0.5" and "VLLM_HOST_IP" not in values


def test_a_fabric_with_ipv6_alone_says_so_and_no_gid_index_is_ever_set() -> None:
    values = env(fabric=ROCE6).values
    assert values["NCCL_IB_ADDR_FAMILY"] == "AF_INET6"
    assert "NCCL_IB_GID_INDEX" not in values


def test_without_a_common_fabric_it_is_refused_unless_sockets_are_chosen() -> None:
    assert problem(None).code == "no-common-fabric"
    assert problem(Fabric(PortKind.ROCE, ())).code == "no-common-fabric"
    values = env(fabric=None, transport="sockets").values
    assert values["NCCL_IB_DISABLE"] == "1" and "NCCL_IB_HCA" not in values


@pytest.mark.parametrize(
    ("address", "interface", "words"),
    [
        (None, "bond0", "nobody knows"),
        ("10.0.0.5", None, "no interface"),
        ("127.0.1.1", "lo", "cannot reach 127.0.1.1"),
        ("::1", "lo", "cannot reach"),
        ("0.0.0.0", "bond0", "cannot reach"),
        ("gpu-01", "bond0", "is no address"),
        ("10.0.0.5", "^docker0,lo", "cannot be told"),
    ],
)
def test_without_an_address_that_others_reach_it_is_refused(
    address: str | None, interface: str | None, words: str
) -> None:
    found = problem(address=address, interface=interface)
    assert found.code == "no-address" and words in found.message and "[node] address" in str(found.hint)


@pytest.mark.parametrize("own", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}])
def test_the_operator_may_choose_sockets_for_one_shard(own: dict[str, str]) -> None:
    values = env(evolve(SPEC, env=own), fabric=None).values
    assert values["NCCL_IB_DISABLE"] == "1" and values["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert "NCCL_IB_HCA" not in env(evolve(SPEC, env=own)).values


def test_with_a_plugin_of_the_operator_adapters_are_its_business() -> None:
    found = env(evolve(SPEC, env={"NCCL_NET_PLUGIN": "aws-ofi"}), fabric=None)
    assert set(found.values) == {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"}
    assert found.overrides == ("NCCL_NET_PLUGIN",)


def test_a_prefix_list_and_a_gid_index_of_the_operator_stand_with_a_note() -> None:
    found = env(evolve(SPEC, env={"NCCL_IB_HCA": "mlx5_1", "NCCL_IB_GID_INDEX": "3"}))
    assert found.overrides == ("NCCL_IB_GID_INDEX", "NCCL_IB_HCA")
    assert any("mlx5_10" in note for note in found.notes) and any("GID_INDEX" in note for note in found.notes)


def test_what_the_operator_sets_wins_and_is_named() -> None:
    spec = evolve(SPEC, env={"NCCL_IB_GID_INDEX": "3", "NCCL_SOCKET_IFNAME": "=ens5", "HF_HOME": "/x"})
    found = env(spec)
    assert found.overrides == ("NCCL_IB_GID_INDEX", "NCCL_SOCKET_IFNAME")
    launched = make_plan(EngineKind.VLLM, env=spec.env)
    command = build_command(evolve(launched, group_env=dict(found.values)))
    assert command.env["NCCL_SOCKET_IFNAME"] == "=ens5"
    assert command.env["NCCL_IB_HCA"] == "=mlx5_1:1,mlx5_4:1"
    assert command.origins["NCCL_IB_HCA"] == "generated"


def test_files_that_nccl_reads_itself_are_told() -> None:
    assert "/etc/nccl.conf" in env(nccl_files=("/etc/nccl.conf",)).notes[0]


def of(*keys: str) -> Fabric:
    return evolve(IB, pkeys=keys, pkey_indexes=())


def test_a_shared_partition_that_is_not_the_first_is_told_by_its_index_in_the_table() -> None:
    assert env(peers=(of("0x8001"),)).values["NCCL_IB_PKEY"] == "3"
    assert "NCCL_IB_PKEY" not in env(peers=(of("0xffff"),)).values
    assert "NCCL_IB_PKEY" not in env(peers=(of(),)).values
    # A limited member writes its key otherwise, and it is the same partition.
    assert env(fabric=evolve(IB, pkeys=("0xffff", "0x0001")), peers=(of("0x8001"),)).values["NCCL_IB_PKEY"] == "3"


@pytest.mark.parametrize(
    "others",
    [(of("0x8002"),), (of("0x7fff"), of("0x7fff")), (of("0xffff"), of("0x8001"))],
    ids=["none shared", "two limited members", "each pair another one"],
)
def test_without_one_partition_for_all_nodes_it_is_refused(others: tuple[Fabric, ...]) -> None:
    found = problem(peers=others)
    assert found.code == "no-common-fabric" and "partition" in found.message


def test_a_partition_that_no_one_index_names_is_refused() -> None:
    found = problem(evolve(IB, pkey_indexes=(0, None)), peers=(of("0x8001"),))
    assert found.code == "no-common-fabric" and "[node] fabric" in str(found.hint)


@given(st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,12}:[1-9]", fullmatch=True), min_size=1, max_size=40, unique=True))
def test_the_list_is_exact_never_empty_and_never_longer_than_nccl_takes(ports: list[str]) -> None:
    value = env(fabric=Fabric(PortKind.INFINIBAND, tuple(ports))).values["NCCL_IB_HCA"]
    assert value.startswith("=") and value.count("=") == 1
    named = value[1:].split(",")
    assert named == ports[:32]
    assert bool(env(fabric=Fabric(PortKind.INFINIBAND, tuple(ports))).notes) == (len(ports) > 32)
