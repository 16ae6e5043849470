"""Where each key of a TOML text stands.

tomllib gives values without places, so this scanner walks over the same text and notes the offset of every key, every
value and every element of an array, by path (`("shard", 1, "gpus", 2)`). It never judges: tomllib has accepted the
text. On a text that tomllib refused it goes as far as it can, which is enough to find the first of two equal keys.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

from attrs import Factory, frozen

from llmgw.domain.problem import Path

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_LITERAL = re.compile(r"'([^'\n]*)'")
# A multi-line string may end in up to two quotes more than the three that close it.
_MULTI_BASIC = re.compile(r'"""(?:[^"\\]|\\[\s\S]|"(?!""))*"""(?:"{0,2})')
_MULTI_LITERAL = re.compile(r"'''(?:[^']|'(?!''))*'''(?:'{0,2})")
_TRIPLE = ('"""', "'''")
_STRINGS = {
    (False, '"'): _BASIC,
    (False, "'"): _LITERAL,
    (True, '"'): _MULTI_BASIC,
    (True, "'"): _MULTI_LITERAL,
}
_SCALAR = re.compile(r"[^,\]}#\n]+")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([btnfr\"\\]))")
_ESCAPED = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", '"': '"', "\\": "\\"}
MAX_DEPTH = 100
"""Nesting of arrays and inline tables that is followed; deeper values have the place of what holds them."""


class _Stop(Exception):
    """The text does not go on as TOML does."""


@frozen
class Span:
    """Offsets into the text: where the key stands, and from where to where its value does.

    A table made by a header has the header as key and value; an element of an array has itself as key.
    """

    key: int
    start: int
    end: int


@frozen
class Positions:
    """Spans by path, and the keys that were given twice: (path, first offset, second offset)."""

    text: str
    spans: dict[Path, Span] = Factory(dict)
    implied: dict[Path, Span] = Factory(dict)
    """Tables that exist because a header named one inside them: `[a.b]` implies `a`."""
    repeated: list[tuple[Path, int, int]] = Factory(list)
    line_starts: list[int] = Factory(list)

    def line_column(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both counted in characters from 1."""
        line = bisect_right(self.line_starts, offset)
        return line, offset - self.line_starts[line - 1] + 1

    def find(self, path: Path) -> Span | None:
        """The span of a path, else that of the nearest table or array around it."""
        for length in range(len(path), 0, -1):
            span = self.spans.get(path[:length]) or self.implied.get(path[:length])
            if span is not None:
                return span
        return None


def scan(text: str) -> Positions:
    """The places of all keys of `text`, whose line ends are `\\n`. Never raises."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    positions = Positions(text, line_starts=starts)
    try:
        _Scanner(positions).document()
    except (_Stop, RecursionError):
        pass
    return positions


class _Scanner:
    def __init__(self, positions: Positions) -> None:
        self.text = positions.text
        self.positions = positions
        self.at = 0
        self.last_index: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while True:
            self.skip(_GAP)
            if self.at >= len(self.text):
                return
            if self.text[self.at] == "[":
                table = self.header()
            else:
                self.assignment(table, 0)
            self.skip(_BLANK)
            if self.at < len(self.text) and self.text[self.at] not in "#\n":
                raise _Stop

    def header(self) -> Path:
        start = self.at
        brackets = "[[" if self.text.startswith("[[", start) else "["
        self.at += len(brackets)
        keys = [key for key, _ in self.keys()]
        self.expect("]" * len(brackets))
        if brackets == "[":
            path = self.inside(keys)
            self.imply(path, start)
            self.note(path, Span(start, start, self.at), repeats=True)
            return path
        array = (*self.inside(keys[:-1]), keys[-1])
        self.imply(array, start)
        index = self.last_index.get(array, -1) + 1
        self.last_index[array] = index
        self.positions.spans.setdefault(array, Span(start, start, self.at))
        path = (*array, index)
        self.note(path, Span(start, start, self.at))
        return path

    def imply(self, path: Path, start: int) -> None:
        for length in range(1, len(path)):
            self.positions.implied.setdefault(path[:length], Span(start, start, self.at))

    def inside(self, keys: list[str]) -> Path:
        """The path that a header's keys mean: an array of tables stands for its last table."""
        path: Path = ()
        for key in keys:
            path = (*path, key)
            if path in self.last_index:
                path = (*path, self.last_index[path])
        return path

    def assignment(self, table: Path, depth: int) -> None:
        keys = list(self.keys())
        self.expect("=")
        self.skip(_BLANK)
        path = table
        for key, offset in keys[:-1]:
            path = (*path, key)
            self.positions.spans.setdefault(path, Span(offset, offset, offset + len(key)))
        key, offset = keys[-1]
        self.value((*path, key), offset if len(keys) == 1 else keys[0][1], depth)

    def keys(self) -> Iterator[tuple[str, int]]:
        while True:
            self.skip(_BLANK)
            offset = self.at
            if match := self.take(_BASIC):
                yield _ESCAPE.sub(_unescape, match[1]), offset
            elif match := self.take(_LITERAL):
                yield match[1], offset
            elif match := self.take(_BARE_KEY):
                yield match[0], offset
            else:
                raise _Stop
            self.skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return
            self.at += 1

    def value(self, path: Path, key: int, depth: int) -> None:
        start = self.at
        if depth > MAX_DEPTH:
            raise _Stop
        opening = self.text[start : start + 1]
        # The span is noted before what is inside it, so that an error further on still finds the key.
        self.note(path, Span(key, start, start), repeats=True)
        if opening == "[":
            self.array(path, depth + 1)
        elif opening == "{":
            self.inline_table(path, depth + 1)
        elif opening in ('"', "'"):
            if self.take(_STRINGS[self.text[start : start + 3] in _TRIPLE, opening]) is None:
                raise _Stop
        elif self.take(_SCALAR) is None:
            raise _Stop
        else:
            while self.text[self.at - 1] in " \t":
                self.at -= 1
        if self.positions.spans[path].start == start:
            self.positions.spans[path] = Span(key, start, self.at)

    def array(self, path: Path, depth: int) -> None:
        self.at += 1
        index = 0
        while True:
            self.skip(_GAP)
            if self.text.startswith("]", self.at):
                break
            self.value((*path, index), self.at, depth)
            index += 1
            self.skip(_GAP)
            if not self.text.startswith(",", self.at):
                break
            self.at += 1
        self.expect("]")

    def inline_table(self, path: Path, depth: int) -> None:
        self.at += 1
        # Line breaks and a last comma are TOML 1.1; a reader that refuses them has spoken before.
        while True:
            self.skip(_GAP)
            if self.text.startswith("}", self.at):
                break
            self.assignment(path, depth)
            self.skip(_GAP)
            if not self.text.startswith(",", self.at):
                break
            self.at += 1
        self.expect("}")

    def note(self, path: Path, span: Span, *, repeats: bool = False) -> None:
        before = self.positions.spans.get(path)
        if before is None:
            self.positions.spans[path] = span
        elif repeats and before.key != span.key:
            self.positions.repeated.append((path, before.key, span.key))

    def skip(self, blank: re.Pattern[str]) -> None:
        match = blank.match(self.text, self.at)
        if match:
            self.at = match.end()

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def expect(self, mark: str) -> None:
        self.skip(_BLANK)
        if not self.text.startswith(mark, self.at):
            raise _Stop
        self.at += len(mark)


def _unescape(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    if code is None:
        return _ESCAPED[match[3]]
    number = int(code, 16)
    return chr(number) if number < 0x110000 else "\ufffd"
