"""A small HTTP/1.1 server on the event loop: keep-alive, bodies, event streams, and deliberate silence.

It is strict enough for honest clients and simple enough to misbehave on request: a handler may keep a
connection unanswered, write raw bytes, or stop in the middle.
"""

import socket
from collections.abc import Callable

from llmgw.fake.loop import READ, WRITE, Loop

MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class Request:
    """One request as read from the connection. `headers` has lower-case names."""

    __slots__ = ("body", "headers", "method", "path", "target")

    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.target = target
        self.path = target.split("?", 1)[0]
        self.headers = headers
        self.body = body


class Connection:
    """One client. At most one request is being answered at a time; what follows waits in the buffer."""

    def __init__(self, server: "Server", sock: socket.socket, client: str) -> None:
        self._server = server
        self._loop = server.loop
        self._sock = sock
        self.client = client
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._closing = False
        self.closed = False
        self.request: Request | None = None
        self.on_gone: Callable[[], None] | None = None
        """Called once when the client leaves while its request is being answered."""
        self._frozen = False
        self._loop.watch(sock, READ, self._ready)

    @property
    def busy(self) -> bool:
        return self.request is not None

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Send a whole answer and take the next request."""
        self._server.log_access(self, status)
        self.write_raw(
            f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\ncontent-type: {kind}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        self._finish()

    def start_stream(self) -> None:
        """Begin an event stream (chunked)."""
        self._server.log_access(self, 200)
        self.write_raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def send_chunk(self, data: bytes) -> None:
        self.write_raw(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.write_raw(b"0\r\n\r\n")
        self._finish()

    def write_raw(self, data: bytes) -> None:
        if self.closed or self._frozen:
            return
        self._outgoing += data
        self._flush()

    def unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        return len(self._outgoing)

    def freeze(self) -> None:
        """From now on send nothing, not even the end; only the client's leaving is still noticed."""
        self._frozen = True
        self._outgoing.clear()
        if not self.closed:
            self._loop.watch(self._sock, READ, self._ready)

    def close(self) -> None:
        """Close after what is buffered has been sent."""
        self._closing = True
        if not self._outgoing:
            self._drop()

    def abort(self) -> None:
        """Close at once, unsent bytes are lost."""
        self._drop()

    def _finish(self) -> None:
        self.on_gone = None
        wants_close = self.request is not None and self.request.headers.get("connection", "").lower() == "close"
        self.request = None
        if wants_close or self._server.closing:
            self.close()
        elif self._incoming:
            self._loop.call_later(0, self._next_request)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and not self.closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop()
            return
        if len(self._incoming) > MAX_HEAD + MAX_BODY:
            self._drop()
            return
        self._incoming += data
        self._next_request()

    def _next_request(self) -> None:
        if self.closed or self.busy or self._closing or self._frozen:
            return
        try:
            parsed = parse_request(self._incoming)
        except ValueError:
            self.write_raw(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close()
            return
        if parsed is None:
            return
        self.request, used = parsed
        del self._incoming[:used]
        self._server.handle(self.request, self)

    def _flush(self) -> None:
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            self._loop.watch(self._sock, READ | WRITE, self._ready)
            return
        except OSError:
            self._drop()
            return
        self._loop.watch(self._sock, READ, self._ready)
        if self._closing:
            self._drop()

    def _drop(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.unwatch(self._sock)
        self._sock.close()
        self._server.connections.discard(self)
        gone, self.on_gone = self.on_gone, None
        if gone is not None:
            gone()


def parse_request(data: bytearray) -> tuple[Request, int] | None:
    """The first request in `data` with the number of bytes it takes; None while it is incomplete.

    Raises ValueError for what is no HTTP/1 request or exceeds the limits.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MAX_HEAD:
            raise ValueError("request head too long")
        return None
    lines = data[:end].decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("not a request line")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError("not a header line")
        headers[name.strip().lower()] = value.strip()
    start = end + 4
    if headers.get("transfer-encoding", "").lower() == "chunked":
        chunked = _parse_chunked(data, start)
        if chunked is None:
            return None
        body, used = chunked
    else:
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= MAX_BODY:
            raise ValueError("body too long")
        used = start + length
        if len(data) < used:
            return None
        body = bytes(data[start:used])
    return Request(words[0], words[1], headers, body), used


def _parse_chunked(data: bytearray, start: int) -> tuple[bytes, int] | None:
    body = bytearray()
    while True:
        end = data.find(b"\r\n", start)
        if end < 0:
            return None
        size = int(data[start:end].split(b";")[0], 16)
        if size < 0 or len(body) + size > MAX_BODY:
            raise ValueError("body too long")
        start = end + 2
        if len(data) < start + size + 2:
            return None
        body += data[start : start + size]
        start += size + 2
        if size == 0:
            return bytes(body), start


Handler = Callable[[Request, Connection], None]
AccessLog = Callable[[Connection, int], None]


class Server:
    """Accepts clients on bound sockets and hands each request to `handler`."""

    def __init__(self, loop: Loop, handler: Handler, access: AccessLog | None = None) -> None:
        self.loop = loop
        self._handler = handler
        self._access = access
        self._listeners: list[socket.socket] = []
        self.connections: set[Connection] = set()
        self.closing = False

    def listen(self, sock: socket.socket) -> None:
        """Open a bound socket for clients. Raises OSError when another process got there first."""
        sock.listen(2048)
        sock.setblocking(False)
        self._listeners.append(sock)
        self.loop.watch(sock, READ, lambda _events: self._accept(sock))

    def close_listeners(self) -> None:
        """From now on connections are refused; those that exist go on."""
        self.closing = True
        for sock in self._listeners:
            self.loop.unwatch(sock)
            sock.close()
        self._listeners.clear()
        for connection in list(self.connections):
            if not connection.busy:
                connection.close()

    def handle(self, request: Request, connection: Connection) -> None:
        self._handler(request, connection)

    def log_access(self, connection: Connection, status: int) -> None:
        if self._access is not None:
            self._access(connection, status)

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(64):
            try:
                client, address = sock.accept()
            except OSError:
                return
            client.setblocking(False)
            if client.family != socket.AF_UNIX:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""
            self.connections.add(Connection(self, client, name))


def bind_tcp(host: str, port: int) -> socket.socket:
    """A socket bound, but not listening, with SO_REUSEADDR as all three engines set it. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def bind_unix(path: str) -> socket.socket:
    """A unix socket bound to `path`, not listening. Raises OSError, also when a left-over file lies there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError:
        sock.close()
        raise
    return sock
