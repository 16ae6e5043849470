"""One connection of HTTP/1.0 or 1.1 over a unix stream socket: h11 reads and writes, trio carries.

No client can hold anything up: heads, bodies and numbers of connections are bounded, every wait for a client has a
limit or ends with the client, and nothing here is shielded, so that a shutdown waits for nobody.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import parse_qsl, unquote

import h11
import trio
from attrs import field, frozen

log = logging.getLogger(__name__)

HEAD_MAX = 64 * 1024
BODY_MAX = 1024 * 1024
FAREWELL = 0.5
"""Seconds that a client which called in the last moment has for its first request, when the server ends."""

REQUEST_TIMEOUT = 30.0
"""Seconds from the last answer (or the connect) until the next request is there as a whole."""
SEND_TIMEOUT = 30.0
"""Seconds that a client may take to accept a piece of a plain answer."""
STREAM_SEND_TIMEOUT = 900.0
"""The same in a stream, whose reader may be stopped with Ctrl-Z for a while: it costs one connection, no memory."""
CONNECTIONS_MAX = 256
HALF_CLOSED_POLL = 1.0
"""Seconds between two looks at a client that has shut down its own direction and may still read."""
_READ = 64 * 1024

Send = Callable[[bytes], Awaitable[None]]


@frozen
class Peer:
    """Who is at the other end, by SO_PEERCRED: what the kernel noted when the client connected (unix(7))."""

    pid: int
    uid: int
    gid: int


@frozen
class Request:
    """A request that has arrived as a whole. `segments` are the parts of the path, each percent-decoded by itself."""

    method: str
    path: str
    segments: tuple[str, ...]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    peer: Peer


@frozen
class Reply:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(factory=dict)


@frozen
class Stream:
    """An answer without an end of its own: `write(send)` sends pieces until it returns or the client leaves."""

    write: Callable[[Send], Awaitable[None]]
    content_type: str = "application/x-ndjson"
    headers: Mapping[str, str] = field(factory=dict)


Handler = Callable[[Request], Awaitable[Reply | Stream]]


class _Refused(Exception):
    """A request that does not reach the handler."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, json.dumps({"error": {"code": code, "message": message, "hint": None}}).encode())


class _ClientGone(Exception):
    """The client left, or takes what it asked for too slowly."""


def peer_of(sock: trio.socket.SocketType | socket.socket) -> Peer:
    """The credentials of a connected unix socket."""
    size = struct.calcsize("3i")
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)))


