"""A client's connection: bytes in, whole requests out, answers back. What is decided about them is the server's.

Everything here runs in callbacks of the plane, but for `next_request` and `flush`, in which the connection's own task
sleeps. llhttp (httptools) finds the framing; what it accepts and a proxy must not is judged in `reading.head`.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from attrs import frozen

from llmgw.gateway.plane import BROKEN, GONE, READ, WRITE, Latch, Plane
from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Refusal
from llmgw.gateway.reading.head import Head

PIPELINE = 4
"""Whole requests that wait behind the one that runs; then reading stops. llhttp cannot be paused between messages: all
that came in one read are taken."""

RECV = 64 * 1024
"""Bytes of one read. Below glibc's threshold for mmap, which would cost two more system calls per read."""
RECV_BODY = 256 * 1024
"""The same while a large body comes."""
TARGET_MAX = 8 * 1024

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

IDLE, HEAD, BODY = "idle", "head", "body"
"""How far the request is that comes in now: nothing of it, a part of its head, a part of its body."""

LINGER = 2.0
"""Seconds in which a client may read why it was refused: closing at once with its bytes unread would reset it."""


@frozen
class Limits:
    """Sizes in bytes, times in seconds."""

    max_header: int
    max_body: int
    max_buffered: int
    head_timeout: float
    body_timeout: float
    write_timeout: float
    keepalive_timeout: float


