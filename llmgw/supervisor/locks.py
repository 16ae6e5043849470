"""Who is the supervisor: flocks on `lock` in the state and in the runtime directory, and nothing else.

The kernel releases them when the holder dies, so there is no stale lock. The pid inside is for people.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import MutableMapping, Sequence

from llmgw.domain.problem import LlmgwError, OwnedByAnother
from llmgw.supervisor.durable import make_private_folder

INHERITED = "LLMGW_LOCK_FDS"
"""Over an upgrade in place: the numbers of the descriptors that hold the locks."""


class Locks:
    """Held from `take` until `release` or the end of the process."""

    def __init__(self, fds: dict[str, int]) -> None:
        self._fds = fds

    @classmethod
    def take(cls, folders: Sequence[str], env: MutableMapping[str, str] | None = None) -> Locks:
        """Lock every folder or none. Raises OwnedByAnother with the holder's pid, LlmgwError for a folder that
        cannot be written.

        Locks that an earlier self passed on in `env` are taken over, and their variable is removed from it.
        """
        inherited = _inherited_fds(env)
        held: dict[str, int] = {}
        try:
            for folder in folders:
                path = os.path.join(os.path.realpath(folder), "lock")
                if path not in held:
                    held[path] = _take(path, folder, inherited)
        except BaseException:
            for fd in held.values():
                os.close(fd)
            raise
        return cls(held)

    def pass_on(self) -> dict[str, str]:
        """Let the locks survive an exec; the variables that the new program needs in its environment."""
        for fd in self._fds.values():
            # A lock on a close-on-exec descriptor is gone after the exec (measured).
            os.set_inheritable(fd, True)
        return {INHERITED: ",".join(str(fd) for fd in self._fds.values())}

    def keep(self) -> None:
        """Take `pass_on` back: the exec failed."""
        for fd in self._fds.values():
            os.set_inheritable(fd, False)

    def release(self) -> None:
        """The files stay: a lock file that is removed can be locked twice."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}


def _take(path: str, folder: str, inherited: Sequence[int]) -> int:
    while True:
        fd = _open(path, folder, inherited)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _read_pid(fd)
            os.close(fd)
            who = f"another llmgw (pid {pid})" if pid is not None else "another llmgw"
            raise OwnedByAnother(
                f"{who} owns {folder}", "stop that one, or give this one its own state_dir and runtime_dir"
            ) from None
        if _is_same(fd, path):
            break
        # Somebody cleaned the folder up between the opening and the lock.
        os.close(fd)
    os.set_inheritable(fd, False)
    try:
        text = f"{os.getpid()}\n".encode()
        # In this order who is refused meanwhile never reads nothing.
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))
    except OSError:
        # A full disk: the lock holds without its text.
        pass
    return fd


def _open(path: str, folder: str, inherited: Sequence[int]) -> int:
    for fd in inherited:
        if _is_same(fd, path):
            return fd
    try:
        make_private_folder(os.path.dirname(path))
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LlmgwError(
            f"cannot lock {folder}: {error.strerror}", "make it writable for llmgw, or set another folder"
        ) from error


def _inherited_fds(env: MutableMapping[str, str] | None) -> list[int]:
    text = env.pop(INHERITED, "") if env is not None else ""
    return [int(number) for number in text.split(",") if number.isdecimal()]


def _is_same(fd: int, path: str) -> bool:
    try:
        one, other = os.fstat(fd), os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _read_pid(fd: int) -> int | None:
    try:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
