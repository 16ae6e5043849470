"""By which address and interface other nodes reach this one. Pure.

The host's name is never asked: many hosts resolve their own to a loopback address (Debian writes 127.0.1.1 for it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from attrs import frozen


@frozen
class Reach:
    """`address` is None where none can be told; `why` says how it was found, or why not."""

    address: str | None
    interface: str | None
    why: str


def reach(addresses: Mapping[str, Sequence[str]], routes: str, written: str | None) -> Reach:
    """The address of `[node] address`, else the one of the interface that has the default route.

    `addresses`: interface -> `address/prefix length`; `routes`: the text of /proc/net/route.
    """
    if written is not None:
        interface = next((name for name, found in addresses.items() if written in map(_bare, found)), None)
        return Reach(written, interface, "[node] address")
    for name in _default_interfaces(routes):
        found = [_bare(text) for text in addresses.get(name, ())]
        usable = sorted((address for address in found if _is_usable(address)), key=lambda address: ":" in address)
        if usable:
            return Reach(usable[0], name, f"the default route goes through {name}")
    return Reach(None, None, "there is no default route: write [node] address")


def _default_interfaces(routes: str) -> list[str]:
    """Interfaces with a default route, the one of the smallest metric first."""
    found = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000" and fields[6].isdecimal():
            found.append((int(fields[6]), fields[0]))
    return [name for _, name in sorted(found)]


def _bare(text: str) -> str:
    return text.partition("/")[0]


def _is_usable(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)
