"""Bytes of one file in, its values and their places out; a syntax error becomes a problem with a hint."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from attrs import field, frozen

from llmgw.config.positions import MAX_DEPTH, Positions, scan
from llmgw.domain.problem import Path, Problem, Where
from llmgw.domain.secret_names import line_sounds_secret

MAX_FILE = 4 << 20
"""Bytes. A configuration is typed by people; more is a mistaken path."""


@frozen
class SourceFile:
    """A file as the shell read it. `path` is what messages show, `folder` what relative paths in it begin from."""

    path: str
    data: bytes
    folder: str = "/"
    real: str | None = None
    """Absolute path without links: the same file twice is found by it, and its mode is asked by it."""
    included_at: Path | None = None
    """The element of `include` in the main file that led here."""


@frozen
class Document:
    """One file after reading. `raw` is empty when the text is no TOML."""

    file: SourceFile
    text: str
    raw: dict[str, Any] = field(factory=dict)
    positions: Positions = field(factory=lambda: Positions(""))
    problems: tuple[Problem, ...] = ()

    def where(self, path: Path, *, at_key: bool = False) -> Where:
        """The place of a value, or of its key; of the table around it when the value is not in the text."""
        span = self.positions.find(path)
        if span is None:
            return Where(self.file.path, path=path)
        line, column = self.positions.line_column(span.key if at_key else span.start)
        return Where(self.file.path, line, column, path)

    def line(self, path: Path) -> str:
        """`file:line` of a key."""
        where = self.where(path, at_key=True)
        return self.file.path if where.line is None else f"{where.file}:{where.line}"


def read_document(file: SourceFile) -> Document:
    """Decode and parse one file. Never raises; what is wrong stands in `problems`."""
    data = file.data
    if len(data) > MAX_FILE:
        message = f"the file has {len(data)} bytes; {MAX_FILE} are the most"
        return Document(file, "", problems=(Problem("file-too-large", message, where=Where(file.path)),))
    if data.startswith(b"\xef\xbb\xbf"):
        message = "the file begins with a byte order mark"
        text = data.decode("utf-8", "replace")[1:]
        problem = Problem("syntax", message, "save the file as UTF-8 without byte order mark", Where(file.path, 1, 1))
        return Document(file, text, problems=(problem,))
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        nth = error.start - (before.rfind(b"\n") + 1) + 1
        message = f"byte {nth} in line {line} is not UTF-8 (0x{data[error.start]:02x})"
        problem = Problem("syntax", message, "save the file as UTF-8", Where(file.path, line, column))
        return Document(file, data.decode("utf-8", "replace"), problems=(problem,))
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return Document(file, text, problems=(_syntax_problem(file, text, str(error)),))
    except (RecursionError, ValueError, OverflowError) as error:
        # Nesting of thousands of brackets; a date such as 2024-13-45 or a number of thousands of digits.
        why = "values are nested too deeply" if isinstance(error, RecursionError) else "a value that cannot be read"
        return Document(file, text, problems=(Problem("syntax", why, where=Where(file.path, 1, 1)),))
    if _depth(raw) > MAX_DEPTH:
        problem = Problem("syntax", "values are nested too deeply", where=Where(file.path, 1, 1))
        return Document(file, text, problems=(problem,))
    return Document(file, text, raw, scan(text))


_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def _syntax_problem(file: SourceFile, text: str, told: str) -> Problem:
    found = _PLACE.search(told)
    message = told[: found.start()] if found else told
    positions = scan(text)
    offset = len(text)
    if found and found[1]:
        line_start = positions.line_starts[min(int(found[1]), len(positions.line_starts)) - 1]
        offset = min(line_start + int(found[2]) - 1, len(text))
    message, hint, offset = _explained(text, positions, message, offset)
    line, column = positions.line_column(offset)
    return Problem("syntax", message, hint, Where(file.path, line, column))


_WORD = re.compile(r"[^\s,\]}#]+")
_BOOLEANS = {"yes": "true", "no": "false", "on": "true", "off": "false", "True": "true", "False": "false"}
_ASSIGNMENT = re.compile(r"""^[ \t]*(?:[A-Za-z0-9_.-]|"[^"\n]*"|'[^'\n]*'|[ \t])+=[ \t]*""")


