"""What setproctitle does to a process, without the package: new command line, new comm, a wiped environment.

The kernel shows as command line and environment whatever stands in two areas of the process's own stack; they
are simply overwritten. `SPT_NOENV=1` keeps the environment, as with the package.
"""

import ctypes
import os

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Show `title`, padded with NULs, and wipe the environment (what /proc shows, not `os.environ`)."""
    _overwrite(title.encode())
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, title.encode()[:15], 0, 0, 0)


def set_spawned(title: str = "") -> None:
    """Show the command line of a Python child that multiprocessing has just spawned; the environment stays."""
    _overwrite(
        title.encode() or b"python3\0-c\0from multiprocessing.spawn import spawn_main\0--multiprocessing-fork", False
    )


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this signal when the parent ends (PDEATHSIG)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _overwrite(title: bytes, wipe: bool = True) -> None:
    arg_start, arg_end, env_start, env_end = _areas()
    room = arg_end - arg_start
    if not 0 < room < 1 << 22:
        return
    shown = title[: room - 1]
    ctypes.memmove(arg_start, shown + b"\0" * (room - len(shown)), room)
    if wipe and os.environ.get("SPT_NOENV") is None:
        size = env_end - env_start
        ctypes.memmove(env_start, b"\0" * size, size)


def _areas() -> tuple[int, int, int, int]:
    """Fields 48 to 51 of /proc/self/stat, counted behind the last bracket: comm may contain any character."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[45]), int(fields[46]), int(fields[47]), int(fields[48])
