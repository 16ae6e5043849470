"""The bounded tail of one engine's output: bytes in, numbered lines out. Pure; `follow.py` brings the bytes.

Whatever an engine writes, the tail stays within its bounds: lines, bytes, length of a line, pinned lines. The result
does not depend on how the bytes were divided into chunks, only the times of arrival do.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator

from attrs import evolve, frozen

from llmgw.domain.display import hide

MARKER = "-- llmgw:"
"""Starts every line that llmgw itself puts between an engine's."""

PINNED = 32
"""Error lines kept at each end (the first ones and the newest ones) of a launch. A failed start of vLLM prints about
66 lines from the cause to the end, most of them a traceback of which only some are error lines."""

ERROR_WORDS = (b"rror", b"RROR", b"xception", b"raceback", b"atal", b"FATAL", b"abort")
"""What `scan` looks for in output that is not read line by line; `pin` decides about the lines that have one."""

HITS_PER_SCAN = 64
"""Lines of one scanned chunk that are shown to `pin`: a flood of errors costs no more than a flood of anything."""

SHOWN_WIDTH = 300
"""Characters of the last line that status shows."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


@frozen
class LogLine:
    """One line. `seq` grows by one with each; `at` is when it arrived, in seconds since the epoch."""

    seq: int
    at: float
    text: str
    cut: bool = False
    """The engine's line was longer; the rest was dropped."""
    own: bool = False
    """llmgw wrote it."""
    progress: bool = False
    """It was not ended by a newline (yet): a state of a progress bar, which the next line replaces in the tail."""


