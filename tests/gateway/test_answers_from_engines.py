"""Requests that reach an engine: what it gets, what the client gets, and on how many connections."""

from __future__ import annotations

import json
import zlib

import pytest
import trio
from stand import (
    STREAM_HEAD,
    Connection,
    always_ok,
    answer,
    chat,
    chunk,
    key_hash,
    post,
    shard_text,
    stand,
)


async def test_a_request_reaches_the_engine_and_its_answer_the_client_byte_by_byte():
    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(answer(b'{"id": "x",  "odd":1e0}', more="x-engine: yes\r\n"))

    async with stand() as it:
        engine = await it.engine("a", script)
        body = b'{ "model": "m", "messages": [], "odd": 1e0, "x": "\\u00e9" }'
        got = await it.ask(post(body))
        assert (got.status, got.body, got.headers["x-engine"]) == (200, b'{"id": "x",  "odd":1e0}', "yes")
        (head, sent), *_ = engine.requests
        assert sent == body
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        (record,) = await it.wait_records(1)
        assert (record.model, record.shard, record.code, record.reason) == ("m", "a", 200, "")


async def test_an_alias_becomes_the_models_own_name_and_nothing_else_changes():
    async with stand(shard_text("a", model="Qwen/Qwen3-8B", aliases=["qwen"])) as it:
        engine = await it.engine("a", always_ok)
        got = await it.ask(post(b'{"messages": [{"content": "model: qwen"}], "model" : "qwen", "n": 1}'))
        assert got.status == 200
        assert engine.requests[0][1] == (
            b'{"messages": [{"content": "model: qwen"}], "model" : "Qwen/Qwen3-8B", "n": 1}'
        )


async def test_connections_to_an_engine_are_used_again_one_for_each_request_that_runs_at_once():
    async with stand() as it:
        engine = await it.engine("a", always_ok)

        async def many(count: int) -> None:
            caller = await it.call()
            for _ in range(count):
                await caller.send(chat())
                assert (await caller.answer()).status == 200

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(many, 25)
        assert len(engine.requests) == 100
        assert engine.opened <= 4


async def test_pipelined_requests_are_answered_in_their_order():
    async def script(connection: Connection) -> None:
        while (found := await connection.request()) is not None:
            await connection.send(answer(json.dumps({"n": json.loads(found[1])["n"]}).encode()))

    async with stand() as it:
        await it.engine("a", script)
        caller = await it.call(b"".join(chat(n=number) for number in range(12)))
        assert [(await caller.answer()).json()["n"] for _ in range(12)] == list(range(12))


async def test_a_stream_arrives_piece_by_piece_while_the_engine_still_writes():
    step = trio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await step.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", script)
        caller = await it.call(chat(stream=True))
        head = await caller.until(b"\r\n\r\n")
        assert b"x-accel-buffering: no" in head.lower()
        await caller.until(b"data: 1\n\n")
        step.set()
        await caller.until(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        (record,) = await it.wait_records(1)
        assert record.stream and record.code == 200 and record.chunks == 2
        await caller.send(chat())


async def test_a_compressed_answer_stays_as_it_is():
    packed = zlib.compress(b"hello" * 100)

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(packed, more="content-encoding: deflate\r\n"))

    async with stand() as it:
        await it.engine("a", script)
        got = await it.ask(chat())
        assert got.body == packed and got.headers["content-encoding"] == "deflate"


async def test_an_answer_that_ends_with_its_connection_ends_for_the_client_too():
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nabc")
        await connection.send(b"def")

    async with stand() as it:
        await it.engine("a", script)
        got = await it.ask(chat())
        assert (got.status, got.body, got.whole) == (200, b"abcdef", True)