class Buffered:
    """All request bodies that are held now, in bytes."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class Request:
    """A request as it stands in the queue of its connection."""

    __slots__ = ("arrived", "head", "held", "parts", "passed", "refusal", "size")

    def __init__(self, head: Head) -> None:
        self.head = head
        self.parts: list[bytes] = []
        self.size = 0
        """Bytes of the body that have come."""
        self.held = 0
        """Bytes reserved for it in `Buffered`."""
        self.passed: Any = None
        """What the gate found out about it."""
        self.refusal: Refusal | None = None
        self.arrived = 0.0


Gate = Callable[[Head, str], "Refusal | Any"]
"""Judges a head as soon as it is there: a refusal, or what the server wants to know later."""


class Client:
    """One connection. Its task owns it and calls `close`; `gone` says that the other side has left."""

    __slots__ = (
        "_buffered",
        "_busy",
        "_descriptor",
        "_discards",
        "_ends",
        "_frame_bytes",
        "_gate",
        "_head",
        "_head_bytes",
        "_limits",
        "_now",
        "_out",
        "_owes_continue",
        "_parser",
        "_phase",
        "_plane",
        "_queue",
        "_reading",
        "_request",
        "_sock",
        "_upgrading",
        "_url",
        "deadline",
        "ends_by_closing",
        "gone",
        "is_closed",
        "latch",
        "on_deadline",
        "on_flushed",
        "on_gone",
        "peer",
        "sent",
    )

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        plane: Plane,
        limits: Limits,
        buffered: Buffered,
        gate: Gate,
        now: Callable[[], float],
    ) -> None:
        self._sock = sock
        self._descriptor = sock.fileno()
        self._plane = plane
        self._limits = limits
        self._buffered = buffered
        self._gate = gate
        self._now = now
        self.peer = peer
        self.latch = Latch()
        self.gone = False
        self.is_closed = False
        self.deadline: float | None = None
        """When `expire` is to be called, on the monotonic clock; whoever waits for something sets it."""
        self.on_deadline: Callable[[], None] | None = None
        """Whose deadline it is while an exchange runs."""
        self.on_gone: Callable[[], None] | None = None
        """Called in the moment in which the client leaves, for what must not wait for the task (a place in a queue)."""
        self.on_flushed: Callable[[], None] | None = None
        self.ends_by_closing = False
        """The answer under way has no other end than that of the connection."""
        self.sent = 0
        """Bytes sent since the request began; zero: another answer is still possible."""
        self._queue: deque[Request] = deque()
        self._request: Request | None = None
        self._phase = IDLE
        self._out = b""
        self._reading = True
        self._busy = False
        """Its task is at work on a request: deadlines are that request's."""
        self._discards = False
        self._ends = False
        """What comes behind the last request is no request: that one ends the connection."""
        self._owes_continue = False
        self._parser: httptools.HttpRequestParser | None = None
        self._begin()
        self.deadline = now() + limits.head_timeout
        plane.add(self._descriptor, READ | GONE, self._ready)

    # -- the connection's task ---------------------------------------------------------------------------

    async def next_request(self) -> Request | None:
        """The next request, whole or refused; None when the client has left or stays silent for too long."""
        self._busy = False
        while True:
            if self.gone:
                return None
            if self._queue:
                request = self._queue.popleft()
                self._busy = True
                self.deadline = None
                self.sent = 0
                self.ends_by_closing = False
                return request
            if not self._reading and not self.is_closed:
                self._reading = True
                self._set_interest()
            if self._owes_continue:
                self._owes_continue = False
                self.write(CONTINUE)
            self._set_deadline()
            await self.latch.wait()

    async def flush(self) -> bool:
        """Wait until everything that was written is with the kernel; False when the client has left instead."""
        while self._out and not self.gone:
            await self.latch.wait()
        return not self.gone

    def release(self, request: Request) -> None:
        """Its body is not needed any more."""
        self._buffered.held -= request.held
        request.held = 0
        request.parts = []

    def close(self) -> None:
        """Drop the connection, whatever has not been sent yet."""
        if self.is_closed:
            return
        self.is_closed = True
        if not self.gone:
            self._plane.remove(self._descriptor)
        self.gone = True
        self._sock.close()
        for request in self._queue:
            self.release(request)
        if self._request is not None:
            self.release(self._request)
        # The parser holds this object's methods: without this, each connection would be a cycle for the collector.
        self._parser = None
        self.on_gone = self.on_flushed = self.on_deadline = None

    def truncate(self) -> None:
        """The answer has broken off, and the client must see that: no more bytes, no end that looks like one."""
        if self.ends_by_closing and not self.gone:
            # Such an answer ends where the connection does: only a reset says that this was not the end.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close()

    def dismiss(self) -> None:
        """Close it if it waits for a request: llmgw ends. One that has come and was not read yet is read first."""
        if self._reading and not self.gone:
            self._read()
        if not self._busy and self._phase == IDLE and not self._queue:
            self._leave()

    async def linger(self) -> None:
        """Say that nothing more comes and read on for a moment, so that no reset overtakes the answer."""
        if self.gone:
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return
        self._discards = self._reading = True
        self._set_interest()
        self._busy, self._phase = False, IDLE
        self.deadline = self._now() + LINGER
        while not self.gone:
            await self.latch.wait()

    # -- writing -----------------------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        """Send; what the kernel does not take is kept. True when it took everything."""
        if self.gone:
            return True
        self.sent += len(data)
        if self._out:
            self._out += data
            return False
        try:
            count = self._sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError:
            self._leave()
            return True
        if count == len(data):
            return True
        self._out = data[count:]
        self.deadline = self._now() + self._limits.write_timeout
        self._set_interest()
        return False

    @property
    def is_stalled(self) -> bool:
        return bool(self._out)

    def _send_rest(self) -> None:
        try:
            count = self._sock.send(self._out)
        except BlockingIOError:
            return
        except OSError:
            self._leave()
            return
        self._out = self._out[count:]
        if self._out:
            self.deadline = self._now() + self._limits.write_timeout
            return
        self.deadline = None
        self._set_interest()
        if self.on_flushed is not None:
            self.on_flushed()
        else:
            self.latch.set()

    # -- deadlines ---------------------------------------------------------------------------------------

    def expire(self) -> None:
        """The deadline has passed."""
        self.deadline = None
        if self._out:
            # It does not read.
            self._leave()
        elif self._busy:
            if self.on_deadline is not None:
                self.on_deadline()
        elif self._phase == IDLE:
            self._leave()
        else:
            self._refuse(answers.too_slow("head" if self._phase == HEAD else "body"))

    def _set_deadline(self) -> None:
        if self._out or self.gone:
            return
        limits = self._limits
        wait = {IDLE: limits.keepalive_timeout, HEAD: limits.head_timeout, BODY: limits.body_timeout}[self._phase]
        self.deadline = self._now() + wait

    def _arm(self, timeout: float) -> None:
        if not self._busy and not self._out:
            self.deadline = self._now() + timeout

    # -- what the plane calls ----------------------------------------------------------------------------

    def _ready(self, events: int) -> None:
        if events & WRITE and self._out:
            self._send_rest()
            if self.gone:
                return
        if events & READ and self._reading:
            self._read()
        if events & (GONE | BROKEN) and not self.gone:
            self._leave()

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECV_BODY if self._phase == BODY else RECV)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave()
        elif not self._discards:
            self._feed(data)

    def _leave(self) -> None:
        if self.gone:
            return
        self.gone = True
        self._plane.remove(self._descriptor)
        self._out = b""
        if self.on_gone is not None:
            self.on_gone()
        self.latch.set()

    def _set_interest(self) -> None:
        if not self.gone:
            events = GONE | (READ if self._reading else 0) | (WRITE if self._out else 0)
            self._plane.change(self._descriptor, events)

    # -- parsing -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._head = Head()
        self._head_bytes = 0
        self._frame_bytes = 0
        """Of a chunked body: what came since its last byte, and was neither body nor anything that is kept."""
        self._url = b""
        self._upgrading = False

    def _feed(self, data: bytes) -> None:
        parser = self._parser
        assert parser is not None
        if self._phase in (IDLE, HEAD):
            self._head_bytes += len(data)
        elif self._phase == BODY:
            self._frame_bytes += len(data)
            self._arm(self._limits.body_timeout)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._ends:
                self._refuse(answers.parser_error(str(error)))
        else:
            limit = self._limits.max_header
            if self._phase == HEAD and self._head_bytes > limit + TARGET_MAX:
                self._refuse(answers.head_too_large(limit))
            elif self._phase == BODY and self._frame_bytes > limit:
                # Trailers and chunk extensions have no limit in llhttp.
                self._refuse(answers.head_too_large(limit))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """llhttp ends a message that asks for an upgrade at its head. A client that offers HTTP/2 beside a plain
        request wants that request answered, so its head is read again without the offer, and then its body.
        """
        head, self._upgrading = self._head, False
        if self._ends:
            return
        kept = [pair for pair in head.headers if pair[0] not in (b"upgrade", b"http2-settings", b"connection")]
        lines = [b"%s %s HTTP/%s\r\n" % (head.method, head.target, head.version.encode())]
        lines += [b"%s: %s\r\n" % pair for pair in kept]
        self._begin()
        self._feed(b"".join(lines) + b"\r\n" + rest)

    def on_message_begin(self) -> None:
        self._head = Head()
        self._url = b""
        if self._phase == IDLE:
            self._phase = HEAD
            self._arm(self._limits.head_timeout)

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > TARGET_MAX and not self._ends:
            self._refuse(answers.target_too_long(TARGET_MAX))

    def on_header(self, name: bytes, value: bytes) -> None:
        # Behind a body stand trailers. They were never judged as headers, so they are none.
        if self._phase != BODY:
            self._head.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._ends:
            return
        parser, head = self._parser, self._head
        assert parser is not None
        head.method = parser.get_method()
        head.target = self._url
        head.version = parser.get_http_version()
        head.keep_alive = parser.should_keep_alive()
        self._head_bytes = 0
        head.summarise()
        found = self._gate(head, self.peer)
        if isinstance(found, Refusal):
            self._refuse(found)
            return
        if parser.should_upgrade():
            self._upgrading = True
            return
        request = Request(head)
        request.passed = found
        self._request = request
        self._phase = BODY
        if head.content_length:
            if head.content_length > self._limits.max_body:
                self._refuse(answers.body_too_large(self._limits.max_body))
                return
            if not self._hold(request, head.content_length):
                return
        if head.expect and (head.chunked or head.content_length):
            if self._queue or self._busy:
                self._owes_continue = True
            else:
                self.write(CONTINUE)
                self.sent = 0
        self._arm(self._limits.body_timeout)

    def _hold(self, request: Request, size: int) -> bool:
        """Reserve memory for a body. False when there is none: the request is refused."""
        if self._buffered.held + size > self._limits.max_buffered:
            self._refuse(answers.no_body_memory())
            return False
        self._buffered.held += size
        request.held += size
        return True

    def on_body(self, body: bytes) -> None:
        request = self._request
        if request is None:
            return
        request.size += len(body)
        self._frame_bytes = 0
        if request.size > self._limits.max_body:
            self._refuse(answers.body_too_large(self._limits.max_body))
        elif request.size <= request.held or self._hold(request, request.size - request.held):
            request.parts.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        self._phase = IDLE
        if request is None or self._upgrading:
            return
        request.arrived = self._now()
        self._queue.append(request)
        if not request.head.keep_alive:
            # Nothing behind it is a request; llhttp would call it an error.
            self._ends = True
            self._stop_reading()
        elif len(self._queue) >= PIPELINE:
            self._stop_reading()
        if not self._busy:
            self.deadline = None
        self.latch.set()

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._set_interest()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer and end: what follows on this connection cannot be told from what belongs to this request."""
        request, self._request = self._request or Request(self._head), None
        self.release(request)
        request.refusal = refusal
        request.arrived = self._now()
        request.head.keep_alive = False
        self._phase = IDLE
        self._ends = True
        self._queue.append(request)
        self._stop_reading()
        self.latch.set()
