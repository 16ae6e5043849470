"""Files that are either the old ones or the new ones, also after a crash of the host."""

from __future__ import annotations

import contextlib
import os


def write_durably(path: str, data: bytes) -> None:
    """Replace `path` atomically, mode 0600; on return file and name are on disk. OSError: nothing has changed."""
    folder = os.path.dirname(path)
    make_private_folder(folder)
    temporary = f"{path}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


def remove_durably(path: str) -> None:
    """Remove a file for good; one that is not there is fine. Raises OSError otherwise."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    sync_folder(os.path.dirname(path))


def read_bounded(path: str, limit: int) -> bytes:
    """The whole of a regular file. Raises OSError, or ValueError when it is larger than `limit` bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    return data


def make_private_folder(path: str) -> None:
    """Make a folder and those above it, mode 0700. An existing one keeps its mode."""
    os.makedirs(path, mode=0o700, exist_ok=True)


def sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
