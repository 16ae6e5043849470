"""Reads RDMA devices from a sysfs root, addresses and routes. Shell: every read may fail, and none loses the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from ipaddress import ip_network

from llmgw.discovery.addresses import Routes
from llmgw.discovery.fabric import RawDevice, RawGid, RawPort, raw_number, read_devices
from llmgw.discovery.natural import natural
from llmgw.domain.fabric import FabricInventory

VALUE_MAX = 256
"""Bytes of a file; the longest genuine value has about 40."""

DEVICES_MAX = 256
PORTS_MAX = 64
GIDS_MAX = 1024
PKEYS_MAX = 1024
"""Entries that are looked at; the largest tables known have a quarter of each."""
ROUTES_MAX = 1 << 20
"""Characters; a router has long tables, a server with engines has some lines."""


def read_fabric(sysfs: str = "/sys", addresses: Mapping[str, Sequence[str]] | None = None) -> FabricInventory:
    """Ports and fabrics of this node; never raises. `addresses` (interface -> `address/prefix`) stand in for those of
    this host."""
    folder = os.path.join(sysfs, "class/infiniband")
    names = _names(folder)[:DEVICES_MAX]
    if not names:
        return FabricInventory()
    devices = [_device(os.path.join(folder, name), name) for name in names]
    return read_devices(devices, host_addresses() if addresses is None else addresses)


def host_addresses() -> dict[str, list[str]]:
    """Interface -> its addresses with prefix lengths, of this host; empty where that cannot be asked."""
    import socket

    import psutil

    try:
        interfaces = psutil.net_if_addrs()
    except (OSError, psutil.Error):
        return {}
    found: dict[str, list[str]] = {}
    for name, entries in interfaces.items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask:
                length = _prefix_length(entry.netmask)
                if length is not None:
                    # A label such as eth0:1 is a second address of eth0, not an interface.
                    found.setdefault(name.partition(":")[0], []).append(f"{entry.address.partition('%')[0]}/{length}")
    return found


def host_routes(proc: str = "/proc") -> Routes:
    """The routing tables of this host; empty where they cannot be read."""
    texts = []
    for name in ("net/route", "net/ipv6_route"):
        try:
            with open(os.path.join(proc, name), encoding="ascii", errors="replace") as file:
                texts.append(file.read(ROUTES_MAX))
        except OSError:
            texts.append("")
    return Routes(*texts)


def _prefix_length(netmask: str) -> int | None:
    try:
        if ":" in netmask:
            return bin(int.from_bytes(_packed(netmask), "big")).count("1")
        return ip_network(f"0.0.0.0/{netmask}").prefixlen
    except ValueError:
        return None


def _packed(address: str) -> bytes:
    from ipaddress import IPv6Address

    return IPv6Address(address).packed


def _device(path: str, name: str) -> RawDevice:
    try:
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return RawDevice(name, readable=False)
    except (OSError, ValueError):
        return RawDevice(name, readable=False)
    home = os.path.join(path, "device")
    has_home = os.path.isdir(home)
    driver = os.path.join(home, "driver")
    ports = os.path.join(path, "ports")
    return RawDevice(
        name=name,
        home=os.path.basename(os.path.realpath(home)) if has_home else None,
        software=os.path.lexists(os.path.join(path, "parent")),
        driver=os.path.basename(os.path.realpath(driver)) if os.path.exists(driver) else None,
        numa_node=_value(os.path.join(home, "numa_node")) if has_home else None,
        netdevs=tuple(_names(os.path.join(home, "net"))) if has_home else (),
        ports=tuple(
            _port(os.path.join(ports, number), int(number))
            for number in _names(ports)[:PORTS_MAX]
            if (raw_number(number) or 0) >= 1
        ),
    )


def _port(path: str, number: int) -> RawPort:
    def value(name: str) -> str | None:
        return _value(os.path.join(path, name))

    return RawPort(
        number=number,
        state=value("state"),
        rate=value("rate"),
        link_layer=value("link_layer"),
        lid=value("lid"),
        sm_lid=value("sm_lid"),
        gids=tuple(_gids(path)),
        pkeys=tuple(_pkeys(os.path.join(path, "pkeys"))),
    )


def _pkeys(folder: str) -> list[tuple[int, str]]:
    found = []
    for name in _names(folder)[:PKEYS_MAX]:
        index, key = raw_number(name), _value(os.path.join(folder, name))
        if index is not None and index >= 0 and key is not None:
            found.append((index, key))
    return found


def _gids(path: str) -> list[RawGid]:
    found = []
    for name in _names(os.path.join(path, "gids"))[:GIDS_MAX]:
        index = raw_number(name)
        gid = _value(os.path.join(path, "gids", name))
        if index is None or index < 0 or gid is None or not gid.strip("0:"):
            # An empty slot: reading its type fails anyway.
            continue
        kind = _value(os.path.join(path, "gid_attrs/types", name))
        netdev = _value(os.path.join(path, "gid_attrs/ndevs", name))
        found.append(RawGid(index, gid, kind, netdev or None))
    return found


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder), key=natural)
    except (OSError, ValueError):
        return []


def _value(path: str) -> str | None:
    """The content of a small file, stripped; None when it cannot be read. Never waits: a pipe is no file of sysfs."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return os.read(handle, VALUE_MAX).decode("utf-8", "replace").strip()
    except OSError:
        return None
    finally:
        os.close(handle)