class HttpServer:
    """Serves `handler` on every connection of a listener. `headers` go into each answer."""

    def __init__(
        self, handler: Handler, *, headers: Mapping[str, str] | None = None, request_timeout: float = REQUEST_TIMEOUT
    ) -> None:
        self._handler = handler
        self._headers = dict(headers or {})
        self._request_timeout = request_timeout
        self.connections = 0
        self._scopes: dict[trio.CancelScope, _Connection | None] = {}
        """Of every connection; None: nothing is known of it yet."""

    async def serve(
        self, sock: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept on a listening socket until cancelled. The socket stays open: its owner closes it.

        A client that was accepted in the last moment still gets its first answer; everything else ends at once.
        """
        # trio closes what it serves; an upgrade passes this very socket on afterwards.
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(sock.dup()))
        ended = trio.Event()
        async with trio.open_nursery() as nursery:
            connections = await nursery.start(self._hold_connections, ended)
            try:
                task_status.started()
                await trio.serve_listeners(self.serve_connection, [listener], handler_nursery=connections)
            finally:
                self._say_farewell(connections.cancel_scope)
                ended.set()

    async def _hold_connections(self, ended: trio.Event, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as connections:
            # The cancel that ends the server reaches the connections through `_say_farewell` alone.
            connections.cancel_scope.shield = True
            task_status.started(connections)
            await ended.wait()

    def _say_farewell(self, all_of_them: trio.CancelScope) -> None:
        all_of_them.deadline = trio.current_time() + FAREWELL
        for scope, connection in self._scopes.items():
            if connection is not None and not connection.awaits_first_answer:
                scope.cancel(reason="the server ends")

    async def serve_connection(self, stream: trio.SocketStream) -> None:
        """Answer requests of one client until it leaves. Raises nothing but cancellation."""
        self.connections += 1
        scope = trio.CancelScope()
        self._scopes[scope] = None
        try:
            with scope:
                await self._serve(stream, scope)
        finally:
            del self._scopes[scope]
            self.connections -= 1
            # Closing never waits; `aclose` would raise Cancelled here when the server ends.
            stream.socket.close()

    async def _serve(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            connection = _Connection(stream, self._headers)
        except OSError:
            # It left before we could ask who it was.
            return
        self._scopes[scope] = connection
        try:
            if self.connections > CONNECTIONS_MAX:
                await connection.refuse(_Refused(503, "busy", "llmgw has too many connections"))
                return
            await self._serve_requests(connection)
        except _ClientGone:
            pass
        except Exception:
            # The one broad catch: an error here must end one connection, not the server (trio's nursery would end).
            log.exception("an error in llmgw itself ended a connection to the control socket")
            await connection.refuse(_Refused(500, "internal", "an error in llmgw itself; its log has the traceback"))

    async def _serve_requests(self, connection: _Connection) -> None:
        while True:
            try:
                request = await connection.read_request(self._request_timeout)
            except _Refused as refused:
                await connection.refuse(refused)
                return
            if request is None:
                return
            await connection.answer(request, self._handler)
            connection.awaits_first_answer = False
            if not connection.reusable():
                return


class _Connection:
    def __init__(self, stream: trio.SocketStream, headers: Mapping[str, str]) -> None:
        self._stream = stream
        self._headers = list(headers.items())
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        self._peer = peer_of(stream.socket)
        self.awaits_first_answer = True
        """It has not had one; a stream that has begun is one."""

    # -- reading -----------------------------------------------------------------------------------------

    async def read_request(self, patience: float) -> Request | None:
        """The next request; None where the client has none. Raises _Refused, _ClientGone."""
        with trio.move_on_after(patience) as limit:
            try:
                head = await self._next_event()
                if not isinstance(head, h11.Request):
                    return None
                check_head(head)
                body = await self._read_body()
            except h11.RemoteProtocolError as error:
                raise _Refused(error.error_status_hint, "bad-request", f"not an HTTP request: {error}") from error
            return as_request(head, body, self._peer)
        assert limit.cancelled_caught
        if self._h11.their_state is h11.IDLE and not self._h11.trailing_data[0]:
            return None
        raise _Refused(408, "timeout", f"the request did not arrive within {patience:g} s")

    async def _read_body(self) -> bytes:
        if self._h11.they_are_waiting_for_100_continue:
            await self._send(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])), SEND_TIMEOUT)
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            body += event.data
            if len(body) > BODY_MAX:
                raise _Refused(413, "too-large", f"the body has more than {BODY_MAX} bytes")
        return bytes(body)

    async def _next_event(self) -> object:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._receive())
        return event

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(_READ))
        except trio.BrokenResourceError:
            raise _ClientGone from None

    # -- answering ---------------------------------------------------------------------------------------

    async def answer(self, request: Request, handler: Handler) -> None:
        """Run the handler and send what it gives, unless the client leaves first. Raises _ClientGone."""
        gone = False
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal gone
                await self._wait_client_left()
                gone = True
                nursery.cancel_scope.cancel(reason="the client left")

            nursery.start_soon(watch)
            try:
                reply = await handler(request)
                if isinstance(reply, Stream):
                    self.awaits_first_answer = False
                    await self._send_stream(request, reply)
                else:
                    await self._send_reply(request, reply)
            except Exception as error:  # noqa: BLE001
                # Carried out of the nursery, so that it does not arrive as a group.
                failure = error
            nursery.cancel_scope.cancel(reason="the request is answered")
        if gone:
            raise _ClientGone
        if failure is not None:
            raise failure

    async def refuse(self, refused: _Refused) -> None:
        """Send a refusal as well as still possible; the connection ends after it."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        try:
            await self._send_reply(None, refused.reply)
            # Closing with unread bytes would take the answer away from a client that is still sending (ECONNRESET).
            self._stream.socket.shutdown(socket.SHUT_WR)
            with trio.move_on_after(1.0):
                while await self._receive():
                    pass
        except (_ClientGone, OSError, h11.LocalProtocolError):
            pass

    def reusable(self) -> bool:
        """Make ready for the next request on this connection; False when it must be closed."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def _wait_client_left(self) -> None:
        """Return when the client is gone. What it sends meanwhile is its next request; one read of it is kept."""
        try:
            data = bytes(await self._stream.receive_some(_READ))
        except trio.BrokenResourceError:
            return
        self._h11.receive_data(data)
        if data:
            await trio.sleep_forever()
        while not _hung_up(self._stream.socket.fileno()):  # noqa: ASYNC110 - there is no event for it
            await trio.sleep(HALF_CLOSED_POLL)

    async def _send_reply(self, request: Request | None, reply: Reply) -> None:
        head_only = request is not None and request.method == "HEAD"
        headers = [
            ("content-type", reply.content_type),
            ("content-length", str(len(reply.body))),
            *reply.headers.items(),
            *self._headers,
        ]
        if request is None:
            headers.append(("connection", "close"))
        data = self._h11.send(h11.Response(status_code=reply.status, headers=headers)) or b""
        if not head_only:
            data += self._h11.send(h11.Data(data=reply.body)) or b""
        data += self._h11.send(h11.EndOfMessage()) or b""
        await self._send(data, SEND_TIMEOUT)

    async def _send_stream(self, request: Request, reply: Stream) -> None:
        headers = [("content-type", reply.content_type), ("cache-control", "no-store"), *reply.headers.items()]
        response = h11.Response(status_code=200, headers=[*headers, *self._headers])
        await self._send(self._h11.send(response), STREAM_SEND_TIMEOUT)
        if request.method != "HEAD":

            async def send(piece: bytes) -> None:
                if piece:
                    await self._send(self._h11.send(h11.Data(data=piece)), STREAM_SEND_TIMEOUT)

            await reply.write(send)
        await self._send(self._h11.send(h11.EndOfMessage()), SEND_TIMEOUT)

    async def _send(self, data: bytes | None, patience: float) -> None:
        with trio.move_on_after(patience) as limit:
            try:
                await self._stream.send_all(data or b"")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise _ClientGone from None
        if limit.cancelled_caught:
            raise _ClientGone


def check_head(head: h11.Request) -> None:
    """Refuse what h11 lets pass and no honest client sends. Raises _Refused."""
    # h11 bounds a head only while it is incomplete (measured with 0.16.0): one that comes in one read may be longer.
    if sum(len(name) + len(value) for name, value in head.headers) + len(head.target) > HEAD_MAX:
        raise _Refused(431, "too-large", f"the head has more than {HEAD_MAX} bytes")
    if head.http_version not in (b"1.0", b"1.1"):
        raise _Refused(505, "bad-request", "only HTTP/1.0 and HTTP/1.1 are spoken here")
    names = [name for name, _ in head.headers]
    if names.count(b"content-length") > 1 or (b"content-length" in names and b"transfer-encoding" in names):
        raise _Refused(400, "bad-request", "the length of the body is given twice")
    for name, value in head.headers:
        # h11 has checked that it is a number; a long one is refused before its body is read.
        if name == b"content-length" and int(value) > BODY_MAX:
            raise _Refused(413, "too-large", f"the body has more than {BODY_MAX} bytes")
    if not head.target.startswith(b"/"):
        raise _Refused(400, "bad-request", "the request's target does not begin with /")


def as_request(head: h11.Request, body: bytes, peer: Peer) -> Request:
    """The handler's view. Of a header or query key that comes twice the last counts."""
    target = head.target.decode("ascii")
    path, _, query = target.partition("?")
    try:
        pairs = dict(parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=64))
        segments = tuple(unquote(part, errors="strict") for part in path.split("/")[1:])
    except ValueError as error:
        raise _Refused(400, "bad-request", f"the request's target is not readable: {error}") from error
    return Request(
        method=head.method.decode("ascii"),
        path=path,
        segments=segments,
        query=pairs,
        headers={name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers},
        body=body,
        peer=peer,
    )


def _hung_up(fd: int) -> bool:
    """Both directions are down: unlike the end of what the client sends, the end of the client (poll(2), POLLHUP)."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def json_reply(status: int, value: Mapping[str, object] | Sequence[object]) -> Reply:
    """ASCII only: whatever an engine wrote arrives at a terminal as an escape, not as a control character."""
    return Reply(status, json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n")
