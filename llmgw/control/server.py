"""The control socket: bound, taken over, and served.

The locks on state and runtime directory decide who is the supervisor (`supervisor.records`); whoever calls this holds
them, from before `bind` until after `close`.
"""

from __future__ import annotations

import contextlib
import os
import socket

import trio

from llmgw import __version__
from llmgw.control.api import API, Api, Services
from llmgw.domain.directories import SOCKET_NAME, SOCKET_POINTER
from llmgw.domain.problem import LlmgwError
from llmgw.http import unix_socket
from llmgw.http.server import HttpServer
from llmgw.http.unix_socket import UnixSocket


def bind(path: str, *, mode: int = 0o660, group: str | None = None) -> UnixSocket:
    """Listen at `path` in place of whatever socket is there. Raises LlmgwError."""
    return unix_socket.bind(path, what="the control socket", setting="supervisor.socket", mode=mode, group=group)


def take_over(fd: int, path: str | None) -> UnixSocket:
    """A listening socket by its descriptor: from systemd (`path` None, the file stays), or kept over an upgrade."""
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise LlmgwError(f"cannot take over descriptor {fd} as control socket: {error.strerror}") from error
    if sock.family != socket.AF_UNIX or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise LlmgwError(f"cannot take over descriptor {fd} as control socket: it is no listening unix socket")
    return UnixSocket(sock, path)


def point_clients(runtime_dir: str, socket_path: str) -> None:
    """Say in the runtime directory where the socket is, when it is not there, since clients look nowhere else."""
    pointer = os.path.join(runtime_dir, SOCKET_POINTER)
    if socket_path == os.path.join(runtime_dir, SOCKET_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(pointer)
        return
    temporary = f"{pointer}.new"
    with open(temporary, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(socket_path + "\n")
    os.replace(temporary, pointer)


async def serve(
    control: UnixSocket, services: Services, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer on the control socket until cancelled. Closing it is left to the caller, who holds the locks."""
    api = Api(services)
    headers = {"llmgw-api": str(API), "llmgw-version": __version__}
    server = HttpServer(api.handle, headers=headers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.keep_operations)
        await nursery.start(server.serve, control.sock)
        task_status.started()
