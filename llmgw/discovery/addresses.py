"""By which address and interface other nodes reach this one. Pure.

The host's name is never asked: many hosts resolve their own to a loopback address (Debian writes 127.0.1.1 for it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from attrs import frozen

from llmgw.domain.fabric import FabricInventory

RTF_UP, RTF_REJECT = 0x0001, 0x0200
"""Flags of a route (linux/route.h); a rejecting default route leads nowhere."""
ANY4, ANY6 = "00000000", "0" * 32


@frozen
class Routes:
    """The texts of /proc/net/route and /proc/net/ipv6_route."""

    ipv4: str = ""
    ipv6: str = ""


@frozen
class Reach:
    """`address` is None where none can be told; `why` says how it was found, or why not."""

    address: str | None
    interface: str | None
    why: str


def reach(
    addresses: Mapping[str, Sequence[str]], routes: Routes, written: str | None, fabric: FabricInventory | None = None
) -> Reach:
    """The address of `[node] address`, else the one of the interface that has the default route, else the one of the
    preferred fabric's first adapter, where that is an Ethernet one.

    `addresses`: interface -> `address/prefix length`.
    """
    if written is not None:
        return Reach(written, interface_of(addresses, written), "[node] address")
    for name in [*_default_interfaces(_routes4(routes.ipv4)), *_default_interfaces(_routes6(routes.ipv6))]:
        address = _best(addresses.get(name, ()))
        if address is not None:
            return Reach(address, name, f"the default route goes through {name}")
    preferred = fabric.preferred if fabric is not None else None
    for port in fabric.ports if fabric is not None and preferred is not None else ():
        if preferred is not None and port.label in preferred.ports and port.netdev is not None:
            address = _best(addresses.get(port.netdev, ()))
            if address is not None:
                why = f"there is no default route, and {port.netdev} belongs to {port.label} of the preferred fabric"
                return Reach(address, port.netdev, why)
    return Reach(None, None, "there is no default route: write [node] address")


def interface_of(addresses: Mapping[str, Sequence[str]], address: str) -> str | None:
    """The interface that has this address, however it is written."""
    wanted = _parsed(address)
    if wanted is None:
        return None
    return next((name for name, texts in addresses.items() if any(_parsed(text) == wanted for text in texts)), None)


def _best(texts: Iterable[str]) -> str | None:
    """An address that others may reach, IPv4 before IPv6."""
    found = [parsed for parsed in map(_parsed, texts) if parsed is not None]
    usable = [one for one in found if not (one.is_loopback or one.is_link_local or one.is_unspecified)]
    return next((one.compressed for one in sorted(usable, key=lambda one: one.version)), None)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text.partition("/")[0].partition("%")[0])
    except ValueError:
        return None


Route = tuple[str, int, int]
"""Interface, metric, flags of a default route."""


def _routes4(text: str) -> Iterator[Route]:
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == ANY4:
            yield from _route(fields[0], fields[6], 10, fields[3])


def _routes6(text: str) -> Iterator[Route]:
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 10 and (fields[0], fields[1]) == (ANY6, "00"):
            yield from _route(fields[9], fields[5], 16, fields[8])


def _route(interface: str, metric: str, base: int, flags: str) -> Iterator[Route]:
    try:
        yield interface, int(metric, base), int(flags, 16)
    except ValueError:
        # Not a line of the kernel.
        return


def _default_interfaces(routes: Iterable[Route]) -> list[str]:
    """Interfaces with a default route, the one of the smallest metric first."""
    found = [
        (metric, name) for name, metric, flags in routes if flags & RTF_UP and not flags & RTF_REJECT and name != "lo"
    ]
    return [name for _, name in sorted(found)]