def _explained(text: str, positions: Positions, told: str, offset: int) -> tuple[str, str | None, int]:
    """Message, hint and a better place for one of tomllib's bare texts, by what stands there."""
    before = text[:offset]
    if "Cannot overwrite" in told or "Cannot declare" in told or "Cannot mutate" in told or "duplicate" in told.lower():
        return _repeated(positions, told, offset)
    line_start = before.rfind("\n") + 1
    line_end = text.find("\n", line_start)
    line = text[line_start : line_end if line_end >= 0 else len(text)]
    if not line.strip() and before.strip():
        # The place can be the start of the line after the fault, or the end of the document.
        offset = len(before.rstrip())
        line_start = text.rfind("\n", 0, offset) + 1
        line = text[line_start:offset]
    assigned = _ASSIGNMENT.match(line)
    if unclosed := _unclosed(text, positions):
        begun, kind = unclosed
        where = positions.line_column(begun)[0]
        if kind == "string":
            return "a string is not closed", f"the string begun in line {where} needs its closing quote", begun
        if told.startswith("Unclosed") or offset >= len(text.rstrip()):
            return f"a {kind} is not closed", f"the {kind} begun in line {where} needs its closing bracket", begun
    if assigned is None:
        if "=" not in line and not line.lstrip().startswith("["):
            return told, "a line is KEY = VALUE, [TABLE] or [[TABLE]]", offset
        return told, None, offset
    begin = line_start + assigned.end()
    word_match = _WORD.match(text, begin)
    word = word_match[0] if word_match else ""
    if not word:
        return "a value is missing", 'write KEY = VALUE; an empty string is ""', begin
    if line_sounds_secret(line) or any(quote in line for quote in "\"'"):
        if word[0] in "\"'[{":
            return told, None, offset
        return "this is not a TOML value", "strings need quotes", begin
    if word in _BOOLEANS:
        return f"{word} is not a TOML value", f"booleans are true and false: write {_BOOLEANS[word]}", begin
    if re.fullmatch(r"0[0-9]+", word):
        hint = f'modes are strings: "{word}"' if re.fullmatch("0?[0-7]{3,4}", word) else "remove the zero in front"
        return f"{word} is not a TOML number", hint, begin
    if re.fullmatch(r"[~/.A-Za-z0-9_$][^\"'\[\]{}=]*", word):
        rest = line[assigned.end() :].split("#")[0].strip()
        if _LIKE_A_KEY.search(rest):
            return "this is not a TOML value", "strings need quotes", begin
        return f"{_cut(rest)} is not a TOML value", f'strings need quotes: "{_cut(rest)}"', begin
    return told, None, offset


_LIKE_A_KEY = re.compile(r"[A-Za-z0-9_+=-]{16,}")
"""What may be a secret under a name that does not sound like one: not repeated in a message."""


def _cut(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _repeated(positions: Positions, told: str, offset: int) -> tuple[str, str | None, int]:
    candidates = [r for r in positions.repeated if r[2] <= offset]
    if not candidates:
        return told, None, min(offset, max(len(positions.text.rstrip()) - 1, 0))
    path, first, second = candidates[-1]
    name = ".".join(str(step) for step in path if isinstance(step, str))
    line = positions.line_column(first)[0]
    if positions.text.startswith("[", second):
        return f"table [{_cut(name)}] is declared twice", f"first in line {line}; for more than one write [[…]]", second
    return f'key "{_cut(name)}" is given twice', f"first given in line {line}; remove one", second


def _unclosed(text: str, positions: Positions) -> tuple[int, str] | None:
    """Where the last value that the scanner could not finish begins, and what it is."""
    unfinished = [span for span in positions.spans.values() if span.end == span.start]
    if not unfinished:
        return None
    last = max(unfinished, key=lambda span: span.start)
    kinds = {'"': "string", "'": "string", "[": "list", "{": "table"}
    kind = kinds.get(text[last.start : last.start + 1])
    return None if kind is None else (last.start, kind)


def _depth(raw: Any) -> int:
    """How deeply tables and lists are nested, counted without recursion."""
    deepest = 0
    left = [(raw, 1)]
    while left:
        value, depth = left.pop()
        deepest = max(deepest, depth)
        if isinstance(value, dict):
            left += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            left += [(inner, depth + 1) for inner in value]
    return deepest
