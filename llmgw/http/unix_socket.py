"""Listening unix sockets: bound so that there is never a moment with a wrong mode, or bound but not listening."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import secrets
import socket
import stat

from llmgw.domain.problem import LlmgwError

BACKLOG = 128
PATH_MAX = 107
"""Bytes of a unix socket's path (unix(7)); measured: 107 binds, 108 does not."""


class UnixSocket:
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


def bind(
    path: str, *, what: str, setting: str, mode: int = 0o660, group: str | None = None, backlog: int = BACKLOG
) -> UnixSocket:
    """Listen at `path` in place of whatever socket is there. `what` it is and the `setting` that names it are for the
    errors. Raises LlmgwError.
    """
    size = len(os.fsencode(path))
    if size > PATH_MAX:
        raise LlmgwError(
            f"cannot bind {what} {path}: its path has {size} bytes, a socket's may have {PATH_MAX}",
            f"set {setting} to a shorter path",
        )
    if not _is_replaceable(path):
        raise LlmgwError(f"cannot bind {what} {path}: a file that is no socket stands there")
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
        try:
            temporary = _bind_beside(sock, path)
            undo.callback(os.unlink, temporary)
            os.chmod(temporary, mode)
            if group is not None:
                os.chown(temporary, -1, grp.getgrnam(group).gr_gid)
            sock.listen(backlog)
            os.rename(temporary, path)
        except KeyError as error:
            raise LlmgwError(
                f"cannot give {what} {path} to the group {group}: there is no such group",
                f"make it with: groupadd --system {group}   or change {setting}_group",
            ) from error
        except OSError as error:
            raise LlmgwError(f"cannot bind {what} {path}: {error.strerror}") from error
        undo.pop_all()
    return UnixSocket(sock, path)


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
