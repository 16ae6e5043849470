"""llmgw's data path against h11: what one refuses the other must not let through, and what passes is the same."""

from __future__ import annotations

import itertools
import json

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Incomplete, Read, Refused, read_answer, read_request
from stand import Caller, Connection, Stand, always_ok, answer, chat, stand

OURS_ALONE = frozenset(
    {"bad-request", "bad-body", "missing-model", "no-model", "unknown-model", "unknown-path", "length-required"}
    | {"transfer-encoding", "http-version", "connect", "websocket", "too-many-headers", "target-too-long"}
)
"""Reasons for which llmgw refuses what h11 accepts: it is stricter, or the request asks for nothing that there is."""

OUR_HEADERS = frozenset(
    {b"x-request-id", b"authorization", b"x-api-key", b"api-key", b"cookie", b"forwarded", b"x-real-ip"}
)


async def send_in_pieces(caller: Caller, data: bytes, cuts: list[int]) -> None:
    """As separate reads for the other side."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        if end > start:
            try:
                await caller.send(data[start:end])
            except trio.BrokenResourceError:
                # Refused already.
                return
            await trio.testing.wait_all_tasks_blocked()


def as_engine_saw(it: Stand, requests: list[tuple[bytes, bytes]]) -> Read:
    head, body = requests[0]
    return read_request(head + b"\r\n\r\n" + body)


async def compare(data: bytes, cuts: list[int]) -> None:
    """One request to both."""
    try:
        wanted: Read | None = read_request(data)
        is_whole = True
    except Refused:
        wanted, is_whole = None, True
    except Incomplete:
        wanted, is_whole = None, False
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        caller = await it.call()
        await send_in_pieces(caller, data, cuts)
        if not is_whole:
            await caller.stream.send_eof()
        got = None
        if is_whole or await caller.more():
            got = await caller.answer()
        if wanted is None:
            assert engine.requests == [], "an engine got what h11 does not take for a request"
            assert got is None or got.status >= 400
            return
        assert got is not None
        if got.status >= 400:
            assert got.headers["x-llmgw-reason"] in OURS_ALONE, (got.status, got.body)
            assert engine.requests == []
            return
        seen = as_engine_saw(it, engine.requests)
        assert len(engine.requests) == 1
        assert (seen.method, seen.target, seen.body) == (wanted.method, wanted.target, wanted.body)
        assert [pair for pair in seen.end_to_end if pair[0] not in OUR_HEADERS] == [
            pair for pair in wanted.end_to_end if pair[0] not in OUR_HEADERS
        ]


BODY = b'{"model": "m", "prompt": "hello \\u00e9"}'
LINES = [
    b"Host: x",
    b"host: y",
    b"Content-Type: application/json",
    b"X-Thing: one",
    b"x-thing: two",
    b"Connection: keep-alive, x-thing",
    b"Connection: close",
    b"TE: trailers",
    b"Expect: 100-continue",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding : chunked",
    b"Content-Length: 40",
    b"Content-Length: 0",
    b"Content-Length: +40",
    b"Folded: a\r\n b",
    b"Empty:",
    b"Bad Name: x",
    b"Nul: a\x00b",
    b"Cr: a\rb",
    b"Upgrade: h2c",
    b"Authorization: Bearer x",
]


def chunked(body: bytes, sizes: list[int], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    parts, at = [], 0
    for size in sizes:
        piece = body[at : at + size]
        if piece:
            parts.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
        at += size
    if body[at:]:
        parts.append(b"%x\r\n%b\r\n" % (len(body) - at, body[at:]))
    return b"".join(parts) + b"0\r\n" + trailer + b"\r\n"


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Mostly good ones."""
    lines = [b"Host: x"] if draw(st.integers(0, 9)) else []
    if draw(st.booleans()):
        payload = BODY
        lines.append(b"Content-Length: %d" % len(BODY))
    else:
        extension = draw(st.sampled_from([b"", b"", b";a=b"]))
        trailer = draw(st.sampled_from([b"", b"", b"X-Trailer: 1\r\n"]))
        payload = chunked(BODY, draw(st.lists(st.integers(1, 20), max_size=4)), extension, trailer)
        lines.append(b"Transfer-Encoding: chunked")
    lines += draw(st.lists(st.sampled_from(LINES), max_size=3))
    lines = list(draw(st.permutations(lines)))
    start = draw(
        st.sampled_from(
            [
                *[b"POST /v1/completions HTTP/1.1"] * 8,
                b"POST /v1/completions HTTP/1.0",
                b"POST /v1/completions HTTP/2.0",
                b"POST /v1/completions",
                b"POST  /v1/completions HTTP/1.1",
                b"POST http://x/v1/completions HTTP/1.1",
                b"GET /v1/completions HTTP/1.1",
            ]
        )
    )
    data = b"\r\n".join([start, *lines, b"", b""]) + payload
    if draw(st.integers(0, 4)) == 0:
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + draw(st.sampled_from([b"\n", b"\r", b"\0", b" ", b":", b"x", b""])) + data[at + 1 :]
    return data


@given(requests(), st.lists(st.integers(0, 400), max_size=5))
@settings(max_examples=80, deadline=None)
async def test_a_request_means_the_same_to_both_or_is_refused(data: bytes, cuts: list[int]) -> None:
    await compare(data, cuts)


