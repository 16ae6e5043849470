from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from llmgw.http.server import BODY_MAX, HEAD_MAX, HttpServer, Reply, Request, Send, Stream, json_reply


class Handler:
    """Answers by path, and remembers what happened."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled = trio.Event()
        self.entered = trio.Event()

    async def __call__(self, request: Request) -> Reply | Stream:
        self.requests.append(request)
        match request.path:
            case "/wait":
                return await self._wait()
            case "/crash":
                raise KeyError("broken on purpose")
            case "/flood":
                return Stream(self._flood)
            case "/count":
                return Stream(self._count)
        return json_reply(200, {"path": request.path, "body": request.body.decode("latin-1")})

    async def _wait(self) -> Reply:
        self.entered.set()
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()

    async def _flood(self, send: Send) -> None:
        self.entered.set()
        try:
            while True:
                await send(b"x" * 100_000)
        finally:
            self.cancelled.set()

    async def _count(self, send: Send) -> None:
        for number in range(3):
            await send(f"{number}\n".encode())


class Served:
    def __init__(self, path: str, handler: Handler, server: HttpServer) -> None:
        self.path, self.handler, self.server = path, handler, server

    async def connect(self) -> trio.SocketStream:
        return await trio.open_unix_socket(self.path)

    async def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes."""
        async with await self.connect() as stream:
            with trio.fail_after(20):
                await stream.send_all(data)
                return await read_all(stream)


async def read_all(stream: trio.SocketStream) -> bytes:
    found = bytearray()
    async for piece in stream:
        found += piece
    return bytes(found)


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    found = bytearray()
    while mark not in found:
        piece = await stream.receive_some()
        assert piece, f"ended before {mark!r}: {bytes(found)!r}"
        found += piece
    return bytes(found)


@asynccontextmanager
async def served(tmp_path: Path, **options: float) -> AsyncIterator[Served]:
    path = str(tmp_path / "s")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen(64)
    handler = Handler()
    server = HttpServer(handler, headers={"llmgw-api": "1"}, **options)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, sock)
        with trio.fail_after(30):
            yield Served(path, handler, server)
        nursery.cancel_scope.cancel()
    sock.close()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - a counter, no event
            await trio.sleep(0.005)


