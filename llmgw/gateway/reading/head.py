"""Heads: what of a parsed request head is refused, and the heads that go to the engine and to the client.

llhttp (httptools) has found the framing before. It accepts more than a proxy may: `check` refuses the rest. Both heads
are built anew from the parsed lines, never passed on, so that nobody can smuggle a request or a key through them.
"""

from __future__ import annotations

from typing import Protocol

from llmgw.gateway.reading import answers
from llmgw.gateway.reading.answers import Pair, Refusal

TARGET_MAX = 8 * 1024
"""Bytes of a request target (RFC 9112 asks for 8,000 at least)."""

FIELDS_MAX = 128
"""Header lines of one request. SDKs send some 16; llhttp has no limit of its own and took 20,000 in a test."""

_LENGTH_DIGITS = 15
"""Digits of a Content-Length that is still read: a petabyte is refused as too large, more is no number at all."""

_REQUEST_DROPPED = frozenset(
    {
        # Hop by hop (RFC 9110, 7.6.1), and what describes the client's framing instead of ours.
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
        b"content-length",
        b"expect",
        b"host",
        # The client's key is llmgw's business; the engine gets its own.
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"cookie",
        # Written anew below.
        b"x-request-id",
        # uvicorn believes these from loopback, where llmgw stands.
        b"forwarded",
        b"x-real-ip",
        # vLLM lets a client pick one of its data-parallel ranks with it: choosing is llmgw's business.
        b"x-data-parallel-rank",
    }
)
_REQUEST_DROPPED_PREFIXES = (b"x-llmgw-", b"x-forwarded-", b"x-gateway-inference-", b"x-llm-d-")

_ANSWER_DROPPED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"x-request-id",
        # It would send clients past llmgw.
        b"alt-svc",
    }
)
_ANSWER_DROPPED_PREFIXES = (b"x-llmgw-", b"access-control-")
"""What only llmgw says: why it refused, and which pages may read an answer."""

_EVENT_STREAM_DROPPED = frozenset({b"cache-control", b"x-accel-buffering"})

_PLAIN_CONNECTION = frozenset({b"keep-alive", b"close", b"Keep-Alive", b"Close"})
"""Values of Connection that name no header line."""

_MERGED = (b"connection", b"upgrade", b"transfer-encoding", b"content-length", b"expect")
_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})


class HeadLimits(Protocol):
    @property
    def max_header(self) -> int:
        """Bytes of all header lines."""
        ...


