"""One request's way through one engine connection: its bytes out, the answer's bytes back, and how it ended.

The callbacks of both connections move bytes; the request's task sleeps in `wait` and gets one word:
`ok`, `gone` (the client), `upstream` (no byte came), `truncated` (the answer broke off), `bad` (framing that is none),
`first-byte` or `chunk` (too slow), or what `end` was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import httptools

from llmgw.gateway.client import Client
from llmgw.gateway.plane import READ, WRITE
from llmgw.gateway.reading.answers import Pair
from llmgw.gateway.reading.head import response_head
from llmgw.gateway.upstream import Upstream

RECV = 64 * 1024
HEAD_MAX = 64 * 1024
"""Bytes of an engine's answer head."""
SENT_AT_ONCE = 512
"""Buffers in one sendmsg; the kernel takes 1024 at most."""

NO_BODY = frozenset({204, 304})

OK, GONE, UPSTREAM, TRUNCATED, BAD = "ok", "gone", "upstream", "truncated", "bad"
FIRST_BYTE, CHUNK = "first-byte", "chunk"

LENGTH, CHUNKED, CLOSE = "length", "chunked", "close"


class ChunkObserver(Protocol):
    """Counts the pauses between the pieces of an answer, in seconds."""

    def chunk(self, gap: float) -> None: ...


class _Answer:
    """What llhttp finds in an answer's head. `keep_alive` is read in its callback: later llhttp has forgotten it."""

    __slots__ = ("again", "complete", "head_complete", "headers", "keep_alive", "parser", "reason")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.reason = b""
        self.keep_alive = False
        self.head_complete = False
        self.complete = False
        self.again = False
        """Something came behind the end of the message."""
        self.parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        if self.complete:
            self.again = True

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_complete:
            # What comes later is a trailer.
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        self.keep_alive = self.parser.should_keep_alive()
        self.head_complete = True

    def on_message_complete(self) -> None:
        self.complete = True


