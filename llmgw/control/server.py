"""The control socket: bound so that there is never a moment with a wrong mode, or bound but not listening.

The locks on state and runtime directory decide who is the supervisor (`supervisor.records`); whoever calls this holds
them, from before `bind` until after `close`.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import secrets
import socket
import stat

import trio

from llmgw import __version__
from llmgw.control.api import API, Api, Services
from llmgw.domain.directories import SOCKET_NAME, SOCKET_POINTER
from llmgw.domain.problem import LlmgwError
from llmgw.http.server import HttpServer

BACKLOG = 128
PATH_MAX = 107
"""Bytes of a unix socket's path (unix(7)); measured: 107 binds, 108 does not."""


class ControlSocket:
    """A listening unix socket and, where it is ours to remove, its file."""

    def __init__(self, sock: socket.socket, path: str | None) -> None:
        self.sock = sock
        self.path = path
        self._identity = _identity(path) if path else None

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        """Remove the file, unless it is somebody else's by now, and close."""
        if self.path and self._identity and _identity(self.path) == self._identity:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self.sock.close()


def bind(path: str, *, mode: int = 0o660, group: str | None = None) -> ControlSocket:
    """Listen at `path` in place of whatever socket is there. Raises LlmgwError."""
    size = len(os.fsencode(path))
    if size > PATH_MAX:
        raise LlmgwError(
            f"cannot bind the control socket {path}: its path has {size} bytes, a socket's may have {PATH_MAX}",
            "set supervisor.socket to a shorter path",
        )
    if not _is_replaceable(path):
        raise LlmgwError(f"cannot bind the control socket {path}: a file that is no socket stands there")
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        try:
            temporary = _bind_beside(sock, path)
            undo.callback(os.unlink, temporary)
            os.chmod(temporary, mode)
            if group is not None:
                os.chown(temporary, -1, grp.getgrnam(group).gr_gid)
            sock.listen(BACKLOG)
            os.rename(temporary, path)
        except KeyError as error:
            raise LlmgwError(
                f"cannot give the control socket {path} to the group {group}: there is no such group",
                f"make it with: groupadd --system {group}   or change supervisor.socket_group",
            ) from error
        except OSError as error:
            raise LlmgwError(f"cannot bind the control socket {path}: {error.strerror}") from error
        undo.pop_all()
    return ControlSocket(sock, path)


def take_over(fd: int, path: str | None) -> ControlSocket:
    """A listening socket by its descriptor: from systemd (`path` None, the file stays), or kept over an upgrade."""
    try:
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise LlmgwError(f"cannot take over descriptor {fd} as control socket: {error.strerror}") from error
    if sock.family != socket.AF_UNIX or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise LlmgwError(f"cannot take over descriptor {fd} as control socket: it is no listening unix socket")
    return ControlSocket(sock, path)


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
    control: ControlSocket, services: Services, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Answer on the control socket until cancelled. Closing it is left to the caller, who holds the locks."""
    api = Api(services)
    headers = {"llmgw-api": str(API), "llmgw-version": __version__}
    server = HttpServer(api.handle, headers=headers)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(api.keep_operations)
        await nursery.start(server.serve, control.sock)
        task_status.started()


def _is_replaceable(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        # Not there; or not to be seen, which binding will tell better.
        return True


def _bind_beside(sock: socket.socket, path: str) -> str:
    """Bind a name in the same folder that is no longer than the final one, so that it fits where that fits."""
    folder, name = os.path.split(path)
    while True:
        candidate = os.path.join(folder, ("." + secrets.token_hex(6))[: len(os.fsencode(name))])
        if len(name) == 1:
            candidate = os.path.join(folder, secrets.choice("0123456789abcdefghijklmnopqrstuvwxyz"))
        try:
            sock.bind(candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        return candidate


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
