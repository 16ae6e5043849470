"""What an engine's port answers, down to the socket: refused is one thing, not being able to ask another."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmgw.domain.shard import TcpEndpoint, UnixEndpoint
from llmgw.supervisor.probes import Probes
from llmgw.supervisor.readiness import Answer, Refused, Unknown
from tests.node import free_port


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def health_of(endpoint: TcpEndpoint | UnixEndpoint) -> Answer:
    async with Probes(endpoint) as probes:
        return await probes.ask_health("/health", 10)


async def test_a_closed_port_and_a_dead_socket_file_are_refusals(tmp_path: Path) -> None:
    assert await health_of(TcpEndpoint("127.0.0.1", free_port())) == Refused()
    path = tmp_path / "s"
    assert await health_of(UnixEndpoint(str(path))) == Refused(absent=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    assert await health_of(UnixEndpoint(str(path))) == Refused()


async def test_a_question_that_cannot_be_asked_is_no_refusal() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        async with Probes(TcpEndpoint("127.0.0.1", server.getsockname()[1])) as probes:
            with no_descriptor_left():
                answer = await probes.ask_health("/health", 10)
    assert answer == Unknown("cannot connect: Too many open files")