async def test_an_old_client_gets_an_answer_that_ends_with_the_connection(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        answer = await it.raw(b"GET /a?b=c HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"llmgw-api: 1" in head
    assert json.loads(body)["path"] == "/a"
    (request,) = it.handler.requests
    assert request.query == {"b": "c"}
    assert (request.peer.pid, request.peer.uid) == (os.getpid(), os.getuid())


async def test_a_kept_connection_takes_one_request_after_another(tmp_path: Path) -> None:
    async with served(tmp_path) as it, await it.connect() as stream:
        for number in range(3):
            await stream.send_all(b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" % number)
            assert b'"/%d"' % number in await read_until(stream, b"}\n")


async def test_requests_that_are_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        ahead = b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        answer = await it.raw(ahead)
    assert answer.index(b'"/1"') < answer.index(b'"/2"')


async def test_a_client_that_closes_its_direction_still_gets_its_answer(tmp_path: Path) -> None:
    async with served(tmp_path) as it, await it.connect() as stream:
        await stream.send_all(b"GET /count HTTP/1.0\r\n\r\n")
        await stream.send_eof()
        assert (await read_all(stream)).endswith(b"0\n1\n2\n")


async def test_segments_of_a_path_are_decoded_one_by_one(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        await it.raw(b"GET /v1/a%2F0/%C3%BC HTTP/1.0\r\n\r\n")
    assert it.handler.requests[0].segments == ("v1", "a/0", "ü")


async def test_head_gives_the_head_only(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        answer = await it.raw(b"HEAD /x HTTP/1.0\r\n\r\n")
        stream = await it.raw(b"HEAD /flood HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")
    assert stream.startswith(b"HTTP/1.1 200") and stream.endswith(b"\r\n\r\n")


async def test_a_stream_is_chunked_for_a_modern_client(tmp_path: Path) -> None:
    async with served(tmp_path) as it, await it.connect() as stream:
        await stream.send_all(b"GET /count HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await read_until(stream, b"0\r\n\r\n")
    assert b"transfer-encoding: chunked" in answer.lower()
    assert b"2\r\n2\n\r\n" in answer


async def test_a_client_that_waits_for_100_continue_is_told_to_go_on(tmp_path: Path) -> None:
    async with served(tmp_path) as it, await it.connect() as stream:
        await stream.send_all(b"POST /c HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
        assert b"100" in await read_until(stream, b"\r\n\r\n")
        await stream.send_all(b"body")
        assert b'"body":"body"' in await read_until(stream, b"}\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET http://x/y HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /?" + b"&".join(b"a%d=1" % n for n in range(100)) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (BODY_MAX + 1), 413),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * HEAD_MAX + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 40_000, 431),
    ],
)
async def test_what_is_no_request_is_refused_and_the_next_client_is_served(
    tmp_path: Path, data: bytes, status: int
) -> None:
    async with served(tmp_path) as it:
        answer = await it.raw(data)
        assert answer.startswith(b"HTTP/1.1 %d" % status)
        assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"code", "message", "hint"}
        assert it.handler.requests == []
        assert b" 200 " in await it.raw(b"GET / HTTP/1.0\r\n\r\n")


async def test_noise_is_refused_without_an_error_of_our_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(1)
    good = b"POST /v1/a%2Fb?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
    async with served(tmp_path) as it:
        for _ in range(150):
            data = bytearray(good)
            for _ in range(chance.randint(1, 6)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            async with await it.connect() as stream:
                await stream.send_all(bytes(data))
                await stream.send_eof()
                await read_all(stream)
        assert b" 200 " in await it.raw(b"GET / HTTP/1.0\r\n\r\n")
        assert it.server.connections == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_body_without_end_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        answer = await it.raw(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 20)
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_request_that_never_becomes_whole_is_given_up(tmp_path: Path) -> None:
    async with served(tmp_path, request_timeout=0.05) as it:
        answer = await it.raw(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        silent = await it.raw(b"")
    assert answer.startswith(b"HTTP/1.1 408")
    assert silent == b""


async def test_an_error_in_a_handler_ends_one_request_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path) as it:
        answer = await it.raw(b"GET /crash HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in await it.raw(b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 500")
    assert b"broken on purpose" not in answer
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)


async def test_a_waiting_request_ends_when_its_client_leaves(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        async with await it.connect() as stream:
            await stream.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
            await it.handler.entered.wait()
        await it.handler.cancelled.wait()
        await until(lambda: it.server.connections == 0)


async def test_a_stream_whose_reader_has_stopped_reading_does_not_block_the_end(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        stream = await it.connect()
        await stream.send_all(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n")
        await it.handler.entered.wait()
        # The buffers between the two fill up; others are served meanwhile.
        for _ in range(5):
            assert b" 200 " in await it.raw(b"GET / HTTP/1.0\r\n\r\n")
        assert not it.handler.cancelled.is_set()
    assert it.handler.cancelled.is_set()
    assert it.server.connections == 0
    await stream.aclose()


async def test_a_reader_that_dies_ends_its_stream(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        stream = await it.connect()
        await stream.send_all(b"GET /flood HTTP/1.0\r\n\r\n")
        await it.handler.entered.wait()
        await stream.aclose()
        await it.handler.cancelled.wait()


async def test_one_connection_too_many_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.http.server.CONNECTIONS_MAX", 1)
    async with served(tmp_path) as it, await it.connect() as first:
        await first.send_all(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await it.handler.entered.wait()
        answer = await it.raw(b"GET / HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503")


async def test_a_client_that_was_accepted_in_the_last_moment_still_gets_its_answer(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen()

        async def handler(request: Request) -> Reply:
            return json_reply(200, {"late": True})

        server = HttpServer(handler)
        async with trio.open_nursery() as nursery:
            ending = trio.CancelScope()

            async def serve(*, task_status: trio.TaskStatus[None]) -> None:
                with ending:
                    await server.serve(sock, task_status=task_status)

            await nursery.start(serve)
            late, idle = await trio.open_unix_socket(path), await trio.open_unix_socket(path)
            await idle.send_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"200" in await idle.receive_some(1000)
            while server.connections < 2:
                await trio.testing.wait_all_tasks_blocked()
            ending.cancel()
            await trio.testing.wait_all_tasks_blocked()
            # Whoever has had an answer is not waited for.
            assert await idle.receive_some(1000) == b""
            await late.send_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert b'{"late":true}' in await late.receive_some(1000)
            await late.aclose()
            await idle.aclose()
