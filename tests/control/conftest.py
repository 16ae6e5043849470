"""A control socket over a real board. The test plays the shards' tasks; `Daemon` is the daemon's side, small."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from llmgw.board import Board, Leaving, StatusCell
from llmgw.control import client
from llmgw.control.api import ReloadAnswer
from llmgw.control.server import bind, serve
from llmgw.domain.problem import Problem
from llmgw.domain.shard import ShardId
from llmgw.domain.status import (
    Event,
    Intent,
    Launched,
    LoadingSeen,
    ReadyConfirmed,
    ShardStatus,
    StopBegan,
    Stopped,
    Wish,
)
from llmgw.http.unix_socket import UnixSocket
from llmgw.supervisor.logtail import LogTail


class Log:
    """A tail that can be waited for."""

    def __init__(self) -> None:
        self.tail = LogTail(1000, 1 << 20, 8192)
        self._changed = trio.Event()

    def write(self, text: str, at: float = 0.0) -> None:
        self.tail.feed(text.encode(), at)
        self._changed.set()
        self._changed = trio.Event()

    @property
    def sequence(self) -> int:
        return self.tail.sequence

    @property
    def skipped(self) -> int:
        return self.tail.skipped

    @property
    def last_shown(self) -> str:
        return self.tail.last_shown

    def read(self, after: int) -> tuple[int, Sequence[Any]]:
        return self.tail.read(after)

    async def wait_newer(self, after: int) -> None:
        while self.tail.sequence <= after:
            await self._changed.wait()


class Daemon:
    """The daemon's side of the control socket, and the way to drive it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.time = 1000.0
        self.board = Board(now=lambda: self.time, strict=True)
        self.cells: dict[ShardId, StatusCell] = {}
        self.logs: dict[ShardId, Log] = {}
        self.reloads: list[tuple[str, bool]] = []
        self.answer = ReloadAnswer({"actions": []})
        self.control: UnixSocket

    # -- Services

    def header(self) -> dict[str, Any]:
        return {"llmgw": "0.1.0", "pid": os.getpid(), "node": "gpu-01", "warnings": []}

    def find(self, name: str) -> tuple[ShardId, ...]:
        return tuple(instance.status.id for instance in self.board.snapshot.named(name))

    def tail(self, id_: ShardId) -> Log | None:
        return self.logs.get(id_)

    def shm_bytes(self, id_: ShardId) -> int | None:
        return 4096 if id_ in self.logs else None

    async def reload(self, by: str, *, dry_run: bool) -> ReloadAnswer:
        self.reloads.append((by, dry_run))
        return self.answer

    def config(self) -> dict[str, Any]:
        return {"toml": ""}

    async def inventory(self) -> dict[str, Any]:
        return {"gpus": []}

    async def release_gpu(self, name: str, by: str) -> dict[str, Any]:
        return {"gpu": name, "released": False}

    async def metrics(self) -> bytes:
        return b"# TYPE llmgw_build_info gauge\n"

    async def upgrade(self, by: str) -> ReloadAnswer:
        return self.answer

    # -- what a test does

    def add(self, name: str, replica: int = 0, *, replicas: int = 1, **keys: Any) -> ShardId:
        id_ = ShardId(name, replica)
        status = ShardStatus(id_, id_.shown(replicas), "model", "vllm", **keys)
        self.cells[id_] = self.board.add(status, Intent(Wish.START, at=self.time))
        self.logs[id_] = Log()
        return id_

    def report(self, id_: ShardId, *events: Event) -> None:
        for event in events:
            self.time += 1.0
            self.cells[id_].report(event)

    def make_ready(self, id_: ShardId) -> None:
        generation = self.cells[id_].status.generation + 1
        launched = Launched(4711, 4711, generation, "127.0.0.1:8100", "hash")
        self.report(id_, launched, LoadingSeen("process VLLM"), ReadyConfirmed())

    def make_stopped(self, id_: ShardId) -> None:
        self.report(id_, StopBegan("asked"), Stopped("SIGTERM, 1.0 s"))

    def leave(self) -> None:
        self.board.leaving.set(Leaving("SIGTERM received", engines_stay=False))

    def refuse_reload(self, *problems: Problem) -> None:
        self.answer = evolve(self.answer, plan=None, problems=problems)

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float = 20.0
    ) -> tuple[int, dict[str, Any]]:
        """With the real client, in a thread of its own."""
        call = partial(client.request, self.path, method, path, body, timeout=timeout)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)

    async def lines(self, path: str) -> list[dict[str, Any]]:
        """A stream that ends by itself."""
        return await trio.to_thread.run_sync(lambda: list(client.stream(self.path, path)), abandon_on_cancel=True)


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    it = Daemon(str(tmp_path / "control.sock"))
    it.control = bind(it.path, mode=0o660)
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, it.control, it)
        yield it
        nursery.cancel_scope.cancel()
    it.control.close()
