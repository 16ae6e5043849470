"""The end of llmgw, a new file, new doors: nothing that runs is dropped, and nothing new is let in to what goes."""

from __future__ import annotations

import trio
from stand import STREAM_HEAD, Connection, always_ok, answer, chat, chunk, configuration, shard_text, stand

from llmgw.board import Leaving
from llmgw.config.kinds import Listen


async def slow_stream(connection: Connection) -> None:
    await connection.request()
    await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
    await connection.wait_closed()


async def test_when_llmgw_leaves_streams_get_their_time_and_then_end_truncated():
    async with stand(gateway='drain_timeout = "1s"') as it:
        await it.engine("a", slow_stream)
        caller = await it.call(chat(stream=True))
        await caller.until(b"data: 1\n\n\r\n")
        idle = await it.call()
        it.board.leaving.set(Leaving("SIGTERM (restart)", engines_stay=True))
        assert await idle.ended()
        assert await caller.ended()
        await it.done.wait()


async def test_a_stream_that_ends_in_time_ends_whole_and_llmgw_need_not_wait():
    step = trio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await step.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await connection.wait_closed()

    async with stand(gateway='drain_timeout = "1h"') as it:
        await it.engine("a", script)
        caller = await it.call(chat(stream=True))
        await caller.until(b"data: 1\n\n\r\n")
        it.board.leaving.set(Leaving("SIGTERM (stop)", engines_stay=False))
        await trio.testing.wait_all_tasks_blocked()
        step.set()
        await caller.until(b"0\r\n\r\n")
        await it.done.wait()


async def test_who_waits_in_the_queue_is_told_that_llmgw_leaves():
    step = trio.Event()

    async def one(connection: Connection) -> None:
        await connection.request()
        await step.wait()
        await connection.send(answer())

    async with stand(shard_text("a", max_inflight=1)) as it:
        engine = await it.engine("a", one)
        first = await it.call(chat())
        while not engine.requests:
            await trio.testing.wait_all_tasks_blocked(0.005)
        second = await it.call(chat())
        await trio.testing.wait_all_tasks_blocked(0.02)
        it.board.leaving.set(Leaving("SIGTERM (restart)", engines_stay=True))
        got = await second.answer()
        assert got.status == 503 and "retry-after" in got.headers
        step.set()
        assert (await first.answer()).status == 200


async def test_a_reload_changes_names_while_a_stream_goes_on():
    step = trio.Event()

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await step.wait()
            await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with stand(shard_text("a", aliases=["old"])) as it:
        await it.engine("a", script)
        caller = await it.call(chat("old", stream=True))
        await caller.until(b"data: 1")
        it.config.set(configuration(shard_text("a", aliases=["new"]) + "[gateway]\n"))
        await trio.testing.wait_all_tasks_blocked()
        assert (await it.ask(chat("old"))).status == 404
        step.set()
        await caller.until(b"0\r\n\r\n")
        assert (await it.ask(chat("new"))).status == 200


async def test_a_door_that_a_reload_opens_is_open_and_one_that_it_closes_is_closed(tmp_path):
    path = str(tmp_path / "gateway.sock")
    async with stand() as it:
        await it.engine("a", always_ok)
        port = it.port
        old = await it.call(chat())
        assert (await old.answer()).status == 200
        wanted = (Listen(path=path),)
        it.listeners.adopt(wanted, it.listeners.bind(wanted))
        await trio.testing.wait_all_tasks_blocked()
        async with await trio.open_unix_socket(path) as stream:
            await stream.send_all(chat())
            assert (await stream.receive_some(100)).startswith(b"HTTP/1.1 200")
        # Who was connected goes on.
        await old.send(chat())
        assert (await old.answer()).status == 200
        try:
            await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            pass
        else:
            raise AssertionError("the closed door was open")


async def test_without_gateway_in_the_file_the_gateway_ends():
    async with stand() as it:
        await it.engine("a", always_ok)
        assert (await it.ask(chat())).status == 200
        it.config.set(configuration(shard_text("a")))
        await it.done.wait()


async def test_a_kept_connection_brings_one_more_request_while_llmgw_restarts_and_is_told_that_it_ends():
    async with stand() as it:
        await it.engine("a", always_ok)
        caller = await it.call(chat())
        assert (await caller.answer()).status == 200
        it.board.leaving.set(Leaving("upgrade", engines_stay=True))
        await trio.testing.wait_all_tasks_blocked()
        await caller.send(chat())
        got = await caller.answer()
        assert (got.status, got.headers["connection"]) == (200, "close")
        assert await caller.ended()
        await it.done.wait()


async def test_while_llmgw_stops_with_its_engines_nothing_new_is_let_in():
    step = trio.Event()

    async def slow(connection: Connection) -> None:
        await connection.request()
        await step.wait()
        await connection.send(answer())
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", slow)
        caller = await it.call(chat() + chat())
        while not engine.requests:
            await trio.testing.wait_all_tasks_blocked(0.005)
        it.board.leaving.set(Leaving("SIGTERM (stop)", engines_stay=False))
        await trio.testing.wait_all_tasks_blocked()
        step.set()
        assert (await caller.answer()).status == 200
        await it.done.wait()
        assert len(engine.requests) == 1


async def test_a_connection_that_was_promised_to_stay_open_stays_so_for_one_more_request():
    step = trio.Event()

    async def script(connection: Connection) -> None:
        while await connection.request() is not None:
            await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
            await step.wait()
            await connection.send(b"0\r\n\r\n")

    async with stand() as it:
        await it.engine("a", script)
        caller = await it.call(chat(stream=True))
        assert b"connection: close" not in (await caller.until(b"data: 1"))
        it.board.leaving.set(Leaving("upgrade", engines_stay=True))
        await trio.testing.wait_all_tasks_blocked()
        step.set()
        await caller.until(b"0\r\n\r\n")
        await caller.send(chat())
        got = await caller.answer()
        assert (got.status, got.headers["connection"]) == (200, "close")
        await it.done.wait()
