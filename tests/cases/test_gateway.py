"""The reported failures of gateways (F33 to F38), over real sockets with engines of a few lines."""

from __future__ import annotations

import json

import pytest
import trio

from llmgw.domain.problem import Reason
from llmgw.domain.status import Failed, GaveUp, Launched, LoadingSeen, ReadyConfirmed
from tests.gateway.stand import (
    STREAM_HEAD,
    Connection,
    Engine,
    always_ok,
    answer,
    chat,
    chunk,
    post,
    shard_text,
    stand,
)


async def until(condition, engine: Engine) -> None:  # type: ignore[no-untyped-def]
    while not condition(engine):
        await trio.testing.wait_all_tasks_blocked(0.005)


# -- F33: the client is gone, the engine keeps generating


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", ["the request", "the first piece"])
async def test_a_client_that_leaves_ends_the_work_in_whatever_phase_it_is(stream: bool, after: str) -> None:
    async def works_for_ever(connection: Connection) -> None:
        await connection.request()
        if after == "the first piece":
            await connection.send(STREAM_HEAD + chunk(b"data: 1\n\n"))
        await connection.wait_closed()

    async with stand() as it:
        engine = await it.engine("a", works_for_ever)
        caller = await it.call(chat(stream=stream))
        await until(lambda engine: engine.requests, engine)
        if after == "the first piece":
            await caller.until(b"data: 1")
        await caller.aclose()
        await until(lambda engine: not engine.open, engine)


async def test_a_client_that_is_only_silent_is_not_cut_off() -> None:
    step = trio.Event()

    async def thinks(connection: Connection) -> None:
        await connection.request()
        await step.wait()
        await connection.send(answer())

    async with stand(gateway='head_timeout = "1s"\nbody_timeout = "1s"\nkeepalive_timeout = "1s"') as it:
        await it.engine("a", thinks)
        caller = await it.call(chat())
        await trio.sleep(1.5)
        step.set()
        assert (await caller.answer()).status == 200


# -- F34: one hung engine blocks all


async def test_requests_to_one_model_do_not_wait_for_another_that_hangs() -> None:
    async def hangs(connection: Connection) -> None:
        await connection.request()
        await connection.wait_closed()

    async with stand(shard_text("a", model="hangs") + shard_text("b", model="works")) as it:
        stuck = await it.engine("a", hangs)
        await it.engine("b", always_ok)
        for _ in range(200):
            await it.call(chat("hangs"))
        await until(lambda engine: engine.open == 200, stuck)
        assert (await it.ask(chat("works"))).status == 200


# -- F35: 404 instead of 503 while loading


async def test_a_model_that_loads_is_waited_for_a_failed_one_is_503_and_only_an_unknown_one_404() -> None:
    text = shard_text("a", model="loads") + shard_text("b", model="failed")
    async with stand(text) as it:
        engine = Engine(always_ok)
        await it.nursery.start(engine.serve)
        loading, failed = it.know("a"), it.know("b")
        loading.report(Launched(1, 1, 1, f"127.0.0.1:{engine.port}", "hash"))
        loading.report(LoadingSeen("a sign"))
        failed.report(Failed(Reason("no-weights", "the weights are missing", "name them")))
        failed.report(GaveUp("trying again cannot help"))
        waiting = await it.call(chat("loads"))
        got = await it.ask(chat("failed"))
        assert got.status == 503 and "the weights are missing" in got.json()["error"]["message"]
        assert (await it.ask(chat("unknown"))).status == 404
        loading.report(ReadyConfirmed())
        assert (await waiting.answer()).status == 200


# -- F36: replay after a partial stream


async def test_after_the_first_byte_nothing_is_sent_twice_and_half_an_answer_looks_like_half() -> None:
    async def breaks(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(b"data: half of\n\n"))

    async with stand(shard_text("a") + shard_text("b")) as it:
        engines = [await it.engine(name, breaks) for name in ("a", "b")]
        got = await it.ask(chat(stream=True))
        assert (got.status, got.body, got.whole) == (200, b"data: half of\n\n", False)
        assert sum(len(engine.requests) for engine in engines) == 1


async def test_the_head_goes_out_with_the_engines_first_byte_and_not_before() -> None:
    step = trio.Event()

    async def thinks(connection: Connection) -> None:
        await connection.request()
        await step.wait()
        await connection.send(answer())

    async with stand() as it:
        await it.engine("a", thinks)
        caller = await it.call(chat(stream=True))
        with trio.move_on_after(0.2):
            await caller.more()
        assert caller.data == b""
        step.set()
        assert (await caller.answer()).status == 200


# -- F37: server-sent events arrive in one lump


@pytest.mark.parametrize("more", ["", "accept-encoding: gzip, br\r\n"])
async def test_each_event_arrives_before_the_engine_writes_the_next(more: str) -> None:
    turn = trio.Event()
    steps = [trio.Event() for _ in range(5)]

    async def one_by_one(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        for number, step in enumerate(steps):
            await connection.send(chunk(b"data: %d\n\n" % number))
            await step.wait()
        turn.set()
        await connection.send(b"0\r\n\r\n")

    async with stand() as it:
        engine = await it.engine("a", one_by_one)
        caller = await it.call(post({"model": "m", "stream": True}, head=more))
        head = (await caller.until(b"\r\n\r\n")).lower()
        assert b"x-accel-buffering: no" in head and b"cache-control: no-cache" in head
        for number, step in enumerate(steps):
            await caller.until(b"data: %d\n\n" % number)
            step.set()
        await turn.wait()
        if more:
            assert b"accept-encoding: gzip, br" in engine.requests[0][0]


# -- F38: large bodies, large headers


async def test_an_image_of_thirty_megabytes_and_a_long_key_pass_unchanged() -> None:
    body = json.dumps({"model": "m", "image": "A" * 30_000_000}).encode()
    async with stand() as it:
        engine = await it.engine("a", always_ok)
        got = await it.ask(post(body, head="authorization: Bearer " + "k" * 20_000 + "\r\n"))
        assert got.status == 200
        assert engine.requests[0][1] == body


async def test_what_is_too_large_is_told_so_in_json_before_it_is_read() -> None:
    async with stand(gateway='max_body = "1MiB"') as it:
        await it.engine("a", always_ok)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n"
        got = await it.ask(head)
        assert (got.status, got.json()["error"]["code"]) == (413, "body-too-large")
        caller = await it.call(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(40):
            try:
                await caller.send(chunk(b"x" * 100_000))
            except trio.BrokenResourceError:
                break
        assert (await caller.answer()).status == 413


async def test_twenty_large_bodies_at_once_stay_within_the_limit_of_all_together() -> None:
    async with stand(gateway='max_body = "4MiB"\nmax_buffered = "16MiB"') as it:
        await it.engine("a", always_ok)
        body = json.dumps({"model": "m", "image": "A" * 3_500_000}).encode()
        callers = [await it.call(post(body)[: 1 << 20]) for _ in range(20)]
        refused = 0
        for caller in callers:
            with trio.move_on_after(0.2):
                await caller.more()
            refused += caller.data.startswith(b"HTTP/1.1 503")
        assert refused == 16
