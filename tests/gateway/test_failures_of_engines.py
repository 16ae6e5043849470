"""Engines that refuse, die, lie and hang: what the client sees, and when another engine is asked."""

from __future__ import annotations

import socket

import trio
from stand import STREAM_HEAD, Connection, always_ok, answer, chat, chunk, shard_text, stand

from llmgw.domain.problem import Reason
from llmgw.domain.status import DrainBegan, Failed

TWO = shard_text("a") + shard_text("b")


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert isinstance(port, int)
        return port


async def test_where_connecting_fails_another_engine_is_asked_once():
    async with stand(TWO, gateway='routing = "round_robin"') as it:
        it.ready("a", closed_port())
        engine = await it.engine("b", always_ok)
        for _ in range(4):
            assert (await it.ask(chat())).status == 200
        assert len(engine.requests) == 4
        assert any(record.retried for record in await it.wait_records(4))


async def test_without_another_engine_a_refused_connection_is_a_502_that_says_so():
    async with stand() as it:
        it.ready("a", closed_port())
        got = await it.ask(chat())
        assert got.status == 502
        assert got.headers["x-llmgw-reason"] == got.json()["error"]["code"]


async def test_an_engine_that_dies_without_a_byte_on_a_fresh_connection_is_not_replayed():
    async def dies(connection: Connection) -> None:
        await connection.request()

    async with stand(TWO, gateway='routing = "round_robin"') as it:
        first = await it.engine("a", dies)
        second = await it.engine("b", dies)
        got = await it.ask(chat())
        assert got.status == 502 and got.headers["x-llmgw-reason"] == "engine-died"
        assert len(first.requests) + len(second.requests) == 1


async def one_answer_only(connection: Connection) -> None:
    """Reads the next request on the same connection, and closes as if it had never seen it."""
    await connection.request()
    await connection.send(answer())
    await connection.request()


async def test_a_kept_connection_that_closes_in_the_last_moment_costs_no_request():
    async with stand() as it:
        engine = await it.engine("a", one_answer_only)
        caller = await it.call()
        for _ in range(6):
            await caller.send(chat())
            assert (await caller.answer()).status == 200
        assert engine.opened == 6


async def test_where_a_kept_connection_closes_another_engine_is_asked_first():
    async with stand(TWO, gateway='routing = "round_robin"') as it:
        await it.engine("a", one_answer_only)
        good = await it.engine("b", always_ok)
        caller = await it.call()
        for _ in range(6):
            await caller.send(chat())
            assert (await caller.answer()).status == 200
        assert len(good.requests) >= 3


async def test_after_the_first_byte_a_broken_answer_is_seen_as_broken():
    async def breaks(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: half\n\n"))

    async with stand(TWO) as it:
        first = await it.engine("a", breaks)
        second = await it.engine("b", breaks)
        caller = await it.call(chat(stream=True))
        got = await caller.answer()
        assert (got.status, got.body, got.whole) == (200, b"data: half\n\n", False)
        assert len(first.requests) + len(second.requests) == 1
        (record,) = await it.wait_records(1)
        assert record.reason == "engine-died"


async def test_a_broken_answer_without_framing_ends_in_a_reset():
    stop = trio.Event()

    async def hangs(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await stop.wait()

    async with stand(gateway='chunk_timeout = "1s"') as it:
        await it.engine("a", hangs)
        caller = await it.call(chat())
        got = await caller.answer()
        assert got.body == b"abc" and not got.whole
        stop.set()


async def test_an_answer_that_is_no_http_is_a_502():
    async def lies(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", lies)
        got = await it.ask(chat())
        assert got.status == 502 and got.headers["x-llmgw-reason"] == "bad-answer"


async def test_an_answer_head_without_end_is_a_502_and_no_memory():
    async def floods(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            await connection.send(b"x-flood: " + b"y" * 4000 + b"\r\n")
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", floods)
        assert (await it.ask(chat())).status == 502


async def test_more_than_the_announced_length_is_cut_and_the_connection_not_used_again():
    async def too_much(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n\r\nevil")

    async with stand() as it:
        engine = await it.engine("a", too_much)
        caller = await it.call()
        for _ in range(3):
            await caller.send(chat())
            assert (await caller.answer()).body == b"{}"
        assert engine.opened == 3


async def test_the_first_byte_timeout_of_a_shard_is_a_504():
    async def hangs(connection: Connection) -> None:
        await connection.request()
        await connection.wait_closed()

    async with stand(shard_text("a", first_byte_timeout="1s")) as it:
        engine = await it.engine("a", hangs)
        got = await it.ask(chat())
        assert got.status == 504
        while engine.open:
            await trio.testing.wait_all_tasks_blocked(0.01)


async def test_an_error_event_in_the_middle_of_a_stream_counts_as_an_error():
    async def fails_late(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b'data: {"id": 1}\n\n'))
        await connection.send(chunk(b'data: {"error": {"message": "out of memory"}}\n\n'))
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", fails_late)
        got = await it.ask(chat(stream=True))
        assert got.whole and b"out of memory" in got.body
        (record,) = await it.wait_records(1)
        assert record.reason == "error-event"


async def test_an_engine_that_fails_again_and_again_gets_no_requests_for_a_while():
    async def dies(connection: Connection) -> None:
        await connection.request()

    async with stand(TWO, gateway='routing = "round_robin"') as it:
        bad = await it.engine("a", dies)
        good = await it.engine("b", always_ok)
        statuses = [(await it.ask(chat())).status for _ in range(40)]
        assert statuses[-20:] == [200] * 20
        assert len(bad.requests) < 12 and len(good.requests) > 28


async def test_the_last_engine_of_a_model_stays_in_use_however_often_it_fails():
    async def dies(connection: Connection) -> None:
        await connection.request()

    async with stand() as it:
        bad = await it.engine("a", dies)
        for _ in range(20):
            assert (await it.ask(chat())).status == 502
        assert len(bad.requests) == 20


async def test_a_draining_engine_gets_nothing_new_and_its_stream_finishes():
    step = trio.Event()

    async def slow(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await step.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await connection.wait_closed()

    async with stand(TWO) as it:
        first = await it.engine("a", slow)
        caller = await it.call(chat(stream=True))
        await caller.until(b"data: 1")
        second = await it.engine("b", always_ok)
        it.cell("a").report(DrainBegan("uid 0 (root)"))
        for _ in range(5):
            assert (await it.ask(chat())).status == 200
        assert (len(first.requests), len(second.requests)) == (1, 5)
        load = it.board.gateway_load.value
        assert load.get(it.cell("a").status.id) == 1
        step.set()
        await caller.until(b"0\r\n\r\n")
        await it.board.gateway_load.wait_value(lambda load: not load)


async def test_when_the_engine_has_ended_its_stream_ends_truncated():
    async def hangs(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", hangs)
        caller = await it.call(chat(stream=True))
        await caller.until(b"data: 1\n\n\r\n")
        it.cell("a").report(Failed(Reason("x", "killed", "")))
        assert await caller.ended()
        while engine.open:
            await trio.testing.wait_all_tasks_blocked(0.01)
