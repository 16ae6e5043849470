"""Heads: what llhttp lets through and a proxy must not, and heads that are built anew."""

from __future__ import annotations

import httptools
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.gateway.reading.head import FIELDS_MAX, TARGET_MAX, Head, check, response_head, upstream_head


@frozen
class Limits:
    max_header: int = 8192


def head(method: bytes = b"POST", target: bytes = b"/v1/x", version: str = "1.1", **headers: str) -> Head:
    found = Head(method, target, version, [(b"host", b"x")] if "host" not in headers else [])
    found.headers += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items() if value]
    found.summarise()
    return found


def code(found: Head) -> str | None:
    refusal = check(found, Limits())
    return None if refusal is None else f"{refusal.status} {refusal.code}"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (head(content_length="3"), None),
        (head(transfer_encoding="chunked"), None),
        (head(transfer_encoding=" Chunked "), None),
        (head(b"GET"), None),
        (head(b"OPTIONS", b"*"), None),
        (head(b"GET", version="1.0", host=""), None),
        (head(), "411 length-required"),
        (head(content_length="+3"), "400 bad-request"),
        (head(content_length="3, 3"), "400 bad-request"),
        (head(content_length="9" * 30), "400 bad-request"),
        (head(content_length="3", transfer_encoding="chunked"), "400 bad-request"),
        (head(transfer_encoding="gzip, chunked"), "501 transfer-encoding"),
        (head(transfer_encoding="xchunked, chunked"), "501 transfer-encoding"),
        (head(transfer_encoding="identity, chunked"), "501 transfer-encoding"),
        (head(version="1.0", transfer_encoding="chunked"), "400 bad-request"),
        (head(version="2.0"), "505 http-version"),
        (head(version="0.9"), "505 http-version"),
        (head(b"GET", host=""), "400 bad-request"),
        (head(b"GET", b"http://evil/v1/x"), "400 bad-request"),
        (head(b"GET", b"*"), "400 bad-request"),
        (head(b"CONNECT", b"x:443"), "501 connect"),
        (head(b"GET", upgrade="WebSocket"), "501 websocket"),
        (head(b"GET", b"/" + b"x" * TARGET_MAX), "414 target-too-long"),
        (head(b"GET", x="y" * 9000), "431 head-too-large"),
        (head(b"GET", **{f"h{n}": "v" for n in range(FIELDS_MAX + 1)}), "431 too-many-headers"),
    ],
)
def test_each_head_that_no_proxy_may_serve_has_its_own_status(found: Head, wanted: str | None) -> None:
    assert code(found) == wanted


@pytest.mark.parametrize("name", [b"host", b"transfer-encoding", b"content-length"])
def test_a_line_that_decides_stands_once(name: bytes) -> None:
    value = {b"host": b"x", b"transfer-encoding": b"chunked", b"content-length": b"3"}[name]
    found = Head(b"POST", b"/v1/x", "1.1", [(b"host", b"x"), (b"content-length", b"3"), (name, value)])
    if name == b"transfer-encoding":
        found.headers = [(b"host", b"x"), (name, value), (name, value)]
    found.summarise()
    assert check(found, Limits()) is not None


def sent(found: Head, **more: object) -> dict[bytes, list[bytes]]:
    """The engine's view of the head that it gets."""
    keys = {"path": b"/v1/x", "host": b"engine:1", "content_length": 3, "api_key": "engine-key", "request_id": "id-1"}
    text = upstream_head(found, **{**keys, **more})  # type: ignore[arg-type]
    lines = text.split(b"\r\n")
    assert lines[0] == b"POST /v1/x HTTP/1.1" and text.endswith(b"\r\n\r\n")
    result: dict[bytes, list[bytes]] = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(b": ")
        result.setdefault(name, []).append(value)
    return result