async def test_a_client_of_http_1_0_gets_the_pieces_without_framing_and_then_the_end():
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"ab") + chunk(b"cd") + b"0\r\n\r\n")
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", script)
        got = await it.ask(chat().replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert "transfer-encoding" not in got.headers
        assert (got.body, got.whole) == (b"abcd", True)


async def test_words_before_the_answer_are_not_the_answer():
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 102 Processing\r\n\r\n")
        await connection.send(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + answer(b"{}"))
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", script)
        got = await it.ask(chat())
        assert (got.status, got.body) == (200, b"{}")


async def test_a_client_that_waits_for_100_continue_gets_it_before_it_sends_the_body():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        head, _, body = chat().partition(b"\r\n\r\n")
        caller = await it.call(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert (await caller.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        await caller.send(body)
        assert (await caller.answer()).status == 200
        assert b"expect" not in engine.requests[0][0].lower()


async def test_the_clients_key_never_reaches_the_engine_and_the_engines_never_the_client():
    tenant = f'[[gateway.tenant]]\nname = "t"\nkeys = [{key_hash("client-key")}]\n'

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(answer())

    async with stand(gateway=tenant) as it:
        engine = await it.engine("a", script)
        it.board.remove(it.cell("a").status.id)
        it._cells.clear()
        it.ready("a", engine.port, api_key="engine-key")
        got = await it.ask(chat().replace(b"host: x\r\n", b"host: x\r\nauthorization: Bearer client-key\r\n", 1))
        assert got.status == 200
        head = engine.requests[0][0]
        assert b"authorization: Bearer engine-key" in head and b"client-key" not in head
        assert "engine-key" not in str(got.headers)


@pytest.mark.parametrize("name", ["x-llmgw-tenant", "x-llmgw-priority", "x-forwarded-for", "connection", "upgrade"])
async def test_headers_that_mean_something_inside_do_not_reach_the_engine(name):
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        value = {"connection": "keep-alive", "upgrade": "h2c"}.get(name, "evil")
        more = f"{name}: {value}\r\n"
        got = await it.ask(post({"model": "m"}, head=more))
        assert got.status == 200
        lines = engine.requests[0][0].lower().split(b"\r\n")
        assert not [line for line in lines if line.startswith(name.encode() + b": " + value.encode())]


async def test_an_engine_on_a_unix_socket_is_reached_there(tmp_path):
    path = str(tmp_path / "engine.sock")

    async def play(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(answer(b'{"unix": true}'))

    async with stand() as it:
        with trio.socket.socket(trio.socket.AF_UNIX) as listener:
            await listener.bind(path)
            listener.listen(8)
            it.nursery.start_soon(trio.serve_listeners, play, [trio.SocketListener(listener)])
            it.ready("a", 0, path=path)
            got = await it.ask(chat())
            assert got.json() == {"unix": True}


async def test_a_large_body_and_a_large_answer_pass_whole():
    big = bytes(range(256)) * 40_000

    async def script(connection: Connection) -> None:
        found = await connection.request()
        assert found is not None
        await connection.send(answer(big))
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", script)
        body = json.dumps({"model": "m", "image": "A" * 10_000_000}).encode()
        got = await it.ask(post(body))
        assert got.body == big
        assert engine.requests[0][1] == body


async def test_a_request_in_a_hundred_pieces_is_the_same_request():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        data = chat(text="x" * 200)
        caller = await it.call()
        for start in range(0, len(data), 3):
            await caller.send(data[start : start + 3])
        assert (await caller.answer()).status == 200
        assert engine.requests[0][1] == data.partition(b"\r\n\r\n")[2]


async def test_a_chunked_request_reaches_the_engine_with_its_length():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        body = b'{"model": "m"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        got = await it.ask(head + chunk(body[:5]) + chunk(body[5:]) + b"0\r\n\r\n")
        assert got.status == 200
        head, sent = engine.requests[0]
        assert sent == body and b"content-length: 14" in head.lower() and b"transfer-encoding" not in head.lower()


async def test_the_request_id_is_kept_and_told_to_both_sides():
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        got = await it.ask(post({"model": "m"}, head="x-request-id: abc-123\r\n"))
        assert got.headers["x-request-id"] == "abc-123"
        assert b"x-request-id: abc-123" in engine.requests[0][0]
        got = await it.ask(chat())
        assert got.headers["x-request-id"].encode() in engine.requests[1][0]


async def test_a_hundred_and_fifty_requests_that_hang_in_one_engine_do_not_slow_another():
    hang = trio.Event()

    async def hanging(connection: Connection) -> None:
        await connection.request()
        await hang.wait()

    text = shard_text("a", model="hangs", max_inflight=200) + shard_text("b", model="works")
    async with stand(text) as it:
        stuck = await it.engine("a", hanging)
        await it.engine("b", always_ok)
        for _ in range(150):
            await it.call(chat("hangs"))
        while stuck.open < 150:
            await trio.testing.wait_all_tasks_blocked()
        caller = await it.call()
        for _ in range(50):
            await caller.send(chat("works"))
            assert (await caller.answer()).status == 200
        hang.set()
