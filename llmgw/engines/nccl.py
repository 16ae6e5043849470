"""The NCCL environment of an instance that spans nodes. Pure; an instance on one node gets none of it.

One list of ports of one fabric, in exact form: with a port that its peers cannot reach a job hangs for half a minute
and more before it fails, and with InfiniBand and RoCE mixed NCCL gives up at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from llmgw.domain.fabric import Fabric, PortKind
from llmgw.domain.problem import Problem
from llmgw.domain.shard import EngineKind, ShardSpec

FAMILY = ("NCCL_", "GLOO_", "UCX_")
"""Variables of `env` with such a beginning are the operator's own word on the network and win."""

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
    pkey: str | None = None,
    nccl_files: tuple[str, ...] = (),
) -> NcclEnvironment | Problem:
    """The variables of one rank on one node; none for an instance on one node.

    `fabric` is the one that all nodes of the instance share, with this node's ports; None: there is none. `transport`
    `sockets` is the operator's choice (`[node] fabric = "none"`). `address` and `interface` are those by which the
    other nodes reach this one. `pkey` is the partition key that the nodes share, where it is another than the first.
    """
    if spec.nodes == 1:
        return NcclEnvironment()
    if address is None or interface is None:
        return _refuse(
            spec,
            "no-address",
            "nobody knows by which address the other nodes reach this one",
            "write [node] address",
        )
    found: list[Variable] = []
    if transport == "sockets":
        found.append(Variable("NCCL_IB_DISABLE", "1", '[node] fabric = "none": traffic goes over sockets'))
    elif fabric is None or not fabric.ports:
        return _refuse(
            spec,
            "no-common-fabric",
            "its nodes share no fabric",
            'place it on nodes of one island (llmgw inventory FILE ... shows them), or write [node] fabric = "none" on '
            "each of them to use plain sockets, which is slow",
        )
    else:
        found += _of_fabric(fabric, pkey)
    why = f"{interface} has {address}, by which the other nodes reach this one"
    # The bootstrap goes over sockets also where the data does not, and guesses an interface when told none.
    found.append(Variable("NCCL_SOCKET_IFNAME", f"={interface}", why))
    found.append(Variable("GLOO_SOCKET_IFNAME", interface, why))
    if spec.engine is EngineKind.VLLM:
        found.append(Variable("VLLM_HOST_IP", address, why))
    overrides = tuple(
        sorted(name for name in spec.env if name.startswith(FAMILY) or name in {variable.name for variable in found})
    )
    notes = tuple(f"{path} is read by NCCL itself and may override these" for path in nccl_files)
    return NcclEnvironment(tuple(found), overrides, notes)


def _of_fabric(fabric: Fabric, pkey: str | None) -> list[Variable]:
    kind = "InfiniBand" if fabric.kind is PortKind.INFINIBAND else "RoCE"
    count = len(fabric.ports)
    found = [
        Variable(
            "NCCL_IB_HCA",
            fabric.nccl_hca,
            f"the {count} port{'s' * (count > 1)} of the one {kind} fabric that its nodes share, by exact name",
        )
    ]
    found += [Variable(name, value, "the fabric has IPv6 addresses only") for name, value in fabric.nccl_extra.items()]
    if pkey is not None and pkey in fabric.pkeys and fabric.pkeys.index(pkey) > 0:
        # NCCL takes an index into the port's table, which differs between nodes.
        index = str(fabric.pkeys.index(pkey))
        found.append(Variable("NCCL_IB_PKEY", index, f"its nodes share the partition {pkey}"))
    return found


def common_pkey(tables: list[tuple[str, ...]]) -> str | None:
    """The partition in which all nodes can talk, as the first of them writes it; None: the default one will do.

    Keys are equal in their low 15 bits, and each pair needs a full member.
    """
    if not tables or any(not table for table in tables):
        return None
    for key in tables[0]:
        low = int(key, 16) & 0x7FFF
        members = [[int(other, 16) for other in table if int(other, 16) & 0x7FFF == low] for table in tables]
        limited = sum(1 for keys in members if keys and not any(number & 0x8000 for number in keys))
        if all(members) and limited <= 1:
            return key
    return None


def _refuse(spec: ShardSpec, code: str, text: str, hint: str) -> Problem:
    return Problem(code, f'shard "{spec.name}" nodes: {text}', hint, spec.written_at("nodes"))
