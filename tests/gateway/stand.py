"""A gateway in this process before engines of a few lines: real sockets, a real board, scripted answers."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from llmgw.board import Board, Cell, StatusCell
from llmgw.config.document import SourceFile
from llmgw.config.kinds import Listen
from llmgw.config.load import load
from llmgw.config.model import Config
from llmgw.config.parse import parse
from llmgw.domain.host import HostFacts
from llmgw.domain.shard import Secret, ShardId
from llmgw.domain.status import Intent, Launched, LoadingSeen, ReadyConfirmed, ShardStatus, Wish
from llmgw.gateway import ui
from llmgw.gateway.assembly import make_gateway
from llmgw.gateway.listeners import Listeners
from llmgw.gateway.own_pages import Page
from llmgw.gateway.record import RequestRecord
from llmgw.gateway.server import Gateway

Script = Callable[["Connection"], Awaitable[None]]


class Connection:
    """One connection to an engine, as the engine sees it."""

    def __init__(self, stream: trio.SocketStream, engine: Engine) -> None:
        self.stream = stream
        self.engine = engine
        self._data = b""

    async def request(self) -> tuple[bytes, bytes] | None:
        """Head and body of the next request; None at the end of the connection."""
        while b"\r\n\r\n" not in self._data:
            if not await self._more():
                return None
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        while len(self._data) < length:
            if not await self._more():
                return None
        body, self._data = self._data[:length], self._data[length:]
        self.engine.requests.append((head, body))
        return head, body

    async def _more(self) -> bool:
        try:
            data = await self.stream.receive_some(1 << 16)
        except trio.BrokenResourceError:
            data = b""
        self._data += data
        return bool(data)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def wait_closed(self) -> None:
        """Until the other side closes."""
        while await self._more():
            self._data = b""


class Engine:
    """Listens, and plays `script` for each connection. `opened` counts them, `requests` keeps what came."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[tuple[bytes, bytes]] = []
        self.opened = 0
        self.open = 0
        self.port = 0
        self.scope = trio.CancelScope()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        with self.scope:
            task_status.started()
            await trio.serve_listeners(self._play, listeners)

    async def _play(self, stream: trio.SocketStream) -> None:
        self.opened += 1
        self.open += 1
        try:
            async with stream:
                await self.script(Connection(stream, self))
        except trio.BrokenResourceError:
            pass
        finally:
            self.open -= 1


