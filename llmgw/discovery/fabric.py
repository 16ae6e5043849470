"""RDMA ports and fabrics out of what sysfs holds. Pure; nothing here raises on any content.

The kind of a port is never inferred from the device's name. A port counts as usable only when everything that NCCL
needs of it was read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface, ip_interface, ip_network
from typing import Literal

from attrs import evolve, frozen

from llmgw.discovery.natural import natural
from llmgw.domain.display import neutralise
from llmgw.domain.fabric import FULL_MEMBER, PARTITION, Fabric, FabricInventory, FabricPort, PortKind

ROCE_V2 = "RoCE v2"

_STATE = re.compile(r"\d+:\s*([A-Z_]{1,32})", re.ASCII)
_RATE = re.compile(r"(\d{1,6}(?:\.\d)?) Gb/sec(?: \(.{0,64}\))?", re.ASCII)
_HEX = re.compile(r"0x([0-9a-fA-F]{1,8})", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,5})", re.ASCII)
_PCI = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", re.ASCII)
_DEVICE = re.compile(r"[A-Za-z0-9_.-]{1,63}", re.ASCII)
"""A name that a list of NCCL can hold: `:`, `,`, `=` and `^` have a meaning there."""
_LINK_LOCAL = (ip_network("fe80::/10"), ip_network("169.254.0.0/16"))
_GID = re.compile(r"[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){7}", re.ASCII)

WHY_NOT_ACTIVE: Mapping[str, str] = {
    "DOWN": "the port is down: no cable, or the other end is off",
    "INIT": "the link is up, but no subnet manager has set it up",
    "ARMED": "the subnet manager has not finished with it",
}


@frozen
class RawGid:
    """One entry of a GID table; type and netdev are None where they could not be read (empty slots, InfiniBand)."""

    index: int
    gid: str
    type: str | None = None
    netdev: str | None = None


@frozen
class RawPort:
    """Contents of the files of one port, without the trailing newlines; None is unreadable."""

    number: int
    state: str | None = None
    rate: str | None = None
    link_layer: str | None = None
    lid: str | None = None
    sm_lid: str | None = None
    gids: tuple[RawGid, ...] = ()
    pkeys: tuple[tuple[int, str], ...] = ()
    """Index and content."""


@frozen
class RawDevice:
    """One entry of /sys/class/infiniband. `home` is the name of the folder that its device link leads to, the PCI
    address of a real adapter. `software` is True for one that rides on an Ethernet interface, whatever that link
    says: such a device tells its `parent` (rdma_rxe in the kernel)."""

    name: str
    readable: bool = True
    home: str | None = None
    software: bool = False
    driver: str | None = None
    numa_node: str | None = None
    netdevs: tuple[str, ...] = ()
    ports: tuple[RawPort, ...] = ()


def read_devices(devices: Iterable[RawDevice], addresses: Mapping[str, Sequence[str]]) -> FabricInventory:
    """All ports and fabrics. `addresses`: interface -> `address/prefix length`, which sysfs does not tell."""
    ordered = sorted(devices, key=lambda device: natural(device.name))
    networks = _networks(addresses)
    ports = [
        _port(device, port, networks)
        for device in ordered
        if device.readable
        for port in sorted(device.ports, key=lambda port: port.number)
    ]
    return FabricInventory(
        ports=tuple(ports),
        fabrics=_fabrics(ports),
        unreadable_devices=tuple(neutralise(device.name) for device in ordered if not device.readable),
    )


def chosen_fabrics(
    found: FabricInventory, wanted: Literal["auto", "none"] | tuple[str, ...], island: str | None = None
) -> FabricInventory:
    """What `[node] fabric` and `island` make of it: `none` leaves no fabric but sockets, a list only the ports that
    it names. `island` replaces what identifies the preferred fabric, or names those who reach each other by sockets.
    """
    if wanted == "none":
        return evolve(found, fabrics=(), sockets=True, sockets_island=island)
    fabrics = found.fabrics
    if wanted != "auto":
        usable = [port for port in found.ports if port.device in wanted or port.label in wanted]
        fabrics = _fabrics(usable)
    if island is not None and fabrics:
        fabrics = (evolve(fabrics[0], island=island), *fabrics[1:])
    return evolve(found, fabrics=fabrics)


def port_hindrance(found: FabricInventory, wanted: str) -> str | None:
    """Why an entry of `[node] fabric`, `device` or `device:port`, names nothing that engines can use; None: it does."""
    named = [port for port in found.ports if wanted in (port.device, port.label)]
    if any(port.usable for port in named):
        return None
    if len(named) == 1:
        return named[0].reason
    if named:
        return "; ".join(dict.fromkeys(f"{port.label}: {port.reason}" for port in named))
    if wanted.partition(":")[0] in found.unreadable_devices:
        return "the device is listed, but it cannot be read"
    others = [port.label for port in found.ports if port.device == wanted.partition(":")[0]]
    return f"the device has {', '.join(others)}" if others else "there is no such device"


# -- one port -------------------------------------------------------------------------------------------------


def _port(device: RawDevice, raw: RawPort, networks: Mapping[str, str]) -> FabricPort:
    kind = {"InfiniBand": PortKind.INFINIBAND, "Ethernet": PortKind.ROCE}.get(raw.link_layer or "", PortKind.OTHER)
    state = _first(_STATE, raw.state)
    active = state == "ACTIVE"
    rate = _first(_RATE, raw.rate)
    numa = raw_number(device.numa_node)
    port = FabricPort(
        device=neutralise(device.name),
        port=raw.number,
        kind=kind,
        state=state,
        rate_gbps=float(rate) if rate is not None else None,
        usable=False,
        netdev=neutralise(device.netdevs[0]) if device.netdevs and kind is PortKind.ROCE else None,
        pci=device.home if device.home is not None and _PCI.fullmatch(device.home) else None,
        numa=numa if numa is not None and numa >= 0 else None,
        driver=neutralise(device.driver) if device.driver is not None else None,
    )
    reason = _unusable(port, device)
    if kind is PortKind.INFINIBAND:
        prefix = _prefix(raw.gids)
        keys = [(index, key.strip().lower()) for index, key in raw.pkeys if 0 < (_hex(key) or 0) <= 0xFFFF]
        port = evolve(
            port,
            # A port without a subnet manager answers with numbers that mean nothing.
            subnet_prefix=prefix if active else None,
            sm_lid=_hex(raw.sm_lid) if active else None,
            lid=_hex(raw.lid) if active else None,
            pkeys=tuple(key for _, key in keys),
            pkey_indexes=tuple(index for index, _ in keys),
        )
        if reason is None and port.subnet_prefix is None:
            reason = "its GID 0 cannot be read, so nobody knows which fabric it is on"
    elif kind is PortKind.ROCE:
        chosen = _choose_gid(raw.gids)
        if chosen is not None:
            gid, address = chosen
            port = evolve(
                port,
                ipv4=str(address) if isinstance(address, IPv4Address) else None,
                ipv6=address.compressed if isinstance(address, IPv6Address) else None,
                gid_index=gid.index,
                network=networks.get(address.compressed),
                netdev=neutralise(gid.netdev) if gid.netdev else port.netdev,
            )
        elif reason is None:
            reason = "no RoCE v2 address that can be routed: its interface has none, or only a link-local one"
    return evolve(port, usable=reason is None, reason=reason)


def _unusable(port: FabricPort, device: RawDevice) -> str | None:
    if port.kind is PortKind.OTHER:
        if port.driver == "efa":
            return "EFA is nothing that NCCL uses by itself: it needs the aws-ofi-nccl plugin"
        return "neither InfiniBand nor Ethernet: NCCL does not use it"
    if port.pci is None or device.software:
        return "a software device: there is no adapter behind it"
    if not _DEVICE.fullmatch(device.name):
        return "NCCL cannot be told this name"
    if port.state is None:
        return "its state cannot be read"
    if port.state != "ACTIVE":
        return WHY_NOT_ACTIVE.get(port.state, f"its state is {port.state}")
    return None


def _choose_gid(gids: Iterable[RawGid]) -> tuple[RawGid, IPv4Address | IPv6Address] | None:
    """The entry whose address and network stand for the port: RoCE v2, IPv4 before IPv6, lowest index."""
    found: list[tuple[bool, int, RawGid, IPv4Address | IPv6Address]] = []
    for gid in gids:
        if (gid.type or "").strip() != ROCE_V2 or not _GID.fullmatch(gid.gid):
            continue
        address = IPv6Address(gid.gid)
        mapped = address.ipv4_mapped
        # Of IPv4 NCCL takes link-local addresses too; directly connected pairs of nodes are set up so.
        if not int(mapped or address) or (mapped is None and address in _LINK_LOCAL[0]):
            continue
        found.append((mapped is None, gid.index, gid, mapped or address))
    if not found:
        return None
    _, _, gid, chosen = min(found, key=lambda entry: entry[:2])
    return gid, chosen


def _prefix(gids: Iterable[RawGid]) -> str | None:
    first = next((gid.gid for gid in gids if gid.index == 0), None)
    if first is None or not _GID.fullmatch(first) or set(first) <= {"0", ":"}:
        return None
    return first[:19].lower()


def _networks(addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Address -> its network, for every address that has one."""
    found: dict[str, str] = {}
    for texts in addresses.values():
        for text in texts:
            interface = _interface(text)
            # The link-local network is another one behind each cable, so it tells nothing.
            if interface is not None and not any(interface.ip in network for network in _LINK_LOCAL):
                found[interface.ip.compressed] = interface.network.compressed
    return found


