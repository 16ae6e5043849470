"""Facts about the node's network for engines that span nodes: RDMA ports, and the fabrics they make up."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

NCCL_PORTS_MAX = 32
"""Ports that NCCL takes at most (MAX_IB_DEVS in its net_ib.cc)."""

FULL_MEMBER, PARTITION = 0x8000, 0x7FFF
"""Parts of an InfiniBand partition key: the top bit marks a full member, the others name the partition."""


class PortKind(StrEnum):
    """By the link layer: software devices count as RoCE, EFA and unknown ones as other."""

    INFINIBAND = "infiniband"
    ROCE = "roce"
    OTHER = "other"


@frozen
class FabricPort:
    """One port of an RDMA device. Everything optional is None where sysfs did not say."""

    device: str
    port: int
    kind: PortKind
    state: str | None
    """`ACTIVE`, `DOWN`, `INIT`, ...: the name behind the number."""
    rate_gbps: float | None
    usable: bool
    """NCCL can use it for traffic between nodes."""
    reason: str | None = None
    """Why it is not usable, for people."""
    subnet_prefix: str | None = None
    """InfiniBand: the upper 64 bits of GID 0, as four groups of hex digits."""
    sm_lid: int | None = None
    lid: int | None = None
    ipv4: str | None = None
    ipv6: str | None = None
    """RoCE: the address of the chosen GID, compressed; only one of the two is set."""
    gid_index: int | None = None
    """RoCE v2: index of the chosen GID. It differs between ports and nodes, so it never becomes a variable."""
    network: str | None = None
    """RoCE: the network of that address, None where its prefix length is unknown."""
    netdev: str | None = None
    pci: str | None = None
    numa: int | None = None
    driver: str | None = None
    pkeys: tuple[str, ...] = ()
    """InfiniBand: the partition keys that are set, as `0xffff`, in the order of the table."""
    pkey_indexes: tuple[int, ...] = ()
    """Where in the table each of `pkeys` stands."""

    @property
    def label(self) -> str:
        """The name that NCCL_IB_HCA takes."""
        return f"{self.device}:{self.port}"


@frozen
class Fabric:
    """Usable ports of one node that reach the same network. What identifies it between nodes is its key."""

    kind: PortKind
    ports: tuple[str, ...]
    """`device:port`, in natural order."""
    driver: str | None = None
    rate_gbps: float | None = None
    """Of all ports together."""
    subnet_prefix: str | None = None
    sm_lid: int | None = None
    pkeys: tuple[str, ...] = ()
    """InfiniBand: partitions that all ports are in, with the top bit set where all are full members. Empty: unknown."""
    pkey_indexes: tuple[int | None, ...] = ()
    """Where in the ports' tables each of `pkeys` stands; None where ports differ, so that no one index serves."""
    networks: tuple[str, ...] = ()
    """RoCE: sorted as text. Empty where a network is unknown: then it matches no other node."""
    ipv6_only: bool = False
    """RoCE: no port has an IPv4 address, which NCCL must be told."""
    island: str | None = None
    """The operator's name for it (`[node] island`), which replaces what identifies it otherwise."""

    @property
    def nccl_hca(self) -> str | None:
        """The value of NCCL_IB_HCA: exact names with ports. Without the leading `=` NCCL takes names as prefixes, and
        mlx5_1 would also take mlx5_10; an empty list would take every device (NCCL's user guide). None: no ports."""
        return "=" + ",".join(self.ports[:NCCL_PORTS_MAX]) if self.ports else None

    @property
    def nccl_extra(self) -> dict[str, str]:
        """What else NCCL must be told about this fabric: where RoCE has IPv6 addresses only, it would stay at the
        link-local GID and time out."""
        return {"NCCL_IB_ADDR_FAMILY": "AF_INET6"} if self.ipv6_only else {}


@frozen
class FabricInventory:
    """All ports and fabrics of one node, the best fabric first. No adapter at all is a normal node."""

    ports: tuple[FabricPort, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    unreadable_devices: tuple[str, ...] = ()
    sockets: bool = False
    """The operator wants plain sockets between nodes (`[node] fabric = "none"`): there is no fabric then."""
    sockets_island: str | None = None
    """With sockets: nodes of this name reach each other (`[node] island`); None: this node is alone."""

    @property
    def preferred(self) -> Fabric | None:
        """The one that shards over several nodes use."""
        return self.fabrics[0] if self.fabrics else None
