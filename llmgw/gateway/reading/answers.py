"""What llmgw answers itself: each refusal with its status, its reason and its words, and how they look in bytes.

Every refusal says that llmgw said it, what could not be done and what to do; the reason stands in `x-llmgw-reason` too.
Where a repetition cannot help, `x-should-retry: false` keeps OpenAI's SDKs from asking two more times (they repeat
408, 409, 429 and everything from 500 on).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeAlias

from attrs import frozen

Pair: TypeAlias = tuple[bytes, bytes]
"""A header line: its name, in lower case where it is read, and its value."""

SDK_PATIENCE = 60.0
"""Seconds. OpenAI's Python SDK obeys a Retry-After up to here; beyond it repeats after less than 10 s, in vain."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

_REASONS = {
    200: b"OK",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    408: b"Request Timeout",
    411: b"Length Required",
    413: b"Content Too Large",
    414: b"URI Too Long",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""`type` of an error body; other statuses below 500 are `invalid_request_error`, the rest `server_error`."""


@frozen
class Refusal:
    """An answer instead of an engine's. `code` is the reason; `retry_after` is in seconds."""

    status: int
    code: str
    message: str
    retry_after: float | None = None
    may_retry: bool = True
    """A repetition of the same request can help."""
    close: bool = False
    """The connection cannot be used further: where this request ends is not known."""


def render(
    refusal: Refusal,
    *,
    request_id: str,
    keep_alive: bool,
    head_only: bool,
    extra_headers: Sequence[Pair] = (),
) -> bytes:
    """A refusal as a whole response; without its body for an answer to HEAD."""
    status, retry_after = refusal.status, refusal.retry_after
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    body = json.dumps({"error": {"message": f"llmgw: {refusal.message}", "type": kind, "code": refusal.code}})
    headers: list[Pair] = [(b"x-llmgw-reason", refusal.code.encode())]
    if retry_after is not None:
        seconds = max(retry_after, 0.001)
        headers.append((b"retry-after", b"%d" % math.ceil(seconds)))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)))
    if not refusal.may_retry or (retry_after is not None and retry_after > SDK_PATIENCE):
        headers.append((b"x-should-retry", b"false"))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return respond(
        status,
        b"application/json",
        body.encode(),
        request_id=request_id,
        keep_alive=keep_alive and not refusal.close,
        head_only=head_only,
        extra_headers=(*headers, *extra_headers),
    )


def respond(
    status: int,
    content_type: bytes,
    body: bytes,
    *,
    request_id: str,
    keep_alive: bool,
    head_only: bool,
    extra_headers: Iterable[Pair] = (),
) -> bytes:
    """An answer of llmgw itself as a whole response."""
    lines = [b"HTTP/1.1 %d %b" % (status, _REASONS[status])]
    if status != 204:
        lines.append(b"content-type: %b\r\ncontent-length: %d" % (content_type, len(body)))
    lines += [name + b": " + value for name, value in extra_headers]
    lines.append(b"x-request-id: " + request_id.encode("ascii", "replace"))
    lines.append(b"connection: keep-alive" if keep_alive else b"connection: close")
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    return head if head_only or status == 204 else head + body


def request_id(headers: Iterable[Pair]) -> str | None:
    """The id that the client gave its request; None when there is none, or none that may stand in a log line."""
    for name, value in headers:
        if name == b"x-request-id":
            value = value.strip(b" \t")
            return value.decode("ascii") if _REQUEST_ID.fullmatch(value) else None
    return None


# -- the request itself: 400, 408, 411, 413, 414, 431, 501, 505 ------------------------------------------


def bad_request(why: str) -> Refusal:
    """Broken framing: what follows on the connection cannot be told from this request."""
    return Refusal(400, "bad-request", f"cannot read this request: {why}", may_retry=False, close=True)


def parser_error(text: str) -> Refusal:
    """What llhttp did not accept, by the text of its error.

    The texts are llhttp 9's as httptools 0.9 passes them on; one that is not known is a 400.
    """
    if "HTTP version" in text or "Pause on PRI" in text:
        return version_not_supported("another one")
    if "Transfer-Encoding" in text and "can't be present" not in text:
        return coding_not_supported("another one")
    return bad_request(text[:1].lower() + text[1:])


def bad_body(why: str) -> Refusal:
    """The framing is fine and the connection good; what came is not what the path takes."""
    return Refusal(400, "bad-body", f"cannot read the body of this request: {why}", may_retry=False)


