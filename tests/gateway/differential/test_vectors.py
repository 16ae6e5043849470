"""Requests that can be read in more than one way: each has one answer, whole or byte by byte, and no engine sees it."""

from __future__ import annotations

import pytest
import trio
from stand import always_ok, stand

START = b"POST /v1/completions HTTP/1.1\r\n"
GOOD = START + b"host: x\r\n"
BODY = b'\r\n\r\n{"model": "m"}'
CHUNKS = b'\r\n\r\ne\r\n{"model": "m"}\r\n0\r\n\r\n'
CHUNKED = GOOD + b"transfer-encoding: chunked\r\n\r\n"

VECTORS = [
    (GOOD + b"content-length: 14\r\ncontent-length: 14" + BODY, 400),
    (GOOD + b"content-length: 14, 14" + BODY, 400),
    (GOOD + b"content-length: +14" + BODY, 400),
    (GOOD + b"content-length: 0xe" + BODY, 400),
    (GOOD + b"content-length: 14\r\ntransfer-encoding: chunked" + CHUNKS, 400),
    (GOOD + b"transfer-encoding: chunked\r\ncontent-length: 14" + CHUNKS, 400),
    (GOOD + b"transfer-encoding: xchunked, chunked" + CHUNKS, 501),
    (GOOD + b"transfer-encoding: identity, chunked" + CHUNKS, 501),
    (GOOD + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked" + CHUNKS, 501),
    (GOOD + b"transfer-encoding: chunked, gzip" + CHUNKS, 501),
    (GOOD + b"transfer-encoding: identity" + CHUNKS, 501),
    (GOOD + b"transfer-encoding : chunked" + CHUNKS, 400),
    (GOOD + b"content-length: 14\r\nbad : x" + BODY, 400),
    (GOOD + b"content-length: 14\r\na: b\r\n c" + BODY, 400),
    (GOOD + b"content-length: 14\r\na: b\rc" + BODY, 400),
    (GOOD + b"content-length: 14\r\na: b\0c" + BODY, 400),
    (GOOD + b"content-length: 14\na: b" + BODY, 400),
    (START + b"content-length: 14" + BODY, 400),
    (GOOD + b"host: x\r\ncontent-length: 14" + BODY, 400),
    (CHUNKED + b'e\n{"model": "m"}\r\n0\r\n\r\n', 400),
    (CHUNKED + b'0xe\r\n{"model": "m"}\r\n0\r\n\r\n', 400),
    (CHUNKED + b'-e\r\n{"model": "m"}\r\n0\r\n\r\n', 400),
    (CHUNKED + b'd\r\n{"model": "m"}\r\n0\r\n\r\n', 400),
    (CHUNKED + b"fffffffffffffffff\r\nx", 400),
    (GOOD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked" + CHUNKS, 400),
    (GOOD.replace(b"/v1", b"http://x/v1") + b"content-length: 14" + BODY, 400),
    (GOOD.replace(b"POST", b"PO\x01ST") + b"content-length: 14" + BODY, 400),
    (GOOD.replace(b"1.1", b"1.2") + b"content-length: 14" + BODY, 505),
    (GOOD.replace(b"1.1", b"3.0") + b"content-length: 14" + BODY, 505),
    (GOOD.replace(b"1.1", b"2.0") + b"content-length: 14" + BODY, 505),
    (GOOD.replace(b" HTTP/1.1", b"") + b"content-length: 14" + BODY, 505),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
]


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("data", "status"), VECTORS)
async def test_what_can_be_read_in_two_ways_is_refused_with_its_status(
    data: bytes, status: int, is_whole: bool
) -> None:
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        caller = await it.call()
        try:
            for piece in [data] if is_whole else [data[at : at + 1] for at in range(len(data))]:
                await caller.send(piece)
                await trio.lowlevel.checkpoint()
        except trio.BrokenResourceError:
            # It was refused before its end.
            pass
        got = await caller.answer()
        assert (got.status, got.headers["connection"]) == (status, "close")
        assert engine.requests == []
