"""llmgw's own log, on standard error. It waits for nobody who does not read.

A terminal that is paused with Ctrl-S, or a pipe to a program that has stopped, would otherwise stop the event loop
with the next line, and with it everything that looks after the engines.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Mapping

KEPT = 256 * 1024
"""Bytes of lines that wait for a reader; what is older goes, and is counted."""

PIECE = 4096
"""Bytes that one write may have: what is reported writable takes as many without waiting (PIPE_BUF, pipe(7))."""

LAST_WORDS = 1.0
"""Seconds that a slow reader gets at the end."""

LEVEL = "LLMGW_LOG_LEVEL"

ACCESS = "llmgw.access"
"""The logger of the access log: each of its lines is a JSON object, and stands for itself."""


class PatientHandler(logging.Handler):
    """Writes to a descriptor what it takes at once. The rest waits for the next line, or for logging's shutdown."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  (a line that cannot be formatted must not break who wrote it)
            text = f"{record.levelname} {record.msg!r} {record.args!r}"
        self._add(f"{text}\n".encode("utf-8", "backslashreplace"))
        self._write()

    def flush(self, patience: float = LAST_WORDS) -> None:
        """Write what waits, for at most `patience` seconds."""
        deadline = time.monotonic() + patience
        self.acquire()
        try:
            while self._write() and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            self.release()

    def _add(self, line: bytes) -> None:
        self._waiting.append(line)
        self._size += len(line)
        while self._size > KEPT and len(self._waiting) > 1:
            self._size -= len(self._waiting.popleft())
            self._lost += 1

    def _write(self) -> bool:
        """Write while it is taken; True when something waits still."""
        while self._waiting:
            if not self._takes():
                return True
            if self._lost:
                note = f"({self._lost} lines of llmgw's log were lost: nobody read them)\n".encode()
                self._lost = 0
                self._waiting.appendleft(note)
                self._size += len(note)
            line = self._waiting.popleft()
            self._size -= len(line)
            try:
                written = os.write(self._fd, line[:PIECE])
            except BlockingIOError:
                written = 0
            except OSError:
                # Closed, or its reader has gone: nobody will ever read it.
                written = len(line)
            if written < len(line):
                self._waiting.appendleft(line[written:])
                self._size += len(line) - written
                if not written:
                    return True
        return False

    def _takes(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))


class Format(logging.Formatter):
    """One line per record; below systemd with the priority in front, which the journal understands."""

    PRIORITIES: Mapping[int, int] = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}

    def __init__(self, journal: bool) -> None:
        super().__init__("%(message)s" if journal else "%(asctime)s %(levelname).1s %(message)s", "%m-%d %H:%M:%S")
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage() if record.name == ACCESS else super().format(record)
        if not self._journal:
            return text
        priority = self.PRIORITIES.get(record.levelno, 5)
        return "\n".join(f"<{priority}>{line}" for line in text.splitlines())


def set_up_logging(env: Mapping[str, str]) -> None:
    """llmgw's own log goes to stderr; systemd or the terminal takes it from there."""
    handler = PatientHandler()
    handler.setFormatter(Format(journal="JOURNAL_STREAM" in env))
    root = logging.getLogger("llmgw")
    root.handlers[:] = [handler]
    root.propagate = False
    level = env.get(LEVEL, "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        root.setLevel("INFO")
        root.warning("%s is %r, which is no level; it is INFO now. Known are DEBUG, INFO, WARNING, ERROR", LEVEL, level)
        return
    root.setLevel(level)
