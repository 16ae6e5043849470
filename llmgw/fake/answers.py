"""Wrong answers to probes: what a server says that is no engine, or an engine in trouble."""

import time
from collections.abc import Callable

from llmgw.fake.http import Connection
from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import Loop

HUGE_BYTES = 64 * 1024 * 1024
DRIP_SECONDS = 0.2  # slower than any sensible wait for the next byte times the length of the body


def misanswer(kind: str, connection: Connection, loop: Loop) -> None:
    """Answer the connection's request in the wrong way named `kind` (one of `knobs.GARBAGE`)."""
    if kind == "not-http":
        connection.write_raw(b"\x15\x03\x01\x00\x02\x02\x50 SSH-2.0-nothing\r\n\xff\xfe\r\n")
        connection.close()
    elif kind == "not-json":
        connection.reply(200, b"all fine here, thanks", "text/plain")
    elif kind == "other-json":
        connection.reply(200, b'[null, {"data": 7, "object": ["list"]}]')
    elif kind == "html-404":
        connection.reply(404, b"<html><body><h1>Not Found</h1></body></html>", "text/html")
    elif kind == "empty":
        connection.reply(200, b"")
    elif kind == "deep-json":
        connection.reply(200, b"[" * 200_000 + b"]" * 200_000)
    elif kind == "huge":
        connection.reply(200, b'{"object": "list", "data": "' + b"x" * HUGE_BYTES + b'"}')
    elif kind == "endless":
        connection.start_stream()
        _pour(connection, loop)
    elif kind == "drip":
        connection.write_raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n")
        _drip(connection, loop)
    elif kind == "close":
        connection.abort()
    # "silent": the connection stays open without a byte


def _pour(connection: Connection, loop: Loop) -> None:
    if connection.closed:
        return
    if connection.unsent() < 256 * 1024:  # a client that does not read must not bloat the fake
        connection.send_chunk(b" " * 65536)
    loop.call_later(0.005, lambda: _pour(connection, loop))


def _drip(connection: Connection, loop: Loop) -> None:
    if connection.closed:
        return
    connection.write_raw(b" ")
    loop.call_later(DRIP_SECONDS, lambda: _drip(connection, loop))


class Probes:
    """Puts the knobs about health and model list in front of the engine's own answers."""

    def __init__(self, loop: Loop, knobs: Knobs) -> None:
        self._loop = loop
        self._knobs = knobs
        self._ready_at: float | None = None

    def became_ready(self) -> None:
        self._ready_at = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self._ready_at is not None

    def health(self, connection: Connection, normal: Callable[[], None], unwell: Callable[[], None]) -> None:
        """Answer a health probe: by `normal`, by `unwell` while the 503 of the knobs lasts, or wrongly."""
        if self._knobs.health_garbage != "none":
            misanswer(self._knobs.health_garbage, connection, self._loop)
            return
        answer = unwell if self._says_503() else normal
        if self._knobs.health_delay:
            self._loop.call_later(self._knobs.health_delay, lambda: None if connection.closed else answer())
        else:
            answer()

    def models(self, connection: Connection, normal: Callable[[], None]) -> None:
        if self._knobs.models_garbage != "none":
            misanswer(self._knobs.models_garbage, connection, self._loop)
        else:
            normal()

    def _says_503(self) -> bool:
        after = self._knobs.health_503_after
        if after is None or self._ready_at is None:
            return False
        since = time.monotonic() - self._ready_at - after
        lasts = self._knobs.health_503_for
        return since >= 0 and (lasts is None or since < lasts)
