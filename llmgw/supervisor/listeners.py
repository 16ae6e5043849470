"""Whose a listening socket is. Three answers for one that exists: ours, another's, not visible."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from attrs import frozen

from llmgw.domain.host import PortHolder
from llmgw.domain.shard import Endpoint, UnixEndpoint
from llmgw.supervisor.family import EngineProcesses
from llmgw.supervisor.members import Member
from llmgw.supervisor.procfs import all_pids, read_stat

LISTEN = "0A"  # TCP_LISTEN in <net/tcp_states.h>, as /proc/net/tcp writes it


@frozen
class Listener:
    """`not-visible`: somebody listens, but /proc does not show who. `none`: nobody listens."""

    kind: Literal["ours", "anothers", "not-visible", "none"]
    holder: PortHolder | None = None


def parse_listeners(table: str) -> dict[int, set[int]]:
    """Port to inodes of listening sockets, from the text of /proc/net/tcp or tcp6."""
    found: dict[int, set[int]] = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN:
            continue
        try:
            found.setdefault(int(fields[1].rpartition(":")[2], 16), set()).add(int(fields[9]))
        except ValueError:
            continue
    return found


def listener_of(endpoint: Endpoint, engine: EngineProcesses, members: Iterable[Member] | None = None) -> Listener:
    """Who answers at an engine's endpoint. Some milliseconds for a stranger's; ours is looked at first.

    `members` saves a walk through /proc when the caller has just looked.
    """
    known = engine.members() if members is None else tuple(members)
    if isinstance(endpoint, UnixEndpoint):
        return _unix_listener(endpoint.path, {member.pid for member in known})
    inodes = _listening_inodes().get(endpoint.port, set())
    if not inodes:
        return Listener("none")
    if _holder_among((member.pid for member in known), inodes) is not None:
        return Listener("ours")
    pid = _holder_among(all_pids(), inodes)
    if pid is None:
        return Listener("not-visible", PortHolder(endpoint.port))
    if pid in {member.pid for member in engine.members()}:
        # It was forked after the caller looked.
        return Listener("ours")
    return Listener("anothers", _describe(endpoint.port, pid))


def port_holders(ports: Collection[int]) -> Mapping[int, PortHolder]:
    """Those of these ports that somebody listens on, and who does where /proc shows it."""
    wanted = {port: inodes for port, inodes in _listening_inodes().items() if port in ports}
    if not wanted:
        return {}
    by_inode = {inode: port for port, inodes in wanted.items() for inode in inodes}
    holders = {port: PortHolder(port) for port in wanted}
    for pid in all_pids():
        for inode in _socket_inodes(pid) & by_inode.keys():
            port = by_inode[inode]
            if holders[port].pid is None:
                holders[port] = _describe(port, pid)
    return holders


def port_free(host: str, port: int) -> str | None:
    """None when an engine could bind here now, else the reason.

    With SO_REUSEADDR, as engines do: without it a port would count as taken for a minute after each stop.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use"
        return f"cannot bind {host} port {port}: {error.strerror or error}"
    return None


def _unix_listener(path: str, ours: set[int]) -> Listener:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0.0)
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return Listener("none")
        except OSError:
            # A full backlog or missing rights: somebody is there, but does not show.
            return Listener("not-visible")
        # Those of the process that called listen(), which a worker may have inherited from: pid, uid, gid.
        pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid in ours:
        return Listener("ours")
    if not pid or read_stat(pid) is None:
        return Listener("not-visible")
    return Listener("anothers", _describe(0, pid))


def _listening_inodes() -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii", errors="replace") as file:
                table = file.read()
        except OSError:
            continue
        for port, inodes in parse_listeners(table).items():
            found.setdefault(port, set()).update(inodes)
    return found


def _holder_among(pids: Iterable[int], inodes: set[int]) -> int | None:
    return next((pid for pid in pids if _socket_inodes(pid) & inodes), None)


def _socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open; empty when it does not let us look."""
    found: set[int] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found


def _describe(port: int, pid: int) -> PortHolder:
    stat = read_stat(pid)
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        uid = None
    return PortHolder(port, pid, stat.comm if stat is not None else None, uid)