class LogTail:
    """The newest lines of an engine's output, of all launches of a shard since llmgw started.

    `max_bytes` and `line_max` count bytes as the engine wrote them. `pin(text)` says whether a line is kept beyond its
    time in the tail, `drop(text)` whether it is not worth a place (access lines of our own probes).
    """

    def __init__(
        self,
        max_lines: int,
        max_bytes: int,
        line_max: int,
        *,
        pin: Callable[[str], bool] = lambda _: False,
        drop: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.max_lines = max(1, max_lines)
        self.max_bytes = max_bytes
        self.line_max = max(1, line_max)
        self._pin = pin
        self._drop = drop
        self._lines: deque[tuple[LogLine, int]] = deque()
        self._bytes = 0
        self._sequence = 0
        self._evicted = 0
        self._rest = b""
        self._overlong = False
        self._open = False
        """The last line is a state of progress: what comes next replaces it."""
        self._first_pins: list[LogLine] = []
        self._newest_pins: deque[LogLine] = deque(maxlen=PINNED)
        self._launch = 0
        self._skip_shown = 0
        self.skipped = 0
        """Lines that were never read one by one, since the engine wrote faster than they could be."""
        self.last_text = ""
        """The engine's last line that is not empty."""
        self.secrets: tuple[str, ...] = ()
        """Texts of the present launch that `last_shown` leaves out, should the engine print them."""

    @property
    def last_shown(self) -> str:
        """The last line as status may show it: without secrets, not longer than a line should be."""
        return hide(self.last_text, self.secrets)[:SHOWN_WIDTH]

    # -- bytes in ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new launch: what was pinned belongs to the last one, and so do the lines so far."""
        self._first_pins.clear()
        self._newest_pins.clear()
        self._rest, self._overlong = b"", False
        self._close()
        self._launch = self._sequence
        self.last_text = ""

    def feed(self, data: bytes, at: float) -> tuple[LogLine, ...]:
        """Take bytes that arrived at `at`; return the lines they completed, of a progress series the newest."""
        fresh: list[LogLine] = []
        *complete, rest = data.split(b"\n")
        for line in complete:
            if b"\r" in line:
                line = self._feed_pieces(line, at, fresh)
            self._end(line, at, fresh, progress=False)
        if b"\r" in rest:
            rest = self._feed_pieces(rest, at, fresh)
        self._grow(rest)
        return tuple(fresh)

    def settle(self, at: float) -> tuple[LogLine, ...]:
        """Nothing came for a while: show the unterminated rest, for a bar whose next state may be minutes away."""
        fresh: list[LogLine] = []
        if self._rest:
            self._emit(self._rest, self._overlong, at, fresh, progress=True)
        return tuple(fresh)

    def flush(self, at: float) -> tuple[LogLine, ...]:
        """The engine is gone: the unterminated rest was its last line."""
        fresh: list[LogLine] = []
        if self._rest:
            self._end(b"", at, fresh, progress=False)
        self._close()
        return tuple(fresh)

    def scan(self, data: bytes, at: float) -> int:
        """Take bytes without reading them line by line; return how many lines were skipped.

        Lines that look like errors are pinned; for all others the tail shows one line with their number.
        """
        buffer = self._rest + data
        end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
        if not end:
            self._grow(data)
            return 0
        self._rest, self._overlong = b"", False
        self._grow(buffer[end:])
        for raw in _lines_with(buffer[:end], ERROR_WORDS, HITS_PER_SCAN):
            cut = len(raw) > self.line_max
            text = _decode(raw[: self.line_max], cut)
            if self._pin(text):
                self._sequence += 1
                self._keep_pinned(LogLine(self._sequence, at, text, cut))
        skipped = buffer.count(b"\n", 0, end)
        if skipped:
            self.skipped += skipped
            self._show_skipped(skipped, at)
        return skipped

    # -- lines out ---------------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """The number of the last line."""
        return self._sequence

    def read(self, after: int) -> tuple[int, tuple[LogLine, ...]]:
        """Lines with a number above `after`, and how many of those have fallen out meanwhile.

        Replaced states of a progress bar are among the latter when they lie before a line that fell out.
        """
        found: list[LogLine] = []
        for line, _ in reversed(self._lines):
            if line.seq <= after:
                break
            found.append(line)
        found.reverse()
        return max(0, self._evicted - after), tuple(found)

    @property
    def pinned(self) -> tuple[LogLine, ...]:
        """The first and the newest error lines of this launch."""
        return (*self._first_pins, *self._newest_pins)

    def evidence(self) -> tuple[str, ...]:
        """What a diagnosis reads: pinned lines that have left the tail, then the engine's lines of this launch."""
        kept = [line for line, _ in self._lines if line.seq > self._launch and not line.own]
        kept_numbers = {line.seq for line in kept}
        return (*(line.text for line in self.pinned if line.seq not in kept_numbers), *(line.text for line in kept))

    # -- inside ------------------------------------------------------------------------------------------

    def _feed_pieces(self, line: bytes, at: float, fresh: list[LogLine]) -> bytes:
        """End each piece before a carriage return; return what follows the last one."""
        *pieces, rest = line.split(b"\r")
        for piece in pieces:
            self._end(piece, at, fresh, progress=True)
        return rest

    def _grow(self, piece: bytes) -> None:
        if not piece:
            return
        rest = self._rest + piece if not self._overlong else self._rest
        if len(rest) > self.line_max:
            rest, self._overlong = rest[: self.line_max], True
        self._rest = rest

    def _end(self, piece: bytes, at: float, fresh: list[LogLine], *, progress: bool) -> None:
        self._grow(piece)
        raw, cut = self._rest, self._overlong
        self._rest, self._overlong = b"", False
        if raw:
            self._emit(raw, cut, at, fresh, progress=progress)
        elif not progress:
            if self._open:
                # "\r\n" is one end of a line, and a bar that ends with a newline is one line.
                self._close(fresh)
            else:
                self._emit(raw, cut, at, fresh, progress=False)

    def _emit(self, raw: bytes, cut: bool, at: float, fresh: list[LogLine], *, progress: bool) -> None:
        text = _decode(raw, cut)
        if self._drop(text):
            return
        if self._open:
            last, size = self._lines[-1]
            if last.text == text and last.cut == cut:
                if not progress:
                    self._close(fresh)
                return
            self._lines.pop()
            self._bytes -= size
            if fresh and fresh[-1].seq == last.seq:
                fresh.pop()
        self._sequence += 1
        own = text.startswith(MARKER)
        line = LogLine(self._sequence, at, text, cut, own, progress)
        self._append(line, len(raw))
        fresh.append(line)
        self._open = progress
        if not own:
            if text and not text.isspace():
                self.last_text = text
            if self._pin(text):
                self._keep_pinned(line)

    def _append(self, line: LogLine, size: int) -> None:
        self._lines.append((line, size))
        self._bytes += size
        self._skip_shown = 0
        # The newest line stays, even where it alone is larger than the tail may be: line_max bounds it.
        while len(self._lines) > self.max_lines or (self._bytes > self.max_bytes and len(self._lines) > 1):
            gone, size = self._lines.popleft()
            self._bytes -= size
            self._evicted = gone.seq

    def _close(self, fresh: list[LogLine] | None = None) -> None:
        if self._open:
            line, size = self._lines[-1]
            closed = evolve(line, progress=False)
            self._lines[-1] = (closed, size)
            self._open = False
            if fresh and fresh[-1].seq == closed.seq:
                fresh[-1] = closed

    def _keep_pinned(self, line: LogLine) -> None:
        if len(self._first_pins) < PINNED:
            self._first_pins.append(line)
        else:
            self._newest_pins.append(line)

    def _show_skipped(self, count: int, at: float) -> None:
        self._close()
        total = self._skip_shown + count
        if self._skip_shown:
            _, size = self._lines.pop()
            self._bytes -= size
        self._sequence += 1
        text = f"{MARKER} {total} lines skipped, the engine writes too fast --"
        self._append(LogLine(self._sequence, at, text, own=True), len(text))
        self._skip_shown = total


def _decode(raw: bytes, cut: bool) -> str:
    """UTF-8 with replacement characters. A character that the cut went through is left out."""
    # No byte of a longer character is a newline, so a whole line may be decoded by itself.
    return _UTF8("replace").decode(raw, final=not cut)


def _lines_with(body: bytes, words: tuple[bytes, ...], limit: int) -> Iterator[bytes]:
    """Lines of `body` that contain one of the words, in order, at most `limit`.

    Several passes of bytes.find beat one regular expression here by an order of magnitude.
    """
    starts: set[int] = set()
    for word in words:
        position = 0
        for _ in range(limit):
            position = body.find(word, position)
            if position < 0:
                break
            start = body.rfind(b"\n", 0, position) + 1
            starts.add(max(start, body.rfind(b"\r", start, position) + 1))
            end = body.find(b"\n", position)
            position = end if end >= 0 else len(body)
    for start in sorted(starts)[:limit]:
        end = body.find(b"\n", start)
        line = body[start : end if end >= 0 else len(body)]
        yield line.split(b"\r", 1)[0]