def missing_model(why: str) -> Refusal:
    message = f'cannot choose a model: {why}; write "model": "NAME" (GET /v1/models lists the names)'
    return Refusal(400, "missing-model", message, may_retry=False)


def too_slow(part: str) -> Refusal:
    """`part` is `head` or `body`."""
    key = "head_timeout" if part == "head" else "body_timeout"
    message = f"cannot wait any longer for the {part} of this request (gateway.{key})"
    return Refusal(408, f"{part}-timeout", message, close=True)


def length_required() -> Refusal:
    message = "cannot tell where the body ends: neither Content-Length nor Transfer-Encoding: chunked; send one of them"
    return Refusal(411, "length-required", message, may_retry=False, close=True)


def body_too_large(limit: int) -> Refusal:
    message = f"cannot take a body of more than {_bytes(limit)}; gateway.max_body is the limit"
    return Refusal(413, "body-too-large", message, may_retry=False, close=True)


def target_too_long(limit: int) -> Refusal:
    message = f"cannot read a request target of more than {_bytes(limit)}"
    return Refusal(414, "target-too-long", message, may_retry=False, close=True)


def head_too_large(limit: int) -> Refusal:
    message = f"cannot take a request head of more than {_bytes(limit)}; gateway.max_header is the limit"
    return Refusal(431, "head-too-large", message, may_retry=False, close=True)


def too_many_headers(limit: int) -> Refusal:
    message = f"cannot take a request with more than {limit} header lines"
    return Refusal(431, "too-many-headers", message, may_retry=False, close=True)


def coding_not_supported(coding: str) -> Refusal:
    message = f"cannot read a body with the Transfer-Encoding {coding}: only chunked is known, and only alone"
    return Refusal(501, "transfer-encoding", message, may_retry=False, close=True)


def websocket_not_supported() -> Refusal:
    message = "cannot speak WebSocket: llmgw serves plain requests and event streams"
    return Refusal(501, "websocket", message, may_retry=False, close=True)


def connect_not_supported() -> Refusal:
    message = "cannot open a tunnel with CONNECT: llmgw is no forward proxy"
    return Refusal(501, "connect", message, may_retry=False, close=True)


def version_not_supported(version: str) -> Refusal:
    message = f"cannot speak this version of HTTP ({version}): llmgw knows 1.0 and 1.1"
    return Refusal(505, "http-version", message, may_retry=False, close=True)


# -- who asks: 401, 403 ----------------------------------------------------------------------------------


def no_key() -> Refusal:
    message = "cannot tell who asks: this gateway wants a key; send Authorization: Bearer KEY or x-api-key: KEY"
    return Refusal(401, "no-key", message, may_retry=False)


def wrong_key() -> Refusal:
    message = "cannot tell who asks: no tenant has this key; ask whoever runs the gateway for one"
    return Refusal(401, "wrong-key", message, may_retry=False)


def unknown_tenant() -> Refusal:
    message = "cannot find the tenant that x-llmgw-tenant names; it must stand in a [[gateway.tenant]]"
    return Refusal(403, "unknown-tenant", message, may_retry=False)


def operators_only() -> Refusal:
    """A key came, but not an operator's."""
    message = "cannot show this to a tenant: it needs one of gateway.operator_keys, or a request from this machine"
    return Refusal(403, "operators-only", message, may_retry=False)


def no_operator_key() -> Refusal:
    message = "cannot show this without a key: send one of gateway.operator_keys, or ask from this machine"
    return Refusal(401, "no-operator-key", message, may_retry=False)


def model_not_allowed(model: str, tenant: str, near: Sequence[str] = ()) -> Refusal:
    message = f"cannot serve {_name(model)} to {tenant}: this tenant may not use it{_instead(near)}"
    return Refusal(403, "model-not-allowed", message, may_retry=False)


# -- what is not there: 404 ------------------------------------------------------------------------------


def unknown_model(model: str, near: Sequence[str] = ()) -> Refusal:
    """`near` are names like it, of those that the one who asks may use."""
    message = f"cannot serve {_name(model)}: there is no such model here{_instead(near)}"
    return Refusal(404, "unknown-model", message, may_retry=False)


def no_model() -> Refusal:
    message = "cannot route this request: it is for no model; llmgw passes on what names one in its body"
    return Refusal(404, "no-model", message, may_retry=False)