@pytest.mark.parametrize(
    "lines",
    [
        [b"Content-Length: 40", b"Transfer-Encoding: chunked"],
        [b"Content-Length: 40", b"Content-Length: 40"],
        [b"Content-Length: 3, 3"],
        [b"Content-Length: 0x28"],
        [b"Content-Length: -1"],
        [b"Transfer-Encoding: xchunked"],
        [b"Transfer-Encoding: chunked, identity"],
        [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"],
        [b"Transfer-Encoding:\tchunked"],
        [b"Transfer-Encoding: chunked\t"],
        [b"Transfer-Encoding: \x0bchunked"],
        [b"Transfer-Encoding: chunked;q=1"],
    ],
)
async def test_the_old_ways_to_smuggle_a_request_end_with_a_refusal_or_with_one_request(lines: list[bytes]) -> None:
    smuggled = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + b'{"model": "m"}'
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: x", *lines, b"", b""])
    for payload in (BODY + smuggled, chunked(BODY, []) + smuggled, b"0\r\n\r\n" + smuggled):
        async with stand() as it:
            engine = await it.engine("a", always_ok)
            caller = await it.call(head + payload)
            got = await caller.answer()
            if got.status >= 400:
                assert engine.requests == []
            else:
                # What stands behind the one is a request of its own, as h11 reads it too.
                assert engine.requests[0][1] == read_request(head + payload).body


# -- the way back ----------------------------------------------------------------------------------------


@st.composite
def engine_answers(draw: st.DrawFn) -> tuple[bytes, bool]:
    """An engine's answer, and whether it closes the connection behind it."""
    body = draw(st.binary(max_size=60))
    status = draw(st.sampled_from([b"200 OK"] * 5 + [b"201 Made", b"400 Bad", b"500 Oh", b"204 Nothing", b"304 Same"]))
    lines = [b"content-type: text/plain", b"x-thing: 1"]
    before = draw(st.sampled_from([b"", b"", b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"]))
    framing = draw(st.sampled_from(["length", "chunked", "close"]))
    if status[:3] in (b"204", b"304"):
        body, framing = b"", "length"
    closes = framing == "close" or draw(st.booleans())
    if framing == "length" and status[:3] not in (b"204", b"304"):
        lines.append(b"content-length: %d" % len(body))
        payload = body
    elif framing == "chunked":
        lines.append(b"transfer-encoding: chunked")
        trailer = draw(st.sampled_from([b"", b"x-trailer: 1\r\n"]))
        payload = chunked(body, draw(st.lists(st.integers(1, 9), max_size=4)), b"", trailer)
    else:
        payload = body
    return before + b"\r\n".join([b"HTTP/1.1 " + status, *lines, b"", b""]) + payload, closes


@given(engine_answers(), st.lists(st.integers(0, 400), max_size=5), st.sampled_from([b"1.1", b"1.0"]))
@settings(max_examples=50, deadline=None)
async def test_an_answer_reaches_the_client_whole_however_it_is_framed_and_cut(
    made: tuple[bytes, bool], cuts: list[int], version: bytes
) -> None:
    data, closes = made
    wanted = read_answer(data, to=b"POST", is_end=closes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]

    async def script(connection: Connection) -> None:
        await connection.request()
        for start, end in itertools.pairwise(edges):
            await connection.send(data[start:end])
            await trio.testing.wait_all_tasks_blocked()
        if not closes:
            await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", script)
        caller = await it.call(chat().replace(b"HTTP/1.1", b"HTTP/" + version))
        got = await caller.answer()
        assert (got.status, got.body, got.whole) == (wanted.status, wanted.body, True)
        assert got.headers["x-thing"] == "1"


async def test_an_answer_to_head_ends_at_the_head_whatever_length_it_announces() -> None:
    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(answer(b"x" * 10).removesuffix(b"x" * 10))

    async with stand() as it:
        await it.engine("a", script)
        caller = await it.call(b"HEAD /upstream/a/health HTTP/1.1\r\nhost: x\r\n\r\n")
        got = await caller.answer(is_head=True)
        assert (got.status, got.headers["content-length"]) == (200, "10")
        await caller.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert json.loads((await caller.answer()).body) == {"status": "ok"}


@pytest.mark.parametrize("coding", ["gzip", "gzip, chunked", "identity", "chunked\r\ntransfer-encoding: chunked"])
async def test_an_answer_in_a_coding_that_is_not_chunked_alone_is_not_passed_off_as_chunked(coding: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(f"HTTP/1.1 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n2\r\nab\r\n0\r\n\r\n".encode())

    async with stand() as it:
        await it.engine("a", script)
        got = await it.ask(chat())
        assert (got.status, got.headers["x-llmgw-reason"]) == (502, "bad-answer")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_an_answer_with_two_lengths_or_a_length_and_chunks_is_a_502(version: bytes) -> None:
    for lines in ("content-length: 2\r\ncontent-length: 3", "content-length: 2\r\ntransfer-encoding: chunked"):

        async def script(connection: Connection, lines: str = lines) -> None:
            await connection.request()
            await connection.send(f"HTTP/1.1 200 OK\r\n{lines}\r\n\r\n2\r\nab\r\n0\r\n\r\n".encode())

        async with stand() as it:
            await it.engine("a", script)
            got = await it.ask(chat().replace(b"HTTP/1.1", b"HTTP/" + version))
            assert (got.status, got.headers["x-llmgw-reason"]) == (502, "bad-answer")
