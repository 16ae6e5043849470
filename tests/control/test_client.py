from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from attrs import evolve

from llmgw.control import client
from llmgw.control.client import ClientError
from llmgw.domain.shard import ShardId, TcpEndpoint
from llmgw.supervisor.procfs import ProcessId, identify
from llmgw.supervisor.records import RecordStore, ShardRecord

if TYPE_CHECKING:
    from .conftest import Daemon


@contextlib.contextmanager
def answering(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A scripted server: `answer` gets one accepted connection."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(4)

    def run() -> None:
        connection, _ = server.accept()
        with connection:
            answer(connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield str(path)
    finally:
        thread.join(20)
        server.close()


def saying(data: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(data)

    return answer


def failure(path: str, *, timeout: float = 5.0) -> ClientError:
    with pytest.raises(ClientError) as caught:
        client.request(path, "GET", "/v1/status", timeout=timeout)
    assert caught.value.exit_code == 5
    return caught.value


def test_the_client_starts_at_once() -> None:
    heavy = "{'trio', 'httpx', 'attr', 'cattrs', 'rich', 'http.client', 'logging', 'typing', 'asyncio'}"
    code = f"import sys, llmgw.control.client; print(*sorted(set(sys.modules) & {heavy}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# -- which socket ----------------------------------------------------------------------------------------


def test_option_and_environment_name_the_socket(tmp_path: Path) -> None:
    env = {"LLMGW_SOCKET": "/from/env.sock"}
    assert client.find_socket("/from/option.sock", env, 1000) == "/from/option.sock"
    assert client.find_socket(None, env, 1000) == "/from/env.sock"


def test_the_callers_own_socket_comes_before_any_other(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    own, other = tmp_path / "run/llmgw", tmp_path / "state/llmgw/run"
    own.mkdir(parents=True)
    other.mkdir(parents=True)
    (other / "control.sock").touch()
    assert client.find_socket(None, env, 1000) == str(other / "control.sock")
    (own / "socket").write_text("/srv/llmgw.sock\n")
    assert client.find_socket(None, env, 1000) == "/srv/llmgw.sock"
    (own / "control.sock").touch()
    assert client.find_socket(None, env, 1000) == str(own / "control.sock")


def test_without_any_socket_the_likeliest_path_is_named(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    (tmp_path / "llmgw").mkdir()
    (tmp_path / "llmgw/socket").write_text("not absolute")
    assert client.find_socket(None, env, 1000) == str(tmp_path / "llmgw/control.sock")


# -- why there is no answer ------------------------------------------------------------------------------


def test_no_socket_means_no_llmgw(tmp_path: Path) -> None:
    error = failure(str(tmp_path / "none.sock"))
    assert error.message == f"no llmgw is running here ({tmp_path}/none.sock does not exist)"
    assert error.hint is not None
    assert error.hint.startswith("start one with: llmgw run llmgw.toml   or: systemctl start llmgw\n")
    assert "llmgw -s RUNTIME_DIR/control.sock" in error.hint


def test_a_socket_that_nobody_listens_at_means_a_death(tmp_path: Path) -> None:
    path = str(tmp_path / "dead.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    error = failure(path)
    assert error.message == f"{path} exists but nobody listens: llmgw died"
    assert error.hint is not None and "start it again with: llmgw run" in error.hint


def record_of(shard: str, replica: int, leader: ProcessId) -> ShardRecord:
    return ShardRecord(
        id=ShardId(shard, replica),
        generation=1,
        run_id="0123456789abcdef",
        leader=leader,
        pgid=leader.pid,
        sid=leader.pid,
        alive_at=1,
        endpoint=TcpEndpoint("127.0.0.1", 8100),
        config_hash="hash",
        engine="vllm",
        model="model",
        launched_at=1.0,
    )


def test_engines_that_outlived_a_dead_llmgw_are_named(tmp_path: Path) -> None:
    state = tmp_path / "state"
    me = identify(os.getpid())
    assert me is not None
    store = RecordStore(str(state))
    store.save(record_of("llama", 0, me))
    store.save(record_of("old", 0, evolve(me, start_ticks=me.start_ticks + 1)))
    store.save(record_of("booted", 0, evolve(me, boot_id="another")))
    for name, text in (("broken.0.json", "{"), ("list.0.json", "[]"), ("deep.0.json", "[" * 100_000)):
        (state / "shards" / name).write_text(text)
    assert client.living_engines(str(state)) == [("llama", me.pid)]
    store.save(record_of("embed", 0, me))
    store.save(record_of("embed", 1, me))
    error = failure(str(state / "run/control.sock"))
    assert error.hint is not None and error.hint.splitlines()[1] == (
        f"3 engines still run (embed/0 pid {me.pid}, embed/1 pid {me.pid}, llama pid {me.pid}): "
        "llmgw run takes them over, llmgw sweep ends them"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_without_permission_the_group_to_join_is_named() -> None:
    # Not below tmp_path, which nobody else may enter.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o711)
        path = f"{folder}/s.sock"
        server.bind(path)
        os.chmod(path, 0o660)
        os.chown(path, 0, 4)
        server.listen()
        code = f"""
import grp, os
from llmgw.control import client
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    client.request({path!r}, "GET", "/")
except client.ClientError as error:
    print(error.message); print(error.hint)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"no permission for {path}"
    assert "usermod -aG adm $USER" in second


def test_an_llmgw_that_does_not_answer_is_named_by_its_pid(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        error = failure(str(tmp_path / "s"), timeout=0.05)
    assert error.message == f"llmgw (pid {os.getpid()}) does not answer"


def test_a_full_queue_of_connections_is_no_answer_either(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as stack:
        server.bind(path)
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(path)
        assert failure(path, timeout=0.05).message == "llmgw does not answer"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "hung up without an answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not answer like llmgw"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", "does not answer like llmgw"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "does not answer like llmgw"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "in the middle of its answer"),
        (b"HTTP/1.1 200 OK\r\nllmgw-api: 2\r\nllmgw-version: 0.9\r\n\r\n{}", "0.9 and speaks api 2"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"api": 3}', "speaks api 3"),
        (b"x" * 70_000, "does not answer like llmgw"),
    ],
)
def test_answers_that_are_none(tmp_path: Path, data: bytes, part: str) -> None:
    with answering(tmp_path / "s", saying(data)) as path:
        assert part in failure(path).message


def test_a_socket_with_a_long_path_is_reached(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    fd = os.open(folder, os.O_PATH)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"/proc/self/fd/{fd}/s")
    server.listen()

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            saying(b'HTTP/1.1 200 OK\r\n\r\n{"api": 1}')(connection)

    thread = threading.Thread(target=answer)
    thread.start()
    assert client.request(str(folder / "s"), "GET", "/") == (200, {"api": 1})
    thread.join(20)
    server.close()
    os.close(fd)


def test_a_stream_gives_objects_until_it_ends_and_forgets_a_broken_last_line(tmp_path: Path) -> None:
    data = b'HTTP/1.1 200 OK\r\n\r\n{"seq": 1}\n\n{"seq": 2}\n{"se'
    with answering(tmp_path / "s", saying(data)) as path:
        assert list(client.stream(path, "/v1/events")) == [{"seq": 1}, {"seq": 2}]


async def test_a_refused_stream_raises_the_daemons_words(daemon: Daemon) -> None:
    daemon.add("llama")
    with pytest.raises(ClientError) as caught:
        await daemon.lines("/v1/shards/nobody/logs")
    assert (caught.value.exit_code, caught.value.message) == (4, "there is no shard 'nobody'")
    assert caught.value.hint == "known: llama"


def test_refusals_have_the_exit_codes_of_the_command() -> None:
    def code(status: int, word: str) -> int:
        return client.refusal(status, {"error": {"code": word, "message": "m", "hint": None}}).exit_code

    assert [code(404, "no-such-shard"), code(404, "not-found"), code(422, "config")] == [4, 1, 78]
    assert [code(503, "leaving"), code(409, "conflict"), code(500, "internal")] == [5, 1, 1]
    assert client.refusal(500, {}).message == "llmgw answered with HTTP status 500"


async def test_a_body_arrives(daemon: Daemon) -> None:
    daemon.add("llama")
    with trio.fail_after(20):
        code, _ = await daemon.ask("POST", "/v1/shards/llama/stop", {"why": "because"})
    assert code == 202
