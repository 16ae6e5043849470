from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from stand import Connection, Engine, Script, answer, configuration, shard_text

from llmgw.board import Board, Cell
from llmgw.domain.shard import Secret, ShardId
from llmgw.domain.status import ConditionKind, ConditionSet, Intent, Launched, ReadyConfirmed, ShardStatus, Wish
from llmgw.gateway.metrics import engines
from llmgw.gateway.metrics.engines import EngineSeries
from llmgw.metrics.exposition import Exposition

ON = "\n[gateway]\nengine_metrics = true\n"


class Node:
    """A board with engines that answer /metrics by a script."""

    def __init__(self, text: str, nursery: trio.Nursery) -> None:
        self.board = Board(strict=True)
        self.config = Cell(configuration(text))
        self._nursery = nursery

    def ready(self, name: str, address: str, key: str | None = None) -> None:
        cell = self.board.add(ShardStatus(ShardId(name), name, "m", "vllm"), Intent(Wish.START))
        secret = Secret(key, "record") if key is not None else None
        cell.report(Launched(4711, 4711, 1, address, "hash", (), secret))
        cell.report(ReadyConfirmed())

    async def engine(self, name: str, script: Script, key: str | None = None) -> Engine:
        engine = Engine(script)
        await self._nursery.start(engine.serve)
        self.ready(name, f"127.0.0.1:{engine.port}", key)
        return engine

    async def page(self) -> str:
        series = EngineSeries(self.board, self.config)
        return (await Exposition(lambda: [series.parts]).render()).decode()


@asynccontextmanager
async def node(gateway: str = ON) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        with trio.fail_after(30):
            yield Node(shard_text("a") + gateway, nursery)
        nursery.cancel_scope.cancel()


async def metrics(connection: Connection) -> None:
    while await connection.request() is not None:
        await connection.send(answer(b"# TYPE vllm:x gauge\nvllm:x 1\n"))


async def test_the_series_of_every_ready_engine_are_on_the_page() -> None:
    async with node() as it:
        first = await it.engine("a", metrics, key="sk-secret")
        await it.engine("b", metrics)
        page = await it.page()
        assert page.endswith('# TYPE vllm:x gauge\nvllm:x{shard="a",model="m"} 1\nvllm:x{shard="b",model="m"} 1\n')
        assert 'llmgw_engine_metrics_up{shard="a"} 1\n' in page
        head, _ = first.requests[0]
        assert head.startswith(b"GET /metrics HTTP/1.1\r\n")
        assert b"authorization: bearer sk-secret" in head.lower()
        assert "sk-secret" not in page


async def test_engines_are_not_asked_unless_the_file_says_so() -> None:
    async with node("\n[gateway]\n") as it:
        engine = await it.engine("a", metrics)
        assert await it.page() == ""
        assert engine.opened == 0


async def hangs(connection: Connection) -> None:
    await connection.request()
    await connection.wait_closed()


async def never_ends(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        await connection.send(b"x 1\n" * 10_000)


async def fails(connection: Connection) -> None:
    await connection.request()
    await connection.send(answer(b"x 1\n", status="500 Internal Server Error"))


async def breaks_off(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx 1\n")


async def speaks_no_http(connection: Connection) -> None:
    await connection.request()
    await connection.send(b"\x00\xff\r\n\r\n")


@pytest.mark.parametrize("script", [hangs, never_ends, fails, breaks_off, speaks_no_http])
async def test_an_engine_that_does_not_answer_well_leaves_the_others_alone(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "TIMEOUT", 0.5)
    async with node() as it:
        await it.engine("a", script)
        await it.engine("b", metrics)
        page = await it.page()
        assert 'llmgw_engine_metrics_up{shard="a"} 0\n' in page
        assert 'llmgw_engine_metrics_up{shard="b"} 1\n' in page
        assert 'vllm:x{shard="b",model="m"} 1\n' in page


async def test_a_page_is_not_late_however_many_engines_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TIMEOUT", 60.0)
    monkeypatch.setattr(engines, "PATIENCE", 0.5)
    async with node() as it:
        await it.engine("a", hangs)
        engine = await it.engine("b", metrics)
        it.ready("b0", f"127.0.0.1:{engine.port}")
        page = await it.page()
        assert 'llmgw_engine_metrics_up{shard="a"} 0\n' in page
        assert 'llmgw_engine_metrics_up{shard="b"} 1\n' in page
        assert 'vllm:x{shard="b0",model="m"} 1\n' in page


async def test_all_pages_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PAGES_MAX", 40)
    async with node() as it:
        await it.engine("a", metrics)
        await it.engine("b", metrics)
        page = await it.page()
        assert page.count("vllm:x{") == 1
        up = [line for line in page.splitlines() if line.startswith("llmgw_engine_metrics_up{")]
        assert sorted(line[-1] for line in up) == ["0", "1"]


async def test_an_engine_behind_a_unix_socket_is_asked_too(tmp_path: Path) -> None:
    async with node() as it:
        path = str(tmp_path / "engine.sock")
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(path)
        listener.listen(4)

        async def serve(stream: trio.SocketStream) -> None:
            async with stream:
                await metrics(Connection(stream, Engine(metrics)))

        it._nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listener)])
        it.ready("a", f"unix:{path}")
        assert 'vllm:x{shard="a",model="m"} 1\n' in await it.page()


async def test_an_engine_that_sleeps_or_is_gone_is_not_asked() -> None:
    async with node() as it:
        engine = await it.engine("a", metrics)
        cell = it.board.add(ShardStatus(ShardId("b"), "b", "m", "vllm"), Intent(Wish.START))
        cell.report(Launched(4711, 4711, 1, f"127.0.0.1:{engine.port}", "hash"))
        cell.report(ReadyConfirmed())
        cell.report(ConditionSet(ConditionKind.SLEEPING, "asleep"))
        page = await it.page()
        assert engine.opened == 1
        assert 'shard="b"' not in page
