"""Reading /proc: who is there, whose child, alive or dead. Never signals, never waits.

An error while reading means "not known" and never "not there"; each function says which of the two it returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from attrs import frozen

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@frozen
class Stat:
    """The fields of /proc/PID/stat that decide. `start` is in clock ticks since boot (field 22)."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    start: int


@frozen
class ProcessId:
    """What identifies a process for good. A pid alone is reused, ticks alone mean nothing after a reboot."""

    boot_id: str
    pid: int
    start_ticks: int


def boot_id() -> str:
    """The id of this boot; raises OSError where /proc is not mounted."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def ticks_now() -> int:
    """Now, on the clock that start times are counted in."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * CLOCK_TICKS)


def parse_stat(text: str) -> Stat | None:
    """One line of /proc/PID/stat. `comm` may hold blanks and brackets: the fields count from the last `)`."""
    head, bracket, tail = text.rpartition(")")
    pid, opened, comm = head.partition(" (")
    fields = tail.split()
    if not bracket or not opened or len(fields) < 20:
        return None
    try:
        return Stat(int(pid), comm, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))
    except ValueError:
        return None


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process or it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return parse_stat(file.read().decode(errors="replace"))
    except OSError:
        return None


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process or zombie, None when there is none."""
    stat = read_stat(pid)
    return ProcessId(boot_id(), pid, stat.start) if stat is not None else None


def all_pids() -> Iterator[int]:
    """Every process that /proc shows."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal():
                yield int(entry.name)


def is_dead(stat: Stat) -> bool:
    """True when no thread of it lives.

    State Z speaks of the main thread alone: with another thread alive the process goes on, also as a server
    (measured), so each thread is asked.
    """
    if stat.state not in "ZX":
        return False
    try:
        threads = os.listdir(f"/proc/{stat.pid}/task")
    except OSError:
        return True
    return all(_thread_state(stat.pid, thread) in "ZX" for thread in threads)


def _thread_state(pid: int, thread: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            stat = parse_stat(file.read().decode(errors="replace"))
    except OSError:
        return "X"
    return stat.state if stat is not None else "?"


def environment_value(pid: int, name: str) -> str | None:
    """A variable of the environment it was started with. None also when that is wiped or may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = b"\0" + file.read()
    except OSError:
        return None
    _, found, rest = data.partition(f"\0{name}=".encode())
    return rest.partition(b"\0")[0].decode(errors="replace") if found else None


def children_of(pid: int) -> set[int] | None:
    """The pids of a process's children, zombies included; None where the kernel has no list of them.

    Cheap, and good for a hint: the kernel may leave some out while others come and go.
    """
    found: set[int] = set()
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.update(int(child) for child in file.read().split())
        except FileNotFoundError:
            # Either the thread has ended, or the kernel was built without CONFIG_PROC_CHILDREN.
            if os.path.exists(f"/proc/{pid}/task/{thread}"):
                return None
        except OSError:
            continue
    return found


def own_children() -> set[int]:
    """The pids of this process's children, zombies included."""
    me = os.getpid()
    found = children_of(me)
    if found is not None:
        return found
    return {pid for pid in all_pids() if (stat := read_stat(pid)) is not None and stat.ppid == me}
