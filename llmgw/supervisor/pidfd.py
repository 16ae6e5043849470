"""One process held by a descriptor: waiting for its death, and signals that cannot reach anybody else.

A pidfd stays bound to its process when the number is reused, and becomes readable when the last thread has ended,
for children, strangers and zombies alike (measured).
"""

from __future__ import annotations

import os
import select
import signal

import trio

from llmgw.supervisor.procfs import read_stat


def open_verified(pid: int, start_ticks: int) -> int | None:
    """A pidfd of exactly this process, None when it is gone or the number is another's.

    The descriptor comes first and the start time is read after it: from then on both speak of one process. Raises
    OSError when descriptors have run out.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stat = read_stat(pid)
    if stat is None or stat.start != start_ticks:
        os.close(fd)
        return None
    return fd


def has_exited(fd: int, *, within: float = 0.0) -> bool:
    """Whether the process is dead, all its threads included; blocks for at most `within` seconds."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within * 1000))


async def wait_exited(fd: int) -> None:
    """Return when the process is dead. Any number of tasks may wait for one process.

    Each waits on a duplicate, since a descriptor takes one waiter in trio.
    """
    own = os.dup(fd)
    try:
        await wait_exited_alone(own)
    finally:
        os.close(own)


async def wait_exited_alone(fd: int) -> None:
    """`wait_exited` for a descriptor that nobody else waits for.

    A wake-up proves nothing: trio takes no closed descriptor out of its epoll, and the kernel keeps the entry of a
    duplicate while the original is open. When that process is reaped, its entry wakes whoever waits under the same
    number by then, with another process in mind (measured with Linux 6.18).
    """
    while True:
        await trio.lowlevel.wait_readable(fd)
        if has_exited(fd):
            return


def send(fd: int, number: signal.Signals) -> str | None:
    """Signal the process behind a pidfd. None: delivered or dead already; else the reason why not."""
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return None
    except OSError as error:
        return f"{number.name} refused: {error.strerror}"
    return None


def send_verified(pid: int, start_ticks: int, number: signal.Signals) -> str | None:
    """Signal the process with this number and start time and no other one. Answers as `send` does."""
    try:
        fd = open_verified(pid, start_ticks)
    except OSError as error:
        return f"{number.name} not sent: {error.strerror}"
    if fd is None:
        return None
    try:
        return send(fd, number)
    finally:
        os.close(fd)