class _DecodedAnswer(_Answer):
    """The same for a client that knows no chunks."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        super().__init__()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)


class Exchange:
    """Made for one try on one connection, ended by `unlink`."""

    __slots__ = (
        "_answer",
        "_buffer",
        "_chunk_timeout",
        "_client",
        "_cut",
        "_done",
        "_extra_headers",
        "_framing",
        "_http10",
        "_is_head",
        "_left",
        "_now",
        "_observer",
        "_out",
        "_paused",
        "_request_id",
        "_skip",
        "_upstream",
        "_waits",
        "_wants_keep_alive",
        "bytes_out",
        "chunks",
        "first_byte",
        "keep_client",
        "last",
        "last_at",
        "previous",
        "result",
        "sse",
        "status",
    )

    def __init__(
        self,
        client: Client,
        upstream: Upstream,
        *,
        is_head: bool,
        http10: bool,
        keep_alive: bool,
        request_id: str,
        extra_headers: tuple[Pair, ...],
        first_byte_timeout: float | None,
        chunk_timeout: float | None,
        observer: ChunkObserver,
        now: Callable[[], float],
    ) -> None:
        self._client = client
        self._upstream = upstream
        self._is_head = is_head
        self._http10 = http10
        self._wants_keep_alive = keep_alive
        self._request_id = request_id
        self._extra_headers = extra_headers
        self._chunk_timeout = chunk_timeout
        self._observer = observer
        self._now = now
        self._answer: _Answer | None = None
        self._buffer = b""
        self._framing = LENGTH
        self._left = 0
        """Bytes of the body that are to come, where the answer told its length."""
        self._out: Sequence[bytes] = ()
        self._skip = 0
        self._cut = False
        """The engine did not take all of the request."""
        self._waits = False
        """The kernel has no room for the rest of the request."""
        self._paused = False
        """The client does not keep up: the engine is not read."""
        self._done = False
        self.result: str | None = None
        self.status = 0
        self.sse = False
        self.keep_client = False
        """The client's connection may carry another request."""
        self.first_byte: float | None = None
        self.last_at = 0.0
        self.chunks = 0
        self.bytes_out = 0
        self.last = self.previous = b""
        """The last two pieces of the body, in which engines tell their counts of tokens."""
        upstream.exchange = self
        upstream.pool.exchanges.add(self)
        client.on_deadline = self._expired
        client.on_flushed = self._flushed
        client.deadline = None if first_byte_timeout is None else now() + first_byte_timeout

    def send(self, parts: Sequence[bytes]) -> None:
        """Begin to send the request: its head, then the pieces of its body as they came."""
        self._out = parts
        self._send_more()

    @property
    def is_reusable(self) -> bool:
        """The connection carries another request: the answer ended cleanly, and so did the request."""
        answer = self._answer
        whole = self._done and not self._cut and not self._out
        return whole and answer is not None and answer.keep_alive and self._framing is not CLOSE

    def end(self, result: str) -> None:
        """It has ended so; the first word stands. Also called from outside, when the endpoint is no more."""
        if self.result is None:
            self.result = result
            self._client.latch.set()

    async def wait(self) -> str:
        """Sleep until it has ended."""
        while self.result is None:
            if self._client.gone:
                return GONE
            await self._client.latch.wait()
        return self.result

    def unlink(self) -> None:
        """Take both connections back: nothing of this exchange is called any more."""
        client, upstream = self._client, self._upstream
        client.on_deadline = client.on_flushed = None
        client.deadline = None
        upstream.pool.exchanges.discard(self)
        if self._paused and self.is_reusable:
            upstream.listen_for(READ)
        if self._answer is not None:
            # It holds this exchange's parser and is held by it.
            self._answer.parser = None
        upstream.exchange = None

    # -- what the plane calls ----------------------------------------------------------------------------

    def upstream_ready(self, events: int) -> None:
        if events & WRITE and self._out:
            self._send_more()
        # Its task may not have run yet since it was told of the end.
        if events & ~WRITE and not self._done and self.result is None:
            self._receive()

    def _send_more(self) -> None:
        sock, out, skip = self._upstream.sock, self._out, self._skip
        while out:
            first = memoryview(out[0])[skip:] if skip else out[0]
            try:
                sent = sock.sendmsg([first, *out[1:SENT_AT_ONCE]]) + skip
            except BlockingIOError:
                break
            except OSError:
                # It closed its side. An answer may be there already (a refusal of a large body): reading tells.
                self._cut = True
                out, skip = (), 0
                break
            index = 0
            while index < len(out) and sent >= len(out[index]):
                sent -= len(out[index])
                index += 1
            out, skip = out[index:], sent
        self._out, self._skip = out, skip
        if self._waits != bool(out):
            self._waits = bool(out)
            self._listen()

    def _listen(self) -> None:
        self._upstream.listen_for((0 if self._paused else READ) | (WRITE if self._waits else 0))

    def _receive(self) -> None:
        try:
            data = self._upstream.sock.recv(RECV)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._upstream_ended()
        elif self._answer is None:
            self._read_head(data)
        else:
            self._read_body(data)

    def _upstream_ended(self) -> None:
        if self._answer is None:
            self.end(BAD if self._buffer else UPSTREAM)
        elif self._framing is CLOSE:
            self._complete()
        else:
            self.end(TRUNCATED)

    # -- the answer --------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._buffer = data
                if len(data) > HEAD_MAX:
                    self.end(BAD)
                return
            answer = _DecodedAnswer() if self._http10 else _Answer()
            parser = answer.parser
            assert parser is not None
            try:
                parser.feed_data(data[:end])
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                answer.parser = None
                self.end(BAD)
                return
            status = parser.get_status_code()
            data = data[end:]
            if status >= 200:
                break
            # 1xx comes before the answer and is not it.
            answer.parser = None
        self._buffer = b""
        if not self._frame(answer, status):
            answer.parser = None
            self.end(BAD)
            return
        self._answer = answer
        self.status = status
        now = self.first_byte = self.last_at = self._now()
        if self._chunk_timeout is not None:
            self._client.deadline = now + self._chunk_timeout
        framing = CLOSE if self._framing is CLOSE or (self._http10 and self._framing is CHUNKED) else self._framing
        if framing is CLOSE:
            self._client.ends_by_closing = True
        self.keep_client = self._wants_keep_alive and framing is not CLOSE
        head = response_head(
            status,
            answer.reason,
            answer.headers,
            framing=framing,
            request_id=self._request_id,
            keep_alive=self.keep_client,
            http10=self._http10,
            sse=self.sse,
            extra_headers=self._extra_headers,
        )
        self._read_body(data, head)

    def _frame(self, answer: _Answer, status: int) -> bool:
        """Find how the body ends. False: in no way that can be passed on."""
        codings = []
        length = None
        for name, value in answer.headers:
            if name == b"transfer-encoding":
                codings.append(value.strip().lower())
            elif name == b"content-length":
                length = int(value)
            elif name == b"content-type" and value.lower().startswith(b"text/event-stream"):
                self.sse = True
        if self._is_head or status in NO_BODY:
            return True
        if codings:
            self._framing = CHUNKED
            # The client is told `chunked`: beside or instead of it another coding would be lost.
            return codings == [b"chunked"]
        if length is None:
            self._framing = CLOSE
        else:
            self._left = length
        return True

    def _read_body(self, data: bytes, head: bytes = b"") -> None:
        answer, client = self._answer, self._client
        assert answer is not None
        if not head:
            now = self._now()
            self._observer.chunk(now - self.last_at)
            self.last_at = now
            if self._chunk_timeout is not None and not client.is_stalled:
                client.deadline = now + self._chunk_timeout
        ended = False
        if self._framing is LENGTH:
            self._left -= len(data)
            if self._left < 0:
                # More than it announced: the rest belongs to nobody, and the connection is used no more.
                data = data[: self._left]
                answer.keep_alive = False
                self._left = 0
            ended = self._left == 0
        elif self._framing is CHUNKED and data:
            parser = answer.parser
            assert parser is not None
            try:
                parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                if head:
                    client.write(head)
                self.end(BAD)
                return
            if answer.again:
                self.end(BAD)
                return
            if isinstance(answer, _DecodedAnswer):
                data = b"".join(answer.pieces)
                answer.pieces.clear()
            ended = answer.complete
        if data:
            self.chunks += 1
            self.bytes_out += len(data)
            self.previous, self.last = self.last, data
        taken = client.write(head + data if head else data) if head or data else True
        if ended:
            self._complete()
        elif not taken:
            self._paused = True
            self._listen()

    def _complete(self) -> None:
        self._done = True
        if not self._client.is_stalled:
            self.end(OK)

    def _flushed(self) -> None:
        if self._done:
            self.end(OK)
            return
        if self._paused:
            self._paused = False
            self._listen()
        if self._chunk_timeout is not None:
            self._client.deadline = self._now() + self._chunk_timeout

    def _expired(self) -> None:
        self.end(FIRST_BYTE if self._answer is None else CHUNK)