def test_the_engine_gets_its_own_key_host_length_and_id_and_nothing_of_the_clients_hop() -> None:
    found = sent(
        head(
            content_length="99",
            authorization="Bearer client",
            x_api_key="client",
            cookie="a=b",
            connection="keep-alive, x-secret",
            x_secret="hop",
            te="trailers",
            upgrade="h2c",
            expect="100-continue",
            x_llmgw_tenant="one",
            x_forwarded_for="1.2.3.4",
            forwarded="for=1.2.3.4",
            x_data_parallel_rank="7",
            x_request_id="theirs",
            accept="text/event-stream",
            traceparent="00-abc",
        )
    )
    assert found == {
        b"host": [b"engine:1"],
        b"x-request-id": [b"id-1"],
        b"accept": [b"text/event-stream"],
        b"traceparent": [b"00-abc"],
        b"authorization": [b"Bearer engine-key"],
        b"content-length": [b"3"],
    }


def answered(headers: list[tuple[bytes, bytes]], **more: object) -> list[bytes]:
    keys = {"framing": "length", "request_id": "id-1", "keep_alive": True, "http10": False, "sse": False}
    text = response_head(200, b"OK", headers, **{**keys, **more})  # type: ignore[arg-type]
    assert text.endswith(b"\r\n\r\n")
    return text.split(b"\r\n")[1:-2]


def test_the_client_gets_the_engines_lines_without_its_hop_and_without_words_that_only_llmgw_says() -> None:
    lines = answered(
        [
            (b"content-type", b"application/json"),
            (b"content-length", b"2"),
            (b"connection", b"keep-alive, x-hop"),
            (b"x-hop", b"1"),
            (b"keep-alive", b"timeout=5"),
            (b"x-llmgw-reason", b"made-up"),
            (b"access-control-allow-origin", b"*"),
            (b"alt-svc", b"h3"),
            (b"x-request-id", b"theirs"),
            (b"openai-processing-ms", b"12"),
        ]
    )
    assert lines == [
        b"content-type: application/json",
        b"openai-processing-ms: 12",
        b"content-length: 2",
        b"x-request-id: id-1",
    ]


def test_an_event_stream_tells_proxies_not_to_keep_it_back() -> None:
    lines = answered(
        [(b"cache-control", b"public"), (b"content-type", b"text/event-stream")], sse=True, framing="chunked"
    )
    assert b"cache-control: no-cache" in lines and b"x-accel-buffering: no" in lines
    assert b"transfer-encoding: chunked" in lines and b"cache-control: public" not in lines


def test_the_end_of_a_connection_is_said_in_the_words_of_the_version() -> None:
    assert b"connection: close" in answered([], keep_alive=False)
    assert b"connection: keep-alive" in answered([], http10=True)
    assert not [line for line in answered([]) if line.startswith(b"connection")]


class Parsed:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.complete = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_message_complete(self) -> None:
        self.complete += 1


@given(st.lists(st.tuples(st.sampled_from([b"a", b"x-b", b"connection", b"te"]), st.binary(max_size=12)), max_size=6))
@settings(max_examples=200, deadline=None)
def test_whatever_llhttp_found_makes_one_request_and_no_second_one(lines: list[tuple[bytes, bytes]]) -> None:
    raw = b"POST /v1/x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n"
    raw += b"".join(name + b": " + value + b"\r\n" for name, value in lines) + b"\r\n"
    first = Parsed()
    parser = httptools.HttpRequestParser(first)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserError:
        return
    found = Head(b"POST", b"/v1/x", "1.1", first.headers)
    found.summarise()
    if check(found, Limits()) is not None:
        return
    again = Parsed()
    httptools.HttpRequestParser(again).feed_data(
        upstream_head(found, path=b"/v1/x", host=b"e", content_length=0, api_key="k", request_id="i")
    )
    assert again.complete == 1
    assert [value for name, value in again.headers if name == b"authorization"] == [b"Bearer k"]
    assert [value for name, value in again.headers if name == b"content-length"] == [b"0"]
