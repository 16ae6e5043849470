"""The gateway's service: it accepts connections, watches board and file, and ends in the right order.

One task per client connection takes every decision, in straight lines (`answering`); the bytes move in callbacks
(`plane`). One task watches the board and has each snapshot turned into a table, one sweeps deadlines. A connection's
task contains every error of its own: the worst that a request can do is to end its connection.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio

from llmgw.board import Board, Cell
from llmgw.config.model import Config
from llmgw.gateway import tls
from llmgw.gateway.admission.desk import Desk
from llmgw.gateway.admission.snapshot import AdmissionSnapshot
from llmgw.gateway.answering import Answering
from llmgw.gateway.client import Buffered, Client
from llmgw.gateway.in_force import InForce
from llmgw.gateway.plane import Plane
from llmgw.gateway.reading import answers
from llmgw.gateway.routing.policies import Chooser
from llmgw.gateway.routing.table import Model

log = logging.getLogger(__name__)

SWEEP = 0.25
"""Seconds between two looks at all deadlines: a scope per wait would cost several microseconds of each request."""

ACCEPT_BATCH = 64
"""Connections taken from one listener before others have a turn."""

LAST_CALL = 0.5
"""Seconds in which kept connections may still bring a request when engines outlive the gateway."""

FULL_PAUSE = 0.1
"""Seconds to wait when the process has no descriptor left."""


class Gateway:
    """One gateway. `make_answering(in_force)` gives what answers requests; `now` is a monotonic clock in seconds."""

    def __init__(
        self,
        board: Board,
        config: Cell[Config],
        listeners: Cell[tuple[socket.socket, ...]],
        *,
        desk: Desk,
        chooser: Chooser,
        estimate: Callable[[Model], float | None],
        make_answering: Callable[[InForce], Answering],
        now: Callable[[], float],
    ) -> None:
        self._board = board
        self._config = config
        self._listeners = listeners
        self._desk = desk
        self._now = now
        self._plane = Plane()
        self._buffered = Buffered()
        self._clients: set[Client] = set()
        self._open = 0
        """Connections that were accepted and have not ended."""
        self._in_force = InForce(board, config.value, desk, chooser, self._plane, now, estimate)
        self._answering = make_answering(self._in_force)
        self._tls: ssl.SSLContext | None = None
        self._emptied: trio.Event | None = None
        """While llmgw ends: set when the last connection is gone."""

    def admission(self) -> AdmissionSnapshot:
        """The queue as it is now."""
        return self._desk.snapshot()

    def waiting(self) -> Mapping[tuple[str, str, str], int]:
        """How many wait, by model, band and tenant."""
        return self._desk.waiting()

    @property
    def ejected(self) -> Mapping[str, int]:
        """How often each shard was taken out, by its name."""
        return self._in_force.ejected

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until llmgw leaves or the file has no gateway any more; then let running answers end for
        `drain_timeout` and cut the rest.
        """
        self._load_tls()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._plane.run)
                nursery.start_soon(self._desk.run)
                nursery.start_soon(self._watch_board)
                nursery.start_soon(self._watch_config)
                nursery.start_soon(self._sweep)
                task_status.started()
                async with trio.open_nursery() as doors:
                    doors.start_soon(self._keep_doors, doors, nursery)
                    doors.start_soon(self._end_when_unwanted, doors.cancel_scope)
                    await self._board.leaving.wait_value(lambda leaving: leaving is not None)
                    doors.cancel_scope.cancel(reason="llmgw leaves")
                await self._drain()
                nursery.cancel_scope.cancel(reason="the gateway has drained")
        finally:
            self._in_force.close()
            self._plane.close()

    async def _end_when_unwanted(self, scope: trio.CancelScope) -> None:
        await self._config.wait_value(lambda config: config.gateway is None)
        scope.cancel(reason="the file has no gateway any more")

    async def _keep_doors(self, doors: trio.Nursery, nursery: trio.Nursery) -> None:
        """Accept on every listener that there is; their connections belong to `nursery` and outlive them."""
        accepting: dict[socket.socket, trio.CancelScope] = {}
        while True:
            wanted = self._listeners.value
            for sock in [sock for sock in accepting if sock not in wanted]:
                accepting.pop(sock).cancel(reason="the file does not name it any more")
            for sock in wanted:
                if sock not in accepting:
                    scope = accepting[sock] = trio.CancelScope()
                    doors.start_soon(self._accept, sock, nursery, scope)
            await self._listeners.wait_change(wanted)

    async def _drain(self) -> None:
        """No new connections; what runs has `drain_timeout` to end."""
        in_force, leaving = self._in_force, self._board.leaving.value
        in_force.is_draining = True
        self._desk.refuse_all("draining", answers.draining().message)
        if self._open:
            self._emptied = trio.Event()
            if leaving is None or leaving.engines_stay:
                # A client that keeps its connection may be about to send on it; closing now could meet that request
                # half way. Its answer tells the client to come back on another connection, which waits for the next.
                with trio.move_on_after(LAST_CALL):
                    await self._emptied.wait()
            in_force.takes_requests = False
            for client in tuple(self._clients):
                client.dismiss()
            with trio.move_on_after(in_force.gateway.drain_timeout):
                await self._emptied.wait()

    async def _watch_board(self) -> None:
        revision = self._board.snapshot.revision
        while True:
            self._in_force.refresh()
            revision = (await self._board.wait_newer(revision)).revision

    async def _watch_config(self) -> None:
        known = self._config.value
        while True:
            known = await self._config.wait_change(known)
            if known.gateway is None:
                return
            self._in_force.adopt(known)
            self._load_tls()

    def _load_tls(self) -> None:
        """Certificates are read again at every reload: a renewed one has the same name."""
        wanted = self._in_force.gateway.tls
        if wanted is None:
            self._tls = None
            return
        try:
            self._tls = tls.make_context(wanted)
        except (OSError, ssl.SSLError) as error:
            kept = "; the earlier one is kept" if self._tls is not None else "; nobody can connect until it is mended"
            log.error("cannot use the certificate %s: %s%s", wanted.cert, error, kept)

    async def _sweep(self) -> None:
        while True:
            await trio.sleep(SWEEP)
            now = self._now()
            for client in tuple(self._clients):
                if client.deadline is not None and client.deadline < now:
                    client.expire()
            self._in_force.sweep()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery, scope: trio.CancelScope) -> None:
        is_full = False
        with scope:
            while True:
                try:
                    await trio.lowlevel.wait_readable(listener)
                except trio.ClosedResourceError:
                    return
                for _ in range(ACCEPT_BATCH):
                    try:
                        sock, address = listener.accept()
                    except (BlockingIOError, ConnectionAbortedError):
                        break
                    except OSError as error:
                        if not is_full:
                            log.error("cannot accept a connection: %s", error)
                        is_full = True
                        await trio.sleep(FULL_PAUSE)
                        break
                    is_full = False
                    sock.setblocking(False)
                    self._open += 1
                    nursery.start_soon(self._serve, sock, _peer(listener, address))

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            await self._serve_socket(sock, peer)
        finally:
            self._open -= 1
            if self._emptied is not None and not self._open:
                self._emptied.set()

    async def _serve_socket(self, sock: socket.socket, peer: str) -> None:
        if peer != "unix":
            # Head and chunks must not wait for the acknowledgement of what went before them.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._in_force.gateway.tls is None or peer == "unix":
            await self._converse(sock, peer)
        elif self._tls is None:
            sock.close()
        else:
            outer, inner = socket.socketpair()
            outer.setblocking(False)
            inner.setblocking(False)
            async with trio.open_nursery() as nursery:
                carry = partial(tls.unwrap, trio.socket.from_stdlib_socket(sock), self._tls, inner)
                nursery.start_soon(carry)
                await self._converse(outer, peer)

    async def _converse(self, sock: socket.socket, peer: str) -> None:
        answering = self._answering
        client = Client(sock, peer, self._plane, self._in_force.limits, self._buffered, answering.judge, self._now)
        self._clients.add(client)
        try:
            while (request := await client.next_request()) is not None:
                keep = await answering.answer(client, request)
                client.release(request)
                if not keep or not self._in_force.takes_requests:
                    if await client.flush():
                        await client.linger()
                    break
        except Exception:
            # The one broad catch: an error here must end one connection, not the gateway (its nursery would end).
            log.exception("an error in llmgw itself ended a client's connection")
        finally:
            self._clients.discard(client)
            client.close()


def _peer(listener: socket.socket, address: Any) -> str:
    """The client's address, or `unix`."""
    return "unix" if listener.family == socket.AF_UNIX else str(address[0]).partition("%")[0].removeprefix("::ffff:")
