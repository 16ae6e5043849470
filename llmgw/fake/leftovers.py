"""Names in /dev/shm and files in the temporary folder: what the engines create, and who removes it, or not."""

import mmap
import os
import socket
import tempfile

from llmgw.fake.knobs import Knobs

SHM = "/dev/shm"


class SharedNames:
    """Names in /dev/shm, mapped by the processes that use them; the owner shows in /proc/PID/maps only.

    SIGKILL leaves them; a clean end calls `remove`. `lasting` ones stay after a clean end too.
    """

    def __init__(self, knobs: Knobs, *, removed: list[str], lasting: list[str] | None = None) -> None:
        self._size = max(1, knobs.shm_bytes)
        self._removed = removed if knobs.shm else []
        self._lasting = (lasting or []) if knobs.shm else []
        self._maps: list[mmap.mmap] = []

    def create(self) -> None:
        """Make all files and map them into this process; children forked later share the mapping."""
        for name in self._removed + self._lasting:
            descriptor = os.open(f"{SHM}/{name}", os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(descriptor, self._size)
            self._maps.append(mmap.mmap(descriptor, self._size))
            os.close(descriptor)

    def remove(self) -> None:
        for name in self._removed:
            try:
                os.unlink(f"{SHM}/{name}")
            except FileNotFoundError:
                pass  # never created, or removed by somebody who swept


def random_name(length: int = 8) -> str:
    return os.urandom(16).hex()[:length]


def temp_file(knobs: Knobs, name: str) -> None:
    """An empty file in TMPDIR that nobody removes."""
    if knobs.temp_files:
        os.close(os.open(f"{tempfile.gettempdir()}/{name}", os.O_RDWR | os.O_CREAT, 0o600))


def ipc_socket(knobs: Knobs, folder: str) -> socket.socket | None:
    """An internal unix socket under a name of 36 characters. Raises OSError when the whole path is too long."""
    if not knobs.temp_files:
        return None
    ident = os.urandom(16).hex()
    name = "-".join((ident[:8], ident[8:12], ident[12:16], ident[16:20], ident[20:]))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"{folder}/{name}")
        sock.listen(8)
    except OSError:
        sock.close()
        raise
    return sock
