"""Whose a listening socket is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.shard import TcpEndpoint, UnixEndpoint
from llmgw.supervisor.listeners import listener_of, parse_listeners, port_free, port_holders

WORKER_LISTENS = """
import os, socket, sys, time
if os.fork() == 0:
    if sys.argv[1].isdecimal():
        s = socket.create_server(('127.0.0.1', 0))
        print('port', s.getsockname()[1], flush=True)
    else:
        s = socket.socket(socket.AF_UNIX)
        s.bind(sys.argv[1])
        s.listen()
        print('port', 0, flush=True)
    time.sleep(600)
time.sleep(600)
"""


def test_only_listening_sockets_count() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0 100\n"
        "   1: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1 0 100\n"
        "   2: 0100007F:1F41 0100007F:1F40 01 00000000:00000000 00:00000000 00000000     0        0 333 1 0 100\n"
    )
    assert parse_listeners(table) == {8000: {111, 222}}


@given(st.text())
def test_any_text_is_a_table(text: str) -> None:
    assert isinstance(parse_listeners("head\n" + text), dict)


async def test_a_listener_of_a_worker_is_ours(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(WORKER_LISTENS, "0"), "port")
    port = int(launcher.output().split()[1])
    assert listener_of(TcpEndpoint("127.0.0.1", port), engine).kind == "ours"


async def test_a_listener_of_a_stranger_is_named(launcher: Any) -> None:
    engine = await launcher.start_until(launcher.command(WORKER_LISTENS, "0"), "port")
    program = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        launcher.children.register(other.pid)
        assert other.stdout is not None
        port = int(other.stdout.readline())
        listener = listener_of(TcpEndpoint("127.0.0.1", port), engine)
        assert listener.kind == "anothers"
        assert listener.holder is not None
        assert (listener.holder.pid, listener.holder.port, listener.holder.uid) == (other.pid, port, os.getuid())
        assert str(listener.holder).startswith(f"pid {other.pid} (python")
        assert port_holders({port, 1}) == {port: listener.holder}
        assert port_free("127.0.0.1", port) == f"port {port} is in use"
    launcher.children.forget(other.pid)
    assert listener_of(TcpEndpoint("127.0.0.1", port), engine).kind == "none"
    assert port_holders({port}) == {}
    assert port_free("127.0.0.1", port) is None


async def test_a_unix_socket_of_a_worker_is_ours_and_of_another_process_is_named(launcher: Any) -> None:
    path = str(launcher.folder / "engine.sock")
    engine = await launcher.start_until(launcher.command(WORKER_LISTENS, path), "port")
    assert listener_of(UnixEndpoint(path), engine).kind == "ours"
    mine = str(launcher.folder / "other.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(mine)
        assert listener_of(UnixEndpoint(mine), engine).kind == "none"
        server.listen()
        listener = listener_of(UnixEndpoint(mine), engine)
        assert listener.kind == "anothers"
        assert listener.holder is not None
        assert listener.holder.pid == os.getpid()
    assert listener_of(UnixEndpoint(str(launcher.folder / "missing.sock")), engine).kind == "none"


def test_a_port_in_time_wait_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        # Who closes first waits: the server's side of the port.
        accepted.close()
        client.recv(1)
        client.close()
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("127.0.0.1", port))
    assert port_free("127.0.0.1", port) is None


def test_a_listener_on_all_addresses_takes_the_port_of_each() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        assert port_free("127.0.0.1", port) == f"port {port} is in use"


def test_an_address_of_another_host_is_told_in_words() -> None:
    assert "cannot bind 192.0.2.1 port 80" in str(port_free("192.0.2.1", 80))


def test_reading_refused_means_not_visible() -> None:
    """Another user's process: nothing of it may be read, so nobody can be named."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    probe = """
import os, socket
from llmgw.supervisor.listeners import port_holders
server = socket.create_server(('127.0.0.1', 0))
port = server.getsockname()[1]
assert port_holders([port])[port].pid == os.getpid()
if os.fork() == 0:
    server.close()
    os.setuid(65534)
    print(port_holders([port])[port].pid, flush=True)
    os._exit(0)
os.wait()
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.check_output([sys.executable, "-c", probe], text=True, env={**os.environ, "PYTHONPATH": path})
    assert done == "None\n"
