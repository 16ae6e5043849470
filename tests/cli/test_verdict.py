"""check against the machine: whose a port is, and what a saved inventory is worth."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmgw.cli.errors import CommandError
from llmgw.cli.saved_inventories import read_saved
from llmgw.cli.verdict import examine, own_pids
from llmgw.domain.host import PortHolder


@contextmanager
def answering(path: Path, answer: object) -> Iterator[None]:
    """A control socket that gives one answer to whoever asks."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    body = json.dumps(answer).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def serve() -> None:
        try:
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(head + body)
        except OSError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_a_port_of_the_running_llmgws_engine_is_no_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "control.sock"
    monkeypatch.setenv("LLMGW_SOCKET", str(path))
    mine = PortHolder(8101, os.getpid())
    assert own_pids([mine], None) == set()
    with answering(path, {"shards": [{"pgid": os.getpgid(0)}, {"pgid": None}]}):
        assert own_pids([mine, PortHolder(8102), PortHolder(8103, 1)], None) == {os.getpid()}


def test_a_stranger_on_the_port_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMGW_SOCKET", str(tmp_path / "nobody.sock"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        file = tmp_path / "llmgw.toml"
        file.write_text(
            f'[[shard]]\nname = "a"\nmodel = "m"\nengine = "command"\ncommand = ["/bin/sleep", "1"]\nport = {port}\n'
            f'[supervisor]\nstate_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\n'
        )
        verdict = examine(str(file), node=None, offline=False)
    taken = [problem for problem in verdict.problems if problem.code == "port-taken"]
    assert [f"pid {os.getpid()}" in problem.message for problem in taken] == [True]
    assert taken[0].where is not None and taken[0].where.line == 6


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00", '{"api": 1, "gpu": {"status": "ok"}}'])
def test_a_file_that_is_no_inventory_is_refused_with_the_way_to_make_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(text)
    with pytest.raises(CommandError) as caught:
        read_saved([str(path)])
    assert caught.value.hint is not None and "llmgw inventory --json" in caught.value.hint
