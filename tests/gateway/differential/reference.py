"""The reference: HTTP as h11 reads it. Slow, lenient here and there, and written by others than llhttp."""

from __future__ import annotations

import re

import h11
from attrs import frozen

HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"}
    | {b"host", b"proxy-connection", b"http2-settings", b"proxy-authorization", b"proxy-authenticate"}
)


@frozen
class Read:
    """A whole message. Names of headers are in lower case."""

    method: bytes
    target: bytes
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def end_to_end(self) -> list[tuple[bytes, bytes]]:
        """Headers without those of one hop, those that Connection names included."""
        named = {
            token.strip().lower()
            for name, value in self.headers
            if name == b"connection"
            for token in value.split(b",")
        }
        return sorted((name, value) for name, value in self.headers if name not in HOP | named)


class Refused(Exception):
    """h11 does not take it for HTTP."""


class Incomplete(Exception):
    """More has to come."""


def read_request(data: bytes) -> Read:
    """The first request in some bytes. Raises Refused or Incomplete.

    Several blanks in the request line are taken for one, as RFC 9112 (section 3) allows: llhttp does so too.
    """
    line, end, rest = data.partition(b"\r\n")
    data = re.sub(rb" +", b" ", line) + end + rest
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    return _read(connection, data, is_end=False)


def read_answer(data: bytes, *, to: bytes, is_end: bool) -> Read:
    """An answer to a request of the method `to`; `is_end`: the connection has ended behind these bytes."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    length = [("content-length", "0")] if to == b"POST" else []
    connection.send(h11.Request(method=to, target="/", headers=[("host", "x"), *length]))
    connection.send(h11.EndOfMessage())
    return _read(connection, data, is_end=is_end)


def _read(connection: h11.Connection, data: bytes, *, is_end: bool) -> Read:
    head: h11.Request | h11.Response | None = None
    body = b""
    try:
        connection.receive_data(data)
        if is_end and data:
            connection.receive_data(b"")
        while True:
            event = connection.next_event()
            match event:
                case h11.Request() | h11.Response():
                    head = event
                case h11.Data():
                    body += bytes(event.data)
                case h11.EndOfMessage():
                    break
                case h11.InformationalResponse():
                    continue
                case _:
                    raise Incomplete
    except h11.RemoteProtocolError as error:
        raise Refused(str(error)) from error
    assert head is not None
    headers = tuple((bytes(name), bytes(value)) for name, value in head.headers)
    if isinstance(head, h11.Request):
        return Read(bytes(head.method), bytes(head.target), 0, headers, body)
    return Read(b"", b"", head.status_code, headers, body)
