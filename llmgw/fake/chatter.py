"""The log of the Python engines: who writes where, progress bars, banners, and lines that only look like errors."""

import os
import time
from collections.abc import Callable

from llmgw.fake.knobs import Knobs
from llmgw.fake.loop import Loop, write_all

SHARDS = 4
ENDLESS_SHARDS = 1000
ENDLESS_STEP = 0.2
"""Seconds between two steps of a bar that goes on for ever (plain seconds)."""


def stdout(text: str) -> None:
    write_all(1, text.encode() + b"\n")


def stderr(text: str) -> None:
    write_all(2, text.encode() + b"\n")


class VllmLog:
    """`(Name pid=N) LEVEL MM-DD HH:MM:SS [file.py:line] text` on stdout."""

    def __init__(self, process: str) -> None:
        self._process = process

    def line(self, level: str, text: str, where: str = "core.py:113") -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        stdout(f"{self.prefix}{level} {stamp} [{where}] {text}")

    def info(self, text: str, where: str = "core.py:113") -> None:
        self.line("INFO", text, where)

    def error(self, text: str, where: str = "core.py:1099") -> None:
        self.line("ERROR", text, where)

    def access(self, client: str, method: str, target: str, status: int, reason: str) -> None:
        stdout(f'{self.prefix}INFO:     {client} - "{method} {target} HTTP/1.1" {status} {reason}')

    @property
    def prefix(self) -> str:
        return f"({self._process} pid={os.getpid()}) "


class SglangLog:
    """`[YYYY-MM-DD HH:MM:SS] text` on stderr, without a level; with several ranks `[... TP0] text`."""

    def __init__(self, rank: str = "") -> None:
        self._rank = f" {rank}" if rank else ""

    def line(self, text: str) -> None:
        stderr(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}{self._rank}] {text}")


def vllm_banner(log: VllmLog) -> None:
    """The logo: UTF-8 block characters, lines that end in CR LF."""
    rows = ("       █     █     █▄   ▄█", " ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0", "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀")
    for row in rows:
        write_all(1, f"{log.prefix}{row}\r\n".encode())


def ulimit_warning(log: VllmLog) -> None:
    """In every start: looks like an error and is none."""
    log.line(
        "WARNING",
        "Found ulimit of 1024 and failed to automatically increase with error current limit exceeds maximum limit. "
        "This can cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider ulimit -n",
        "system_utils.py:257",
    )


def filler(write: Callable[[str], None], count: int) -> None:
    for number in range(count):
        write(f"Resolved setting {number}: default value kept, nothing to see here")


def long_line(write: Callable[[str], None], size: int, name: str) -> None:
    """One line of about `size` bytes, like a dump of all arguments."""
    item = "some_argument_of_the_server=None, "
    write(f"{name}=ServerArgs({item * (max(0, size) // len(item))})")


def bad_bytes(descriptor: int) -> None:
    write_all(descriptor, b"model card says: caf\xe9 \xff\xfe \x80 and \x1b[31mred\x1b[0m\n")


def nanobind_noise() -> None:
    """After every exit, clean or not."""
    stderr("nanobind: leaked 3 instances!")
    for number in range(33):
        stderr(f' - leaked instance 0x7f{number:010x} of type "engine.native.Type{number}"')
    stderr("nanobind: leaked 2 types!")
    stderr("nanobind: this is likely caused by a reference counting issue in the binding code.")


def tracker_noise(leaked: int = 1) -> None:
    stderr(
        "/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to "
        f"be {leaked} leaked shared_memory objects to clean up at shutdown"
    )
    stderr("  warnings.warn('resource_tracker: There appear to be %d '")


class ProgressBar:
    """A tqdm-like bar on stderr: fragments ended by a carriage return, no line end before the last one."""

    def __init__(self, loop: Loop, knobs: Knobs, label: str) -> None:
        self._loop = loop
        self._knobs = knobs
        self._label = label

    def run(self, seconds: float) -> None:
        """Go from nothing to the end in so many seconds; with --fake-never-ready step on for ever."""
        mode = self._knobs.progress
        if mode == "silent":
            return
        if self._knobs.never_ready:
            self._endless(1)
        elif mode == "bar" and self._knobs.progress_writes == "one-write":
            whole = b"".join(self._fragment(number, SHARDS) for number in range(SHARDS + 1))
            self._loop.call_later(seconds, lambda: write_all(2, whole + b"\n"))
        else:
            for number in range(SHARDS + 1):
                self._loop.call_later(seconds * number / SHARDS, self._step(number))

    def _step(self, number: int) -> Callable[[], None]:
        return lambda: self._write(self._fragment(number, SHARDS), last=number == SHARDS)

    def _endless(self, number: int) -> None:
        self._write(self._fragment(min(number, ENDLESS_SHARDS), ENDLESS_SHARDS), last=False)
        self._loop.call_later(ENDLESS_STEP, lambda: self._endless(number + 1))

    def _write(self, fragment: bytes, *, last: bool) -> None:
        if self._knobs.progress_writes == "split":
            # Cut inside the percentage, so that a reader that parses what it has sees a wrong number.
            cut = fragment.index(b"%") - 1
            write_all(2, fragment[:cut])
            time.sleep(0.005)
            fragment = fragment[cut:]
        write_all(2, fragment + (b"\n" if last and self._knobs.progress == "bar" else b""))

    def _fragment(self, done: int, total: int) -> bytes:
        percent = 100 * done // total
        end = "\r" if self._knobs.progress == "bar" else "\n"
        times = f"00:{done:02}<00:{total - done:02}, 1.0s/it"
        return f"{self._label}: {percent:3}% Completed | {done}/{total} [{times}]{end}".encode()
