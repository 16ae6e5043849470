"""The gateway's listening sockets: bound all or not at all, taken over from an earlier life, kept through reloads.

Those that llmgw keeps for its next life (in systemd's descriptor store, over an upgrade) have a name made from the
line of the file; those that a socket unit opened are known by the address that they are bound to.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence

import trio

from llmgw.board import Cell
from llmgw.config.kinds import Listen
from llmgw.domain.problem import LlmgwError
from llmgw.http import unix_socket
from llmgw.http.unix_socket import UnixSocket

log = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that wait in the kernel, also while llmgw restarts; the kernel lowers it to net.core.somaxconn."""

NAME = "gateway"
"""FileDescriptorName= of a socket unit for the gateway; ours begin with it too."""

_Address = tuple[str, int] | str


def name_of(door: Listen) -> str:
    """The name under which its socket is passed on: systemd allows no colon in it and cuts it at 255 bytes."""
    return f"{NAME}-{hashlib.sha256(str(door).encode()).hexdigest()[:16]}"


class Listeners:
    """All of them. `sockets` is what is open now. `passed` are descriptors by name that an earlier life, a socket unit
    or the descriptor store handed over; what in there is no listening socket is closed and told.
    """

    def __init__(self, passed: Mapping[str, int] | None = None) -> None:
        self._passed: dict[str, socket.socket] = {}
        for name, fd in (passed or {}).items():
            if (sock := _take_over(fd)) is not None:
                self._passed[name] = sock
        self._open: dict[Listen, UnixSocket | socket.socket] = {}
        self.sockets: Cell[tuple[socket.socket, ...]] = Cell(())

    def bind(self, wanted: Sequence[Listen]) -> dict[Listen, UnixSocket | socket.socket]:
        """Open what is wanted and not open yet, to be handed to `adopt` or `give_up`.

        Raises LlmgwError; then nothing has changed.
        """
        made: dict[Listen, UnixSocket | socket.socket] = {}
        try:
            for door in wanted:
                if door not in self._open and door not in made:
                    made[door] = self._inherit(door) or _bind(door)
        except LlmgwError:
            self.give_up(made)
            raise
        return made

    def give_up(self, made: dict[Listen, UnixSocket | socket.socket]) -> None:
        """What `bind` has opened is not to be used after all."""
        for sock in made.values():
            sock.close()

    def adopt(self, wanted: Sequence[Listen], made: dict[Listen, UnixSocket | socket.socket]) -> None:
        """From here on exactly what is wanted is open; connections that were accepted go on."""
        self._open.update(made)
        kept = {door: self._open[door] for door in wanted}
        for door in self._open.keys() - kept.keys():
            if trio.lowlevel.in_trio_run():
                # Who waits for connections on it wakes and leaves it.
                trio.lowlevel.notify_closing(self._open[door].fileno())
            self._open[door].close()
        for sock in self._passed.values():
            where = _address_of(sock)
            log.warning("a socket passed to llmgw listens on %s, which [gateway] listen does not name: closed", where)
            sock.close()
        self._passed.clear()
        self._open = kept
        self.sockets.set(tuple(_plain(sock) for sock in kept.values()))

    def descriptors(self) -> dict[str, int]:
        """What is open, by name, for the next life of llmgw."""
        return {name_of(door): sock.fileno() for door, sock in self._open.items()}

    def close(self, *, is_kept: bool = False) -> None:
        """Close all, and remove the files of unix sockets unless the sockets are kept elsewhere (`descriptors`)."""
        if is_kept:
            for sock in self.sockets.value:
                sock.close()
        else:
            self.adopt((), {})

    def _inherit(self, door: Listen) -> UnixSocket | socket.socket | None:
        sock = self._passed.pop(name_of(door), None)
        if sock is not None:
            return UnixSocket(sock, door.path) if door.path is not None else sock
        addresses = _addresses(door)
        name = next((name for name, sock in self._passed.items() if _address_of(sock) in addresses), None)
        if name is None:
            return None
        sock = self._passed.pop(name)
        # The file of a socket unit's is systemd's to remove.
        return UnixSocket(sock, None) if door.path is not None else sock


def _take_over(fd: int) -> socket.socket | None:
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        log.warning("cannot take over descriptor %d for the gateway: %s", fd, error.strerror)
        return None
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        log.warning("cannot take over descriptor %d for the gateway: it is no listening socket", fd)
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _plain(sock: UnixSocket | socket.socket) -> socket.socket:
    return sock.sock if isinstance(sock, UnixSocket) else sock


def _bind(door: Listen) -> UnixSocket | socket.socket:
    if door.path is not None:
        # Whoever may connect may ask: tenants' keys are not needed for what a group of this machine shares.
        made = unix_socket.bind(
            door.path, what="the gateway's socket", setting="gateway.listen", mode=0o660, backlog=BACKLOG
        )
        made.sock.setblocking(False)
        return made
    error: OSError | None = None
    try:
        found = _resolve(door)
    except OSError as problem:
        raise LlmgwError(
            f"cannot listen on {door}: {problem.strerror or problem}", "gateway.listen names an address of this machine"
        ) from problem
    for family, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # A restart within a minute must not fail on connections of the last life that are in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # [::] means IPv6 alone, so that it can stand beside 0.0.0.0 in the file.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as problem:
            sock.close()
            error = problem
            continue
        sock.setblocking(False)
        return sock
    assert error is not None
    raise LlmgwError(
        f"cannot listen on {door}: {error.strerror or error}",
        "change gateway.listen, or end what listens there (ss -ltnp shows it)",
    ) from error


def _resolve(door: Listen) -> list[tuple[int, tuple[str, int]]]:
    rows = socket.getaddrinfo(door.host, door.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in rows]  # type: ignore[misc]


def _addresses(door: Listen) -> list[_Address]:
    """How sockets bound to it say where they are."""
    if door.path is not None:
        return [door.path]
    try:
        return [(address[0], address[1]) for _, address in _resolve(door)]
    except OSError:
        return []


def _address_of(sock: socket.socket) -> _Address:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return os.fsdecode(name)
    return (str(name[0]), int(name[1]))