def answer(body: bytes = b'{"ok": true}', *, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def always_ok(connection: Connection) -> None:
    """Answers every request with a little JSON."""
    while await connection.request() is not None:
        await connection.send(answer())


def post(body: Any, *, path: str = "/v1/chat/completions", head: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    return (lines + head + "\r\n").encode() + data


def chat(model: str = "m", **more: Any) -> bytes:
    return post({"model": model, "messages": [{"role": "user", "content": "hi"}], **more})


class Answer:
    """One answer as the client read it."""

    def __init__(self, head: bytes, body: bytes, *, whole: bool) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.line = lines[0]
        self.status = int(lines[0].split(" ")[1])
        self.headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            self.headers[name.lower()] = value.strip()
        self.body = body
        self.whole = whole
        """Its framing came to an end."""

    def json(self) -> Any:
        return json.loads(self.body)


class Caller:
    """A client's connection, byte by byte."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.data = b""
        self.was_reset = False

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def more(self) -> bool:
        try:
            data = await self.stream.receive_some(1 << 16)
        except trio.BrokenResourceError:
            self.was_reset = True
            data = b""
        self.data += data
        return bool(data)

    async def until(self, wanted: bytes) -> bytes:
        """Everything that has come up to `wanted`, which is taken too."""
        while wanted not in self.data:
            assert await self.more(), f"the connection ended before {wanted!r}: {self.data!r}"
        found, _, self.data = self.data.partition(wanted)
        return found + wanted

    async def answer(self, *, is_head: bool = False) -> Answer:
        """The next answer, whatever its framing."""
        head = (await self.until(b"\r\n\r\n"))[:-4]
        lower = head.lower()
        status = int(head.split(b" ")[1])
        if is_head or status in (204, 304) or status < 200:
            return Answer(head, b"", whole=True)
        if b"transfer-encoding: chunked" in lower:
            return await self._chunked(head)
        if b"content-length:" in lower:
            length = int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
            while len(self.data) < length and await self.more():
                pass
            body, self.data = self.data[:length], self.data[length:]
            return Answer(head, body, whole=len(body) == length)
        while await self.more():
            pass
        body, self.data = self.data, b""
        return Answer(head, body, whole=not self.was_reset)

    async def _chunked(self, head: bytes) -> Answer:
        body = b""
        while True:
            while b"\r\n" not in self.data:
                if not await self.more():
                    return Answer(head, body, whole=False)
            size = int(self.data.split(b"\r\n")[0], 16)
            start = self.data.index(b"\r\n") + 2
            while len(self.data) < start + size + 2:
                if not await self.more():
                    return Answer(head, body + self.data[start:], whole=False)
            body += self.data[start : start + size]
            self.data = self.data[start + size + 2 :]
            if size == 0:
                return Answer(head, body, whole=True)

    async def ended(self) -> bool:
        """Wait for the end of the connection; True when nothing more came before it."""
        while await self.more():
            pass
        return not self.data

    async def aclose(self) -> None:
        await self.stream.aclose()


# -- the gateway before them -----------------------------------------------------------------------------


class Recorder:
    """Counts like the real observer, by keeping everything."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.gaps: list[float] = []
        self.more = trio.Event()

    def series(self, model: str, band: str) -> Recorder:
        return self

    def chunk(self, gap: float) -> None:
        self.gaps.append(gap)

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)
        self.more.set()
        self.more = trio.Event()


PATIENCE = 60.0
"""Seconds that one test with a stand may take."""

FACTS = HostFacts(hostname="gpu-01", uid=0, home="/root", env={"HOME": "/root"}, groups=frozenset({"root"}))


def configuration(text: str) -> Config:
    """The configuration that a text means; one with an error fails the test in words."""
    if "{ file" in text:
        # What stands in other files is read as `llmgw run` reads it.
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            file.write(text)
            file.flush()
            parsed = load(file.name)
    else:
        parsed = parse([SourceFile("llmgw.toml", text.encode(), "/etc/llmgw", "/etc/llmgw/llmgw.toml")], FACTS)
    assert parsed.config is not None, [problem.message for problem in parsed.problems]
    return parsed.config


def shard_text(name: str, model: str = "m", **more: Any) -> str:
    """A `[[shard]]` whose program nobody starts."""
    keys = {"name": name, "model": model, "engine": "command", "command": ["true"], **more}
    return "[[shard]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def key_hash(key: str) -> str:
    """As it stands in `keys` of a tenant."""
    return f'{{ sha256 = "{hashlib.sha256(key.encode()).hexdigest()}" }}'


class Stand:
    """A running gateway over a board that the test writes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.board = Board(strict=True)
        self.config = Cell(configuration(text))
        self.recorder = Recorder()
        self.listeners = Listeners()
        self.nursery: trio.Nursery
        self.gateway: Gateway
        self.done = trio.Event()
        self._cells: dict[str, StatusCell] = {}

    @property
    def records(self) -> list[RequestRecord]:
        return self.recorder.records

    @property
    def port(self) -> int:
        port = self.listeners.sockets.value[0].getsockname()[1]
        assert isinstance(port, int)
        return port

    async def wait_records(self, count: int) -> list[RequestRecord]:
        """Until so many requests have ended, as the counters see them."""
        while len(self.records) < count:
            await self.recorder.more.wait()
        return self.records

    def know(self, name: str, *, wish: Wish = Wish.START) -> StatusCell:
        """Put a shard of the file on the board, pending."""
        spec = self.config.value.shard(name)
        assert spec is not None
        status = ShardStatus(ShardId(name), name, spec.model, spec.engine.value)
        cell = self._cells[name] = self.board.add(status, Intent(wish))
        return cell

    def ready(self, name: str, port: int, *, api_key: str | None = None, path: str | None = None) -> StatusCell:
        """An engine of this shard is up at a port of this machine."""
        cell = self._cells.get(name) or self.know(name)
        key = Secret(api_key, "record") if api_key is not None else None
        address = f"unix:{path}" if path is not None else f"127.0.0.1:{port}"
        cell.report(Launched(4711, 4711, cell.status.generation + 1, address, "hash", (), key))
        cell.report(LoadingSeen("a sign"))
        cell.report(ReadyConfirmed())
        return cell

    def cell(self, name: str) -> StatusCell:
        return self._cells[name]

    async def engine(self, name: str, script: Script) -> Engine:
        """Start a scripted engine and make its shard ready."""
        engine = Engine(script)
        await self.nursery.start(engine.serve)
        self.ready(name, engine.port)
        return engine

    async def call(self, data: bytes = b"") -> Caller:
        """A new client's connection, which has sent `data`."""
        caller = Caller(await trio.open_tcp_stream("127.0.0.1", self.port))
        self.callers.append(caller)
        if data:
            await caller.send(data)
        return caller

    async def ask(self, data: bytes) -> Answer:
        """One request on a connection of its own."""
        caller = await self.call(data)
        answer = await caller.answer()
        await caller.aclose()
        return answer

    callers: list[Caller]


async def _nothing() -> Page:
    return Page(200, b"text/plain; version=0.0.4", b"# nothing\n")


@asynccontextmanager
async def stand(
    text: str = shard_text("a"),
    *,
    gateway: str = "",
    status: Callable[[], dict[str, Any]] = lambda: {"shards": []},
    doors: Sequence[Listen] = (),
    patience: float = PATIENCE,
) -> AsyncIterator[Stand]:
    """A gateway that serves the shards of `text`, with further keys of [gateway] and its tables, on a port of its own
    and on `doors`.
    """
    # Port 0 is for tests alone; the file wants a real one.
    it = Stand(f"{text}\n[gateway]\n{gateway}")
    it.callers = []
    wanted = (Listen(host="127.0.0.1", port=0), *doors)
    it.listeners.adopt(wanted, it.listeners.bind(wanted))
    html = ui.page()
    it.gateway = make_gateway(
        it.board,
        it.config,
        it.listeners.sockets,
        observer=it.recorder,
        metrics=_nothing,
        status=status,
        ui=Page(200, b"text/html; charset=utf-8", html, ui.headers(html)),
        estimate=lambda model: None,
        chance=random.Random(1).random,
    )

    async def serve(*, task_status: trio.TaskStatus[None]) -> None:
        await it.gateway.run(task_status=task_status)
        it.done.set()

    try:
        async with trio.open_nursery() as nursery:
            it.nursery = nursery
            await nursery.start(serve)
            # A request that never ends fails its test instead of stopping the suite.
            with trio.fail_after(patience):
                yield it
            nursery.cancel_scope.cancel()
    finally:
        for caller in it.callers:
            caller.stream.socket.close()
        it.listeners.close()
