"""Connections to engines: one pool for each endpoint, dropped in the moment in which the engine closes them."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from llmgw.domain.shard import TcpEndpoint, UnixEndpoint
from llmgw.gateway.plane import READ, Plane

if TYPE_CHECKING:
    from llmgw.gateway.exchange import Exchange

IDLE_LIMIT = 4.0
"""Seconds that a connection may be idle. Engines built on uvicorn close theirs after 5 s; ours go first."""

BACKLOG_PAUSE = 0.02
"""Seconds between two tries when an engine's unix socket has no place in its queue; a TCP connect waits by itself."""


class Upstream:
    """One connection to an engine: idle in its pool, or with the exchange that uses it."""

    __slots__ = ("_descriptor", "_events", "_plane", "exchange", "idle_since", "pool", "reused", "sock")

    def __init__(self, sock: socket.socket, plane: Plane, pool: Pool) -> None:
        self.sock = sock
        self.pool = pool
        self.reused = False
        self.idle_since = 0.0
        self.exchange: Exchange | None = None
        self._plane = plane
        self._descriptor = sock.fileno()
        self._events = 0
        self.listen_for(READ)

    def listen_for(self, events: int) -> None:
        """Nothing means nothing: an epoll tells a hang-up even to who asked for no event, over and over."""
        if events == self._events:
            return
        if not events:
            self._plane.remove(self._descriptor)
        elif not self._events:
            self._plane.add(self._descriptor, events, self._ready)
        else:
            self._plane.change(self._descriptor, events)
        self._events = events

    def close(self) -> None:
        self.listen_for(0)
        self.sock.close()

    def _ready(self, events: int) -> None:
        if self.exchange is None:
            # Closed, or it spoke out of turn: either way nobody may use it again.
            self.pool.drop(self)
        else:
            self.exchange.upstream_ready(events)


class Pool:
    """The idle connections of one endpoint, and what runs on the others."""

    def __init__(self, address: TcpEndpoint | UnixEndpoint, plane: Plane, now: Callable[[], float]) -> None:
        self.address = address
        self._plane = plane
        self._now = now
        self._idle: deque[Upstream] = deque()
        self.exchanges: set[Exchange] = set()
        self.is_closed = False
        """Its endpoint is no more: nothing is to be begun here."""
        self.opened = 0
        """Connections opened so far: with reuse it stays near the number that run at once."""

    def take(self) -> Upstream | None:
        """The idle connection that was used last."""
        if not self._idle:
            return None
        upstream = self._idle.pop()
        upstream.reused = True
        return upstream

    def put(self, upstream: Upstream) -> None:
        """Keep it for the next request."""
        upstream.exchange = None
        if self.is_closed:
            upstream.close()
            return
        upstream.idle_since = self._now()
        self._idle.append(upstream)

    def drop(self, upstream: Upstream) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(upstream)
        upstream.close()

    def sweep(self) -> None:
        """Close what has been idle for too long."""
        limit = self._now() - IDLE_LIMIT
        while self._idle and self._idle[0].idle_since < limit:
            self._idle.popleft().close()

    async def connect(self, timeout: float) -> Upstream:
        """A fresh connection. Raises OSError when nobody answers there, or not within `timeout` seconds."""
        sock = _socket_for(self.address)
        try:
            with trio.fail_after(timeout):
                await _connect(sock, self.address)
        except trio.TooSlowError:
            sock.close()
            raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout:g} s") from None
        except BaseException:
            sock.close()
            raise
        self.opened += 1
        return Upstream(sock, self._plane, self)

    def close(self, reason: str) -> None:
        """The endpoint is no more: drop what is idle, end what runs."""
        self.is_closed = True
        while self._idle:
            self._idle.popleft().close()
        for exchange in tuple(self.exchanges):
            exchange.end(reason)


def host_header(address: TcpEndpoint | UnixEndpoint) -> bytes:
    """What the engine is called towards itself."""
    return b"localhost" if isinstance(address, UnixEndpoint) else str(address).encode()


def _socket_for(address: TcpEndpoint | UnixEndpoint) -> socket.socket:
    if isinstance(address, UnixEndpoint):
        family = socket.AF_UNIX
    else:
        family = socket.AF_INET6 if ":" in address.probe_host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if not isinstance(address, UnixEndpoint):
        # A request's head and body, and each chunk, must not wait for the acknowledgement of the last.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


async def _connect(sock: socket.socket, address: TcpEndpoint | UnixEndpoint) -> None:
    target = address.path if isinstance(address, UnixEndpoint) else (address.probe_host, address.port)
    # A unix socket whose queue is full says so at once, and tells nobody when there is room again.
    while (error := sock.connect_ex(target)) == errno.EAGAIN and isinstance(address, UnixEndpoint):  # noqa: ASYNC110
        await trio.sleep(BACKLOG_PAUSE)
    if error == errno.EINPROGRESS:
        await trio.lowlevel.wait_writable(sock)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, errno.errorcode.get(error, str(error)))
