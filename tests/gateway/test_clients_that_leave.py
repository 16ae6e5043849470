"""A client that leaves frees what it held, at once and in whatever phase; a slow one is not cut off."""

from __future__ import annotations

import trio
import trio.lowlevel
from stand import STREAM_HEAD, Connection, always_ok, answer, chat, chunk, shard_text, stand


async def until_closed(engine) -> None:
    while engine.open:
        await trio.testing.wait_all_tasks_blocked(0.005)


async def test_a_client_that_leaves_during_the_prefill_ends_the_engines_work():
    async def prefill(connection: Connection) -> None:
        await connection.request()
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", prefill)
        caller = await it.call(chat())
        while not engine.requests:
            await trio.testing.wait_all_tasks_blocked(0.005)
        await caller.aclose()
        await until_closed(engine)
        (record,) = await it.wait_records(1)
        assert (record.code, record.reason) == (499, "client-gone")
        assert not it.board.gateway_load.value or await it.board.gateway_load.wait_value(lambda load: not load) == {}


async def test_a_client_that_leaves_in_the_middle_of_a_stream_ends_it_before_the_next_piece():
    async def one_piece(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", one_piece)
        caller = await it.call(chat(stream=True))
        await caller.until(b"data: 1")
        await caller.aclose()
        await until_closed(engine)


async def test_a_client_that_leaves_the_queue_frees_its_place_for_the_next():
    step = trio.Event()

    async def one_at_a_time(connection: Connection) -> None:
        while await connection.request() is not None:
            await step.wait()
            await connection.send(answer())

    async with stand(shard_text("a", max_inflight=1)) as it:
        engine = await it.engine("a", one_at_a_time)
        first = await it.call(chat(n=1))
        while not engine.requests:
            await trio.testing.wait_all_tasks_blocked(0.005)
        second = await it.call(chat(n=2))
        await trio.testing.wait_all_tasks_blocked(0.02)
        third = await it.call(chat(n=3))
        await trio.testing.wait_all_tasks_blocked(0.02)
        await second.aclose()
        (left,) = await it.wait_records(1)
        assert (left.code, left.position) == (499, 1)
        step.set()
        assert (await first.answer()).status == 200
        assert (await third.answer()).status == 200
        assert [b'"n": 2' in body for _, body in engine.requests] == [False, False]


async def test_a_slow_reader_slows_its_engine_and_gets_everything():
    data = b"x" * 4_000_000

    async def floods(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(data))
        await connection.wait_closed()

    async with stand() as it:
        await it.engine("a", floods)
        caller = await it.call(chat())
        await caller.until(b"\r\n\r\n")
        got = len(caller.data)
        while got < len(data):
            piece = await caller.stream.receive_some(50_000)
            assert piece
            got += len(piece)
            await trio.lowlevel.checkpoint()
        assert got == len(data)


async def test_a_client_that_does_not_read_at_all_is_dropped_and_frees_the_engine():
    async def floods(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"x" * 60_000_000))
        await connection.wait_closed()

    async with stand(gateway='write_timeout = "1s"') as it:
        engine = await it.engine("a", floods)
        await it.call(chat())
        await it.wait_records(1)
        await until_closed(engine)


async def test_a_client_that_sends_half_a_head_and_stays_silent_is_told_so():
    async with stand(gateway='head_timeout = "1s"') as it:
        await it.engine("a", always_ok)
        caller = await it.call(b"POST /v1/chat/completions HTTP/1.1\r\nhost")
        got = await caller.answer()
        assert got.status == 408
        assert await caller.ended()


async def test_a_client_that_sends_half_a_body_and_stays_silent_is_told_so():
    async with stand(gateway='body_timeout = "1s"') as it:
        await it.engine("a", always_ok)
        caller = await it.call(chat()[:-5])
        assert (await caller.answer()).status == 408
