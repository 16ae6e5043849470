"""The fronts of the guide, as the guide writes them: streams pass piece by piece, and nobody comes in as local."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from stand import STREAM_HEAD, Caller, Connection, chat, chunk, stand

from llmgw.config.kinds import Listen

GUIDE = (Path(__file__).parents[2] / "docs/gateway.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nginx(folder: Path, port: int) -> list[str]:
    text = block("nginx").replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    text = re.sub(r"^ *ssl_.*\n", "", text, flags=re.MULTILINE)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    lines = f"user root; pid {folder}/pid; error_log {folder}/log; daemon off; events {{}}\n"
    path = folder / "nginx.conf"
    path.write_text(f"{lines}http {{ access_log off; {temporary}\n{text}}}\n".replace("/run/llmgw", str(folder)))
    return ["nginx", "-c", str(path), "-p", str(folder)]


def haproxy(folder: Path, port: int) -> list[str]:
    text = re.sub(r"bind :443 .*", f"bind 127.0.0.1:{port}", block("haproxy"))
    path = folder / "haproxy.cfg"
    path.write_text(text.replace("/run/llmgw", str(folder)))
    return ["haproxy", "-db", "-f", str(path)]


Front = Callable[[], int]


@pytest.fixture(params=[nginx, haproxy], ids=["nginx", "haproxy"])
def front(request: pytest.FixtureRequest, short: Path) -> Iterator[Front]:
    """Starts it; the port that it listens on."""
    name = request.param.__name__
    if shutil.which(name) is None:
        pytest.skip(f"no {name}: apt-get install {name}")
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        port = free_port()
        with open(short / "out", "wb") as out:
            processes.append(subprocess.Popen(request.param(short, port), stdout=out, stderr=out))
        return port

    yield start
    for process in processes:
        process.terminate()
        process.wait(20)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("f")


async def connect(port: int) -> Caller:
    with trio.fail_after(20):
        while True:
            try:
                return Caller(await trio.open_tcp_stream("127.0.0.1", port))
            except OSError:
                await trio.sleep(0.02)


async def test_a_stream_passes_piece_by_piece_and_its_end_is_seen_on_both_sides(front: Front, short: Path) -> None:
    steps = [trio.Event() for _ in range(3)]

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD)
        for number, step in enumerate(steps):
            await connection.send(chunk(b"data: %d\n\n" % number))
            await step.wait()
        await connection.wait_closed()

    async with stand(doors=[Listen(path=str(short / "gateway.sock"))]) as it:
        engine = await it.engine("a", script)
        caller = await connect(front())
        await caller.send(chat(stream=True))
        # Each piece is there before the engine writes the next one.
        for number, step in enumerate(steps):
            await caller.until(b"data: %d\n\n" % number)
            step.set()
        # A client that leaves is gone for the engine too.
        await caller.aclose()
        while engine.open:
            await trio.testing.wait_all_tasks_blocked(0.01)


async def test_a_client_behind_it_is_nobody_on_this_machine(front: Front, short: Path) -> None:
    async with stand(doors=[Listen(path=str(short / "gateway.sock"))]):
        caller = await connect(front())
        await caller.send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        got = await caller.answer()
        assert (got.status, got.headers["x-llmgw-reason"]) == (401, "no-operator-key")
        await caller.aclose()