class Head:
    """A request head. The parser fills the first five; `summarise` derives the rest from them.

    Names in `headers` are in lower case. A plain object with slots: one is made per request.
    """

    __slots__ = (
        "_repeats_host",
        "chunked",
        "content_length",
        "content_type",
        "expect",
        "headers",
        "index",
        "keep_alive",
        "method",
        "target",
        "version",
    )

    def __init__(
        self,
        method: bytes = b"",
        target: bytes = b"",
        version: str = "1.1",
        headers: list[Pair] | None = None,
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.headers: list[Pair] = [] if headers is None else headers
        self.keep_alive = keep_alive
        """As llhttp says it, while the head is there: later it has forgotten."""
        self.index: dict[bytes, bytes] = {}
        """The last line of each name; of the names whose lines form one list, all of them."""
        self.content_length: int | None = None
        self.content_type = b""
        self.chunked = False
        self.expect = False
        """The client waits for `100 Continue` before it sends the body."""
        self._repeats_host = False

    def summarise(self) -> None:
        """Derive what the lines say about the body. Never raises; what makes no sense `check` refuses."""
        headers = self.headers
        index = self.index = dict(headers)
        self._repeats_host = False
        if len(index) != len(headers):
            names = [name for name, _ in headers]
            self._repeats_host = names.count(b"host") > 1
            for name in _MERGED:
                if name in index:
                    index[name] = b", ".join(value for key, value in headers if key == name)
        length = index.get(b"content-length")
        self.content_length = None if length is None else _length(length)
        self.content_type = index.get(b"content-type", b"")
        self.chunked = b"transfer-encoding" in index and index[b"transfer-encoding"].strip().lower() == b"chunked"
        self.expect = b"expect" in index and index[b"expect"].strip().lower() == b"100-continue"


def _length(text: bytes) -> int | None:
    text = text.strip(b" \t")
    return int(text) if text.isdigit() and len(text) <= _LENGTH_DIGITS else None


def check(head: Head, limits: HeadLimits) -> Refusal | None:
    """Why a head that llhttp accepted is not served; None when it is. `head.summarise()` comes before."""
    version, target, index = head.version, head.target, head.index
    if version != "1.1" and version != "1.0":
        return answers.version_not_supported(version)
    if len(target) > TARGET_MAX:
        return answers.target_too_long(TARGET_MAX)
    if len(head.headers) > FIELDS_MAX:
        return answers.too_many_headers(FIELDS_MAX)
    if len(b"".join(map(b"".join, head.headers))) > limits.max_header:
        return answers.head_too_large(limits.max_header)
    if head.method == b"CONNECT":
        return answers.connect_not_supported()
    coding = index.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0":
            return answers.bad_request("Transfer-Encoding is not part of HTTP/1.0")
        if b"content-length" in index:
            return answers.bad_request("it has both Content-Length and Transfer-Encoding")
        if not head.chunked:
            return answers.coding_not_supported(_shown(coding))
    elif head.content_length is None:
        if b"content-length" in index:
            return answers.bad_request(f"its Content-Length is not a length: {_shown(index[b'content-length'])}")
        if head.method in _WITH_BODY:
            return answers.length_required()
    if head._repeats_host:
        return answers.bad_request("it has more than one Host")
    if version == "1.1" and b"host" not in index:
        return answers.bad_request("it has no Host, which HTTP/1.1 demands")
    if target[:1] != b"/" and not (target == b"*" and head.method == b"OPTIONS"):
        return answers.bad_request("its target does not begin with a slash; llmgw is no forward proxy")
    if b"upgrade" in index and b"websocket" in index[b"upgrade"].lower():
        return answers.websocket_not_supported()
    return None


def _shown(value: bytes) -> str:
    """At most a short line of what a stranger sent."""
    return repr(value[:40].decode("latin-1"))


def _named(connection: bytes | None) -> frozenset[bytes]:
    """Header lines that a Connection line declares to be of this hop only."""
    if connection is None or connection in _PLAIN_CONNECTION:
        return frozenset()
    return frozenset(token.strip(b" \t").lower() for token in connection.split(b","))


def upstream_head(
    head: Head, *, path: bytes, host: bytes, content_length: int | None, api_key: str | None, request_id: str
) -> bytes:
    """The head that the engine gets: the client's lines without those of its own hop, its key, and llmgw's words."""
    named = _named(head.index.get(b"connection"))
    dropped = _REQUEST_DROPPED | named if named else _REQUEST_DROPPED
    lines = [
        name + b": " + value
        for name, value in head.headers
        if name not in dropped and not name.startswith(_REQUEST_DROPPED_PREFIXES)
    ]
    if api_key is not None:
        lines.append(b"authorization: Bearer " + api_key.encode())
    if content_length is not None:
        lines.append(b"content-length: %d" % content_length)
    return b"%b %b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n%b\r\n\r\n" % (
        head.method,
        path,
        host,
        request_id.encode("ascii", "replace"),
        b"\r\n".join(lines),
    )


def response_head(
    status: int,
    reason: bytes,
    headers: list[Pair],
    *,
    framing: str,
    request_id: str,
    keep_alive: bool,
    http10: bool,
    sse: bool,
    extra_headers: tuple[Pair, ...] = (),
) -> bytes:
    """The head that the client gets. `framing` is `length` (the engine's Content-Length stands), `chunked` or `close`.

    `headers` have names in lower case. An event stream (`sse`) is marked so that proxies before llmgw pass it on piece
    by piece: nginx obeys X-Accel-Buffering. `http10`: such a client takes a connection for closed unless told.
    """
    connection = None
    length = None
    lines = [b"HTTP/1.1 %d %b" % (status, reason)]
    for name, value in headers:
        if name in _ANSWER_DROPPED:
            if name == b"connection":
                connection = value if connection is None else connection + b"," + value
            elif name == b"content-length":
                length = value
        elif not name.startswith(_ANSWER_DROPPED_PREFIXES) and not (sse and name in _EVENT_STREAM_DROPPED):
            lines.append(name + b": " + value)
    named = _named(connection)
    if named:
        lines[1:] = [line for line in lines[1:] if line.partition(b":")[0] not in named]
    if framing == "chunked":
        lines.append(b"transfer-encoding: chunked")
    elif framing == "length" and length is not None:
        lines.append(b"content-length: " + length)
    if sse:
        lines.append(b"cache-control: no-cache\r\nx-accel-buffering: no")
    lines += [name + b": " + value for name, value in extra_headers]
    lines.append(b"x-request-id: " + request_id.encode("ascii", "replace"))
    if not keep_alive:
        lines.append(b"connection: close")
    elif http10:
        lines.append(b"connection: keep-alive")
    lines.append(b"\r\n")
    return b"\r\n".join(lines)