def _interface(text: str) -> IPv4Interface | IPv6Interface | None:
    if "/" not in text:
        return None
    try:
        return ip_interface(text.partition("%")[0] + ("/" + text.rpartition("/")[2] if "%" in text else ""))
    except ValueError:
        return None


def _first(pattern: re.Pattern[str], text: str | None) -> str | None:
    match = pattern.fullmatch(text.strip()) if text is not None else None
    return match.group(1) if match else None


def _hex(text: str | None) -> int | None:
    match = _HEX.fullmatch(text.strip()) if text is not None else None
    return int(match.group(1), 16) if match else None


def raw_number(text: str | None) -> int | None:
    """A decimal number with an optional sign; None for anything else."""
    return int(text) if text is not None and _NUMBER.fullmatch(text.strip()) else None


# -- fabrics --------------------------------------------------------------------------------------------------


def _fabrics(ports: Iterable[FabricPort]) -> tuple[Fabric, ...]:
    """Usable ports by what they reach, the best first: by the sum of rates, InfiniBand before RoCE, first device."""
    groups: dict[tuple[object, ...], list[list[FabricPort]]] = {}
    for port in ports:
        if not port.usable:
            continue
        if port.kind is PortKind.INFINIBAND:
            key: tuple[object, ...] = (port.kind, port.driver, port.subnet_prefix, port.sm_lid)
        else:
            key = (port.kind, port.driver, port.rate_gbps)
        alike = groups.setdefault(key, [])
        # Ports that are in no partition together cannot carry one traffic, although their cables meet.
        group = next((one for one in alike if _meet([*one, port])), None)
        if group is None:
            alike.append([port])
        else:
            group.append(port)
    fabrics = [_fabric(members) for alike in groups.values() for members in alike]
    return tuple(
        sorted(
            fabrics,
            key=lambda fabric: (-(fabric.rate_gbps or 0), fabric.kind is PortKind.ROCE, natural(fabric.ports[0])),
        )
    )


