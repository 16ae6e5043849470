"""The NCCL environment of an instance that spans nodes. Pure; an instance on one node gets none of it.

One list of ports of one fabric, in exact form: with a port that its peers cannot reach a job hangs for half a minute
and more before it fails, and with InfiniBand and RoCE mixed NCCL gives up at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Literal

from attrs import field, frozen

from llmgw.domain.fabric import FULL_MEMBER, NCCL_PORTS_MAX, PARTITION, Fabric, PortKind
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec

FAMILY = ("NCCL_", "GLOO_", "UCX_")
"""Variables of `env` with such a beginning are the operator's own word on the network and win."""

HOST_ADDRESS: Mapping[EngineKind, str] = {EngineKind.VLLM: "VLLM_HOST_IP", EngineKind.SGLANG: "SGLANG_HOST_IP"}
"""Where an engine reads its own address. Unset, it guesses one from a route or from the host's name."""

_INTERFACE = re.compile(r"[^\s/:,=^]{1,15}")
"""A name that a list of NCCL can hold; the kernel allows 15 bytes."""

Transport = Literal["fabric", "sockets"]


@frozen
class Variable:
    """One variable and why it is set, in words."""

    name: str
    value: str
    why: str


@frozen
class NcclEnvironment:
    """What llmgw sets, in order, and which of it (or of NCCL's further variables) `env` of the shard overrides."""

    variables: tuple[Variable, ...] = ()
    overrides: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What else somebody should know, such as files that NCCL reads by itself."""

    @property
    def values(self) -> Mapping[str, str]:
        return {variable.name: variable.value for variable in self.variables}


def multi_node_env(
    spec: ShardSpec,
    fabric: Fabric | None,
    *,
    address: str | None,
    interface: str | None,
    transport: Transport = "fabric",
    peers: Sequence[Fabric] = (),
    nccl_files: tuple[str, ...] = (),
) -> NcclEnvironment | Problem:
    """The variables of one rank on one node; none for an instance on one node.

    `fabric` is the one that all nodes of the instance share, with this node's ports; None: there is none. `peers` is
    the same one with the ports of each other node. `transport` `sockets` is the operator's choice (`[node] fabric =
    "none"`, or `NCCL_IB_DISABLE = "1"` in the shard's `env`). `address` and `interface` are those by which the other
    nodes reach this one.
    """
    if spec.nodes == 1:
        return NcclEnvironment()
    unreachable = _unreachable(address, interface)
    if unreachable is not None or address is None or interface is None:
        hint = "write [node] address: an address of this node in a network that the other nodes are in"
        return _refuse(spec, "no-address", str(unreachable), hint)
    found: list[Variable] = []
    own = _own_transport(spec)
    if own == "plugin":
        # Adapters such as EFA are used by a plugin alone, which has variables of its own.
        pass
    elif own == "sockets" or transport == "sockets":
        why = "in env, traffic goes over sockets" if own else '[node] fabric = "none": traffic goes over sockets'
        found.append(Variable("NCCL_IB_DISABLE", "1", why))
    elif fabric is None or not fabric.ports:
        return _refuse(
            spec,
            "no-common-fabric",
            "its nodes share no fabric",
            "place it on nodes of one island (`llmgw inventory FILE ...` shows them); or for plain sockets, which are "
            'slow, write [node] fabric = "none" and one name as island on each of them',
        )
    else:
        partition = _common_partition((fabric, *peers))
        index = 0 if partition is None else _index(fabric, partition)
        if partition == 0:
            text = "its nodes share a fabric, but no partition in which all of them can talk"
            return _refuse(spec, "no-common-fabric", text, "ask whoever runs the subnet manager for a common partition")
        if index is None:
            text = f"the ports of this node have partition 0x{partition:04x} at different places of their tables"
            return _refuse(spec, "no-common-fabric", text, "name ports that agree in [node] fabric")
        found += _of_fabric(fabric, partition, index)
    why = f"{interface} has {address}, by which the other nodes reach this one"
    # The bootstrap goes over sockets also where the data does not, and guesses an interface when told none.
    found.append(Variable("NCCL_SOCKET_IFNAME", f"={interface}", why))
    found.append(Variable("GLOO_SOCKET_IFNAME", interface, why))
    if spec.engine in HOST_ADDRESS:
        found.append(Variable(HOST_ADDRESS[spec.engine], address, why))
    overrides = tuple(
        sorted(name for name in spec.env if name.startswith(FAMILY) or name in {variable.name for variable in found})
    )
    return NcclEnvironment(tuple(found), overrides, tuple(_notes(spec, fabric, found, nccl_files)))


def _of_fabric(fabric: Fabric, partition: int | None, index: int) -> list[Variable]:
    kind = "InfiniBand" if fabric.kind is PortKind.INFINIBAND else "RoCE"
    count = min(len(fabric.ports), NCCL_PORTS_MAX)
    assert fabric.nccl_hca is not None
    why = f"the {count} port{'s' * (count > 1)} of the one {kind} fabric that its nodes share, by exact name"
    found = [Variable("NCCL_IB_HCA", fabric.nccl_hca, why)]
    found += [Variable(name, value, "the fabric has IPv6 addresses only") for name, value in fabric.nccl_extra.items()]
    if partition is not None and index > 0:
        # NCCL takes an index into the ports' tables, which may differ between nodes.
        why = f"its nodes share the partition 0x{partition:04x}, which is not the first of this node"
        found.append(Variable("NCCL_IB_PKEY", str(index), why))
    return found


def _own_transport(spec: ShardSpec) -> Literal["sockets", "plugin"] | None:
    """What the shard's `env` says about the transport."""
    disabled, net, plugin = (spec.env.get(name) for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN"))
    if disabled == "1" or (isinstance(net, str) and net.lower() == "socket"):
        return "sockets"
    if (isinstance(net, str) and net.lower() != "ib") or (isinstance(plugin, str) and plugin not in ("", "none")):
        return "plugin"
    return None


def _unreachable(address: str | None, interface: str | None) -> str | None:
    """Why other nodes cannot come by this address and interface; None: nothing speaks against it."""
    if address is None:
        return "nobody knows by which address the other nodes reach this one"
    try:
        parsed = ip_address(address)
    except ValueError:
        return f"{address} is no address"
    if parsed.is_loopback or parsed.is_unspecified:
        return f"the other nodes cannot reach {address}"
    if interface is None:
        return f"no interface of this node has {address}"
    if not _INTERFACE.fullmatch(interface):
        return f"NCCL cannot be told the interface {interface!r}"
    return None


def _common_partition(fabrics: Sequence[Fabric]) -> int | None:
    """The partition in which all of these can talk; 0: none. None: the default one will do, or nobody knows better.

    NCCL uses one key for all peers, so that pairs which share different ones do not help. Among two limited members
    there is no traffic.
    """
    if fabrics[0].kind is not PortKind.INFINIBAND or not all(fabric.pkeys for fabric in fabrics):
        return None
    tables = [{int(key, 16) for key in fabric.pkeys} for fabric in fabrics]
    for key in fabrics[0].pkeys:
        partition = int(key, 16) & PARTITION
        full = sum(1 for table in tables if partition | FULL_MEMBER in table)
        if full >= len(tables) - 1 and all({partition, partition | FULL_MEMBER} & table for table in tables):
            return partition
    return 0


def _index(fabric: Fabric, partition: int) -> int | None:
    """Where the partition stands in the tables of this node's ports; None where they differ."""
    places = fabric.pkey_indexes or tuple(range(len(fabric.pkeys)))
    found = [place for key, place in zip(fabric.pkeys, places, strict=False) if int(key, 16) & PARTITION == partition]
    return found[0] if found else None


def _notes(spec: ShardSpec, fabric: Fabric | None, found: list[Variable], nccl_files: Sequence[str]) -> list[str]:
    notes = []
    if fabric is not None and len(fabric.ports) > NCCL_PORTS_MAX and any(v.name == "NCCL_IB_HCA" for v in found):
        notes.append(f"NCCL takes {NCCL_PORTS_MAX} ports at most: {', '.join(fabric.ports[NCCL_PORTS_MAX:])} left out")
    adapters = spec.env.get("NCCL_IB_HCA")
    if isinstance(adapters, str) and not adapters.startswith(("=", "^=")):
        notes.append("NCCL_IB_HCA in env does not begin with =, so mlx5_1 would also mean mlx5_10")
    if "NCCL_IB_GID_INDEX" in spec.env:
        notes.append("NCCL_IB_GID_INDEX in env holds for all adapters and nodes, and their tables often differ")
    # Its setEnvFile does not replace what the environment has (NCCL, src/misc/param.cc).
    notes += [f"NCCL reads {path} by itself: what it sets beside these variables holds too" for path in nccl_files]
    return notes


def _refuse(spec: ShardSpec, code: str, text: str, hint: str) -> Problem:
    return Problem(code, text, hint, spec.written_at("nodes"), context=f'[shard "{spec.name}"]')