def unknown_path() -> Refusal:
    message = "cannot find this path: llmgw serves /v1/..., /tokenize, /detokenize, /health, /readiness"
    return Refusal(404, "unknown-path", message, may_retry=False)


def unknown_shard(name: str) -> Refusal:
    message = f"cannot find the shard {_name(name)}; llmgw status lists them"
    return Refusal(404, "unknown-shard", message, may_retry=False)


# -- not now: 429, 503 -----------------------------------------------------------------------------------


class NotAdmitted(Protocol):
    """What the admission says of a request that it does not let in."""

    @property
    def reason(self) -> str: ...
    @property
    def retry_after(self) -> float | None: ...
    @property
    def text(self) -> str: ...


_TOO_MANY = frozenset({"queue-full", "rate"})
_HOPELESS = frozenset({"load-failed"})
DEFAULT_RETRY_AFTER = 1.0
"""Seconds, where admission has no better idea."""


def from_admission(refused: NotAdmitted) -> Refusal:
    """429 when the one who asks has too much here already, else 503."""
    reason = refused.reason
    status = 429 if reason in _TOO_MANY else 503
    after = refused.retry_after
    # After a load that failed the next attempt may be set.
    hopeless = reason in _HOPELESS and after is None
    if after is None and not hopeless:
        after = DEFAULT_RETRY_AFTER
    return Refusal(status, reason, refused.text, after, may_retry=not hopeless, close=reason == "draining")


def no_body_memory() -> Refusal:
    """Before its body is read, so that the connection has to end."""
    message = "cannot hold this body: too many large requests at once (gateway.max_buffered); try again"
    return Refusal(503, "body-memory", message, DEFAULT_RETRY_AFTER, close=True)


def draining() -> Refusal:
    message = "cannot take new requests: llmgw is going down or restarting; try again"
    return Refusal(503, "draining", message, DEFAULT_RETRY_AFTER, close=True)


def no_engine(model: str, why: str, retry_after: float | None = None) -> Refusal:
    """No engine of a known model can answer. Without `retry_after` none will by itself."""
    message = f"cannot serve {_name(model)} now: {why}"
    return Refusal(503, "no-engine", message, retry_after, may_retry=retry_after is not None)


def not_ready() -> Refusal:
    message = "cannot answer anything now: no engine is ready and none is loaded on request; llmgw status says why"
    return Refusal(503, "not-ready", message, DEFAULT_RETRY_AFTER)


def still_loading(model: str, left: float) -> Refusal:
    """The estimate (seconds) is longer than `gateway.load_wait`."""
    message = f"cannot serve {_name(model)} yet: it loads for another {math.ceil(left)} s or so"
    return Refusal(503, "loading", message, left)


# -- an engine that failed: 500, 502, 504 ----------------------------------------------------------------


def engine_died(model: str) -> Refusal:
    message = f"cannot answer for {_name(model)}: its engine ended the connection before its answer began"
    return Refusal(502, "engine-died", message)


def engine_unreachable(model: str) -> Refusal:
    message = f"cannot answer for {_name(model)}: no connection to its engine"
    return Refusal(502, "engine-unreachable", message)


def bad_answer(model: str) -> Refusal:
    message = f"cannot pass on the answer for {_name(model)}: the engine's HTTP is broken"
    return Refusal(502, "bad-answer", message, may_retry=False)


def first_byte_timeout(model: str, limit: float) -> Refusal:
    message = f"cannot wait for {_name(model)} any longer: no byte of an answer in {limit:g} s (first_byte_timeout)"
    return Refusal(504, "first-byte-timeout", message, may_retry=False)


def internal_error() -> Refusal:
    message = "cannot answer: an error in llmgw itself; its log has the details under this request's id"
    return Refusal(500, "internal-error", message, may_retry=False, close=True)


# -- words -----------------------------------------------------------------------------------------------


def _name(name: str) -> str:
    """A name that a client wrote, short enough for a line."""
    return f'"{name}"' if len(name) <= 100 else f'"{name[:100]}..."'


def _instead(near: Sequence[str]) -> str:
    if not near:
        return "; GET /v1/models lists what there is"
    return "; did you mean " + " or ".join(f'"{name}"' for name in near) + "?"


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size} {unit}"
    return f"{count} bytes"