def _meet(ports: Sequence[FabricPort]) -> bool:
    return any(not port.pkeys for port in ports) or bool(_partitions(ports))


def _partitions(ports: Sequence[FabricPort]) -> dict[str, int | None]:
    """The partition keys that hold for all ports, each with the index that it has in all of their tables."""
    tables = [_table(port) for port in ports if port.pkeys]
    found: dict[str, int | None] = {}
    for partition in tables[0] if tables else ():
        if all(partition in table for table in tables):
            entries = [table[partition] for table in tables]
            member = FULL_MEMBER if all(full for full, _ in entries) else 0
            indexes = {index for _, index in entries}
            found[f"0x{partition | member:04x}"] = indexes.pop() if len(indexes) == 1 else None
    return found


def _table(port: FabricPort) -> dict[int, tuple[bool, int]]:
    """Partition -> whether the port is a full member, and at which index. Of both memberships the full one counts."""
    found: dict[int, tuple[bool, int]] = {}
    for key, index in zip(port.pkeys, port.pkey_indexes, strict=True):
        number = int(key, 16)
        partition, full = number & PARTITION, bool(number & FULL_MEMBER)
        if partition and (partition not in found or (full and not found[partition][0])):
            found[partition] = (full, index)
    return found


def _fabric(ports: Sequence[FabricPort]) -> Fabric:
    first = ports[0]
    networks = {port.network for port in ports}
    partitions = _partitions(ports) if first.kind is PortKind.INFINIBAND else {}
    return Fabric(
        kind=first.kind,
        ports=tuple(port.label for port in ports),
        driver=first.driver,
        rate_gbps=sum(port.rate_gbps or 0 for port in ports),
        subnet_prefix=first.subnet_prefix,
        sm_lid=first.sm_lid,
        # Any port may carry the traffic, so only what all of them have counts.
        pkeys=tuple(partitions),
        pkey_indexes=tuple(partitions.values()),
        networks=() if None in networks else tuple(sorted(str(network) for network in networks)),
        ipv6_only=first.kind is PortKind.ROCE and all(port.ipv4 is None for port in ports),
    )
